"""The shared memory in which a worker shows how it is doing, and which outlives it.

The control process makes the board before it starts the worker. All fields are 8 bytes:

    header     see `Field`
    lateness   one counter for each bucket (`bucket_of`)
    cells      one for each device and each device-less call: what runs, since when, thread, name

A cell is filled before a backend call and cleared after it. When the worker dies, the cells that
are still filled are the calls it died in, and the thread that a fatal signal's trace names picks
the one among them.
"""

from __future__ import annotations

import mmap
import os
from enum import IntEnum
from typing import TYPE_CHECKING, Final

from alloy_agent.model import Value

if TYPE_CHECKING:
    from collections.abc import Iterator

BUCKETS: Final = 128
CELLS: Final = 256
CELL_BYTES: Final = 256
NAME_BYTES: Final = CELL_BYTES - 24
HEADER_WORDS: Final = 32
CELLS_OFFSET: Final = (HEADER_WORDS + BUCKETS) * 8
BOARD_BYTES: Final = CELLS_OFFSET + CELLS * CELL_BYTES


class Field(IntEnum):
    """Places of the header."""

    BEAT_NS = 0  # CLOCK_MONOTONIC of the last sign of life
    TICKS = 1
    MISSED = 2
    PERIOD_NS = 3
    POLICY = 4
    ERRORS = 5  # samples that raised
    SKIPPED = 6  # ticks that found the device in another call
    TAKEOVERS = 7  # times a device was set apart because its sample did not return
    CPU_PPM = 8  # of one core, whole process
    SAMPLER_CPU_PPM = 9  # of one core, sampling alone
    WANTED_PERIOD_NS = 10
    LATE_MAX_NS = 11
    TELL_NS = 12  # written by the control process: when it wants to hear of a tick; 0: not at all


LATE_MAX_NS: Final = int(Field.LATE_MAX_NS)
POLICIES: Final = ("not sampling", "fifo", "nice", "normal")

DOING: Final = (
    "nothing",
    "sample",
    "observe",
    "apply",
    "facts",
    "quiesce",
    "resume",
    "signal_specs",
    "open",
    "discover",
    "capabilities",
    "diagnose",
    "wait_events",
    "close",
)
DOING_CODES: Final = {name: code for code, name in enumerate(DOING)}


def bucket_of(lateness_ns: int) -> int:
    """Return the histogram bucket of a lateness: four for each doubling, from 1 us up."""
    lateness_us = lateness_ns // 1000
    if lateness_us < 4:
        return max(lateness_us, 0)
    bits = lateness_us.bit_length()
    return min((bits - 2) * 4 + ((lateness_us >> (bits - 3)) & 3), BUCKETS - 1)


def bucket_ceiling_s(bucket: int) -> float:
    """Return the lateness in seconds that everything in `bucket` stays below."""
    if bucket < 4:
        return (bucket + 1) * 1e-6
    bits, quarter = bucket // 4 + 2, bucket % 4
    return ((5 + quarter) << (bits - 3)) * 1e-6


class Activity(Value, frozen=True, kw_only=True):
    """A call that is going on: in which device ("" for none), what, since when, on which thread."""

    device: str
    doing: str
    since_ns: int
    thread: int


class SamplerState(Value, frozen=True, kw_only=True):
    """How the sampler of one worker is doing, since that worker started.

    `policy` is the scheduling that holds: "fifo", "nice", "normal" or "not sampling". `rate_hz`
    below `wanted_rate_hz` means that the self-budget has lowered it.
    """

    rate_hz: float = 0.0
    wanted_rate_hz: float = 0.0
    policy: str = POLICIES[0]
    ticks: int = 0
    missed_ticks: int = 0
    errors: int = 0
    skipped: int = 0
    takeovers: int = 0
    cpu_ratio: float = 0.0
    sampler_cpu_ratio: float = 0.0
    lateness_p50_s: float | None = None
    lateness_p99_s: float | None = None
    lateness_max_s: float | None = None


