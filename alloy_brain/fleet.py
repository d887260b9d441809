"""What the brain knows of every node, kept so that a decision has nothing left to compute.

Messages come in; `facts()` gives frozen values out. Structure (devices, partitions, leases) changes
seldom and is folded into rows when it does; telemetry comes every second and touches loads alone.

Rules that stay true in here:

* A piece is free when neither the node, nor the ledger, nor a decision on its way has it.
* A reading of an older revision is dropped: its rows mean other pieces.
* What was not measured is None.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

from alloy_agent.proto import agent_pb2 as pb
from alloy_brain.facts import Kind, Load, NodeFacts, Piece, Row

WAYS: Final = {  # how a device's scheme names its way of cutting in `tier_limits`
    pb.SCHEME_INSTANCES: "mig",
    pb.SCHEME_MODES: "cpx",
    pb.SCHEME_CORES: "cores",
    pb.SCHEME_WHOLE: "whole",
}
SICK: Final = {pb.HEALTH_STATE_FAILED, pb.HEALTH_STATE_QUARANTINED}
THERMAL_SPAN_DK: Final = 200.0  # 20 K below the limit counts as all there is
Shapes = dict[tuple[tuple[Kind, int], ...], int]
UNMEASURED: Final = Load(None, "", 0)


class Part:
    """One partition, reduced to what a decision needs."""

    __slots__ = ("device", "draining", "generation", "id", "kind", "lease", "tenant")

    def __init__(self, message: pb.Partition, kind: Kind) -> None:
        self.id = message.id
        self.device = message.device
        self.generation = message.generation
        self.kind = kind
        self.tenant = message.tenant
        self.lease = message.lease
        self.draining = message.draining


class Dev:
    """One device, reduced to what a decision needs."""

    __slots__ = (
        "best",
        "draining",
        "gate",
        "gate_reason",
        "health",
        "hive",
        "id",
        "model",
        "reason",
        "slices",
        "vendor",
    )

    def __init__(self, message: pb.Device) -> None:
        self.id = message.id
        self.vendor = int(message.vendor)
        self.model = message.model
        self.slices = message.slices
        self.hive = message.hive
        self.draining = message.draining
        self.health, self.reason = _condition(message)
        self.gate = pb.GATE_UNSPECIFIED
        self.gate_reason = ""
        limits = {limit.way: int(limit.tier) for limit in message.tier_limits}
        way = WAYS.get(message.scheme, "")
        self.best = limits.get(way, min(limits.values(), default=0))


class Node:
    """Everything known of one node."""

    def __init__(self, name: str, kinds: dict[Kind, Kind], shapes: Shapes) -> None:
        self.name = name
        self.boot_id = ""
        self.agent_version = ""
        self.cluster = ""
        self.labels: dict[str, str] = {}
        self.connected = False
        self.draining = False
        self.heard_s = 0.0
        self.fast_s: float | None = None
        self.inventory_revision = 0
        self.partitions_revision = 0
        self.sample = 0
        self.last_sequence = 0
        self.inventory_bytes = b""
        self.partitions_bytes = b""
        self.sick: dict[str, str] = {}  # device or partition -> why, by health events
        self.leases: dict[str, tuple[str, ...]] = {}  # as the node told: lease -> its partitions
        self.held: dict[str, str] = {}  # by ledger and decisions on their way: partition -> lease
        self.rows: tuple[Row, ...] = ()
        self.loads: tuple[Load, ...] = ()
        self._kinds = kinds
        self._shapes = shapes
        self._devices: dict[str, Dev] = {}
        self._parts: list[Part] = []
        self._members: list[list[int]] = []  # of each row: the positions of its free partitions
        self._heads: list[tuple[float | None, str, int]] = []  # headroom of each partition
        self._heat: dict[str, float] = {}  # of each device

    # --- messages ---------------------------------------------------------------------------------

    def hello(self, hello: pb.Hello, now_s: float) -> None:
        """Take who the node is and which leases it has."""
        if hello.boot_id != self.boot_id:
            self.sick.clear()
        self.boot_id = hello.boot_id
        self.agent_version = hello.agent_version
        self.cluster = hello.cluster
        self.labels = dict(hello.labels)
        self.connected = True
        self.heard_s = now_s
        self.fast_s = None
        self.sample = 0
        self.leases = {one.id: tuple(ref.id for ref in one.partitions) for one in hello.leases}
        self.rebuild()

    def inventory(self, message: pb.Inventory) -> None:
        """Take the devices."""
        gates = {device.id: (device.gate, device.gate_reason) for device in self._devices.values()}
        self._devices = {one.id: Dev(one) for one in message.devices}
        for id_, (gate, reason) in gates.items():
            if id_ in self._devices:
                self._devices[id_].gate, self._devices[id_].gate_reason = gate, reason
        self.inventory_revision = message.revision
        self.inventory_bytes = message.SerializeToString()
        if self.partitions_bytes:  # kinds hold what the inventory says
            self.partition_state(pb.PartitionState.FromString(self.partitions_bytes))
        self.rebuild()

    def partition_state(self, message: pb.PartitionState) -> None:
        """Take the partitions."""
        self._parts = [Part(one, self._kind(one)) for one in message.partitions]
        self.partitions_revision = message.revision
        self.partitions_bytes = message.SerializeToString()
        self._heads = []
        self.rebuild()

    def health(self, message: pb.Health) -> None:
        """Take that a device or partition is well or not."""
        subject = message.partition or message.device
        if message.state in SICK:
            code = f" ({message.code})" if message.code else ""
            self.sick[subject] = f"{message.cause or 'failed'}{code}"
        elif self.sick.pop(subject, None) is None:
            return
        self.rebuild()

    def lease_change(self, message: pb.LeaseChange) -> None:
        """Take that a lease of the node moved."""
        if message.lease.state == pb.LEASE_STATE_FREE:
            self.leases.pop(message.lease.id, None)
        else:
            self.leases[message.lease.id] = tuple(ref.id for ref in message.lease.partitions)
        self.rebuild()

    def drain(self, subject: str, draining: bool) -> None:
        """Take that the node, a device or a partition is drained, or not any more."""
        if not subject:
            self.draining = draining
        if subject in self._devices:
            self._devices[subject].draining = draining
        for part in self._parts:
            if part.id == subject:
                part.draining = draining
        self.rebuild()

    def fast(self, message: pb.Fast, now_s: float) -> bool:
        """Take one sample; return False for one of other rows."""
        if (message.partitions_revision, message.inventory_revision) != (
            self.partitions_revision,
            self.inventory_revision,
        ):
            return False
        self.sample = message.sample
        self.fast_s = now_s
        self._heat = _heat(message, list(self._devices))
        self._heads = _headrooms(message.partitions, self._parts)
        changed = self._take_gates(message)
        if changed:
            self.rebuild()
        else:
            self.loads = self._loads()
        return True

    def _take_gates(self, message: pb.Fast) -> bool:
        """Take the devices' own gates; return whether one differs from before."""
        column = message.devices.gate
        if len(column) != len(self._devices):
            return False
        reasons = {r.row: r.reason for r in message.reasons if r.device}
        changed = False
        for row, device in enumerate(self._devices.values()):
            now = (column[row], reasons.get(row, ""))
            changed = changed or now != (device.gate, device.gate_reason)
            device.gate, device.gate_reason = now
        return changed

    # --- rows -------------------------------------------------------------------------------------

    def rebuild(self) -> None:
        """Fold what is known into rows."""
        taken = self._taken()
        grouped: dict[tuple[str, Kind, bool, str, str], list[int]] = {}
        for position, part in enumerate(self._parts):
            device = self._devices.get(part.device)
            state, reason = self._health(part, device)
            draining = part.draining or (device is not None and device.draining)
            group = (part.device, part.kind, draining, state, reason)
            grouped.setdefault(group, []).append(position)
        rows = []
        shapes = self._shape_numbers(grouped, taken)
        for (device_id, kind, draining, state, reason), members in grouped.items():
            device = self._devices.get(device_id)
            parts = [self._parts[position] for position in members]
            rows.append(
                Row(
                    device_id,
                    device.hive if device is not None else "",
                    kind,
                    state,
                    reason,
                    draining,
                    tuple(Piece(p.id, p.generation) for p in parts if p.id not in taken),
                    tuple(Piece(p.id, p.generation, taken[p.id]) for p in parts if p.id in taken),
                    shapes[device_id],
                )
            )
        self.rows = tuple(rows)
        self._members = [
            [m for m in members if self._parts[m].id not in taken] or members
            for members in grouped.values()
        ]
        self.loads = self._loads()

    def _shape_numbers(
        self, grouped: dict[tuple[str, Kind, bool, str, str], list[int]], taken: dict[str, str]
    ) -> dict[str, int]:
        """Return a number for each device, the same for devices with the same pieces free."""
        shapes: dict[str, tuple[tuple[Kind, int], ...]] = {}
        for (device_id, kind, *_), members in grouped.items():
            free = sum(self._parts[position].id not in taken for position in members)
            shapes[device_id] = (*shapes.get(device_id, ()), (kind, free))
        known = self._shapes
        return {device: known.setdefault(shape, len(known)) for device, shape in shapes.items()}

    def _taken(self) -> dict[str, str]:
        """Return who has which partition."""
        taken = {p.id: f"tenant {p.tenant}" for p in self._parts if p.tenant and not p.lease}
        for lease, partitions in self.leases.items():
            taken.update(dict.fromkeys(partitions, f"lease {lease}"))
        taken.update({partition: f"lease {lease}" for partition, lease in self.held.items()})
        return taken

    def _health(self, part: Part, device: Dev | None) -> tuple[str, str]:
        """Return the state of the health gate of a partition, and why it is not open."""
        if device is None:
            return "unknown", "its device is not in the inventory"
        for subject in (part.id, part.device):
            if subject in self.sick:
                return "closed", self.sick[subject]
        if device.health != "open":
            return device.health, device.reason
        if device.gate == pb.GATE_CLOSED:
            return "closed", device.gate_reason or "the node closed its gate"
        return "open", ""

    def _loads(self) -> tuple[Load, ...]:
        """Return what is left of the scarcest resource of each row's free pieces."""
        if not self._heads:
            return (UNMEASURED,) * len(self.rows)
        loads = []
        for row, members in zip(self.rows, self._members, strict=True):
            measured = [self._heads[m] for m in members if self._heads[m][0] is not None]
            age_ms = max((self._heads[m][2] for m in members), default=0)
            least, which = min(
                ((float(ratio), name) for ratio, name, _ in measured if ratio is not None),
                default=(None, ""),
            )
            heat = self._heat.get(row.device)
            if heat is not None and (least is None or heat < least):
                least, which = heat, "temperature"
            loads.append(Load(None if least is None else round(least, 4), which, age_ms))
        return tuple(loads)

    def _kind(self, part: pb.Partition) -> Kind:
        """Return the kind of a partition; equal ones are one object."""
        device = self._devices.get(part.device)
        kind = Kind(
            device.vendor if device else 0,
            device.model if device else "",
            part.profile,
            int(part.share),
            part.size,
            device.slices if device else part.size,
            part.memory_bytes if part.HasField("memory_bytes") else None,
            part.compute_units if part.HasField("compute_units") else None,
            int(part.tier),
            device.best if device else 0,
        )
        return self._kinds.setdefault(kind, kind)

    def facts(self, now_s: float) -> NodeFacts:
        """Return the node as it is known now."""
        return NodeFacts(
            self.name,
            self.boot_id,
            self.connected,
            max(0, round((now_s - self.heard_s) * 1e3)),
            None if self.fast_s is None else max(0, round((now_s - self.fast_s) * 1e3)),
            self.inventory_revision,
            self.partitions_revision,
            self.sample,
            self.draining,
            self.labels,
            self.rows,
            self.loads,
        )

    @property
    def device_count(self) -> int:
        """Return how many devices it has."""
        return len(self._devices)

    @property
    def partition_count(self) -> int:
        """Return how many partitions it has."""
        return len(self._parts)


