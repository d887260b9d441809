"""Changes of a GPU: the MIG mode, instances made and removed, each read back.

Rules that stay true in here:

* The activation status of a mode change counts, not that the call succeeded; a change that is only
  pending is a failure that says what it waits for, and is not repeated.
* An instance is always made at an explicit place; when its compute instance cannot be made, the
  GPU instance goes at once.
* Before anything is destroyed its UUID is compared, since ids are re-used.
"""

from __future__ import annotations

import contextlib
import ctypes
import time
from pathlib import Path
from typing import Any, Final

from alloy_agent.backends.nvidia.gpu import Gpu
from alloy_agent.backends.nvidia.instances import ComputePiece, Piece, Shape
from alloy_agent.backends.nvidia.library import (
    GONE,
    IN_USE,
    INSUFFICIENT_RESOURCES,
    RESET_REQUIRED,
    NvmlCallError,
)
from alloy_agent.errors import BackendError, DeviceBusyError, UnsupportedError
from alloy_agent.model import Create, ModeKind, Partition, SetMode

DESTROY_WAIT_S: Final = 2.0  # a compute instance's resources return a moment after it
DESTROY_POLL_S: Final = 0.05


def set_mode(gpu: Gpu, step: SetMode, proc: Path) -> None:
    """Switch MIG on or off, or say what the change waits for."""
    if step.kind is not ModeKind.MIG or step.wanted not in {"on", "off"}:
        raise UnsupportedError(
            f"{gpu.id}: no mode {step.kind} {step.wanted}", cure="set mig on or off"
        )
    wanted = step.wanted == "on"
    mode = gpu.mig()
    if mode is None or not gpu.identity().mig_capable:
        raise UnsupportedError(f"{gpu.id}: {gpu.identity().name} has no MIG")
    if mode == (wanted, wanted):
        return
    if not wanted and mode[0] and gpu.pieces():
        raise DeviceBusyError(
            f"{gpu.id}: in use (19): MIG is on, instances are alive",
            cure="destroy its instances first",
        )
    status = int(gpu.call("nvmlDeviceSetMigMode", int(wanted)))
    gpu.forget_handle()  # the GPU may have been reset: resolve it again, by UUID
    after = gpu.mig() or (False, False)
    if status == 0 and after[0] == wanted:
        return
    raise _pending(gpu, status, after, proc)


def _pending(gpu: Gpu, status: int, mode: tuple[bool, bool], proc: Path) -> BackendError:
    state = f"MIG is {_word(mode[0])}, {_word(mode[1])} is pending"
    if status == IN_USE:
        holders = holders_of(gpu, proc)
        cure = f"end the holders: {holders}" if holders else "end what holds the GPU"
        return DeviceBusyError(f"{gpu.id}: in use (19): {state}", cure=cure)
    if status == RESET_REQUIRED:
        return BackendError(
            f"{gpu.id}: reset required (16): {state}",
            cure="reset the GPU; in a guest, restart the machine",
        )
    if status == 0:
        return BackendError(
            f"{gpu.id}: reset required: the driver said done, {state}",
            cure="reset the GPU; in a guest, restart the machine",
        )
    return BackendError(f"{gpu.id}: activation status {status}: {state}")


def create(gpu: Gpu, step: Create) -> Piece:
    """Make a GPU instance at its place, with one compute instance over all of it; return it."""
    spec = step.spec
    shape = next((s for s in gpu.identity().shapes if s.profile.name == spec.profile), None)
    if shape is None or spec.placement is None:
        known = ", ".join(s.profile.name for s in gpu.identity().shapes)
        raise BackendError(
            f"{gpu.id}: no profile {spec.profile}",
            cure=f"choose one of {known}" if known else "this GPU cannot be partitioned",
        )
    start = spec.placement.start
    mode = gpu.mig()
    if mode is None or not mode[0]:
        raise UnsupportedError(f"{gpu.id}: MIG is off", cure="set mig on first")
    found = piece_at(gpu, shape.profile.name, start)
    if found is not None and found.compute:
        raise BackendError(
            f"{gpu.id}: {shape.profile.name}@{start} exists already", cure="plan again"
        )
    instance = found.handle if found is not None else _make(gpu, shape, start)
    try:
        _make_compute(gpu, instance, shape)
    except NvmlCallError:
        with contextlib.suppress(NvmlCallError):
            gpu.nvml.call("nvmlGpuInstanceDestroy", instance)
        raise
    made = piece_at(gpu, shape.profile.name, start)
    if made is None or not made.compute:
        raise BackendError(
            f"{gpu.id}: the driver made {shape.profile.name}@{start}, but does not show it"
        )
    return made


