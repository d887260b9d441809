"""One immutable snapshot of the node, from all workers and all their devices at once.

    observer = Observer(workers, generations=store)
    snapshot = observer.observe()       # never longer than the longest deadline
    observer.latest, observer.age_s()   # what was seen last, and how long ago

Rules that stay true in here:

* A device that was seen once stays listed. When it does not answer, its last known state is kept
  under a condition that says so: STALLED (a call has not returned), LOST (gone, quarantined, or no
  longer listed by its driver), FAILED, NOT_PERMITTED. Nothing about the other devices changes by
  it.
* What is kept is marked by a `DeviceFault` with the reason, so that nobody takes it for an
  observation.
* Generations come from the store, which counts incarnations; the observer itself remembers only the
  last snapshot.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Final, Protocol, runtime_checkable

import msgspec

from alloy_agent.errors import (
    AlloyError,
    BackendError,
    DeviceLostError,
    DeviceStalledError,
    NotPermittedError,
)
from alloy_agent.host import clock
from alloy_agent.model import (
    Capabilities,
    Condition,
    Device,
    DeviceFault,
    DeviceId,
    Observation,
    Occupant,
    Owner,
    Partition,
    PartitionId,
    Scheme,
    Snapshot,
    TenantId,
    Vendor,
    WorkerState,
)
from alloy_agent.worker.client import WorkerDownError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

LOG = logging.getLogger(__name__)
FAULT_OF: Final = {
    Condition.STALLED: "probe_stalled",
    Condition.LOST: "lost",
    Condition.NOT_PERMITTED: "not_permitted",
    Condition.FAILED: "failed",
}


class Observed(Protocol):
    """What the observer asks of a worker. No call may take longer than its own deadline."""

    @property
    def name(self) -> str:
        """Name of the backend."""
        ...

    def capabilities(self) -> Capabilities:
        """Return what the backend can do here."""
        ...

    def discover(self) -> tuple[DeviceId, ...]:
        """Return the ids of all devices."""
        ...

    def observe(self, device: DeviceId, deadline_s: float | None = None) -> Observation:
        """Return one device's answer."""
        ...

    def state(self) -> WorkerState:
        """Return how the worker is doing."""
        ...


@runtime_checkable
class ObservedAtOnce(Protocol):
    """A worker that asks all its devices at once by itself."""

    def observe_many(
        self, devices: Iterable[DeviceId], deadline_s: float | None = None
    ) -> dict[DeviceId, Observation | BackendError]:
        """Return all devices' answers or failures, within one deadline."""
        ...


class Generations(Protocol):
    """Counts the incarnations of a partition."""

    def generation_of(self, partition: PartitionId, incarnation: str, /) -> int:
        """Return the generation of this incarnation, counting it when it is new."""
        ...


def _unmanaged(_partition: Partition) -> bool:
    return False


def _unbound(_partition: Partition) -> TenantId | None:
    return None


def _empty(_partition: Partition) -> tuple[Occupant, ...]:
    return ()


def _nobody() -> tuple[Owner, ...]:
    return ()


