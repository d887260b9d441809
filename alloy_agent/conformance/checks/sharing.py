"""Checks of a shared device: RATE-01 and RATE-02 on the rate, BYP-01 to BYP-05 on ways around it.

They read the fact `share.status` of the device (`ShareFact`) and the fact `share.bypass` of the
partition (`BypassFact`), and apply to partitions that share their device. What is undecided stays
unknown; a way around the gate fails the soft tier at once, of every share of the device. Where no
control loop keeps a device on which a tenant works, nobody can tell.
"""

from __future__ import annotations

from collections.abc import Callable

from alloy_agent.conformance.checks.base import (
    Case,
    Check,
    Need,
    Outcome,
    failed,
    named,
    not_applicable,
    passed,
)
from alloy_agent.conformance.checks.shapes import Shape
from alloy_agent.model import Device, Partition, Share, Tier, Verdict

SOFT = (Tier.SOFT,)
WITNESS_RATIO = 0.05  # Source: docs/rate-control.md, "witness"
WITNESS_FEWEST = 20
UNKEPT = "unkept"  # stage of a device that no control loop keeps
NO_LOOP = "no control loop keeps this device: start its tenants with `alloy-agent share run`"
NO_WATCH = "nobody watches this tenant: it was not started by `alloy-agent share run`"


class ShareFact(Shape, frozen=True, kw_only=True):
    """How the control loop of a shared device stands."""

    stage: str
    answer: str
    reason: str = ""
    loss_ratio: float | None = None
    lower_ratio: float | None = None
    upper_ratio: float | None = None
    lent_ratio: float = 0.0
    neighbours: int | None = None  # opportunistic tenants
    budget_ratio: float = 0.02
    bypasses: tuple[str, ...] = ()  # ways around the gate that any tenant of the device shows


class BypassFact(Shape, frozen=True, kw_only=True):
    """What the host shows of one tenant, beside what its page says."""

    watched: bool = True
    looking: bool = False  # not watched yet, but will be
    page_trouble: str = ""
    launched: int = 0  # by its own page, in the window of the witness
    witnessed: int | None = None  # by the kernel, in the same window
    witness: str = ""  # how it was counted, or why it could not be
    unmapped_pids: tuple[int, ...] = ()  # device in use, no gate mapped
    foreign_pids: tuple[int, ...] = ()  # device in use, another gate than the agent's mapped
    static_pids: tuple[int, ...] = ()  # device in use, no launch symbol mapped
    frozen: bool = False


STATUS = Need(name="share.status", shape=ShareFact, of="device")
BYPASS = Need(name="share.bypass", shape=BypassFact)


def _shared(partition: Partition, _device: Device) -> bool:
    return partition.share is not Share.EXCLUSIVE


def _lent(partition: Partition, _device: Device) -> bool:
    return partition.share is Share.OPPORTUNISTIC


def _kept(case: Case) -> Outcome:
    fact = case.get("share.status", ShareFact)
    if fact.neighbours == 0:
        return not_applicable("no opportunistic tenant is here")
    promise = f"slowdown of at most {100 * fact.budget_ratio:g} %"
    span = (
        "no interval yet"
        if fact.lower_ratio is None or fact.upper_ratio is None
        else f"slowdown {100 * fact.lower_ratio:.2f} to {100 * fact.upper_ratio:.2f} %"
    )
    if fact.answer == "conform":
        return passed(promise, span)
    if fact.answer == "violated":
        return failed(promise, span, fact.reason)
    reason = fact.reason or f"answer {fact.answer!r}"
    return Outcome(verdict=Verdict.UNKNOWN, expected=promise, observed=span, reason=reason)


def _controlled(case: Case) -> Outcome:
    fact = case.get("share.status", ShareFact)
    if fact.stage == UNKEPT:
        return Outcome(verdict=Verdict.UNKNOWN, expected="a control loop", reason=NO_LOOP)
    if fact.stage == "blind":
        return failed("controlling", fact.stage, "production's page cannot be read")
    if fact.bypasses:
        return failed("every neighbour governed", named(fact.bypasses))
    return passed("controlling, learning or idle", fact.stage)


def _watched(judge: Callable[[BypassFact], Outcome]) -> Callable[[Case], Outcome]:
    """Return a judge of what is watched; a tenant that nobody watches is unknown."""

    def judged(case: Case) -> Outcome:
        fact = case.get("share.bypass", BypassFact)
        if not fact.watched:
            why = "it has just come and was not looked at yet" if fact.looking else NO_WATCH
            return Outcome(verdict=Verdict.UNKNOWN, reason=why)
        return judge(fact)

    return judged


def _sound_page(fact: BypassFact) -> Outcome:
    trouble = fact.page_trouble
    return failed("a sound page", trouble) if trouble else passed("a sound page", "sound")


def _agrees(fact: BypassFact) -> Outcome:
    if fact.witnessed is None:
        reason = fact.witness or "no kernel witness in this window"
        return Outcome(verdict=Verdict.UNKNOWN, reason=reason)
    allowed = max(WITNESS_FEWEST, WITNESS_RATIO * fact.launched)
    if abs(fact.witnessed - fact.launched) <= allowed:
        return passed("the same within 5 %", "the same")
    seen = f"page {fact.launched}, kernel {fact.witnessed}"
    return failed("the same within 5 %", seen, "launches go around the gate, or the page lies")


def _mapped(fact: BypassFact) -> Outcome:
    if fact.unmapped_pids:
        listed = named(str(p) for p in fact.unmapped_pids)
        return failed("every process gated", f"not gated: {listed}")
    return passed("every process gated", "all gated")


def _dynamic(fact: BypassFact) -> Outcome:
    if fact.static_pids:
        listed = named(str(p) for p in fact.static_pids)
        return failed("every process visible", f"no launch symbol: {listed}")
    return passed("every process visible", "all visible")


def _genuine(fact: BypassFact) -> Outcome:
    if fact.foreign_pids:
        listed = named(str(p) for p in fact.foreign_pids)
        return failed("the agent's own gate", f"another library of that name: {listed}")
    return passed("the agent's own gate", "the agent's own")


CHECKS: tuple[Check, ...] = tuple(
    Check(
        id=ident,
        claim=claim,
        applies=applies,
        needs=(need,),
        judge=judge,
        about_tenant=True,
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
        (
            "RATE-02",
            "The device's control loop sees production and governs every neighbour.",
            _shared,
            STATUS,
            _controlled,
        ),
        ("BYP-01", "The tenant's page makes sense.", _lent, BYPASS, _watched(_sound_page)),
        (
            "BYP-02",
            "The page and the kernel count the same launches.",
            _lent,
            BYPASS,
            _watched(_agrees),
        ),
        (
            "BYP-03",
            "Every process with the device open runs beneath the gate.",
            _lent,
            BYPASS,
            _watched(_mapped),
        ),
        (
            "BYP-04",
            "Every process with the device open uses a library that can be watched.",
            _lent,
            BYPASS,
            _watched(_dynamic),
        ),
        (
            "BYP-05",
            "Every process is beneath the agent's own gate.",
            _lent,
            BYPASS,
            _watched(_genuine),
        ),
    )
)
