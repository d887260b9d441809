"""Windows against an exact oracle: sliding, bounded error, coverage, merging, repetition."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alloy_agent.telemetry import headroom
from alloy_agent.telemetry.window import BINS, COVERAGE_MIN, Window, Windows


def exact(values: list[float], ratio: float) -> float:
    """Return the smallest value that `ratio` of all do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(ratio * len(ordered)) - 1)]


@given(st.integers(0, 2**32), st.integers(500, 600), st.sampled_from([0.2, 1.0, 5.0]))
@settings(max_examples=60, deadline=None)
def test_quantiles_are_within_half_a_bin_of_the_exact_ones(
    seed: int, count: int, power: float
) -> None:
    """P50, P95 and P99 of a full minute are off by at most half a bin."""
    source = random.Random(seed)  # noqa: S311 - samples, no secrets
    values = [source.random() ** power for _ in range(count)]
    window = Window(60.0)
    for number, value in enumerate(values):
        window.add(value, 5.0 + number * 60.0 / len(values))
    found = window.quantiles(64.999, 60.0 / len(values))
    assert found.count == len(values)
    for got, ratio in ((found.p50, 0.5), (found.p95, 0.95), (found.p99, 0.99)):
        assert got is not None
        assert abs(got - exact(values, ratio)) <= 0.5 / BINS + 1e-12


def test_the_window_slides(tmp_path: object) -> None:
    """What is older than the span, to within one slice, no longer counts."""
    del tmp_path
    window = Window(60.0)
    for tick in range(600):
        window.add(1.0, tick * 0.1)
    for tick in range(600, 1300):
        window.add(0.0, tick * 0.1)
    found = window.quantiles(130.0, 0.1)
    assert found.p99 is not None
    assert found.p99 < 0.01
    window.slide(500.0)
    assert window.samples == 0


def test_a_source_that_repeats_itself_counts_once() -> None:
    """Fifty polls of a value that its source renews once a second are one sample a second."""
    window = Window(60.0)
    for tick in range(60 * 50):
        window.add(0.9 if tick // 50 == 3 else 0.1, float(tick // 50))
    found = window.quantiles(60.0, 1.0)
    assert found.count in (55, 56, 60)
    assert found.p50 == pytest.approx(0.1, abs=1 / BINS)


@pytest.mark.parametrize(("samples", "known"), [(600, True), (500, True), (440, False), (0, False)])
def test_short_coverage_is_unknown(samples: int, known: bool) -> None:
    """Under 80 % of the samples that were due there is no quantile, however clear the rest is."""
    window = Window(60.0)
    for tick in range(samples):
        window.add(0.5, 60.0 + tick * 0.1)
    found = window.quantiles(119.99, 0.1)
    assert (found.p95 is not None) is known
    assert (found.coverage_ratio >= COVERAGE_MIN) is known


def test_windows_merge_exactly() -> None:
    """The quarter hour made of minutes' slices has the counts of one that saw every sample."""
    both, direct = Windows(), Window(900.0)
    for tick in range(9000):
        value = (tick % 100) / 100
        both.add(value, tick * 0.1)
        direct.add(value, tick * 0.1)
        if tick % 100 == 0:
            both.settle(tick * 0.1)
    both.settle(905.0)
    merged, seen = both.quarter.quantiles(905.0, 0.1), direct.quantiles(905.0, 0.1)
    assert merged.count == seen.count
    assert (merged.p50, merged.p95, merged.p99) == (seen.p50, seen.p95, seen.p99)


def test_values_beyond_the_range_count_at_its_edge() -> None:
    """A ratio of 1.0 and a margin below zero stay in the first and last bin."""
    window = Window(60.0, 0.0, 1.0)
    assert window.add(1.0, 1.0)
    assert window.add(-5.0, 2.0)
    assert window.add(7.0, 3.0)
    assert window.samples == 3


@given(
    st.lists(st.floats(-0.2, 1.3), min_size=1, max_size=600),
    st.sampled_from([0.05, 0.95]),
    st.floats(0.05, 0.2),
)
def test_one_quantile_alone_is_that_of_all(
    values: list[float], ratio: float, period_s: float
) -> None:
    """The level of a window is the quantile of its ratio, or as unknown as it."""
    window = Window(60.0)
    for number, value in enumerate(values):
        window.add(value, 1.0 + number * 0.1)
    now_s = 1.0 + len(values) * 0.1
    found = window.quantiles(now_s, period_s)
    assert window.level(now_s, period_s, ratio) == (found.p05 if ratio < 0.5 else found.p95)


@given(
    st.lists(
        st.lists(st.tuples(st.floats(-0.2, 1.3), st.integers(0, 1500)), max_size=60), max_size=12
    ),
    st.sampled_from([1.0, 0.5, 3.0]),
)
@settings(deadline=None)
def test_a_batch_counts_as_its_values_one_by_one(
    batches: list[list[tuple[float, int]]], limit: float
) -> None:
    """Whatever a batch repeats, and wherever slices end in it, the window holds the same."""
    whole, single = Window(60.0), Window(60.0)
    for batch in batches:
        values = [value for value, _ in batch]
        times_s = [tenths / 10 for _, tenths in batch]
        new = whole.add_all(values, times_s, limit)
        assert new == sum(single.add(v / limit, t) for v, t in zip(values, times_s, strict=True))
        now_s = max(times_s, default=0.0)
        assert whole.quantiles(now_s, 0.1) == single.quantiles(now_s, 0.1)


def test_headroom_is_what_p95_leaves_and_the_least_decides() -> None:
    """Compute at 70 % and memory at 90 % leave 30 % and 10 %: memory is the scarcest."""
    room = headroom.together(
        {"compute": headroom.left("compute", 0.7), "memory": headroom.left("memory", 0.9)}
    )
    assert room.least == pytest.approx(0.1)
    assert room.scarcest == "memory"
    assert headroom.left("temperature", 5.0) == pytest.approx(0.25)
    assert headroom.left("compute", None) is None


def test_one_unknown_resource_makes_the_least_unknown() -> None:
    """A resource that was not covered is no free one."""
    room = headroom.together({"compute": 0.5, "memory": None})
    assert room.least is None
    assert room.scarcest == "memory"
