"""The snapshot: whole, immutable, and honest about what did not answer."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import pytest

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
    DeviceId,
    Observation,
    Owner,
    Partition,
    PartitionId,
    Placement,
    Scheme,
    TenantId,
    Vendor,
    WorkerState,
)
from alloy_agent.observer import Observer
from alloy_agent.worker.client import WorkerDownError

if TYPE_CHECKING:
    from collections.abc import Iterable

A, B, C = DeviceId("gpu-a"), DeviceId("gpu-b"), DeviceId("gpu-c")


class Counting:
    """Generations as the store keeps them."""

    def __init__(self) -> None:
        self.known: dict[PartitionId, tuple[str, int]] = {}
        self.asked = 0

    def generation_of(self, partition: PartitionId, incarnation: str) -> int:
        self.asked += 1
        last, count = self.known.get(partition, ("", 0))
        if last != incarnation:
            self.known[partition] = (incarnation, count + 1)
        return self.known[partition][1]


class Bench:
    """A worker at the interface of the observer, with answers set by the test."""

    def __init__(self, name: str, *devices: DeviceId) -> None:
        self.name = name
        self.listed: tuple[DeviceId, ...] | AlloyError = devices
        self.failures: dict[DeviceId, BackendError] = {}
        self.incarnation = "i1"
        self.alive = True
        self.delay_s = 0.0
        self.together = threading.Barrier(1)

    def capabilities(self) -> Capabilities:
        if not self.alive:
            raise WorkerDownError(f"{self.name}: its worker is down")
        return Capabilities(backend=self.name, vendors=(Vendor.AMD,))

    def discover(self) -> tuple[DeviceId, ...]:
        if isinstance(self.listed, AlloyError):
            raise self.listed
        return self.listed

    def observe(self, device: DeviceId, deadline_s: float | None = None) -> Observation:
        self.together.wait(20)
        if device in self.failures:
            raise self.failures[device]
        return Observation(
            device=Device(
                id=device,
                vendor=Vendor.AMD,
                model="m",
                backend=self.name,
                scheme=Scheme.MODES,
                slices=8,
                slice_name="XCD",
            ),
            partitions=(
                Partition(
                    id=PartitionId(f"{device}/cpx@0"),
                    device=device,
                    profile="cpx",
                    placement=Placement(start=0, size=1),
                    incarnation=self.incarnation,
                ),
            ),
        )

    def state(self) -> WorkerState:
        return WorkerState(backend=self.name, alive=self.alive, reason="" if self.alive else "died")


class BenchAtOnce(Bench):
    """The same, asked for all devices at once."""

    def observe_many(
        self, devices: Iterable[DeviceId], deadline_s: float | None = None
    ) -> dict[DeviceId, Observation | BackendError]:
        return {d: self.failures.get(d) or self.observe(d, deadline_s) for d in devices}


@pytest.fixture(params=[Bench, BenchAtOnce])
def bench(request: pytest.FixtureRequest) -> Bench:
    made = request.param("amd", A, B)
    assert isinstance(made, Bench)
    return made


def test_a_snapshot_holds_what_the_workers_said(bench: Bench) -> None:
    """Devices, partitions, owners and workers, with boot id, growing sequence and age."""
    other = Bench("cpu", C)
    owner = Owner(name="slurmd", evidence="process 7 slurmd")
    observer = Observer(
        (bench, other),
        Counting(),
        managed=lambda p: p.generation == 1 and p.device == A,
        tenant_of=lambda p: TenantId("t") if p.device == B else None,
        owners=lambda: (owner,),
    )
    assert (observer.latest, observer.age_s()) == (None, None)
    first, second = observer.observe(), observer.observe()
    assert [d.id for d in first.devices] == [A, B, C]
    assert [(p.device, p.generation, p.managed, p.tenant) for p in first.partitions] == [
        (A, 1, True, None),
        (B, 1, False, "t"),
        (C, 1, False, None),
    ]
    assert first.owners == (owner,)
    assert [w.backend for w in first.workers] == ["amd", "cpu"]
    assert (first.sequence, second.sequence) == (1, 2)
    assert first.boot_id == clock.boot_id()
    assert observer.latest is second
    assert 0.0 <= (observer.age_s() or 0.0) < 60.0
    assert first.taken_at_s <= second.taken_at_s <= clock.boottime_s()


def test_a_snapshot_does_not_change(bench: Bench) -> None:
    """Nobody can write into a snapshot."""
    snapshot = Observer((bench,), Counting()).observe()
    with pytest.raises(AttributeError):
        snapshot.devices = ()  # type: ignore[misc]


@pytest.mark.parametrize(
    ("failure", "condition", "kind"),
    [
        (DeviceStalledError("gpu-b: observe"), Condition.STALLED, "probe_stalled"),
        (DeviceLostError("gpu-b: off the bus"), Condition.LOST, "lost"),
        (NotPermittedError("gpu-b: no"), Condition.NOT_PERMITTED, "not_permitted"),
        (BackendError("gpu-b: odd"), Condition.FAILED, "failed"),
        (WorkerDownError("gpu-b: its worker died"), Condition.STALLED, "probe_stalled"),
    ],
)
def test_a_device_that_does_not_answer_is_kept_and_marked(
    bench: Bench, failure: BackendError, condition: Condition, kind: str
) -> None:
    """Its last state stays, under a condition and a fault with the reason; its sibling is well."""
    observer = Observer((bench,), Counting())
    before = observer.observe()
    bench.failures[B] = failure
    after = observer.observe()
    assert after.partitions == before.partitions
    assert after.devices[0] == before.devices[0]
    assert after.devices[1].condition is condition
    assert after.devices[1].condition_reason == str(failure)
    assert [(f.device, f.kind) for f in after.faults] == [(B, kind)]
    del bench.failures[B]
    well = observer.observe()
    assert (well.devices, well.faults) == (before.devices, ())


def test_a_device_that_never_answered_is_listed_all_the_same(bench: Bench) -> None:
    """A device that hangs from the start has a place in the snapshot, with its vendor."""
    bench.failures[A] = DeviceStalledError("gpu-a: observe has not returned")
    snapshot = Observer((bench,), Counting()).observe()
    assert [(d.id, d.vendor, d.condition) for d in snapshot.devices] == [
        (A, Vendor.AMD, Condition.STALLED),
        (B, Vendor.AMD, Condition.OK),
    ]


def test_a_device_missing_from_the_list_is_a_fault(bench: Bench) -> None:
    """A device that was there and is not listed any more is LOST and missing, until it is back."""
    observer = Observer((bench,), Counting())
    observer.observe()
    bench.listed = (B,)
    for _ in range(2):
        gone = observer.observe()
        lost = {d.id: d for d in gone.devices}[A]
        assert lost.condition is Condition.LOST
        assert [(f.device, f.kind) for f in gone.faults] == [(A, "missing")]
    bench.listed = (A, B)
    assert observer.observe().faults == ()
    bench.listed = (B,)
    observer.forget(A)
    assert [d.id for d in observer.observe().devices] == [B]


def test_a_worker_that_is_down_takes_only_its_own_devices(bench: Bench) -> None:
    """Its devices stay listed as stalled with the reason; another backend's are untouched."""
    other = Bench("cpu", C)
    observer = Observer((bench, other), Counting())
    before = observer.observe()
    bench.alive, bench.listed = False, WorkerDownError("amd: its worker is down: died of SIGSEGV")
    after = observer.observe()
    assert [d.condition for d in after.devices] == [
        Condition.STALLED,
        Condition.STALLED,
        Condition.OK,
    ]
    assert "SIGSEGV" in after.devices[0].condition_reason
    assert after.devices[2] == before.devices[2]
    assert after.partitions == before.partitions
    assert not after.workers[0].alive


