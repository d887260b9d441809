"""Gates multiply: a candidate with one that is not open is out, whatever else speaks for it. Pure.

An unknown gate is not an open one: a node that nobody has heard of for a while may be well, and is
not chosen.
"""

from __future__ import annotations

from fnmatch import fnmatchcase

from alloy_brain.facts import Demand, Gate, Kind, NodeFacts, Policy, Row, Wish

OPEN, CLOSED, UNKNOWN = "open", "closed", "unknown"
TIERS = ("not judged", "hard", "enforced", "soft", "advisory")  # by the wire's number
VENDORS = ("any", "nvidia", "amd", "neuron", "cpu")
SHARES = ("any", "exclusive", "production", "opportunistic")


def word(words: tuple[str, ...], number: int) -> str:
    """Return the word for a number of the wire."""
    return words[number] if 0 <= number < len(words) else f"number {number}"


def size(count: int | None) -> str:
    """Return bytes in the largest unit that leaves a whole number or one decimal: 256 MiB."""
    left = float(count or 0)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if left < 1024:
            return f"{left:.1f}".removesuffix(".0") + f" {unit}"
        left /= 1024
    return f"{left:.1f}".removesuffix(".0") + " TiB"


def fits(demand: Demand, kind: Kind) -> str:  # noqa: PLR0911 - one reason each
    """Return why a kind is not what is wanted; empty when it is."""
    if demand.vendor and demand.vendor != kind.vendor:
        return f"vendor {word(VENDORS, kind.vendor)}, not {word(VENDORS, demand.vendor)}"
    if demand.model and not fnmatchcase(kind.model.lower(), demand.model.lower()):
        return f"model {kind.model}, not {demand.model}"
    if demand.profile and not fnmatchcase(kind.profile.lower(), demand.profile.lower()):
        return f"profile {kind.profile}, not {demand.profile}"
    if (demand.share or 1) != (kind.share or 1):
        return f"share {word(SHARES, kind.share or 1)}, not {word(SHARES, demand.share or 1)}"
    if demand.memory_bytes and (kind.memory_bytes or 0) < demand.memory_bytes:
        return f"memory {size(kind.memory_bytes)}, not {size(demand.memory_bytes)}"
    if demand.compute_units and (kind.compute_units or 0) < demand.compute_units:
        return f"compute units {kind.compute_units or 0}, not {demand.compute_units}"
    return ""


def tier_allows(floor: int, tier: int) -> bool:
    """Whether a tier is at least as strong as the floor; lower numbers are stronger."""
    return not floor or 0 < tier <= floor


def node_gates(wish: Wish, policy: Policy, node: NodeFacts) -> tuple[Gate, ...]:
    """Return the gates that all candidates of a node share."""
    missing = [f"{k}={v}" for k, v in sorted(wish.labels.items()) if node.labels.get(k) != v]
    return (
        _connected(policy, node),
        _telemetry(policy, node),
        Gate(
            gate="labels",
            state=CLOSED if missing else OPEN,
            value=node.labels,
            reason=f"no label {', '.join(missing)}" if missing else "",
        ),
        Gate(
            gate="node_draining",
            state=CLOSED if node.draining else OPEN,
            value=node.draining,
            reason="the node is drained" if node.draining else "",
        ),
    )


def node_open(wish: Wish, policy: Policy, node: NodeFacts) -> bool:
    """Whether every gate of `node_gates` is open, without the words."""
    return (
        node.connected
        and node.heard_age_ms <= policy.heard_max_ms
        and node.telemetry_age_ms is not None
        and node.telemetry_age_ms <= policy.telemetry_max_ms
        and not node.draining
        and all(node.labels.get(k) == v for k, v in wish.labels.items())
    )


def _connected(policy: Policy, node: NodeFacts) -> Gate:
    """Whether the node was heard of lately."""
    state, reason = OPEN, ""
    if not node.connected:
        state, reason = UNKNOWN, "its stream is down"
    elif node.heard_age_ms > policy.heard_max_ms:
        state, reason = UNKNOWN, f"silent for {node.heard_age_ms} ms"
    return Gate(
        gate="connected",
        state=state,
        value=node.connected,
        age_ms=node.heard_age_ms,
        reason=reason,
    )


def _telemetry(policy: Policy, node: NodeFacts) -> Gate:
    """Whether the node's measurements are fresh."""
    age_ms = node.telemetry_age_ms
    if age_ms is None:
        return Gate(gate="telemetry", state=UNKNOWN, value=None, reason="none was heard yet")
    stale = age_ms > policy.telemetry_max_ms
    return Gate(
        gate="telemetry",
        state=CLOSED if stale else OPEN,
        value=node.sample,
        age_ms=age_ms,
        reason=f"older than {policy.telemetry_max_ms} ms" if stale else "",
    )


def row_gates(wish: Wish, demand: Demand, node: NodeFacts, row: Row) -> tuple[Gate, ...]:
    """Return the gates of one candidate for one demand."""
    misfit = fits(demand, row.kind)
    proved = tier_allows(wish.tier_floor, row.kind.tier)
    free = [piece for piece in row.free if key(node, piece.id) not in wish.avoid]
    avoided = [wish.avoid[key(node, p.id)] for p in row.free if key(node, p.id) in wish.avoid]
    holders = sorted({piece.lease for piece in row.taken})
    why = "; ".join([*(f"held by {h}" for h in holders[:4]), *avoided[:4]])
    return (
        Gate(
            gate="fit",
            state=CLOSED if misfit else OPEN,
            value=row.kind.profile,
            reason=misfit,
        ),
        Gate(
            gate="tier",
            state=OPEN if proved else (CLOSED if row.kind.tier else UNKNOWN),
            value=word(TIERS, row.kind.tier),
            reason="" if proved else f"not {word(TIERS, wish.tier_floor)}",
        ),
        Gate(
            gate="health",
            state=row.health,
            value=row.health,
            age_ms=node.heard_age_ms,
            reason=row.health_reason,
        ),
        Gate(
            gate="draining",
            state=CLOSED if row.draining else OPEN,
            value=row.draining,
            reason="it is drained" if row.draining else "",
        ),
        Gate(
            gate="free",
            state=OPEN if free else CLOSED,
            value=len(free),
            reason="" if free else why or "none",
        ),
    )


def key(node: NodeFacts, partition: str) -> str:
    """Return the fleet-wide name of a partition."""
    return f"{node.node}/{partition}"
