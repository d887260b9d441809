"""Real faults of a vendor library: calls that never return, crashes, exits, a kept interpreter."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from alloy_agent.errors import (
    BackendError,
    ConfigError,
    DeviceLostError,
    DeviceStalledError,
    NotPermittedError,
)
from alloy_agent.model import DeviceId, Quality
from alloy_agent.worker.client import Worker, WorkerDownError, WorkerSettings

from .conftest import PATIENCE_S, wait_for

if TYPE_CHECKING:
    from .conftest import Lab

DEV = [DeviceId(f"dev{n}") for n in range(8)]
FAST = WorkerSettings(observe_deadline_s=0.3, backoff_base_s=0.01, rate_hz=50.0)


def head(worker: Worker, device: DeviceId) -> int:
    """Return how often a device was sampled in this epoch."""
    page = worker._pages.get(device)
    return page.head if page is not None else 0


def sampled_during(worker: Worker, devices: list[DeviceId], seconds: float) -> dict[str, int]:
    """Return how many samples each device got in a while."""
    before = {d: head(worker, d) for d in devices}
    time.sleep(seconds)
    return {d: head(worker, d) - before[d] for d in devices}


def kill(worker: Worker, number: int = signal.SIGKILL) -> int:
    """Kill the worker process and return its pid once it has been replaced."""
    pid = worker.state().pid
    assert pid is not None
    os.kill(pid, number)
    wait_for(lambda: worker.state().pid not in (pid, None), "a new worker")
    return pid


# --- a call that never returns ---


def test_a_stalled_device_costs_its_siblings_nothing(lab: Lab) -> None:
    """Device 3 blocks for ever: it is refused at once from then on, its siblings answer."""
    worker = lab.worker({"dev3.observe": "hang"}, devices=8, sample=False)
    with pytest.raises(DeviceStalledError, match=r"dev3.*within 0.3 s"):
        worker.observe(DEV[3])
    began_s = time.monotonic()
    with pytest.raises(DeviceStalledError, match="observe has not returned for"):
        worker.observe(DEV[3], deadline_s=30.0)
    assert time.monotonic() - began_s < 15.0  # refused, not waited for
    answers = worker.observe_many(DEV)
    assert [d for d, a in answers.items() if isinstance(a, BackendError)] == [DEV[3]]
    assert set(worker.stalled()) == {DEV[3]}


def test_a_stuck_device_is_never_entered_again(lab: Lab) -> None:
    """However often it is asked, one call is inside; all other kinds of call are refused too."""
    worker = lab.worker({"dev0.observe": "hang"}, devices=2)
    for _ in range(5):
        with pytest.raises(DeviceStalledError):
            worker.observe(DEV[0])
    with pytest.raises(DeviceStalledError):
        worker.facts(DEV[0])
    assert len(lab.entered("dev0", "observe")) == 1


def test_a_device_that_returns_at_last_is_well_again(lab: Lab) -> None:
    """When the stuck call returns, the next one is answered, and the stall is forgotten."""
    worker = lab.worker({"dev0.observe": "hang_once"}, devices=2)
    with pytest.raises(DeviceStalledError):
        worker.observe(DEV[0])
    lab.free("dev0")

    def well() -> bool:
        try:
            return worker.observe(DEV[0]).device.id == DEV[0]
        except DeviceStalledError:
            return False

    wait_for(well, "the device answers again")
    assert worker.stalled() == {}


def test_a_device_whose_sample_blocks_leaves_its_siblings_their_rate(lab: Lab) -> None:
    """One sample blocks for ever under load; the others go on at the rate, without a gap after."""
    worker = lab.worker({"dev3.sample": "after:0.5:hang"}, devices=8, settings=FAST)
    wait_for(lambda: lab.entered("dev3", "sample"), "sampling")
    wait_for(lambda: worker.sampler().takeovers, "the device is set apart")
    before = worker.sampler()
    counts = sampled_during(worker, DEV, 1.2)
    after = worker.sampler()
    ticks = after.ticks - before.ticks
    assert counts.pop("dev3") == 0
    assert ticks > 0
    assert min(counts.values()) >= ticks * 0.9
    stale = [s for s in worker.signals() if s.spec.subject.startswith("dev3/1g@0")]
    assert {s.quality for s in stale[:4]} == {Quality.STALE}
    with pytest.raises(DeviceStalledError, match="sample has not returned"):
        worker.observe(DEV[3])


def test_a_sample_that_blocks_from_the_start_does_not_block_the_start(lab: Lab) -> None:
    """The very first sample of a device blocks: the others are sampled, all others answer."""
    worker = lab.worker({"dev0.sample": "hang"}, devices=4, settings=FAST)
    wait_for(lambda: all(head(worker, d) > 10 for d in DEV[1:4]), "the siblings are sampled")
    assert set(worker.observe_many(DEV[1:4])) == set(DEV[1:4])


def test_a_slow_device_is_set_apart_and_keeps_being_sampled(lab: Lab) -> None:
    """A sample that takes too long every time costs only its own device samples."""
    worker = lab.worker({"dev1.sample": "slow:0.12"}, devices=4, settings=FAST)
    wait_for(lambda: worker.sampler().takeovers, "set apart")
    before = worker.sampler().ticks
    counts = sampled_during(worker, DEV[:4], 1.2)
    ticks = worker.sampler().ticks - before
    assert counts["dev1"] > 3
    assert min(counts["dev0"], counts["dev2"], counts["dev3"]) >= ticks * 0.9


@pytest.mark.parametrize("call", ["observe", "signal_specs"])
def test_a_stall_is_remembered_over_a_restart_and_blocks_no_start(lab: Lab, call: str) -> None:
    """The worker is killed while a device hangs: the new one serves the others as before."""
    worker = lab.worker({f"dev0.{call}": "hang"}, devices=4)
    worker.discover()
    with pytest.raises(DeviceStalledError):
        worker.observe(DEV[0])
    kill(worker)
    assert set(worker.stalled()) == {DEV[0]}
    answers = worker.observe_many(DEV[1:4], 15.0)  # the start is in it
    assert not [a for a in answers.values() if isinstance(a, BackendError)]
    assert worker.quarantined() == ()


def test_a_discovery_that_hangs_is_an_answer_in_time(lab: Lab) -> None:
    """`discover` that never returns is refused at its deadline, and devices still answer."""
    worker = lab.worker({".discover": "hang"}, devices=2)
    assert worker.observe(DEV[0], 15.0).device.id == DEV[0]  # the start is in it
    for _ in range(2):
        with pytest.raises(DeviceStalledError, match="discover"):
            worker.discover(deadline_s=0.2)
    assert worker.observe(DEV[1]).device.id == DEV[1]


def test_a_library_that_hangs_while_it_is_opened_is_killed_and_tried_again(lab: Lab) -> None:
    """Opening never returns: calls end at their deadline, and the worker is replaced."""
    worker = lab.worker({".open": "hang"}, settings=WorkerSettings(open_deadline_s=4.0))
    with pytest.raises(DeviceStalledError, match="opening"):
        worker.observe(DEV[0], deadline_s=0.1)
    wait_for(lambda: worker.state().restarts >= 1, "a restart")
    assert "did not open" in worker.state().reason
    lab.free("")
    wait_for(lambda: _answers(worker), "an answer once the library opens")


def _answers(worker: Worker) -> bool:
    try:
        return bool(worker.discover(deadline_s=0.5))
    except BackendError:
        return False


def test_a_change_that_missed_its_deadline_in_the_queue_is_never_made(lab: Lab) -> None:
    """A step queued behind a stuck call is given up by both sides: it is not made late."""
    from alloy_agent.model import Create, PartitionSpec, Placement

    worker = lab.worker({"dev0.facts": "hang_once"}, devices=1, sample=False)
    step = Create(
        device=DEV[0],
        spec=PartitionSpec(
            device=DEV[0], profile="1g", size=1, placement=Placement(start=6, size=1)
        ),
    )
    worker.discover()
    stuck = worker._begin("facts", DEV[0], 1.0)  # not late yet, so that the step is queued
    wait_for(lambda: lab.entered("dev0", "facts"), "the call is inside")
    with pytest.raises(DeviceStalledError):
        worker.apply(step, deadline_s=0.1)
    lab.free("dev0")
    worker._finish(stuck, 5.0)
    assert len(worker.observe(DEV[0]).partitions) == 2
    assert not (lab.directory / "applied").exists()
    worker.apply(step)
    assert len(worker.observe(DEV[0]).partitions) == 3


# --- a worker that dies ---


def test_a_killed_worker_is_replaced(lab: Lab) -> None:
    """After kill -9 a new process serves the same devices, and nobody is blamed."""
    worker = lab.worker(devices=2)
    worker.discover()
    for _ in range(3):
        kill(worker)
        wait_for(lambda: _answers(worker), "an answer")
    state = worker.state()
    assert (state.alive, state.restarts, state.reason) == (True, 3, "")
    assert worker.quarantined() == ()


def test_a_call_in_flight_learns_of_the_death_at_once(lab: Lab) -> None:
    """The worker is killed inside of a call: the caller gets the reason, not its deadline."""
    worker = lab.worker({"dev0.facts": "hang"}, devices=1)
    worker.discover()
    pending = worker._begin("facts", DEV[0], 60.0)
    wait_for(lambda: lab.entered("dev0", "facts"), "the call is inside")
    kill(worker)
    with pytest.raises(WorkerDownError, match="SIGKILL"):
        worker._finish(pending, 60.0)


@pytest.mark.parametrize("call", ["observe", "sample", "facts"])
def test_a_device_that_crashes_the_library_twice_is_quarantined(lab: Lab, call: str) -> None:
    """A segmentation fault in device 1, twice: it is LOST, the others go on, no third one."""
    worker = lab.worker({f"dev1.{call}": "segv"}, devices=4, settings=FAST)

    def quarantined() -> tuple[DeviceId, ...]:
        with contextlib.suppress(BackendError):
            worker.facts(DEV[1]) if call == "facts" else worker.observe(DEV[1])
        return worker.quarantined()

    assert wait_for(quarantined, "quarantine") == (DEV[1],)
    with pytest.raises(DeviceLostError, match="dev1: worker crashed on it"):
        worker.observe(DEV[1])
    wait_for(lambda: _answers(worker), "a worker that stays up")
    wait_for(lambda: all(head(worker, d) > 3 for d in (DEV[0], DEV[2], DEV[3])), "sampling")
    assert len(lab.entered("dev1", call)) == 2
    assert worker.state().restarts == 2
    answers = worker.observe_many(DEV[:4])
    assert [d for d, a in answers.items() if isinstance(a, BackendError)] == [DEV[1]]


def test_a_crash_is_blamed_on_the_device_that_was_struck(lab: Lab) -> None:
    """While a neighbour is inside of a call too, the trace names the one that crashed."""
    worker = lab.worker({"dev1.facts": "segv", "dev0.facts": "hang"}, devices=2, sample=False)
    worker.discover()
    pending = worker._begin("facts", DEV[0], 60.0)
    wait_for(lambda: lab.entered("dev0", "facts"), "the neighbour is inside")
    with pytest.raises(WorkerDownError, match="SIGSEGV in a call on dev1"):
        worker.facts(DEV[1])
    with pytest.raises(WorkerDownError):
        worker._finish(pending, 60.0)


def test_a_released_device_is_touched_again(lab: Lab) -> None:
    """After quarantine an operator releases the device, and it answers."""
    worker = lab.worker({"dev1.facts": "segv"}, devices=2)
    for _ in range(2):
        wait_for(lambda: _answers(worker), "a worker")
        with pytest.raises(BackendError):
            worker.facts(DEV[1])
    wait_for(worker.quarantined, "quarantine")
    wait_for(lambda: _answers(worker), "a worker")
    worker.release(DEV[1])
    assert worker.observe(DEV[1]).device.id == DEV[1]
    assert worker.quarantined() == ()


def test_a_library_that_exits_the_process_is_found_out(lab: Lab) -> None:
    """A library that calls exit leaves no trace; the device that was inside is quarantined."""
    worker = lab.worker({"dev0.facts": "exit"}, devices=2, sample=False)
    for _ in range(2):
        wait_for(lambda: _answers(worker), "a worker")
        with pytest.raises(WorkerDownError, match="exit code 7"):
            worker.facts(DEV[0])
    assert wait_for(worker.quarantined, "quarantine") == (DEV[0],)


def test_a_library_that_keeps_the_interpreter_is_killed(lab: Lab) -> None:
    """Nothing runs in the worker any more: no sign of life, so it is killed and replaced."""
    settings = WorkerSettings(hang_after_s=1.0, observe_deadline_s=0.3)
    worker = lab.worker({"dev0.facts": "hold"}, devices=2, settings=settings, sample=False)
    worker.discover()
    first = worker.state().pid
    with pytest.raises(BackendError):
        worker.facts(DEV[0], deadline_s=0.2)
    wait_for(lambda: worker.state().pid not in (first, None), "a new worker")
    wait_for(lambda: _answers(worker), "an answer")
    assert not Path(f"/proc/{first}").exists()


def test_a_stopped_process_is_killed_and_replaced(lab: Lab) -> None:
    """SIGSTOP is a hang of the whole process too."""
    worker = lab.worker(devices=1, settings=WorkerSettings(hang_after_s=1.0))
    worker.discover()
    kill(worker, signal.SIGSTOP)
    wait_for(lambda: _answers(worker), "an answer")
    assert worker.quarantined() == ()


def test_a_worker_that_talks_garbage_is_killed_and_replaced(lab: Lab) -> None:
    """What is no frame ends that worker; the next one serves."""
    worker = lab.worker({"dev0.facts": "garbage"}, devices=2, sample=False)
    worker.discover()
    with pytest.raises(WorkerDownError, match="garbage"):
        worker.facts(DEV[0])
    wait_for(lambda: _answers(worker), "an answer")
    assert worker.quarantined() == ()


def test_a_library_that_does_not_open_says_why_and_is_tried_again(lab: Lab) -> None:
    """The failure crosses as itself, on every call, while the worker keeps trying."""
    worker = lab.worker({".open": "refuse"})
    with pytest.raises(NotPermittedError, match="vendored: refused: run as root"):
        worker.discover()
    wait_for(lambda: worker.state().restarts >= 2, "tries")
    with pytest.raises(BackendError):
        worker.observe(DEV[0])


def test_a_worker_does_not_outlive_its_control_process(lab: Lab, tmp_path: Path) -> None:
    """The control process is killed: the worker goes with it, even with a call that hangs."""
    import subprocess
    import sys

    script = f"""
