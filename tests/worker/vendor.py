"""A vendor library with faults on request, and the backend over it: what the tests' workers run.

Options: `devices` (count), `pieces` (partitions of each), `faults` ({"<device>.<call>": fault}).
Faults: "hang" (until `<dir>/free-<device>` exists), "hang_once", "segv", "exit", "hold" (keeps the
interpreter), "slow:<seconds>", "raise", "lost". "<call>" is a method of `Backend`. With `dir` the
backend writes marks there for the tests.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from alloy_agent.errors import BackendError, DeviceLostError, NotPermittedError
from alloy_agent.model import (
    Capabilities,
    Create,
    Destroy,
    Device,
    DeviceEvent,
    DeviceId,
    Diagnosis,
    Fact,
    Observation,
    Partition,
    PartitionId,
    Placement,
    Quality,
    Scheme,
    Scope,
    SignalSpec,
    Step,
    Vendor,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from alloy_agent.backends.base import SignalSink

SIGNALS = 5


class Vendored:
    """A backend that does as it is told."""

    name = "vendored"

    def __init__(self, options: dict[str, Any]) -> None:
        self.count = int(options.get("devices", 4))
        self.faults: dict[str, str] = options.get("faults", {})
        self.dir = Path(options["dir"]) if "dir" in options else None
        pieces = int(options.get("pieces", 2))
        self.pieces = {device: list(range(pieces)) for device in self._ids()}
        self.made = 0
        self.storm = int(options.get("storm", 0))
        self.handles: dict[str, int] = {}
        self.quiet: set[str] = set()
        self.calls = 0
        self.born = 0.0
        self._fault("", "open")

    def _ids(self) -> tuple[DeviceId, ...]:
        return tuple(DeviceId(f"dev{n}") for n in range(self.count))

    def _fault(self, device: str, call: str) -> None:
        key = f"{device}.{call}"
        fault = self.faults.get(key, "")
        if not fault:
            return
        kind, _, argument = fault.partition(":")
        if self.dir is not None:
            with (self.dir / f"entered-{device}-{call}").open("a") as marks:
                marks.write(f"{os.getpid()} {time.monotonic()}\n")
        if kind == "hang_once":
            del self.faults[key]
        if kind == "after":  # "after:<seconds>:<fault>"
            seconds, _, then = argument.partition(":")
            self.born = self.born or time.monotonic()
            if time.monotonic() - self.born > float(seconds):
                self.faults[key] = then
                self._fault(device, call)
            return
        getattr(self, f"_{kind}")(device, argument)

    def _hang(self, device: str, _argument: str) -> None:
        while self.dir is None or not (self.dir / f"free-{device}").exists():
            time.sleep(0.005)

    _hang_once = _hang

    def _segv(self, _device: str, _argument: str) -> None:
        ctypes.string_at(0)

    def _exit(self, _device: str, _argument: str) -> None:
        os._exit(7)

    def _hold(self, _device: str, _argument: str) -> None:
        ctypes.PyDLL(None).sleep(600)

    def _slow(self, _device: str, argument: str) -> None:
        time.sleep(float(argument))

    def _burn(self, _device: str, argument: str) -> None:
        hashlib.pbkdf2_hmac("sha256", b"word", b"salt", int(argument))  # in C, without a pause

    def _lost(self, device: str, _argument: str) -> None:
        raise DeviceLostError(f"{device}: off the bus", cure="reset it")

    def _refuse(self, device: str, argument: str) -> None:
        raise NotPermittedError(f"{device or self.name}: refused{argument}", cure="run as root")

    def _bug(self, _device: str, _argument: str) -> None:
        raise KeyError("gi")

    def _garbage(self, _device: str, _argument: str) -> None:
        os.write(int(sys.argv[1]), b"\xff" * 64)

    def capabilities(self) -> Capabilities:
        self._fault("", "capabilities")
        return Capabilities(backend=self.name, vendors=(Vendor.NVIDIA,), library="vendored")

    def discover(self) -> tuple[DeviceId, ...]:
        self._fault("", "discover")
        if self.dir is not None and (self.dir / "unlisted").exists():
            gone = (self.dir / "unlisted").read_text().split()
            return tuple(d for d in self._ids() if d not in gone)
        return self._ids()

    def observe(self, device: DeviceId) -> Observation:
        self._fault(device, "observe")
        partitions = tuple(
            Partition(
                id=PartitionId(f"{device}/1g@{n}"),
                device=device,
                profile="1g",
                placement=Placement(start=n, size=1),
                incarnation=f"{self.made}-{n}",
            )
            for n in self.pieces[device]
        )
        return Observation(
            device=Device(
                id=device,
                vendor=Vendor.NVIDIA,
                model="Vendored",
                backend=self.name,
                scheme=Scheme.INSTANCES,
                slices=8,
                slice_name="slice",
            ),
            partitions=partitions,
        )

    def apply(self, step: Step) -> None:
        self._fault(step.device, "apply")
        if self.handles.get(step.device, 0):
            raise BackendError(f"{step.device}: in use")
        if isinstance(step, Create) and step.spec.placement is not None:
            self.pieces[step.device].append(step.spec.placement.start)
        elif isinstance(step, Destroy):
            self.pieces[step.device].remove(step.partition.placement.start)
        self.made += 1
        if self.dir is not None:
            with (self.dir / "applied").open("a") as marks:
                marks.write(f"{step.device}\n")

    def quiesce(self, device: DeviceId) -> None:
        self._fault(device, "quiesce")
        self.handles[device] = 0
        self.quiet.add(device)

    def resume(self, device: DeviceId) -> None:
        self.quiet.discard(device)

    def signal_specs(self, device: DeviceId) -> tuple[SignalSpec, ...]:
        self._fault(device, "signal_specs")
        return tuple(
            SignalSpec(
                name=f"alloy_partition_s{signal}_ratio",
                subject=f"{device}/1g@{piece}",
                scope=Scope.PARTITION,
                unit="ratio",
            )
            for piece in self.pieces[device]
            for signal in range(SIGNALS)
        )

    def sample(self, device: DeviceId, sink: SignalSink) -> None:
        if self.faults:
            self._fault(device, "sample")
        if device in self.quiet:
            (Path(self.dir or "/tmp") / "touched-while-quiet").touch()
        self.handles[device] = 1
        self.calls += 1
        value = float(self.calls)
        for slot in range(len(self.pieces[device]) * SIGNALS):
            if slot % SIGNALS == 4:
                sink.put(slot, 0.0, Quality.NOT_SUPPORTED)
            else:
                sink.put(slot, value)

    def wait_events(self, timeout_s: float) -> Sequence[DeviceEvent]:
        if self.storm:
            n, self.storm = self.storm, 0
            return [
                DeviceEvent(device=DeviceId("dev0"), kind="fault", code=f"xid:{i}")
                for i in range(n)
            ]
        time.sleep(timeout_s)
        return ()

    def facts(self, device: DeviceId) -> tuple[Fact, ...]:
        self._fault(device, "facts")
        return (Fact(subject=device, name="vendored.handles", value=self.handles.get(device, 0)),)

    def diagnose(self) -> tuple[Diagnosis, ...]:
        return (Diagnosis(subject="vendored", ok=True, found="here"),)

    def close(self) -> None:
        if self.dir is not None:
            (self.dir / "closed").touch()


def open_it(options: dict[str, Any]) -> Vendored:
    """Return the backend."""
    return Vendored(options)
