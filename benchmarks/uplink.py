"""How long samples and events take from the agent to the brain, over loopback.

The agent's end is the real one (store, outbox on disk, uplink) in this process; the brain is a
process of its own. Both read CLOCK_BOOTTIME of one host, so one-way times are what they say.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from alloy_agent.config import BrainSettings
from alloy_agent.proto import agent_pb2 as pb
from alloy_agent.store import Store
from alloy_agent.uplink.client import Uplink
from alloy_agent.uplink.outbox import Outbox
from benchmarks import brain_fleet
from benchmarks.report import Result, main, quantile, result

SAMPLES_HZ = 100.0
PROMISE_MS = 3.0


def measure(quick: bool) -> list[Result]:
    """Return the one-way times of samples and events."""
    count = 500 if quick else 3000
    with tempfile.TemporaryDirectory() as folder:
        brain = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.uplink", "--brain", folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            return _with_brain(brain, Path(folder), count)
        finally:
            brain.kill()
            brain.wait()


def _with_brain(brain: subprocess.Popen[str], folder: Path, count: int) -> list[Result]:
    address = _line(brain)["address"]
    store = Store.open(folder / "agent")
    outbox = Outbox(store, "node-00000", "boot-0", 100_000)
    settings = BrainSettings(address=address, rate_hz=200.0, reconnect_min_s=0.05)
    uplink = Uplink(
        settings,
        outbox,
        lambda: brain_fleet.hello(0),
        lambda: [
            pb.AgentMessage(inventory=brain_fleet.inventory(0)),
            pb.AgentMessage(partition_state=brain_fleet.partitions(0)),
        ],
        lambda _command, _emit: None,
    )
    uplink.start()
    try:
        while not uplink.state().connected:
            time.sleep(0.01)
        time.sleep(1.0)
        sent = _send_samples(uplink, count)
        events = _send_events(outbox, count)
        while outbox.waiting:
            time.sleep(0.01)
    finally:
        uplink.stop()
        store.close()
    if brain.stdin is not None:
        brain.stdin.write("tell\n")
        brain.stdin.flush()
    told = _line(brain)
    samples_ms = _latencies(sent, told["samples"])
    events_ms = _latencies(events, told["events"])
    return [
        _row("sample to brain p99", samples_ms),
        _row("event to brain p99, written to the outbox first", events_ms),
    ]


def _row(what: str, samples_ms: list[float]) -> Result:
    return result(what, samples_ms, "ms", "<=", PROMISE_MS, figure=quantile(samples_ms, 0.99))


def _send_samples(uplink: Uplink, count: int) -> dict[str, float]:
    """Offer samples at 100 Hz; return when each was."""
    import random

    chance = random.Random(1)  # noqa: S311 - load, not secrets
    sent: dict[str, float] = {}
    due_s = time.monotonic()
    for number in range(1, count + 1):
        message = pb.AgentMessage(fast=brain_fleet.fast(number, chance))
        sent[str(number)] = _boottime_s()
        uplink.offer(message)
        due_s += 1.0 / SAMPLES_HZ
        time.sleep(max(0.0, due_s - time.monotonic()))
    return sent


def _send_events(outbox: Outbox, count: int) -> dict[str, float]:
    """Add findings at 100 Hz; return when each was."""
    sent: dict[str, float] = {}
    for number in range(1, count + 1):
        sent[str(number)] = _boottime_s()
        outbox.add(pb.AgentMessage(finding=pb.Finding(check=str(number), subject="p")))
        time.sleep(1.0 / SAMPLES_HZ)
    return sent


def _latencies(sent: dict[str, float], seen: dict[str, float]) -> list[float]:
    """Return the one-way times of what arrived; a newer sample may replace one on its way."""
    found = [(seen[key] - when_s) * 1e3 for key, when_s in sent.items() if key in seen]
    if len(found) < 0.95 * len(sent):
        raise RuntimeError(f"{len(found)} of {len(sent)} arrived")
    return found


def _line(brain: subprocess.Popen[str]) -> dict[str, Any]:
    line = brain.stdout.readline() if brain.stdout is not None else ""
    if not line:
        raise RuntimeError("the brain ended")
    told: dict[str, Any] = json.loads(line)
    return told


def _boottime_s() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


# --- the brain's process --------------------------------------------------------------------------


async def serve(folder: str) -> None:
    """Serve until told to tell when everything arrived."""
    from alloy_brain.server import BrainServer
    from alloy_brain.server import BrainSettings as Serving

    serving = Serving(address="127.0.0.1:0", ledger=f"{folder}/brain.db", telemetry_interval_ms=1)
    server = BrainServer(serving, "boot")
    samples: dict[str, float] = {}
    events: dict[str, float] = {}
    server.on_sample = lambda _node, fast: samples.setdefault(str(fast.sample), _boottime_s())
    server.on_event = lambda _node, message: events.setdefault(
        message.finding.check or message.health.code, _boottime_s()
    )
    await server.start()
    print(json.dumps({"address": server.address}), flush=True)
    told = asyncio.Event()
    loop = asyncio.get_running_loop()

    def wait() -> None:
        sys.stdin.readline()
        loop.call_soon_threadsafe(told.set)

    threading.Thread(target=wait, daemon=True).start()
    await told.wait()
    print(json.dumps({"samples": samples, "events": events}), flush=True)
    await server.stop()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--brain"]:
        asyncio.run(serve(sys.argv[2]))
        sys.exit(0)
    sys.exit(main("uplink", measure))
