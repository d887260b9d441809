"""Nodes for the brain's tests: what a fleet may know, and real ends of the stream."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from alloy_agent import leases
from alloy_agent.config import BrainSettings
from alloy_agent.errors import AlloyError
from alloy_agent.host.clock import boot_id, boottime_s
from alloy_agent.model import PartitionId
from alloy_agent.proto import agent_pb2 as pb
from alloy_agent.proto.failures import failure_reply
from alloy_agent.store import Store
from alloy_agent.uplink import codec
from alloy_agent.uplink.client import Uplink
from alloy_agent.uplink.desk import LeaseDesk
from alloy_agent.uplink.outbox import Outbox

GIB = 1 << 30
WAIT_S = 30.0


def until(look: Callable[[], Any], what: str, wait_s: float = WAIT_S) -> Any:
    """Return what a look finds; give up after a generous while."""
    until_s = time.monotonic() + wait_s
    while time.monotonic() < until_s:
        found = look()
        if found:
            return found
        time.sleep(0.01)
    raise AssertionError(f"never came: {what}")


def device(id_: str, **other: Any) -> pb.Device:
    values: dict[str, Any] = {
        "vendor": pb.VENDOR_NVIDIA,
        "model": "H100-SXM5-80GB",
        "scheme": pb.SCHEME_INSTANCES,
        "slices": 8,
        "condition": pb.CONDITION_OK,
        "tier_limits": [pb.TierLimit(way="mig", tier=pb.TIER_HARD)],
    }
    return pb.Device(id=id_, **{**values, **other})


def piece(on: str, profile: str, start: int, **other: Any) -> pb.Partition:
    size = int(profile[0]) if profile[0].isdigit() else 1
    values: dict[str, Any] = {
        "size": size,
        "incarnation": "i1",
        "generation": 1,
        "memory_bytes": size * 10 * GIB,
        "share": pb.SHARE_EXCLUSIVE,
        "managed": True,
        "tier": pb.TIER_HARD,
    }
    return pb.Partition(
        id=f"{on}/{profile}@{start}",
        device=on,
        profile=profile,
        start=start,
        **{**values, **other},
    )


class Agent:
    """A node with real books and a real stream; its devices are a list that a test changes."""

    def __init__(
        self,
        folder: Path,
        name: str,
        devices: list[pb.Device],
        partitions: list[pb.Partition],
    ) -> None:
        self.name = name
        self.devices = devices
        self.partitions = partitions
        self.revision = 1
        self.held_back = threading.Event()
        self.held_back.set()
        self.commands: list[str] = []
        self.store = Store.open(folder)
        self.outbox = Outbox(self.store, name, boot_id(), 10_000)
        self.desk = LeaseDesk(self.store, self._view, self._changed)
        self.uplink: Uplink | None = None
        self._stop = threading.Event()
        self._pulse = threading.Thread(target=self._beat, daemon=True)

    def dial(self, address: str, **other: Any) -> Agent:
        """Begin to dial a brain, sending samples."""
        values = {"reconnect_min_s": 0.02, "reconnect_max_s": 0.2, "rate_hz": 20.0, **other}
        settings = BrainSettings(address=address, **values)
        self.uplink = Uplink(
            settings,
            self.outbox,
            self._hello,
            self.state,
            self._run,
            on_welcome=lambda welcome: self.desk.see_brain(welcome.epoch),
        )
        self.uplink.start()
        self._pulse.start()
        return self

    def close(self) -> None:
        """End it all."""
        self._stop.set()
        self.held_back.set()
        if self.uplink is not None:
            self.uplink.stop()
        if self._pulse.ident is not None:
            self._pulse.join(5.0)
        self.store.close()

    def state(self) -> list[pb.AgentMessage]:
        """Return everything of the node."""
        inventory = pb.Inventory(revision=self.revision, devices=self.devices)
        state = pb.PartitionState(revision=self.revision, partitions=self.partitions)
        return [pb.AgentMessage(inventory=inventory), pb.AgentMessage(partition_state=state)]

    def tell(self) -> None:
        """Say that the node has changed."""
        self.revision += 1
        for message in self.state():
            if self.uplink is not None:
                self.uplink.offer(message, urgent=True)

    def event(self, message: pb.AgentMessage) -> None:
        """Put an event into the outbox."""
        self.outbox.add(message)

    def _beat(self) -> None:
        sample = 0
        while not self._stop.wait(0.05):
            sample += 1
            rows = len(self.partitions)
            fast = pb.Fast(
                partitions_revision=self.revision, inventory_revision=self.revision, sample=sample
            )
            fast.partitions.age_ms.extend([1] * rows)
            fast.partitions.compute_active_e4.extend([0] * rows)
            if self.uplink is not None:
                self.uplink.offer(pb.AgentMessage(fast=fast))

    def _hello(self) -> pb.Hello:
        return codec.hello(
            node=self.name,
            cluster="",
            boot_id=boot_id(),
            agent_version="test",
            capabilities=(),
            ledger=self.desk.ledger,
            now_s=boottime_s(),
        )

    def _view(self) -> leases.View:
        return leases.View(
            now_s=boottime_s(),
            boot_id=boot_id(),
            generations={PartitionId(p.id): p.generation for p in self.partitions},
            standalone=False,
        )

    def _changed(self, change: leases.Change, command_id: str, now_s: float) -> None:
        message = codec.lease_change(change, now_s, command_id)
        self.outbox.add(pb.AgentMessage(lease_change=message))
        if change.after is not None and change.after.value == "releasing":
            threading.Thread(target=self._clear, args=(change.lease.id,), daemon=True).start()

    def _clear(self, lease: Any) -> None:
        with contextlib.suppress(AlloyError):
            self.desk.cleared(lease)  # nobody is ever inside

    def _run(
        self, command: pb.BrainMessage, emit: Callable[[pb.AgentMessage], None]
    ) -> BaseException | None:
        self.held_back.wait(WAIT_S)
        self.commands.append(command.id)
        try:
            reply = self.desk.handle(command)
        except AlloyError as exc:
            reply = failure_reply(command.id, exc)
        emit(pb.AgentMessage(reply=reply))
        return None
