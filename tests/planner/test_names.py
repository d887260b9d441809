"""Names that people read and type: short while they are unique, refused when they are not."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alloy_agent.errors import ConfigError
from alloy_agent.model import DeviceId, Partition, PartitionId, Placement, Scope
from alloy_agent.planner.names import (
    find_device,
    find_partition,
    find_subject,
    short_names,
    shortened,
)

FIRST = "GPU-29f7be15-b41a-57ec-8e9d-406335e59932"
SECOND = "GPU-f332bf8f-ed65-5c76-9fdb-a4c369c33d12"


def piece(device: str, name: str, generation: int = 1, uuid: str | None = None) -> Partition:
    profile, start = name.split("@")
    return Partition(
        id=PartitionId(f"{device}/{name}"),
        device=DeviceId(device),
        profile=profile,
        placement=Placement(start=int(start), size=1),
        incarnation="a",
        generation=generation,
        uuid=uuid,
    )


PIECES = (
    piece(FIRST, "1g.10gb@2", generation=3, uuid="MIG-aaaa-1"),
    piece(FIRST, "1g.10gb@3", uuid="MIG-aaaa-2"),
    piece(SECOND, "1g.10gb@2", uuid="MIG-bbbb-1"),
    piece("cpu-node1", "1c@1"),
    piece("cpu-node1", "1c@10"),
)


@pytest.mark.parametrize(
    ("name", "found"),
    [
        (f"{FIRST}/1g.10gb@2", 0),
        ("MIG-aaaa-1", 0),
        ("GPU-29f7be15/1g.10gb@3", 1),  # as the audit shows it
        ("GPU-29/1g.10gb@2", 0),
        ("GPU-f", 2),
        ("MIG-b", 2),
        (f"{FIRST}/1g.10gb@2#3", 0),
        ("GPU-29/1g.10gb@2#3", 0),
        ("cpu-node1/1c@1", 3),  # whole, though another one begins with it
        ("cpu-node1/1c@10", 4),
        ("cpu-node/1c@1", 3),
        (f"{SECOND}/1g", 2),
        ("GPU-f332bf8f/1g", 2),
    ],
)
def test_a_beginning_that_names_one_is_enough(name: str, found: int) -> None:
    """The whole id wins; else a beginning of id, UUID or the device's part that fits one only."""
    assert find_partition(name, PIECES) == PIECES[found]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("GPU-", f"begins the names of {FIRST}/1g.10gb@2, {FIRST}/1g.10gb@3, {SECOND}"),
        ("GPU-/1g.10gb@2", "begins the names of"),
        ("GPU-29f7be15/1g", "begins the names of"),
        ("GPU-29f7be15/2g", "none of this id"),
        ("MIG-aaaa", "write more of it"),
        ("cpu-node1/1c@1#2", "is at generation 1, not 2"),
        ("1g.10gb@2", "none of this id"),
        ("", "none of this id"),
        ("/", "none of this id"),
        ("#1", "none of this id"),
        ("cpu-node1/1c@2", "did you mean cpu-node1/1c@1"),
    ],
)
def test_what_names_none_or_several_is_refused(name: str, words: str) -> None:
    """The refusal names candidates or what looks like it; a generation that is over is none."""
    with pytest.raises(ConfigError, match=words.replace(".", r"\.")):
        find_partition(name, PIECES)


class Board(NamedTuple):
    """A device as far as its name goes."""

    id: DeviceId
    hive: str | None = None


BOARDS = (
    Board(DeviceId(FIRST), "hive-0"),
    Board(DeviceId(SECOND), "hive-0"),
    Board(DeviceId("cpu-node1")),
    Board(DeviceId("cpu-node10")),
)


@pytest.mark.parametrize(
    ("name", "scope", "found"),
    [
        ("", Scope.NODE, ""),
        (FIRST, Scope.DEVICE, FIRST),
        ("GPU-29f7be15", Scope.DEVICE, FIRST),
        ("cpu-node1", Scope.DEVICE, "cpu-node1"),
        ("hive", Scope.HIVE, "hive-0"),
        ("GPU-f332bf8f/1g", Scope.PARTITION, f"{SECOND}/1g.10gb@2"),
        ("MIG-bbbb-1", Scope.PARTITION, f"{SECOND}/1g.10gb@2"),
        ("cpu-node1/1c@1", Scope.PARTITION, "cpu-node1/1c@1"),
    ],
)
def test_a_subject_is_a_device_a_partition_or_a_hive(name: str, scope: Scope, found: str) -> None:
    """Whole names win, beginnings that fit one thing are enough, and nothing is the node."""
    assert find_subject(name, BOARDS, PIECES) == (scope, found)
    if scope is Scope.DEVICE:
        assert find_device(name, BOARDS).id == found


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nope", "nope: no device, partition or hive of that name"),
        ("GPU-", "begins the names of"),
        ("GPU-29f7be15/1g", "begins the names of"),
    ],
)
def test_a_subject_that_is_none_or_several_is_refused(name: str, words: str) -> None:
    """One line says whether nothing or too much is meant."""
    with pytest.raises(ConfigError, match=words):
        find_subject(name, BOARDS, PIECES)
    if "/" not in name:
        with pytest.raises(ConfigError, match=r"no such device|begins the names of"):
            find_device(name, BOARDS)


def test_short_names_stay_unique() -> None:
    """A UUID is cut where it is unique; short ids and those that look alike stay whole."""
    twin = FIRST.replace("b41a", "b41b")
    assert short_names([FIRST, SECOND, "cpu-node0"]) == {
        FIRST: "GPU-29f7be15",
        SECOND: "GPU-f332bf8f",
    }
    assert short_names([FIRST, twin]) == {FIRST: FIRST[:17], twin: twin[:17]}
    text = f"create 1g.10gb@2 on {FIRST}; device {SECOND}: mig off"
    assert shortened(text, short_names([FIRST, SECOND])) == (
        "create 1g.10gb@2 on GPU-29f7be15; device GPU-f332bf8f: mig off"
    )


@given(st.sets(st.text(alphabet="ab-", min_size=1, max_size=40), max_size=8))
def test_every_short_name_finds_its_own_partition(devices: set[str]) -> None:
    """Whatever the ids are, what is shown for a partition names that partition and no other."""
    pieces = [piece(device, "1g.10gb@0") for device in sorted(devices)]
    names = short_names(devices)
    for one in pieces:
        shown = f"{names.get(one.device, one.device)}/1g.10gb@0"
        assert find_partition(shown, pieces) == one
