"""From what is to what shall be: the ordered steps, with the least disruption. Pure.

`plan` keeps every piece that both sides have, and among the rest disrupts the least, compared in
this order: leased pieces destroyed (never any: the plan is refused instead), pieces destroyed,
devices interrupted, steps. Devices do not depend on each other except through modes of a hive or
node, so each is solved by itself and done as a whole before the next one.

Rules that stay true in here: on each device, what goes away goes first, then switches change, then
caps, then new pieces come, so that no state on the way holds two pieces on one slice or a piece in
a mode that cannot have it. Nothing here reads a clock, a file or a device.
"""

from __future__ import annotations

from alloy_agent.errors import PlanImpossibleError
from alloy_agent.model import (
    Condition,
    Destroy,
    Device,
    DeviceId,
    DeviceLayout,
    Interrupt,
    Layout,
    ModeKind,
    Partition,
    PartitionId,
    Plan,
    PlanCost,
    PlannedStep,
    Scheme,
    Scope,
    Snapshot,
    Step,
)
from alloy_agent.planner.geometry import difference, expected, made_by_mode, pieces_of
from alloy_agent.planner.modes import ModeStep, compatible, mode_of, mode_steps
from alloy_agent.planner.pieces import PieceChange, change_pieces, fits
from alloy_agent.planner.steps import (
    core_profile,
    describe,
    disruptive,
    format_bytes,
    partition_id,
    partition_of,
    shared_profile,
    spec_of,
    undo_of,
)

__all__ = [
    "compatible",
    "core_profile",
    "describe",
    "difference",
    "disruptive",
    "expected",
    "fits",
    "format_bytes",
    "partition_id",
    "partition_of",
    "plan",
    "shared_profile",
    "spec_of",
    "undo_of",
]


def plan(layout: Layout, snapshot: Snapshot, leased: frozenset[PartitionId] = frozenset()) -> Plan:
    """Return the cheapest ordered steps that take the snapshot to the layout.

    Args:
        layout: What is wanted; devices that it does not name stay as they are.
        snapshot: What is there now.
        leased: Pieces that must not be destroyed or interrupted.

    Raises:
        PlanImpossibleError: A device is missing or does not answer, the pieces cannot exist
            together, or a leased one
            would have to go; the message names both sides.
    """
    work = _Work(layout, snapshot, leased)
    for wanted in layout.devices:
        work.add(wanted)
    return work.plan()


