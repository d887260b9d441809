"""What a GPU can be cut into and what it is cut into now, as the driver tells it.

A profile has two numbers: an enum to query it by, and an id that all later calls take. Placements
count memory slices. Compute instances are looked up per profile of their GPU instance, so that GPU
instances without any are seen too. MIG device handles are used within one reading and never kept
here, since a handle of a destroyed instance may come to name another one.
"""

from __future__ import annotations

import ctypes
from typing import Any, Final, NamedTuple

from alloy_agent.backends.nvidia.library import (
    ABSENT,
    FUNCTION_NOT_FOUND,
    GONE,
    INVALID_ARGUMENT,
    NOT_SUPPORTED,
    Nvml,
    NvmlCallError,
)
from alloy_agent.model import Placement, Profile

MIB: Final = 1 << 20
ENUMS_MAX: Final = 64  # nvml.h ends at 0x11; the list is open, and ends with INVALID_ARGUMENT
COMPUTE_ENUMS_MAX: Final = 32
_SPARE_SLOTS: Final = 8
# Fall-back names only: the driver's suffix of a revision. Source: nvml.h, profile enums.
_SUFFIXES: Final = {0x7: "+me", 0x8: "+me", 0xA: "+gfx", 0xB: "+gfx", 0xC: "+gfx", 0x11: "+gfx"}
_SUFFIXES_ME: Final = {0xD: "-me", 0xE: "-me", 0xF: "+me.all", 0x10: "+me.all"}


class Shape(NamedTuple):
    """One GPU instance profile."""

    profile: Profile
    ident: int
    compute_slices: int
    named: bool  # the driver told the name


class ComputePiece(NamedTuple):
    """One compute instance; `handle` is good within one reading only."""

    ident: int
    slices: int
    uuid: str
    handle: Any


class Piece(NamedTuple):
    """One GPU instance with its compute instances; `handle` as above."""

    ident: int
    shape: Shape
    placement: Placement
    compute: tuple[ComputePiece, ...]
    handle: Any

    @property
    def incarnation(self) -> str:
        """What changes whenever the piece is made anew; empty while it is half made."""
        return "+".join(compute.uuid for compute in self.compute)


def read_shapes(nvml: Nvml, handle: Any, memory_bytes: int | None) -> tuple[Shape, ...]:
    """Return the GPU instance profiles, in the order of the driver's enumeration."""
    shapes = []
    for enum in range(ENUMS_MAX):
        info = _profile_info(nvml, handle, enum)
        if info is None:
            continue
        if info is _END:
            break
        starts, size = _placements(nvml, handle, int(info.id))
        if not starts:
            continue
        told = _name_of(info)
        name = told or _computed_name(enum, info, memory_bytes)
        shapes.append(
            Shape(
                profile=Profile(
                    name=name,
                    size=size,
                    starts=starts,
                    max_count=int(info.instanceCount),
                    memory_bytes=int(info.memorySizeMB) * MIB,
                    compute_units=int(info.multiprocessorCount),
                    attributes=_attributes(name),
                    vendor_ref=int(info.id),
                ),
                ident=int(info.id),
                compute_slices=int(info.sliceCount),
                named=bool(told),
            )
        )
    return tuple(shapes)


_END: Final = object()


def _profile_info(nvml: Nvml, handle: Any, enum: int) -> Any:
    """Return a profile; None where the GPU has none of this enum; `_END` behind the last."""
    version = 2
    while True:
        try:
            return nvml.call("nvmlDeviceGetGpuInstanceProfileInfo", handle, enum, version=version)
        except NvmlCallError as failure:
            if failure.code == FUNCTION_NOT_FOUND and version == 2:
                version = 1
            elif failure.code == INVALID_ARGUMENT:
                return _END
            elif failure.code in ABSENT:
                return None
            else:
                raise


def _placements(nvml: Nvml, handle: Any, ident: int) -> tuple[tuple[int, ...], int]:
    count = ctypes.c_uint(0)
    name = "nvmlDeviceGetGpuInstancePossiblePlacements"
    nvml.call(name, handle, ident, None, ctypes.byref(count))
    if not count.value:
        return (), 0
    places = (nvml.module.c_nvmlGpuInstancePlacement_t * count.value)()
    nvml.call(name, handle, ident, places, ctypes.byref(count))
    found = [places[index] for index in range(min(count.value, len(places)))]
    return tuple(sorted(int(place.start) for place in found)), int(found[0].size)


def _name_of(info: Any) -> str:
    name = getattr(info, "name", "")
    text = name.decode() if isinstance(name, bytes) else str(name)
    return text.removeprefix("MIG ").strip()


