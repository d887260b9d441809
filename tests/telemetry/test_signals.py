"""Readings that cannot be, ages, and counters that misbehave."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alloy_agent.model import Quality
from alloy_agent.telemetry import signals
from tests.telemetry.world import signal

WORDS = [(1 << bits) - 1 for bits in (16, 32, 64)]


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize(
    ("name", "scale"),
    [
        ("alloy_device_power_watts", 1.0),
        ("alloy_device_power_watts", 1e-3),
        ("alloy_device_energy_joules_total", 1e-3),
        ("alloy_device_memory_used_bytes", 1.0),
        ("alloy_device_memory_used_bytes", 1048576.0),
        ("alloy_device_temperature_headroom_celsius", 1.0),
        ("alloy_device_ecc_corrected_total", 1.0),
        ("alloy_partition_compute_active_ratio", 1.0),
    ],
)
def test_the_vendors_word_for_no_value_is_no_value(word: int, name: str, scale: float) -> None:
    """An all-ones word of any width, in any vendor's unit, is absent with a reason."""
    unit = "errors" if "ecc" in name else ""
    found = signals.sane(signal(name, float(word) * scale, unit=unit))
    assert found.value is None
    assert found.quality is Quality.NOT_SUPPORTED
    assert found.reason


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("alloy_partition_compute_active_ratio", 1.5),
        ("alloy_partition_compute_active_ratio", -0.01),
        ("alloy_device_power_watts", 1e7),
        ("alloy_device_temperature_headroom_celsius", -300.0),
        ("alloy_device_memory_used_bytes", 2.0**60),
        ("alloy_device_power_watts", math.nan),
        ("alloy_device_power_watts", math.inf),
    ],
)
def test_what_is_beyond_physics_is_absent(name: str, value: float) -> None:
    """No clamping: an impossible number is no number."""
    assert signals.sane(signal(name, value)).value is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("alloy_partition_compute_active_ratio", 0.0),
        ("alloy_partition_compute_active_ratio", 1.0),
        ("alloy_device_power_watts", 255.0),
        ("alloy_device_temperature_headroom_celsius", -3.5),
        ("alloy_device_memory_used_bytes", 0.0),
        ("alloy_agent_unknown_thing", -1e30),
    ],
)
def test_what_can_be_stays(name: str, value: float) -> None:
    """Zero is a value, 255 W is a power, and an unknown unit is not judged."""
    assert signals.sane(signal(name, value)).value == value


def test_age_is_the_sources() -> None:
    """A source with a clock is as old as it says, however often it is read."""
    import msgspec

    one = msgspec.structs.replace(
        signal("alloy_device_power_watts", 70.0, read_s=100.0), source_time_s=90.0
    )
    assert signals.age_s(one, 100.5) == pytest.approx(10.5)
    assert not signals.is_fresh(one, 100.5)
    assert signals.is_fresh(signal("alloy_device_power_watts", 70.0, read_s=100.0), 100.5)


def feed(values: list[float], rate_max: float = 4000.0) -> tuple[signals.Count, list[float | None]]:
    """Return a counter and its growths after readings one second apart."""
    counter = signals.begin_count(values[0], 0.0)
    grown = []
    for second, value in enumerate(values[1:], 1):
        counter, delta = signals.count(counter, value, float(second), rate_max)
        grown.append(delta)
    return counter, grown


@pytest.mark.parametrize(
    ("what", "values", "total", "resets", "glitches"),
    [
        ("grows", [100, 200, 300], 200, 0, 0),
        ("reset to zero", [5000, 5100, 0, 50, 150], 200, 1, 0),
        ("32-bit wrap", [4294967.0, 4294967.2, 0.5, 100.5, 200.5], 100.2, 1, 0),
        ("one sample of nonsense below", [5000, 5100, 3, 5300, 5400], 400, 0, 1),
        ("one sample of nonsense above", [5000, 5100, 9e9, 5300, 5400], 400, 0, 1),
        ("a jump beyond physics that stays", [0, 100, 1e9, 1e9 + 100, 1e9 + 200], 200, 1, 0),
        ("repeats", [100, 100, 100, 200], 100, 0, 0),
    ],
)
def test_counters(what: str, values: list[float], total: float, resets: int, glitches: int) -> None:
    """The growth that cannot be believed is dropped, the rest is kept, and each case is counted."""
    del what
    counter, _ = feed(values)
    assert counter.total == pytest.approx(total)
    assert counter.resets == resets
    assert counter.glitches == glitches


@given(st.lists(st.floats(0, 1e18), min_size=2, max_size=40))
def test_a_told_counter_never_goes_backwards(values: list[float]) -> None:
    """Whatever the source does, the total only grows and no faster than physics."""
    counter, last = signals.begin_count(values[0], 0.0), 0.0
    for second, value in enumerate(values[1:], 1):
        counter, delta = signals.count(counter, value, float(second), 4000.0)
        assert counter.total >= last
        assert counter.total <= 4000.0 * second + 1e-6
        assert delta is None or delta >= 0
        last = counter.total


def test_a_counter_that_stands_still_under_load_is_seen() -> None:
    """Frozen while busy is a fault; frozen while idle is not."""
    counter = signals.begin_count(500.0, 0.0)
    for second in range(1, 31):
        counter, _ = signals.count(counter, 500.0, float(second), 4000.0)
    assert signals.is_frozen(counter, 30.0, 0.1, busy=True)
    assert not signals.is_frozen(counter, 30.0, 0.1, busy=False)
    counter, _ = signals.count(counter, 600.0, 31.0, 4000.0)
    assert not signals.is_frozen(counter, 31.5, 0.1, busy=True)
