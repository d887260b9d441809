"""Drains: their scope, what they take down, and sessions that are stale."""

from __future__ import annotations

import msgspec
import pytest

from alloy_agent.errors import ConfigError, StaleTokenError
from alloy_agent.model import Scope
from alloy_agent.telemetry import drains
from tests.telemetry.world import device, piece, snapshot

NODE = snapshot(
    piece("GPU-0/1g@0"),
    piece("GPU-0/1g@1", tenant=None),
    piece("GPU-1/1g@0", tenant="bolt"),
    devices=(device(hive="h"), device("GPU-1", hive="h"), device("GPU-2")),
)


@pytest.mark.parametrize(
    ("subject", "scope", "takes"),
    [
        ("", Scope.NODE, ("GPU-0/1g@0 (tenant acme)", "GPU-0/1g@1", "GPU-1/1g@0 (tenant bolt)")),
        ("GPU-0", Scope.DEVICE, ("GPU-0/1g@0 (tenant acme)", "GPU-0/1g@1")),
        ("h", Scope.HIVE, ("GPU-0/1g@0 (tenant acme)", "GPU-0/1g@1", "GPU-1/1g@0 (tenant bolt)")),
        ("GPU-0/1g@1", Scope.PARTITION, ("GPU-0/1g@1",)),
        ("GPU-2", Scope.DEVICE, ()),
    ],
)
def test_a_drain_names_its_scope_and_what_it_takes(
    subject: str, scope: Scope, takes: tuple[str, ...]
) -> None:
    """Partition, device, hive and node: each with the partitions and tenants that it reaches."""
    _, made = drains.drained((), subject, "s1", "work", NODE, 5.0)
    assert (made.scope, made.takes) == (scope, takes)


def test_a_drain_reaches_down_and_not_up_or_sideways() -> None:
    """A drained device closes its partitions; a drained partition leaves its device open."""
    held, _ = drains.drained((), "GPU-0", "s1", "work", NODE, 5.0)
    assert drains.why(held, "GPU-0/1g@1", NODE)
    assert not drains.why(held, "GPU-1/1g@0", NODE)
    held, _ = drains.drained((), "GPU-0/1g@0", "s1", "work", NODE, 5.0)
    assert not drains.why(held, "GPU-0", NODE)
    assert not drains.why(held, "GPU-0/1g@1", NODE)
    held, _ = drains.drained((), "h", "s1", "work", NODE, 5.0)
    assert drains.why(held, "GPU-1", NODE)
    assert not drains.why(held, "GPU-2", NODE)


def test_sessions() -> None:
    """The same again is nothing; another session can neither drain nor take back."""
    held, made = drains.drained((), "GPU-0", "s1", "work", NODE, 5.0)
    assert drains.drained(held, "GPU-0", "s1", "work", NODE, 9.0) == (held, made)
    with pytest.raises(StaleTokenError):
        drains.drained(held, "GPU-0", "s2", "work", NODE, 9.0)
    with pytest.raises(StaleTokenError):
        drains.undrained(held, "GPU-0", "s0")
    assert drains.undrained(held, "GPU-0", "s1") == ((), made)
    assert drains.undrained((), "GPU-0", "s1") == ((), None)


def test_what_is_not_there_cannot_be_drained() -> None:
    """An unknown subject is refused by name."""
    with pytest.raises(ConfigError, match="GPU-9"):
        drains.drained((), "GPU-9", "", "", NODE, 5.0)


def test_a_drain_ends_when_its_time_is_over() -> None:
    """For ten seconds: held before, gone after; said again without a time it holds for good."""
    held, made = drains.drained((), "GPU-0", "s1", "work", NODE, 5.0, 10.0)
    assert made.until_s == 15.0
    assert drains.lapsed(held, 14.9) == (held, ())
    assert drains.lapsed(held, 15.0) == ((), (made,))
    held, longer = drains.drained(held, "GPU-0", "s1", "work", NODE, 9.0, 10.0)
    assert (longer.until_s, longer.key) == (19.0, made.key)
    held, lasting = drains.drained(held, "GPU-0", "s1", "work", NODE, 10.0)
    assert lasting.until_s == 0.0
    assert drains.lapsed(held, 1e9) == (held, ())


@pytest.mark.parametrize(("asleep_s", "left_s"), [(60.0, 540.0), (3600.0, 0.0), (-50.0, 650.0)])
def test_over_a_boot_a_drain_ends_by_the_wall_clock(asleep_s: float, left_s: float) -> None:
    """The boot clock begins anew; what is left is what the wall clock says, never less than 0."""
    held, made = drains.drained((), "GPU-0", "s1", "work", NODE, 5.0, 600.0)
    lasting, _ = drains.drained((), "", "s2", "work", NODE, 5.0)
    wall_s = made.until_wall_s - 600.0 + asleep_s
    moved, untouched = drains.over_boot((*held, *lasting), 2.0, wall_s)
    assert moved.until_s == pytest.approx(2.0 + left_s)
    assert untouched == lasting[0]


def test_what_a_drain_reaches_now() -> None:
    """Devices and partitions of now, for those who are told by subject."""
    for subject, reached in (
        ("GPU-0", {"GPU-0", "GPU-0/1g@0", "GPU-0/1g@1"}),
        ("GPU-1/1g@0", {"GPU-1/1g@0"}),
        ("h", {"GPU-0", "GPU-1", "GPU-0/1g@0", "GPU-0/1g@1", "GPU-1/1g@0"}),
        ("", {"GPU-0", "GPU-1", "GPU-2", "GPU-0/1g@0", "GPU-0/1g@1", "GPU-1/1g@0"}),
    ):
        (made,), _ = drains.drained((), subject, "s1", "work", NODE, 5.0)
        assert set(drains.reached_by(made, NODE)) == reached


def test_what_the_store_keeps_is_read_without_the_rest_of_telemetry() -> None:
    """Drains hold as they were kept, less those that have ended; what cannot be read is none."""
    held, _ = drains.drained((), "GPU-0", "s1", "work", NODE, 5.0, 600.0)
    held, _ = drains.drained(held, "", "s2", "work", NODE, 5.0)
    book = {"health": {"saved": {"boot_id": "b", "now_s": 5.0, "wall_s": 1.0}}, "drains": held}
    text = msgspec.json.encode(book).decode()
    assert drains.kept(text, "b", 6.0, 2.0) == held
    assert drains.kept(text, "b", 606.0, 602.0) == held[1:]
    for damaged in (None, "", "{}", "no json"):
        assert drains.kept(damaged, "b", 6.0, 2.0) == ()


def test_a_drain_is_named_as_a_device_is() -> None:
    """A beginning that is unique is enough; what is drained outlasts its subject."""
    held, made = drains.drained((), "GPU-0/1g@1", "s1", "work", NODE, 5.0)
    gone = snapshot(piece("GPU-1/1g@0"), devices=(device("GPU-1"),))
    assert drains.meant("undrain", held, "GPU-0/1g@1", gone) == made.subject
    assert drains.meant("undrain", held, "GPU-1/1", gone) == "GPU-1/1g@0"
    with pytest.raises(ConfigError, match="undrain nope: no device, partition or hive"):
        drains.meant("undrain", held, "nope", gone)
