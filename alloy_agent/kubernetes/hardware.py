"""Pieces for claims, made and removed through the node's one writer of hardware.

A change is the layout of one device as it is now, with a piece more or less, planned by the planner
and carried out by the reconciler. The node's desired layout is kept together with it, so that what
is kept is what was claimed.

Rules that stay true in here:

* Pieces of others stay: a change names everything that is on the device.
* A piece is found by its place. Its incarnation says whether it still is the one that was made.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

import msgspec

from alloy_agent.errors import ApplyError, DeviceLostError, PlanImpossibleError, StalePlanError
from alloy_agent.kubernetes.offers import WHOLE, Offer, mode_for, pool_of
from alloy_agent.kubernetes.slices import pool_name
from alloy_agent.model import (
    ApplyReport,
    Condition,
    Device,
    DeviceId,
    DeviceLayout,
    Layout,
    ModeKind,
    Partition,
    PartitionId,
    PartitionSpec,
    Plan,
    Scheme,
    Scope,
    Share,
    Snapshot,
)
from alloy_agent.planner import plan, spec_of
from alloy_agent.planner.geometry import made_by_mode

if TYPE_CHECKING:
    from alloy_agent.store.claims import ClaimPiece

LAYOUT: str = "claims"
CONSENT = frozenset({Scope.PARTITION, Scope.DEVICE})
RETRY_S = 0.05


class NodeLike(Protocol):
    """The node, as far as claims change it."""

    def observe(self) -> Snapshot:
        """Return the node as it is now."""
        ...

    def leased(self, snapshot: Snapshot) -> frozenset[PartitionId]:
        """Return the pieces that must not be touched for others' sake."""
        ...

    def desired(self) -> Layout | None:
        """Return the layout that the node keeps."""
        ...

    def carry_out(self, plan: Plan, consent: frozenset[Scope]) -> ApplyReport:
        """Do a plan, journalled."""
        ...


