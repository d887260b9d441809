"""The ring: readers see whole frames or none, whatever the writer is doing."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from array import array
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alloy_agent.model import Quality, Scope, SignalSpec
from alloy_agent.worker.ring import (
    HEADER_BYTES,
    Frame,
    PageReader,
    PageWriter,
    RingError,
    signals_of,
)


def specs(count: int) -> tuple[SignalSpec, ...]:
    return tuple(
        SignalSpec(name=f"s{n}", subject="d", scope=Scope.DEVICE, unit="") for n in range(count)
    )


def pair(count: int, frames: int = 8) -> tuple[PageWriter, PageReader]:
    writer = PageWriter(count, 1, frames)
    return writer, PageReader(os.dup(writer.fd), specs(count), 1)


def newest(reader: PageReader) -> Frame | None:
    block = reader.newest()
    return None if block is None else block.newest()


def latest(reader: PageReader) -> Frame:
    frame = newest(reader)
    assert frame is not None
    return frame


def test_what_was_put_comes_out() -> None:
    """Value, quality, source time and read time of each slot arrive as they were put."""
    writer, reader = pair(4)
    assert newest(reader) is None
    writer.begin(10.0)
    writer.put(0, 1.5)
    writer.put(1, 2.5, source_time_s=9.5)
    writer.put(2, 0.0, Quality.NOT_PERMITTED)
    writer.commit(10.1)
    got = signals_of(reader.specs, newest(reader), 10.2, 0.1, "")
    assert [s.quality for s in got] == [
        Quality.VALUE,
        Quality.VALUE,
        Quality.NOT_PERMITTED,
        Quality.STALE,
    ]
    assert [s.value for s in got] == [1.5, 2.5, None, None]
    assert [s.source_time_s for s in got] == [None, 9.5, None, None]
    assert [s.read_time_s for s in got[:3]] == [10.0, 10.0, 10.0]
    assert got[3].reason == "not read yet"


def test_a_silent_source_turns_stale_and_keeps_its_last_value() -> None:
    """After three periods without a read the quality says so, with the value and the reason."""
    writer, reader = pair(1)
    writer.begin(10.0)
    writer.put(0, 7.0)
    writer.commit(10.0)
    (fresh,) = signals_of(reader.specs, newest(reader), 10.25, 0.1, "")
    (old,) = signals_of(reader.specs, newest(reader), 10.5, 0.1, "")
    (known,) = signals_of(reader.specs, newest(reader), 10.5, 0.1, "sample has not returned")
    assert fresh.quality is Quality.VALUE
    assert (old.quality, old.value, old.reason) == (Quality.STALE, 7.0, "not read for 0.50 s")
    assert known.reason == "sample has not returned"


TIMES = st.none() | st.floats(0.0, 1e6)


@given(
    first=st.integers(0, 4),
    rows=st.lists(st.tuples(st.floats(allow_nan=False), st.floats(0.0, 1e6)), max_size=4),
    quality=st.sampled_from(
        [Quality.VALUE, Quality.STALE, Quality.NOT_SUPPORTED, Quality.NOT_PERMITTED]
    ),
    batched=st.tuples(st.booleans(), st.booleans()),
    one=TIMES,
)
def test_many_at_once_is_the_same_as_each(
    first: int,
    rows: list[tuple[float, float]],
    quality: Quality,
    batched: tuple[bool, bool],
    one: float | None,
) -> None:
    """A batch leaves the very bytes that single puts leave, and what it does not name alone."""
    each, packed = batched  # a source time for each value, values in an array
    pages = [PageWriter(8, 1, 2) for _ in range(2)]
    values = [value for value, _ in rows]
    times = [time_s for _, time_s in rows]
    for page in pages:
        page.begin(1.0)
        for slot in range(8):
            page.put(slot, float(slot), source_time_s=0.5)
        page.begin(2.0)
    batch = array("d", values) if packed else values
    pages[0].put_many(first, batch, quality, times if each else one)
    for slot, (value, time_s) in enumerate(rows, first):
        pages[1].put(slot, value, quality, time_s if each else one)
    for page in pages:
        page.commit(2.0)
    assert bytes(pages[0]._bytes) == bytes(pages[1]._bytes)


def test_a_batch_stays_within_its_page() -> None:
    """Slots that a page does not have, and source times that do not match, are refused."""
    page = PageWriter(4, 1, 2)
    for first, count in ((3, 2), (-1, 2)):
        with pytest.raises(IndexError):
            page.put_many(first, [1.0] * count)
    with pytest.raises(ValueError, match="source times"):
        page.put_many(0, [1.0, 2.0], source_time_s=[1.0])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_no_value(bad: float) -> None:
    """A source that gives NaN or infinity has no value, and never a zero."""
    writer, reader = pair(1)
    writer.begin(1.0)
    writer.put(0, bad)
    writer.commit(1.0)
    (got,) = signals_of(reader.specs, newest(reader), 1.0, 0.1, "")
    assert (got.value, got.quality) == (None, Quality.NOT_SUPPORTED)


@pytest.mark.parametrize("clocked", [True, False])
@pytest.mark.parametrize("every", [1, 5, 10])
def test_the_refresh_period_is_measured(every: int, clocked: bool) -> None:
    """A source renewed every n-th tick of 0.1 s shows a period of n * 0.1 s, clock or no clock."""
    writer, reader = pair(1)
    for tick in range(100):
        renewed = tick // every
        writer.begin(tick * 0.1)
        writer.put(0, float(renewed), source_time_s=renewed * every * 0.1 if clocked else None)
        writer.commit(tick * 0.1)
    assert latest(reader).refresh_periods_s[0] == pytest.approx(every * 0.1)


def test_a_source_clock_that_goes_back_does_not_break_the_period() -> None:
    """A backwards step of the source's clock is no period."""
    writer, reader = pair(1)
    for at in (5.0, 5.1, 1.0, 1.1):
        writer.begin(at)
        writer.put(0, 1.0, source_time_s=at)
        writer.commit(at)
    assert latest(reader).refresh_periods_s[0] == pytest.approx(0.1)