class Fleet:
    """All nodes."""

    def __init__(self) -> None:
        self.nodes: dict[str, Node] = {}
        self._kinds: dict[Kind, Kind] = {}
        self._shapes: Shapes = {}

    def node(self, name: str) -> Node:
        """Return a node, known from now on."""
        node = self.nodes.get(name)
        if node is None:
            node = self.nodes[name] = Node(name, self._kinds, self._shapes)
        return node

    def hold(self, pieces: Iterable[tuple[str, str]], lease: str) -> None:
        """Take (node, partition) pieces out of what is free."""
        for node, partitions in _by_node(pieces).items():
            known = self.node(node)
            known.held.update(dict.fromkeys(partitions, lease))
            known.rebuild()

    def let_go(self, pieces: Iterable[tuple[str, str]], lease: str) -> None:
        """Give pieces back that a lease held."""
        for node, partitions in _by_node(pieces).items():
            known = self.node(node)
            for partition in partitions:
                if known.held.get(partition) == lease:
                    del known.held[partition]
            known.rebuild()

    def facts(self, now_s: float) -> tuple[NodeFacts, ...]:
        """Return every node as it is known now, by name."""
        return tuple(node.facts(now_s) for _, node in sorted(self.nodes.items()))


def _by_node(pieces: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for node, partition in pieces:
        found.setdefault(node, []).append(partition)
    return found


def _condition(device: pb.Device) -> tuple[str, str]:
    """Return the health gate that a device's own condition means."""
    reason = device.condition_reason or pb.Condition.Name(device.condition)[10:].lower()
    if device.condition == pb.CONDITION_OK:
        return "open", ""
    if device.condition in (pb.CONDITION_UNSPECIFIED, pb.CONDITION_STALLED):
        return "unknown", reason
    return "closed", reason


def _has(quality: Sequence[int], row: int, column: int) -> bool:
    """Whether a column has a fresh value in a row."""
    return not quality or (quality[row] >> (2 * column)) & 3 == 0


RATIOS: Final = (  # column, its bits in quality, name, and whether it counts what is left
    ("compute_active_e4", 0, "compute", False),
    ("memory_bandwidth_active_e4", 2, "memory bandwidth", False),
    ("headroom_p95_e4", 3, "headroom", True),
    ("link_active_e4", 4, "links", False),
)


def _headrooms(block: pb.PartitionColumns, parts: list[Part]) -> list[Any]:
    """Return, for each partition, what is left of its scarcest resource, its name and the age."""
    rows = len(parts)
    found: list[tuple[float | None, str, int]] = []
    quality = block.quality if len(block.quality) == rows else ()
    ages = block.age_ms if len(block.age_ms) == rows else (0,) * rows
    columns = [
        (getattr(block, field), bits, name, left)
        for field, bits, name, left in RATIOS
        if len(getattr(block, field)) == rows
    ]
    used = block.memory_used_mib if len(block.memory_used_mib) == rows else None
    for row, part in enumerate(parts):
        least: float | None = None
        which = ""
        for values, bits, name, left in columns:
            if _has(quality, row, bits):
                ratio = values[row] / 1e4 if left else 1.0 - values[row] / 1e4
                if least is None or ratio < least:
                    least, which = ratio, name
        capacity = part.kind.memory_bytes
        if used is not None and capacity and _has(quality, row, 1):
            ratio = 1.0 - used[row] * 1048576 / capacity
            if least is None or ratio < least:
                least, which = ratio, "memory"
        found.append((None if least is None else min(1.0, max(0.0, least)), which, ages[row]))
    return found


def _heat(message: pb.Fast, devices: list[str]) -> dict[str, float]:
    """Return how much of the span below its temperature limit each device has left."""
    block = message.devices
    column = block.temperature_headroom_dk
    if len(column) != len(devices):
        return {}
    quality = block.quality if len(block.quality) == len(devices) else ()
    return {
        device: min(1.0, max(0.0, column[row] / THERMAL_SPAN_DK))
        for row, device in enumerate(devices)
        if _has(quality, row, 0)
    }