def _computed_name(enum: int, info: Any, memory_bytes: int | None) -> str:
    """Return a name where the driver is too old to tell it: eighths of the memory, rounded up."""
    gib = int(info.memorySizeMB) / 1024
    if memory_bytes:
        total_gib = memory_bytes / (1 << 30)
        eighths = max(1, round(gib / total_gib * 8))
        gib = eighths * total_gib / 8
    suffix = _SUFFIXES.get(enum) or _SUFFIXES_ME.get(enum, "")
    return f"{int(info.sliceCount)}g.{-(-round(gib * 100) // 100)}gb{suffix}"


def _attributes(name: str) -> tuple[str, ...]:
    marks = name.replace("-", "+-").split("+")[1:]
    return tuple(marks)


class InstanceReader:
    """Reads the instances of one GPU; remembers the compute profiles, which never change."""

    def __init__(self, nvml: Nvml) -> None:
        self._nvml = nvml
        self._compute: dict[int, tuple[tuple[int, int, int], ...]] = {}

    def read(self, handle: Any, shapes: tuple[Shape, ...]) -> tuple[Piece, ...]:
        """Return all GPU instances by their place, those without compute instance too."""
        pieces = []
        for shape in shapes:
            for gpu_instance in self._of_profile(handle, shape):
                piece = self._piece(gpu_instance, shape)
                if piece is not None:
                    pieces.append(piece)
        return tuple(sorted(pieces, key=lambda piece: (piece.placement, piece.ident)))

    def _of_profile(self, handle: Any, shape: Shape) -> list[Any]:
        slots = (self._nvml.module.c_nvmlGpuInstance_t * (shape.profile.max_count + _SPARE_SLOTS))()
        count = ctypes.c_uint(0)
        try:
            self._nvml.call(
                "nvmlDeviceGetGpuInstances", handle, shape.ident, slots, ctypes.byref(count)
            )
        except NvmlCallError as failure:
            if failure.code in {NOT_SUPPORTED, *GONE}:  # MIG went off meanwhile
                return []
            raise
        return [slots[index] for index in range(min(count.value, len(slots)))]

    def _piece(self, gpu_instance: Any, shape: Shape) -> Piece | None:
        try:
            info = self._nvml.call("nvmlGpuInstanceGetInfo", gpu_instance)
            compute = self.compute_of(gpu_instance, shape)
        except NvmlCallError as failure:
            if failure.code in GONE:  # destroyed between two calls
                return None
            raise
        place = Placement(start=int(info.placement.start), size=int(info.placement.size))
        return Piece(int(info.id), shape, place, compute, gpu_instance)

    def compute_of(self, gpu_instance: Any, shape: Shape) -> tuple[ComputePiece, ...]:
        """Return the compute instances of a GPU instance, by id."""
        found = []
        for ident, slices, most in self.compute_profiles(gpu_instance, shape):
            slots = (self._nvml.module.c_nvmlComputeInstance_t * (most + _SPARE_SLOTS))()
            count = ctypes.c_uint(0)
            self._nvml.call(
                "nvmlGpuInstanceGetComputeInstances",
                gpu_instance,
                ident,
                slots,
                ctypes.byref(count),
            )
            for index in range(min(count.value, len(slots))):
                info = self._nvml.call("nvmlComputeInstanceGetInfo_v2", slots[index])
                uuid = self._nvml.call("nvmlDeviceGetUUID", info.device)
                found.append((int(info.id), slices, uuid, slots[index]))
        return tuple(ComputePiece(*entry) for entry in sorted(found, key=lambda entry: entry[0]))

    def compute_profiles(self, gpu_instance: Any, shape: Shape) -> tuple[tuple[int, int, int], ...]:
        """Return `(id, slices, most)` of each compute profile of a GPU instance profile."""
        known = self._compute.get(shape.ident)
        if known is not None:
            return known
        found = []
        for enum in range(COMPUTE_ENUMS_MAX):
            try:
                info = self._nvml.call(
                    "nvmlGpuInstanceGetComputeInstanceProfileInfo",
                    gpu_instance,
                    enum,
                    0,
                    version=1,
                )
            except NvmlCallError as failure:
                if failure.code == INVALID_ARGUMENT:
                    break
                if failure.code in ABSENT:
                    continue
                raise
            found.append((int(info.id), int(info.sliceCount), int(info.instanceCount)))
        self._compute[shape.ident] = tuple(found)
        return self._compute[shape.ident]
