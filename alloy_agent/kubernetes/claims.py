"""What a ResourceClaim says for this driver. Pure; the claim is untrusted input.

Opaque parameters of a class or claim (class first, later entries win):

    apiVersion: alloy.dev/v1
    kind: PartitionConfig
    memoryBytes: 8589934592        # cap of a share
    lossBudgetRatio: 0.02          # what production may lose to opportunistic shares, 0 to 0.5

Source: `resource.k8s.io/v1` ResourceClaim, `status.allocation`.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from alloy_agent.errors import AlloyError
from alloy_agent.model import Value

RESULTS_MAX: Final = 32
CONFIG_KIND: Final = "PartitionConfig"


class ClaimError(AlloyError):
    """The claim cannot be honoured as it is."""


class ClaimRef(Value, frozen=True, kw_only=True):
    """A claim as the kubelet names it."""

    uid: str
    namespace: str
    name: str

    def __str__(self) -> str:
        return f"claim {self.namespace}/{self.name}"


class PartitionConfig(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"
):
    """The opaque parameters that this driver takes."""

    api_version: Literal["alloy.dev/v1"]
    kind: Literal["PartitionConfig"]
    memory_bytes: Annotated[int, Meta(ge=1 << 20, le=1 << 50)] | None = None
    loss_budget_ratio: Annotated[float, Meta(ge=0, le=0.5)] | None = None


class Allocated(Value, frozen=True, kw_only=True):
    """One device that the scheduler gave to the claim."""

    request: str  # the base name, without a sub-request
    pool: str
    device: str
    share_id: str | None = None
    admin: bool = False
    memory_bytes: int | None = None
    loss_budget_ratio: float | None = None


class Allocation(Value, frozen=True, kw_only=True):
    """All that this driver has to make for a claim."""

    ref: ClaimRef
    resource_version: str
    results: tuple[Allocated, ...]
    pods: tuple[str, ...] = ()
    pod_names: tuple[str, ...] = ()


def allocation_of(document: dict[str, Any], ref: ClaimRef, driver: str) -> Allocation:
    """Return what a claim allocates from this driver.

    Raises:
        ClaimError: It is another claim, is not allocated, or makes no sense.
    """
    try:
        return _allocation(document, ref, driver)
    except (AttributeError, KeyError, TypeError) as exc:
        raise ClaimError(
            f"{ref}: the API server's answer is no ResourceClaim ({exc})",
            cure="look at the claim with kubectl get resourceclaim -o yaml",
        ) from exc


def _allocation(document: dict[str, Any], ref: ClaimRef, driver: str) -> Allocation:
    metadata = document["metadata"]
    if metadata.get("uid") != ref.uid:
        raise ClaimError(
            f"{ref}: was replaced, its UID is {metadata.get('uid')} and not {ref.uid}",
            cure="delete the pod; its controller makes another",
        )
    if metadata.get("deletionTimestamp") and not document.get("status", {}).get("reservedFor"):
        raise ClaimError(f"{ref}: is being deleted and reserved for nobody")
    devices = ((document.get("status") or {}).get("allocation") or {}).get("devices")
    if devices is None:
        raise ClaimError(f"{ref}: is not allocated", cure="wait for the scheduler")
    ours = [one for one in devices.get("results") or () if one.get("driver") == driver]
    if not ours:
        raise ClaimError(f"{ref}: allocates nothing from {driver}")
    if len(ours) > RESULTS_MAX:
        raise ClaimError(f"{ref}: {len(ours)} devices, at most {RESULTS_MAX}")
    entries = [
        (one, config_of(one["opaque"].get("parameters"), ref))
        for one in _by_source(devices.get("config") or ())
        if (one.get("opaque") or {}).get("driver") == driver
    ]
    pods = [
        one
        for one in (document.get("status") or {}).get("reservedFor") or ()
        if one.get("resource") == "pods"
    ]
    return Allocation(
        ref=ref,
        resource_version=str(metadata.get("resourceVersion", "")),
        results=tuple(_result(one, entries) for one in ours),
        pods=tuple(str(one["uid"]) for one in pods),
        pod_names=tuple(str(one.get("name", "")) for one in pods),
    )


def _by_source(entries: Any) -> list[dict[str, Any]]:
    return sorted(entries, key=lambda one: one.get("source") != "FromClass")


def _result(
    one: dict[str, Any], entries: list[tuple[dict[str, Any], PartitionConfig]]
) -> Allocated:
    request = str(one["request"])
    memory: int | None = None
    budget: float | None = None
    for entry, config in entries:
        names = entry.get("requests") or ()
        if names and request not in names and request.split("/", maxsplit=1)[0] not in names:
            continue
        memory = memory if config.memory_bytes is None else config.memory_bytes
        budget = budget if config.loss_budget_ratio is None else config.loss_budget_ratio
    share = one.get("shareID")
    return Allocated(
        request=request.split("/", maxsplit=1)[0],
        pool=str(one["pool"]),
        device=str(one["device"]),
        share_id=None if share is None else str(share),
        admin=one.get("adminAccess") is True,
        memory_bytes=memory,
        loss_budget_ratio=budget,
    )


def config_of(parameters: object, ref: ClaimRef | str) -> PartitionConfig:
    """Return opaque parameters, checked.

    Raises:
        ClaimError: Of another kind, with unknown keys, or out of range.
    """
    try:
        return msgspec.convert(parameters, PartitionConfig)
    except msgspec.ValidationError as exc:
        raise ClaimError(
            f"{ref}: its parameters are no {CONFIG_KIND} of alloy.dev/v1: {exc}",
            cure="correct the parameters of the claim or its device class",
        ) from exc
