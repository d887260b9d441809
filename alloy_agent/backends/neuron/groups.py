"""Groups of whole devices that one tenant was meant to get together, and the way into one. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from alloy_agent.backends.neuron.access import Run, access_of, group_tag
from alloy_agent.backends.neuron.board import Board
from alloy_agent.backends.neuron.options import NeuronOptions
from alloy_agent.backends.neuron.record import Contents, Grant
from alloy_agent.backends.neuron.topology import check_group
from alloy_agent.errors import UnsupportedError
from alloy_agent.model import Access, Device, DeviceId, PartitionSpec


def group_access(  # noqa: PLR0913 - what a way in is made of
    board: Board,
    device: Device,
    grant: Grant,
    contents: Contents,
    *,
    known: Mapping[DeviceId, int],
    options: NeuronOptions,
) -> Access | None:
    """Return the way into all devices of a grant's group; None: one is missing, or differs.

    Args:
        board: One member.
        device: The same, as described.
        grant: Its grant.
        contents: The whole record.
        known: Numbers of the devices.
        options: How cores and meeting points are counted.
    """
    numbers = []
    for member in grant.group:
        number = known.get(DeviceId(member))
        if number is None or not any(_alike(grant, other) for other in contents.of(member).grants):
            return None
        numbers.append(number)
    if not numbers:
        return None
    cores = device.slices
    runs = [Run(number=n, start=0, size=cores, lnc=grant.lnc, device_cores=cores) for n in numbers]
    return access_of(
        runs,
        group_tag(f"{grant.group[0]}/{grant.profile}@{grant.start}", len(runs)),
        has_lnc=len(board.lnc_choices) > 1,
        ports_from=options.ports_from,
        counted_from=numbers[0] if options.core_numbers == "container" else 0,
    )


def _alike(one: Grant, other: Grant) -> bool:
    """Whether two grants are members of one group, under one configuration."""
    return all(
        getattr(one, name) == getattr(other, name) for name in ("group", "lnc", "start", "size")
    )


def refuse_group(
    board: Board, device: Device, spec: PartitionSpec, known: Mapping[DeviceId, int]
) -> None:
    """Raise if a piece's group cannot work, or the piece is not the whole of its device.

    Raises:
        PlanImpossibleError: Collectives do not work on these devices.
        UnsupportedError: The piece cannot be a member.
    """
    if not spec.group:
        return
    numbers = [known[member] for member in spec.group if member in known]
    if board.instance is None or len(numbers) < len(spec.group):
        raise UnsupportedError(
            f"{board.id}: how its group of {len(spec.group)} is linked is not known",
            cure="lend the devices one by one: use cores",
        )
    check_group(board.instance, numbers)
    if spec.size != device.slices or board.number not in numbers:
        raise UnsupportedError(
            f"{board.id}: {spec.profile} in a group", cure="a group takes whole devices"
        )
