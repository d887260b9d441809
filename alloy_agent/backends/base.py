"""What every backend can be asked, and the rules it keeps.

A backend translates one vendor's library or kernel interface into the nouns of `model`. It lives
in a worker
process of its own; nothing else loads the vendor's library. All calls may block, so the worker
makes them on
one thread per device and never re-enters a call that has not returned.

Rules that stay true in every backend:

* `observe` reports what the device says now, never what was last written.
* `apply` does exactly one step and returns when the device has taken it, or raises; it never
  retries for longer
  than a few seconds, never touches another device's partitions (a hive- or node-wide mode names
  itself so), and
  leaves a partial step in a state from which the same step, or its undo, can be applied again.
* Between `quiesce(device)` and `resume(device)` the backend holds no handle, file or connection on
  that device.
* Failures are raised as `BackendError` subclasses, once, with the vendor's own words in the
  message.
* Identity never rests on an index; profiles and their names come from the driver.
* A signal or fact that cannot be read is absent with a reason, never zero.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from alloy_agent.errors import UnsupportedError
from alloy_agent.model import (
    Capabilities,
    DeviceEvent,
    DeviceId,
    Diagnosis,
    Fact,
    Observation,
    Quality,
    SignalSpec,
    Step,
)


class SignalSink(Protocol):
    """Where a sample goes: one slot per `SignalSpec`, in the order of `signal_specs`."""

    def put(
        self,
        slot: int,
        value: float,
        quality: Quality = Quality.VALUE,
        source_time_s: float | None = None,
    ) -> None:
        """Store one value; `source_time_s` is boot time, None if the source has no clock."""
        ...

    def put_many(
        self,
        first: int,
        values: Sequence[float],
        quality: Quality = Quality.VALUE,
        source_time_s: float | Sequence[float] | None = None,
    ) -> None:
        """Store the values of consecutive slots from `first` on, as `put` would each of them.

        Source times are one for all, or one for each, NaN where the source has no clock. One call
        costs a few times one `put`, and least with an `array("d")`.
        """
        times_s = source_time_s
        if times_s is None or isinstance(times_s, (int, float)):
            for slot, value in enumerate(values, first):
                self.put(slot, value, quality, times_s)
            return
        for slot, (value, time_s) in enumerate(zip(values, times_s, strict=True), first):
            self.put(slot, value, quality, None if math.isnan(time_s) else time_s)


@runtime_checkable
class Backend(Protocol):
    """One vendor's devices on this host."""

    name: str

    def capabilities(self) -> Capabilities:
        """Return what this backend can do here. Never raises."""
        ...

    def discover(self) -> tuple[DeviceId, ...]:
        """Return the ids of all devices, in a stable order.

        A device that cannot be opened is still listed.

        Raises:
            BackendError: The driver or library does not answer at all.
        """
        ...

    def observe(self, device: DeviceId) -> Observation:
        """Return the device, its partitions and its faults, read back now.

        Raises:
            DeviceLostError: The device has gone.
            BackendError: The device answers with an error.
        """
        ...

    def apply(self, step: Step) -> None:
        """Do one step on one device.

        Raises:
            UnsupportedError, DeviceBusyError, DeviceLostError, NotPermittedError, BackendError.
        """
        ...

    def quiesce(self, device: DeviceId) -> None:
        """Let go of every handle on the device."""
        ...

    def resume(self, device: DeviceId) -> None:
        """Allow handles on the device again."""
        ...

    def signal_specs(self, device: DeviceId) -> tuple[SignalSpec, ...]:
        """Return the columns that `sample` fills for this device and its present partitions."""
        ...

    def sample(self, device: DeviceId, sink: SignalSink) -> None:
        """Read the fast signals of one device once. Must not sleep and should allocate nothing."""
        ...

    def wait_events(self, timeout_s: float) -> Sequence[DeviceEvent]:
        """Block up to `timeout_s` for device events, on a thread of its own; empty on time-out."""
        ...

    def facts(self, device: DeviceId) -> tuple[Fact, ...]:
        """Return what this device's checks need to see, read now, each with its method."""
        ...

    def diagnose(self) -> tuple[Diagnosis, ...]:
        """Return what this host has and lacks for this vendor. Never raises."""
        ...

    def close(self) -> None:
        """Let go of everything; the backend is not used again."""
        ...


@runtime_checkable
class Resettable(Protocol):
    """A backend that can reset a device. Its driver may refuse while anybody has it open."""

    def refuse_reset(self, device: DeviceId) -> None:
        """Do nothing, but refuse a device that is never reset.

        Raises:
            UnsupportedError: With what can be done instead.
        """
        ...

    def reset(self, device: DeviceId) -> None:
        """Reset the device; return once it is proved to be ready again.

        Raises:
            DeviceBusyError: Somebody is on it; nothing was done.
            BackendError: It failed, or whether it happened cannot be told.
        """
        ...


def reset(backend: Backend, device: DeviceId) -> None:
    """Reset a device, if its backend can.

    Raises:
        UnsupportedError: This backend resets nothing.
    """
    _resettable(backend, device).reset(device)


def refuse_reset(backend: Backend, device: DeviceId) -> None:
    """Do nothing, but refuse a device that is never reset.

    Raises:
        UnsupportedError: This backend resets nothing, or not this device.
    """
    _resettable(backend, device).refuse_reset(device)


def _resettable(backend: Backend, device: DeviceId) -> Resettable:
    if isinstance(backend, Resettable):
        return backend
    if backend.name == "cpu":
        raise UnsupportedError(
            f"{device}: CPUs are never reset", cure="restart the machine where they need it"
        )
    raise UnsupportedError(
        f"{device}: the agent does not reset devices of {backend.name}",
        cure="use the vendor's own tool while the device is drained",
    )
