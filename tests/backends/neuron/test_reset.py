"""Resets of Neuron devices: done and proved, or refused and said why; hangs that become a link."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from alloy_agent.backends.neuron import NeuronBackend
from alloy_agent.backends.neuron import reset as resetting
from alloy_agent.errors import BackendError, DeviceBusyError
from alloy_agent.model import Condition, DeviceEvent, DeviceId
from alloy_agent.telemetry import health
from alloy_agent.telemetry.catalogue import load
from tests.backends.neuron.test_backend import Opened, eventually, grant, numbered
from tests.fakes.neuron import FakeNeuronHost


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every look be a fresh one, and counters be looked at without waiting."""
    for name in ("OBSERVED_AGE_S", "EVIDENCE_AGE_S"):
        monkeypatch.setattr(f"alloy_agent.backends.neuron.backend.{name}", 0.0)
    monkeypatch.setattr("alloy_agent.backends.neuron.events.COUNTERS_S", 0.0)


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Opened]:
    """Make hosts and backends that do not outlive the test."""
    made = Opened(tmp_path)
    yield made
    made.close()


def events_of(backend: NeuronBackend, kind: str) -> list[DeviceEvent]:
    """Return the events of one kind that the next look finds."""
    return [event for event in backend.wait_events(0.0) if event.kind == kind]


def test_a_reset_is_proved_by_counters_and_state(opened: Opened) -> None:
    """Each core counts the reset, the device is ready again, and telemetry is told of it."""
    host = opened.host("trn1.2xlarge")
    backend = opened.backend(host)
    (device,) = backend.discover()
    with host.driver_that_resets():
        backend.reset(device)
    assert backend.observe(device).device.condition is Condition.OK
    (event,) = events_of(backend, "reset")
    assert (event.device, event.code) == (device, "neuron:reset")


def test_a_reset_while_somebody_holds_the_node_is_refused(opened: Opened) -> None:
    """The driver would take the write and do nothing: who holds the device is named instead."""
    host = opened.host("trn1.2xlarge")
    backend = opened.backend(host)
    (device,) = backend.discover()
    partition = grant(backend, device, 0, 2)
    host.enter(partition, 4242)
    before = (host.folder(0) / "reset").stat().st_mtime_ns
    with host.driver_that_resets(), pytest.raises(DeviceBusyError, match="pid 4242"):
        backend.reset(device)
    assert (host.folder(0) / "reset").stat().st_mtime_ns == before
    host.end(4242)
    with host.driver_that_resets():
        backend.reset(device)


def test_the_agents_own_monitor_is_out_of_the_way(opened: Opened) -> None:
    """Its child has nodes open, so it is ended before a reset, and comes back after."""
    host = opened.host("trn1.2xlarge")
    backend = opened.backend(host)
    (device,) = backend.discover()
    assert backend.monitor.start()
    assert eventually(lambda: backend.monitor.health().running)
    with host.driver_that_resets(), backend.monitor.paused():
        assert not backend.monitor.health().running
        backend.reset(device)
        assert not backend.monitor.health().running
    assert eventually(lambda: backend.monitor.health().running)


