"""The decision record: the inputs of a decision and its choice, kept small, told in full.

A record on disk is the inputs in MessagePack, compressed. The document that people and programs
get is made of it when asked for: every candidate with each gate, its value and its age, and the
choice made anew from the inputs beside the one that was acted on.
"""

from __future__ import annotations

import zlib
from typing import Any, Final

import msgspec

from alloy_agent.model import Value
from alloy_brain import gates
from alloy_brain.facts import Choice, Inputs, NodeFacts, Row
from alloy_brain.placement import Scorer, choose

SCHEMA: Final = "alloy.decision/v1"


class Record(Value, frozen=True, kw_only=True):
    """One decision. `refused_by` are nodes that did not grant what was decided, with why.

    `omitted` is how many nodes' facts are not in it: a record that was written ahead of its answer
    has only those of the nodes that were chosen, until the whole one takes its place.
    """

    id: str
    request: str
    lease: str
    placed: bool
    wall_s: float
    brain: str
    term: int
    attempt: int
    inputs: Inputs
    choice: Choice
    refused_by: dict[str, str] = msgspec.field(default_factory=dict)
    omitted: int = 0


def shortened(record: Record) -> Record:
    """Return a record with the facts of the chosen nodes alone, small enough to be waited for."""
    chosen = {picked.node for picked in record.choice.picked}
    nodes = tuple(node for node in record.inputs.nodes if node.node in chosen)
    return msgspec.structs.replace(
        record,
        inputs=msgspec.structs.replace(record.inputs, nodes=nodes),
        omitted=len(record.inputs.nodes) - len(nodes),
    )


def pack(record: Record) -> bytes:
    """Return a record for the disk."""
    return zlib.compress(msgspec.msgpack.encode(record), 1)


def unpack(data: bytes) -> Record:
    """Return a record from the disk."""
    return msgspec.msgpack.decode(zlib.decompress(data), type=Record)


def replay(record: Record) -> Choice:
    """Return what the inputs of a record lead to now."""
    return choose(record.inputs)


def document(record: Record) -> dict[str, Any]:
    """Return the record in full: all candidates, each gate with value and age, and the choice."""
    inputs = record.inputs
    scorer = Scorer(inputs)
    wish = msgspec.to_builtins(inputs.wish)
    return {
        "schema": SCHEMA,
        "id": record.id,
        "request": record.request,
        "lease": record.lease,
        "placed": record.placed,
        "decided_wall_s": record.wall_s,
        "brain": record.brain,
        "term": record.term,
        "attempt": record.attempt,
        "wish": wish,
        "policy": msgspec.to_builtins(inputs.policy),
        "mix": [{"demand": msgspec.to_builtins(d), "weight": w} for d, w in inputs.mix],
        "snapshots": [_snapshot(node) for node in inputs.nodes],
        "candidates": [
            _candidate(record, scorer, number, index, row)
            for number in range(len(inputs.wish.demands))
            for index, node in enumerate(inputs.nodes)
            for row in range(len(node.rows))
        ],
        "choice": msgspec.to_builtins(record.choice),
        "refused_by": record.refused_by,
        "omitted_nodes": record.omitted,
        # Of the chosen nodes alone, a refusal cannot be decided again; a choice can.
        "replayed": replay(record) == record.choice if not _is_blind(record) else None,
    }


def _is_blind(record: Record) -> bool:
    """Whether too little was kept of a decision to make it again."""
    return record.omitted > 0 and bool(record.choice.refusal)


def _snapshot(node: NodeFacts) -> dict[str, Any]:
    return {
        "node": node.node,
        "boot_id": node.boot_id,
        "inventory_revision": node.inventory_revision,
        "partitions_revision": node.partitions_revision,
        "sample": node.sample,
        "heard_age_ms": node.heard_age_ms,
        "telemetry_age_ms": node.telemetry_age_ms,
    }


def _candidate(
    record: Record, scorer: Scorer, demand: int, index: int, number: int
) -> dict[str, Any]:
    """Return one candidate: who it is, its gates, its scores, and whether it was chosen."""
    inputs = record.inputs
    node = inputs.nodes[index]
    row: Row = node.rows[number]
    load = node.loads[number]
    shown = (
        *gates.node_gates(inputs.wish, inputs.policy, node),
        *gates.row_gates(inputs.wish, inputs.wish.demands[demand], node, row),
    )
    chosen = [
        p.partition
        for p in record.choice.picked
        if p.demand == demand and p.node == node.node and p.device == row.device
    ]
    own = {piece.id for piece in row.free}
    band, fragments, cost = scorer.rank(index, row, load)
    return {
        "demand": demand,
        "node": node.node,
        "device": row.device,
        "profile": row.kind.profile,
        "tier": gates.word(gates.TIERS, row.kind.tier),
        "free": [[piece.id, piece.generation] for piece in row.free],
        "taken": [[piece.id, piece.generation, piece.lease] for piece in row.taken],
        "open": all(gate.state == gates.OPEN for gate in shown),
        "gates": [msgspec.to_builtins(gate) for gate in shown],
        "scores": {
            "headroom_ratio": load.headroom_ratio,
            "scarcest": load.resource,
            "headroom_age_ms": load.age_ms,
            "band": band,
            "fragments": fragments,
            "cost": cost,
        },
        "chosen": [partition for partition in chosen if partition in own],
    }
