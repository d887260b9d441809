"""Observer and real workers together: a sick device, a dead worker, a device that vanishes."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

from alloy_agent.model import Condition, DeviceId, PartitionId
from alloy_agent.observer import Observer
from alloy_agent.worker.client import WorkerSettings

from .conftest import wait_for

if TYPE_CHECKING:
    from .conftest import Lab


class Counting:
    """Every incarnation is the first."""

    def generation_of(self, _partition: PartitionId, _incarnation: str) -> int:
        return 1


def test_a_device_that_hangs_is_stalled_in_the_next_snapshot(lab: Lab) -> None:
    """Device 3 of 8 blocks for ever at start: listed as stalled, the other seven as ever."""
    observer = Observer((lab.worker({"dev3.observe": "hang"}, devices=8),), Counting())
    for _ in range(3):
        snapshot = observer.observe()
        sick = [d.id for d in snapshot.devices if d.condition is not Condition.OK]
        assert (sick, len(snapshot.devices)) == (["dev3"], 8)
        assert [f.kind for f in snapshot.faults] == ["probe_stalled"]


def test_a_crashing_device_ends_as_lost(lab: Lab) -> None:
    """A segmentation fault in device 1 twice over: LOST with the reason, siblings OK again."""
    settings = WorkerSettings(observe_deadline_s=0.3, backoff_base_s=0.01)
    worker = lab.worker({"dev1.observe": "segv"}, devices=3, settings=settings, sample=False)
    observer = Observer((worker,), Counting())

    def conditions() -> dict[str, Condition]:
        return {d.id: d.condition for d in observer.observe().devices}

    wanted = {"dev0": Condition.OK, "dev1": Condition.LOST, "dev2": Condition.OK}
    wait_for(lambda: conditions() == wanted, "dev1 is lost and the others are well")
    (lost,) = (d for d in observer.observe().devices if d.id == "dev1")
    assert "worker crashed on it" in lost.condition_reason


def test_a_dead_worker_leaves_another_backend_alone(lab: Lab) -> None:
    """One worker is stopped for good: its devices stay listed, the other worker's are OK."""
    first, second = lab.worker(devices=2), lab.worker(devices=1)
    observer = Observer((first, second), Counting())
    observer.observe()
    first.spec.options["faults"] = {".open": "refuse"}  # holds from its next start on
    pid = first.state().pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not first.state().alive or first.state().restarts > 1, "the worker is down")

    def down() -> bool:
        devices = observer.observe().devices
        return [d.condition is Condition.OK for d in devices] == [False, False, True]

    wait_for(down, "two devices marked, one well")


def test_a_device_that_vanishes_is_missing(lab: Lab) -> None:
    """The driver lists one device less: it is LOST, with a fault of its own kind."""
    worker = lab.worker(devices=2)
    observer = Observer((worker,), Counting())
    observer.observe()
    (lab.directory / "unlisted").write_text("dev1")
    snapshot = observer.observe()
    assert [(f.device, f.kind) for f in snapshot.faults] == [(DeviceId("dev1"), "missing")]
