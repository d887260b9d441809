"""The checks of shared devices: undecided is unknown, a way around the gate fails at once."""

from __future__ import annotations

from typing import Any

import pytest

from alloy_agent.conformance.checks import sharing
from alloy_agent.conformance.checks.base import Case, FactBook, Intent, run
from alloy_agent.model import (
    Device,
    DeviceId,
    Fact,
    Partition,
    PartitionId,
    Placement,
    Quality,
    Scheme,
    Share,
    Snapshot,
    TenantId,
    Vendor,
    Verdict,
)

DEVICE = Device(
    id=DeviceId("d"),
    vendor=Vendor.NVIDIA,
    model="m",
    backend="fake",
    scheme=Scheme.WHOLE,
    slices=1,
    slice_name="device",
)
PIECE = Partition(
    id=PartitionId("d/shared@0"),
    device=DEVICE.id,
    profile="shared",
    placement=Placement(start=0, size=1),
    incarnation="1",
    share=Share.OPPORTUNISTIC,
    tenant=TenantId("n"),
)
SOUND: dict[str, Any] = {"launched": 1000, "witnessed": 1010}


def verdict(check: str, status: dict[str, Any] | None, bypass: dict[str, Any] | None) -> Verdict:
    facts = [
        Fact(subject=subject, name=name, quality=Quality.VALUE, value=value)
        for subject, name, value in (
            (DEVICE.id, "share.status", status),
            (PIECE.id, "share.bypass", bypass),
        )
        if value is not None
    ]
    snapshot = Snapshot(boot_id="b", sequence=1, taken_at_s=0.0, taken_wall_s=0.0)
    case = Case(partition=PIECE, device=DEVICE, snapshot=snapshot, intent=Intent())
    found = next(c for c in sharing.CHECKS if c.id == check)
    assert found.applies(PIECE, DEVICE)
    return run(found, case, FactBook(facts)).verdict


@pytest.mark.parametrize(
    ("answer", "expected"),
    [("conform", "pass"), ("violated", "fail"), ("undecided", "unknown"), ("odd", "unknown")],
)
def test_an_undecided_audit_never_passes(answer: str, expected: str) -> None:
    """Only conform passes RATE-01."""
    status = {"stage": "controlling", "answer": answer}
    assert verdict("RATE-01", status, None) == Verdict(expected)


def test_a_blind_loop_fails() -> None:
    """A loop that cannot see production is no control."""
    assert verdict("RATE-02", {"stage": "blind", "answer": "undecided"}, None) is Verdict.FAIL
    assert verdict("RATE-02", {"stage": "idle", "answer": "undecided"}, None) is Verdict.PASS


@pytest.mark.parametrize(
    ("check", "change"),
    [
        ("BYP-01", {"page_trouble": "its page makes no sense"}),
        ("BYP-02", {"witnessed": 2000}),
        ("BYP-02", {"witnessed": 0}),
        ("BYP-03", {"unmapped_pids": [7]}),
        ("BYP-04", {"static_pids": [7]}),
        ("BYP-05", {"foreign_pids": [7]}),
    ],
)
def test_each_way_around_the_gate_fails_its_check(check: str, change: dict[str, Any]) -> None:
    """The check passes on a sound tenant, fails on the bypass, is unknown without evidence."""
    assert verdict(check, None, SOUND) is Verdict.PASS
    assert verdict(check, None, {**SOUND, **change}) is Verdict.FAIL
    assert verdict(check, None, None) is Verdict.UNKNOWN


def test_without_a_witness_the_counts_are_unknown() -> None:
    """No kernel count in the window: nobody says that the page is right."""
    assert verdict("BYP-02", None, {"launched": 10}) is Verdict.UNKNOWN
