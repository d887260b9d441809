"""Groups and resets of Neuron devices from the shell, alone and through a daemon."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest

from tests.daemon.harness import Site, daemon, wait_for

PRINT = "import json, os; print(json.dumps({k: v for k, v in os.environ.items() if 'NEURON' in k}))"


@pytest.fixture(params=["alone", "daemon"])
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Site]:
    """Give a simulated trn2 instance with a group of four devices, with and without a daemon."""
    here = Site(tmp_path, "trn2.48xlarge")
    layout = tmp_path / "layout.yaml"
    layout.write_text(
        "version: v1\nlayouts:\n  train:\n"
        "    - match: {vendor: neuron}\n      groups: [4]\n"
        "    - match: {vendor: neuron, index: 5}\n      cores: [4]\n"
    )
    applied = here.run("apply", str(layout), "--yes")
    assert applied.returncode == 0, applied.stderr
    running: AbstractContextManager[Any] = (
        daemon(here) if request.param == "daemon" else nullcontext()
    )
    with running:
        yield here


def test_a_group_is_entered_by_any_member_with_a_plus(site: Site) -> None:
    """`exec MEMBER+` sets the cores of all four devices; without the plus it is one device's."""
    members = [p for p in site.partitions() if p["group"]]
    assert len(members) == 4
    assert len({tuple(p["group"]) for p in members}) == 1
    python = [sys.executable, "-I", "-S", "-c", PRINT]
    whole = site.run("exec", f"{members[2]['id']}+", "--tenant", "blue", "--", *python)
    assert whole.returncode == 0, whole.stderr
    environment = json.loads(whole.stdout)
    first = members[0]["group"][0]
    assert environment["NEURON_RT_VISIBLE_CORES"] == "0-15"
    assert environment["NEURON_PROCESS_TAG"] == f"{first}/4c@0+3"
    alone = site.run("exec", members[2]["id"], "--tenant", "blue", "--", *python)
    assert json.loads(alone.stdout)["NEURON_RT_VISIBLE_CORES"] == "8-11"


def test_a_partition_has_an_environment_file(site: Site) -> None:
    """`devices --environment` prints what exec would set, and names what it would remove.

    Nothing is set to nothing: a runtime would read that as a value, and a wrong one.
    """
    piece = next(p for p in site.partitions() if not p["group"])
    printed = site.run("devices", "--environment", piece["id"])
    assert (printed.returncode, printed.stderr) == (0, "")
    lines = printed.stdout.splitlines()
    assert f"NEURON_RT_VISIBLE_CORES={piece['environment']['NEURON_RT_VISIBLE_CORES']}" in lines
    (unset,) = [line for line in lines if line.startswith("# unset: ")]
    assert "NEURON_RT_NUM_CORES" in unset.split()
    assert not [line for line in lines if line.endswith("=")]
    assert [line for line in lines if not line.startswith("#") and "=" not in line] == []
    refused = site.run("devices", "--environment", "neuron99/4c@0")
    assert refused.returncode != 0
    assert "partition neuron99/4c@0: there is none of this id" in refused.stderr


def test_a_group_takes_one_tenant(site: Site) -> None:
    """Where another tenant is in one member, nobody else enters the group."""
    members = [p["id"] for p in site.partitions() if p["group"]]
    with subprocess.Popen(
        site.command("exec", members[1], "--tenant", "red", "--", "sleep", "600"),
        env=site.environment,
    ) as red:
        try:
            comm = Path(f"/proc/{red.pid}/comm")
            wait_for("red", lambda: comm.read_text().strip() == "sleep")
            refused = site.run("exec", f"{members[0]}+", "--tenant", "blue", "--", "true")
            assert refused.returncode == 125
            assert f"partition {members[1]}: tenant red is in it" in refused.stderr
            assert site.run("exec", f"{members[0]}+", "--", "true").returncode == 0  # red's own
        finally:
            red.kill()


def test_what_is_no_group_says_so(site: Site) -> None:
    """A plus behind a partition of its own is one line with the cure."""
    (single,) = [p["id"] for p in site.partitions() if not p["group"]]
    refused = site.run("exec", f"{single}+", "--", "true")
    assert refused.returncode == 125
    assert "is in no group" in refused.stderr
    assert refused.stderr.count("\n") == 1


def test_a_reset_is_refused_while_a_tenant_is_inside(site: Site) -> None:
    """With a tenant's process inside nothing is reset; once it is gone the device is."""
    (single,) = [p["id"] for p in site.partitions() if not p["group"]]
    device = single.partition("/")[0]
    with subprocess.Popen(
        site.command("exec", single, "--tenant", "red", "--", "sleep", "600"),
        env=site.environment,
    ) as red:
        try:
            comm = Path(f"/proc/{red.pid}/comm")
            wait_for("red", lambda: comm.read_text().strip() == "sleep")
            refused = site.run("reset", device)
            assert refused.returncode == 2
            assert single in refused.stderr
            assert "drain it first" in refused.stderr
        finally:
            red.kill()
    done = site.document("reset", device, "--json")
    assert (done["schema"], done["device"]) == ("alloy.reset/v1", device)
    unknown = site.run("reset", "neuron-nowhere")
    assert unknown.returncode == 2
    assert "no such device" in unknown.stderr


def test_a_device_that_the_agent_does_not_reset_says_what_does(tmp_path: Path) -> None:
    """A GPU is refused with the way out, and untouched."""
    site = Site(tmp_path, "1xA100-SXM4-40GB")
    (device,) = (d["id"] for d in site.document("devices", "--json")["devices"])
    refused = site.run("reset", device)
    assert refused.returncode == 2
    assert "not reset" in refused.stderr
    assert refused.stderr.count("\n") == 1
