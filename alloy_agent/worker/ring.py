"""The shared memory through which samples leave a worker: one page for each device and epoch.

A page is an anonymous memory file. The worker writes it, the control process maps the same file
read-only; nobody waits for anybody. A page lives for one epoch, that is for one list of
`SignalSpec`: when the geometry of a device changes, the worker makes a new page and marks the old
one retired, and the old one goes when its last mapping does.

However fast is sampled, history is kept ten times a second, since windows and accounts need no
more; the ticks between replace one another. So 64 kept frames are 6.4 s at every rate, and a fast
sampler writes to the same few cache lines again and again.

Layout, all fields 8 bytes in native order unless said otherwise:

    header   magic, version, epoch, slots, frames, stride, head, retired, place, kept
             (padded to 256 bytes)
    frame    sequence, number, written at, checksum, then columns of `slots` entries each:
             value f64 | source time f64 | read time f64 | refresh period f64 | quality u8
             (padded to 8)

`head` is the number of ticks written, and the newest of them stands at `place`. Kept frame `k`
(from 0, `kept` of them so far) stands at place `2 + k % frames`; a tick that is not kept stands at
place 0 or 1, in turn. Times are seconds of `CLOCK_BOOTTIME`; NaN stands for "the source has no
clock" and "not measured yet".

Rules that stay true in here:

* One writer. It makes the frame's sequence odd (2n+1 for tick n), copies the columns, makes it even
  (2n+2), then moves `place`, `kept` and `head`.
* A reader copies a frame and believes it only if the sequence was 2n+2 before and after, n is the
  frame's number, and the checksum fits; the checksum also covers processors that show another
  core's stores out of order. `place` and `kept` only ever point at finished frames, so what a
  killed worker leaves behind is whole.
* A refresh period is measured, never configured: the time between distinct source times, or where
  the source has no clock between distinct values. It follows shorter times at once and longer ones
  slowly, since a value that happens to stay the same looks like a slow source.
"""

from __future__ import annotations

import fcntl
import math
import mmap
import os
import sys
import zlib
from array import array
from itertools import compress
from operator import ne
from typing import TYPE_CHECKING, Final, NamedTuple, cast

import msgspec

from alloy_agent.model import Quality, Signal, Value

if TYPE_CHECKING:
    from collections.abc import Sequence

    from alloy_agent.model import SignalSpec

MAGIC: Final = 0x31676E6972796F6C  # "loyring1"
VERSION: Final = 2
HEADER_BYTES: Final = 256
FRAME_HEADER_BYTES: Final = 32
FRAMES: Final = 64  # kept: 6.4 s of history
KEEP_EVERY_S: Final = 0.095  # just under 10 Hz: at that rate every tick is kept
SPARE: Final = 2  # places of ticks that are not kept
MAX_SLOTS: Final = 65536
READ_TRIES: Final = 8

# Places of the header, in units of 8 bytes
H_MAGIC, H_VERSION, H_EPOCH, H_SLOTS, H_FRAMES, H_STRIDE = range(6)
H_HEAD, H_RETIRED, H_PLACE, H_KEPT = range(6, 10)
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
LOOK_EVERY_S: Final = 0.5
STUDY_EVERY_S: Final = 20.0
STUDY_TICKS: Final = 32
MASK: Final = 0xFFFFFFFF
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


