"""The outbox: nothing is lost, findings least of all, and memory and disk stay bounded."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest
from msgspec.structs import replace

from alloy_agent.proto import agent_pb2 as pb
from alloy_agent.store import OutboxRow, Store
from alloy_agent.uplink.outbox import Outbox


def event(kind: str, text: str) -> pb.AgentMessage:
    if kind == "finding":
        return pb.AgentMessage(finding=pb.Finding(check=text))
    if kind == "usage":
        return pb.AgentMessage(usage=pb.Usage(tenant=text))
    return pb.AgentMessage(health=pb.Health(device=text))


def kinds(outbox: Outbox) -> list[str]:
    found: list[str] = []
    after = 0
    while page := outbox.pending(after):
        found += [str(message.WhichOneof("body")) for message in page]
        after = page[-1].sequence
    return found


def test_events_survive_a_restart_in_order(tmp_path: Path) -> None:
    """What was added is there after a restart, under the same epoch and sequences."""
    with_store = Store.open(tmp_path)
    outbox = Outbox(with_store, "n", "boot-a", 100)
    for number in range(5):
        outbox.add(event("finding", str(number)))
    outbox.acknowledge(2)
    epoch = outbox.epoch
    with_store.close()
    again = Store.open(tmp_path)
    outbox = Outbox(again, "n", "boot-a", 100)
    assert outbox.epoch == epoch
    assert [message.sequence for message in outbox.pending(0)] == [3, 4, 5]
    assert [message.finding.check for message in outbox.pending(3)] == ["3", "4"]
    assert outbox.last_sequence == 5
    assert outbox.add(event("finding", "5")) == 6
    again.close()


def test_sequence_goes_on_when_all_was_acknowledged(tmp_path: Path) -> None:
    """An empty outbox does not count from one again."""
    store = Store.open(tmp_path)
    outbox = Outbox(store, "n", "boot-a", 100)
    outbox.add(event("finding", "a"))
    outbox.acknowledge(1)
    store.close()
    store = Store.open(tmp_path)
    outbox = Outbox(store, "n", "boot-a", 100)
    assert outbox.last_sequence == 1
    assert outbox.add(event("finding", "b")) == 2
    store.close()


def test_lost_state_begins_a_new_epoch(tmp_path: Path) -> None:
    """Without its state file the node counts from one again, under an epoch never used before."""
    first = Store.open(tmp_path / "a")
    second = Store.open(tmp_path / "b")
    one, two = Outbox(first, "n", "boot", 10), Outbox(second, "n", "boot", 10)
    assert one.epoch != two.epoch
    first.close()
    second.close()


def test_state_that_went_back_begins_a_new_epoch(tmp_path: Path) -> None:
    """When a brain has more than was ever given here, sequences are not used twice."""
    store = Store.open(tmp_path)
    outbox = Outbox(store, "n", "boot-a", 100)
    outbox.add(event("finding", "a"))
    before = outbox.epoch
    outbox.resume(17)
    assert outbox.epoch > before
    assert outbox.waiting == 1
    assert Outbox(store, "n", "boot-a", 100).epoch == outbox.epoch
    store.close()


def test_a_full_outbox_drops_usage_first_and_findings_never(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """At its bound usage goes, at twice the bound all that is no finding; counted and said."""
    store = Store.open(tmp_path)
    outbox = Outbox(store, "n", "boot-a", 20)
    for number in range(10):
        outbox.add(event("usage", str(number)))
        outbox.add(event("finding", str(number)))
    for number in range(10):
        outbox.add(event("health", str(number)))
    assert kinds(outbox).count("finding") == 10
    assert kinds(outbox).count("health") == 10
    assert kinds(outbox).count("usage") == 0
    assert outbox.notice(0).full
    for number in range(100):
        outbox.add(event("finding", f"more {number}"))
    assert kinds(outbox).count("finding") == 110
    assert kinds(outbox).count("health") == 0
    assert outbox.dropped == 20
    assert [record.message for record in caplog.records].count("outbox_full") == 1
    notice = outbox.notice(telemetry_dropped=3)
    assert notice.full
    assert (notice.events_dropped, notice.telemetry_dropped) == (20, 3)
    outbox.acknowledge(outbox.last_sequence)
    assert not outbox.notice(0).full
    store.close()


def test_a_day_of_events_takes_no_memory(tmp_path: Path) -> None:
    """Thousands of waiting events live on disk: memory does not grow with them."""
    store = Store.open(tmp_path)
    outbox = Outbox(store, "n", "boot-a", 100_000)
    for number in range(300):
        outbox.add(event("finding", f"{number}" + "x" * 1000))
    tracemalloc.start()
    for number in range(600):
        outbox.add(event("finding", f"{number}" + "x" * 1000))
    grown, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert outbox.waiting == 900
    assert grown < 200_000
    store.close()


def test_ages_of_this_boot_are_by_its_clock(tmp_path: Path) -> None:
    """An event of this boot ages on the boot clock, one of an earlier boot by the wall's."""
    store = Store.open(tmp_path)
    outbox = Outbox(store, "n", "boot-a", 100)
    outbox.add(event("finding", "old"))
    later = Outbox(store, "n", "boot-b", 100)
    later.add(event("finding", "new"))
    old, new = later.pending(0)
    assert (old.finding.check, new.finding.check) == ("old", "new")
    assert 0 <= new.event_age_ms < 60_000
    assert 0 <= old.event_age_ms < 60_000
    store.close()


def test_wall_clock_steps_do_not_age_events(tmp_path: Path) -> None:
    """A step of the wall clock by hours changes no age of this boot."""
    store = Store.open(tmp_path)
    outbox = Outbox(store, "n", "boot-a", 100)
    outbox.add(event("finding", "a"))
    (row,) = store.outbox_pending()

    class Stepped:
        def outbox_pending(self, after: int = 0, limit: int = 256) -> tuple[OutboxRow, ...]:
            stepped = replace(row, time_wall_s=row.time_wall_s - 36_000)
            return (stepped,) if after < row.sequence and limit else ()

    outbox._store = Stepped()  # type: ignore[assignment]
    (message,) = outbox.pending(0)
    assert message.event_age_ms < 60_000
    store.close()


def test_an_event_needs_a_body(tmp_path: Path) -> None:
    """An empty message is a mistake of the caller and takes no sequence."""
    store = Store.open(tmp_path)
    outbox = Outbox(store, "n", "boot-a", 100)
    with pytest.raises(ValueError, match="body"):
        outbox.add(pb.AgentMessage())
    assert outbox.last_sequence == 0
    store.close()
