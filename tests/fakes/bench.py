"""A small machine of sliced devices behind the worker interface, with counted vendor calls.

Every piece takes two vendor calls to make and two to remove, so that a process can die in the
middle of a step; a half-made piece shows as a fault of the device and holds its slices. The state
can live in a file, so that it outlives a process. `Mortal` numbers the moments at which a process
can die.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from alloy_agent.errors import BackendError, DeviceBusyError
from alloy_agent.model import (
    HALF_MADE,
    Configure,
    Create,
    Destroy,
    Device,
    DeviceFault,
    DeviceId,
    Mode,
    ModeKind,
    Observation,
    Partition,
    PartitionId,
    Placement,
    Profile,
    Scheme,
    SetMode,
    Snapshot,
    Step,
    Vendor,
)
from alloy_agent.store import Store

BOOT = "boot-1"
SLICES = 8


class SimulatedDeath(BaseException):
    """The process died here; nothing of it may run any more."""


class Mortal:
    """Counts the moments at which a process can die, and dies at one of them."""

    def __init__(self, dies_at: int = 0, *, kill: bool = False) -> None:
        self.count = 0
        self.dead = False
        self.names: list[str] = []
        self._dies_at = dies_at
        self._kill = kill

    def point(self, name: str) -> None:
        """Die here if this is the moment; stay dead ever after."""
        if self.dead:
            raise SimulatedDeath
        self.count += 1
        self.names.append(name)
        if self.count == self._dies_at:
            if self._kill:
                os.kill(os.getpid(), signal.SIGKILL)
            self.dead = True
            raise SimulatedDeath(name)


class Piece(msgspec.Struct):
    """One piece in the machine; `whole` once its second call was made."""

    profile: str
    size: int
    serial: int
    whole: bool = False


class Bench(msgspec.Struct):
    """The state of one device."""

    pieces: dict[str, Piece] = {}  # by start
    mig: str = "on"
    pending: str | None = None
    alive: bool = True


class State(msgspec.Struct):
    """The state of all devices of the machine."""

    devices: dict[str, Bench]
    serial: int = 0
    boot_id: str = BOOT


class Machine:
    """Live state and its vendor calls; `fail` scripts how the next ones end."""

    def __init__(self, devices: Iterable[str] = ("gpu-a",), path: Path | None = None) -> None:
        self.path = path
        if path is not None and path.exists():
            self.state = msgspec.json.decode(path.read_bytes(), type=State)
        else:
            self.state = State(devices={name: Bench() for name in devices})
        self.mortal = Mortal()
        self.calls: list[str] = []
        self.failures: dict[str, list[Exception | None]] = {}
        self.mode_needs_reset = False

    def fail(self, call: str, *errors: Exception | None) -> None:
        """Let the next calls of this name end so; None lets one through."""
        self.failures.setdefault(call, []).extend(errors)

    def vendor_call(self, name: str, device: str, change: Callable[[Bench], None]) -> None:
        """Make one vendor call: the process may die right before it and right after it."""
        self.mortal.point(f"before {name}")
        self.calls.append(f"{name} {device}")
        script = self.failures.get(name)
        if script and (error := script.pop(0)) is not None:
            raise error
        change(self.state.devices[device])
        self._save()
        self.mortal.point(f"after {name}")

    def _save(self) -> None:
        if self.path is not None:
            new = self.path.with_suffix(".new")
            new.write_bytes(msgspec.json.encode(self.state))
            new.replace(self.path)

    def next_serial(self) -> int:
        """Return a number that no piece has had."""
        self.state.serial += 1
        return self.state.serial

    def reboot(self) -> None:
        """Start the node anew: pieces do not outlive it."""
        for device in self.state.devices.values():
            device.pieces.clear()
        self.state.boot_id += "'"

    def foreign(self, device: str, start: int, profile: str, size: int) -> PartitionId:
        """Make a piece as somebody else would."""
        piece = Piece(profile=profile, size=size, serial=self.next_serial(), whole=True)
        self.state.devices[device].pieces[str(start)] = piece
        return PartitionId(f"{device}/{profile}@{start}")

    def shape(self) -> dict[str, list[tuple[int, str, bool]]]:
        """Return what is there, for comparing."""
        return {
            name: sorted((int(s), p.profile, p.whole) for s, p in device.pieces.items())
            for name, device in self.state.devices.items()
        }


class BenchWorker:
    """The machine as a worker shows it."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.quiet: set[str] = set()

    def quiesce(self, device: DeviceId) -> None:
        self.machine.mortal.point("quiesce")
        self.quiet.add(device)

    def resume(self, device: DeviceId) -> None:
        self.machine.mortal.point("resume")
        self.quiet.discard(device)

    def observe(self, device: DeviceId, deadline_s: float | None = None) -> Observation:
        del deadline_s
        self.machine.mortal.point("observe")
        script = self.machine.failures.get("observe")
        if script and (error := script.pop(0)) is not None:
            raise error
        bench = self.machine.state.devices[device]
        half = [start for start, piece in bench.pieces.items() if not piece.whole]
        return Observation(
            device=self._device(device, bench),
            partitions=tuple(
                _partition(device, int(start), piece)
                for start, piece in sorted(bench.pieces.items())
                if piece.whole
            ),
            faults=tuple(
                DeviceFault(device=device, kind=HALF_MADE, reason=f"piece at {start}")
                for start in half
            ),
        )

    def _device(self, device: DeviceId, bench: Bench) -> Device:
        return Device(
            id=device,
            vendor=Vendor.NVIDIA,
            model="Bench",
            backend="bench",
            scheme=Scheme.INSTANCES,
            slices=SLICES,
            slice_name="slice",
            profiles=tuple(
                Profile(
                    name=f"{size}g",
                    size=size,
                    starts=tuple(range(0, SLICES - size + 1, size)),
                    max_count=SLICES // size,
                )
                for size in (1, 2, 4)
            ),
            modes=(
                Mode(
                    kind=ModeKind.MIG,
                    current=bench.mig,
                    pending=bench.pending,
                    available=("on", "off"),
                ),
            ),
        )

    def apply(self, step: Step) -> None:
        if step.device not in self.quiet:
            raise AssertionError("a step on a device that is not quiesced")
        match step:
            case Create():
                self._create(step)
            case Destroy():
                self._destroy(step)
            case SetMode():
                self._set_mode(step)
            case Configure():
                raise BackendError("no caps here")

    def _create(self, step: Create) -> None:
        spec, machine = step.spec, self.machine
        assert spec.placement is not None
        start = str(spec.placement.start)
        bench = machine.state.devices[step.device]
        found = bench.pieces.get(start)
        half = found is not None and not found.whole and found.profile == spec.profile
        if not half:
            for other, piece in bench.pieces.items():
                if Placement(start=int(other), size=piece.size).overlaps(spec.placement):
                    raise BackendError(f"insufficient resources for {spec.profile} at {start}")
            new = Piece(profile=spec.profile, size=spec.size, serial=machine.next_serial())
            machine.vendor_call(
                "create_instance", step.device, lambda b: b.pieces.__setitem__(start, new)
            )
        machine.vendor_call(
            "create_compute", step.device, lambda b: setattr(b.pieces[start], "whole", True)
        )

    def _destroy(self, step: Destroy) -> None:
        machine, start = self.machine, str(step.partition.placement.start)
        found = machine.state.devices[step.device].pieces.get(start)
        if found is None:
            raise BackendError(f"nothing at {start}")
        incarnation = step.partition.incarnation
        if found.whole and incarnation and incarnation != _incarnation(found):
            raise BackendError(f"another piece is at {start}")
        if found.whole:
            machine.vendor_call(
                "destroy_compute", step.device, lambda b: setattr(b.pieces[start], "whole", False)
            )
        machine.vendor_call("destroy_instance", step.device, lambda b: _drop(b, start))

    def _set_mode(self, step: SetMode) -> None:
        bench = self.machine.state.devices[step.device]
        if bench.pieces:
            raise DeviceBusyError("instances exist")

        def change(device: Bench) -> None:
            if self.machine.mode_needs_reset:
                device.pending = step.wanted
            else:
                device.mig, device.pending = step.wanted, None

        self.machine.vendor_call("set_mode", step.device, change)


