"""From judgements to a tier: the highest one whose required checks all pass now."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from alloy_agent.conformance.checks.base import VACANT, Check
from alloy_agent.model import (
    TIER_ORDER,
    Device,
    Judgement,
    ModeKind,
    Partition,
    Scheme,
    Share,
    Tier,
    TierLimit,
    Vendor,
    Verdict,
)

CAPPED_SHARE = "shared-capped"
BEST = "the best that this kind of piece can be: "


def ways(partition: Partition, device: Device) -> tuple[str, ...]:
    """Return the names under which a device states its limit for such a piece, best first."""
    if partition.share is not Share.EXCLUSIVE:
        capped = partition.memory_bytes is not None
        return (CAPPED_SHARE, "shared") if capped else ("shared",)
    whole = ("whole",) if partition.placement.size == device.slices else ()
    if device.vendor is Vendor.CPU:
        return ("cores",)
    if device.scheme is Scheme.INSTANCES:
        on = {m.current for m in device.modes if m.kind is ModeKind.MIG}
        return ("whole",) if on == {"off"} else ("mig",)
    if device.scheme is Scheme.MODES:
        modes = {m.kind: m.current.lower() for m in device.modes}
        compute, memory = modes.get(ModeKind.COMPUTE, ""), modes.get(ModeKind.MEMORY, "")
        return (*whole, f"{compute}/{memory}", compute, "cpx")
    if device.scheme is Scheme.CORES:
        return (*whole, "cores")
    return ("whole",)


def limit_of(partition: Partition, device: Device) -> TierLimit:
    """Return the best tier that this way of cutting reaches; advisory where none is stated."""
    stated = {limit.way: limit for limit in device.tier_limits}
    names = ways(partition, device)
    for name in names:
        if name in stated:
            return _interleaved(stated[name], partition, device)
    return TierLimit(
        way=names[0], tier=Tier.ADVISORY, reason=f"no limit is stated for {names[0]!r} pieces"
    )


def _interleaved(limit: TierLimit, partition: Partition, device: Device) -> TierLimit:
    """Return the limit, lowered where several pieces interleave over the whole memory (NPS1)."""
    memory = {m.current for m in device.modes if m.kind is ModeKind.MEMORY}
    if (
        limit.tier is not Tier.HARD
        or memory != {"NPS1"}
        or partition.placement.size == device.slices
    ):
        return limit
    return TierLimit(
        way=limit.way,
        tier=Tier.ENFORCED,
        reason="with NPS1 every piece interleaves over all of the memory, so bandwidth is shared",
    )


def within(tier: Tier, limit: Tier) -> bool:
    """Whether a tier is no stronger than a limit."""
    return TIER_ORDER.index(tier) >= TIER_ORDER.index(limit)


def reachable(check: Check, limit: Tier) -> bool:
    """Whether a check is evidence for any tier (but advisory) that the limit leaves open."""
    return any(within(tier, limit) for tier in check.supports)


def tier_of(
    checks: Iterable[Check], judgements: Sequence[Judgement], limit: TierLimit
) -> tuple[Tier, str]:
    """Return the tier and why it is no better; without a passing proof no tier is reached.

    A share whose memory is capped is more than soft only where it is soft: a cap on memory alone
    says nothing of its compute.
    """
    verdicts = {judgement.check: judgement for judgement in judgements}
    table = tuple(checks)
    proving = {check.id for check in table if check.proves}
    obstacle = ""
    for tier in TIER_ORDER:
        if tier is Tier.ADVISORY or not within(tier, limit.tier):
            continue
        tiers = {tier, Tier.SOFT} if limit.way == CAPPED_SHARE else {tier}
        required = [check.id for check in table if tiers & set(check.required_for)]
        held = [verdicts[ident] for ident in required if ident in verdicts]
        broken = [j for j in held if j.verdict in {Verdict.FAIL, Verdict.UNKNOWN}]
        proofs = [j for j in held if j.verdict is Verdict.PASS and j.check in proving]
        if not broken and proofs:
            return tier, (obstacle or f"{BEST}{limit.reason}") + _later(held)
        if not obstacle:
            obstacle = f"not {tier.value}: {_why(broken, held)}"
    return Tier.ADVISORY, obstacle or f"nothing is in force: {limit.reason}"


def _later(held: Sequence[Judgement]) -> str:
    """Return what of a tier is judged only when a tenant enters; "" where nothing waits."""
    waiting = _waiting(held)
    return f"; {waiting}: {VACANT}" if waiting else ""


def _waiting(held: Sequence[Judgement]) -> str:
    return ", ".join(sorted(j.check for j in held if j.reason == VACANT))


def _why(broken: Sequence[Judgement], held: Sequence[Judgement]) -> str:
    if not broken:
        waiting = _waiting(held)
        if waiting:  # shares: all that could prove something is about a tenant
            return f"nothing is claimed yet; {waiting}: {VACANT}"
        return "no check gives proof of it"
    worst = sorted(broken, key=lambda j: (j.verdict is not Verdict.FAIL, j.check))
    first = worst[0]
    word = "fails" if first.verdict is Verdict.FAIL else "is unknown"
    detail = first.reason or first.observed
    others = f" (also {', '.join(j.check for j in worst[1:])})" if len(worst) > 1 else ""
    return f"{first.check} {word}: {detail}{others}"
