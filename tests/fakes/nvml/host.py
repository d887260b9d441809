"""An NVIDIA host for tests: a machine, its driver's files, and backends over the library."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from alloy_agent.backends.base import SignalSink
from alloy_agent.backends.nvidia import NvidiaBackend, open_backend
from alloy_agent.model import (
    Create,
    DeviceId,
    ModeKind,
    Partition,
    PartitionSpec,
    Placement,
    Quality,
    SetMode,
)
from alloy_agent.silicon.machine import Machine
from alloy_agent.silicon.state import Client, Fault
from tests.fakes.nvml.library import FakeNvml
from tests.fakes.nvml.root import write_root

LIBRARY = "tests.fakes.nvml:open_library"


class Sink(SignalSink):
    """Keeps the last value of each slot."""

    def __init__(self) -> None:
        self.slots: dict[int, tuple[float, Quality, float | None]] = {}

    def put(
        self,
        slot: int,
        value: float,
        quality: Quality = Quality.VALUE,
        source_time_s: float | None = None,
    ) -> None:
        """Keep one value."""
        self.slots[slot] = (value, quality, source_time_s)


class NvidiaHost:
    """One simulated host."""

    def __init__(self, directory: Path, *specs: str, **traits: Any) -> None:
        self.root = directory / "root"
        self.options: dict[str, Any] = {
            "library": LIBRARY,
            "library_options": {
                "specs": list(specs),
                "state_dir": str(directory / "silicon"),
                **traits,
            },
            "root": str(self.root),
        }
        self.backend = self.open()
        if not traits.get("no_library"):
            write_root(self.machine, self.root)

    def open(self) -> NvidiaBackend:
        """Return a backend, as of a new process."""
        return open_backend(self.options)

    @property
    def library(self) -> FakeNvml:
        """The library beneath the backend."""
        library: FakeNvml = self.backend.nvml.module.nvmlLib
        return library

    @property
    def machine(self) -> Machine:
        """The machine beneath the library."""
        return self.library.machine

    def fail(self, call: str, **how: Any) -> int:
        """Script a fault; returns its key."""
        return self.machine.add_fault(Fault(call=call, **how))

    def mig(self, device: DeviceId, wanted: str = "on") -> None:
        """Switch MIG."""
        current = "off" if wanted == "on" else "on"
        kind = ModeKind.MIG
        self.backend.apply(SetMode(device=device, kind=kind, current=current, wanted=wanted))

    def make(self, device: DeviceId, *pieces: str) -> tuple[Partition, ...]:
        """Make pieces ("3g.40gb@4"); returns all partitions."""
        sizes = {p.name: p.size for p in self.backend.observe(device).device.profiles}
        for piece in pieces:
            name, _, start = piece.partition("@")
            place = Placement(start=int(start), size=sizes[name])
            spec = PartitionSpec(device=device, profile=name, size=place.size, placement=place)
            self.backend.apply(Create(device=device, spec=spec))
        return self.backend.observe(device).partitions

    def run(self, partition: Partition, pid: int = 4242, **more: Any) -> None:
        """Run a process in a partition."""
        instance = partition.locator.get("gi")
        self.machine.start_process(
            Client(
                pid=pid,
                device=partition.device,
                instance=None if instance is None else int(instance),
                **more,
            )
        )

    def sampled(self, device: DeviceId, times: int = 1) -> dict[tuple[str, str], Any]:
        """Return the last sample by signal and subject."""
        specs = self.backend.signal_specs(device)
        sink = Sink()
        for _ in range(times):
            self.backend.sample(device, sink)
        return {(spec.name, spec.subject): sink.slots[slot] for slot, spec in enumerate(specs)}
