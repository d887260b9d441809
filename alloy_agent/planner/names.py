"""Names of devices and pieces as people read and type them.

An id is long where its device is named by a UUID. What is shown to a person may be cut short as
long as it still names one device, and what a person types may be cut short as long as it names one
partition. Documents, the journal and evidence always hold the whole id.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from typing import Final, Protocol, TypeVar

from alloy_agent.errors import ConfigError
from alloy_agent.model import DeviceId, Partition, PartitionId, Scope

LONGEST: Final = 24  # ids up to this length are shown whole
SHORTEST: Final = 12  # "GPU-29f7be15"
SHOWN: Final = 4  # candidates in a refusal
GENERATION: Final = re.compile(r"(.+)#([0-9]{1,18})")
GROUP: Final = re.compile(r"(.+)\+([0-9]{0,5})")


def short_names(devices: Iterable[str]) -> dict[str, str]:
    """Return a short name for each long device id: its shortest part that no other id begins with.

    An id is cut before a dash only; one that cannot be cut is absent.
    """
    every = sorted(set(devices))
    short = {}
    for device in every:
        if len(device) <= LONGEST:
            continue
        others = [other for other in every if other != device]
        cuts = [at for at, c in enumerate(device) if c == "-" and at >= SHORTEST]
        unique = (c for c in cuts if not any(other.startswith(device[:c]) for other in others))
        cut = next(unique, None)
        if cut is not None:
            short[device] = device[:cut]
    return short


def shortened(text: str, names: dict[str, str]) -> str:
    """Return a text with every long device id in it replaced by its short name."""
    for device in sorted(names, key=len, reverse=True):
        text = text.replace(device, names[device])
    return text


class Named(Protocol):
    """What a name is looked for in: a partition, or its listing."""

    @property
    def id(self) -> PartitionId:
        """The whole id: its device's, a slash, the piece."""

    @property
    def uuid(self) -> str | None:
        """The vendor's own id."""

    @property
    def generation(self) -> int:
        """How often the place was made anew."""


class NamedDevice(Protocol):
    """What a device's name is looked for in: a device, or its listing."""

    @property
    def id(self) -> DeviceId:
        """The whole id."""

    @property
    def hive(self) -> str | None:
        """The devices that it is in one hive with."""


AnyNamed = TypeVar("AnyNamed", bound=Named)
AnyDevice = TypeVar("AnyDevice", bound=NamedDevice)


def find_device(name: str, devices: Sequence[AnyDevice]) -> AnyDevice:
    """Return the device that a person means: its id, or as much of its beginning as names one.

    Raises:
        ConfigError: It names none, or several.
    """
    found = [d for d in devices if d.id == name]
    found = found or [d for d in devices if name and d.id.startswith(name)]
    if len(found) > 1:
        raise _several("device", name, [d.id for d in found])
    if not found:
        ids = [str(d.id) for d in devices]
        close = difflib.get_close_matches(name, ids, n=3, cutoff=0.4)
        known = " or ".join(close) if close else ", ".join(ids[:8]) or "none"
        cure = f"did you mean {known}?" if close else f"devices here are {known}"
        raise ConfigError(f"device {name}: no such device", cure=cure)
    return found[0]


def find_subject(
    name: str, devices: Sequence[NamedDevice], partitions: Sequence[Named]
) -> tuple[Scope, str]:
    """Return what a person means by a name, and its whole id: a device, a partition or a hive.

    A whole name wins over a beginning, and a device over its own partitions; empty is the node.

    Raises:
        ConfigError: It names none, or several.
    """
    if not name:
        return Scope.NODE, ""
    hives = sorted({d.hive for d in devices if d.hive})
    if any(d.id == name for d in devices):
        return Scope.DEVICE, name
    if any(name in (p.id, p.uuid) for p in partitions):
        return Scope.PARTITION, str(find_partition(name, partitions).id)
    if name in hives:
        return Scope.HIVE, name
    begun = [str(d.id) for d in devices if d.id.startswith(name)]
    begun += [hive for hive in hives if hive.startswith(name)]
    if len(begun) > 1:
        raise _several("device", name, begun)
    if begun:
        return (Scope.HIVE if begun[0] in hives else Scope.DEVICE), begun[0]
    found = _matching(name, partitions)
    if not found:
        every = [str(d.id) for d in devices] + [str(p.id) for p in partitions]
        close = difflib.get_close_matches(name, every, n=3, cutoff=0.6)
        cure = f"did you mean {' or '.join(close)}?" if close else "see 'alloy-agent devices'"
        raise ConfigError(f"{name}: no device, partition or hive of that name", cure=cure)
    return Scope.PARTITION, str(find_partition(name, partitions).id)


