"""Who is in a partition: claims, containers and processes joined into occupants. Pure.

A claim says which partition it has and for which pods (by UID) it is reserved; the kubelet says
which containers of a pod got the claim's devices, by names alone; a process's control group says
pod, container, batch job or unit. Names are never trusted to tell two pods apart: the UID comes
from the claim's own reservation, and a pod of the same name has another.

Rules that stay true in here:

* A container that the kubelet does not name for a claim has nothing of it, whatever its pod has.
* What is not known is empty, never guessed.

Source: kubelet pod-resources API v1 (no UIDs in it); `resource.k8s.io/v1` `status.reservedFor`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from alloy_agent.kubernetes.pods import PodDevice, Workload
from alloy_agent.model import Occupant, PartitionId
from alloy_agent.store.claims import ClaimPhase, ClaimPiece, ClaimRecord


def of_workload(workload: Workload) -> Occupant:
    """Return the occupant that a process's control groups name."""
    return Occupant(
        kind=workload.kind,
        pod_uid=workload.pod_uid,
        container_id=workload.container,
        runtime=workload.runtime,
        job=workload.job,
        step=workload.step,
        unit=workload.unit,
    )


def of_claims(
    claims: Iterable[ClaimRecord], containers: Sequence[PodDevice], driver: str
) -> Mapping[PartitionId, tuple[Occupant, ...]]:
    """Return who has each claimed partition, with container names where the kubelet says them."""
    found: dict[PartitionId, list[Occupant]] = {}
    for claim in claims:
        if claim.phase is not ClaimPhase.PREPARED:
            continue
        for piece in claim.pieces:
            if piece.partition is None or piece.admin:
                continue
            found.setdefault(piece.partition, []).extend(
                _of_piece(claim, piece, containers, driver)
            )
    return {partition: tuple(dict.fromkeys(who)) for partition, who in found.items()}


def _of_piece(
    claim: ClaimRecord, piece: ClaimPiece, containers: Sequence[PodDevice], driver: str
) -> list[Occupant]:
    names = dict(zip(claim.pod_names, claim.pods, strict=False))
    told = [
        one
        for one in containers
        if (one.driver, one.namespace, one.claim) == (driver, claim.namespace, claim.name)
        and (one.pool, one.device) == (piece.pool, piece.name)
        and (one.share_id or None) == piece.share_id
        and one.pod in names  # else a pod of an earlier reservation, or one not known yet
    ]
    found = [_occupant(claim, one.pod, names[one.pod], one.container) for one in told]
    seen = {one.pod for one in told}
    found += [_occupant(claim, pod, uid, "") for pod, uid in names.items() if pod not in seen]
    if not names:
        found += [_occupant(claim, "", uid, "") for uid in claim.pods] or [
            _occupant(claim, "", "", "")
        ]
    return found


def _occupant(claim: ClaimRecord, pod: str, uid: str, container: str) -> Occupant:
    return Occupant(
        kind="pod",
        namespace=claim.namespace,
        pod=pod,
        pod_uid=uid,
        container=container,
        claim=claim.name,
        claim_uid=claim.uid,
    )