class _Work:
    """One plan in the making."""

    def __init__(self, layout: Layout, snapshot: Snapshot, leased: frozenset[PartitionId]) -> None:
        self.layout = layout
        self.snapshot = snapshot
        self.leased = leased
        self.devices = {device.id: device for device in snapshot.devices}
        self.named: dict[DeviceId, DeviceLayout] = {}
        self.switched: dict[tuple[DeviceId, ModeKind], tuple[str, DeviceLayout]] = {}
        self.steps: list[PlannedStep] = []
        self.kept: list[PartitionId] = []
        self.destroyed: set[PartitionId] = set()
        self.interrupted: set[str] = set()
        self.notes: list[str] = []

    def add(self, wanted: DeviceLayout) -> None:
        device = self._device(wanted)
        here = pieces_of(self.snapshot, device.id)
        modes = [
            step for step in mode_steps(wanted, device, self.snapshot) if self._is_new(step, wanted)
        ]
        change = self._pieces(wanted, device, here, modes)
        for destroy in change.destroys:
            self._destroy(destroy)
        for mode in modes:
            self._switch(mode, wanted)
        for cap in change.configures:
            self._append(cap)
        for create in change.creates:
            self._append(create)
        self.kept += change.kept
        if not change.proven:
            self.notes.append(f"{device.id}: too many pieces to prove that none could be kept more")

    def plan(self) -> Plan:
        kept = tuple(piece for piece in self.kept if piece not in self.destroyed)
        cost = PlanCost(
            destroyed=len(self.destroyed),
            interrupted_devices=len(self.interrupted),
            steps=len(self.steps),
        )
        return Plan(
            layout=self.layout,
            boot_id=self.snapshot.boot_id,
            observed_sequence=self.snapshot.sequence,
            steps=tuple(self.steps),
            kept=kept,
            cost=cost,
            notes=tuple(dict.fromkeys(self.notes)),
        )

    def _device(self, wanted: DeviceLayout) -> Device:
        where = f"{wanted.source}: " if wanted.source else ""
        first = self.named.setdefault(wanted.device, wanted)
        if first is not wanted:
            raise PlanImpossibleError(
                f"{where}{wanted.device} is named twice, first at {first.source}",
                cure="keep one of the two entries",
            )
        device = self.devices.get(wanted.device)
        if device is None:
            raise PlanImpossibleError(
                f"{where}{wanted.device} is not on this node",
                cure="see `alloy-agent devices`; if it was there, see `alloy-agent doctor`",
            )
        if device.condition is not Condition.OK:
            reason = f", {device.condition_reason}" if device.condition_reason else ""
            raise PlanImpossibleError(
                f"{where}{device.id} is {device.condition}{reason}",
                cure="bring the device back first, or leave it out of the layout",
            )
        return device

    def _pieces(
        self, wanted: DeviceLayout, device: Device, here: list[Partition], modes: list[ModeStep]
    ) -> PieceChange:
        by_mode = {piece.id for piece in here if made_by_mode(piece, device)}
        movable = [piece for piece in here if piece.id not in by_mode]
        if wanted.partitions is None and not _leaves_instances(modes):
            kept = tuple(piece.id for piece in here)
            return PieceChange(kept, (), (), ())
        _refuse_instances_without_mode(wanted, device)
        change = change_pieces(wanted, device, movable, self.leased)
        stay = tuple(piece.id for piece in here if piece.id in by_mode)
        return change._replace(kept=(*change.kept, *stay))

    def _is_new(self, mode: ModeStep, wanted: DeviceLayout) -> bool:
        """Whether a switch has not been thrown already with another member of its group."""
        kind, value = mode.step.kind, mode.step.wanted
        done = self.switched.get((wanted.device, kind))
        if done is None:
            for member in mode.group:
                self.switched[member, kind] = (value, wanted)
            return True
        if done[0] != value:
            where = f"{wanted.source}: " if wanted.source else ""
            raise PlanImpossibleError(
                f"{where}{wanted.device} wants {kind} {value}, but {done[1].device} "
                f"({done[1].source}) wants {done[0]}, and the two switch together",
                cure="ask for the same mode on both",
            )
        return False

    def _switch(self, mode: ModeStep, wanted: DeviceLayout) -> None:
        interrupts = list(mode.interrupts)
        for piece in self.snapshot.partitions:
            if piece.device not in mode.victims or piece.id in self.destroyed:
                continue
            if piece.id in self.leased:
                where = f"{wanted.source}: " if wanted.source else ""
                tenant = f" of tenant {piece.tenant}" if piece.tenant else ""
                raise PlanImpossibleError(
                    f"{where}to {describe(mode.step)} would take away {piece.id}{tenant}, "
                    "held by a lease",
                    cure="release the lease first, or leave the mode as it is",
                )
            self.destroyed.add(piece.id)
            why = f"lost when {mode.step.kind} changes"
            interrupts.append(Interrupt(scope=Scope.PARTITION, subject=piece.id, why=why))
        self.interrupted |= {i.subject for i in mode.interrupts if i.scope is Scope.DEVICE}
        self.notes += mode.notes
        self._append(mode.step, tuple(interrupts))

    def _destroy(self, step: Destroy) -> None:
        piece = step.partition
        self.destroyed.add(piece.id)
        if not piece.generation:
            self.notes.append(f"whether this agent made {piece.id} is not known")
        elif not piece.managed:
            self.notes.append(f"{piece.id} was not made by this agent")
        # An empty piece of our own interrupts nobody. A process in it that nobody announced is safe
        # too: backends refuse to destroy a piece in use. Of foreign pieces we know no tenants.
        if piece.managed and not piece.tenant:
            self._append(step)
            return
        why = f"destroyed, in use by tenant {piece.tenant}" if piece.tenant else "destroyed"
        self._append(step, (Interrupt(scope=Scope.PARTITION, subject=piece.id, why=why),))

    def _append(self, step: Step, interrupts: tuple[Interrupt, ...] = ()) -> None:
        number = len(self.steps) + 1
        self.steps.append(
            PlannedStep(number=number, step=step, interrupts=interrupts, undo=undo_of(step))
        )


def _leaves_instances(modes: list[ModeStep]) -> bool:
    return any(m.step.kind is ModeKind.MIG and m.step.wanted == "off" for m in modes)


def _refuse_instances_without_mode(wanted: DeviceLayout, device: Device) -> None:
    """Refuse pieces on a device whose switch for pieces is off and stays off."""
    mode = mode_of(device, ModeKind.MIG)
    if not wanted.partitions or mode is None or device.scheme is not Scheme.INSTANCES:
        return
    after = wanted.modes.get(ModeKind.MIG, mode.current)
    exclusive = next((s for s in wanted.partitions if s.share == "exclusive"), None)
    if after == "off" and exclusive is not None:
        where = f"{wanted.source}: " if wanted.source else ""
        raise PlanImpossibleError(
            f"{where}{exclusive.profile} on {device.id} needs MIG, which stays off",
            cure="ask for mig mode on",
        )
