"""The pieces of one device: which stay, which go, which come, and where."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from msgspec.structs import replace

from alloy_agent.errors import PlanImpossibleError
from alloy_agent.model import (
    Configure,
    Create,
    Destroy,
    Device,
    DeviceLayout,
    Partition,
    PartitionId,
    PartitionSpec,
    Placement,
    Profile,
    Scheme,
    Share,
)
from alloy_agent.planner.geometry import can_configure, same_memory, same_shape
from alloy_agent.planner.packing import Have, Kind, Packing, Room, pack


class PieceChange(NamedTuple):
    """What happens to the pieces of one device, each part in the order in which it is done."""

    kept: tuple[PartitionId, ...]
    destroys: tuple[Destroy, ...]
    configures: tuple[Configure, ...]
    creates: tuple[Create, ...]
    proven: bool = True


def change_pieces(
    wanted: DeviceLayout,
    device: Device,
    here: list[Partition],
    leased: frozenset[PartitionId],
) -> PieceChange:
    """Return the least disruptive change from the pieces that are here to the wanted ones.

    Raises:
        PlanImpossibleError: They do not fit, or not beside the leased ones.
    """
    specs = wanted.partitions or ()
    shared = [spec for spec in specs if spec.share is not Share.EXCLUSIVE]
    alone = [spec for spec in specs if spec.share is Share.EXCLUSIVE]
    _refuse_mixture(wanted, shared, alone)
    groups = _group(alone, device)
    kinds = tuple(kind_of(group, device, wanted) for group in groups)
    haves = tuple(_have(piece, groups, device, leased) for piece in here)
    for have, piece in zip(haves, here, strict=True):
        if have.pinned and not have.kinds and not _keeps_share(piece, shared):
            raise _leased_unwanted(wanted, piece)
    packing = _pack(wanted, device, (groups, kinds), haves, here)
    change = _change(device, groups, packing, here)
    return _with_shares(change, device, shared, here)


def fits(device: Device, specs: tuple[PartitionSpec, ...]) -> bool:
    """Return whether the device, empty, can hold all these exclusive pieces at once."""
    groups = _group(list(specs), device)
    kinds = tuple(kind_of(group, device, None) for group in groups)
    return pack(device.slices, kinds, ()) is not None


def profile_of(device: Device, spec: PartitionSpec) -> Profile | None:
    """Return the device's own profile for a spec; runs of cores are told apart by their length."""
    by_size = device.scheme is Scheme.CORES
    for profile in device.profiles:
        if profile.size == spec.size if by_size else profile.name == spec.profile:
            return profile
    return None


def kind_of(group: list[PartitionSpec], device: Device, wanted: DeviceLayout | None) -> Kind:
    """Return a group of like specs as one kind for the search.

    Raises:
        PlanImpossibleError: The device has no such profile, or not so many of it.
    """
    spec = group[0]
    where = f"{wanted.source}: " if wanted is not None and wanted.source else ""
    profile = profile_of(device, spec)
    if profile is None and device.scheme is not Scheme.CORES:
        known = ", ".join(p.name for p in device.profiles) or "none"
        raise PlanImpossibleError(
            f"{where}{device.id} ({device.model}) has no profile {spec.profile}",
            cure=f"its profiles are {known}",
        )
    if device.legal_sizes and spec.size not in device.legal_sizes and device.scheme is Scheme.CORES:
        raise PlanImpossibleError(
            f"{where}{device.id} ({device.model}) has no runs of {spec.size} {device.slice_name}s",
            cure=f"legal are {', '.join(map(str, device.legal_sizes))}",
        )
    starts = frozenset(profile.starts) if profile is not None and profile.starts else None
    if spec.placement is not None:
        pinned = frozenset({spec.placement.start})
        starts = pinned if starts is None else starts & pinned
    memory = spec.memory_bytes if can_configure(device) else None
    size = profile.size if profile is not None else spec.size
    return Kind(size, len(group), starts, memory)