def _drop(bench: Bench, start: str) -> None:
    del bench.pieces[start]


def _incarnation(piece: Piece) -> str:
    return f"MIG-{piece.serial}"


def _partition(device: DeviceId, start: int, piece: Piece) -> Partition:
    return Partition(
        id=PartitionId(f"{device}/{piece.profile}@{start}"),
        device=device,
        profile=piece.profile,
        placement=Placement(start=start, size=piece.size),
        incarnation=_incarnation(piece),
        uuid=_incarnation(piece),
    )


class BenchObserver:
    """Whole snapshots of the machine, with generations and ownership from the store."""

    def __init__(self, worker: BenchWorker, store: Store) -> None:
        self._worker = worker
        self._store = store
        self._sequence = 0

    def observe(self) -> Snapshot:
        self._sequence += 1
        seen = [self._worker.observe(DeviceId(d)) for d in self._worker.machine.state.devices]
        managed = self._store.managed()
        return Snapshot(
            boot_id=self._worker.machine.state.boot_id,
            sequence=self._sequence,
            taken_at_s=float(self._sequence),
            taken_wall_s=0.0,
            devices=tuple(o.device for o in seen),
            partitions=tuple(
                msgspec.structs.replace(
                    piece,
                    generation=self._store.generation_of(piece.id, piece.incarnation),
                    managed=managed.get(piece.id) == piece.incarnation,
                )
                for o in seen
                for piece in o.partitions
            ),
            faults=tuple(fault for o in seen for fault in o.faults),
        )
