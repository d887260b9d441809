"""CDI-01: what the containers of a claim have is what its file grants."""

from __future__ import annotations

from alloy_agent.conformance.checks.base import (
    ANY_IN_FORCE,
    Case,
    Check,
    Need,
    Outcome,
    counted,
    failed,
    named,
    passed,
)
from alloy_agent.conformance.checks.shapes import ContainerFact
from alloy_agent.model import Device, Partition, Verdict

CONTAINERS = Need(name="claim.containers", shape=tuple[ContainerFact, ...])


def _claimed(partition: Partition, _device: Device) -> bool:
    return any(one.claim_uid for one in partition.occupants)


def _as_granted(case: Case) -> Outcome:
    containers = case.get("claim.containers", tuple[ContainerFact, ...])
    expected = "exactly the nodes, mounts and variables of its claims, in each container"
    if not containers:
        return Outcome(
            verdict=Verdict.NOT_APPLICABLE, reason="no container of the claim runs on this node"
        )
    wrong = [
        f"container {one.container[:12]} lacks {what}" for one in containers for what in one.less
    ]
    wrong += [
        f"container {one.container[:12]} has {what}" for one in containers for what in one.more
    ]
    if wrong:
        return failed(expected, named(wrong))
    unread = [f"{what} of container {c.container[:12]}" for c in containers for what in c.unread]
    if unread:
        return Outcome(
            verdict=Verdict.UNKNOWN, expected=expected, reason=f"cannot be read: {named(unread)}"
        )
    others = sorted({what for one in containers for what in one.others})
    more = f"; beside them nodes of other drivers: {named(others)}" if others else ""
    return passed(expected, f"{counted(len(containers), 'container', 'containers')}, all so{more}")


CHECKS = (
    Check(
        id="CDI-01",
        claim="The containers of the claim have what its CDI file grants, no more and no less.",
        applies=_claimed,
        needs=(CONTAINERS,),
        judge=_as_granted,
        supports=ANY_IN_FORCE,
        required_for=(),
        proves=False,
    ),
)
