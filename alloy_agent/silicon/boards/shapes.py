"""The types of the board tables.

Units: `_mib` is mebibytes as the driver prints them, `_bytes` bytes, `_w` watts, `_c` degrees
Celsius. A number that the sources do not give is None, or says in the table that it is a guess.
"""

from __future__ import annotations

from typing import Final

import msgspec

MIB: Final = 1 << 20
GIB: Final = 1 << 30


class Table(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all tables: frozen, by name."""


class InstanceShape(Table, frozen=True, kw_only=True):
    """One GPU instance profile of a MIG-capable board.

    Attributes:
        name: As the driver prints it, without the "MIG " in front.
        vendor_id: The id that create calls take (19, 14, 9 ...); per product.
        enum: The index that profile queries take (`NVML_GPU_INSTANCE_PROFILE_*`).
        compute_slices: GPU (compute) slices; a full compute instance has as many.
        size: Memory slices that a placement takes.
        starts: Legal first memory slices.
        max_count: How many may exist at once.
        sms: Streaming multiprocessors.
        memory_mib: Memory of the instance.
        engines: Copy engines, decoders, JPEG units, optical flow units; None: not in the sources.
    """

    name: str
    vendor_id: int
    enum: int
    compute_slices: int
    size: int
    starts: tuple[int, ...]
    max_count: int
    sms: int
    memory_mib: int
    engines: tuple[int, int, int, int] | None = None

    @property
    def attributes(self) -> tuple[str, ...]:
        """The driver's suffixes of the name, such as `me`."""
        return tuple(self.name.split("+")[1:])


class NvidiaBoard(Table, frozen=True, kw_only=True):
    """One NVIDIA GPU. `mig_survives_reboot` and `resetless` follow the architecture."""

    name: str
    aliases: tuple[str, ...] = ()
    product: str  # as the driver names it
    architecture: str  # "ampere", "hopper", "blackwell"
    pci_id: int  # device in the upper 16 bits, vendor in the lower
    sms: int
    memory_mib: int
    memory_slices: int
    compute_slices: int
    profiles: tuple[InstanceShape, ...]
    driver_floor: str  # oldest driver that knows the board
    driver: str = "580.95.05"
    power_idle_w: float
    power_cap_w: float
    temperature_limit_c: float = 87.0
    nvlinks: int = 0
    nvlink_bytes_per_s: int = 0  # one link, one direction
    source: str

    @property
    def resetless(self) -> bool:
        """Whether MIG mode changes without a reset (Hopper and later)."""
        return self.architecture != "ampere"

    @property
    def mig_survives_reboot(self) -> bool:
        """Whether the mode is kept in the InfoROM (Ampere)."""
        return self.architecture == "ampere"

    def profile(self, name: str) -> InstanceShape | None:
        """Return the profile of that name."""
        return next((shape for shape in self.profiles if shape.name == name), None)


class AmdBoard(Table, frozen=True, kw_only=True):
    """One AMD Instinct accelerator. No modes: `compute_modes` is empty."""

    name: str
    aliases: tuple[str, ...] = ()
    product: str
    gfx: str  # "gfx942"
    gfx_target_version: int  # as KFD prints it: 90402
    device_id: int
    xcds: int
    cus_per_xcd: int
    memory_mib: int
    compute_modes: tuple[str, ...] = ()
    memory_modes: tuple[str, ...] = ("NPS1",)
    apu: bool = False
    driver_floor: str = ""
    driver: str = "6.12.12"
    power_idle_w: float
    power_cap_w: float
    temperature_limit_c: float = 100.0
    xgmi_bytes_per_s: int = 0  # to one peer, one direction
    source: str


class NeuronInstance(Table, frozen=True, kw_only=True):
    """A whole instance with Neuron devices: topology is a property of the instance.

    `logical_to_physical` maps, per device, entry n to the sysfs core (trn2 only; empty: the same).
    """

    name: str
    aliases: tuple[str, ...] = ()
    product: str  # sysfs device_name
    instance_type: str  # sysfs instance_type
    arch: str  # sysfs arch_type of the device
    core_arch: str  # sysfs arch_type of a core
    pci_id: int  # device in the upper 16 bits, vendor in the lower
    devices: int
    cores: int  # physical, per device
    memory_bytes: int  # per device
    lnc: tuple[int, ...] = (1,)  # legal logical core configurations; the first is the default
    neighbours: tuple[tuple[int, ...], ...] = ()  # per device
    numa: tuple[int, ...] = ()  # per device; -1: the host has one node
    bdfs: tuple[str, ...] = ()
    logical_to_physical: tuple[tuple[int, ...], ...] = ()
    link_bytes_per_s: int | None = None
    group_sizes: tuple[int, ...] = ()  # legal numbers of devices for collectives
    driver_floor: str = "2.26.5"  # oldest driver without known memory-safety faults
    driver: str = "2.30.5"
    power_idle_w: float = 60.0
    power_cap_w: float = 400.0
    temperature_limit_c: float = 95.0
    source: str
