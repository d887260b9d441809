"""Small makers of values for the tests of telemetry."""

from __future__ import annotations

from alloy_agent.model import (
    Device,
    DeviceId,
    Partition,
    PartitionId,
    Placement,
    Quality,
    Scheme,
    Scope,
    Share,
    Signal,
    SignalSpec,
    Snapshot,
    TenantId,
    Vendor,
)
from alloy_agent.telemetry import health

BOOT = "11111111-2222-3333-4444-555555555555"
GPU = DeviceId("GPU-0")


def at(now_s: float, *, boot: str = BOOT, wall_s: float | None = None) -> health.Now:
    """Return a moment; the wall clock runs 1e9 seconds ahead unless told otherwise."""
    return health.Now(boot_id=boot, now_s=now_s, wall_s=1e9 + now_s if wall_s is None else wall_s)


def device(name: str = "GPU-0", **changes: object) -> Device:
    """Return a device of seven slices."""
    fields: dict[str, object] = {
        "id": DeviceId(name),
        "vendor": Vendor.NVIDIA,
        "model": "H100",
        "backend": "fake",
        "scheme": Scheme.INSTANCES,
        "slices": 8,
        "slice_name": "memory slice",
        "memory_bytes": 80 << 30,
        "compute_units": 132,
    }
    return Device(**{**fields, **changes})  # type: ignore[arg-type]


def piece(
    place: str = "GPU-0/1g@0",
    generation: int = 1,
    tenant: str | None = "acme",
    share: Share = Share.EXCLUSIVE,
) -> Partition:
    """Return a partition of one slice."""
    name, _, rest = place.partition("/")
    return Partition(
        id=PartitionId(place),
        device=DeviceId(name),
        profile=rest.partition("@")[0],
        placement=Placement(start=int(rest.partition("@")[2]), size=1),
        incarnation=f"i{generation}",
        generation=generation,
        tenant=None if tenant is None else TenantId(tenant),
        memory_bytes=10 << 30,
        compute_units=16,
        share=share,
    )


def snapshot(
    *pieces: Partition, now_s: float = 0.0, boot: str = BOOT, devices: tuple[Device, ...] = ()
) -> Snapshot:
    """Return a snapshot of one device and these partitions."""
    return Snapshot(
        boot_id=boot,
        sequence=1,
        taken_at_s=now_s,
        taken_wall_s=1e9 + now_s,
        devices=devices or (device(),),
        partitions=pieces,
    )


def signal(
    name: str, value: float | None, *, subject: str = "GPU-0", read_s: float = 0.0, unit: str = ""
) -> Signal:
    """Return a signal of a device."""
    spec = SignalSpec(
        name=name, subject=subject, scope=Scope.DEVICE, unit=unit, refresh_period_s=0.1
    )
    return Signal(spec=spec, quality=Quality.VALUE, value=value, read_time_s=read_s)
