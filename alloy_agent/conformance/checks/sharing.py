"""Checks of a shared device: RATE-01 and RATE-02 on the rate, BYP-01 to BYP-04 on ways around it.

They read the fact `share.status` of the device (`ShareFact`) and the fact `share.bypass` of the
partition (`BypassFact`), and apply to partitions that share their device. What is undecided stays
unknown; a way around the gate fails the soft tier at once.
"""

from __future__ import annotations

from alloy_agent.conformance.checks.base import (
    Case,
    Check,
    Need,
    Outcome,
    failed,
    named,
    passed,
)
from alloy_agent.conformance.checks.shapes import Shape
from alloy_agent.model import Device, Partition, Share, Tier, Verdict

SOFT = (Tier.SOFT,)
WITNESS_RATIO = 0.05  # Source: docs/rate-control.md, "witness"
WITNESS_FEWEST = 20


class ShareFact(Shape, frozen=True, kw_only=True):
    """How the control loop of a shared device stands."""

    stage: str
    answer: str
    reason: str = ""
    loss_ratio: float | None = None
    lower_ratio: float | None = None
    upper_ratio: float | None = None
    lent_ratio: float = 0.0


class BypassFact(Shape, frozen=True, kw_only=True):
    """What the host shows of one tenant, beside what its page says."""

    page_trouble: str = ""
    launched: int = 0  # by its own page, in the window of the witness
    witnessed: int | None = None  # by the kernel, in the same window
    unmapped_pids: tuple[int, ...] = ()  # device open, interposer not mapped
    static_pids: tuple[int, ...] = ()  # device open, no launch symbol mapped
    frozen: bool = False


STATUS = Need(name="share.status", shape=ShareFact, of="device")
BYPASS = Need(name="share.bypass", shape=BypassFact)


def _shared(partition: Partition, _device: Device) -> bool:
    return partition.share is not Share.EXCLUSIVE


def _lent(partition: Partition, _device: Device) -> bool:
    return partition.share is Share.OPPORTUNISTIC


def _kept(case: Case) -> Outcome:
    fact = case.get("share.status", ShareFact)
    span = (
        "no interval yet"
        if fact.lower_ratio is None or fact.upper_ratio is None
        else f"slowdown {100 * fact.lower_ratio:.2f} to {100 * fact.upper_ratio:.2f} %"
    )
    if fact.answer == "conform":
        return passed("conform", span)
    if fact.answer == "violated":
        return failed("conform", span, fact.reason)
    reason = fact.reason or f"answer {fact.answer!r}"
    return Outcome(verdict=Verdict.UNKNOWN, expected="conform", observed=span, reason=reason)


def _controlled(case: Case) -> Outcome:
    fact = case.get("share.status", ShareFact)
    if fact.stage == "blind":
        return failed("controlling", fact.stage, "production's page cannot be read")
    return passed("controlling, learning or idle", fact.stage)


def _sound_page(case: Case) -> Outcome:
    trouble = case.get("share.bypass", BypassFact).page_trouble
    return failed("a sound page", trouble) if trouble else passed("a sound page", "sound")


def _agrees(case: Case) -> Outcome:
    fact = case.get("share.bypass", BypassFact)
    if fact.witnessed is None:
        return Outcome(verdict=Verdict.UNKNOWN, reason="no kernel witness in this window")
    allowed = max(WITNESS_FEWEST, WITNESS_RATIO * fact.launched)
    seen = f"page {fact.launched}, kernel {fact.witnessed}"
    if abs(fact.witnessed - fact.launched) <= allowed:
        return passed("the same within 5 %", seen)
    return failed("the same within 5 %", seen, "launches go around the gate, or the page lies")


def _mapped(case: Case) -> Outcome:
    pids = case.get("share.bypass", BypassFact).unmapped_pids
    if pids:
        return failed("every process gated", f"not gated: {named(str(p) for p in pids)}")
    return passed("every process gated", "all gated")


def _dynamic(case: Case) -> Outcome:
    pids = case.get("share.bypass", BypassFact).static_pids
    if pids:
        return failed("every process visible", f"no launch symbol: {named(str(p) for p in pids)}")
    return passed("every process visible", "all visible")


CHECKS: tuple[Check, ...] = tuple(
    Check(
        id=ident,
        claim=claim,
        applies=applies,
        needs=(need,),
        judge=judge,
        supports=SOFT,
        required_for=SOFT,
    )
    for ident, claim, applies, need, judge in (
        (
            "RATE-01",
            "Production is no slower beside its neighbours than promised.",
            _shared,
            STATUS,
            _kept,
        ),
        ("RATE-02", "The device's control loop sees production.", _shared, STATUS, _controlled),
        ("BYP-01", "The tenant's page makes sense.", _lent, BYPASS, _sound_page),
        ("BYP-02", "The page and the kernel count the same launches.", _lent, BYPASS, _agrees),
        (
            "BYP-03",
            "Every process with the device open runs beneath the gate.",
            _lent,
            BYPASS,
            _mapped,
        ),
        (
            "BYP-04",
            "Every process with the device open uses a library that can be watched.",
            _lent,
            BYPASS,
            _dynamic,
        ),
    )
)