class Hardware:
    """Makes, finds and removes pieces."""

    def __init__(self, node: NodeLike, node_name: str, shares: int = 0) -> None:
        self._node = node
        self._name = node_name
        self._shares = shares

    def observe(self) -> Snapshot:
        """Return the node as it is now."""
        return self._node.observe()

    def leased(self, snapshot: Snapshot) -> frozenset[PartitionId]:
        """Return the pieces that are held by leases."""
        return self._node.leased(snapshot)

    def offer_of(self, snapshot: Snapshot, pool: str, name: str) -> tuple[Device, Offer]:
        """Return what a pool's device name stands for.

        Raises:
            DeviceLostError: There is no such device, or it does not answer.
            PlanImpossibleError: The device does not have such a piece.
        """
        for device in snapshot.devices:
            if pool_name(self._name, device.id) != pool:
                continue
            if device.condition is not Condition.OK:
                raise DeviceLostError(
                    f"{device.id} is {device.condition} {device.condition_reason}".strip(),
                    cure="drain the node, or wait until the device answers again",
                )
            here = [p for p in snapshot.partitions if p.device == device.id]
            for offer in pool_of(device, here, shares=self._shares).offers:
                if offer.name == name:
                    return device, offer
            raise PlanImpossibleError(
                f"{device.id} has no piece {name} (any more)",
                cure="delete the pod, so that the scheduler allocates from the slices of now",
            )
        raise DeviceLostError(
            f"pool {pool} is of no device on this node",
            cure="delete the pod; if the device was there, see `alloy-agent doctor`",
        )

    @staticmethod
    def find(snapshot: Snapshot, piece: ClaimPiece) -> Partition | None:
        """Return the living partition at a piece's place, or None."""
        for one in snapshot.partitions:
            same = (one.device, one.placement, one.share, one.ordinal)
            if same != (piece.device, piece.placement, piece.share, piece.ordinal):
                continue
            if piece.share is not Share.EXCLUSIVE or one.profile == piece.profile:
                return one
        return None

    def make(
        self,
        pieces: Sequence[ClaimPiece],
        before: Callable[[], None],
        deadline_s: float,
    ) -> Snapshot:
        """Make what is missing, device by device; return the node as it is then.

        Args:
            pieces: Those that have to exist.
            before: Called before each change of a device; raises to stop.
            deadline_s: On the monotonic clock: until when to try again while others change things.

        Raises:
            AlloyError: With the device's reason; pieces that were made stay for the caller to see.
        """
        snapshot = self._node.observe()
        for device in dict.fromkeys(piece.device for piece in pieces):
            missing = [p for p in pieces if p.device == device and not self.find(snapshot, p)]
            if missing:
                before()
                self._change(device, missing, (), deadline_s)
                snapshot = self._node.observe()
        return snapshot

    def remove(self, partitions: Iterable[Partition], deadline_s: float) -> None:
        """Remove these incarnations; those that are gone already are fine.

        Raises:
            AlloyError: A device refuses; the others are removed.
        """
        doomed = tuple(partitions)
        for device in dict.fromkeys(one.device for one in doomed):
            here = tuple(one for one in doomed if one.device == device)
            self._change(device, (), here, deadline_s)

    def _change(
        self,
        device: DeviceId,
        more: Sequence[ClaimPiece],
        less: Sequence[Partition],
        deadline_s: float,
    ) -> None:
        while True:
            snapshot = self._node.observe()
            try:
                made = self._plan(snapshot, device, more, less)
                if made is None or not made.steps:
                    return
                report = self._node.carry_out(made, CONSENT)
            except (StalePlanError, ApplyError):
                if time.monotonic() + RETRY_S >= deadline_s:
                    raise
                time.sleep(RETRY_S)
                continue
            if report.outcome not in ("applied", "unchanged"):
                raise ApplyError(
                    f"{device}: {report.outcome}: "
                    f"{report.error or '; '.join(report.pending) or 'no reason was given'}",
                    cure="see `alloy-agent devices`; the kubelet tries again",
                )
            return

    def _plan(
        self,
        snapshot: Snapshot,
        device_id: DeviceId,
        more: Sequence[ClaimPiece],
        less: Sequence[Partition],
    ) -> Plan | None:
        """Return the plan for one device under the layout of the whole node."""
        device = next((d for d in snapshot.devices if d.id == device_id), None)
        if device is None:
            raise DeviceLostError(f"{device_id} is not on this node any more")
        gone = {(one.id, one.incarnation) for one in less}
        stay = [
            p
            for p in snapshot.partitions
            if p.device == device_id
            and (p.id, p.incarnation) not in gone
            and not made_by_mode(p, device)
        ]
        specs = [*(spec_of(p) for p in stay), *(_spec(p) for p in more if p.profile != WHOLE)]
        wanted = DeviceLayout(device=device_id, modes=_modes(device, more), partitions=tuple(specs))
        if device.scheme is Scheme.MODES and not (specs or less):
            return None
        single = Layout(name=LAYOUT, devices=(wanted,))
        made = plan(single, snapshot, self._node.leased(snapshot))
        desired = self._node.desired()
        others = () if desired is None else desired.devices
        merged = Layout(
            name=LAYOUT if desired is None else desired.name,
            devices=(*(one for one in others if one.device != device_id), wanted),
        )
        elsewhere = tuple(p.id for p in snapshot.partitions if p.device != device_id)
        return msgspec.structs.replace(made, layout=merged, kept=(*made.kept, *elsewhere))


def _spec(piece: ClaimPiece) -> PartitionSpec:
    return PartitionSpec(
        device=piece.device,
        profile=piece.profile,
        size=piece.placement.size,
        placement=piece.placement,
        memory_bytes=piece.memory_bytes,
        share=piece.share,
        ordinal=piece.ordinal,
    )


def _modes(device: Device, more: Sequence[ClaimPiece]) -> dict[ModeKind, str]:
    """Return the mode that new pieces need; the whole device is had by its mode alone."""
    for piece in more:
        offer = Offer(
            name=piece.name, profile=piece.profile, placement=piece.placement, share=piece.share
        )
        mode = mode_for(device, offer)
        if mode is not None:
            return {ModeKind.MIG: mode}
    return {}
