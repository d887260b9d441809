"""The shared memory through which samples leave a worker: one page for each device and epoch.

A page is an anonymous memory file. The worker writes it, the control process maps the same file
read-only; nobody waits for anybody. A page lives for one epoch, that is for one list of
`SignalSpec`: when the geometry of a device changes, the worker makes a new page and marks the old
one retired, and the old one goes when its last mapping does.

Layout, all fields 8 bytes in native order unless said otherwise:

    header   magic, version, epoch, slots, frames, stride, head, retired        (padded to 256
    bytes) frame    sequence, number, written at, checksum, then columns of `slots` entries each:
             value f64 | source time f64 | read time f64 | refresh period f64 | quality u8 (padded
             to 8)

Frame `k` (from 0) stands at place `k % frames`; `head` is the number of frames written, so frame
`head - 1` is the newest. Times are seconds of `CLOCK_BOOTTIME`; NaN stands for "the source has no
clock" and "not measured yet".

Rules that stay true in here:

* One writer. It makes the frame's sequence odd (2k+1), copies the columns, makes it even (2k+2),
  then moves `head`.
* A reader copies a frame and believes it only if the sequence was 2k+2 before and after and the
  checksum fits; the checksum also covers processors that show another core's stores out of order.
  `head` only ever points at finished frames, so what a killed worker leaves behind is whole.
* A refresh period is measured, never configured: the time between distinct source times, or where
  the source has no clock between distinct values. It follows shorter times at once and longer ones
  slowly, since a value that happens to stay the same looks like a slow source.
"""

from __future__ import annotations

import fcntl
import math
import mmap
import os
import zlib
from array import array
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from alloy_agent.model import Quality, Signal, Value

if TYPE_CHECKING:
    from collections.abc import Sequence

    from alloy_agent.model import SignalSpec

MAGIC: Final = 0x31676E6972796F6C  # "loyring1"
VERSION: Final = 1
HEADER_BYTES: Final = 256
FRAME_HEADER_BYTES: Final = 32
FRAMES: Final = 64  # 6.4 s of history at 10 Hz
MAX_SLOTS: Final = 65536
READ_TRIES: Final = 8

# Places of the header, in units of 8 bytes
H_MAGIC, H_VERSION, H_EPOCH, H_SLOTS, H_FRAMES, H_STRIDE, H_HEAD, H_RETIRED = range(8)
F_SEQUENCE, F_NUMBER, F_WRITTEN, F_CHECKSUM = range(4)

QUALITIES: Final = (
    Quality.VALUE,
    Quality.NOT_SUPPORTED,
    Quality.NOT_PERMITTED,
    Quality.STALE,
)
CODES: Final = {quality: code for code, quality in enumerate(QUALITIES)}
NEVER: Final = 255  # the slot was not put since the page was made
NAN: Final = math.nan
VALUE: Final = Quality.VALUE
LOOK_EVERY_S: Final = 0.095  # just under 10 Hz: at that rate every tick is looked at
STUDY_MASK: Final = 1023  # ticks: at 100 Hz a study of 0.64 s every 10 s
STUDY_TICKS: Final = 64
REFRESH_RISE: Final = 0.05  # how fast the measured period follows longer times


class RingError(Exception):
    """A page is not what its header says."""


class Frame(Value, frozen=True, kw_only=True):
    """One tick of one device: columns in the order of its specs. NaN where there is no number."""

    number: int
    written_at_s: float
    values: tuple[float, ...]
    source_times_s: tuple[float, ...]
    read_times_s: tuple[float, ...]
    refresh_periods_s: tuple[float, ...]
    qualities: bytes


def _body_bytes(slots: int) -> int:
    return slots * 32 + (slots + 7) // 8 * 8


