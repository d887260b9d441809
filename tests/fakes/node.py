"""One life of an agent on a bench machine: its rooms, joined as in the daemon."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Self

from alloy_agent.model import (
    Create,
    Destroy,
    DeviceId,
    DeviceLayout,
    Layout,
    Partition,
    PartitionSpec,
    Placement,
    Plan,
    PlannedStep,
    Snapshot,
    Step,
)
from alloy_agent.planner.steps import spec_of, undo_of
from alloy_agent.reconciler import Limits, Reconciler
from alloy_agent.store import Store, files
from tests.fakes.bench import BenchObserver, BenchWorker, Machine, Mortal


class MortalStore(Store):
    """A store whose process can die before a write, before its commit and after it."""

    mortal = Mortal()

    def _begin(self, *, durable: bool) -> None:
        self.mortal.point("before write")
        super()._begin(durable=durable)

    def _commit(self) -> None:
        self.mortal.point("before commit")
        super()._commit()
        self.mortal.point("after commit")

    def _write_marks(self, marks: files.Marks) -> None:
        self.mortal.point("before marks")
        super()._write_marks(marks)
        self.mortal.point("after marks")

    def die(self) -> None:
        """Let go of the file as a dead process does: nothing is finished, the lock drops."""
        for con in (self._writer, *self._readers):
            with contextlib.suppress(sqlite3.Error):
                con.close()
        self._closed = True
        if self._lock is not None:
            self._lock.release()


class Node:
    """An agent's rooms around one machine and one state directory."""

    def __init__(self, machine: Machine, state_dir: Path, mortal: Mortal | None = None) -> None:
        self.machine = machine
        machine.mortal = mortal or Mortal()

        class Life(MortalStore):
            mortal = machine.mortal

        self.store = Life.open(state_dir)
        self.worker = BenchWorker(machine)
        self.observer = BenchObserver(self.worker, self.store)
        self.reconciler = Reconciler(
            {"bench": self.worker},
            self.observer,
            self.store,
            limits=Limits(busy_deadline_s=0.2, busy_wait_first_s=0.001, busy_wait_longest_s=0.01),
        )

    @staticmethod
    @contextlib.contextmanager
    def reader(state_dir: Path) -> Iterator[Store]:
        """Lend the state as another process would read it now."""
        with contextlib.closing(Store.open(state_dir, read_only=True)) as store:
            yield store

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.machine.mortal.dead:
            self.store.die()
        else:
            self.store.close()

    def plan(self, wanted: dict[str, list[tuple[int, str]]], name: str = "wanted") -> Plan:
        """Return the plan from what is there to these (start, profile) pieces."""
        return plan_between(self.observer.observe(), layout_of(wanted, name))

    def reach(self, wanted: dict[str, list[tuple[int, str]]]) -> None:
        """Do what the daemon does at start: recover, then close what gap is left."""
        layout = layout_of(wanted)
        self.reconciler.recover(lambda: plan_between(self.observer.observe(), layout))
        plan = plan_between(self.observer.observe(), layout)
        if plan.steps or self.store.desired() != layout:
            self.reconciler.apply(plan)


def layout_of(wanted: dict[str, list[tuple[int, str]]], name: str = "wanted") -> Layout:
    """Return a layout of MIG-like pieces at fixed places."""
    return Layout(
        name=name,
        devices=tuple(
            DeviceLayout(
                device=DeviceId(device),
                partitions=tuple(
                    PartitionSpec(
                        device=DeviceId(device),
                        profile=profile,
                        size=int(profile[:-1]),
                        placement=Placement(start=start, size=int(profile[:-1])),
                    )
                    for start, profile in pieces
                ),
            )
            for device, pieces in wanted.items()
        ),
    )


def plan_between(snapshot: Snapshot, layout: Layout) -> Plan:
    """Return the obvious plan: remove what is not wanted, then make what is missing."""
    steps: list[Step] = []
    kept: list[Partition] = []
    missing: list[Step] = []
    for entry in layout.devices:
        here = [p for p in snapshot.partitions if p.device == entry.device]
        specs = entry.partitions or ()
        wanted = {(s.profile, s.placement) for s in specs}
        kept += [p for p in here if (p.profile, p.placement) in wanted]
        steps += [
            Destroy(device=p.device, partition=p)
            for p in here
            if (p.profile, p.placement) not in wanted
        ]
        there = {(p.profile, p.placement) for p in here}
        missing += [
            Create(device=s.device, spec=s) for s in specs if (s.profile, s.placement) not in there
        ]
    return Plan(
        layout=layout,
        boot_id=snapshot.boot_id,
        observed_sequence=snapshot.sequence,
        steps=tuple(
            PlannedStep(number=number, step=step, undo=undo_of(step))
            for number, step in enumerate([*steps, *missing], 1)
        ),
        kept=tuple(piece.id for piece in kept),
    )


__all__ = ["MortalStore", "Node", "layout_of", "plan_between", "spec_of"]
