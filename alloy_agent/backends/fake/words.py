"""Words shared by the vendors' halves of the fake backend: refusals, ids, shares."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Final

from alloy_agent.errors import (
    BackendError,
    DeviceBusyError,
    DeviceLostError,
    NotPermittedError,
    UnsupportedError,
)
from alloy_agent.model import (
    Device,
    DeviceId,
    Partition,
    PartitionId,
    PartitionSpec,
    Placement,
    Share,
    Tier,
    TierLimit,
)
from alloy_agent.silicon import refusals
from alloy_agent.silicon.machine import Machine
from alloy_agent.silicon.state import Grant, GrantKind

_MEANING: Final[dict[type[refusals.RefusalError], type[BackendError]]] = {
    refusals.InUseError: DeviceBusyError,
    refusals.LostError: DeviceLostError,
    refusals.NotSupportedError: UnsupportedError,
    refusals.NotPermittedError: NotPermittedError,
}

_KINDS: Final[dict[Share, GrantKind]] = {
    Share.EXCLUSIVE: "cores",
    Share.PRODUCTION: "production",
    Share.OPPORTUNISTIC: "opportunistic",
}

SHARED_LIMIT: Final = TierLimit(
    way="shared", tier=Tier.SOFT, reason="tenants share the device in time, under rate control"
)


@contextlib.contextmanager
def translated(device: str) -> Iterator[None]:
    """Raise a refusal as the `BackendError` that says what the caller can do."""
    try:
        yield
    except refusals.RefusalError as error:
        kind = _MEANING.get(type(error), BackendError)
        cure = ""
        if error.holders:
            cure = "end the holders: " + ", ".join(f"pid {pid}" for pid in error.holders)
        elif kind is DeviceLostError:
            cure = "drain the node and reset the device"
        message = str(error)
        raise kind(message if device in message else f"{device}: {message}", cure=cure) from error


def partition_id(device: str, profile: str, start: int) -> PartitionId:
    """Return the id of the piece at a location."""
    return PartitionId(f"{device}/{profile}@{start}")


def share_grants(machine: Machine, device: Device) -> tuple[Partition, ...]:
    """Return the shares of a whole device as partitions, without what a tenant needs to enter."""
    return tuple(
        Partition(
            id=partition_id(device.id, grant.profile, grant.start),
            device=device.id,
            profile=grant.profile,
            placement=Placement(start=grant.start, size=grant.size),
            incarnation=grant_incarnation(grant),
            memory_bytes=grant.memory_bytes,
            share=Share(grant.kind),
            ordinal=grant.ordinal,
            cu_mask=grant.cu_mask,
            locator={"grant": str(grant.serial)},
        )
        for grant in machine.device(device.id).grants
        if grant.kind != "cores"
    )


def create_grant(machine: Machine, spec: PartitionSpec) -> None:
    """Bind a run of cores, or a share of the whole device."""
    if spec.placement is None:
        raise BackendError(f"{spec.device}: {spec.profile} has no placement")
    machine.create_grant(
        spec.device,
        Grant(
            kind=_KINDS[spec.share],
            profile=spec.profile,
            start=spec.placement.start,
            size=spec.placement.size,
            ordinal=spec.ordinal,
            memory_bytes=spec.memory_bytes,
            serial=0,
            group=tuple(spec.group),
            cu_mask=spec.cu_mask,
        ),
    )


def destroy_grant(machine: Machine, partition: Partition) -> None:
    """Remove a binding; one that is gone already is fine."""
    grant = find_grant(machine, partition)
    if grant is not None:
        with contextlib.suppress(refusals.NotFoundError):
            machine.destroy_grant(partition.device, grant.serial)


def find_grant(machine: Machine, partition: Partition) -> Grant | None:
    """Return the binding behind a partition, found by its place; None: there is none.

    Raises:
        BackendError: Another one is in its place.
    """
    kind, place = _KINDS[partition.share], partition.placement
    for grant in machine.grants(partition.device):
        here = Placement(start=grant.start, size=grant.size)
        if (grant.kind, here, grant.ordinal) != (kind, place, partition.ordinal):
            continue
        if partition.incarnation not in {"", grant_incarnation(grant)}:
            raise BackendError(
                f"{partition.id} has been made anew by somebody else",
                cure="look at the devices and plan again",
            )
        return grant
    return None


def grant_incarnation(grant: Grant) -> str:
    """Return the incarnation of the partition that a binding makes."""
    return f"grant-{grant.serial}"


def wrong_scheme(device: DeviceId, what: str, instead: str) -> UnsupportedError:
    """Return the error for a step that this kind of device does not know."""
    return UnsupportedError(f"{device}: {what}", cure=instead)
