"""What the sampler promises: its rate, its pages, and that it lets go of a device."""

from __future__ import annotations

import os
import select
import time
from pathlib import Path
from typing import TYPE_CHECKING

from alloy_agent.model import Create, Destroy, DeviceId, PartitionSpec, Placement, Quality
from alloy_agent.worker.client import Worker, WorkerSettings

from .conftest import wait_for
from .test_faults import DEV, FAST, head, kill, sampled_during

if TYPE_CHECKING:
    from alloy_agent.model import DeviceEvent

    from .conftest import Lab

DEV0 = DEV[0]


def create(device: DeviceId, start: int) -> Create:
    placement = Placement(start=start, size=1)
    spec = PartitionSpec(device=device, profile="1g", size=1, placement=placement)
    return Create(device=device, spec=spec)


def values(worker: Worker) -> int:
    """Return how many signals have a fresh value."""
    return sum(1 for s in worker.signals() if s.quality is Quality.VALUE)


def signals_of(worker: Worker) -> int:
    """Return how many signals the page of the first device has."""
    page = worker.page(DEV0)
    return 0 if page is None else len(page.specs)


def told(worker: Worker, within_s: float) -> bool:
    """Return whether a tick was told of within a while, and forget it."""
    poll = select.poll()
    poll.register(worker.tick_fd, select.POLLIN)
    return bool(poll.poll(within_s * 1000)) and os.eventfd_read(worker.tick_fd) == 1


def test_a_tick_is_told_of_once_and_not_before_it_is_due(lab: Lab) -> None:
    """Whoever waits for a tick hears of the first one that is due, and of no other."""
    worker = lab.worker(devices=2, settings=FAST)
    wait_for(lambda: worker.sampler().ticks > 5, "sampling")
    assert not told(worker, 0.0)
    due_ns = time.monotonic_ns() + 150_000_000
    worker.tell_tick(due_ns)
    assert told(worker, 30.0)
    assert time.monotonic_ns() >= due_ns
    ticks = worker.sampler().ticks
    wait_for(lambda: worker.sampler().ticks > ticks + 5, "more ticks")
    assert not told(worker, 0.0)
    worker.tell_tick(1)
    assert told(worker, 30.0)


def test_every_device_is_sampled_on_every_tick(lab: Lab) -> None:
    """All devices get as many samples as there are ticks, and each signal carries its ages."""
    worker = lab.worker(devices=4, settings=FAST)
    wait_for(lambda: values(worker) == 4 * 2 * 4, "all values fresh")
    before = worker.sampler()
    counts = sampled_during(worker, DEV[:4], 1.0)
    after = worker.sampler()
    ticks = after.ticks - before.ticks
    assert ticks > 10
    assert all(abs(count - ticks) <= 2 for count in counts.values())
    assert after.policy in ("fifo", "nice", "normal")
    assert after.lateness_p99_s is not None
    now_s = time.clock_gettime(time.CLOCK_BOOTTIME)
    for signal in worker.signals():
        if signal.quality is Quality.VALUE:
            assert now_s - 5.0 < signal.read_time_s <= now_s


def test_ticks_and_missed_ticks_account_for_all_time(lab: Lab) -> None:
    """Ticks held and ticks missed add up to the time that went by; none disappears."""
    worker = lab.worker(devices=2, settings=FAST)
    wait_for(lambda: worker.sampler().ticks > 5, "sampling")
    before, began_s = worker.sampler(), time.monotonic()
    time.sleep(1.5)
    after, passed_s = worker.sampler(), time.monotonic() - began_s
    grid = (after.ticks - before.ticks) + (after.missed_ticks - before.missed_ticks)
    assert abs(grid - passed_s * 50.0) <= 5


def test_the_rate_changes_at_run_time_and_a_burst_expires(lab: Lab) -> None:
    """A burst raises the rate for its length; afterwards the old rate holds again."""
    worker = lab.worker(devices=1)
    wait_for(lambda: worker.sampler().ticks, "sampling")
    worker.set_rate(100.0, burst_s=1.0)
    wait_for(lambda: worker.sampler().rate_hz == 100.0, "the burst")
    wait_for(lambda: worker.sampler().rate_hz == 10.0, "the end of the burst")
    worker.set_rate(20.0)
    wait_for(lambda: worker.sampler().rate_hz == 20.0, "the new rate")
    kill(worker)
    wait_for(lambda: worker.sampler().rate_hz == 20.0, "the new rate after a restart")


