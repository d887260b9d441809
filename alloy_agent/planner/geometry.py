"""What a device shall look like in the end, and what is still different, in words."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from alloy_agent.model import (
    Device,
    DeviceId,
    DeviceLayout,
    Layout,
    ModeKind,
    Partition,
    PartitionSpec,
    Placement,
    Scheme,
    Share,
    Snapshot,
    Vendor,
)
from alloy_agent.planner.steps import format_bytes

# Kernels round a cap to whole pages; 64 KiB are the largest base pages in use.
MEMORY_TOLERANCE_BYTES: Final = 65536
NOWHERE: Final = Placement(start=0, size=1)


def expected(layout: Layout, snapshot: Snapshot) -> tuple[DeviceLayout, ...]:
    """Return what each named device shall show once the layout holds, to compare a read-back.

    Where a mode cuts the device by itself, the pieces that it makes are filled in from the device's
    own profile of the mode's name. `partitions` stays None where nothing is asked for.
    """
    devices = {device.id: device for device in snapshot.devices}
    return tuple(_with_mode_pieces(wanted, devices.get(wanted.device)) for wanted in layout.devices)


def _with_mode_pieces(wanted: DeviceLayout, device: Device | None) -> DeviceLayout:
    mode = wanted.modes.get(ModeKind.COMPUTE)
    if device is None or device.scheme is not Scheme.MODES or mode is None:
        return wanted
    if wanted.partitions:
        return wanted
    profile = next((p for p in device.profiles if p.name == mode), None)
    if profile is None:
        return wanted
    pieces = tuple(
        PartitionSpec(
            device=device.id,
            profile=profile.name,
            size=profile.size,
            placement=Placement(start=start, size=profile.size),
        )
        for start in profile.starts
    )
    return DeviceLayout(
        device=wanted.device, modes=wanted.modes, partitions=pieces, source=wanted.source
    )


def difference(layout: Layout, snapshot: Snapshot) -> tuple[str, ...]:
    """Return, in words, everything in which the node still differs from the layout."""
    devices = {device.id: device for device in snapshot.devices}
    lines: list[str] = []
    for wanted in expected(layout, snapshot):
        device = devices.get(wanted.device)
        if device is None:
            lines.append(f"{wanted.device}: not there")
            continue
        lines += _mode_differences(wanted, device)
        if wanted.partitions is not None:
            here = pieces_of(snapshot, device.id)
            by_mode = any(spec.share is Share.EXCLUSIVE for spec in wanted.partitions)
            if device.scheme is not Scheme.MODES or not by_mode:
                here = [piece for piece in here if not made_by_mode(piece, device)]
            lines += _piece_differences(wanted.partitions, here, device)
    return tuple(lines)


def _mode_differences(wanted: DeviceLayout, device: Device) -> list[str]:
    lines = []
    modes = {mode.kind: mode for mode in device.modes}
    for kind, value in wanted.modes.items():
        mode = modes.get(kind)
        now = mode.current if mode is not None else "absent"
        if now == value:
            continue
        pending = f", {mode.pending} is pending" if mode is not None and mode.pending else ""
        lines.append(f"{device.id}: {kind} is {now}{pending}, wanted {value}")
    return lines


def _piece_differences(
    wanted: tuple[PartitionSpec, ...], here: list[Partition], device: Device
) -> list[str]:
    lines = []
    left = list(here)
    # Those with a place first, so that a free one does not take theirs; then those with equal
    # memory.
    for spec in sorted(wanted, key=lambda s: (s.placement is None, s.placement or NOWHERE)):
        match = _find(spec, left, device)
        if match is None:
            lines.append(f"{device.id}: {_spec_text(spec)} is missing")
            continue
        left.remove(match)
        if match.altered:
            lines.append(f"{match.id}: {match.altered}")
        if not same_memory(match, spec.memory_bytes, device):
            now = "none" if match.memory_bytes is None else format_bytes(match.memory_bytes)
            cap = "none" if spec.memory_bytes is None else format_bytes(spec.memory_bytes)
            lines.append(f"{match.id}: memory cap is {now}, wanted {cap}")
    lines += [f"{piece.id}: is there, not wanted" for piece in left]
    return lines


def _find(spec: PartitionSpec, left: Iterable[Partition], device: Device) -> Partition | None:
    fitting = [
        piece
        for piece in left
        if same_shape(piece, spec, device) and spec.placement in (None, piece.placement)
    ]
    exact = [piece for piece in fitting if same_memory(piece, spec.memory_bytes, device)]
    return next(iter(exact or fitting), None)


def _spec_text(spec: PartitionSpec) -> str:
    place = f"@{spec.placement.start}" if spec.placement is not None else ""
    cap = f" with {format_bytes(spec.memory_bytes)}" if spec.memory_bytes is not None else ""
    group = f" in a group of {len(spec.group)}" if spec.group else ""
    return f"{spec.profile}{place}{cap}{group}"


def same_shape(piece: Partition, spec: PartitionSpec, device: Device) -> bool:
    """Return whether a living piece is of the wanted shape, wherever it sits.

    Runs of cores are of one shape when they are as long; everything else is told apart by the
    driver's own name.
    """
    if piece.share is not spec.share:
        return False
    if spec.share is not Share.EXCLUSIVE:
        return piece.ordinal == spec.ordinal
    if piece.placement.size != spec.size or piece.group != spec.group:
        return False
    return device.scheme is Scheme.CORES or piece.profile == spec.profile


def same_memory(piece: Partition, memory_bytes: int | None, device: Device) -> bool:
    """Return whether a piece has the wanted memory cap, as far as this device can cap any."""
    if not can_configure(device):
        return True
    if memory_bytes is None:
        unlimited = device.memory_bytes or 0
        return piece.memory_bytes is None or 0 < unlimited <= piece.memory_bytes
    if piece.memory_bytes is None:
        return False
    return abs(piece.memory_bytes - memory_bytes) < MEMORY_TOLERANCE_BYTES


def can_configure(device: Device) -> bool:
    """Return whether the device's pieces have a memory cap that can change while they live."""
    return device.scheme is Scheme.CORES and device.vendor is Vendor.CPU


def made_by_mode(piece: Partition, device: Device) -> bool:
    """Return whether a piece exists by a mode of its device: no step makes or removes it."""
    if piece.share is not Share.EXCLUSIVE:
        return False
    if device.scheme is Scheme.INSTANCES:
        return any(m.kind is ModeKind.MIG and m.current == "off" for m in device.modes)
    return device.scheme in (Scheme.MODES, Scheme.WHOLE)


def pieces_of(snapshot: Snapshot, device: DeviceId) -> list[Partition]:
    """Return the device's pieces, from left to right."""
    here = [piece for piece in snapshot.partitions if piece.device == device]
    return sorted(here, key=lambda piece: (piece.placement, piece.id))
