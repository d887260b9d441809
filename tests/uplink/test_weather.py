"""Bad weather: killed brains, black holes, half-open connections; nothing is lost or grows."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from alloy_agent.proto import agent_pb2 as pb
from tests.uplink.brains import Brain, until
from tests.uplink.conftest import Agent, settings
from tests.uplink.proxies import Proxy

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def proxy(port: int) -> Iterator[Proxy]:
    made = Proxy(port)
    yield made
    made.stop()


@contextmanager
def program(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run a module as a process of its own and give its first line."""
    with subprocess.Popen(
        [sys.executable, "-m", *arguments], stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as process:
        assert process.stdout is not None
        try:
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()


def kill_and_restart(agent: Agent, folder: Path, times: int) -> None:
    """Kill a brain process that many times during traffic, and see that nothing is lost."""
    memory = folder / "brain.jsonl"
    port = "0"
    added = 0
    for turn in range(times):
        with program("tests.uplink.brains", f"127.0.0.1:{port}", str(memory), str(turn + 1)) as (
            process,
            first,
        ):
            port = first
            if agent.uplink is None:
                agent.dial(settings(int(port)))
            ran = len(agent.ran)
            for _ in range(5):
                added += 1
                agent.finding(f"F{added}")
            until(lambda ran=ran: len(agent.ran) > ran + 3, "commands under way")  # type: ignore[misc]
            process.kill()
    with program("tests.uplink.brains", f"127.0.0.1:{port}", str(memory), str(times + 1)):
        until(lambda: agent.outbox.waiting == 0, "all acknowledged")
    seen = [json.loads(line)[2] for line in memory.read_text().splitlines()]
    assert sorted(set(seen)) == list(range(1, added + 1))
    assert len(agent.ran) == len(set(agent.ran))
    assert agent.defects == []


def test_brain_killed_during_traffic(agent: Agent, tmp_path: Path) -> None:
    """Killed and restarted, later terms of a brain get every event, and no command runs twice."""
    kill_and_restart(agent, tmp_path, 4)


@pytest.mark.slow
def test_brain_killed_a_hundred_times(agent: Agent, tmp_path: Path) -> None:
    """A hundred times the same."""
    kill_and_restart(agent, tmp_path, 100)


def test_black_hole(agent: Agent, brain: Brain, proxy: Proxy) -> None:
    """A network that swallows everything is noticed; then events are complete and state newest."""
    uplink = agent.dial(settings(proxy.port))
    until(lambda: uplink.state().connected and brain.bodies, "a stream")
    proxy.open.clear()
    for number in range(50):
        agent.finding(f"F{number}")
    until(lambda: "silent" in uplink.state().reason, "the silence to be noticed")
    assert not uplink.state().connected
    assert agent.outbox.waiting == 50
    for sample in range(1, 51):
        uplink.offer(pb.AgentMessage(fast=pb.Fast(sample=sample)))
    proxy.cut()
    proxy.open.set()
    until(lambda: agent.outbox.waiting == 0, "all acknowledged")
    checks = {message.finding.check for message in brain.events.values()}
    assert checks == {f"F{number}" for number in range(50)}
    until(lambda: brain.fast, "a sample")
    assert [fast.sample for fast in brain.fast] == [50]
    assert brain.fast[0].dropped == uplink.state().telemetry_dropped == 49


def test_connections_that_break_all_the_time(agent: Agent, brain: Brain, proxy: Proxy) -> None:
    """Cut at any moment, the stream resumes, and each event arrives in the order it was made."""
    agent.dial(settings(proxy.port))
    until(lambda: brain.streams, "a stream")
    for number in range(60):
        agent.finding(f"F{number}")
        if number % 6 == 0:
            proxy.cut()
        time.sleep(0.005)
    until(lambda: agent.outbox.waiting == 0, "all acknowledged")
    checks = [message.finding.check for message in brain.events.values()]
    assert checks == [f"F{number}" for number in range(60)]


def test_half_open_connection(agent: Agent, brain: Brain, proxy: Proxy) -> None:
    """A peer that has gone without a word is left after three heartbeats, and found again."""
    uplink = agent.dial(settings(proxy.port))
    until(lambda: uplink.state().connected, "a stream")
    first = uplink.state().streams
    proxy.open.clear()
    until(lambda: not uplink.state().connected, "the silence to be noticed")
    proxy.open.set()
    until(lambda: uplink.state().streams > first and uplink.state().connected, "another stream")


def test_nobody_there(agent: Agent) -> None:
    """Without a brain the agent dials with back-off, says so once, and keeps its events."""
    uplink = agent.dial(settings(1, reconnect_min_s=0.05, reconnect_max_s=0.2))
    agent.finding("kept")
    until(lambda: uplink.state().attempts >= 4, "attempts")
    assert "refused" in uplink.state().reason.lower()
    assert agent.outbox.waiting == 1


def churn(folder: Path, warm: int, streams: int) -> dict[str, float]:
    with program("tests.uplink.churn", "brain") as (_process, port):
        arguments = ("agent", port, str(folder), str(warm), str(streams))
        done = subprocess.run(
            [sys.executable, "-m", "tests.uplink.churn", *arguments],
            capture_output=True,
            text=True,
            check=True,
            cwd=ROOT,
        )
    report: dict[str, float] = json.loads(done.stdout)
    return report


def test_restarts_leak_nothing(tmp_path: Path) -> None:
    """After many restarts of the brain every event is acknowledged and next to nothing has grown.

    How many events wait at one moment depends on who gets to run; that none waits in the end does
    not, although the brain goes on restarting.
    """
    report = churn(tmp_path, 30, 40)
    assert report["waiting"] == 0
    assert report["threads"] < 40
    assert report["descriptors"] < 60
    assert report["grown_bytes"] < 1_500_000


@pytest.mark.slow
def test_five_thousand_restarts(tmp_path: Path) -> None:
    """The promise: less than 1 MB over 5,000 restarts of the brain."""
    report = churn(tmp_path, 500, 5000)
    assert report["streams"] >= 5_000
    assert report["grown_bytes"] < 1_000_000
