"""The names that dashboards for NVIDIA's exporter ask for, on a page of their own and on request.

Units are DCGM's own (MiB, MHz, mJ, percent). A value that is not fresh is left out, as is a name
that nothing here measures; a device's value is told once, on the device, and never copied onto its
instances.

Source: dcgm-exporter `etc/default-counters.csv` and its label template (2026).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from alloy_agent.model import Device, Partition, Signal, Snapshot, Vendor
from alloy_agent.telemetry import signals as readings
from alloy_agent.telemetry.exposition import Family
from alloy_agent.telemetry.health import DeviceHealth

MIB: Final = 1024.0 * 1024.0


class Alias(NamedTuple):
    """A DCGM name: its type, its help and the factor from our base unit."""

    name: str
    kind: str
    help: str
    factor: float = 1.0


ALIASES: Final[dict[str, Alias]] = {
    "alloy_device_power_watts": Alias("DCGM_FI_DEV_POWER_USAGE", "gauge", "Power draw (in W)."),
    "alloy_device_energy_joules_total": Alias(
        "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION", "counter", "Energy since boot (in mJ).", 1e3
    ),
    "alloy_device_temperature_celsius": Alias(
        "DCGM_FI_DEV_GPU_TEMP", "gauge", "GPU temperature (in C)."
    ),
    "alloy_device_memory_used_bytes": Alias(
        "DCGM_FI_DEV_FB_USED", "gauge", "Frame buffer memory used (in MiB).", 1 / MIB
    ),
    "alloy_partition_memory_used_bytes": Alias(
        "DCGM_FI_DEV_FB_USED", "gauge", "Frame buffer memory used (in MiB).", 1 / MIB
    ),
    "alloy_device_compute_active_ratio": Alias(
        "DCGM_FI_PROF_GR_ENGINE_ACTIVE", "gauge", "Ratio of time the graphics engine is active."
    ),
    "alloy_partition_compute_active_ratio": Alias(
        "DCGM_FI_PROF_GR_ENGINE_ACTIVE", "gauge", "Ratio of time the graphics engine is active."
    ),
    "alloy_partition_memory_bandwidth_active_ratio": Alias(
        "DCGM_FI_PROF_DRAM_ACTIVE", "gauge", "Ratio of cycles the memory interface is active."
    ),
    "alloy_device_ecc_corrected_total": Alias(
        "DCGM_FI_DEV_ECC_SBE_VOL_TOTAL", "counter", "Single-bit ECC errors."
    ),
    "alloy_device_ecc_uncorrected_total": Alias(
        "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL", "counter", "Double-bit ECC errors."
    ),
}
LABELS: Final = (
    "gpu", "UUID", "pci_bus_id", "device", "modelName", "GPU_I_PROFILE", "GPU_I_ID", "hostname",
)  # fmt: skip


def families(
    snapshot: Snapshot | None,
    signals: Sequence[Signal],
    health: Mapping[str, DeviceHealth],
    node: str,
    now_s: float,
) -> Iterator[Family]:
    """Yield the families of NVIDIA's devices and instances under DCGM's names."""
    if snapshot is None:
        return
    devices = {str(d.id): d for d in snapshot.devices if d.vendor is Vendor.NVIDIA}
    pieces = {str(p.id): p for p in snapshot.partitions if p.device in devices}
    found: dict[str, Family] = {}
    for signal in signals:
        alias = ALIASES.get(signal.spec.name)
        if alias is None or signal.value is None or not readings.is_fresh(signal, now_s):
            continue
        piece = pieces.get(signal.spec.subject)
        device = devices.get(signal.spec.subject if piece is None else piece.device)
        if device is not None:
            _family(found, alias).add(_labels(device, piece, node), signal.value * alias.factor)
    _add_free(found, signals, devices, pieces, node, now_s)
    _add_xids(found, health, devices, node)
    yield from found.values()


class _Plain(Family):
    """A family whose counters carry no `_total`, as DCGM's exporter writes them."""

    def __init__(self, kind: str, name: str, help_: str) -> None:
        super().__init__("gauge", name, help_, LABELS)
        self.kind = "counter" if kind == "counter" else "gauge"


def _family(found: dict[str, Family], alias: Alias) -> Family:
    if alias.name not in found:
        found[alias.name] = _Plain(alias.kind, alias.name, alias.help)
    return found[alias.name]


def _labels(device: Device, piece: Partition | None, node: str) -> tuple[str, ...]:
    return (
        str(device.index),
        str(device.id),
        device.bus or "",
        f"nvidia{device.index}",
        device.model,
        "" if piece is None else piece.profile,
        "" if piece is None else piece.locator.get("gi", ""),
        node,
    )


def _add_free(  # noqa: PLR0913, PLR0917 - what a family is made of
    found: dict[str, Family],
    signals: Sequence[Signal],
    devices: Mapping[str, Device],
    pieces: Mapping[str, Partition],
    node: str,
    now_s: float,
) -> None:
    """Add free memory, where size and use are known."""
    alias = Alias("DCGM_FI_DEV_FB_FREE", "gauge", "Frame buffer memory free (in MiB).", 1 / MIB)
    for signal in signals:
        if not signal.spec.name.endswith("_memory_used_bytes") or signal.value is None:
            continue
        piece = pieces.get(signal.spec.subject)
        device = devices.get(signal.spec.subject if piece is None else piece.device)
        if device is None or not readings.is_fresh(signal, now_s):
            continue
        size = device.memory_bytes if piece is None else piece.memory_bytes
        if size is not None and size >= signal.value:
            family = _family(found, alias)
            family.add(_labels(device, piece, node), (size - signal.value) * alias.factor)


def _add_xids(
    found: dict[str, Family],
    health: Mapping[str, DeviceHealth],
    devices: Mapping[str, Device],
    node: str,
) -> None:
    """Add the last XID of each device, as DCGM tells it: a gauge that hides the ones before it."""
    alias = Alias("DCGM_FI_DEV_XID_ERRORS", "gauge", "Value of the last XID error encountered.")
    for device, known in health.items():
        if device not in devices:
            continue
        xids = [seen.code[4:] for seen in known.recent if seen.code.startswith("xid:")]
        last = float(xids[-1]) if xids and xids[-1].isdecimal() else 0.0
        _family(found, alias).add(_labels(devices[device], None, node), last)
