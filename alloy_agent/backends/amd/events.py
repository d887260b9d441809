"""What devices report by themselves: errors counted by RAS, resets, and changes of the topology.

The kernel's files are polled, since they tell everything that lasts; the library, where usable,
adds what passes (VM faults, resets, ring hangs). Its readers hold `/dev/kfd` open, so they are
stopped while any device is quiet, and started again after.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

from alloy_agent.backends.amd.files import Files, Roots
from alloy_agent.backends.amd.library import Library, LibraryEvent
from alloy_agent.backends.amd.modes import read_modes
from alloy_agent.backends.amd.sampler import block_errors
from alloy_agent.backends.amd.topology import generation
from alloy_agent.model import DeviceEvent, DeviceFault, DeviceId

POLL_S: Final = 0.25
ANSWER_S: Final = 0.5  # a device that takes longer to count its errors is left behind
# Flags of a line in gpu_vram_bad_pages. Source: kernel amdgpu_ras.c.
BAD_PAGES: Final = {
    "P": ("bad_pages_pending", "are retired at the next reset"),
    "F": ("bad_pages_unreservable", "could not be taken out of use: replace the device"),
}
RECORDS_S: Final = 5.0  # between two looks at the error records of all devices
SEVERITIES: Final = {
    "fatal": "ras:fatal",
    "uncorrected": "ras:cper_ue",
    "corrected": "ras:cper_ce",
}
RESETS: Final = frozenset({"gpu_pre_reset", "gpu_post_reset"})


class EventSource:
    """Collects events of all devices."""

    def __init__(
        self, files: Files, roots: Roots, library: Library, clock: Callable[[], float]
    ) -> None:
        self._files, self._roots, self._library, self._clock = files, roots, library, clock
        self._stop = threading.Event()
        self._reading = threading.Lock()  # held while the library waits for events
        self._paused: set[DeviceId] = set()
        self._errors: dict[DeviceId, dict[str, dict[str, int]]] = {}
        self._readers: dict[DeviceId, threading.Thread] = {}
        self._generation: int | None = None
        self._modes: dict[str, tuple[int | None, str]] = {}
        self._started = False
        self._records_s = -RECORDS_S

    @property
    def handles(self) -> int:
        """How many descriptors of `/dev/kfd` the library's readers hold."""
        return self._library.readers

    def mode_of(self, bus: str) -> str:
        """Return a device's compute mode, read again only when the topology has changed."""
        now = generation(self._files, self._roots)
        known = self._modes.get(bus)
        if known is None or known[0] != now or now is None:
            known = (now, read_modes(self._files, self._roots.pci(bus)).compute)
            self._modes[bus] = known
        return known[1]

    def pause(self, device: DeviceId) -> None:
        """Keep readers closed from now on."""
        self._paused.add(device)
        self.let_go()

    def resume(self, device: DeviceId) -> None:
        """Allow readers again."""
        self._paused.discard(device)

    def let_go(self) -> None:
        """Close the library's readers; waits until a read under way has returned."""
        with self._reading:
            self._library.stop_events()

    def wait(self, known: dict[DeviceId, str], timeout_s: float) -> list[DeviceEvent]:
        """Return events since the last call, waiting for the first up to `timeout_s`."""
        deadline = self._clock() + timeout_s
        while not self._stop.is_set():
            found = self._poll(known)
            left = deadline - self._clock()
            step = max(0.0, min(POLL_S, left))
            found += self._from_library(known, 0.0 if found else step)
            if found or left <= 0:
                return found
        return []

    def _poll(self, known: dict[DeviceId, str]) -> list[DeviceEvent]:
        found = []
        now = generation(self._files, self._roots)
        if now != self._generation:
            if self._generation is not None:
                found += [self._event(device, "geometry", "topology") for device in known]
            self._generation = now
        for device, counts in self._counted(known).items():
            found += self._new_errors(device, counts)
        return found

    def errors(self, device: DeviceId) -> dict[str, dict[str, int]]:
        """Return a device's error counts as polled last."""
        return self._errors.get(device, {})

    def _counted(self, known: dict[DeviceId, str]) -> dict[DeviceId, dict[str, dict[str, int]]]:
        """Return the error counts of every device that answers, each read on a thread of its own.

        One that does not answer is not asked again until it does, and holds up no other.
        """
        answers: dict[DeviceId, dict[str, dict[str, int]]] = {}

        def read(device: DeviceId, bus: str) -> None:
            answers[device] = block_errors(self._files, self._roots.pci(bus))

        started = []
        for device, bus in known.items():
            busy = self._readers.get(device)
            if busy is None or not busy.is_alive():
                reader = threading.Thread(target=read, args=(device, bus), daemon=True)
                self._readers[device] = reader
                reader.start()
                started.append(reader)
        deadline = self._clock() + ANSWER_S
        for reader in started:
            reader.join(max(0.0, deadline - self._clock()))
        return dict(answers)

    def _new_errors(self, device: DeviceId, now: dict[str, dict[str, int]]) -> list[DeviceEvent]:
        """Return one event for each block and kind of error that was counted again."""
        before, self._errors[device] = self._errors.get(device), now
        if before is None:
            return []
        found = []
        for block, counts in now.items():
            for kind, count in counts.items():
                more = count - before.get(block, {}).get(kind, 0)
                if more > 0:
                    code = f"ras:{block}" if kind == "ue" else f"ras:{block}_{kind}"
                    found.append(self._event(device, "fault", code, f"{more} more, {count} in all"))
        return found

    def _from_library(self, known: dict[DeviceId, str], step_s: float) -> list[DeviceEvent]:
        """Return the library's events; where it is of no use, wait as long."""
        buses = {bus: device for device, bus in known.items()}
        if step_s and not self._started and buses:
            self._started = True
            self._library.open()
        if not self._library.usable or self._paused or not buses:
            self._stop.wait(step_s)
            return []
        with self._reading:
            if self._paused:
                return []
            self._library.start_events(frozenset(buses))
            events = self._library.events(step_s)
            records = self._records(buses)
        if not self._library.readers:
            self._stop.wait(step_s)
        return records + [self._of_library(buses[e.bus], e) for e in events if e.bus in buses]

    def _records(self, buses: dict[str, DeviceId]) -> list[DeviceEvent]:
        """Return the error records that the library has of each device, every few seconds."""
        if self._clock() - self._records_s < RECORDS_S:
            return []
        self._records_s = self._clock()
        found = []
        for bus, device in buses.items():
            for record in self._library.records(bus):
                detail = f"CPER record {record.ident or 'without id'} {record.when}".strip()
                found.append(self._event(device, "fault", SEVERITIES[record.severity], detail))
        return found

    def _of_library(self, device: DeviceId, event: LibraryEvent) -> DeviceEvent:
        kind = "reset" if event.name in RESETS else "fault"
        detail = f"partition {event.function}: {event.message}" if event.message else ""
        return self._event(device, kind, f"amd:{event.name}", detail)

    def _event(self, device: DeviceId, kind: str, code: str, detail: str = "") -> DeviceEvent:
        return DeviceEvent(device=device, kind=kind, code=code, time_s=self._clock(), detail=detail)

    def faults(self, device: DeviceId, bus: str) -> tuple[DeviceFault, ...]:
        """Return what lasts: uncorrected errors of each block, and pages to be retired."""
        pci = self._roots.pci(bus)
        found = []
        for block, counts in block_errors(self._files, pci).items():
            if counts.get("ue"):
                reason = f"{counts['ue']} uncorrected errors in {block} since the driver was loaded"
                found.append(DeviceFault(device=device, kind=f"ras_{block}", reason=reason))
        pages = self._files.text(f"{pci}/ras/gpu_vram_bad_pages") or ""
        flags = [line.rpartition(":")[2].strip() for line in pages.splitlines() if ":" in line]
        for flag, (kind, what) in BAD_PAGES.items():
            count = flags.count(flag)
            if count:
                reason = f"{count} pages of memory {what}"
                found.append(DeviceFault(device=device, kind=kind, reason=reason))
        return tuple(found)

    def close(self) -> None:
        """End a wait that is under way."""
        self._stop.set()