class Block:
    """Whole frames of one page, oldest first, cut into columns where somebody looks.

    Columns are as in the page: NaN where there is no number, qualities by `CODES` and `NEVER`.
    """

    __slots__ = ("_bytes", "_floats", "_stride", "_words", "count", "slots")

    def __init__(self, frames: Sequence[bytes], slots: int) -> None:
        """Take frames as they stand in a page, one or more."""
        self.count = len(frames)
        self.slots = slots
        self._stride = len(frames[0])
        self._words = self._stride >> 3
        self._bytes = frames[0] if len(frames) == 1 else b"".join(frames)
        self._floats = memoryview(self._bytes).cast("d")

    def _column(self, column: int, slot: int) -> list[float]:
        at = (FRAME_HEADER_BYTES >> 3) + column * self.slots + slot
        return cast("list[float]", self._floats[at :: self._words].tolist())

    def values(self, slot: int) -> list[float]:
        """Return one signal's values."""
        return self._column(0, slot)

    def sources(self, slot: int) -> list[float]:
        """Return when a signal's source made each value."""
        return self._column(1, slot)

    def reads(self, slot: int) -> list[float]:
        """Return when each value of a signal was read."""
        return self._column(2, slot)

    def qualities(self, slot: int) -> bytes:
        """Return the codes of one signal's qualities."""
        return self._bytes[FRAME_HEADER_BYTES + self.slots * 32 + slot :: self._stride]

    def common_times(self) -> list[float] | None:
        """Return when each frame's signals were read, if all of them were, at once and rising.

        None where a signal has a clock of its own, another quality than VALUE, or another time.
        """
        slots, words, floats = self.slots, self._words, self._floats
        if not slots:
            return None
        found: list[float] = []
        for frame in range(self.count):
            at = frame * words + 4 + slots
            codes = frame * self._stride + FRAME_HEADER_BYTES + slots * 32
            reads = floats[at + slots : at + slots * 2].tolist()
            if (
                reads.count(reads[0]) != slots
                or any(self._bytes[codes : codes + slots])
                or (found and reads[0] <= found[-1])
            ):
                return None
            found.append(reads[0])
        last = (self.count - 1) * words + 4 + slots
        return found if all(map(math.isnan, floats[last : last + slots])) else None

    def refresh_s(self, slot: int) -> float:
        """Return a signal's measured refresh period, as of the newest frame."""
        return self._floats[(self.count - 1) * self._words + 4 + self.slots * 3 + slot]

    def last(self, slot: int) -> float:
        """Return the newest value of a signal."""
        return self._floats[(self.count - 1) * self._words + 4 + slot]

    def columns(self) -> tuple[list[float], list[float], list[float], list[float], bytes]:
        """Return the newest frame's values, source times, read times, refresh periods, codes."""
        start, slots = (self.count - 1) * self._stride, self.slots
        at = (start + FRAME_HEADER_BYTES) >> 3
        floats = cast("list[float]", self._floats[at : at + slots * 4].tolist())
        codes = start + FRAME_HEADER_BYTES + slots * 32
        return (
            floats[:slots],
            floats[slots : slots * 2],
            floats[slots * 2 : slots * 3],
            floats[slots * 3 :],
            self._bytes[codes : codes + slots],
        )

    def newest(self) -> Frame:
        """Return the newest frame with all its columns."""
        start, slots = (self.count - 1) * self._stride, self.slots
        at = (start + FRAME_HEADER_BYTES) >> 3
        floats = self._floats
        codes = start + FRAME_HEADER_BYTES + slots * 32
        return Frame(
            number=int.from_bytes(self._bytes[start + 8 : start + 16], sys.byteorder),
            written_at_s=floats[at - 2],
            values=tuple(floats[at : at + slots]),
            source_times_s=tuple(floats[at + slots : at + slots * 2]),
            read_times_s=tuple(floats[at + slots * 2 : at + slots * 3]),
            refresh_periods_s=tuple(floats[at + slots * 3 : at + slots * 4]),
            qualities=self._bytes[codes : codes + slots],
        )


