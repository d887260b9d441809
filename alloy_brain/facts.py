"""What a decision rests on: frozen values, small enough to be kept with every decision.

Pieces of one device that nobody can tell apart form one `Row`; what changes every second, the
`Load`, stands beside it. `Kind` is shared by all rows that offer the same thing.
"""

from __future__ import annotations

from typing import Any

import msgspec

from alloy_agent.model import Value


class Compact(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Base of what is kept in great numbers."""


class Kind(Compact, frozen=True, array_like=True, gc=False):
    """What a piece offers. Tiers are the wire's numbers, 0: not judged yet."""

    vendor: int
    model: str
    profile: str
    share: int
    size: int
    slices: int
    memory_bytes: int | None
    compute_units: int | None
    tier: int
    tier_best: int  # what this way of cutting can ever reach


class Piece(Compact, frozen=True, array_like=True, gc=False):
    """One partition at one generation; `lease` is who has it, empty while it is free."""

    id: str
    generation: int
    lease: str = ""


class Row(Compact, frozen=True, array_like=True, gc=False):
    """All pieces of one kind on one device.

    Devices with the same pieces free have the same `shape`, a number without further meaning.
    """

    device: str
    hive: str
    kind: Kind
    health: str  # "open", "closed" or "unknown"
    health_reason: str
    draining: bool
    free: tuple[Piece, ...]
    taken: tuple[Piece, ...]
    shape: int


class Load(Compact, frozen=True, array_like=True, gc=False):
    """What is left of the scarcest resource of a row; None: nobody measured any."""

    headroom_ratio: float | None
    resource: str
    age_ms: int


class NodeFacts(Compact, frozen=True, array_like=True, gc=False):
    """One node as the brain knew it: which snapshot, how old, and what it offers."""

    node: str
    boot_id: str
    connected: bool
    heard_age_ms: int
    telemetry_age_ms: int | None  # None: none was ever heard
    inventory_revision: int
    partitions_revision: int
    sample: int
    draining: bool
    labels: dict[str, str]
    rows: tuple[Row, ...]
    loads: tuple[Load, ...]


class Demand(Value, frozen=True, kw_only=True):
    """One kind of piece that is wanted; 0 and empty: any."""

    count: int
    vendor: int = 0
    model: str = ""
    profile: str = ""
    memory_bytes: int = 0
    compute_units: int = 0
    share: int = 0


class Wish(Value, frozen=True, kw_only=True):
    """A request as it is decided on. `avoid` are pieces that a node refused meanwhile, and why."""

    request: str
    tenant: str
    demands: tuple[Demand, ...]
    tier_floor: int = 0
    locality: int = 0
    labels: dict[str, str] = msgspec.field(default_factory=dict)
    avoid: dict[str, str] = msgspec.field(default_factory=dict)


class Policy(Value, frozen=True, kw_only=True):
    """The numbers of the decision. Changing one changes decisions, so each record keeps them.

    Headroom is compared in steps of `band_ratio`: within one, fragmentation and then cost decide.
    `prices_per_h` are for a whole device by a glob over its model; without one its share counts.
    """

    heard_max_ms: int = 15_000
    telemetry_max_ms: int = 5_000
    band_ratio: float = 0.1
    prices_per_h: dict[str, float] = msgspec.field(default_factory=dict)


class Inputs(Value, frozen=True, kw_only=True):
    """Everything that `placement.choose` looks at."""

    wish: Wish
    policy: Policy
    mix: tuple[tuple[Demand, float], ...]  # what is usually asked for, with its weight
    nodes: tuple[NodeFacts, ...]


class Picked(Value, frozen=True, kw_only=True):
    """One piece of a choice."""

    demand: int
    node: str
    device: str
    partition: str
    generation: int
    tier: int


class Choice(Value, frozen=True, kw_only=True):
    """What was decided: the pieces, or why there are none."""

    picked: tuple[Picked, ...] = ()
    refusal: str = ""  # "invalid": it can never be; "exhausted": not now
    message: str = ""
    possible: tuple[str, ...] = ()


class Gate(Value, frozen=True, kw_only=True):
    """One gate of one candidate: all must be open."""

    gate: str
    state: str
    value: Any
    age_ms: int | None = None
    reason: str = ""
