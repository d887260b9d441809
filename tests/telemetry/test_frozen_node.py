"""An agent that is stopped as a whole, as a suspend stops it, and goes on after it."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest

from alloy_agent.control import ControlClient
from alloy_agent.proto import agent_pb2 as pb
from tests.daemon.harness import DaemonProcess, Site, daemon, wait_for

FROZEN_S = 6.0
LAYOUT = """version: v1
layouts:
  one:
    - match: {vendor: nvidia}
      mig: [1g.10gb]
"""


@pytest.fixture
def site(tmp_path: Path) -> Site:
    """Give a node with one simulated H100."""
    return Site(tmp_path, "1xH100-SXM5-80GB")


def seconds(running: DaemonProcess) -> dict[str, float]:
    """Return what the page says of acme's account: allocated, used, unobserved."""
    status, body = running.get("metrics")
    assert status == 200
    found = re.findall(
        r'^alloy_metering_(\w+)_seconds_total\{[^}]*tenant="acme"[^}]*\} (\S+)', body, re.MULTILINE
    )
    return {name: float(value) for name, value in found}


def freshness(running: DaemonProcess, piece: str) -> str:
    """Return the state of a partition's freshness gate."""
    body = running.get("metrics")[1]
    mark = rf'alloy_gate\{{subject="{re.escape(piece)}",gate="freshness",state="(\w+)"\}} 1'
    found = re.search(mark, body)
    return "" if found is None else found[1]


@pytest.mark.slow
def test_time_in_which_the_agent_was_stopped_is_unobserved(site: Site, tmp_path: Path) -> None:
    """Control process and worker stopped for seconds: the gap shows, and measuring goes on."""
    layout = tmp_path / "layout.yaml"
    layout.write_text(LAYOUT)
    with daemon(site, ALLOY_LAYOUT_FILE=str(layout)) as running:
        wait_for("the partition", site.partitions)
        piece = site.partitions()[0]["id"]
        client = ControlClient.connect(site.state / "agent.sock")
        assert client is not None
        client.document(pb.BrainMessage(access=pb.Access(partition=piece, tenant="acme")))
        wait_for("an open gate", lambda: freshness(running, piece) == "open")
        wait_for(
            "measured time",
            lambda: (s := seconds(running)) and s["allocated"] - s["unobserved"] > 3.0,
        )
        before = seconds(running)
        stopped = [running.process.pid, *running.workers()]
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        try:
            time.sleep(FROZEN_S)
        finally:
            for pid in reversed(stopped):
                os.kill(pid, signal.SIGCONT)
        wait_for(
            "the gap", lambda: seconds(running)["unobserved"] >= before["unobserved"] + FROZEN_S - 1
        )
        unobserved = seconds(running)["unobserved"]
        wait_for("fresh values", lambda: freshness(running, piece) == "open")
        wait_for(
            "measuring again",
            lambda: (
                (s := seconds(running))["allocated"] - s["unobserved"]
                > before["allocated"] - before["unobserved"] + 1.0
            ),
        )
        assert unobserved > before["unobserved"]
        assert running.get("healthz")[0] == 200
        client.document(
            pb.BrainMessage(access=pb.Access(partition=piece, tenant="acme", release=True))
        )
        client.close()

        def closed() -> list[dict[str, int]]:
            lines = site.run("usage", "--format", "json", "--tenant", "acme").stdout.splitlines()
            found = [json.loads(line)["row"] for line in lines]
            return found if found and all(row["final"] for row in found) else []

        found = wait_for("the rows", closed)
    for row in found:
        parts = row["active_ns"] + row["idle_ns"] + row["unobserved_ns"]
        assert parts == row["allocated_ns"]
    assert sum(row["unobserved_ns"] for row in found) >= (FROZEN_S - 1) * 1e9
