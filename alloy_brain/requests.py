"""Requests of clients, checked: nonsense is refused with the field and what would do. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from alloy_agent.proto import agent_pb2 as pb
from alloy_agent.proto import placement_pb2 as pl
from alloy_brain.broker import MAX_ATTEMPTS, RESERVE_MS, Order, RefusedError, digest_of
from alloy_brain.facts import Demand, Wish

MAX_NAME = 200
MAX_DEMANDS = 64
MAX_PIECES = 256
MAX_MEMORY = 1 << 50  # 1 PiB: no piece of silicon has it
MAX_UNITS = 1 << 20
MAX_RESERVE_MS = 3_600_000
MAX_LEASE_MS = 10 * 365 * 86_400_000


def order_of(request: pl.PlaceRequest) -> Order:
    """Return the order that a request is.

    Raises:
        RefusedError: INVALID_ARGUMENT, naming the field.
    """
    _check_name("request", request.request, "choose an id; the same again gives the same answer")
    _check_name("tenant", request.tenant, "name who the pieces are for")
    if not 0 < len(request.demands) <= MAX_DEMANDS:
        raise invalid(f"demands: {len(request.demands)}", f"1 to {MAX_DEMANDS} demands")
    demands = tuple(_demand(n, demand) for n, demand in enumerate(request.demands, 1))
    total = sum(demand.count for demand in demands)
    if total > MAX_PIECES:
        raise invalid(f"demands: {total} pieces in one gang", f"at most {MAX_PIECES} pieces")
    _check_enum("tier_floor", request.tier_floor, pb.Tier.values())
    _check_enum("locality", request.locality, pl.Locality.values())
    if not 0 <= request.reserve_ttl_ms <= MAX_RESERVE_MS:
        raise invalid(f"reserve_ttl_ms: {request.reserve_ttl_ms}", f"at most {MAX_RESERVE_MS}")
    if request.lease_ttl_ms > MAX_LEASE_MS:
        raise invalid(f"lease_ttl_ms: {request.lease_ttl_ms}", f"at most {MAX_LEASE_MS}, or 0")
    wish = Wish(
        request=request.request,
        tenant=request.tenant,
        demands=demands,
        tier_floor=int(request.tier_floor),
        locality=int(request.locality),
        labels=dict(request.node_labels),
    )
    times = (request.reserve_ttl_ms, request.lease_ttl_ms, request.reserve_only, request.dry_run)
    return Order(
        wish=wish,
        digest=digest_of(wish, *times),
        reserve_ttl_ms=request.reserve_ttl_ms or RESERVE_MS,
        lease_ttl_ms=request.lease_ttl_ms,
        reserve_only=request.reserve_only,
        dry_run=request.dry_run,
        attempts=min(request.max_attempts or MAX_ATTEMPTS, 32),
    )


def _demand(number: int, demand: pl.Demand) -> Demand:
    where = f"demand {number}"
    if not 0 < demand.count <= MAX_PIECES:
        raise invalid(f"{where}: count {demand.count}", f"a count from 1 to {MAX_PIECES}")
    if demand.memory_bytes > MAX_MEMORY:
        raise invalid(f"{where}: memory_bytes {demand.memory_bytes}", f"at most {MAX_MEMORY}")
    if demand.compute_units > MAX_UNITS:
        raise invalid(f"{where}: compute_units {demand.compute_units}", f"at most {MAX_UNITS}")
    for field in ("model", "profile"):
        if len(getattr(demand, field)) > MAX_NAME:
            raise invalid(f"{where}: {field} is too long", f"at most {MAX_NAME} characters")
    _check_enum(f"{where}: vendor", demand.vendor, pb.Vendor.values())
    _check_enum(f"{where}: share", demand.share, pb.Share.values())
    return Demand(
        count=demand.count,
        vendor=int(demand.vendor),
        model=demand.model,
        profile=demand.profile,
        memory_bytes=demand.memory_bytes,
        compute_units=demand.compute_units,
        share=int(demand.share),
    )


def _check_name(field: str, value: str, possible: str) -> None:
    if not value.strip():
        raise invalid(f"{field}: it is empty", possible)
    if len(value) > MAX_NAME or not value.isprintable():
        raise invalid(f"{field}: not a name", f"at most {MAX_NAME} printable characters")


def _check_enum(field: str, value: int, known: Sequence[int]) -> None:
    if value not in known:
        raise invalid(f"{field}: {value} means nothing", "a value of the enumeration")


def invalid(message: str, *possible: str) -> RefusedError:
    """Return the refusal of something that makes no sense."""
    refusal = pl.PlaceRefusal(reason=pb.REFUSAL_INVALID, message=message, possible=list(possible))
    return RefusedError("INVALID_ARGUMENT", refusal)