class Observer:
    """Freezes what all workers say into one `Snapshot`."""

    def __init__(  # noqa: PLR0913 - each argument is one neighbour
        self,
        workers: Sequence[Observed],
        generations: Generations,
        *,
        managed: Callable[[Partition], bool] = _unmanaged,
        tenant_of: Callable[[Partition], TenantId | None] = _unbound,
        occupants_of: Callable[[Partition], tuple[Occupant, ...]] = _empty,
        owners: Callable[[], tuple[Owner, ...]] = _nobody,
        deadline_s: float | None = None,
        boot_id: str | None = None,
    ) -> None:
        """Prepare to observe.

        Args:
            workers: One for each backend.
            generations: The store; asked for each incarnation that the last snapshot did not have.
            managed: Whether a partition, its generation filled in, was made by this agent.
            tenant_of: Who has a partition, from leases and bindings.
            occupants_of: Which pods, containers, jobs or units those are.
            owners: Who else manages devices on this node.
            deadline_s: Longest wait for one device; None leaves it to the workers.
            boot_id: The boot of this node; None reads it.
        """
        self._workers = tuple(workers)
        self._generations = generations
        self._managed = managed
        self._tenant_of = tenant_of
        self._occupants_of = occupants_of
        self._owners = owners
        self._deadline_s = deadline_s
        self._boot_id = boot_id or clock.boot_id()
        self._sequence = 0
        self._lock = threading.Lock()
        self._known: tuple[dict[DeviceId, Observation], ...] = tuple({} for _ in self._workers)
        # generations of the last snapshot's incarnations, so that the store is asked for news alone
        self._counted: dict[tuple[PartitionId, str], int] = {}
        self._latest: Snapshot | None = None

    @property
    def latest(self) -> Snapshot | None:
        """The last snapshot; None before the first."""
        return self._latest

    def age_s(self) -> float | None:
        """Return how old the last snapshot is; None before the first."""
        latest = self._latest
        return None if latest is None else clock.boottime_s() - latest.taken_at_s

    def forget(self, device: DeviceId) -> None:
        """Stop listing a device that an operator has taken out."""
        with self._lock:
            for known in self._known:
                known.pop(device, None)

    def observe(self) -> Snapshot:
        """Observe all devices of all workers now. Calls from several threads take turns.

        Raises:
            StoreError: The generations cannot be kept.
        """
        with self._lock:
            taken_at_s, taken_wall_s = clock.boottime_s(), clock.wall_s()
            answers = self._ask_all()
            seen: list[Observation] = []
            for worker, answer in zip(self._workers, answers, strict=True):
                seen.extend(_judge(worker, answer))
            counting: dict[tuple[PartitionId, str], int] = {}
            partitions = tuple(self._placed(p, counting) for o in seen for p in o.partitions)
            self._counted = counting
            self._sequence += 1
            self._latest = Snapshot(
                boot_id=self._boot_id,
                sequence=self._sequence,
                taken_at_s=taken_at_s,
                taken_wall_s=taken_wall_s,
                devices=tuple(o.device for o in seen),
                partitions=partitions,
                faults=tuple(f for o in seen for f in o.faults),
                owners=self._owners(),
                workers=tuple(worker.state() for worker in self._workers),
            )
            return self._latest

    # --- asking ---

    def _ask_all(self) -> list[_Answer]:
        """Return every worker's answer; they are asked side by side."""
        answers = [_Answer(known) for known in self._known]
        threads = [
            threading.Thread(target=self._ask, args=(worker, answer), daemon=True)
            for worker, answer in zip(self._workers[1:], answers[1:], strict=True)
        ]
        for thread in threads:
            thread.start()
        if self._workers:
            self._ask(self._workers[0], answers[0])
        for thread in threads:
            thread.join()
        return answers

    def _ask(self, worker: Observed, answer: _Answer) -> None:
        try:
            answer.listed = worker.discover()
        except AlloyError as exc:
            answer.failure = exc
        wanted = answer.known.keys() if answer.listed is None else answer.listed
        if answer.listed is None and not worker.state().alive:
            return  # nobody there to ask about the devices either
        answer.devices = self._ask_devices(worker, tuple(wanted))

    def _ask_devices(
        self, worker: Observed, devices: tuple[DeviceId, ...]
    ) -> dict[DeviceId, Observation | BackendError]:
        if isinstance(worker, ObservedAtOnce):
            return worker.observe_many(devices, self._deadline_s)
        out: dict[DeviceId, Observation | BackendError] = {}

        def ask(device: DeviceId) -> None:
            try:
                out[device] = worker.observe(device, self._deadline_s)
            except BackendError as exc:
                out[device] = exc

        threads = [threading.Thread(target=ask, args=(d,), daemon=True) for d in devices]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return out

    def _placed(
        self, partition: Partition, counting: dict[tuple[PartitionId, str], int]
    ) -> Partition:
        """Return `partition` with its generation, and with whose it is."""
        key = (partition.id, partition.incarnation)
        generation = self._counted.get(key) or self._generations.generation_of(*key)
        counting[key] = generation
        counted = msgspec.structs.replace(partition, generation=generation)
        return msgspec.structs.replace(
            counted,
            managed=self._managed(counted),
            tenant=self._tenant_of(counted),
            occupants=self._occupants_of(counted),
        )


class _Answer:
    """What one worker said, beside what is known of its devices."""

    def __init__(self, known: dict[DeviceId, Observation]) -> None:
        self.known = known
        self.listed: tuple[DeviceId, ...] | None = None
        self.failure: AlloyError | None = None
        self.devices: dict[DeviceId, Observation | BackendError] = {}


def _judge(worker: Observed, answer: _Answer) -> list[Observation]:
    """Return one observation for each device that is or was listed, in a stable order."""
    known = answer.known
    listed = tuple(known) if answer.listed is None else answer.listed
    out: list[Observation] = []
    for device in listed:
        got = answer.devices.get(device) or answer.failure
        if isinstance(got, Observation):
            known[device] = got
            out.append(got)
        else:
            if device not in known:
                known[device] = Observation(device=_placeholder(worker, device))
            out.append(_kept(known[device], got))
    out.extend(_missing(seen) for device, seen in known.items() if device not in listed)
    return out


def _kept(last: Observation, why: AlloyError | None) -> Observation:
    """Return what is known of a device that did not answer."""
    reason = str(why) if why is not None else f"{last.device.id}: no answer"
    condition = _condition_of(why)
    return _under(last, condition, FAULT_OF[condition], reason)


def _condition_of(why: AlloyError | None) -> Condition:
    """Return the condition of a device whose worker answered with `why`."""
    if isinstance(why, DeviceLostError):
        return Condition.LOST
    if isinstance(why, NotPermittedError):
        return Condition.NOT_PERMITTED
    if why is None or isinstance(why, DeviceStalledError | WorkerDownError):
        return Condition.STALLED
    return Condition.FAILED


def _under(last: Observation, condition: Condition, kind: str, reason: str) -> Observation:
    """Return `last` as kept, not seen: under a condition, and with one fault that says why."""
    device = msgspec.structs.replace(last.device, condition=condition, condition_reason=reason)
    fault = DeviceFault(device=device.id, kind=kind, reason=reason)
    return Observation(device=device, partitions=last.partitions, faults=(fault,))


def _missing(last: Observation) -> Observation:
    """Return a device that its driver listed once and does not list any more."""
    reason = f"{last.device.id}: not listed by its driver any more"
    return _under(last, Condition.LOST, "missing", reason)


def _placeholder(worker: Observed, device: DeviceId) -> Device:
    """Return what stands for a device that is listed but has never answered."""
    try:
        vendor = worker.capabilities().vendors[0]
    except (AlloyError, IndexError):
        vendor = Vendor(worker.name) if worker.name in Vendor.__members__.values() else Vendor.CPU
    return Device(
        id=device,
        vendor=vendor,
        model="unknown",
        backend=worker.name,
        scheme=Scheme.WHOLE,
        slices=0,
        slice_name="",
    )