class Board:
    """A mapped board, for either side."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._bytes = memoryview(mmap.mmap(fd, BOARD_BYTES))
        self.words = self._bytes.cast("Q")

    @classmethod
    def make(cls) -> Board:
        """Return a new empty board."""
        fd = os.memfd_create("alloy-board", os.MFD_CLOEXEC)
        os.ftruncate(fd, BOARD_BYTES)
        return cls(fd)

    def close(self) -> None:
        """Let go of the descriptor; the mapping stays while this object does."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def get(self, field: Field) -> int:
        """Return one field."""
        return int(self.words[field])

    def late(self, lateness_ns: int) -> None:
        """Count one tick that came `lateness_ns` after its deadline."""
        words = self.words
        words[HEADER_WORDS + bucket_of(lateness_ns)] += 1
        words[LATE_MAX_NS] = max(words[LATE_MAX_NS], lateness_ns)

    def lateness(self) -> tuple[int, ...]:
        """Return the counters of the lateness histogram."""
        return tuple(self.words[HEADER_WORDS : HEADER_WORDS + BUCKETS])

    def name_cell(self, cell: int, device: str) -> None:
        """Give a cell to a device."""
        name = device.encode()[:NAME_BYTES]
        start = CELLS_OFFSET + cell * CELL_BYTES + 24
        self._bytes[start : start + NAME_BYTES] = name.ljust(NAME_BYTES, b"\0")

    def cell_word(self, cell: int) -> int:
        """Return where the three words of a cell begin: what (0: nothing), since, thread."""
        return (CELLS_OFFSET + cell * CELL_BYTES) >> 3

    def activities(self) -> Iterator[Activity]:
        """Return the calls that are going on, or that were when the worker died."""
        for cell in range(CELLS):
            word = self.cell_word(cell)
            doing = int(self.words[word])
            if 0 < doing < len(DOING):
                start = word * 8 + 24
                name = bytes(self._bytes[start : start + NAME_BYTES]).rstrip(b"\0")
                yield Activity(
                    device=name.decode(errors="replace"),
                    doing=DOING[doing],
                    since_ns=int(self.words[word + 1]),
                    thread=int(self.words[word + 2]),
                )

    def sampler_state(self) -> SamplerState:
        """Return the sampler's counters."""
        counts = self.lateness()
        period_ns, wanted_ns = self.get(Field.PERIOD_NS), self.get(Field.WANTED_PERIOD_NS)
        policy = self.get(Field.POLICY)
        some = any(counts)
        return SamplerState(
            rate_hz=1e9 / period_ns if period_ns else 0.0,
            wanted_rate_hz=1e9 / wanted_ns if wanted_ns else 0.0,
            policy=POLICIES[policy] if policy < len(POLICIES) else POLICIES[0],
            ticks=self.get(Field.TICKS),
            missed_ticks=self.get(Field.MISSED),
            errors=self.get(Field.ERRORS),
            skipped=self.get(Field.SKIPPED),
            takeovers=self.get(Field.TAKEOVERS),
            cpu_ratio=self.get(Field.CPU_PPM) / 1e6,
            sampler_cpu_ratio=self.get(Field.SAMPLER_CPU_PPM) / 1e6,
            lateness_p50_s=quantile_s(counts, 0.50),
            lateness_p99_s=quantile_s(counts, 0.99),
            lateness_max_s=self.get(Field.LATE_MAX_NS) / 1e9 if some else None,
        )


def quantile_s(counts: tuple[int, ...], share: float) -> float | None:
    """Return an upper bound of the `share` quantile of a histogram; None when it is empty."""
    total = sum(counts)
    if not total:
        return None
    wanted, seen = share * total, 0
    for bucket, count in enumerate(counts):
        seen += count
        if seen >= wanted:
            return bucket_ceiling_s(bucket)
    return bucket_ceiling_s(BUCKETS - 1)
