"""What the brain costs: agents at 1 Hz, all of them coming back, the ledger, a decision.

The brain is a process of its own with real streams over loopback; its agents are simulated in two
other processes, which share the cores with it.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from alloy_agent.proto import agent_pb2 as pb
from alloy_brain.broker import Broker, Order, boottime_s, digest_of
from alloy_brain.facts import Demand, Policy, Wish
from alloy_brain.fleet import Fleet
from alloy_brain.ledger import Grant, LeaseRow, Ledger
from benchmarks import brain_fleet
from benchmarks.report import Result, main, quantile, result

AGENTS = 2000
NODES = 1000
DECIDED = os.urandom(1024)  # a decision as it is kept with its lease: about 900 bytes


def measure(quick: bool) -> list[Result]:
    """Return every figure of the brain."""
    return [*_ledger(quick), *_decisions(quick), *_streams(quick)]


# --- ledger ---------------------------------------------------------------------------------------


def _ledger(quick: bool) -> list[Result]:
    """Return how many gangs of eight are reserved in a second, on disk."""
    rates = []
    for _ in range(3 if quick else 7):
        with tempfile.TemporaryDirectory() as folder:
            ledger = Ledger(f"{folder}/brain.db", "boot")
            ledger.begin_term()
            rows = [_gang(number) for number in range(2000)]
            now_s = boottime_s()
            began_s = time.perf_counter()
            for row in rows:
                if ledger.reserve(row, now_s + 10.0, now_s, DECIDED) is not None:
                    raise RuntimeError("a free piece was refused")
            rates.append(len(rows) / (time.perf_counter() - began_s))
            ledger.close()
    what = "gangs of eight reserved in the ledger, each with its decision"
    return [result(what, rates, "gangs/s", ">=", 3000.0)]


def _gang(number: int) -> LeaseRow:
    grants = tuple(
        Grant(
            node=f"node-{number % 250:05d}",
            device=f"GPU-{number}",
            partition=f"GPU-{number}/1g.10gb@{piece}",
            generation=1,
        )
        for piece in range(8)
    )
    return LeaseRow(
        lease=f"l-{number:016x}",
        request=f"r-{number}",
        digest="",
        tenant="tenant",
        state="reserved",
        decision=f"d-{number:016x}",
        grants=grants,
        made_wall_s=0.0,
    )


# --- decisions ------------------------------------------------------------------------------------


class _Yes:
    """A link to a node that grants at once."""

    async def ask(self, message: pb.BrainMessage, timeout_s: float) -> pb.Reply:
        """Return a grant."""
        del timeout_s
        return pb.Reply(command_id=message.id, status=pb.STATUS_OK, token=1)


def _decisions(quick: bool) -> list[Result]:
    """Return how long Place takes from the request to the reply, nodes answering at once."""
    import asyncio

    with tempfile.TemporaryDirectory() as folder:
        ledger = Ledger(f"{folder}/brain.db", "boot")
        ledger.begin_term()
        fleet = known_fleet()
        broker = Broker(fleet, ledger, Policy(), "benchmark")
        links: Any = {name: _Yes() for name in fleet.nodes}
        broker.links = links
        samples_ms = asyncio.run(_place_many(broker, 200 if quick else 1000))
        broker.stop()
        ledger.close()
    what = f"Place p99, {NODES} nodes x 8 devices x 7 pieces, record and lease on disk"
    p99 = quantile(samples_ms, 0.99)
    return [result(what, samples_ms, "ms", "<=", 20.0, figure=p99)]


def known_fleet(nodes: int = NODES) -> Fleet:
    """Return a fleet that has heard everything."""
    fleet = Fleet()
    chance = random.Random(1)  # noqa: S311 - load, not secrets
    for number in range(nodes):
        node = fleet.node(f"node-{number:05d}")
        node.hello(brain_fleet.hello(number), boottime_s())
        node.inventory(brain_fleet.inventory(number))
        node.partition_state(brain_fleet.partitions(number))
        node.fast(brain_fleet.fast(1, chance), boottime_s())
    return fleet


async def _place_many(broker: Broker, count: int) -> list[float]:
    samples_ms = []
    for number in range(count):
        for node in broker.fleet.nodes.values():
            node.heard_s = node.fast_s = boottime_s()  # as their streams would keep it
        wish = Wish(
            request=f"r-{number}",
            tenant="tenant",
            demands=(Demand(count=1 + number % 4, memory_bytes=8 << 30),),
        )
        order = Order(
            wish=wish,
            digest=digest_of(wish),
            reserve_ttl_ms=10_000,
            lease_ttl_ms=0,
            reserve_only=False,
            dry_run=False,
            attempts=3,
        )
        began_s = time.perf_counter()
        await broker.place(order)
        samples_ms.append((time.perf_counter() - began_s) * 1e3)
        await broker.written()  # one client, one request at a time
    return samples_ms


# --- streams --------------------------------------------------------------------------------------


def _streams(quick: bool) -> list[Result]:
    """Return what 2,000 agents cost, and how long they take to come back."""
    with tempfile.TemporaryDirectory() as folder:
        address = f"127.0.0.1:{_free_port()}"
        words = [sys.executable, "-m", "alloy_brain", "serve", "--listen", address]
        words += ["--ledger", f"{folder}/brain.db", "--log-level", "warning"]
        with Path(f"{folder}/brain.log").open("wb") as log:
            brain = subprocess.Popen(words, stderr=log)
        crowds: list[subprocess.Popen[str]] = []
        try:
            return _with_crowds(brain, crowds, address, 5.0 if quick else 30.0)
        finally:
            brain.kill()
            brain.wait()
            for crowd in crowds:
                crowd.kill()
                crowd.wait()


def _with_crowds(
    brain: subprocess.Popen[bytes], crowds: list[subprocess.Popen[str]], address: str, span_s: float
) -> list[Result]:
    half = AGENTS // 2
    for first in (0, half):
        words = [sys.executable, "-m", "benchmarks.brain_fleet", address, str(first), str(half)]
        crowds.append(
            subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        )
    for crowd in crowds:
        _line(crowd)
    process = psutil.Process(brain.pid)
    time.sleep(2.0)
    before = process.cpu_times()
    began_s = time.monotonic()
    time.sleep(span_s)
    after = process.cpu_times()
    used = (after.user + after.system - before.user - before.system) / (time.monotonic() - began_s)
    memory_mb = process.memory_full_info().pss / 1e6
    back_s = _all_back(crowds)
    return [
        result(f"cores for {AGENTS} agents at 1 Hz", [used], "cores", "<=", 1.0),
        result(f"memory (PSS) with {AGENTS} agents", [memory_mb], "MB", "<=", 300.0),
        result(f"{AGENTS} streams dropped at once are all back", [back_s], "s", "<=", 60.0),
    ]


def _all_back(crowds: list[subprocess.Popen[str]]) -> float:
    began_s = time.monotonic()
    for crowd in crowds:
        if crowd.stdin is not None:
            crowd.stdin.write("again\n")
            crowd.stdin.flush()
    for crowd in crowds:
        _line(crowd)
    return time.monotonic() - began_s


def _line(crowd: subprocess.Popen[str]) -> dict[str, Any]:
    line = crowd.stdout.readline() if crowd.stdout is not None else ""
    if not line:
        raise RuntimeError("the simulated agents ended")
    said: dict[str, Any] = json.loads(line)
    return said


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    sys.exit(main("brain", measure))
