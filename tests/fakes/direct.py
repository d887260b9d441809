"""A backend in this process, as a worker shows it, and an agent's rooms around it.

For tests that must die inside of a vendor call, or count the calls, which a process of its own
would hide.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Self, TypeVar

from alloy_agent.backends.base import Backend
from alloy_agent.layout import choose, read_layout
from alloy_agent.model import (
    ApplyReport,
    Capabilities,
    DeviceId,
    Layout,
    Observation,
    Plan,
    Snapshot,
    Step,
    WorkerState,
)
from alloy_agent.observer import Observer
from alloy_agent.planner import plan
from alloy_agent.reconciler import Limits, Reconciler
from alloy_agent.silicon.refusals import SimulatedCrash
from alloy_agent.store import Store
from tests.fakes.bench import Mortal
from tests.fakes.node import MortalStore

T = TypeVar("T")


class DirectWorker:
    """Calls a backend at once. A death in a call is not lost in the observer's threads."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.quiet: set[str] = set()
        self.death: BaseException | None = None

    @property
    def name(self) -> str:
        return self.backend.name

    def state(self) -> WorkerState:
        return WorkerState(backend=self.name, alive=True)

    def capabilities(self) -> Capabilities:
        return self.backend.capabilities()

    def discover(self) -> tuple[DeviceId, ...]:
        return self._alive(self.backend.discover)

    def observe_many(
        self, devices: tuple[DeviceId, ...], deadline_s: float | None = None
    ) -> dict[DeviceId, Observation]:
        return {device: self.observe(device, deadline_s) for device in devices}

    def observe(self, device: DeviceId, deadline_s: float | None = None) -> Observation:
        del deadline_s
        return self._alive(lambda: self.backend.observe(device))

    def apply(self, step: Step) -> None:
        if step.device not in self.quiet:
            raise AssertionError("a step on a device that is not quiesced")
        self._alive(lambda: self.backend.apply(step))

    def quiesce(self, device: DeviceId) -> None:
        self.quiet.add(device)
        self._alive(lambda: self.backend.quiesce(device))

    def resume(self, device: DeviceId) -> None:
        self.quiet.discard(device)
        self._alive(lambda: self.backend.resume(device))

    def _alive(self, call: Callable[[], T]) -> T:
        """Make a call unless the process has died; after a death nothing runs any more."""
        if self.death is not None:
            raise self.death
        try:
            return call()
        except SimulatedCrash as exc:
            self.death = exc
            raise


class Rooms:
    """Store, observer and reconciler around one backend, joined as in the daemon."""

    def __init__(self, backend: Backend, state_dir: Path, mortal: Mortal | None = None) -> None:
        self.mortal = mortal or Mortal()
        alive = self.mortal

        class Life(MortalStore):
            mortal = alive

        self.store: Store = Life.open(state_dir)
        self.worker = DirectWorker(backend)
        self.observer = Observer(
            [self.worker],
            self.store,
            managed=lambda p: self.store.managed().get(p.id) == p.incarnation,
        )
        self.reconciler = Reconciler(
            {backend.name: self.worker},
            self.observer,
            self.store,
            limits=Limits(busy_deadline_s=0.2, busy_wait_first_s=0.001, busy_wait_longest_s=0.01),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if isinstance(self.store, MortalStore) and (self.mortal.dead or self.worker.death):
            self.store.die()
        else:
            self.store.close()

    def layout(self, text: str) -> Layout:
        """Return the only layout of a layout file."""
        return choose(read_layout(text, "layout.yaml"), None, self.observer.observe().devices)

    def plan(self, text: str) -> Plan:
        """Return the planner's plan from what is there to a layout."""
        return plan(self.layout(text), self.observer.observe(), frozenset())

    def reach(self, text: str) -> tuple[ApplyReport, ...]:
        """Do what the daemon does at start: recover, then close what gap is left."""
        reports = [self.reconciler.recover(lambda: self.plan(text))]
        made = self.plan(text)
        if made.steps or self.store.desired() != made.layout:
            reports.append(self.reconciler.apply(made))
        return tuple(report for report in reports if report is not None)

    def snapshot(self) -> Snapshot:
        """Return the node as it is."""
        return self.observer.observe()
