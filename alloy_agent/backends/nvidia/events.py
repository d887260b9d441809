"""Waiting for what the driver reports by itself.

One event set holds all GPUs that are not quiesced. A wait lasts at most `SLICE_S` at a time under
the lock, so that `exclude` (a partition change is due) gets its turn soon: it frees the set, and
the next wait makes a new one without that GPU. A lost GPU fails the wait for all of them, so it is
found, reported once, and left out from then on.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

from alloy_agent.backends.nvidia.gpu import WHOLE, Gpu
from alloy_agent.backends.nvidia.library import ABSENT, LOST, TIMEOUT, Nvml, NvmlCallError
from alloy_agent.model import DeviceEvent, PartitionId

SLICE_S: Final = 0.1
LOOK_AGAIN_S: Final = 5.0  # a lost GPU is looked at again this often
BURST_MAX: Final = 64  # events taken in one wait
# Source: nvml.h, nvmlEventType*.
XID: Final = 0x8
MIG_CHANGE: Final = 0x100
KINDS: Final[dict[int, tuple[str, str]]] = {
    0x1: ("fault", "ecc:corrected"),
    0x2: ("fault", "ecc:uncorrected"),
    0x200: ("fault", "ecc:storm"),
    0x400: ("fault", "ecc:dram_retired"),
    0x800: ("fault", "ecc:dram_retirement_failed"),
    0x1000: ("fault", "ecc:poison"),
    0x2000: ("fault", "ecc:poison_fatal"),
    0x4000: ("fault", "nvml:gpu_unavailable"),
    0x8000: ("fault", "nvml:recovery_action"),
    MIG_CHANGE: ("geometry", "mig"),
}
WANTED: Final = XID | sum(KINDS)


class EventWaiter:
    """The events of all GPUs; one thread waits, others exclude and include GPUs."""

    def __init__(self, nvml: Nvml, gpus: Callable[[], tuple[Gpu, ...]]) -> None:
        self._nvml = nvml
        self._gpus = gpus
        self._lock = threading.Lock()
        self._queue = threading.Lock()
        self._set: Any = None
        self._registered: dict[str, Gpu] = {}
        self._excluded: set[str] = set()
        self._lost: dict[str, float] = {}  # GPU to when it is looked at again
        self._wanted_by_others = 0

    def wait(self, timeout_s: float) -> list[DeviceEvent]:
        """Return what was reported, waiting up to `timeout_s` for the first.

        Raises:
            NvmlCallError: The driver does not answer.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            left_s = max(0.0, deadline - time.monotonic())
            while self._wanted_by_others:  # give way: a change waits for the lock
                time.sleep(0.001)
            with self._lock:
                found, blind = self._slice(min(SLICE_S, left_s))
            if found or left_s <= 0:
                return found
            if blind:
                time.sleep(min(SLICE_S, left_s))

    def exclude(self, device: str) -> None:
        """Hold no registration on a GPU until `include`."""
        with self._turn():
            self._excluded.add(device)
            if device in self._registered:
                self._free()

    def include(self, device: str) -> None:
        """Allow registrations on a GPU again."""
        with self._turn():
            self._excluded.discard(device)
            self._lost.pop(device, None)
            if self._set is not None and device not in self._registered:
                self._free()  # the next wait makes a set with this GPU in it

    def registrations(self, device: str) -> int:
        """Return how many registrations are held on a GPU."""
        return int(device in self._registered)

    def close(self) -> None:
        """Let go of all registrations."""
        with self._turn():
            self._free()

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """Hold the lock, which the waiter would otherwise take again before we wake."""
        with self._queue:
            self._wanted_by_others += 1
        try:
            with self._lock:
                yield
        finally:
            with self._queue:
                self._wanted_by_others -= 1

    # --- inside, under the lock ---

    def _slice(self, timeout_s: float) -> tuple[list[DeviceEvent], bool]:
        """Return the events of one short wait, and whether there was nothing to wait on."""
        back = self._returned() if self._lost else []
        if back:
            return back, False
        if self._set is None:
            self._register()
        if not self._registered:
            return [], True
        found: list[DeviceEvent] = []
        wait_ms = max(0, int(timeout_s * 1000))
        while len(found) < BURST_MAX:
            try:
                data = self._nvml.call("nvmlEventSetWait_v2", self._set, wait_ms)
            except NvmlCallError as failure:
                if failure.code == TIMEOUT:
                    return found, False
                found += self._without_lost()
                return found, not found
            found += self._event(data)
            wait_ms = 0
        return found, False

    def _returned(self) -> list[DeviceEvent]:
        """Return an event for each lost GPU that answers again, after a reset say."""
        events, now_s = [], time.monotonic()
        for gpu in self._gpus():
            if now_s < self._lost.get(str(gpu.id), float("inf")) or gpu.id in self._excluded:
                continue
            self._lost[str(gpu.id)] = now_s + LOOK_AGAIN_S
            with contextlib.suppress(NvmlCallError):
                gpu.call("nvmlDeviceGetPciInfo")
                del self._lost[str(gpu.id)]
                gpu.forget()
                events.append(
                    DeviceEvent(
                        device=gpu.id, kind="reset", code="nvml:gpu_is_back", time_s=_now_s()
                    )
                )
        if events:
            self._free()  # the next wait makes a set with them in it
        return events

    def _register(self) -> None:
        gpus = [g for g in self._gpus() if g.id not in self._excluded and g.id not in self._lost]
        if not gpus:
            return
        try:
            events = self._nvml.call("nvmlEventSetCreate")
        except NvmlCallError as failure:
            if failure.code in ABSENT:
                return
            raise
        self._set = events
        for gpu in gpus:
            with contextlib.suppress(NvmlCallError):  # this one alone stays without events
                supported = int(gpu.call("nvmlDeviceGetSupportedEventTypes"))
                gpu.call("nvmlDeviceRegisterEvents", supported & WANTED, events)
                self._registered[str(gpu.id)] = gpu
        if not self._registered:
            self._free()

    def _free(self) -> None:
        if self._set is not None:
            with contextlib.suppress(NvmlCallError):
                self._nvml.call("nvmlEventSetFree", self._set)
        self._set = None
        self._registered = {}

    def _without_lost(self) -> list[DeviceEvent]:
        """Find the GPUs that do not answer, leave them out, and say so once."""
        gone = []
        for gpu in tuple(self._registered.values()):
            try:
                gpu.call("nvmlDeviceGetPciInfo")
            except NvmlCallError as failure:
                if failure.code in LOST:
                    gone.append((gpu, str(failure)))
        self._free()
        events = []
        for gpu, cause in gone:
            self._lost[str(gpu.id)] = time.monotonic() + LOOK_AGAIN_S
            events.append(
                DeviceEvent(
                    device=gpu.id,
                    kind="fault",
                    code="nvml:gpu_is_lost",
                    time_s=_now_s(),
                    detail=cause,
                )
            )
        return events

    def _event(self, data: Any) -> list[DeviceEvent]:
        gpu = self._owner(data.device)
        if gpu is None:
            return []
        kind, number = int(data.eventType), int(data.eventData)
        partition, detail = None, ""
        instance = int(data.gpuInstanceId)
        if instance != WHOLE and kind == XID:
            name = gpu.names.get(instance)
            partition = None if name is None else PartitionId(name)
            detail = f"GPU instance {instance}" + ("" if name else ", unknown to this agent")
        if kind == XID:
            what, code = "fault", f"xid:{number}"
        else:
            what, code = KINDS.get(kind, ("fault", f"nvml:event_{kind:#x}"))
        event = DeviceEvent(
            device=gpu.id,
            kind=what,
            code=code,
            partition=partition,
            time_s=_now_s(),
            detail=detail,
        )
        return [event]

    def _owner(self, handle: Any) -> Gpu | None:
        try:
            uuid = self._nvml.call("nvmlDeviceGetUUID", handle)
        except NvmlCallError:
            uuid = None
        if uuid is not None:
            return self._registered.get(str(uuid))
        address = _address(handle)
        for gpu in self._registered.values():
            with contextlib.suppress(NvmlCallError):
                if gpu.has_handle() and _address(gpu.handle()) == address:
                    return gpu
        return None


def _address(handle: Any) -> int | None:
    import ctypes

    return ctypes.cast(handle, ctypes.c_void_p).value


def _now_s() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)
