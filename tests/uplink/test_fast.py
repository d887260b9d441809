"""Samples in columns: small, nothing missing looks like zero, and nothing absurd breaks one."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from alloy_agent.model import PartitionId
from alloy_agent.proto import agent_pb2 as pb
from alloy_agent.uplink import fast
from alloy_agent.uplink.fast import NOT_PERMITTED, STALE, VALUE, FastPlan, GateRow, Readings

BUSY = "alloy_partition_compute_active_ratio"
MEMORY = "alloy_partition_memory_used_bytes"


class Reading(NamedTuple):
    """One signal as it was read."""

    name: str
    subject: str
    value: float = math.nan
    code: int = VALUE
    time_s: float = 99.9


def message(
    readings: Sequence[Reading],
    partitions: Sequence[str],
    devices: Sequence[str],
    gates: Mapping[str, GateRow],
) -> pb.Fast:
    """Return the sample of these readings at 100 s, as a brain reads it."""
    plan = FastPlan(
        [(one.subject, one.name) for one in readings],
        [PartitionId(one) for one in partitions],
        devices,
    )
    columns = Readings(
        [one.value for one in readings],
        [one.time_s for one in readings],
        bytes(one.code for one in readings),
    )
    made = plan.message(columns, gates, 100.0, (1, 2), 123_456)
    again = plan.message(columns, gates, 100.0, (1, 2), 123_456)
    assert made == again  # what a plan remembers of the last sample is not in the next
    return pb.Fast.FromString(made.SerializeToString())


def full_node(count: int = 64) -> tuple[list[Reading], list[str], list[str]]:
    """Return every fast signal of eight devices with eight partitions each."""
    rng = random.Random(7)  # noqa: S311 - values, no secrets
    partitions = [f"gpu{n // 8}/1g.10gb@{n % 8}" for n in range(count)]
    devices = [f"gpu{n}" for n in range(8)]
    readings = []
    for subject in partitions:
        for name in fast.PARTITION_COLUMNS:
            value = rng.random()
            if name.endswith("_bytes"):
                value *= 10 << 30
            if name.endswith(("_bits", "_errors")):
                value = 0.0
            readings.append(Reading(name, subject, value))
    readings += [
        Reading(name, gpu, rng.random() * 60) for gpu in devices for name in fast.DEVICE_COLUMNS
    ]
    return readings, partitions, devices


def test_sixty_four_partitions_fit_in_a_packet() -> None:
    """One sample of 8 devices with 8 partitions each takes about 1.3 KB."""
    readings, partitions, devices = full_node()
    gates = {subject: GateRow(open=True) for subject in (*partitions, *devices)}
    sample = message(readings, partitions, devices, gates)
    assert 900 < pb.AgentMessage(fast=sample).ByteSize() <= 1_400
    assert len(sample.partitions.compute_active_e4) == 64
    assert not sample.others


def test_columns_carry_values_ages_and_reasons() -> None:
    """A row has its values, the age of its oldest one, and why anything is missing."""
    readings = [
        Reading(BUSY, "p0", 0.1234, time_s=99.0),
        Reading(MEMORY, "p0", (5 << 20) + 1.0),
        Reading(BUSY, "p1", code=NOT_PERMITTED),
        Reading(MEMORY, "p1", 7.0 * (1 << 20), STALE),
        Reading("alloy_device_fan_ratio", "gpu0", 0.5),
        Reading("alloy_device_temperature_headroom_celsius", "gpu0", -3.21),
    ]
    gates = {"p0": GateRow(open=False, gate="memory", reason="95 % used")}
    sample = message(readings, ["p0", "p1"], ["gpu0"], gates)
    block = sample.partitions
    assert list(block.compute_active_e4) == [1234, 0]
    assert list(block.memory_used_mib) == [6, 7]
    assert list(block.age_ms) == [1000, 100]
    assert block.quality[1] & 0b11 == pb.QUALITY_NOT_PERMITTED
    assert (block.quality[1] >> 2) & 0b11 == pb.QUALITY_STALE
    assert list(block.gate) == [pb.GATE_CLOSED, pb.GATE_UNKNOWN]
    assert [(one.row, one.gate, one.reason) for one in sample.reasons] == [
        (0, "memory", "95 % used"),
        (1, "", "not judged yet"),
    ]
    assert list(sample.devices.temperature_headroom_dk) == [-32]
    assert sample.others[0].signal == "alloy_device_fan_ratio"
    assert not block.headroom_p95_e4


def test_a_row_that_nobody_reads_is_not_supported() -> None:
    """Of two partitions one has the signal: the other's place says that there is none."""
    sample = message([Reading(BUSY, "p1", 0.5)], ["p0", "p1"], [], {})
    assert list(sample.partitions.compute_active_e4) == [0, 5000]
    assert list(sample.partitions.quality) == [pb.QUALITY_NOT_SUPPORTED, 0]
    assert list(sample.partitions.age_ms) == [0, 100]
    assert not sample.partitions.gate