class PageWriter:
    """The worker's side of a page, and the sink that `sample` fills. One writer at a time.

    The columns of the next frame live in one array of the process, laid out as in the page, so
    that `put_many` is a copy for each column and `commit` one checksum and one copy. Whether a
    source has renewed is looked at in `commit` too, and on most ticks not at all: see `_look`.
    """

    def __init__(self, slots: int, epoch: int, frames: int = FRAMES) -> None:
        if not 0 <= slots <= MAX_SLOTS:
            raise RingError(f"{slots} signals on one device do not fit a page of {MAX_SLOTS}")
        body = _body_bytes(slots)
        self.stride = FRAME_HEADER_BYTES + body
        self.slots = slots
        self.epoch = epoch
        self.frames = frames
        size = HEADER_BYTES + self.stride * (frames + SPARE)
        self.fd = os.memfd_create("alloy-ring", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, size)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        self._bytes = memoryview(mmap.mmap(self.fd, size))
        self._words = self._bytes.cast("Q")
        self._floats = self._bytes.cast("d")
        for place, word in enumerate((MAGIC, VERSION, epoch, slots, frames, self.stride)):
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
        self._clocked = False  # whether any source has a clock
        self._looked_number = -1
        self._looked_s = 0.0
        self._look_at_s = self._study_at_s = -math.inf
        self._study_end = 0  # number of the tick behind the study
        self._head = self._kept = 0
        self._keep_at_s = -math.inf
        starts = [HEADER_BYTES + self.stride * place for place in range(frames + SPARE)]
        self._places = tuple(
            (start >> 3, slice(start + FRAME_HEADER_BYTES, start + self.stride)) for start in starts
        )
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
                self._clocked = True
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
        self._clocked = True
        if isinstance(times_s, (int, float)):
            times_s = array("d", (times_s,)) * count
        elif len(times_s) != count:
            raise ValueError(f"{len(times_s)} source times for {count} values")
        at = self._sources_at + first
        self._columns[at : at + count] = times_s if type(times_s) is array else array("d", times_s)

    def _look(self, number: int) -> None:
        """Look which sources have renewed.

        Twice a second, and on each of the first 32 ticks of every 20 s, so that a source that
        keeps up with the sampler can prove it. A time between two renewals counts only if it is
        not blurred by ticks that were not looked at.
        """
        now_s = self.now_s
        gap_s = now_s - self._looked_s
        consecutive = number - self._looked_number == 1
        self._looked_number, self._looked_s = number, now_s
        self._look_at_s = now_s + LOOK_EVERY_S
        if now_s >= self._study_at_s:
            self._study_at_s, self._study_end = now_s + STUDY_EVERY_S, number + STUDY_TICKS
        said = self._staging[: self._value_bytes * 2].tobytes()
        if said == self._seen:
            return
        self._seen = said
        keys, before = self._keys_now(), self._keys
        self._keys = keys
        shortest_s = 0.0 if consecutive else 3.0 * gap_s
        for slot in compress(range(self.slots), map(ne, keys, before)):
            if not math.isnan(keys[slot]):
                self._renew(slot, shortest_s)

    def _keys_now(self) -> list[float]:
        """Return each slot's source time, or its value where the source has no clock."""
        values = self._columns[: self.slots]
        if not self._clocked:
            return list(values)
        return [
            value if source != source else source  # noqa: PLR0124 - true for NaN
            for value, source in zip(
                values, self._columns[self._sources_at : self._reads_at], strict=True
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
        number, begun_s, staging, words = self._head, self.now_s, self._staging, self._words
        if number < self._study_end or begun_s >= self._look_at_s:
            self._look(number)
        keep = begun_s >= self._keep_at_s
        place = SPARE + self._kept % self.frames if keep else number & 1
        word, body = self._places[place]
        words[word] = number * 2 + 1
        words[word + 1] = number
        self._floats[word + 2] = now_s
        words[word + 3] = zlib.crc32(staging, number & MASK)
        self._bytes[body] = staging
        words[word] = number * 2 + 2
        words[H_PLACE] = place
        if keep:
            self._keep_at_s = begun_s + KEEP_EVERY_S
            self._kept += 1
            words[H_KEPT] = self._kept
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
        if size != HEADER_BYTES + self._stride * (self._frames + SPARE):
            raise RingError(f"a page of {size} bytes for {self._frames} frames of {self._stride}")

    @property
    def head(self) -> int:
        """Number of ticks written so far."""
        return int(self._words[H_HEAD])

    @property
    def retired(self) -> bool:
        """Whether the page gets no more frames."""
        return bool(self._words[H_RETIRED])

    def _whole(self, place: int) -> bytes | None:
        """Return a copy of the frame at a place; None when there is none or it is in work."""
        if not 0 <= place < self._frames + SPARE:
            return None
        offset = HEADER_BYTES + place * self._stride
        word = offset >> 3
        sequence = self._words[word]
        if sequence & 1 or not sequence:
            return None
        data = self._map[offset : offset + self._stride]
        if self._words[word] != sequence:
            return None
        head = memoryview(data)[:FRAME_HEADER_BYTES].cast("Q")
        number = head[F_NUMBER]
        if head[F_SEQUENCE] != sequence or number * 2 + 2 != sequence:
            return None
        if head[F_CHECKSUM] != zlib.crc32(memoryview(data)[FRAME_HEADER_BYTES:], number & MASK):
            return None
        return data

    def newest(self) -> Block | None:
        """Return the newest frame; None when nothing was written yet."""
        for _ in range(READ_TRIES):
            if not self._words[H_HEAD]:
                return None
            found = self._whole(self._words[H_PLACE])
            if found is not None:
                return Block((found,), len(self.specs))
        return None

    def kept(self, first: int) -> tuple[int, Block | None]:
        """Return how many frames were kept so far, and those from `first` on that are still there.

        The oldest may be written over while it is copied, so what a writer that went on meanwhile
        could have reached is left out.
        """
        count = self._words[H_KEPT]
        numbers = range(max(first, count - self._frames + 1, 0), count)
        found = [self._whole(SPARE + number % self._frames) for number in numbers]
        lapped = self._words[H_KEPT] - self._frames
        frames = [
            frame
            for number, frame in zip(numbers, found, strict=True)
            if frame is not None and number > lapped
        ]
        return count, Block(frames, len(self.specs)) if frames else None


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
