"""What devices report by themselves: lines of the kernel log beside counters, changes of grants."""

from __future__ import annotations

import errno
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from alloy_agent.backends.neuron.board import Board, physical
from alloy_agent.backends.neuron.health import (
    ADVICE,
    HUNG,
    LINK_ADVICE,
    LINK_CODE,
    Claim,
    ErrorClass,
    Hang,
    HangRule,
    hung_cores,
    judge_claim,
    judge_hangs,
    moved,
    parse_line,
)
from alloy_agent.backends.neuron.record import Contents, Record
from alloy_agent.backends.neuron.tree import DeviceTree, read_attribute, whole_number
from alloy_agent.errors import BackendError
from alloy_agent.host.clock import boottime_s
from alloy_agent.model import DeviceEvent, DeviceId

POLL_S: Final = 0.25  # how often the record is looked at
COUNTERS_S: Final = 5.0  # how often error counters are looked at without a line in the log
LINES_AT_ONCE: Final = 256  # of the log; the rest waits for the next call
RECORD_BYTES: Final = 8192

DEVICE_COUNTERS: Final = (
    "sram_ecc_uncorrected",
    "mem_ecc_uncorrected",
    "mem_ecc_repairable_uncorrected",
)
CORE_COUNTERS: Final = (
    "hw_hbm_ue_error",
    "hw_repairable_hbm_ue_error",
    "hw_nc_ue_error",
    "hw_dma_abort_error",
    "hw_collectives_error",
    "timeout",
)

TOLD_MAX: Final = 64
HANGS_MAX: Final = 64  # of one device, far more than the rule asks for

Boards = Mapping[DeviceId, tuple[Board, DeviceTree]]


def read_counters(tree: DeviceTree, cores: int) -> dict[str, int | None]:
    """Return the error counters of a device; those of its cores as sums, named "core:"."""
    found = {name: tree.number_of(name) for name in DEVICE_COUNTERS if tree.place(name)}
    counters: dict[str, int | None] = dict(found)
    for name in CORE_COUNTERS:
        values = [
            whole_number(read_attribute(f"{tree.core_folder(core)}/stats/status/{name}/total").text)
            for core in range(cores)
        ]
        known = [value for value in values if value is not None]
        counters[f"core:{name}"] = sum(known) if known else None
        if name == HUNG:
            counters |= {f"core{core}:{HUNG}": value for core, value in enumerate(values)}
    return counters


class KernelLog:
    """Lines written to the kernel log from now on; without permission there are none."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._descriptor: int | None = None
        self._tried = False

    def descriptor(self) -> int | None:
        """Return what to wait on; None: the log cannot be read here."""
        if not self._tried and self._path:
            self._tried = True
            try:
                flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
                self._descriptor = os.open(self._path, flags)
                os.lseek(self._descriptor, 0, os.SEEK_END)
            except OSError:
                self.close()
        return self._descriptor

    def lines(self) -> Iterator[str]:
        """Yield the messages that came since the last call."""
        descriptor = self.descriptor()
        for _ in range(LINES_AT_ONCE if descriptor is not None else 0):
            try:
                raw = os.read(self._descriptor or 0, RECORD_BYTES)
            except OSError as exc:
                if exc.errno == errno.EPIPE:  # overwritten before we read it; go on behind
                    continue
                return
            if not raw:
                return
            yield from raw.decode("utf-8", "replace").splitlines()

    def close(self) -> None:
        """Let go of the log."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


