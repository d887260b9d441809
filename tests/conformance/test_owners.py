"""Other managers of devices: real sockets, real processes, and names that tenants choose."""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from alloy_agent.conformance.checks.shapes import OwnerFact
from alloy_agent.conformance.collect import collect_host
from alloy_agent.conformance.owners import as_owners, find_owners
from alloy_agent.host.processes import ProcessInfo
from alloy_agent.model import Vendor
from tests.conformance.world import SNAPSHOT


def process(comm: str, pid: int = 40, uid: int = 0) -> ProcessInfo:
    """Return a process of a name."""
    return ProcessInfo(
        pid=pid,
        start_ticks=1,
        ppid=1,
        comm=comm,
        uid=uid,
        state="S",
        kernel_thread=False,
        cgroups={},
        cpus_allowed=(0,),
        last_cpu=0,
        cpu_ticks=0,
        thread_count=1,
    )


def listen(path: Path) -> socket.socket:
    """Return a listening socket at a path (its folder is made)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(path))
    server.listen(1)
    return server


@pytest.fixture
def short() -> Iterator[Path]:
    """Yield a folder whose path leaves room for the 108 bytes of a socket's address."""
    with tempfile.TemporaryDirectory(prefix="own", dir="/tmp") as name:
        yield Path(name)


def test_sockets_of_kubelet_plugins_are_found(short: Path) -> None:
    """Device plug-ins and DRA drivers count while they listen; leftovers and our own do not."""
    kubelet = short / "var/lib/kubelet"
    servers = [
        listen(kubelet / "device-plugins/kubelet.sock"),
        listen(kubelet / "device-plugins/nvidia-gpu.sock"),
        listen(kubelet / "plugins/gpu.nvidia.com/dra.sock"),
        listen(kubelet / "plugins_registry/gpu.amd.com-reg.sock"),
        listen(kubelet / "plugins/alloy.nvidia/dra.sock"),
        listen(kubelet / "device-plugins/rdma.sock"),
        listen(kubelet / "device-plugins/neuron.sock"),
    ]
    servers.pop().close()
    owners = find_owners((), host_root=str(short))
    for server in servers:
        server.close()
    found = {(o.name, Path(o.evidence.removeprefix("socket ")).name, o.rival) for o in owners}
    assert found == {
        ("kubelet device plug-in", "nvidia-gpu.sock", True),
        ("kubelet plug-in (DRA)", "dra.sock", True),
        ("kubelet plug-in registration", "gpu.amd.com-reg.sock", True),
        ("kubelet device plug-in", "neuron.sock", False),
    }
    left = next(owner for owner in owners if not owner.rival)
    assert left.note == "nobody listens on it any more"
    assert left.vendors == (Vendor.NEURON,)


@pytest.mark.parametrize(
    ("comm", "name", "rival"),
    [
        ("slurmd", "slurmd", True),
        ("nvidia-device-p", "NVIDIA device plug-in", True),
        ("nvidia-mig-mana", "nvidia-mig-manager", True),
        ("nvidia-mig-part", "mig-parted", True),
        ("vGPUmonitor", "HAMi", True),
        ("nv-hostengine", "DCGM", False),
        ("nvidia-persiste", "nvidia-persistenced", False),
        ("nvidia-cuda-mps", "MPS", False),
    ],
)
def test_programs_are_known_by_name(comm: str, name: str, rival: bool) -> None:
    """Each known program of root is found by what the kernel shows of its name."""
    (owner,) = find_owners([process(comm)])
    assert (owner.name, owner.rival) == (name, rival)
    assert len(comm) <= 15


def test_a_tenant_cannot_pose_as_a_manager() -> None:
    """A process of another user, or inside of a partition, is not taken by its name."""
    assert find_owners([process("slurmd", uid=1000)]) == ()
    assert find_owners([process("slurmd", pid=77)], inside=frozenset({77})) == ()


@pytest.mark.parametrize(
    ("content", "found"),
    [
        ('{"policyName":"static"}', True),
        ('{"policyName":"none"}', False),
        ("[]", False),
        ("{", False),
        ("", False),
    ],
)
def test_kubelets_static_cpu_policy_owns_the_cpu(tmp_path: Path, content: str, found: bool) -> None:
    """The static policy pins pods to cores; any other content of the state file does not."""
    folder = tmp_path / "var/lib/kubelet"
    folder.mkdir(parents=True)
    (folder / "cpu_manager_state").write_text(content)
    owners = find_owners((), host_root=str(tmp_path))
    assert bool(owners) is found
    assert all(owner.vendors == (Vendor.CPU,) for owner in owners)


@pytest.mark.host
def test_a_running_manager_is_seen_on_this_host() -> None:
    """A process of root with the name of slurmd is in the node's facts while it lives."""
    script = (
        "import ctypes, sys, time; ctypes.CDLL(None).prctl(15, b'slurmd');"
        "print('named', flush=True); time.sleep(600)"
    )
    child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None
        child.stdout.readline()
        owners = next(f.value for f in collect_host(SNAPSHOT) if f.name == "host.owners")
        assert f"process {child.pid} slurmd" in str(owners)
    finally:
        child.kill()
        child.wait()
        if child.stdout is not None:
            child.stdout.close()


def test_owners_for_the_snapshot_keep_their_note() -> None:
    """The snapshot's owners carry the evidence with the note."""
    (owner,) = as_owners([OwnerFact(name="DCGM", evidence="process 3", rival=False, note="reads")])
    assert owner.evidence == "process 3 (reads)"
