"""Groups of whole devices for one tenant: `groups: [4, 8@8]`, against what can work together.

Which devices form a group is the device's own word (`Device.group_sizes`): so many neighbours by
index, from it on. A size that no device leads can never work and is refused with the sizes that do.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final, NamedTuple

from alloy_agent.errors import ConfigError
from alloy_agent.layout.schema import Entry
from alloy_agent.model import Device, DeviceLayout, ModeKind, PartitionSpec, Placement
from alloy_agent.planner import core_profile

_PINNED: Final = re.compile(r"(?P<size>[0-9]{1,5})@(?P<first>[0-9]{1,5})", re.ASCII)


class Wish(NamedTuple):
    """One group as asked for: where in the list, how many devices, and the first one's index."""

    number: int
    size: int
    first: int | None


def grouped(
    entry: Entry,
    asked: Sequence[int | str],
    free: Sequence[Device],
    devices: Sequence[Device],
) -> list[DeviceLayout]:
    """Return the layouts of the devices that an entry's groups take, each lent whole.

    Args:
        entry: Where it is written.
        asked: Its groups.
        free: The devices that it matches and that no other entry names.
        devices: All of the node, for what the refusals say.

    Raises:
        ConfigError: A size or a place that cannot work together, or no room for all groups.
    """
    wishes = [_wish(entry, number, text) for number, text in enumerate(asked)]
    for wish in wishes:
        _refuse_illegal(entry, wish, devices)
    by_index = {device.index: device for device in free if device.group_sizes}
    # The large ones first: a small one fits wherever they leave room, and not the other way round.
    order = sorted(wishes, key=lambda wish: (wish.first is None, -wish.size, wish.number))
    places = _place(tuple(order), by_index, frozenset(), set())
    if places is None:
        raise _no_room(entry, wishes, by_index)
    return [layout for members in places for layout in _layouts(entry, members)]


def _wish(entry: Entry, number: int, text: int | str) -> Wish:
    if isinstance(text, int):
        return Wish(number, text, None)
    match = _PINNED.fullmatch(text)
    if match is None or not int(match["size"]):
        path = f"groups[{number}]"
        raise ConfigError(
            f"{entry.at(path)}: {path}: '{text[:40]}' is no group",
            cure="write how many devices, or size@first, like 4@8",
        )
    return Wish(number, int(match["size"]), int(match["first"]))


def _refuse_illegal(entry: Entry, wish: Wish, devices: Sequence[Device]) -> None:
    """Refuse what could not work on this node even if every device were free."""
    path = f"groups[{wish.number}]"
    leaders = [device for device in devices if device.group_sizes]
    if not leaders:
        raise ConfigError(
            f"{entry.at(path)}: {path}: no device of this node forms groups",
            cure="lend devices one by one: use cores",
        )
    model = leaders[0].model
    sizes = sorted({size for device in leaders for size in device.group_sizes})
    firsts = sorted(d.index for d in leaders if wish.size in d.group_sizes)
    if not firsts:
        raise ConfigError(
            f"{entry.at(path)}: {path}: collectives do not work on {wish.size} devices of {model}",
            cure=f"ask for {_listed(sizes)} devices, or lend them one by one with cores",
        )
    if wish.first is not None and wish.first not in firsts:
        last = wish.first + wish.size - 1
        raise ConfigError(
            f"{entry.at(path)}: {path}: collectives do not work on devices {wish.first} to {last} "
            f"of {model}",
            cure=f"a group of {wish.size} begins at {_listed(firsts)}",
        )


def _place(
    wishes: tuple[Wish, ...],
    free: dict[int, Device],
    taken: frozenset[int],
    hopeless: set[tuple[int, frozenset[int]]],
) -> list[list[Device]] | None:
    """Return the members of each group, or None where they do not all fit.

    `hopeless` collects what was tried in vain, so that no state is searched twice.
    """
    if not wishes:
        return []
    state = (len(wishes), taken)
    if state in hopeless or sum(wish.size for wish in wishes) > len(free) - len(taken):
        return None
    wish = wishes[0]
    for index in sorted(free) if wish.first is None else [wish.first]:
        members = range(index, index + wish.size)
        if index not in free or wish.size not in free[index].group_sizes:
            continue
        if any(member not in free or member in taken for member in members):
            continue
        rest = _place(wishes[1:], free, taken | set(members), hopeless)
        if rest is not None:
            return [[free[member] for member in members], *rest]
    hopeless.add(state)
    return None


def _layouts(entry: Entry, members: Sequence[Device]) -> list[DeviceLayout]:
    first = members[0]
    now = _configuration(first)
    other = next((device for device in members if _configuration(device) != now), None)
    if other is not None:
        raise ConfigError(
            f"{entry.at('groups')}: {first.id} and {other.id} count their cores under different "
            "configurations, and one process can have only one",
            cure="give them one configuration first",
        )
    group = tuple(device.id for device in members) if len(members) > 1 else ()
    return [
        DeviceLayout(
            device=device.id,
            partitions=(
                PartitionSpec(
                    device=device.id,
                    profile=core_profile(device.slices),
                    size=device.slices,
                    placement=Placement(start=0, size=device.slices),
                    group=group,
                ),
            ),
            source=entry.source,
        )
        for device in members
    ]


def _configuration(device: Device) -> tuple[int, str]:
    lnc = next((mode.current for mode in device.modes if mode.kind is ModeKind.LNC), "")
    return device.slices, lnc


def _no_room(entry: Entry, wishes: Sequence[Wish], free: dict[int, Device]) -> ConfigError:
    asked = ", ".join(
        str(wish.size) if wish.first is None else f"{wish.size}@{wish.first}" for wish in wishes
    )
    return ConfigError(
        f"{entry.at('groups')}: groups of {asked} devices do not fit on devices "
        f"{_listed(sorted(free)) or 'none'}",
        cure="ask for fewer or smaller groups, or free devices that other entries name",
    )


def _listed(numbers: Sequence[int]) -> str:
    """Return numbers for people, runs of them as first-last."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    words = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return ", ".join(words)