class PageWriter:
    """The worker's side of a page, and the sink that `sample` fills. One writer at a time.

    The columns of the next frame live in one array of the process, laid out as in the page, so
    that `put_many` is a copy for each column and `commit` one checksum and one copy. Whether a
    source has renewed is looked at in `commit` too, and on most fast ticks not at all: see
    `_examined`.
    """

    def __init__(self, slots: int, epoch: int, frames: int = FRAMES) -> None:
        if not 0 <= slots <= MAX_SLOTS:
            raise RingError(f"{slots} signals on one device do not fit a page of {MAX_SLOTS}")
        body = _body_bytes(slots)
        self.stride = FRAME_HEADER_BYTES + body
        self.slots = slots
        self.epoch = epoch
        self.frames = frames
        size = HEADER_BYTES + self.stride * frames
        self.fd = os.memfd_create("alloy-ring", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, size)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        self._bytes = memoryview(mmap.mmap(self.fd, size))
        self._words = self._bytes.cast("Q")
        self._floats = self._bytes.cast("d")
        for place, word in enumerate((MAGIC, VERSION, epoch, slots, frames, self.stride, 0, 0)):
            self._words[place] = word
        self._columns = array("d", [NAN]) * (body // 8)
        self._staging = memoryview(self._columns).cast("B")
        self._qualities = self._staging[slots * 32 :]
        self._qualities[:] = bytes([NEVER]) * slots + bytes(body - slots * 33)
        self._sources_at, self._reads_at = slots, slots * 2
        self._refresh_at, self._value_bytes = slots * 3, slots * 8
        self._keys = [NAN] * slots  # what each source said when it was last looked at
        self._seen = bytes(slots * 16)  # values and source times when they were last looked at
        self._renewed = [NAN] * slots  # when it was first seen to say that
        self._looked_number = -1
        self._looked_s = 0.0
        self._head = 0
        self.now_s = 0.0

    def begin(self, now_s: float) -> None:
        """Start a tick at `now_s`; what is put carries this read time."""
        self.now_s = now_s

    def put(
        self,
        slot: int,
        value: float,
        quality: Quality = Quality.VALUE,
        source_time_s: float | None = None,
    ) -> None:
        """Store one value of this tick."""
        columns = self._columns
        if quality is VALUE:
            columns[slot] = value
            self._qualities[slot] = 0
            if source_time_s is not None:
                columns[self._sources_at + slot] = source_time_s
        else:
            self._qualities[slot] = CODES[quality]
            if quality is not Quality.STALE:
                columns[slot] = NAN
        columns[self._reads_at + slot] = self.now_s

    def put_many(
        self,
        first: int,
        values: Sequence[float],
        quality: Quality = Quality.VALUE,
        source_time_s: float | Sequence[float] | None = None,
    ) -> None:
        """Store the values of consecutive slots, all of one quality.

        Raises:
            IndexError: The slots are not all of this page.
            ValueError: There are not as many source times as values.
        """
        count = len(values)
        end = first + count
        if first < 0 or end > self.slots:
            raise IndexError(f"slots {first} to {end} of a page of {self.slots}")
        if not count:
            return  # an array that is mapped takes no empty slice, as that could resize it
        columns = self._columns
        if quality is VALUE:
            columns[first:end] = values if type(values) is array else array("d", values)
            self._qualities[first:end] = bytes(count)
            if source_time_s is not None:
                self._put_sources(first, count, source_time_s)
        else:
            self._qualities[first:end] = bytes((CODES[quality],)) * count
            if quality is not Quality.STALE:
                columns[first:end] = array("d", (NAN,)) * count
        at = self._reads_at + first
        columns[at : at + count] = array("d", (self.now_s,)) * count

    def _put_sources(self, first: int, count: int, times_s: float | Sequence[float]) -> None:
        if isinstance(times_s, (int, float)):
            times_s = array("d", (times_s,)) * count
        elif len(times_s) != count:
            raise ValueError(f"{len(times_s)} source times for {count} values")
        at = self._sources_at + first
        self._columns[at : at + count] = times_s if type(times_s) is array else array("d", times_s)

    def _examined(self, number: int) -> None:
        """Look which sources have renewed, on ticks that are for it.

        Ten times a second, and on each of the first 64 of every 1,024 ticks, so that a source that
        keeps up with a fast sampler can prove it. A time between two renewals counts only if it
        is not blurred by ticks that were not looked at.
        """
        gap_s = self.now_s - self._looked_s
        if gap_s < LOOK_EVERY_S and number & STUDY_MASK >= STUDY_TICKS:
            return
        consecutive = number - self._looked_number == 1
        self._looked_number, self._looked_s = number, self.now_s
        said = self._staging[: self._value_bytes * 2].tobytes()
        if said == self._seen:
            return
        self._seen = said
        keys = self._keys_now()
        shortest_s = 0.0 if consecutive else 3.0 * gap_s
        for slot, (key, before) in enumerate(zip(keys, self._keys, strict=True)):
            if key != before and key == key:  # noqa: PLR0124 - false for NaN
                self._renew(slot, shortest_s)
        self._keys = keys

    def _keys_now(self) -> list[float]:
        """Return each slot's source time, or its value where the source has no clock."""
        return [
            value if source != source else source  # noqa: PLR0124 - true for NaN
            for value, source in zip(
                self._columns[: self.slots],
                self._columns[self._sources_at : self._reads_at],
                strict=True,
            )
        ]

    def _renew(self, slot: int, shortest_s: float) -> None:
        """Fold the time since the source's last renewal into its measured period."""
        source_s = self._columns[self._sources_at + slot]
        at_s = self.now_s if math.isnan(source_s) else source_s
        period_s = at_s - self._renewed[slot]
        self._renewed[slot] = at_s
        if period_s > shortest_s:  # false for the first one (NaN) and for a clock that went back
            known_s = self._columns[self._refresh_at + slot]
            if period_s > known_s:
                period_s = known_s + (period_s - known_s) * REFRESH_RISE
            self._columns[self._refresh_at + slot] = period_s

    def commit(self, now_s: float) -> None:
        """Publish the columns as the next frame."""
        number = self._head
        staging = self._staging
        self._examined(number)
        offset = HEADER_BYTES + number % self.frames * self.stride
        word = offset >> 3
        words = self._words
        words[word] = number * 2 + 1
        words[word + F_NUMBER] = number
        self._floats[word + F_WRITTEN] = now_s
        words[word + F_CHECKSUM] = zlib.crc32(staging, number & 0xFFFFFFFF)
        self._bytes[offset + FRAME_HEADER_BYTES : offset + self.stride] = staging
        words[word] = number * 2 + 2
        self._head = number + 1
        words[H_HEAD] = number + 1

    def retire(self) -> None:
        """Tell readers that this page gets no more frames, and let go of its descriptor."""
        self._words[H_RETIRED] = 1
        os.close(self.fd)


class PageReader:
    """The control side of a page. Closes `fd` at once, since the mapping keeps the memory."""

    def __init__(self, fd: int, specs: tuple[SignalSpec, ...], epoch: int) -> None:
        try:
            size = os.fstat(fd).st_size
            if size < HEADER_BYTES or size % 8:
                raise RingError(f"a page of {size} bytes")
            self._map = mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ)
        finally:
            os.close(fd)
        self.specs = specs
        self.epoch = epoch
        self._words = memoryview(self._map).cast("Q")
        slots = len(specs)
        self._stride = FRAME_HEADER_BYTES + _body_bytes(slots)
        self._frames = int(self._words[H_FRAMES])
        header = [int(word) for word in self._words[:H_HEAD]]
        if header != [MAGIC, VERSION, epoch, slots, self._frames, self._stride]:
            raise RingError(f"a page whose header {header} is not of epoch {epoch}, {slots} slots")
        if size != HEADER_BYTES + self._stride * self._frames:
            raise RingError(f"a page of {size} bytes for {self._frames} frames of {self._stride}")

    @property
    def head(self) -> int:
        """Number of frames written so far."""
        return int(self._words[H_HEAD])

    @property
    def retired(self) -> bool:
        """Whether the page gets no more frames."""
        return bool(self._words[H_RETIRED])

    def frame(self, number: int) -> Frame | None:
        """Return frame `number`; None when it is not written yet, overwritten, or in work."""
        offset = HEADER_BYTES + number % self._frames * self._stride
        word = offset >> 3
        whole = number * 2 + 2
        if number < 0 or self._words[word] != whole:
            return None
        data = self._map[offset : offset + self._stride]
        if self._words[word] != whole:
            return None
        return self._decode(number, data)

    def _decode(self, number: int, data: bytes) -> Frame | None:
        view = memoryview(data)
        head = view[:FRAME_HEADER_BYTES].cast("Q")
        body = view[FRAME_HEADER_BYTES:]
        if head[F_NUMBER] != number:
            return None
        if head[F_CHECKSUM] != zlib.crc32(body, number & 0xFFFFFFFF):
            return None
        slots = len(self.specs)
        columns = body[: slots * 32].cast("d")
        return Frame(
            number=number,
            written_at_s=view[16:24].cast("d")[0],
            values=tuple(columns[:slots]),
            source_times_s=tuple(columns[slots : slots * 2]),
            read_times_s=tuple(columns[slots * 2 : slots * 3]),
            refresh_periods_s=tuple(columns[slots * 3 :]),
            qualities=bytes(body[slots * 32 : slots * 33]),
        )

    def latest(self) -> Frame | None:
        """Return the newest frame; None when nothing was written yet."""
        for _ in range(READ_TRIES):
            head = self.head
            if head == 0:
                return None
            found = self.frame(head - 1)
            if found is not None:
                return found
        return None

    def since(self, number: int) -> tuple[Frame, ...]:
        """Return all frames from `number` on that are still there, oldest first."""
        head = self.head
        first = max(number, head - self._frames + 1, 0)
        frames = (self.frame(n) for n in range(first, head))
        return tuple(frame for frame in frames if frame is not None)


