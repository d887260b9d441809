"""Simulated agents for the benchmarks of the brain: what a node says, and many of them at once.

Run as a program it keeps `COUNT` streams to a brain, sends one sample a second on each, and prints
a line of JSON when all stand; a line on standard input makes it drop all of them and come back.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import random
import sys
import time
from typing import Any, Final

from alloy_agent.proto import agent_pb2 as pb
from alloy_agent.proto import agent_pb2_grpc, keepalive

PROFILES: Final = (("1g.10gb", 1, 10), ("2g.20gb", 2, 20), ("3g.40gb", 3, 40))
GIB: Final = 1 << 30


def inventory(node: int, devices: int = 8) -> pb.Inventory:
    """Return the devices of a node."""
    found = pb.Inventory(revision=1, boot_id=f"boot-{node}")
    for number in range(devices):
        found.devices.add(
            id=f"GPU-{node:05d}-{number}",
            vendor=pb.VENDOR_NVIDIA,
            model="H100-SXM5-80GB",
            scheme=pb.SCHEME_INSTANCES,
            slices=8,
            condition=pb.CONDITION_OK,
            memory_bytes=80 * GIB,
            tier_limits=[pb.TierLimit(way="mig", tier=pb.TIER_HARD)],
        )
    return found


def partitions(node: int, devices: int = 8, pieces: int = 7) -> pb.PartitionState:
    """Return the partitions of a node."""
    state = pb.PartitionState(revision=1, snapshot_sequence=1)
    for device in range(devices):
        for piece in range(pieces):
            state.partitions.add(
                id=f"GPU-{node:05d}-{device}/1g.10gb@{piece}",
                device=f"GPU-{node:05d}-{device}",
                profile="1g.10gb",
                start=piece,
                size=1,
                incarnation=f"i{piece}",
                generation=1,
                memory_bytes=10 * GIB,
                compute_units=16,
                share=pb.SHARE_EXCLUSIVE,
                managed=True,
                tier=pb.TIER_HARD,
            )
    return state


def fast(sample: int, chance: random.Random, devices: int = 8, pieces: int = 7) -> pb.Fast:
    """Return one sample of a node."""
    rows = devices * pieces
    message = pb.Fast(partitions_revision=1, inventory_revision=1, sample=sample)
    block = message.partitions
    block.age_ms.extend([20] * rows)
    block.compute_active_e4.extend(chance.randrange(10_000) for _ in range(rows))
    block.memory_used_mib.extend(chance.randrange(10_240) for _ in range(rows))
    block.memory_bandwidth_active_e4.extend(chance.randrange(10_000) for _ in range(rows))
    message.devices.age_ms.extend([20] * devices)
    message.devices.temperature_headroom_dk.extend([250] * devices)
    message.devices.power_w.extend([400] * devices)
    return message


def hello(node: int) -> pb.Hello:
    """Return who a node is."""
    return pb.Hello(
        node=f"node-{node:05d}", boot_id=f"boot-{node}", agent_version="benchmark", epoch=node + 1
    )


class Agent:
    """One simulated agent: attaches, says everything once, then a sample a second."""

    def __init__(self, number: int, stub: agent_pb2_grpc.PlacementBrainStub) -> None:
        self.number = number
        self.stub = stub
        self.standing = asyncio.Event()
        self.call: Any = None
        self.away = 0
        body = fast(1, random.Random(number))  # noqa: S311 - load, not secrets
        self.fast = pb.AgentMessage(epoch=number + 1, fast=body)

    async def run(self) -> None:
        """Keep a stream for ever, with the jitter and the hints that agents honour."""
        failures = 0
        while True:
            hint_s = await self._once()
            failures = 0 if self.standing.is_set() else min(failures + 1, 7)
            self.standing.clear()
            wait_s = random.uniform(0.0, min(30.0, 0.2 * 2.0**failures))  # noqa: S311
            await asyncio.sleep(wait_s + hint_s * random.uniform(1.0, 1.5))  # noqa: S311

    async def _once(self) -> float:
        """Have one stream; return how long the brain wants us to stay away."""
        import grpc

        attach: Any = self.stub.Attach
        self.call = attach()
        try:
            await self.call.write(pb.AgentMessage(hello=hello(self.number)))
            first = await self.call.read()
            if not isinstance(first, pb.BrainMessage):
                return await self._hint()
            await self.call.write(pb.AgentMessage(inventory=inventory(self.number)))
            await self.call.write(pb.AgentMessage(partition_state=partitions(self.number)))
            self.standing.set()
            await asyncio.sleep(random.uniform(0.0, 1.0))  # noqa: S311 - not all at once
            while True:
                self.fast.fast.sample += 1
                await self.call.write(self.fast)
                await asyncio.sleep(1.0)
        except (grpc.RpcError, asyncio.InvalidStateError, asyncio.CancelledError):
            return await self._hint()

    async def _hint(self) -> float:
        self.away += 1
        for key, value in await self.call.trailing_metadata() or ():
            if key == keepalive.RETRY_AFTER_KEY:
                return int(value) / 1e3
        return 0.0


async def main(address: str, first: int, count: int) -> None:
    """Keep the agents; drop and bring them back on each line of standard input."""
    aio: Any = importlib.import_module("grpc.aio")
    options = [("grpc.max_concurrent_streams", 10_000)]
    channels = []
    agents = []
    for number in range(first, first + count):
        # A channel of its own for each, as agents on hosts of their own have.
        channel = aio.insecure_channel(address, options=[*keepalive.client_options(), *options])
        channels.append(channel)
        agents.append(Agent(number, agent_pb2_grpc.PlacementBrainStub(channel)))
    tasks = [asyncio.ensure_future(agent.run()) for agent in agents]
    loop = asyncio.get_running_loop()
    while True:
        began_s = time.monotonic()
        for agent in agents:
            await agent.standing.wait()
        away = sum(agent.away for agent in agents)
        line = {"standing": count, "took_s": time.monotonic() - began_s, "sent_away": away}
        print(json.dumps(line), flush=True)
        if not await loop.run_in_executor(None, sys.stdin.readline):
            break
        for agent in agents:
            agent.standing.clear()
            agent.call.cancel()
        await asyncio.sleep(0)
    for task in tasks:
        task.cancel()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
