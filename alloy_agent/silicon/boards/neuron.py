"""AWS instances with Inferentia 2, Trainium 1 and Trainium 2 devices.

Source: aws-neuron/aws-neuron-driver 2.24.7 (neighbour tables, core order, sysfs names), the Neuron
SDK documentation (devices, cores, memory). Bus addresses and NUMA nodes of inf2 and trn1 are
guesses; those of trn2 follow the documentation's table.
"""

from __future__ import annotations

from typing import Final

from alloy_agent.silicon.boards.shapes import GIB, NeuronInstance

_DRIVER: Final = "aws-neuron-driver 2.24.7; aws-neuron-sdk instance pages"


def _line(count: int) -> tuple[tuple[int, ...], ...]:
    return tuple(
        tuple(peer for peer in (device - 1, device + 1) if 0 <= peer < count)
        for device in range(count)
    )


def _ring(count: int) -> tuple[tuple[int, ...], ...]:
    return tuple(((device - 1) % count, (device + 1) % count) for device in range(count))


def _torus(rows: int, columns: int) -> tuple[tuple[int, ...], ...]:
    """Return the neighbours in a 2D torus: up, left, down, right of `columns * row + column`."""
    return tuple(
        (
            columns * ((row - 1) % rows) + column,
            columns * row + (column - 1) % columns,
            columns * ((row + 1) % rows) + column,
            columns * row + (column + 1) % columns,
        )
        for row in range(rows)
        for column in range(columns)
    )


def _bdfs(count: int) -> tuple[str, ...]:
    """Return made-up bus addresses."""
    return tuple(f"0000:{0x10 + 0x0C * device:02x}:1c.0" for device in range(count))


_TRN2_BUSES: Final = (
    (0xCC, 0xB5, 0xB6, 0xCB),
    (0x6F, 0x58, 0x59, 0x6E),
    (0x9B, 0x84, 0x85, 0x9A),
    (0xF8, 0xE1, 0xE2, 0xF7),
)
_TRN2_BDFS: Final = tuple(f"0000:{bus:02x}:00.0" for row in _TRN2_BUSES for bus in row)

# Entry n of a device's logical order is this sysfs core. Source: driver, core map of ioctl 128.
_TRN2_ORDERS: Final = (
    ((0, 2, 8, 10), (4, 5, 6, 7, 2, 3, 0, 1)),
    ((1, 3, 9, 11), (2, 3, 0, 1, 4, 5, 6, 7)),
    ((4, 6, 12, 14), (0, 1, 2, 3, 6, 7, 4, 5)),
    ((5, 7, 13, 15), (6, 7, 4, 5, 0, 1, 2, 3)),
)


def _trn2_cores(count: int) -> tuple[tuple[int, ...], ...]:
    by_device = {device: order for devices, order in _TRN2_ORDERS for device in devices}
    return tuple(by_device[device] for device in range(count))


def _inf2(name: str, devices: int, neighbours: tuple[tuple[int, ...], ...]) -> NeuronInstance:
    return NeuronInstance(
        name=name,
        product="Inferentia2",
        instance_type="Inf2",
        arch="NDv3",
        core_arch="NCv2",
        pci_id=0x72641D0F,
        devices=devices,
        cores=2,
        memory_bytes=32 * GIB,
        neighbours=neighbours,
        numa=tuple(-1 if devices == 1 else device * 2 // devices for device in range(devices)),
        bdfs=_bdfs(devices),
        link_bytes_per_s=None,
        group_sizes=tuple(range(1, devices + 1)),
        power_idle_w=35.0,
        power_cap_w=190.0,
        source=_DRIVER,
    )


def _trn1(name: str, devices: int, link_gib_per_s: int | None) -> NeuronInstance:
    return NeuronInstance(
        name=name,
        product="Trainium1",
        instance_type="Trn1",
        arch="NDv2",
        core_arch="NCv2",
        pci_id=0x71641D0F,
        devices=devices,
        cores=2,
        memory_bytes=32 * GIB,
        neighbours=_torus(4, 4) if devices == 16 else ((),),
        numa=tuple(-1 if devices == 1 else device // 8 for device in range(devices)),
        bdfs=("0000:00:1e.0",) if devices == 1 else _bdfs(devices),
        link_bytes_per_s=None if link_gib_per_s is None else link_gib_per_s * GIB,
        group_sizes=(1, 4, 8, 16) if devices == 16 else (1,),
        power_idle_w=60.0,
        power_cap_w=400.0,
        source=_DRIVER,
    )


def _trn2(name: str, devices: int) -> NeuronInstance:
    # Devices 0-3 and 12-15 hang on node 1, 4-11 on node 0 (documentation's example).
    numa = tuple(0 if 4 <= device < 12 else 1 for device in range(devices))
    return NeuronInstance(
        name=name,
        product="Trainium2",
        instance_type="Trn2",
        arch="NDv3",
        core_arch="NCv3",
        pci_id=0x73641D0F,
        devices=devices,
        cores=8,
        memory_bytes=96 * GIB,
        lnc=(2, 1),
        neighbours=_torus(4, 4) if devices == 16 else ((),),
        numa=numa if devices == 16 else (-1,),
        bdfs=_TRN2_BDFS[:devices],
        logical_to_physical=_trn2_cores(devices),
        group_sizes=(1, 4, 8, 16) if devices == 16 else (1,),
        power_idle_w=80.0,
        power_cap_w=500.0,
        source=_DRIVER,
    )


NEURON_INSTANCES: Final = (
    _inf2("inf2.xlarge", 1, ((),)),
    _inf2("inf2.8xlarge", 1, ((),)),
    _inf2("inf2.24xlarge", 6, _line(6)),
    _inf2("inf2.48xlarge", 12, _ring(12)),
    _trn1("trn1.2xlarge", 1, None),
    _trn1("trn1.32xlarge", 16, 384),
    _trn1("trn1n.32xlarge", 16, 768),
    _trn2("trn2.3xlarge", 1),
    _trn2("trn2.48xlarge", 16),
)