def test_a_reset_that_the_driver_ignores_is_no_success(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write that nothing follows is told as such, whatever the device's state reads."""
    monkeypatch.setattr(resetting.reset_device, "__kwdefaults__", {
        "starts_within_s": 0.3, "done_within_s": 1.0,
    })  # fmt: skip
    host = opened.host("trn1.2xlarge")
    backend = opened.backend(host)
    (device,) = backend.discover()
    with (
        host.driver_that_resets(silent=True),
        pytest.raises(BackendError, match="did not begin a reset"),
    ):
        backend.reset(device)
    assert not events_of(backend, "reset")


def test_a_reset_that_fails_or_never_ends_says_what_is_left(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed reset leaves a device that takes nobody; both failures tell the way out."""
    monkeypatch.setattr(resetting.reset_device, "__kwdefaults__", {
        "starts_within_s": 20.0, "done_within_s": 0.5,
    })  # fmt: skip
    host = opened.host("trn1.2xlarge")
    backend = opened.backend(host)
    (device,) = backend.discover()
    with (
        host.driver_that_resets(hangs=True),
        pytest.raises(BackendError, match="still resetting") as hung,
    ):
        backend.reset(device)
    assert "modprobe neuron" in hung.value.cure
    monkeypatch.undo()  # from here on the driver may take its time
    with (
        host.driver_that_resets(fails=True),
        pytest.raises(BackendError, match="the reset has failed"),
    ):
        backend.reset(device)
    assert backend.observe(device).device.condition is Condition.FAILED
    assert "reset_required" in {fault.kind for fault in backend.observe(device).faults}


def test_a_driver_without_counters_is_believed_by_its_state(opened: Opened) -> None:
    """Where cores count no resets, the state that was seen in between is the proof."""
    host = opened.host("trn1.2xlarge")
    backend = opened.backend(host)
    (device,) = backend.discover()
    for core in range(2):
        shutil.rmtree(host.core(0, core) / "stats/other_info/reset_req_count")
    with host.driver_that_resets():
        backend.reset(device)
    assert events_of(backend, "reset")


# --- hangs ---------------------------------------------------------------------------------------


def hang(host: FakeNeuronHost, core: int, total: int) -> None:
    """Let a collective on a core not come back."""
    host.set_status(0, core, "hw_collectives_error", total)


def codes(backend: NeuronBackend) -> list[str]:
    """Return the codes of the faults that the next look finds."""
    return [event.code for event in events_of(backend, "fault")]


def test_hangs_under_one_grant_after_another_are_the_links(opened: Opened) -> None:
    """Three hangs within a day under two grants name the link; under one grant they never do."""
    host = opened.host("trn1.32xlarge")
    backend = opened.backend(host)
    device = numbered(backend, 0)
    grant(backend, device, 0, 1)
    grant(backend, device, 1, 1)
    backend.wait_events(0.0)
    for total in range(1, 5):
        hang(host, 0, total)
        assert codes(backend) == ["neuron:hang_on_collectives"]
    hang(host, 1, 1)
    found = codes(backend)
    assert "neuron:link_suspect" in found


def test_a_suspected_link_closes_the_device_and_says_what_to_do(opened: Opened) -> None:
    """In the health fold a hang is the workload's, and a suspected link asks for a replacement."""
    catalogue = load()
    now = health.Now(boot_id="b", now_s=10.0, wall_s=0.0)
    start = health.DeviceHealth(device=DeviceId("d"))
    once = health.fold(
        start, health.Event(code="neuron:hang_on_collectives", time_s=1.0), catalogue, now
    )
    assert once.level is health.Level.OK
    link = health.fold(once, health.Event(code="neuron:link_suspect", time_s=2.0), catalogue, now)
    assert link.level is health.Level.FAILED
    assert link.worst is not None
    assert (link.worst.action, link.worst.scope) == ("replace", "node")


def test_a_repairable_error_asks_for_a_reset_and_ends_with_one(opened: Opened) -> None:
    """Drain when idle and reset: after a reset that was proved, and a quiet minute, it is over."""
    catalogue = load()
    now = health.Now(boot_id="b", now_s=10.0, wall_s=0.0)
    event = health.Event(code="neuron:hbm_repairable", time_s=1.0)
    ill = health.fold(health.DeviceHealth(device=DeviceId("d")), event, catalogue, now)
    assert ill.worst is not None
    assert ill.worst.action == "reset_when_idle"
    assert not ill.worst.closes
    after = health.after_reset(ill, 20.0)
    later = health.Now(boot_id="b", now_s=20.0 + health.VALIDATE_S, wall_s=0.0)
    assert health.tick(after, catalogue, later, well=True).level is health.Level.OK