def test_history_returns_what_is_still_there() -> None:
    """Frames come oldest first, none twice, none that was overwritten."""
    writer, reader = pair(1, frames=8)
    assert reader.kept(0) == (0, None)
    for tick in range(20):
        writer.begin(float(tick))
        writer.put(0, float(tick))
        writer.commit(float(tick))
    count, block = reader.kept(0)
    assert block is not None
    assert (count, block.values(0)) == (20, [float(n) for n in range(13, 20)])
    assert block.reads(0) == block.values(0)
    assert block.newest().number == 19
    last = reader.kept(18)[1]
    assert last is not None
    assert last.values(0) == [18.0, 19.0]
    assert reader.kept(20) == (20, None)


@given(rate_hz=st.sampled_from([10, 20, 25, 50, 100]), ticks=st.integers(1, 400))
def test_history_is_kept_ten_times_a_second_and_the_newest_tick_always(
    rate_hz: int, ticks: int
) -> None:
    """However fast is sampled, frames of 0.1 s are kept, and the newest one is the last tick's."""
    writer, reader = pair(1)
    for tick in range(ticks):
        writer.begin(100.0 + tick / rate_hz)
        writer.put(0, float(tick))
        writer.commit(100.0 + tick / rate_hz)
    assert latest(reader).values == (float(ticks - 1),)
    count, block = reader.kept(0)
    assert block is not None
    every = -(-rate_hz * 95 // 1000)  # ticks in 0.095 s, rounded up
    wanted = [float(tick) for tick in range(0, ticks, every)]
    assert count == len(wanted)
    assert block.values(0) == wanted[-7:] if count > 7 else wanted


def test_a_frame_that_the_writer_could_have_reached_meanwhile_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A reader that is overtaken while it copies returns no frame out of its order."""
    writer, reader = pair(1, frames=4)

    def tick(at_s: float) -> None:
        writer.begin(at_s)
        writer.put(0, at_s)
        writer.commit(at_s)

    for number in range(4):
        tick(float(number))
    whole, turns = reader._whole, iter(range(4, 6))

    def slow(place: int) -> bytes | None:
        for number in turns:  # before the first copy the writer goes on by two
            tick(float(number))
        return whole(place)

    monkeypatch.setattr(reader, "_whole", slow)
    count, block = reader.kept(0)
    assert block is not None
    assert (count, block.values(0)) == (4, [3.0])


@given(at=st.integers(min_value=0), flip=st.integers(min_value=1, max_value=255))
def test_no_changed_byte_of_a_frame_is_believed(at: int, flip: int) -> None:
    """One changed byte in a finished frame's columns, and the frame is not returned."""
    writer, reader = pair(3, frames=4)
    writer.begin(1.0)
    for slot in range(3):
        writer.put(slot, slot + 0.5)
    writer.commit(1.0)
    body = HEADER_BYTES + 2 * writer.stride + 32 + at % (writer.stride - 32)
    writer._bytes[body] ^= flip
    assert newest(reader) is None


@pytest.mark.parametrize("word", range(6))
def test_a_page_whose_header_lies_is_refused(word: int) -> None:
    """Magic, version, epoch, slots, frames and stride must all be what was announced."""
    writer = PageWriter(2, 1, 8)
    writer._words[word] += 1
    with pytest.raises(RingError):
        PageReader(os.dup(writer.fd), specs(2), 1)


def test_a_page_of_another_size_is_refused() -> None:
    """A file too short for its header is not mapped."""
    fd = os.memfd_create("short")
    os.ftruncate(fd, 64)
    with pytest.raises(RingError):
        PageReader(fd, specs(1), 1)


def test_too_many_signals_are_refused() -> None:
    """A device with more signals than a page holds is an error, not a crash."""
    with pytest.raises(RingError):
        PageWriter(1_000_000, 1)


def test_a_retired_page_stays_readable_and_says_so() -> None:
    """A reader that still holds the old epoch reads its last frame, and sees that it is retired."""
    writer, reader = pair(1)
    writer.begin(1.0)
    writer.put(0, 4.0)
    writer.commit(1.0)
    before = reader.retired
    writer.retire()
    del writer
    assert (before, reader.retired) == (False, True)
    assert latest(reader).values == (4.0,)


WRITER = """
import sys
from alloy_agent.worker.ring import PageWriter
import os, socket
sock = socket.socket(fileno=int(sys.argv[1]))
page = PageWriter(64, 1, 4)
socket.send_fds(sock, [b"x"], [page.fd])
n = 0
while True:
    n += 1
    page.begin(float(n))
    for slot in range(64):
        page.put(slot, float(n), source_time_s=float(n))
    page.commit(float(n))
"""


def test_a_hammering_reader_never_sees_a_torn_frame_even_when_the_writer_is_killed() -> None:
    """Against a writer at full speed over four frames, each frame read is of one tick only."""
    import socket

    ours, theirs = socket.socketpair()
    with ours, theirs:
        child = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(theirs.fileno())],
            pass_fds=(theirs.fileno(),),
            cwd=Path(__file__).parents[2],
        )
        _data, fds, _flags, _address = socket.recv_fds(ours, 1, 1)
    reader = PageReader(fds[0], specs(64), 1)
    read = 0
    until_s = time.monotonic() + 2.0
    while time.monotonic() < until_s:
        for block in (reader.newest(), reader.kept(0)[1]):
            if block is not None:
                read += 1
                ticks = block.values(0)
                assert ticks == sorted(set(ticks))
                assert all(block.values(slot) == ticks for slot in range(64))
                assert all(block.sources(slot) == ticks for slot in range(64))
                assert block.newest().number + 1 == ticks[-1]
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert read > 1000
    last = latest(reader)
    assert set(last.values) == {float(last.number + 1)}
