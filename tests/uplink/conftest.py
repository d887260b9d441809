"""Real parts for the uplink's tests: a store on disk, a server on loopback, the agent's end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from alloy_agent.config import BrainSettings
from alloy_agent.proto import agent_pb2 as pb
from alloy_agent.store import Store
from alloy_agent.uplink.client import Uplink
from alloy_agent.uplink.outbox import Outbox
from tests.uplink.brains import Brain, serve

Emit = Callable[[pb.AgentMessage], None]


class Agent:
    """The node behind an uplink: it counts what it is asked and can be made slow."""

    def __init__(self, folder: Path, max_rows: int = 1000) -> None:
        self.store = Store.open(folder)
        self.outbox = Outbox(self.store, "node-a", "boot-a", max_rows)
        self.ran: list[str] = []
        self.defects: list[BaseException] = []
        self.gate = threading.Event()
        self.gate.set()
        self.failure: BaseException | None = None
        self.brain_epoch = 0
        self.uplink: Uplink | None = None

    def hello(self) -> pb.Hello:
        return pb.Hello(node="node-a", boot_id="boot-a", brain_epoch=self.brain_epoch)

    def state(self) -> list[pb.AgentMessage]:
        return [
            pb.AgentMessage(inventory=pb.Inventory(revision=1)),
            pb.AgentMessage(partition_state=pb.PartitionState(revision=1)),
        ]

    def run(self, command: pb.BrainMessage, emit: Emit) -> BaseException | None:
        self.gate.wait(30)
        self.ran.append(command.id)
        emit(pb.AgentMessage(progress=pb.Progress(command_id=command.id, done=1, total=1)))
        token = len(self.ran)
        reply = pb.Reply(command_id=command.id, status=pb.STATUS_OK, token=token)
        emit(pb.AgentMessage(reply=reply))
        return self.failure

    def dial(self, settings: BrainSettings) -> Uplink:
        self.uplink = Uplink(
            settings, self.outbox, self.hello, self.state, self.run, self.defects.append
        )
        self.uplink.start()
        return self.uplink

    def finding(self, text: str) -> int:
        return self.outbox.add(pb.AgentMessage(finding=pb.Finding(check=text)))

    def close(self) -> None:
        self.gate.set()
        if self.uplink is not None:
            self.uplink.stop()
        self.store.close()


def settings(port: int, **other: object) -> BrainSettings:
    """Return settings that dial loopback eagerly."""
    values: dict[str, object] = {
        "address": f"127.0.0.1:{port}",
        "rate_hz": 200.0,
        "reconnect_min_s": 0.02,
        "reconnect_max_s": 0.1,
    }
    return BrainSettings(**{**values, **other})  # type: ignore[arg-type]


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    made = Agent(tmp_path / "state")
    yield made
    made.close()


@pytest.fixture
def brain() -> Brain:
    return Brain()


@pytest.fixture
def port(brain: Brain) -> Iterator[int]:
    server, number = serve(brain)
    yield number
    server.stop(0).wait(10)
