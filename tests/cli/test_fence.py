"""`exec` on accelerators: the tenant is behind device rules of its own before it starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from alloy_agent.host import devicefence
from alloy_agent.host.cgroupfs import detect
from alloy_agent.model import ModeKind, SetMode
from tests.daemon.harness import Site, wait_for
from tests.fakes.amd_tree import tree_of
from tests.fakes.nvml.host import NvidiaHost

pytestmark = pytest.mark.host

TRY = """
import errno, os, sys
for node in sys.argv[1:]:
    try:
        os.close(os.open(node, os.O_RDONLY | os.O_NONBLOCK))
        print("open")
    except OSError as error:
        print(errno.errorcode[error.errno])
"""
FORBIDDEN = "/dev/kmsg"


def amd(folder: Path) -> dict[str, Any]:
    """Return the settings of a node with one MI300X in eight pieces."""
    backend = tree_of("1xMI300X", folder).backend()
    (device,) = backend.discover()
    backend.apply(SetMode(device=device, kind=ModeKind.COMPUTE, current="SPX", wanted="CPX"))
    roots = {"sys_root", "proc_root", "dev_root", "debug_root"}
    return {"amd": {name: getattr(backend.options, name) for name in roots} | {"library": "off"}}


def nvidia(folder: Path) -> dict[str, Any]:
    """Return the settings of a node with one H100 in two instances."""
    folder.mkdir()
    host = NvidiaHost(folder, "1xH100")
    (device,) = host.backend.discover()
    host.mig(device)
    host.make(device, "3g.40gb@0", "3g.40gb@4")
    return {"nvidia": host.options}


@pytest.fixture(params=[("amd", "CPX-03"), ("nvidia", "MIG-03")], ids=["amd", "nvidia"])
def node(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Site, str]]:
    """Give a node of one vendor, and the check of its fence."""
    hierarchy = detect().of("devices")
    if os.geteuid() != 0 or hierarchy is None or hierarchy.version != 1:
        pytest.skip("needs root and the v1 devices controller")
    vendor, check = request.param
    settings = (amd if vendor == "amd" else nvidia)(tmp_path / "vendor")
    settings["backends"] = {vendor: "on"}
    file = tmp_path / "agent.yaml"
    file.write_text(json.dumps(settings))  # JSON is YAML
    site = Site(tmp_path)
    site.globals += ["--config", str(file)]
    before = set(devicefence.inside(detect()))
    yield site, check
    devicefence.sweep(detect(), before, spare_s=0.0)


def verdicts(site: Site, check: str) -> dict[str, tuple[str, str]]:
    """Return verdict and tier by partition."""
    return {
        report["partition"]["id"]: (judgement["verdict"], report["tier"])
        for report in site.document("audit", "--json")["partitions"]
        for judgement in report["judgements"]
        if judgement["check"] == check
    }


def test_a_tenant_is_fenced_and_judged_at_once(node: tuple[Site, str]) -> None:
    """A tenant opens no foreign device; the audit passes its fence before its driver sees it."""
    site, check = node
    idle = verdicts(site, check)
    assert {verdict for verdict, _ in idle.values()} == {"not_applicable"}
    first, *_ = idle
    tried = site.run(
        "exec",
        first,
        "--tenant",
        "acme",
        "--",
        sys.executable,
        "-I",
        "-S",
        "-c",
        TRY,
        "/dev/null",
        "/dev/urandom",
        FORBIDDEN,
    )
    assert (tried.returncode, tried.stderr) == (0, "")
    assert tried.stdout.split() == ["open", "open", "EPERM"]
    running = subprocess.Popen(
        site.command("exec", first, "--tenant", "acme", "--", "sleep", "60"), env=site.environment
    )
    try:
        comm = Path(f"/proc/{running.pid}/comm")
        wait_for("the tenant", lambda: comm.read_text().strip() == "sleep")
        judged = verdicts(site, check)
        assert judged[first] == ("pass", idle[first][1])
        assert {v for ident, (v, _) in judged.items() if ident != first} == {"not_applicable"}
        mine = {path for path, pids in devicefence.inside(detect()).items() if running.pid in pids}
        assert len(mine) == 1
    finally:
        running.kill()
        running.wait(60)
    others = set(devicefence.inside(detect())) - mine
    devicefence.sweep(detect(), others, spare_s=0.0)
    assert not mine & set(devicefence.inside(detect()))
