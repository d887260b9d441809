"""Tenants on Neuron devices: real processes, real device nodes, a generated driver tree.

The nodes stand for character devices that this host has (`/dev/cpu/N/cpuid`), so that the kernel's
own device rules decide who opens them, and descriptors are told by their true numbers.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from alloy_agent.host import devicefence
from alloy_agent.host.cgroupfs import detect
from tests.daemon.harness import Site, wait_for
from tests.fakes.neuron import FakeNeuronHost

pytestmark = pytest.mark.host

CPUID_MAJOR = 203
DEVICES = 6
TRY = """
import errno, json, os, sys
found = {}
for node in sys.argv[1:]:
    try:
        os.close(os.open(node, os.O_RDONLY))
        found[node] = "open"
    except OSError as error:
        found[node] = errno.errorcode[error.errno]
print(json.dumps({"nodes": found, "environment": dict(os.environ)}))
"""
HOLD = """
import os, sys, time
held = [os.open(node, os.O_RDONLY) for node in sys.argv[1:]]
time.sleep(600)
"""


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """Give an inf2.24xlarge of which devices 0 and 1 can be opened."""
    hierarchy = detect().of("devices")
    if os.geteuid() != 0 or hierarchy is None or hierarchy.version != 1:
        pytest.skip("needs root and the v1 devices controller")
    if not all(Path(f"/dev/cpu/{n}/cpuid").exists() for n in range(2)):
        pytest.skip("needs two /dev/cpu/N/cpuid to stand for devices")
    host = FakeNeuronHost(tmp_path / "vendor", "inf2.24xlarge")
    for number in range(DEVICES):
        (host.folder(number) / "dev").write_text(f"{CPUID_MAJOR}:{number}\n")
    settings = {
        "backends": {"neuron": "on"},
        "neuron": {
            "sys_root": str(host.sys),
            "tools_dir": str(host.tools),
            "monitor": False,
            "product_name_file": str(tmp_path / "vendor/product_name"),
        },
    }
    (tmp_path / "agent.yaml").write_text(json.dumps(settings))  # JSON is YAML
    here = Site(tmp_path)
    here.globals += ["--config", str(tmp_path / "agent.yaml")]
    layout = tmp_path / "layout.yaml"
    layout.write_text(
        "version: v1\nlayouts:\n"
        "  pair:\n    - match: {vendor: neuron}\n      groups: ['2@0']\n"
        "  cores:\n    - match: {vendor: neuron, index: 1}\n      cores: [1, 1]\n"
    )
    before = set(devicefence.inside(detect()))
    with _device_nodes():
        yield here
        devicefence.sweep(detect(), before, spare_s=0.0)


@contextlib.contextmanager
def _device_nodes() -> Iterator[None]:
    """Make `/dev/neuronN` meanwhile; one test of this host at a time has them."""
    made = []
    with Path("/tmp/alloy-test-neuron.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if Path("/dev/neuron0").exists():
            pytest.skip("this host has Neuron devices of its own")
        try:
            for number in range(DEVICES):
                node = f"/dev/neuron{number}"
                os.mknod(node, 0o600 | stat.S_IFCHR, os.makedev(CPUID_MAJOR, number))
                made.append(node)
            yield
        finally:
            for node in made:
                Path(node).unlink()


def apply(site: Site, name: str) -> list[dict[str, Any]]:
    """Apply a layout and return the partitions of it, in the order of their devices."""
    done = site.run("apply", str(site.folder / "layout.yaml"), "--layout", name, "--yes")
    assert done.returncode == 0, done.stderr
    return site.partitions()


@contextlib.contextmanager
def tenant(site: Site, partition: str, *command: str) -> Iterator[int]:
    """Have a tenant inside meanwhile, once it holds what it wants to hold."""
    argv = site.command("exec", partition, "--tenant", "blue", "--", *command)
    with subprocess.Popen(argv, env=site.environment) as running:
        try:
            folder = Path(f"/proc/{running.pid}/fd")
            wait_for("its descriptors", lambda: any(map(_is_neuron, folder.iterdir())))
            yield running.pid
        finally:
            running.kill()


def _is_neuron(descriptor: Path) -> bool:
    with contextlib.suppress(OSError):
        return str(descriptor.readlink()).startswith("/dev/neuron")
    return False


def verdicts(site: Site, check: str) -> dict[str, str]:
    """Return a check's verdict on each partition."""
    return {
        report["partition"]["id"]: judgement["verdict"]
        for report in site.document("audit", "--json")["partitions"]
        for judgement in report["judgements"]
        if judgement["check"] == check
    }


def test_a_tenant_gets_its_cores_and_opens_its_own_device_only(site: Site) -> None:
    """Variables and device rules are those of the grant; a caller's own variables do not count."""
    first, _ = apply(site, "pair")
    nodes = [f"/dev/neuron{n}" for n in range(3)]
    python = (sys.executable, "-I", "-S", "-c")
    done = site.run(
        "exec", first["id"], "--tenant", "blue", "--", *python, TRY, *nodes,
        NEURON_RT_VISIBLE_CORES="0-11", NEURON_RT_NUM_CORES="12",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["nodes"] == {nodes[0]: "open", nodes[1]: "EPERM", nodes[2]: "EPERM"}
    assert told["environment"]["NEURON_RT_VISIBLE_CORES"] == "0-1"
    assert told["environment"]["NEURON_PROCESS_TAG"] == first["id"]
    assert "NEURON_RT_NUM_CORES" not in told["environment"]


def test_a_tenant_of_a_group_opens_all_of_it_and_passes(site: Site) -> None:
    """Entered as one, both devices open and no third; each member's audit passes its fence."""
    first, second = apply(site, "pair")
    nodes = [f"/dev/neuron{n}" for n in range(3)]
    python = (sys.executable, "-I", "-S", "-c")
    done = site.run("exec", f"{first['id']}+", "--tenant", "blue", "--", *python, TRY, *nodes)
    told = json.loads(done.stdout)
    assert told["nodes"] == {nodes[0]: "open", nodes[1]: "open", nodes[2]: "EPERM"}
    assert told["environment"]["NEURON_RT_VISIBLE_CORES"] == "0-3"
    with tenant(site, f"{first['id']}+", *python, HOLD, *nodes[:2]):
        for check in ("NRN-01", "NRN-02", "NRN-04"):
            found = verdicts(site, check)
            assert {found[first["id"]], found[second["id"]]} == {"pass"}, check


def test_a_tenant_that_overrides_its_cores_is_found_on_its_neighbours(site: Site) -> None:
    """Told one core and started with the other's, it fails its neighbour's audit meanwhile."""
    first, second = apply(site, "cores")
    python = (sys.executable, "-I", "-S", "-c")
    with tenant(site, first["id"], *python, HOLD, "/dev/neuron1"):
        assert verdicts(site, "NRN-04")[second["id"]] == "pass"
        assert verdicts(site, "NRN-01")[first["id"]] == "unknown"  # only its variables tell
    over = "NEURON_RT_VISIBLE_CORES=3"
    with tenant(site, first["id"], "env", over, *python, HOLD, "/dev/neuron1"):
        assert verdicts(site, "NRN-04")[second["id"]] == "fail"
    assert verdicts(site, "NRN-04")[second["id"]] == "pass"
