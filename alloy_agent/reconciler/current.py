"""Whether a plan may be begun. Pure.

It may when the node is still as planned, nobody's lease is broken, and those it interrupts agreed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from alloy_agent.errors import ConsentError, StalePlanError
from alloy_agent.model import (
    Condition,
    Configure,
    Create,
    Destroy,
    Device,
    DeviceId,
    Lease,
    Partition,
    PartitionId,
    Plan,
    PlannedStep,
    Scheme,
    Scope,
    SetMode,
    Share,
    Snapshot,
)
from alloy_agent.planner.geometry import made_by_mode
from alloy_agent.reconciler.readback import mode_of, reach

if TYPE_CHECKING:
    from collections.abc import Iterable

_AGAIN = "plan again"


def refuse_without_consent(plan: Plan, consent: frozenset[Scope]) -> None:
    """Raise `ConsentError` when a step interrupts further than was agreed to."""
    worst = {
        f"{i.scope} {i.subject} ({i.why})"
        for planned in plan.steps
        for i in planned.interrupts
        if i.scope not in consent
    }
    if worst:
        raise ConsentError(
            f"layout {plan.layout.name}: applying it interrupts {'; '.join(sorted(worst))}",
            cure="agree to it with --yes, or change the layout",
        )


def refuse_if_stale(
    plan: Plan, snapshot: Snapshot, leases: Iterable[Lease], done: frozenset[int] = frozenset()
) -> None:
    """Raise `StalePlanError` when the plan's steps behind `done` no longer fit to the node.

    The steps are walked through in memory from what is observed now: each must find the piece, the
    incarnation, the mode or the free place that it was planned for.
    """
    if plan.boot_id and plan.boot_id != snapshot.boot_id:
        raise StalePlanError("the node was restarted since the plan was made", cure=_AGAIN)
    walk = _Walk(plan, snapshot, _leased(leases, snapshot))
    for planned in plan.steps:
        if planned.number not in done:
            walk.step(planned)
    if not done:
        walk.refuse_newcomers()


def _leased(leases: Iterable[Lease], snapshot: Snapshot) -> dict[PartitionId, Lease]:
    """Return the leases of this boot by the pieces they hold at the generation that lives."""
    generations = {piece.id: piece.generation for piece in snapshot.partitions}
    return {
        piece.partition: lease
        for lease in leases
        if lease.boot_id == snapshot.boot_id
        and (lease.expires_at_s is None or lease.expires_at_s > snapshot.taken_at_s)
        for piece in lease.pieces
        if generations.get(piece.partition) == piece.generation
    }


class _Walk:
    """The pieces of the node as they will be, step after step."""

    def __init__(self, plan: Plan, snapshot: Snapshot, leased: dict[PartitionId, Lease]) -> None:
        self._plan = plan
        self._devices: dict[DeviceId, Device] = {d.id: d for d in snapshot.devices}
        self._pieces: dict[PartitionId, Partition] = {p.id: p for p in snapshot.partitions}
        self._modes = {(d.id, m.kind): m.current for d in snapshot.devices for m in d.modes}
        self._opaque: set[DeviceId] = set()  # pieces unknown after a mode that makes its own
        self._named: set[PartitionId] = set(plan.kept)
        self._leased = leased

    def step(self, planned: PlannedStep) -> None:
        step = planned.step
        device = self._devices.get(step.device)
        if device is None:
            raise StalePlanError(f"device {step.device} has vanished", cure=_AGAIN)
        if device.condition is not Condition.OK:
            reason = f" ({device.condition_reason})" if device.condition_reason else ""
            raise StalePlanError(
                f"device {device.id} is {device.condition}{reason}",
                cure="see `alloy-agent doctor`, then plan again",
            )
        match step:
            case Destroy() | Configure():
                self._living(step)
            case Create():
                self._place(step, device)
            case SetMode():
                self._switch(step, device)

    def _living(self, step: Destroy | Configure) -> None:
        if step.device in self._opaque:
            return
        planned, found = step.partition, self._pieces.get(step.partition.id)
        if found is None:
            raise StalePlanError(f"{planned.id} is gone", cure=_AGAIN)
        if found.incarnation != planned.incarnation:
            raise StalePlanError(f"{planned.id} was made anew since", cure=_AGAIN)
        self._named.add(planned.id)
        if isinstance(step, Destroy):
            self._refuse_leased(planned.id, "destroyed")
            del self._pieces[planned.id]

    def _place(self, step: Create, device: Device) -> None:
        spec = step.spec
        if spec.placement is None:
            raise StalePlanError(f"a step creates {spec.profile} without a place", cure=_AGAIN)
        if step.device in self._opaque:
            return
        for piece in [p for p in self._pieces.values() if p.device == spec.device]:
            if not piece.placement.overlaps(spec.placement):
                continue
            if made_by_mode(piece, device) and spec.share is not Share.EXCLUSIVE:
                self._refuse_leased(piece.id, "shared out")
                del self._pieces[piece.id]
                continue
            both_shared = Share.EXCLUSIVE not in (piece.share, spec.share)
            if not both_shared or (piece.share, piece.ordinal) == (spec.share, spec.ordinal):
                raise StalePlanError(
                    f"{piece.id} sits where {spec.profile} was to be made", cure=_AGAIN
                )

    def _switch(self, step: SetMode, device: Device) -> None:
        if mode_of(device, step.kind) is None:
            raise StalePlanError(f"device {device.id} has no {step.kind} mode", cure=_AGAIN)
        current = self._modes[device.id, step.kind]
        if device.id not in self._opaque and current != step.current:
            raise StalePlanError(
                f"{step.kind} of {device.id} is {current}, not {step.current} any more", cure=_AGAIN
            )
        for other in reach(step, self._devices.values()):
            for piece in [p for p in self._pieces.values() if p.device == other]:
                self._refuse_leased(piece.id, f"lost to a change of {step.kind}")
                if made_by_mode(piece, self._devices[other]):
                    del self._pieces[piece.id]  # it was there by the mode, and goes with it
            self._modes[other, step.kind] = step.wanted
            if self._devices[other].scheme is Scheme.MODES:
                self._opaque.add(other)
                self._named.update(p.id for p in self._pieces.values() if p.device == other)

    def _refuse_leased(self, partition: PartitionId, fate: str) -> None:
        lease = self._leased.get(partition)
        if lease is not None:
            raise StalePlanError(
                f"{partition} would be {fate}, but tenant {lease.tenant} holds lease {lease.id}",
                cure="release the lease, then plan again",
            )

    def refuse_newcomers(self) -> None:
        """Raise when a device whose pieces are laid out has one that the plan does not know."""
        for entry in self._plan.layout.devices:
            device = self._devices.get(entry.device)
            if entry.partitions is None or device is None or device.scheme is Scheme.MODES:
                continue
            for piece in self._pieces.values():
                if piece.device != device.id or made_by_mode(piece, device):
                    continue
                if piece.id not in self._named:
                    raise StalePlanError(f"{piece.id} has appeared since", cure=_AGAIN)