def test_a_discovery_that_stalls_does_not_hide_devices(bench: Bench) -> None:
    """The list cannot be read, the devices can: they are observed by what is known of them."""
    observer = Observer((bench,), Counting())
    before = observer.observe()
    bench.listed = DeviceStalledError("amd: discover has not returned")
    assert observer.observe().devices == before.devices


def test_a_remade_partition_is_another_generation(bench: Bench) -> None:
    """The same location with another incarnation counts one up; the store is asked for news."""
    counting = Counting()
    observer = Observer((bench,), counting)
    observer.observe()
    asked = counting.asked
    assert [p.generation for p in observer.observe().partitions] == [1, 1]
    assert counting.asked == asked
    bench.incarnation = "i2"
    assert [p.generation for p in observer.observe().partitions] == [2, 2]
    assert [p.generation for p in observer.observe().partitions] == [2, 2]


def test_devices_are_asked_side_by_side() -> None:
    """Two devices that each wait for the other one's call are both observed."""
    bench = Bench("amd", A, B)
    bench.together = threading.Barrier(2)
    assert len(Observer((bench,), Counting()).observe().devices) == 2


def test_workers_are_asked_side_by_side() -> None:
    """Two workers that each wait for the other one's call are both observed."""
    first, second = BenchAtOnce("amd", A), BenchAtOnce("nvidia", B)
    first.together = second.together = threading.Barrier(2)
    assert len(Observer((first, second), Counting()).observe().devices) == 2


def test_observing_from_several_threads_gives_whole_snapshots(bench: Bench) -> None:
    """Concurrent callers take turns: each gets its own sequence, none is lost."""
    observer = Observer((bench,), Counting())
    seen: list[int] = []

    def look() -> None:
        for _ in range(20):
            seen.append(observer.observe().sequence)
            time.sleep(0)

    threads = [threading.Thread(target=look) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(seen) == list(range(1, 81))


def test_no_workers_give_an_empty_snapshot() -> None:
    """A node without any backend is an empty snapshot, not an error."""
    snapshot = Observer((), Counting()).observe()
    assert (snapshot.devices, snapshot.workers) == ((), ())
