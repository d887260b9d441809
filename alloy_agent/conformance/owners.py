"""Who else manages devices on this host: programs and sockets that cut, hand out or hold them.

Names of processes are chosen by whoever starts them, so only a process of root outside of every
partition counts. A socket that nobody listens on is a leftover and is said to be one.

Source: Kubernetes device plug-in API (`/var/lib/kubelet/device-plugins`), plug-in registration
and DRA (`plugins`, `plugins_registry`), CPU manager state file; names of the vendors' own
daemons. A process name holds at most 15 bytes (TASK_COMM_LEN, include/linux/sched.h).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from alloy_agent.conformance.checks.shapes import OwnerFact
from alloy_agent.host.processes import printable, read_bytes
from alloy_agent.model import Owner, Value, Vendor

if TYPE_CHECKING:
    from alloy_agent.host.processes import ProcessInfo

OURS = "alloy"
SOCKETS_SHOWN = 64

VENDOR_WORDS: tuple[tuple[str, Vendor], ...] = (
    ("nvidia", Vendor.NVIDIA),
    ("hami", Vendor.NVIDIA),
    ("amd", Vendor.AMD),
    ("neuron", Vendor.NEURON),
    ("aws.com", Vendor.NEURON),
)


class KnownProgram(Value, frozen=True, kw_only=True):
    """A program by the (cut) name of its process."""

    comm: str
    name: str
    vendors: tuple[Vendor, ...] = ()
    rival: bool = True
    note: str = ""


_NVIDIA, _AMD, _NEURON = (Vendor.NVIDIA,), (Vendor.AMD,), (Vendor.NEURON,)

PROGRAMS: tuple[KnownProgram, ...] = (
    KnownProgram(comm="slurmd", name="slurmd"),
    KnownProgram(comm="nvidia-device-p", name="NVIDIA device plug-in", vendors=_NVIDIA),
    KnownProgram(comm="gpu-kubelet-plu", name="NVIDIA DRA driver", vendors=_NVIDIA),
    KnownProgram(comm="nvidia-mig-mana", name="nvidia-mig-manager", vendors=_NVIDIA),
    KnownProgram(comm="nvidia-mig-part", name="mig-parted", vendors=_NVIDIA),
    KnownProgram(comm="vGPUmonitor", name="HAMi", vendors=_NVIDIA),
    KnownProgram(comm="vgpu-device-plu", name="HAMi device plug-in", vendors=_NVIDIA),
    KnownProgram(comm="k8s-device-plug", name="AMD device plug-in", vendors=_AMD),
    KnownProgram(comm="k8s-neuron-devi", name="Neuron device plug-in", vendors=_NEURON),
    KnownProgram(
        comm="nv-hostengine",
        name="DCGM",
        vendors=_NVIDIA,
        rival=False,
        note="reads only, but its open handles can refuse a change of MIG mode",
    ),
    KnownProgram(
        comm="nvidia-persiste",
        name="nvidia-persistenced",
        vendors=_NVIDIA,
        rival=False,
        note="keeps the driver loaded; harmless",
    ),
    KnownProgram(
        comm="nvidia-cuda-mps",
        name="MPS",
        vendors=_NVIDIA,
        rival=False,
        note="shares a device between its clients; a partition with it is no harder than enforced",
    ),
    KnownProgram(
        comm="neuron-monitor",
        name="neuron-monitor",
        vendors=_NEURON,
        rival=False,
        note="reads only",
    ),
)
BY_COMM = {program.comm: program for program in PROGRAMS}


def find_owners(
    processes: Iterable[ProcessInfo],
    inside: frozenset[int] = frozenset(),
    host_root: str = "",
    proc_root: str = "/proc",
) -> tuple[OwnerFact, ...]:
    """Return other managers of devices on this host.

    Args:
        processes: The processes of this moment.
        inside: Pids that are in a partition: tenants, whose names mean nothing.
        host_root: Where the host's file system is seen.
        proc_root: Where procfs is.
    """
    kubelet = Path(f"{host_root}/var/lib/kubelet")
    found = [*_programs(processes, inside), *_sockets(kubelet, proc_root)]
    cpu = _cpu_manager(kubelet)
    return (*found, cpu) if cpu else tuple(found)


def as_owners(facts: Iterable[OwnerFact]) -> tuple[Owner, ...]:
    """Return owners as the snapshot carries them."""
    return tuple(
        Owner(
            name=fact.name,
            evidence=f"{fact.evidence} ({fact.note})" if fact.note else fact.evidence,
            vendors=fact.vendors,
        )
        for fact in facts
    )


def _programs(processes: Iterable[ProcessInfo], inside: frozenset[int]) -> Iterator[OwnerFact]:
    for process in processes:
        program = BY_COMM.get(process.comm)
        if program is None or process.uid != 0 or process.pid in inside:
            continue
        yield OwnerFact(
            name=program.name,
            evidence=f"process {process.pid} {process.comm}",
            vendors=program.vendors,
            rival=program.rival,
            note=program.note,
        )


def _sockets(kubelet: Path, proc_root: str) -> Iterator[OwnerFact]:
    kinds = (
        ("device-plugins/*.sock", "kubelet device plug-in"),
        ("plugins/*/*.sock", "kubelet plug-in (DRA)"),
        ("plugins_registry/*.sock", "kubelet plug-in registration"),
    )
    paths = [(path, name) for pattern, name in kinds for path in sorted(kubelet.glob(pattern))]
    if not paths:
        return
    listening = _listening(proc_root)
    for path, name in paths[:SOCKETS_SHOWN]:
        label = f"{path.parent.name}/{path.name}".lower()
        vendors = tuple(dict.fromkeys(v for word, v in VENDOR_WORDS if word in label))
        if path.name == "kubelet.sock" or OURS in label or not vendors:
            continue
        dead = bool(listening) and not any(entry.endswith(str(path)) for entry in listening)
        yield OwnerFact(
            name=name,
            evidence=f"socket {printable(str(path).encode('utf-8', 'surrogateescape'))}",
            vendors=vendors,
            rival=not dead,
            note="nobody listens on it any more" if dead else "",
        )


def _listening(proc_root: str) -> frozenset[str]:
    """Return the paths of the unix sockets of this network namespace that listen."""
    paths = set()
    try:
        table = Path(f"{proc_root}/net/unix").read_bytes()
    except OSError:
        return frozenset()
    for line in table.splitlines()[1:]:
        fields = line.split(None, 7)
        if len(fields) == 8 and int(fields[3], 16) & 0x10000:  # __SO_ACCEPTCON, linux/net.h
            paths.add(fields[7].decode("utf-8", "surrogateescape"))
    return frozenset(paths)


def _cpu_manager(kubelet: Path) -> OwnerFact | None:
    state = kubelet / "cpu_manager_state"
    try:
        policy = json.loads(read_bytes(str(state)) or b"{}").get("policyName")
    except (ValueError, AttributeError):
        return None
    if policy != "static":
        return None
    return OwnerFact(
        name="kubelet CPU manager", evidence=f"{state}: policy static", vendors=(Vendor.CPU,)
    )
