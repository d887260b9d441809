"""CU-*, KFD-01 and CPX-05: CU masks, processes of nobody, and clean partitions, on AMD devices.

A CU mask is soft, always: the environment is in the tenant's hands, and there are four ways out
(not set, malformed, skipped at start, or a queue made past the runtime). What is looked at from
outside can only show that a mask was left, or fail to show it; it never makes a share more than
soft.
"""

from __future__ import annotations

from alloy_agent.conformance.checks.base import (
    ENFORCED,
    Case,
    Check,
    Need,
    Outcome,
    counted,
    failed,
    named,
    not_applicable,
    passed,
)
from alloy_agent.conformance.checks.shapes import AmdFact, ClientFact, MaskFact, MaskPlanFact
from alloy_agent.model import Device, Partition, Scheme, Share, Tier, Vendor, Verdict

SOFT = (Tier.SOFT,)
# A word of a mask in which every CU is let in. Source: kernel v9_mqd, as set when it is made.
UNMASKED = 0xFFFFFFFF


def _share(partition: Partition, device: Device) -> bool:
    return device.vendor is Vendor.AMD and partition.share is not Share.EXCLUSIVE


def _masked(partition: Partition, device: Device) -> bool:
    return _share(partition, device) and bool(partition.locator.get("cu_mask"))


def _piece(partition: Partition, device: Device) -> bool:
    return device.vendor is Vendor.AMD and partition.share is Share.EXCLUSIVE


def _who(mask: MaskFact) -> str:
    return f"{mask.comm or 'process'}[{mask.pid}]"


def _unmasked(mask: MaskFact) -> bool:
    """Return whether some queue's row lets in every CU."""
    return any(set(row) == {UNMASKED} for row in mask.words or ())


def _configured(case: Case) -> Outcome:
    masks = case.get("amd.cu_masks", tuple[MaskFact, ...])
    expected = "each process has the mask it was granted, and no queue is without one"
    broken = [f"{_who(mask)}: {mask.problem}" for mask in masks if mask.problem]
    broken += [f"{_who(mask)}: a queue lets in every CU" for mask in masks if _unmasked(mask)]
    if broken:
        return failed(expected, named(broken), "the tenant has left its mask")
    unread = [_who(mask) for mask in masks if mask.configured is None]
    if unread:
        reason = f"the environment of {named(unread)} cannot be read"
        return Outcome(verdict=Verdict.UNKNOWN, expected=expected, reason=reason)
    return passed(expected, counted(len(masks), "process", "processes"))


def _in_force(case: Case) -> Outcome:
    masks = case.get("amd.cu_masks", tuple[MaskFact, ...])
    expected = "every queue's descriptor holds a mask"
    open_queues = [_who(mask) for mask in masks if _unmasked(mask)]
    if open_queues:
        return failed(expected, f"{named(open_queues)}: a queue lets in every CU")
    dark = [mask for mask in masks if mask.words is None]
    if dark:
        return Outcome(verdict=Verdict.UNKNOWN, expected=expected, reason=dark[0].words_reason)
    rows = sum(len(mask.words or ()) for mask in masks)
    return passed(expected, counted(rows, "descriptor", "descriptors"))


def _occupancy(case: Case) -> Outcome:
    masks = case.get("amd.cu_masks", tuple[MaskFact, ...])
    expected = "no process has work on more CUs than it was granted"
    over = [
        f"{_who(mask)} on {mask.occupancy_cus} of {mask.granted_cus}"
        for mask in masks
        if mask.granted_cus and (mask.occupancy_cus or 0) > mask.granted_cus
    ]
    if over:
        reason = f"{named(over)} at one moment, estimated from the first XCC; seen often, it is out"
        return Outcome(verdict=Verdict.UNKNOWN, expected=expected, reason=reason)
    told = [mask for mask in masks if mask.occupancy_cus is not None]
    return passed(expected, f"{counted(len(told), 'process', 'processes')} within", "a witness")


def _apart(case: Case) -> Outcome:
    plan = case.get("amd.cu_plan", MaskPlanFact)
    expected = "no CU is in two shares' masks"
    if plan.overlaps:
        return failed(expected, f"CUs in common with {named(plan.overlaps)}")
    return passed(expected, f"{plan.cus} CUs of its own")


def _nobody(case: Case) -> Outcome:
    clients = case.get("device.clients", tuple[ClientFact, ...])
    given = {grant.partition for grant in case.intent.grants}
    here = [c for c in clients if c.partition == case.partition.id and not c.monitor]
    expected = "only tenants who were granted this partition compute on it"
    if here and case.partition.id not in given:
        names = named(f"{c.comm or 'process'}[{c.pid}]" for c in here)
        return failed(expected, names, "the partition was granted to nobody")
    return passed(expected, counted(len(here), "process", "processes"))


def _unsaid(case: Case) -> str:
    return "" if case.intent.grants else "nobody told this agent who was granted what"


def _cut_piece(partition: Partition, device: Device) -> bool:
    return _piece(partition, device) and device.scheme is Scheme.MODES


def _cleaned(case: Case) -> Outcome:
    shown = case.get("amd.partition", AmdFact)
    expected = "cleaned since the device was cut"
    if shown.cleaned is None:
        return not_applicable("the driver cannot clean on demand, so RC-LDS stays open")
    if shown.cleaned:
        return passed(expected, "the cleaner shader ran on it")
    if shown.isolation:
        return failed(expected, "the cleaner shader did not run, or somebody cut the device since")
    return not_applicable("process isolation is not asked for, so RC-LDS stays open")


MASKS = Need(name="amd.cu_masks", shape=tuple[MaskFact, ...])

CHECKS: tuple[Check, ...] = (
    Check(
        id="CU-01",
        claim="Each process of the share runs with the CU mask it was granted.",
        applies=_masked,
        needs=(MASKS,),
        judge=_configured,
        supports=SOFT,
        required_for=SOFT,
    ),
    Check(
        id="CU-02",
        claim="The queues of the share hold a mask, as the kernel shows them.",
        applies=_masked,
        needs=(MASKS,),
        judge=_in_force,
        supports=SOFT,
        required_for=(),
    ),
    Check(
        id="CU-03",
        claim="Processes of the share occupy no more CUs than were granted (a witness).",
        applies=_masked,
        needs=(MASKS,),
        judge=_occupancy,
        supports=SOFT,
        required_for=(),
        proves=False,
        resolution="one moment at each audit",
    ),
    Check(
        id="CU-04",
        claim="The masks of all shares of the device are disjoint.",
        applies=_masked,
        needs=(Need(name="amd.cu_plan", shape=MaskPlanFact),),
        judge=_apart,
        supports=SOFT,
        required_for=SOFT,
        proves=False,
    ),
    Check(
        id="KFD-01",
        claim="No process computes on a partition that was granted to nobody.",
        applies=_piece,
        needs=(Need(name="device.clients", shape=tuple[ClientFact, ...], of="device"),),
        judge=_nobody,
        exempt=_unsaid,
        supports=ENFORCED,
        required_for=ENFORCED,
        proves=False,
    ),
    Check(
        id="CPX-05",
        claim="What a tenant of before left in the partition was cleared when the device was cut.",
        applies=_cut_piece,
        needs=(Need(name="amd.partition", shape=AmdFact),),
        judge=_cleaned,
        proves=False,
        supports=ENFORCED,
        required_for=(),
    ),
)
