"""The columns of now: what a number may be, and what stands where there is none."""

from __future__ import annotations

import math
import os

import pytest

from alloy_agent.daemon.telemetry.newest import DOUBTED, NOT_SUPPORTED, STALE, VALUE, Newest
from alloy_agent.model import Quality, Scope, SignalSpec
from alloy_agent.worker.ring import NEVER, PageReader, PageWriter

NAMES = ("alloy_device_power_watts", "alloy_device_compute_active_ratio", "alloy_device_errors")


class OnePage:
    """A worker with one device, whose pages a test writes."""

    def __init__(self) -> None:
        self.devices: dict[str, PageReader] = {}
        self.writer = self.turn("GPU-0", 1)

    def turn(self, device: str, epoch: int) -> PageWriter:
        """Give a device a new page."""
        specs = tuple(
            SignalSpec(name=name, subject=device, scope=Scope.DEVICE, unit="") for name in NAMES
        )
        writer = PageWriter(len(specs), epoch)
        self.devices[device] = PageReader(os.dup(writer.fd), specs, epoch)
        return writer

    def pages(self) -> dict[str, PageReader]:
        """Return the pages."""
        return dict(self.devices)

    def period_s(self) -> float:
        """Return the time between two ticks."""
        return 0.1


def write(writer: PageWriter, at_s: float, *values: float) -> None:
    writer.begin(at_s)
    for slot, value in enumerate(values):
        writer.put(slot, value)
    writer.commit(at_s)


def columns(worker: OnePage, now_s: float) -> Newest:
    newest = Newest((worker,))  # type: ignore[arg-type]
    newest.take(now_s)
    return newest


def test_values_come_with_their_times() -> None:
    """Each signal has its newest value, and the time at which it was read."""
    worker = OnePage()
    write(worker.writer, 10.0, 300.0, 0.5, 7.0)
    newest = columns(worker, 10.1)
    assert newest.values == [300.0, 0.5, 7.0]
    assert newest.times_s == [10.0] * 3
    assert newest.codes == bytes(3)
    assert newest.places["GPU-0", NAMES[1]] == 1


def test_a_source_with_a_clock_tells_its_own_time() -> None:
    """The age of a value is that of its source, not of its reading."""
    worker = OnePage()
    worker.writer.begin(10.0)
    worker.writer.put(0, 300.0, source_time_s=9.2)
    worker.writer.put(1, 0.5)
    worker.writer.commit(10.0)
    newest = columns(worker, 10.1)
    assert newest.times_s == [9.2, 10.0, 0.0]
    assert list(newest.codes) == [VALUE, VALUE, NEVER]


@pytest.mark.parametrize("bad", [65535.0 * 1e3, -1.0, 4000.5])
def test_a_number_that_cannot_be_is_none(bad: float) -> None:
    """Beyond physics there is no value, and its neighbours stay."""
    worker = OnePage()
    write(worker.writer, 10.0, bad, 0.5, 1.0)
    newest = columns(worker, 10.1)
    assert math.isnan(newest.values[0])
    assert list(newest.codes) == [DOUBTED, VALUE, VALUE]


def test_what_was_not_read_for_three_periods_is_stale_and_keeps_its_value() -> None:
    """A silent source turns stale, whether all of its page is silent or one signal alone."""
    worker = OnePage()
    write(worker.writer, 10.0, 300.0, 0.5, 1.0)
    assert list(columns(worker, 10.31).codes) == [STALE] * 3
    write(worker.writer, 10.4, 310.0)
    newest = columns(worker, 10.41)
    assert list(newest.codes) == [VALUE, STALE, STALE]
    assert newest.values == [310.0, 0.5, 1.0]


def test_no_number_and_no_support_are_told_apart_from_no_frame() -> None:
    """Infinity is no reading, what a source lacks is said, and an empty page has nothing."""
    worker = OnePage()
    assert list(columns(worker, 1.0).codes) == [NEVER] * 3
    worker.writer.begin(10.0)
    worker.writer.put(0, math.inf)
    worker.writer.put(1, 0.0, Quality.NOT_SUPPORTED)
    worker.writer.put(2, 1.0)
    worker.writer.commit(10.0)
    newest = columns(worker, 10.0)
    assert list(newest.codes) == [NOT_SUPPORTED, NOT_SUPPORTED, VALUE]
    assert [math.isnan(value) for value in newest.values] == [True, True, False]


def test_a_new_page_moves_the_places_and_says_so() -> None:
    """Another geometry is another revision, with columns of its own."""
    worker = OnePage()
    write(worker.writer, 10.0, 300.0, 0.5, 1.0)
    newest = columns(worker, 10.0)
    before = newest.revision
    newest.take(10.05)
    assert newest.revision == before
    write(worker.turn("GPU-1", 1), 10.0, 100.0, 0.25, 2.0)
    newest.take(10.1)
    assert newest.revision == before + 1
    assert newest.places["GPU-1", NAMES[0]] == 3
    assert newest.values == [300.0, 0.5, 1.0, 100.0, 0.25, 2.0]
