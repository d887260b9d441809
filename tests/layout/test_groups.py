"""Groups of whole devices in a layout: which are chosen, which are refused, and how."""

from __future__ import annotations

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from alloy_agent.errors import ConfigError
from alloy_agent.layout import choose, read_layout
from alloy_agent.model import (
    Device,
    DeviceId,
    Layout,
    Mode,
    ModeKind,
    Partition,
    PartitionId,
    Placement,
    Scheme,
    Snapshot,
    Vendor,
)
from alloy_agent.planner import difference, plan

TORUS = {0: (1, 4, 8, 16), 4: (1, 4), 8: (1, 4, 8), 12: (1, 4)}


def devices(count: int = 16, lnc: dict[int, str] | None = None) -> tuple[Device, ...]:
    """Return the devices of a torus, or of a ring of another size."""
    return tuple(
        Device(
            id=DeviceId(f"neuron-{number:02}"),
            vendor=Vendor.NEURON,
            model="Trainium2 (trn2.48xlarge)",
            backend="neuron",
            scheme=Scheme.CORES,
            slices=4,
            slice_name="core",
            index=number,
            group_sizes=(
                TORUS.get(number, (1,)) if count == 16 else tuple(range(1, count - number + 1))
            ),
            modes=(Mode(kind=ModeKind.LNC, current=(lnc or {}).get(number, "2")),),
        )
        for number in range(count)
    )


def resolve(groups: str, here: tuple[Device, ...], more: str = "") -> Layout:
    """Return the layout of a file with these groups."""
    text = (
        "version: v1\nlayouts:\n  one:\n"
        f"    - match: {{vendor: neuron}}\n      groups: {groups}\n{more}"
    )
    return choose(read_layout(text, "layout.yaml"), None, here)


def taken(layout: Layout) -> list[tuple[str, ...]]:
    """Return the distinct groups of a layout, single devices as such."""
    found = {
        spec.group or (spec.device,) for one in layout.devices for spec in one.partitions or ()
    }
    return sorted(tuple(d.removeprefix("neuron-") for d in group) for group in found)


def test_groups_take_whole_devices_that_work_together() -> None:
    """Each group lies on a set that its first device leads; its members are lent whole."""
    layout = resolve('[4, "8@8"]', devices())
    assert taken(layout) == [("00", "01", "02", "03"), tuple(f"{n:02}" for n in range(8, 16))]
    for one in layout.devices:
        (spec,) = one.partitions or ()
        assert (spec.profile, spec.size, spec.placement) == ("4c", 4, Placement(start=0, size=4))
    assert {one.device for one in layout.devices}.isdisjoint(
        {f"neuron-{n:02}" for n in range(4, 8)}
    )


def test_groups_leave_devices_of_other_entries_alone() -> None:
    """What another entry names is not taken, whichever of the two stands first."""
    more = "    - match: {vendor: neuron, index: 1}\n      cores: [2, 2]\n"
    layout = resolve("[4]", devices(), more)
    assert ("04", "05", "06", "07") in taken(layout)
    assert not any("01" in group for group in taken(layout) if len(group) > 1)


@pytest.mark.parametrize(
    ("groups", "cause", "cure"),
    [
        ("[3]", "layout.yaml:5: groups[0]: collectives do not work on 3 devices", "1, 4, 8, 16"),
        ("[1, 17]", "groups[1]: collectives do not work on 17", "1, 4, 8, 16"),
        ("['4@2']", "collectives do not work on devices 2 to 5", "begins at 0, 4, 8, 12"),
        ("['8@4']", "collectives do not work on devices 4 to 11", "begins at 0, 8"),
        ("['four']", "'four' is no group", "like 4@8"),
        ("['0@0']", "'0@0' is no group", "like 4@8"),
        ("[16, 1]", "groups of 16, 1 devices do not fit on devices 0-15", "fewer or smaller"),
        ("['4@0', '4@0']", "groups of 4@0, 4@0 devices do not fit", "fewer or smaller"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_touched(
    groups: str, cause: str, cure: str
) -> None:
    """A size, a place or a sum that cannot work is refused with file, line and the way out."""
    with pytest.raises(ConfigError) as raised:
        resolve(groups, devices())
    assert cause in raised.value.message
    assert cure in raised.value.cure


def test_an_empty_list_and_a_second_way_are_refused() -> None:
    """No groups at all, and groups beside cores, are errors of the file."""
    with pytest.raises(ConfigError):
        resolve("[]", devices())
    with pytest.raises(ConfigError, match="cannot be combined"):
        resolve("[4]\n      cores: [1]", devices())


def test_devices_without_groups_have_none() -> None:
    """A node whose devices form no groups says so."""
    plain = tuple(replace(device, group_sizes=()) for device in devices(2))
    with pytest.raises(ConfigError, match="no device of this node forms groups"):
        resolve("[2]", plain)


def test_one_group_has_one_core_configuration() -> None:
    """Devices that count their cores differently are not put into one group."""
    with pytest.raises(ConfigError, match="different configurations"):
        resolve("['4@0']", devices(lnc={2: "1"}))


@settings(deadline=None)
@given(
    wanted=st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=6),
    out=st.sets(st.integers(0, 11), max_size=11),
)
def test_every_choice_is_legal_and_none_is_missed(wanted: list[int], out: set[int]) -> None:
    """Groups never overlap nor reach excluded devices, and one group is found if there is room."""
    ring = devices(12)
    here = tuple(d for d in ring if d.index not in out)
    free = "".join("0" if n in out else "1" for n in range(12))
    longest = max(map(len, free.split("0")))
    if sum(wanted) > 12 - len(out) or max(wanted) > longest:
        with pytest.raises(ConfigError):
            resolve(str(wanted), here)
        return
    try:
        layout = resolve(str(wanted), here)
    except ConfigError:
        event("fragmented")
        return
    groups = taken(layout)
    numbers = [int(n) for group in groups for n in group]
    assert len(numbers) == len(set(numbers)) == sum(wanted)
    assert not set(numbers) & out
    assert sorted(map(len, groups)) == sorted(wanted)


def _snapshot(here: tuple[Device, ...], layout: Layout | None) -> Snapshot:
    partitions = tuple(
        Partition(
            id=PartitionId(f"{spec.device}/{spec.profile}@0"),
            device=spec.device,
            profile=spec.profile,
            placement=spec.placement or Placement(start=0, size=spec.size),
            incarnation="grant-1",
            group=spec.group,
        )
        for one in (layout.devices if layout is not None else ())
        for spec in one.partitions or ()
    )
    return Snapshot(
        boot_id="b", sequence=1, taken_at_s=0.0, taken_wall_s=0.0, devices=here,
        partitions=partitions,
    )  # fmt: skip


def test_a_group_that_exists_is_kept_and_another_is_made_anew() -> None:
    """Members of the wanted group stay; single devices become a group by being lent anew."""
    here = devices()
    grouped, single = resolve("[4]", here), resolve("[1, 1, 1, 1]", here)
    kept = plan(grouped, _snapshot(here, grouped))
    assert not kept.steps
    assert len(kept.kept) == 4
    anew = plan(grouped, _snapshot(here, single))
    assert anew.cost.destroyed == 4
    assert difference(grouped, _snapshot(here, single))