def test_the_self_budget_lowers_the_rate_and_says_so(lab: Lab) -> None:
    """With hardly any CPU allowed the rate falls, and the state shows both rates."""
    settings = WorkerSettings(rate_hz=100.0, cpu_share_max=0.0001)
    worker = lab.worker(devices=8, pieces=7, settings=settings)
    wait_for(lambda: 0.0 < worker.sampler().rate_hz < 100.0, "a lower rate")
    state = worker.sampler()
    assert state.wanted_rate_hz == 100.0
    assert state.sampler_cpu_ratio > 0.0001


def test_a_changed_geometry_gets_a_new_page(lab: Lab) -> None:
    """After a partition is made or removed its signals appear and go; others are not disturbed."""
    worker = lab.worker(devices=2, settings=FAST)
    wait_for(lambda: len(worker.signals()) == 20, "both devices' signals")
    page = worker.page(DEV0)
    assert page is not None
    epoch, specs = page.epoch, page.specs
    assert len(specs) == 10
    sibling = worker._pages[DEV[1]]
    worker.quiesce(DEV0)
    worker.apply(create(DEV0, 5))
    worker.resume(DEV0)
    wait_for(lambda: signals_of(worker) == 15, "the new piece's signals")
    assert worker.pages()[DEV0].epoch == epoch + 1
    assert worker._pages[DEV[1]] is sibling
    wait_for(lambda: values(worker) == 20, "fresh values of five pieces")


def test_a_page_that_is_held_over_a_change_stays_readable(lab: Lab) -> None:
    """A reader in the middle of the old epoch ends in peace, and sees that it is retired."""
    worker = lab.worker(devices=1, settings=FAST)
    wait_for(lambda: head(worker, DEV0) > 3, "sampling")
    old = worker._pages[DEV0]
    worker.quiesce(DEV0)
    worker.apply(create(DEV0, 5))
    worker.resume(DEV0)
    wait_for(lambda: old.retired, "the old page is retired")
    last = old.newest()
    assert last is not None
    assert len(last.newest().values) == 10


def test_a_foreign_change_of_geometry_is_followed(lab: Lab) -> None:
    """An observation with other pieces than before makes the sampler read its signals anew."""
    worker = lab.worker(devices=1, settings=FAST, sample=True)
    worker.observe(DEV0)
    wait_for(lambda: signals_of(worker) == 10, "signals")
    worker.quiesce(DEV0)
    worker.apply(create(DEV0, 5))
    worker.resume(DEV0)
    made = worker.observe(DEV0).partitions[-1]
    worker.quiesce(DEV0)
    worker.apply(Destroy(device=DEV0, partition=made))
    worker.resume(DEV0)
    worker.observe(DEV0)
    wait_for(lambda: signals_of(worker) == 10, "the piece's signals are gone")


def test_the_sampler_never_keeps_a_change_from_happening(lab: Lab) -> None:
    """Hundreds of changes at 50 Hz: none is refused as in use, siblings keep their rate."""
    worker = lab.worker(devices=3, settings=FAST)
    wait_for(lambda: all(head(worker, d) > 3 for d in DEV[:3]), "sampling")
    before = {d: head(worker, d) for d in DEV[1:3]}
    ticks = worker.sampler().ticks
    for _ in range(200):
        worker.quiesce(DEV0)
        worker.apply(create(DEV0, 6))
        made = worker.observe(DEV0).partitions[-1]
        worker.apply(Destroy(device=DEV0, partition=made))
        worker.resume(DEV0)
    ticks = worker.sampler().ticks - ticks
    worker.quiesce(DEV0)
    (fact,) = worker.facts(DEV0)
    assert fact.value == 0  # no handle left
    assert not (lab.directory / "touched-while-quiet").exists()
    for device in DEV[1:3]:
        assert head(worker, device) - before[device] >= ticks * 0.9


