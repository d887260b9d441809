"""DRV-01, THR-01, MEM-06, MPS-01: each passes, fails and stays unknown on its own evidence."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from alloy_agent.conformance.checks import FactBook, Intent, judge_partition
from alloy_agent.model import (
    Device,
    DeviceId,
    Fact,
    Mode,
    ModeKind,
    Partition,
    PartitionId,
    Placement,
    Scheme,
    Share,
    Snapshot,
    Tier,
    TierLimit,
    Vendor,
    Verdict,
)

GPU = DeviceId("GPU-1")
DEVICE = Device(
    id=GPU,
    vendor=Vendor.NVIDIA,
    model="H100",
    backend="nvidia",
    scheme=Scheme.INSTANCES,
    slices=8,
    slice_name="memory slice",
    modes=(Mode(kind=ModeKind.MIG, current="on", available=("on", "off")),),
    tier_limits=(
        TierLimit(way="mig", tier=Tier.HARD, reason="cut in hardware"),
        TierLimit(way="shared", tier=Tier.SOFT, reason="shared in time"),
    ),
)
OFF = (Mode(kind=ModeKind.MIG, current="off", available=("on", "off")),)


def piece(start: int, share: Share = Share.EXCLUSIVE, memory: int | None = None) -> Partition:
    """Return a piece of the GPU."""
    return Partition(
        id=PartitionId(f"{GPU}/3g.40gb@{start}"),
        device=GPU,
        profile="3g.40gb",
        placement=Placement(start=start, size=4),
        incarnation=f"MIG-{start}",
        share=share,
        memory_bytes=memory,
    )


def verdict(check: str, facts: dict[str, Any], *pieces: Partition, subject: str = GPU) -> Verdict:
    """Return what a check says of the first piece."""
    shared = pieces[0].share is not Share.EXCLUSIVE
    device = msgspec.structs.replace(DEVICE, modes=OFF) if shared else DEVICE
    snapshot = Snapshot(
        boot_id="boot",
        sequence=1,
        taken_at_s=0.0,
        taken_wall_s=0.0,
        devices=(device,),
        partitions=pieces,
    )
    book = FactBook(Fact(subject=subject, name=name, value=value) for name, value in facts.items())
    report = judge_partition(pieces[0], device, snapshot, book, Intent())
    return next(found.verdict for found in report.judgements if found.check == check)


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("580.95.05", Verdict.PASS),
        ("525.53", Verdict.PASS),
        ("525.9", Verdict.FAIL),
        ("470.256.02", Verdict.FAIL),
        ("unknown", Verdict.UNKNOWN),
    ],
)
def test_a_driver_is_compared_number_by_number(version: str, expected: Verdict) -> None:
    """525.9 is older than 525.53; what is no version is unknown."""
    facts = {"driver.version": version, "driver.floor": "525.53"}
    assert verdict("DRV-01", facts, piece(0)) is expected
    assert verdict("DRV-01", {}, piece(0)) is Verdict.UNKNOWN


def test_throttling_matters_beside_a_co_tenant() -> None:
    """Alone nothing is coupled; beside others a throttled GPU proves nothing."""
    held = {"device.throttling": {"reasons": ["power brake"]}}
    free: dict[str, Any] = {"device.throttling": {"reasons": []}}
    assert verdict("THR-01", held, piece(0)) is Verdict.NOT_APPLICABLE
    assert verdict("THR-01", held, piece(0), piece(4)) is Verdict.UNKNOWN
    assert verdict("THR-01", free, piece(0), piece(4)) is Verdict.PASS


@pytest.mark.parametrize(
    ("asked", "told", "own", "expected"),
    [
        (True, 40.0, None, Verdict.PASS),
        (True, 40.0, 30.0, Verdict.PASS),
        (True, 100.0, 30.0, Verdict.UNKNOWN),
        (False, 40.0, None, Verdict.UNKNOWN),
        (False, None, 30.0, Verdict.UNKNOWN),
        (True, 100.0, None, Verdict.FAIL),
        (False, 100.0, None, Verdict.FAIL),
        (False, None, None, Verdict.FAIL),
    ],
)
def test_mps_is_judged_by_value(
    asked: bool, told: float | None, own: float | None, expected: Verdict
) -> None:
    """100 % limits nothing; what only variables of processes say is no proof."""
    facts = {
        "mps.control": {
            "running": True,
            "pid": 9,
            "asked": asked,
            "thread_percentage": told,
            "clients": [{"pid": 20, "thread_percentage": own}],
        }
    }
    assert verdict("MPS-01", facts, piece(0, Share.PRODUCTION)) is expected
    idle = {"mps.control": {"running": False}}
    assert verdict("MPS-01", idle, piece(0, Share.PRODUCTION)) is Verdict.NOT_APPLICABLE


@pytest.mark.parametrize(
    ("limit", "by", "expected"),
    [(8, "driver", Verdict.PASS), (9, "driver", Verdict.FAIL), (None, "none", Verdict.FAIL)],
)
def test_a_shares_cap_is_what_the_driver_has_in_force(
    limit: int | None, by: str, expected: Verdict
) -> None:
    """Another value, or none, is a failure; nothing read is unknown."""
    capped = piece(0, Share.PRODUCTION, memory=8)
    facts = {"partition.memory": {"limit_bytes": limit, "used_bytes": 1, "enforced_by": by}}
    assert verdict("MEM-06", facts, capped, subject=capped.id) is expected
    assert verdict("MEM-06", {}, capped) is Verdict.UNKNOWN
    assert verdict("MEM-06", {}, piece(0, Share.PRODUCTION)) is Verdict.NOT_APPLICABLE