def signals_of(
    specs: tuple[SignalSpec, ...], frame: Frame | None, now_s: float, period_s: float, why: str
) -> tuple[Signal, ...]:
    """Return the signals of one device at `now_s`.

    A value that was not read for three sampling periods (and at least 0.25 s) is STALE, and keeps
    its last value. `why` explains a silence that is known (stalled, worker down); empty when
    nothing is.
    """
    if frame is None:
        reason = why or "not read yet"
        return tuple(Signal(spec=spec, quality=Quality.STALE, reason=reason) for spec in specs)
    now = _Now(now_s, max(3.0 * period_s, 0.25), why)
    return tuple(_signal(spec, frame, slot, now) for slot, spec in enumerate(specs))


class _Now(NamedTuple):
    now_s: float
    limit_s: float  # age from which a value is stale
    why: str


def _signal(spec: SignalSpec, frame: Frame, slot: int, now: _Now) -> Signal:
    code = frame.qualities[slot]
    read_s = frame.read_times_s[slot]
    if code == NEVER:
        return Signal(spec=spec, quality=Quality.STALE, reason=now.why or "not read yet")
    quality = QUALITIES[code] if code < len(QUALITIES) else Quality.STALE
    value: float | None = frame.values[slot]
    reason = ""
    if value is not None and not math.isfinite(value):
        value = None
        if quality is Quality.VALUE:
            quality, reason = Quality.NOT_SUPPORTED, "the source gave no finite number"
    age_s = now.now_s - read_s
    if quality is Quality.VALUE and age_s > now.limit_s:
        quality, reason = Quality.STALE, now.why or f"not read for {age_s:.2f} s"
    source_s = frame.source_times_s[slot]
    refresh_s = frame.refresh_periods_s[slot]
    return Signal(
        spec=spec if math.isnan(refresh_s) else _refreshed(spec, refresh_s),
        quality=quality,
        value=value,
        source_time_s=None if math.isnan(source_s) else source_s,
        read_time_s=0.0 if math.isnan(read_s) else read_s,
        reason=reason,
    )


def _refreshed(spec: SignalSpec, refresh_s: float) -> SignalSpec:
    """Return `spec` with the measured refresh period, to two significant digits."""
    return msgspec.structs.replace(spec, refresh_period_s=float(f"{refresh_s:.2g}"))
