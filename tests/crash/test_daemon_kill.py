"""The real daemon, killed at random moments while the host's own cores change hands."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from alloy_agent.conformance.evidence import verify
from tests.daemon.harness import DaemonProcess, Site, gone, wait_for

pytestmark = pytest.mark.host

SMALL, LARGE = 256 << 20, 320 << 20
LAYOUT = """\
version: v1
layouts:
  small: [{{match: {{vendor: cpu, index: 0}}, cores: {cores}, memory: [{small}]}}]
  large: [{{match: {{vendor: cpu, index: 0}}, cores: {cores}, memory: [{large}]}}]
  clear: [{{match: {{vendor: cpu}}, cores: []}}]
"""
NAMES = ("small", "large", "clear")


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site(tmp_path, cpu=True)
    layout = LAYOUT.format(cores="[1]", small=SMALL, large=LARGE)
    (tmp_path / "layout.yaml").write_text(layout)
    yield site
    site.clean()


def write_config(site: Site, name: str) -> str:
    """Have the daemon keep a layout of the file; returns the settings file."""
    config = site.folder / "agent.yaml"
    config.write_text(f"layout: {{file: {site.folder}/layout.yaml, name: {name}}}\n")
    return str(config)


def live_and_die(site: Site, name: str, after_s: float) -> None:
    """Start a daemon that wants a layout, and kill it `after_s` after its start."""
    running = DaemonProcess(site, "--config", write_config(site, name))
    try:
        deadline_s = time.monotonic() + after_s
        while time.monotonic() < deadline_s and running.process.poll() is None:
            time.sleep(0.002)
        assert running.process.poll() is None, running.log_path.read_text()
        workers = running.workers()
    finally:
        running.kill()
    wait_for("the end of the workers", lambda: all(gone(pid) for pid in workers))
    running.log_path.unlink()


def reach(site: Site, name: str) -> None:
    """Let a daemon live until the node is as wanted, and stop it."""
    running = DaemonProcess(site, "--config", write_config(site, name))
    try:
        running.ready()
        expected = {"small": [SMALL], "large": [LARGE], "clear": []}[name]

        def so() -> bool:
            found = [p["memory_bytes"] for p in site.partitions()]
            return found == expected

        wait_for(f"layout {name}", so)
        assert running.stop() == 0
    finally:
        with contextlib.suppress(ProcessLookupError):
            running.kill()


def kill_many(site: Site, moments: int, seed: int) -> None:
    """Kill at random moments of a life, then check what must hold after every one of them."""
    chance = random.Random(seed)  # noqa: S311 - which moments, not secrets
    for number in range(moments):
        # Most of what is written happens between the opening of the store and the first seconds.
        live_and_die(site, NAMES[number % 3], chance.uniform(0.1, 1.0))
    reach(site, "large")
    partitions = site.partitions()
    assert [p["made_by"] for p in partitions] == ["alloy"]
    leaves = {path.name for path in site.cgroups()}
    assert leaves == {p["id"].split("/")[0] for p in partitions} | {
        p["id"].split("/")[1] for p in partitions
    }, "an orphan cgroup was left"
    reach(site, "clear")
    assert site.cgroups() == [], "an orphan cgroup was left"
    report = verify(site.state)
    assert report.ok, report.problems
    assert report.records > 0


def test_killed_at_fifteen_moments(site: Site) -> None:
    """Killed anywhere, the next start reaches the layout, orphans nothing, and the chain holds."""
    kill_many(site, 15, seed=11)


@pytest.mark.slow
def test_killed_at_two_hundred_moments(site: Site) -> None:
    """The same, two hundred times in a row."""
    kill_many(site, 200, seed=12)