def find_partition(name: str, partitions: Sequence[AnyNamed]) -> AnyNamed:
    """Return the partition that a person means.

    Args:
        name: An id or UUID, or as much of its beginning as names one partition; both parts of an
            id may be cut short (`GPU-29f7/1g`), a whole second part wins. With `#GENERATION`
            behind it, that generation only.
        partitions: Those that exist.

    Raises:
        ConfigError: It names none, several, or another generation.
    """
    exact = [p for p in partitions if name in (p.id, p.uuid)]
    wanted: int | None = None
    if not exact and (match := GENERATION.fullmatch(name)):
        name, wanted = match[1], int(match[2])
        exact = [p for p in partitions if name in (p.id, p.uuid)]
    found = exact or _matching(name, partitions)
    if len(found) > 1:
        raise _several("partition", name, [p.id for p in found])
    if not found:
        raise _none(name, partitions)
    if wanted not in (None, found[0].generation):
        raise ConfigError(
            f"partition {found[0].id}: is at generation {found[0].generation}, not {wanted}",
            cure="see 'alloy-agent devices'",
        )
    return found[0]


def find_group(name: str, partitions: Sequence[Partition]) -> tuple[Partition, ...]:
    """Return the partitions that a person means: one, or with `+` behind its name its whole group.

    A number behind the `+` says how many more there are, as the group's own name has it.

    Raises:
        ConfigError: As `find_partition`; or it is in no group, or not all of the group is there.
    """
    match = None if any(name in (p.id, p.uuid) for p in partitions) else GROUP.fullmatch(name)
    if match is None:
        return (find_partition(name, partitions),)
    one = find_partition(match[1], partitions)
    if not one.group:
        raise ConfigError(
            f"partition {one.id}: is in no group", cure="name it without '+', or lay out groups"
        )
    members = {p.device: p for p in partitions if p.group == one.group}
    missing = [device for device in one.group if device not in members]
    if missing or one.group_access is None:
        what = f"{', '.join(missing[:SHOWN])} is missing" if missing else "its members differ"
        raise ConfigError(
            f"partition {one.id}: its group of {len(one.group)} is not whole: {what}",
            cure="apply the layout again",
        )
    if match[2] and int(match[2]) != len(one.group) - 1:
        raise ConfigError(
            f"partition {name}: its group has {len(one.group) - 1} more, not {match[2]}",
            cure=f"name it {one.id}+",
        )
    return tuple(members[device] for device in one.group)


def _matching(name: str, partitions: Sequence[AnyNamed]) -> list[AnyNamed]:
    """Return the partitions whose names a text begins, the closest kind of match first."""
    if not name:
        return []
    begun = [p for p in partitions if _begins(p, name)]
    return begun or [p for p in partitions if _begins(p, name, cut=True)]


def _begins(partition: Named, name: str, *, cut: bool = False) -> bool:
    """Whether a name is the beginning of an id or UUID, or of both parts of an id.

    `cut`: the second part may be cut short too.
    """
    if partition.id.startswith(name) or (partition.uuid or "").startswith(name):
        return True
    device, slash, piece = name.rpartition("/")
    whole, _, own = partition.id.rpartition("/")
    if not (slash and device and whole.startswith(device)):
        return False
    return own.startswith(piece) if cut else own == piece


def _several(what: str, name: str, found: Iterable[str]) -> ConfigError:
    ids = sorted(map(str, found))
    more = f" and {len(ids) - SHOWN} more" if len(ids) > SHOWN else ""
    return ConfigError(
        f"{what} {name}: begins the names of {', '.join(ids[:SHOWN])}{more}",
        cure="write more of it",
    )


def _none(name: str, partitions: Sequence[Named]) -> ConfigError:
    ids = [str(p.id) for p in partitions]
    close = difflib.get_close_matches(name, ids, n=3, cutoff=0.4)
    cure = f"did you mean {' or '.join(close)}?" if close else "see 'alloy-agent devices'"
    return ConfigError(f"partition {name}: there is none of this id", cure=cure)
