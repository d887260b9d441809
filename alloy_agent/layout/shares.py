"""The shares that a layout asks for: how many, with which memory caps and CU masks."""

from __future__ import annotations

from typing import Final

from alloy_agent.decoding.units import size_bytes
from alloy_agent.errors import ConfigError
from alloy_agent.layout.schema import Entry, Shared
from alloy_agent.model import Device, PartitionSpec, Placement, Share, Vendor
from alloy_agent.planner import format_bytes, shared_profile

CAP_MIN_BYTES: Final = 256 << 20  # less does not even hold a runtime's context
CAPPED: Final = "shared-capped"  # the way in which devices say that they can cap shares


def shares_of(entry: Entry, device: Device) -> tuple[PartitionSpec, ...]:
    """Return the shares of a whole device.

    Raises:
        ConfigError: Nobody shares it, or a cap or mask that this device cannot have.
    """
    shared = entry.shared
    if shared is None or shared.production + shared.opportunistic == 0:
        raise ConfigError(
            f"{entry.at('shared')}: shared by nobody", cure="give at least one tenant"
        )
    counts = {Share.PRODUCTION: shared.production, Share.OPPORTUNISTIC: shared.opportunistic}
    caps = _caps(entry, shared, device)
    mask = _mask(entry, shared, device)
    return tuple(
        PartitionSpec(
            device=device.id,
            profile=shared_profile(share, ordinal),
            size=device.slices,
            placement=Placement(start=0, size=device.slices),
            memory_bytes=caps[share],
            share=share,
            ordinal=ordinal,
            cu_mask=mask,
        )
        for share, count in counts.items()
        for ordinal in range(count)
    )


def _caps(entry: Entry, shared: Shared, device: Device) -> dict[Share, int | None]:
    """Return the memory cap of each sort of share; None: it has none."""
    production = _size(entry, shared.production_memory, "production_memory")
    opportunistic = _size(entry, shared.opportunistic_memory, "opportunistic_memory")
    if production is None and opportunistic is None:
        return {Share.PRODUCTION: None, Share.OPPORTUNISTIC: None}
    if not any(limit.way == CAPPED for limit in device.tier_limits):
        raise ConfigError(
            f"{entry.at('shared')}: shared: nothing on this host caps the memory of shares of "
            f"{device.model} ({device.id})",
            cure="remove the memory caps; they need a driver that charges its memory to cgroups v2",
        )
    asked = (production or 0) * shared.production + (opportunistic or 0) * shared.opportunistic
    if device.memory_bytes is not None and asked > device.memory_bytes:
        raise ConfigError(
            f"{entry.at('shared')}: shared: caps of {format_bytes(asked)} in all are more than the "
            f"{format_bytes(device.memory_bytes >> 20 << 20)} of {device.model} ({device.id})",
            cure="lower them",
        )
    return {Share.PRODUCTION: production, Share.OPPORTUNISTIC: opportunistic}


def _size(entry: Entry, written: int | str | None, key: str) -> int | None:
    if written is None:
        return None
    try:
        size = size_bytes(written) if isinstance(written, str) else written
    except ValueError as exc:
        raise ConfigError(f"{entry.at('shared')}: shared.{key}: {exc}") from exc
    if size < CAP_MIN_BYTES:
        raise ConfigError(
            f"{entry.at('shared')}: shared.{key}: {size} bytes are too few for any program",
            cure=f"give at least {format_bytes(CAP_MIN_BYTES)}",
        )
    return size


def _mask(entry: Entry, shared: Shared, device: Device) -> tuple[int, int] | None:
    """Return CUs of each XCD for every opportunistic share, and how many of those there are."""
    if shared.cu_mask is None:
        return None
    if device.vendor is not Vendor.AMD:
        raise ConfigError(
            f"{entry.at('shared')}: shared.cu_mask: {device.model} ({device.id}) has no CU masks",
            cure="remove cu_mask, or match AMD devices alone",
        )
    lent = shared.cu_mask * shared.opportunistic
    each = (device.compute_units or 0) // max(1, device.slices)
    if each and lent >= each:
        most = (each - 1) // max(1, shared.opportunistic)
        finer = f"at most {each - 1} of them: its CUs cannot be shared more finely"
        raise ConfigError(
            f"{entry.at('shared')}: shared.cu_mask: {shared.opportunistic} opportunistic shares of "
            f"{shared.cu_mask} CUs leave production none of the {each} of each {device.slice_name}",
            cure=f"give at most {most}" if most else f"give opportunistic shares, {finer}",
        )
    return shared.cu_mask, shared.opportunistic