def _group(specs: list[PartitionSpec], device: Device) -> list[list[PartitionSpec]]:
    """Return specs that are alike in everything that matters, together."""
    by_cap = can_configure(device)
    groups: dict[tuple[object, ...], list[PartitionSpec]] = {}
    for spec in specs:
        place = spec.placement.start if spec.placement is not None else -1
        shape = spec.size if device.scheme is Scheme.CORES else spec.profile
        cap = spec.memory_bytes if by_cap else 0
        groups.setdefault((shape, cap, place, spec.group), []).append(spec)
    return list(groups.values())


def _have(
    piece: Partition,
    groups: list[list[PartitionSpec]],
    device: Device,
    leased: frozenset[PartitionId],
) -> Have:
    fitting = tuple(
        number
        for number, group in enumerate(groups)
        if same_shape(piece, group[0], device) and group[0].placement in (None, piece.placement)
    )
    memory = None
    if can_configure(device):
        # A cap that the kernel rounded to pages is the cap that was asked for.
        equal = (g[0] for g in groups if same_memory(piece, g[0].memory_bytes, device))
        found = next(equal, None)
        memory = found.memory_bytes if found is not None else piece.memory_bytes
    place = piece.placement
    return Have(place.start, place.size, fitting, piece.id in leased, memory)


def _pack(
    wanted: DeviceLayout,
    device: Device,
    shapes: tuple[list[list[PartitionSpec]], tuple[Kind, ...]],
    haves: tuple[Have, ...],
    here: list[Partition],
) -> Packing:
    groups, kinds = shapes
    _refuse_too_many(wanted, device, groups)
    exclusive = tuple(
        have for have, piece in zip(haves, here, strict=True) if piece.share is Share.EXCLUSIVE
    )
    packing = pack(device.slices, kinds, exclusive, room_of(device))
    if packing is not None:
        return packing
    where = f"{wanted.source}: " if wanted.source else ""
    names = ", ".join(_label(group[0], len(group)) for group in groups)
    held = [p for h, p in zip(haves, here, strict=True) if h.pinned]
    free = tuple(have._replace(pinned=False) for have in exclusive)
    if held and pack(device.slices, kinds, free) is not None:
        pieces = ", ".join(_piece(piece) for piece in held)
        raise PlanImpossibleError(
            f"{where}{names} on {device.id} do not fit beside {pieces}, held by a lease",
            cure="release the lease first, or ask for less",
        )
    raise PlanImpossibleError(
        f"{where}{names} do not fit together on {device.id} "
        f"({device.model}, {device.slices} {device.slice_name}s)",
        cure="ask for fewer or smaller pieces, or unpin their places",
    )


def room_of(device: Device) -> Callable[[int], Room] | None:
    """Return what counts the places that each profile still has, the largest profile first.

    None for rows of cores, where the fewest gaps are the most room.
    """
    if device.scheme is Scheme.CORES:
        return None
    profiles = sorted(device.profiles, key=lambda p: (-p.size, -(p.compute_units or 0)))
    masks = [[((1 << p.size) - 1) << start for start in p.starts] for p in profiles]
    known: dict[int, Room] = {}

    def room(occupied: int) -> Room:
        value = known.get(occupied)
        if value is None:
            value = tuple(sum(not occupied & mask for mask in places) for places in masks)
            known[occupied] = value
        return value

    return room


def _change(
    device: Device, groups: list[list[PartitionSpec]], packing: Packing, here: list[Partition]
) -> PieceChange:
    exclusive = [piece for piece in here if piece.share is Share.EXCLUSIVE]
    kept: dict[PartitionId, PartitionSpec] = {}
    creates = []
    for put in packing.puts:
        spec = groups[put.kind][0]
        if put.have is not None:
            kept[exclusive[put.have].id] = spec
        else:
            place = Placement(start=put.start, size=_size(spec, device))
            creates.append(
                Create(device=device.id, spec=replace(spec, placement=place, size=place.size))
            )
    destroys = [Destroy(device=device.id, partition=p) for p in exclusive if p.id not in kept]
    configures = [
        Configure(device=device.id, partition=piece, memory_bytes=kept[piece.id].memory_bytes)
        for piece in exclusive
        if piece.id in kept
        and (piece.altered or not same_memory(piece, kept[piece.id].memory_bytes, device))
    ]
    # Caps that shrink come first, so that their sum never passes what it was or shall be.
    configures.sort(key=lambda step: (_grows(step), step.partition.placement.start))
    return PieceChange(
        tuple(kept), tuple(destroys), tuple(configures), tuple(creates), packing.proven
    )


