"""Faults in the kernel's log: the second witness beside the drivers' own events.

`parse` and `fault_of` are pure. `KernelLog` reads `/dev/kmsg` without blocking, from where the boot
stands; a record is known by (boot id, sequence), so that a restart of the agent reads on behind the
last one it took and counts nothing twice. Only what the kernel itself wrote is a witness: any
program may write into its log. Neuron's errors are confirmed by its own backend.

Source: Documentation/ABI/testing/dev-kmsg; "NVRM: Xid" lines of the NVIDIA driver; amdgpu
messages.
"""

from __future__ import annotations

import contextlib
import os
import re
from typing import Final, NamedTuple

MAX_RECORDS = 1000  # of one read; the rest waits for the next
RECORD_BYTES = 8192
FACILITY_SHIFT: Final = 3
KERNEL: Final = 0  # LOG_KERN of syslog(3)


class Record(NamedTuple):
    """One record of the log: its number, and its time in seconds of CLOCK_MONOTONIC."""

    sequence: int
    time_s: float
    text: str


class KernelFault(NamedTuple):
    """A fault that the log tells of, by bus address ("0000:3b:00.0")."""

    where: str
    code: str
    detail: str


def parse(raw: bytes) -> Record | None:
    """Return a record of `/dev/kmsg`; None where it is none."""
    head, _, rest = raw.partition(b";")
    fields = head.split(b",")
    if len(fields) < 3 or not all(field.isdigit() for field in fields[:3]):
        return None
    if int(fields[0]) >> FACILITY_SHIFT != KERNEL:
        return None  # somebody wrote it from user space: no witness
    text = rest.split(b"\n", 1)[0].decode("utf-8", "replace")
    return Record(int(fields[1]), int(fields[2]) / 1e6, text)


_XID = re.compile(
    r"NVRM: Xid \(PCI:(?P<bus>[0-9A-Fa-f:.]+)\): (?P<code>\d{1,5})(?:, (?P<detail>.*))?"
)
_AMD = re.compile(r"amdgpu (?P<bus>[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f]): .*?(?P<text>.*)")
_AMD_CODES: Final = (
    (re.compile(r"ring \S+ timeout"), "amd:ring_hang"),
    (re.compile(r"GPU reset begin"), "amd:gpu_pre_reset"),
    (re.compile(r"GPU reset\(?\d*\)? succeeded"), "amd:gpu_post_reset"),
    (re.compile(r"uncorrectable hardware errors? detected in (?P<block>\w+) block"), "ras:"),
    (re.compile(r"page fault"), "amd:vmfault"),
)


def fault_of(text: str) -> KernelFault | None:
    """Return the fault that a line tells of; None where it tells of none.

    A driver's name must begin the line: the Neuron driver prints text of its clients (ioctl 113)
    somewhere behind its own, and a tenant shall not close the gates of other vendors' devices.
    """
    xid = _XID.match(text)
    if xid is not None:
        return KernelFault(bus_of(xid["bus"]), f"xid:{int(xid['code'])}", xid["detail"] or "")
    amd = _AMD.match(text)
    if amd is not None:
        return _amd_fault(amd["bus"], amd["text"])
    return None


def _amd_fault(bus: str, text: str) -> KernelFault | None:
    for pattern, code in _AMD_CODES:
        found = pattern.search(text)
        if found is not None:
            block = found.groupdict().get("block")
            return KernelFault(bus, code + block.lower() if block else code, text[:200])
    return None


def bus_of(text: str) -> str:
    """Return a PCI address as the agent writes it: "0000:3b:00.0"."""
    parts = text.lower().split(":")
    if len(parts) == 2:
        parts.insert(0, "0000")
    slot = parts[-1] if "." in parts[-1] else f"{parts[-1]}.0"
    return ":".join([parts[0][-4:].rjust(4, "0"), *parts[1:-1], slot])


class KernelLog:
    """The kernel's log from now on, or from behind a record that was taken before.

    Args:
        after: Number of the last record taken in this boot; None: begin at the end.
        path: The device.
    """

    def __init__(self, after: int | None = None, path: str = "/dev/kmsg") -> None:
        self.sequence = -1 if after is None else after
        self.lost = 0
        self.reason = ""
        self._fd = -1
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            if after is None:
                os.lseek(self._fd, 0, os.SEEK_END)
        except OSError as exc:
            self.reason = f"{path}: {(exc.strerror or str(exc)).lower()}"

    def read(self) -> tuple[Record, ...]:
        """Return what is new, without waiting."""
        found: list[Record] = []
        while self._fd >= 0 and len(found) < MAX_RECORDS:
            try:
                raw = os.read(self._fd, RECORD_BYTES)
            except BlockingIOError:
                break
            except BrokenPipeError:  # records were overwritten before they were read
                self.lost += 1
                continue
            except OSError as exc:
                self.reason = f"kernel log: {(exc.strerror or str(exc)).lower()}"
                self.close()
                break
            if not raw:
                break
            record = parse(raw)
            if record is not None and record.sequence > self.sequence:
                self.sequence = record.sequence
                found.append(record)
        return tuple(found)

    def close(self) -> None:
        """Let go of the device."""
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                os.close(self._fd)
            self._fd = -1
