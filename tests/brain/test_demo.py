"""The demo and the embedded brain, as processes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from alloy_brain.client import BrainClient, PlacementError
from tests.brain.test_server import request
from tests.brain.world import until


def leftovers() -> list[str]:
    """Return the control groups of demos that are still there."""
    return [str(path) for path in Path("/sys/fs/cgroup").glob("**/alloy-demo-*")]


@pytest.mark.slow
def test_the_demo_holds_every_claim_and_leaves_nothing(tmp_path: Path) -> None:
    """Exit code 0, a report without scripts or links, and no process, group or file left."""
    before = leftovers()
    report = tmp_path / "report.html"
    words = [sys.executable, "-m", "alloy_agent", "demo", "--html", str(report)]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=120, check=False, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "NOT" not in done.stdout
    last = done.stdout.strip().splitlines()[-1]
    claims = re.match(r"(\d+) of (\d+) claims hold; report: (.*)", last)
    assert claims is not None
    assert claims[1] == claims[2]
    assert claims[3] == str(report)
    page = report.read_text(encoding="utf-8")
    assert page.count("<svg") >= 3
    assert "<script" not in page
    assert not re.search(r"(src|href)=", page)
    assert leftovers() == before
    assert list(tmp_path.iterdir()) == [report]


@pytest.mark.host
def test_standalone_embeds_a_brain(tmp_path: Path) -> None:
    """One process is agent and brain: a client places on its partitions through its socket."""
    layout = tmp_path / "layout.yaml"
    layout.write_text(
        "version: v1\nlayouts:\n  a:\n    - match: {vendor: nvidia}\n"
        "      mig: [3g.40gb, 1g.10gb]\n",
        encoding="utf-8",
    )
    settings = tmp_path / "agent.yaml"
    settings.write_text(
        f"node_name: solo\nstate_dir: {tmp_path}/state\nsocket_path: {tmp_path}/a.sock\n"
        f"fake: [1xH100-SXM5-80GB]\nbackends: {{cpu: off}}\nmetrics: {{enabled: false}}\n"
        f"layout: {{file: {layout}}}\nbrain: {{rate_hz: 10}}\n",
        encoding="utf-8",
    )
    words = [sys.executable, "-m", "alloy_agent", "run", "--standalone", "--config", str(settings)]
    with (tmp_path / "log").open("wb") as log:
        daemon = subprocess.Popen(words, stderr=log)
    socket = tmp_path / "state" / "brain.sock"
    try:
        until(socket.exists, "the socket of the brain")
        with BrainClient(f"unix:{socket}") as client:

            def placed() -> str:
                try:
                    return client.place(request("r1")).lease
                except PlacementError:
                    return ""

            lease = until(placed, "a placement")
            assert [one.lease for one in client.leases()] == [lease]
            document = json.loads(client.explain(lease=lease).document.json)
            assert document["snapshots"][0]["node"] == "solo"
    finally:
        daemon.send_signal(signal.SIGTERM)
        assert daemon.wait(20) == 0, (tmp_path / "log").read_text()