import sys, time
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from tests.worker.conftest import Lab, FACTORY
from pathlib import Path
lab = Lab(Path({str(tmp_path)!r}))
worker = lab.worker({{"dev0.facts": "hold"}}, devices=2)
worker.discover()
print(worker.state().pid, flush=True)
worker._begin("facts", "dev0", 60.0)
time.sleep(60)
"""
    control = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert control.stdout is not None
    pid = int(control.stdout.readline())
    wait_for(lambda: lab.entered("dev0", "facts"), "the library keeps the interpreter")
    control.kill()
    control.wait()
    control.stdout.close()
    wait_for(lambda: not Path(f"/proc/{pid}").exists(), "the worker is gone")


def test_stopping_closes_the_backend(lab: Lab) -> None:
    """A stop lets the backend close, and then nothing of the worker is left."""
    worker = lab.worker(devices=2)
    worker.discover()
    pid = worker.state().pid
    worker.stop()
    assert (lab.directory / "closed").exists()
    assert not Path(f"/proc/{pid}").exists()
    assert not worker.state().alive
    with pytest.raises(WorkerDownError):
        worker.observe(DEV[0])
    worker.start()
    assert worker.observe(DEV[0], PATIENCE_S).device.id == DEV[0]


def test_no_descriptor_is_left_by_restarts(lab: Lab) -> None:
    """Five deaths later the control process holds no more files than before."""
    worker = lab.worker(devices=4, settings=FAST)

    def settled() -> bool:
        return all(head(worker, d) > 0 for d in DEV[:4])

    wait_for(settled, "pages")
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(5):
        kill(worker)
        wait_for(lambda: _answers(worker), "an answer")
    worker.stop()
    after = len(list(Path("/proc/self/fd").iterdir()))
    assert after <= before


# --- failures that are answers ---


def test_failures_cross_as_their_own_class(lab: Lab) -> None:
    """What a backend raises is what the caller catches, with the cure; a bug names itself."""
    worker = lab.worker(
        {"dev0.observe": "lost", "dev1.facts": "refuse", "dev2.observe": "bug"}, sample=False
    )
    with pytest.raises(DeviceLostError, match="dev0: off the bus: reset it"):
        worker.observe(DEV[0])
    with pytest.raises(NotPermittedError, match="run as root"):
        worker.facts(DEV[1])
    with pytest.raises(BackendError, match="observe on dev2: KeyError"):
        worker.observe(DEV[2])
    assert worker.observe(DEV[0 + 3]).device.id == DEV[3]


def test_a_rate_out_of_range_never_reaches_the_worker(lab: Lab) -> None:
    """A rate is refused before anything is started or sent."""
    worker = lab.worker(devices=1)
    with pytest.raises(ConfigError):
        worker.set_rate(1000.0)
    with pytest.raises(ConfigError):
        Worker(worker.spec, WorkerSettings(rate_hz=0.0))