def test_a_quiesced_device_stays_quiet_over_a_restart(lab: Lab) -> None:
    """The worker dies in the middle of a change: its successor does not touch the device."""
    worker = lab.worker(devices=2, settings=FAST)
    wait_for(lambda: all(head(worker, d) > 3 for d in DEV[:2]), "sampling")
    worker.quiesce(DEV0)
    kill(worker)
    wait_for(lambda: worker._pages[DEV[1]].head > 5 and worker.sampler().ticks > 10, "sampling")
    (fact,) = worker.facts(DEV0)
    assert fact.value == 0
    assert not (lab.directory / "touched-while-quiet").exists()
    worker.resume(DEV0)
    wait_for(lambda: worker.facts(DEV0)[0].value == 1, "sampled again")


def test_a_tick_that_finds_the_device_busy_is_made_up(lab: Lab) -> None:
    """Calls take most of the time of a device: it is sampled between them all the same."""
    worker = lab.worker({"dev0.observe": "slow:0.03"}, devices=1, settings=FAST)
    wait_for(lambda: head(worker, DEV0) > 3, "sampling")
    before = head(worker, DEV0)
    for _ in range(20):
        worker.observe(DEV0)
    assert worker.sampler().skipped > 0
    assert head(worker, DEV0) - before >= 15


def test_a_sample_that_fails_costs_its_own_device_only(lab: Lab) -> None:
    """A device whose sample raises is tried less often, and its siblings do not notice."""
    worker = lab.worker({"dev0.sample": "lost"}, devices=3, settings=FAST)
    wait_for(lambda: worker.sampler().errors > 2, "errors")
    before = worker.sampler()
    counts = sampled_during(worker, DEV[:3], 1.0)
    after = worker.sampler()
    ticks = after.ticks - before.ticks
    assert counts["dev0"] == 0
    assert after.errors - before.errors < ticks / 2
    assert min(counts["dev1"], counts["dev2"]) >= ticks * 0.9


def test_events_are_pushed_in_order_and_a_storm_is_counted_to_the_last(lab: Lab) -> None:
    """Ten thousand events at once: what comes is in order, and the rest is counted as dropped."""
    heard: list[DeviceEvent] = []
    worker = lab.worker(devices=1, storm=10_000, on_event=heard.append)
    wait_for(lambda: len(heard) + worker.events_dropped() >= 10_000, "all events accounted for")
    codes = [int(e.code.removeprefix("xid:")) for e in heard]
    assert codes == sorted(codes)
    assert len(heard) + worker.events_dropped() == 10_000
    assert [e.code for e in worker.events()] == [e.code for e in heard]
    assert worker.events() == ()


def test_a_callback_that_fails_does_not_stop_the_events(lab: Lab) -> None:
    """A listener that raises on the first event still gets the others."""
    heard: list[DeviceEvent] = []

    def listen(event: DeviceEvent) -> None:
        heard.append(event)
        if len(heard) == 1:
            raise RuntimeError("listener")

    lab.worker(devices=1, storm=3, on_event=listen)
    wait_for(lambda: len(heard) == 3, "all events")


def test_a_sample_that_burns_cpu_loses_its_real_time_priority(lab: Lab) -> None:
    """A library that spins under real-time scheduling is demoted, not killed, and says so."""
    worker = lab.worker({"dev0.sample": "burn:2000000"}, devices=2, settings=FAST)
    wait_for(lambda: worker.sampler().policy == "normal", "ordinary scheduling")
    wait_for(lambda: head(worker, DEV[1]) > 20, "the sibling is sampled")
    assert worker.state().restarts == 0


def test_without_a_sampler_nothing_is_sampled(lab: Lab) -> None:
    """A worker for one command has no pages and no deadline thread."""
    worker = lab.worker(devices=2, sample=False)
    worker.observe_many(worker.discover())
    assert worker.signals() == ()
    assert worker.sampler().policy == "not sampling"
    pid = worker.state().pid
    tasks = Path(f"/proc/{pid}/task").iterdir()
    names = {(task / "comm").read_text().strip() for task in tasks}
    assert "sampler" not in names
