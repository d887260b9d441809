"""Headroom: the least over a partition's own resources and its device's, and what is absent."""

from __future__ import annotations

import math

import pytest

from alloy_agent.daemon.telemetry.load import Load
from alloy_agent.telemetry import headroom

MINUTE = 60


def filled(*columns: tuple[tuple[str, int], str, float]) -> Load:
    """Return a minute of one reading a second of each subject's signal, weighed."""
    load = Load()
    for key, signal, value in columns:
        windows = load.windows_of(key, headroom.RESOURCES[signal])
        windows.period_s = 1.0
        for second in range(1, MINUTE + 1):
            windows.minute.add(value, float(second))
    load.weigh(MINUTE + 0.5)
    return load


PIECE, DEVICE = ("GPU-0/1g@0", 3), ("GPU-0", 0)
IDLE = (PIECE, "alloy_partition_compute_active_ratio", 0.2)


@pytest.mark.parametrize(
    ("signal", "value", "left", "scarcest"),
    [
        ("alloy_device_power_watts", 0.93, 0.07, "device power"),
        ("alloy_device_temperature_headroom_celsius", 4.0, 0.2, "device temperature"),
        ("alloy_device_link_active_ratio", 0.6, 0.4, "device link"),
        ("alloy_device_compute_active_ratio", 0.99, 0.8, "compute"),  # of its own it has that
        ("alloy_device_memory_used_bytes", 0.99, 0.8, "compute"),  # others' memory is not ours
    ],
)
def test_a_partition_has_no_more_left_than_its_device(
    signal: str, value: float, left: float, scarcest: str
) -> None:
    """Power, temperature and link of the device are in the minimum, named as the device's."""
    load = filled(IDLE, (DEVICE, signal, value))
    room = load.headrooms[PIECE]
    assert room.least == pytest.approx(left, abs=0.02)
    assert room.scarcest == scarcest
    assert set(room.ratios) == {"compute"}, "a device's value is not told as the partition's"


def test_its_own_link_comes_before_the_devices() -> None:
    """A partition whose own link is measured is not held to that of the whole device."""
    load = filled(
        IDLE,
        (PIECE, "alloy_partition_link_active_ratio", 0.5),
        (DEVICE, "alloy_device_link_active_ratio", 0.97),
    )
    assert load.headrooms[PIECE].scarcest == "link"


def test_a_resource_of_the_device_that_is_not_covered_is_unknown() -> None:
    """Power was measured once and no more: how much is left of it is not made up."""
    load = filled(IDLE)
    power = load.windows_of(DEVICE, headroom.RESOURCES["alloy_device_power_watts"])
    power.period_s = 1.0
    power.minute.add(0.1, 60.0)
    load.weigh(MINUTE + 0.6)
    room = load.headrooms[PIECE]
    assert (room.least, room.scarcest) == (None, "device power")


def test_what_nobody_measures_is_absent_and_named() -> None:
    """It is no part of the minimum, and whoever reads that can see it."""
    room = filled(IDLE, (DEVICE, "alloy_device_power_watts", 0.5)).headrooms[PIECE]
    assert room.absent == ("memory", "memory_bandwidth", "link", "temperature")
    assert room.least is not None
    assert math.isclose(room.least, 0.5, abs_tol=0.02)
    assert filled(IDLE).headrooms[PIECE].absent[-2:] == ("power", "temperature")


def test_another_device_is_no_bound() -> None:
    """A neighbour at its limit takes nothing from this one."""
    load = filled(IDLE, (("GPU-1", 0), "alloy_device_power_watts", 0.99))
    assert load.headrooms[PIECE].scarcest == "compute"