class EventSource:
    """Turns log lines, counters and changes of the record into events."""

    def __init__(self, kernel_log: str) -> None:
        self._log = KernelLog(kernel_log)
        self._lock = threading.Lock()
        self._counters: dict[DeviceId, dict[str, int | None]] = {}
        self._hangs: dict[DeviceId, tuple[Hang, ...]] = {}
        self._told: deque[DeviceEvent] = deque(maxlen=TOLD_MAX)
        self._contents: Contents | None = None
        self._looked_s = 0.0
        self._closed = False

    def wait(
        self, timeout_s: float, record: Record, boards: Callable[[], Boards]
    ) -> tuple[DeviceEvent, ...]:
        """Return events, waiting up to `timeout_s` for the first.

        Args:
            timeout_s: How long.
            record: The grants.
            boards: Returns the devices that are there now.
        """
        deadline = time.monotonic() + timeout_s
        with self._lock:
            while not self._closed:
                events = (*self._own(), *self._granted(record), *self._faults(boards, record))
                left = deadline - time.monotonic()
                if events or left <= 0:
                    return events
                self._pause(min(left, POLL_S))
        return ()

    def tell(self, event: DeviceEvent) -> None:
        """Have an event that this process caused returned by the next `wait`."""
        self._told.append(event)

    def close(self) -> None:
        """Let go of the log; a waiting call returns soon."""
        self._closed = True
        with self._lock:
            self._log.close()

    def _own(self) -> tuple[DeviceEvent, ...]:
        return tuple(self._told.popleft() for _ in range(len(self._told)))

    def _pause(self, wait_s: float) -> None:
        descriptor = self._log.descriptor()
        if descriptor is None:
            time.sleep(wait_s)
            return
        poll = select.poll()
        try:
            poll.register(descriptor, select.POLLIN)
        except OSError:
            time.sleep(wait_s)
            return
        began_s = time.monotonic()
        poll.poll(wait_s * 1000)
        if time.monotonic() - began_s < 0.01:  # a plain file is always ready
            time.sleep(min(wait_s, 0.05))

    # --- grants ---

    def _granted(self, record: Record) -> tuple[DeviceEvent, ...]:
        try:
            contents = record.read()
        except BackendError:
            return ()
        before, self._contents = self._contents, contents
        if before is None or before is contents:
            return ()
        changed = [
            device
            for device in {*before.devices, *contents.devices}
            if before.of(device) != contents.of(device)
        ]
        return tuple(
            DeviceEvent(device=DeviceId(device), kind="geometry", code="cores", time_s=boottime_s())
            for device in sorted(changed)
        )

    # --- faults ---

    def _faults(self, boards: Callable[[], Boards], record: Record) -> tuple[DeviceEvent, ...]:
        claims = [claim for line in self._log.lines() if (claim := parse_line(line)) is not None]
        due = time.monotonic() - self._looked_s >= COUNTERS_S
        if not claims and not due:
            return ()
        self._looked_s = time.monotonic()
        there = boards()
        before, after = self._counters, self._read(there)
        self._counters = after
        events = list(self._links(there, before, after, record))
        told: set[tuple[DeviceId, ErrorClass]] = set()
        for claim in claims:
            device = _device_of(claim, there)
            if device is None:
                continue
            judged = judge_claim(claim, before.get(device, {}), after.get(device, {}))
            if judged.confirmed:
                told.add((device, claim.error))
            # A claim alone is no fault: a tenant could take devices out of service by printing.
            kind = "fault" if judged.confirmed else "claim"
            detail = f"{judged.detail}; {claim.line[:200]!r}"
            events.append(_event(device, judged.code, detail, kind))
        for device, counters in after.items():
            for error, how in moved(before.get(device, {}), counters):
                if (device, error) not in told:
                    events.append(_event(device, f"neuron:{error}", f"{how}; {ADVICE[error].text}"))
        return tuple(events)

    def _links(
        self,
        there: Boards,
        before: Mapping[DeviceId, Mapping[str, int | None]],
        after: Mapping[DeviceId, Mapping[str, int | None]],
        record: Record,
    ) -> Iterator[DeviceEvent]:
        """Yield a fault for each device whose collectives hang under one grant after another."""
        now_s = boottime_s()
        for device, counters in after.items():
            hung = hung_cores(before.get(device, {}), counters)
            if not hung:
                continue
            known = self._hangs.get(device, ())
            owners = _owners(there[device][0], hung, record)
            recent = (*known, *(Hang(time_s=now_s, tenant=owner) for owner in owners))
            rule = HangRule()
            kept = tuple(h for h in recent if now_s - h.time_s <= rule.within_s)[-HANGS_MAX:]
            self._hangs[device] = kept
            if judge_hangs(kept, now_s, rule) is LINK_ADVICE:
                tenants = len({hang.tenant for hang in kept})
                detail = f"{len(kept)} hangs under {tenants} grants; {LINK_ADVICE.text}"
                yield _event(device, LINK_CODE, detail)

    def _read(self, there: Boards) -> dict[DeviceId, dict[str, int | None]]:
        return {device: read_counters(tree, board.cores) for device, (board, tree) in there.items()}


def _owners(board: Board, hung: tuple[int, ...], record: Record) -> tuple[str, ...]:
    """Return whose runs the hung cores are in; "nobody" for those that are not granted."""
    try:
        grants = record.read().of(board.id).grants
    except BackendError:
        return ("unknown",)
    found = []
    for grant in grants:
        units = physical(board, grant.lnc, range(grant.start, grant.start + grant.size))
        if units is None or set(units) & set(hung):
            found.append(grant.incarnation)
    return tuple(found) or ("nobody",)


def reset_event(device: DeviceId) -> DeviceEvent:
    """Return the event of a reset that was done and proved."""
    return _event(device, "neuron:reset", "reset by the operator, and ready again", "reset")


def _device_of(claim: Claim, there: Boards) -> DeviceId | None:
    """Return the device that a line names: by serial, else by number."""
    for device, (board, _) in there.items():
        if claim.serial and board.serial == claim.serial.zfill(16):
            return device
    if claim.serial:
        return None
    return next((d for d, (board, _) in there.items() if board.number == claim.device), None)


def _event(device: DeviceId, code: str, detail: str, kind: str = "fault") -> DeviceEvent:
    return DeviceEvent(device=device, kind=kind, code=code, time_s=boottime_s(), detail=detail)