def _grows(step: Configure) -> bool:
    before, after = step.partition.memory_bytes, step.memory_bytes
    return after is None or (before is not None and after > before)


def _with_shares(
    change: PieceChange, device: Device, shared: list[PartitionSpec], here: list[Partition]
) -> PieceChange:
    """Return the change with the shares of the whole device, which lie over each other."""
    pieces = [piece for piece in here if piece.share is not Share.EXCLUSIVE]
    stays = {piece.id: spec for piece in pieces if (spec := _kept_as(piece, shared)) is not None}
    kept = list(stays)
    repairs = [
        Configure(device=device.id, partition=piece, memory_bytes=stays[piece.id].memory_bytes)
        for piece in pieces
        if piece.id in stays
        and (piece.altered or not same_memory(piece, stays[piece.id].memory_bytes, device))
    ]
    repairs.sort(key=_grows)
    gone = [Destroy(device=device.id, partition=p) for p in pieces if p.id not in stays]
    present = {(piece.share, piece.ordinal) for piece in pieces if piece.id in stays}
    whole = Placement(start=0, size=device.slices)
    creates = [
        Create(device=device.id, spec=replace(spec, placement=whole, size=whole.size))
        for spec in shared
        if (spec.share, spec.ordinal) not in present
    ]
    return PieceChange(
        (*change.kept, *kept),
        (*gone, *change.destroys),
        (*repairs, *change.configures),
        (*change.creates, *creates),
        change.proven,
    )


def _keeps_share(piece: Partition, shared: list[PartitionSpec]) -> bool:
    return _kept_as(piece, shared) is not None


def _kept_as(piece: Partition, shared: list[PartitionSpec]) -> PartitionSpec | None:
    """Return what a living share is kept as; a CU mask is handed out once, so it must be the same.

    Whoever runs in the share took its mask at the start: another mask is another share.
    """
    same = (
        spec
        for spec in shared
        if (piece.share, piece.ordinal, piece.cu_mask) == (spec.share, spec.ordinal, spec.cu_mask)
    )
    return next(same, None)


def _size(spec: PartitionSpec, device: Device) -> int:
    profile = profile_of(device, spec)
    return profile.size if profile is not None else spec.size


def _refuse_mixture(
    wanted: DeviceLayout, shared: list[PartitionSpec], alone: list[PartitionSpec]
) -> None:
    if shared and alone:
        where = f"{wanted.source}: " if wanted.source else ""
        raise PlanImpossibleError(
            f"{where}{wanted.device} cannot hold {alone[0].profile} and be shared as a whole",
            cure="keep one of the two",
        )


def _refuse_too_many(
    wanted: DeviceLayout, device: Device, groups: list[list[PartitionSpec]]
) -> None:
    where = f"{wanted.source}: " if wanted.source else ""
    counts: dict[str, int] = {}
    for group in groups:
        profile = profile_of(device, group[0])
        if profile is None:
            continue
        counts[profile.name] = counts.get(profile.name, 0) + len(group)
        if counts[profile.name] > profile.max_count:
            raise PlanImpossibleError(
                f"{where}{counts[profile.name]} x {profile.name} on {device.id} ({device.model}), "
                f"which has at most {profile.max_count}",
                cure=f"ask for {profile.max_count} or fewer",
            )


def _leased_unwanted(wanted: DeviceLayout, piece: Partition) -> PlanImpossibleError:
    where = f"{wanted.source}: " if wanted.source else ""
    return PlanImpossibleError(
        f"{where}the layout has no place for {_piece(piece)} on {piece.device}, held by a lease",
        cure="release the lease first, or keep this piece in the layout",
    )


def _piece(piece: Partition) -> str:
    tenant = f" of tenant {piece.tenant}" if piece.tenant else ""
    return f"{piece.profile}@{piece.placement.start}{tenant}"


def _label(spec: PartitionSpec, count: int) -> str:
    place = f"@{spec.placement.start}" if spec.placement is not None else ""
    return f"{count} x {spec.profile}{place}" if count > 1 else f"{spec.profile}{place}"
