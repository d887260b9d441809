"""Switches of a device: which change, in which order, and how far each change reaches."""

from __future__ import annotations

from typing import Final, NamedTuple

from alloy_agent.errors import PlanImpossibleError
from alloy_agent.model import (
    Device,
    DeviceId,
    DeviceLayout,
    Interrupt,
    Mode,
    ModeChange,
    ModeKind,
    Scope,
    SetMode,
    Snapshot,
)

# Which memory modes each compute mode works in; CPX in NPS2 as a virtual function only.
# Source: Linux `drivers/gpu/drm/amd/amdgpu/aqua_vanjaram.c`.
COMPATIBLE_MEMORY: Final[dict[str, tuple[str, ...]]] = {
    "SPX": ("NPS1",),
    "DPX": ("NPS1", "NPS2"),
    "TPX": ("NPS1", "NPS4"),
    "QPX": ("NPS1", "NPS4"),
    "CPX": ("NPS1", "NPS2", "NPS4"),
}


class ModeStep(NamedTuple):
    """One switch with its reach: `victims` lose their pieces, `group` is switched with it."""

    step: SetMode
    group: tuple[DeviceId, ...]
    victims: tuple[DeviceId, ...]
    interrupts: tuple[Interrupt, ...]
    notes: tuple[str, ...]


def compatible(compute: str, memory: str) -> bool:
    """Return whether a compute mode works in a memory mode; the driver judges unknown ones."""
    return memory in COMPATIBLE_MEMORY.get(compute, (memory,))


def mode_of(device: Device, kind: ModeKind) -> Mode | None:
    """Return one switch of a device, or None when it has no such switch."""
    return next((mode for mode in device.modes if mode.kind is kind), None)


def mode_steps(wanted: DeviceLayout, device: Device, snapshot: Snapshot) -> list[ModeStep]:
    """Return the switches that differ, in an order whose every state is legal.

    Raises:
        PlanImpossibleError: The device has no such switch or position.
    """
    changes = [
        (kind, mode, value)
        for kind, value in wanted.modes.items()
        if (mode := _checked(wanted, device, kind, value)).current != value
    ]
    changes.sort(key=lambda change: _ORDER[change[0]])
    if _compute_first(device, wanted):
        changes.reverse()
    return [_step(device, kind, mode, value, snapshot) for kind, mode, value in changes]


_ORDER: Final = {ModeKind.MIG: 0, ModeKind.MEMORY: 1, ModeKind.COMPUTE: 2, ModeKind.LNC: 3}


def _compute_first(device: Device, wanted: DeviceLayout) -> bool:
    """Whether only the new compute mode works in both the old and the new memory mode."""
    compute, memory = mode_of(device, ModeKind.COMPUTE), mode_of(device, ModeKind.MEMORY)
    if compute is None or memory is None:
        return False
    new_compute = wanted.modes.get(ModeKind.COMPUTE, compute.current)
    new_memory = wanted.modes.get(ModeKind.MEMORY, memory.current)
    old_works = compatible(compute.current, new_memory)
    return not old_works and compatible(new_compute, memory.current)


def _checked(wanted: DeviceLayout, device: Device, kind: ModeKind, value: str) -> Mode:
    where = f"{wanted.source}: " if wanted.source else ""
    mode = mode_of(device, kind)
    if mode is None:
        raise PlanImpossibleError(
            f"{where}{device.id} ({device.model}) has no {kind} mode",
            cure="remove it from the layout",
        )
    if mode.available and value not in mode.available:
        raise PlanImpossibleError(
            f"{where}{device.id} ({device.model}) has no {kind} mode {value}",
            cure=f"use one of {', '.join(mode.available)}",
        )
    return mode


def _step(device: Device, kind: ModeKind, mode: Mode, value: str, snapshot: Snapshot) -> ModeStep:
    group = _reach(device, mode.scope, snapshot)
    reload_ = mode.change is ModeChange.DRIVER_RELOAD
    victims = _reach(device, Scope.NODE, snapshot) if reload_ else group
    step = SetMode(device=device.id, kind=kind, current=mode.current, wanted=value)
    notes = []
    if mode.pending is not None and mode.pending != mode.current:
        notes.append(
            f"{device.id}: {kind} {mode.pending} was asked for before and is still pending"
        )
    if mode.change is ModeChange.PROCESS_START:
        notes.append(f"{device.id}: {kind} {value} holds for processes that start after the change")
        return ModeStep(step, group, (), (), tuple(notes))
    if reload_:
        notes.append(
            f"{device.id}: {kind} {value} holds only after the driver is loaded again, "
            f"which takes away {', '.join(victims)} for that time and may change other modes"
        )
    elif mode.change is ModeChange.DEVICE_RESET:
        notes.append(f"{device.id}: {kind} {value} needs a reset; no process may use the device")
    return ModeStep(
        step,
        group,
        victims,
        _interrupts(device, kind, mode, value, victims),
        tuple(notes),
    )


def _interrupts(
    device: Device, kind: ModeKind, mode: Mode, value: str, victims: tuple[DeviceId, ...]
) -> tuple[Interrupt, ...]:
    why = f"{kind} {mode.current} to {value}"
    wide = []
    if mode.scope is Scope.HIVE:
        subject = device.hive or device.id
        wide.append(Interrupt(scope=Scope.HIVE, subject=subject, why=why))
    if mode.scope is Scope.NODE or mode.change is ModeChange.DRIVER_RELOAD:
        reason = f"{why} reloads the driver of {device.vendor}"
        if mode.change is not ModeChange.DRIVER_RELOAD:
            reason = why
        wide.append(Interrupt(scope=Scope.NODE, subject="node", why=reason))
    devices = [Interrupt(scope=Scope.DEVICE, subject=victim, why=why) for victim in victims]
    return (*wide, *devices)


def _reach(device: Device, scope: Scope, snapshot: Snapshot) -> tuple[DeviceId, ...]:
    if scope is Scope.NODE:
        near = [d for d in snapshot.devices if d.backend == device.backend]
        return tuple(d.id for d in near if d.vendor is device.vendor)
    if scope is Scope.HIVE and device.hive is not None:
        near = [d for d in snapshot.devices if d.hive == device.hive]
        return tuple(d.id for d in near if d.vendor is device.vendor)
    return (device.id,)