def test_changed_gates_are_told_of_in_the_next_sample() -> None:
    """A plan says what the gates of now are, not those of its first sample."""
    plan = FastPlan([("p0", BUSY)], [PartitionId("p0")], [])
    columns = Readings([0.5], [99.0], bytes(1))
    shut = plan.message(columns, {"p0": GateRow(open=False, gate="drain")}, 100.0, (1, 1), 1)
    wide = plan.message(columns, {"p0": GateRow(open=True)}, 100.0, (1, 1), 2)
    assert (list(shut.partitions.gate), len(shut.reasons)) == ([pb.GATE_CLOSED], 1)
    assert (list(wide.partitions.gate), len(wide.reasons)) == ([pb.GATE_OPEN], 0)


NAMES = (*fast.PARTITION_COLUMNS, *fast.DEVICE_COLUMNS, "alloy_other")


@example(value=1e308, code=0, name="alloy_partition_rate_ratio", time_s=0.0)
@given(
    value=st.just(math.nan) | st.floats(),
    code=st.integers(0, 255),
    name=st.sampled_from(NAMES),
    time_s=st.floats(-1e9, 1e9),
)
def test_any_reading_can_be_sent(value: float, code: int, name: str, time_s: float) -> None:
    """No number, however absurd, breaks a sample; what is no number arrives as missing."""
    sample = message([Reading(name, "x", value, code, time_s)], ["x"], ["x"], {})
    if math.isnan(value) and name in fast.PARTITION_COLUMNS:
        bit = list(fast.PARTITION_COLUMNS).index(name)
        state = (sample.partitions.quality[0] >> (2 * bit)) & 0b11
        assert state in {pb.QUALITY_NOT_SUPPORTED, pb.QUALITY_NOT_PERMITTED}


@given(
    rows=st.lists(
        st.tuples(st.floats(-0.5, 1.5), st.integers(0, 3), st.floats(90.0, 100.0)),
        min_size=1,
        max_size=9,
    )
)
def test_a_whole_column_is_what_its_rows_are(rows: list[tuple[float, int, float]]) -> None:
    """Columns that are filled at once carry what each row would carry alone."""
    names = [f"p{number}" for number in range(len(rows))]
    readings = [Reading(BUSY, name, *row) for name, row in zip(names, rows, strict=True)]
    block = message(readings, names, [], {}).partitions
    alone = [message([one], [one.subject], [], {}).partitions for one in readings]
    assert list(block.compute_active_e4) == [one.compute_active_e4[0] for one in alone]
    assert list(block.age_ms) == [one.age_ms[0] for one in alone]
    qualities = [one.quality[0] if one.quality else 0 for one in alone]
    assert (list(block.quality) or [0] * len(rows)) == qualities


@pytest.mark.parametrize(
    ("used_bytes", "told_mib"), [(0.0, 0), (1.0, 1), (1048576.0, 1), (2e16, 2**32 - 1)]
)
def test_used_memory_is_rounded_up(used_bytes: float, told_mib: int) -> None:
    """A byte that is used is never told as none, and too many stop at the end of the field."""
    sample = message([Reading(MEMORY, "p0", used_bytes)], ["p0"], [], {})
    assert list(sample.partitions.memory_used_mib) == [told_mib]