def _make(gpu: Gpu, shape: Shape, start: int) -> Any:
    place = gpu.nvml.module.c_nvmlGpuInstancePlacement_t(start=start, size=shape.profile.size)
    try:
        return gpu.call(
            "nvmlDeviceCreateGpuInstanceWithPlacement", shape.ident, ctypes.byref(place)
        )
    except NvmlCallError as failure:
        if failure.code != INSUFFICIENT_RESOURCES:
            raise
        taken = ", ".join(
            f"{piece.shape.profile.name}@{piece.placement.start}" for piece in gpu.pieces()
        )
        raise BackendError(
            f"{gpu.id}: {failure}: no room for {shape.profile.name} at {start}",
            cure=f"taken by {taken or 'others'}; plan again",
        ) from failure


def _make_compute(gpu: Gpu, instance: Any, shape: Shape) -> None:
    for ident, slices, _ in gpu.compute_profiles(instance, shape):
        if slices == shape.compute_slices:
            gpu.nvml.call("nvmlGpuInstanceCreateComputeInstance", instance, ident)
            return
    raise BackendError(
        f"{gpu.id}: {shape.profile.name} has no compute profile of {shape.compute_slices} slices"
    )


def destroy(gpu: Gpu, partition: Partition) -> None:
    """Remove an instance, compute instances first, if it is still the one that is meant."""
    if partition.profile == "whole":
        raise UnsupportedError(f"{gpu.id}: a whole GPU cannot be removed", cure="set mig on")
    piece = piece_at(gpu, partition.profile, partition.placement.start)
    if piece is None:
        return
    # Half made it has no identity; whole it must be the one that is meant, ids being re-used.
    if piece.compute and partition.incarnation not in {"", piece.incarnation}:
        raise BackendError(
            f"{partition.id}: GPU instance {piece.ident} has been made anew by somebody else",
            cure="look at the devices and plan again",
        )
    for compute in piece.compute:
        _destroy_compute(gpu, partition, piece, compute)
    _destroy_instance(gpu, partition, piece)


def _destroy_compute(gpu: Gpu, partition: Partition, piece: Piece, compute: ComputePiece) -> None:
    try:
        gpu.nvml.call("nvmlComputeInstanceDestroy", compute.handle)
    except NvmlCallError as failure:
        if failure.code in GONE:
            return
        if failure.code == IN_USE:
            raise _busy(gpu, partition, piece, failure) from failure
        raise


def _destroy_instance(gpu: Gpu, partition: Partition, piece: Piece) -> None:
    deadline = time.monotonic() + DESTROY_WAIT_S
    while True:
        try:
            gpu.nvml.call("nvmlGpuInstanceDestroy", piece.handle)
        except NvmlCallError as failure:
            if failure.code in GONE:
                return
            if failure.code != IN_USE:
                raise
            if time.monotonic() >= deadline or _inside(gpu, piece):
                raise _busy(gpu, partition, piece, failure) from failure
            time.sleep(DESTROY_POLL_S)
        else:
            return


def _inside(gpu: Gpu, piece: Piece) -> list[int]:
    return [pid for pid, instance, _ in gpu.processes() if instance == piece.ident]


def _busy(gpu: Gpu, partition: Partition, piece: Piece, failure: NvmlCallError) -> DeviceBusyError:
    pids = _inside(gpu, piece)
    holders = ", ".join(f"pid {pid}" for pid in pids)
    return DeviceBusyError(
        f"{partition.id}: {failure}",
        cure=f"end the holders: {holders}" if holders else "end what holds a handle on it",
    )


def piece_at(gpu: Gpu, profile: str, start: int) -> Piece | None:
    """Return the GPU instance of a profile at a place, whole or half made."""
    for piece in gpu.pieces():
        if (piece.shape.profile.name, piece.placement.start) == (profile, start):
            return piece
    return None


def holders_of(gpu: Gpu, proc: Path) -> str:
    """Return who holds the GPU: processes that the driver lists, and those with its node open."""
    found = {pid: "" for pid, _, _ in gpu.processes()}
    minor = gpu.identity().minor
    if minor is not None:
        from alloy_agent.backends.nvidia.processes import openers

        found |= openers(proc, f"/dev/nvidia{minor}")
    return ", ".join(f"pid {pid} {found[pid]}".rstrip() for pid in sorted(found))


def _word(on: bool) -> str:
    return "on" if on else "off"
