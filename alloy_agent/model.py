"""The nouns of the agent as frozen values; no behaviour beyond validation.

Everything that crosses a room, a queue or a process boundary is one of these. They encode to JSON
and
MessagePack through msgspec, so that a worker's answer, a stored row and a document on stdout are
one type.

Rules that stay true in here:

* Units stand last in a name: `_bytes`, `_s` (seconds, `CLOCK_BOOTTIME` unless the name says
  `wall`), `_ratio` (0 to 1).
* A device is named by serial, UUID or bus address, never by index. A partition's identity is its
  location
  (`id`) together with its `generation`, since vendors re-use ids.
* A number that could not be read is absent with a reason (`Quality`), never zero.
* Collections are tuples; a value, once made, never changes.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final, Literal, NewType

import msgspec

DeviceId = NewType("DeviceId", str)
# "<device id>/<profile>@<start>", unique on the node at one moment
PartitionId = NewType("PartitionId", str)
LeaseId = NewType("LeaseId", str)
TenantId = NewType("TenantId", str)

if TYPE_CHECKING:
    Json = str | int | float | bool | None | list["Json"] | dict[str, "Json"]
else:
    Json = Any  # msgspec decodes plain JSON values for it; a recursive alias it cannot resolve


class Value(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all nouns: frozen, compared by value, fields by name only."""


# --- devices -------------------------------------------------------------------------------------


class Vendor(StrEnum):
    """Who made the silicon; a simulated device keeps its vendor and says `simulated`."""

    NVIDIA = "nvidia"
    AMD = "amd"
    NEURON = "neuron"
    CPU = "cpu"


class Tier(StrEnum):
    """Isolation as proved by evidence, from strongest to weakest."""

    HARD = "hard"
    ENFORCED = "enforced"
    SOFT = "soft"
    ADVISORY = "advisory"


# strongest first
TIER_ORDER: tuple[Tier, ...] = (Tier.HARD, Tier.ENFORCED, Tier.SOFT, Tier.ADVISORY)


class Scope(StrEnum):
    """How far an action, a fault or a mode reaches."""

    PARTITION = "partition"
    DEVICE = "device"
    HIVE = "hive"
    NODE = "node"


class Scheme(StrEnum):
    """How a device is cut into pieces."""

    INSTANCES = "instances"  # each profile at listed starts (MIG)
    MODES = "modes"  # evenly, by a mode of the whole device (AMD compute partitioning)
    CORES = "cores"  # runs of cores of any legal length (Neuron, CPU)
    WHOLE = "whole"  # not at all


class Share(StrEnum):
    """Whether a partition has its piece alone, or shares the device under rate control."""

    EXCLUSIVE = "exclusive"
    PRODUCTION = "production"
    OPPORTUNISTIC = "opportunistic"


class Placement(Value, frozen=True, kw_only=True, order=True):
    """Where a piece sits: `size` slices from slice `start` on.

    A slice is the vendor's finest unit of placement: a MIG memory slice, an XCD, a NeuronCore, or
    an entry in
    the device's list of physical CPU cores (`Device.units`). Memory slices of MIG are not compute
    slices.
    """

    start: int
    size: int

    def __post_init__(self) -> None:
        if self.start < 0 or self.size < 1:
            raise ValueError(f"placement {self.start}:{self.size} needs start >= 0 and size >= 1")

    @property
    def stop(self) -> int:
        """First slice behind the piece."""
        return self.start + self.size

    def overlaps(self, other: Placement) -> bool:
        """Whether both claim at least one common slice."""
        return self.start < other.stop and other.start < self.stop


class Profile(Value, frozen=True, kw_only=True):
    """A shape of piece that the device can make.

    `memory_bytes` and `compute_units` (SMs, CUs, NeuronCores, CPU cores) are None where the driver
    does not
    say. `max_count` bounds how many may exist at once. `vendor_ref` is the driver's own number for
    the profile,
    opaque to everyone but its backend; `attributes` are the driver's suffixes (`me`, `gfx`).
    """

    name: str
    size: int
    starts: tuple[int, ...]
    max_count: int
    memory_bytes: int | None = None
    compute_units: int | None = None
    attributes: tuple[str, ...] = ()
    vendor_ref: int | None = None


class ModeKind(StrEnum):
    """Which switch of the device a mode belongs to."""

    MIG = "mig"  # "on" / "off"
    COMPUTE = "compute"  # "SPX", "DPX", "TPX", "QPX", "CPX"
    MEMORY = "memory"  # "NPS1", "NPS2", "NPS4", ...
    LNC = "lnc"  # logical NeuronCore configuration: "1" / "2"


class ModeChange(StrEnum):
    """What it takes for a requested mode to hold."""

    NOW = "now"
    DEVICE_RESET = "device_reset"
    DRIVER_RELOAD = "driver_reload"
    PROCESS_START = "process_start"


class Mode(Value, frozen=True, kw_only=True):
    """One switch of a device: what holds, what is asked for, what it can be, how far it reaches."""

    kind: ModeKind
    current: str
    pending: str | None = None  # None when nothing differs from `current`
    available: tuple[str, ...] = ()
    change: ModeChange = ModeChange.NOW
    scope: Scope = Scope.DEVICE


class Link(Value, frozen=True, kw_only=True):
    """A connection of this device to another, or to a CPU node (`peer` "numa:<n>")."""

    peer: str
    kind: str  # "nvlink", "xgmi", "neuronlink", "pcie", "numa"
    bandwidth_bytes_per_s: int | None = None
    hops: int | None = None


class TierLimit(Value, frozen=True, kw_only=True):
    """The best tier that one way of cutting this device can ever reach, and why not better."""

    way: str  # "mig", "whole", "cpx", "cores", "shared"
    tier: Tier
    reason: str


class Condition(StrEnum):
    """Whether the device answers."""

    OK = "ok"
    STALLED = "stalled"  # a call has not returned; not entered again
    LOST = "lost"  # off the bus, needs a reset, or its worker crashed on it
    NOT_PERMITTED = "not_permitted"
    FAILED = "failed"  # answers with an error


class Device(Value, frozen=True, kw_only=True):
    """A physical accelerator, or a NUMA node of the host's CPU, as its backend sees it now."""

    id: DeviceId
    vendor: Vendor
    model: str
    backend: str
    scheme: Scheme
    slices: int
    slice_name: str
    # enumeration order of this moment; for `match: {index: n}` at plan time and for people only
    index: int = 0
    simulated: bool = False
    condition: Condition = Condition.OK
    condition_reason: str = ""
    bus: str | None = None  # "0000:1a:00.0", lower case
    pci_id: str | None = None  # device then vendor, as drivers print it: "0x20b010de", lower case
    serial: str | None = None
    numa_node: int | None = None
    hive: str | None = None
    driver: str | None = None
    memory_bytes: int | None = None
    compute_units: int | None = None
    # slice n is unit units[n]; empty: slices and units are the same numbers
    units: tuple[int, ...] = ()
    reserved_units: tuple[int, ...] = ()  # units kept for the system, not part of `units`
    profiles: tuple[Profile, ...] = ()
    modes: tuple[Mode, ...] = ()
    links: tuple[Link, ...] = ()
    tier_limits: tuple[TierLimit, ...] = ()
    legal_sizes: tuple[int, ...] = ()  # CORES only: legal run lengths; empty means any
    # how many whole devices, from this one on by index, work together as one; empty: no groups here
    group_sizes: tuple[int, ...] = ()
    fault_note: str = ""  # e.g. "63 of 64 partitions live"


# --- partitions and layouts ----------------------------------------------------------------------


class Access(Value, frozen=True, kw_only=True):
    """What a tenant needs to be inside a partition, and nothing more.

    `cgroup_procs` are absolute paths of `cgroup.procs` files to write the tenant's pid to, one per
    hierarchy.
    `device_nodes` are absolute paths. `environment` is set for the tenant, `unset` removed from it.
    """

    cgroup_procs: tuple[str, ...] = ()
    device_nodes: tuple[str, ...] = ()
    environment: dict[str, str] = {}
    unset: tuple[str, ...] = ()


class Occupant(Value, frozen=True, kw_only=True):
    """One user of a partition, as far as the host and the kubelet name it; empty: not known.

    `kind`: pod, container (outside of a cluster), slurm, unit, or host where nothing says more.
    Pods and claims are told apart by UID; their names come again.
    """

    kind: str
    namespace: str = ""
    pod: str = ""
    pod_uid: str = ""
    container: str = ""
    container_id: str = ""
    runtime: str = ""
    claim: str = ""
    claim_uid: str = ""
    job: str = ""
    step: str = ""
    unit: str = ""

    def __str__(self) -> str:
        if self.pod or self.pod_uid:
            name = "/".join(filter(None, (self.namespace, self.pod, self.container)))
            return f"pod {name} uid {self.pod_uid}" if self.pod_uid else f"pod {name}"
        if self.claim:
            return f"claim {self.namespace}/{self.claim}"
        if self.job:
            return f"job {self.job}" + (f" step {self.step}" if self.step else "")
        return f"{self.kind} {self.unit or self.container_id[:12]}".strip()


class PartitionSpec(Value, frozen=True, kw_only=True):
    """A piece that is wanted. `placement` is None while the planner may choose."""

    device: DeviceId
    profile: str
    size: int
    placement: Placement | None = None
    memory_bytes: int | None = None  # a cap asked for by the layout; None: what the profile gives
    share: Share = Share.EXCLUSIVE
    ordinal: int = 0  # tells apart shared partitions of one device
    # CUs of every XCC for each opportunistic share, and how many of those; None: the settings say
    cu_mask: tuple[int, int] | None = None
    group: tuple[DeviceId, ...] = ()  # whole devices that are meant for one tenant, in their order


class Partition(Value, frozen=True, kw_only=True):
    """A piece that exists, as read back from the device.

    `incarnation` is opaque and differs whenever the piece was made anew (MIG UUID, cgroup inode
    and birth time);
    `generation` is the agent's own count of incarnations at this location, given by the observer,
    0 before that.
    `locator` is for its backend alone. `access` is the way into this piece alone; `group_access`
    the way into all of its group as one, None while a member is missing.
    """

    id: PartitionId
    device: DeviceId
    profile: str
    placement: Placement
    incarnation: str
    generation: int = 0
    uuid: str | None = None
    memory_bytes: int | None = None
    compute_units: int | None = None
    units: tuple[int, ...] = ()
    share: Share = Share.EXCLUSIVE
    ordinal: int = 0
    cu_mask: tuple[int, int] | None = None  # as its spec asked for it
    altered: str = ""  # in which way it is not what was granted; "" when it is
    managed: bool = False  # made by this agent (its journal says so); set by the observer
    tenant: TenantId | None = None  # set by the observer from leases and bindings
    occupants: tuple[Occupant, ...] = ()  # set by the observer: who the tenant is
    locator: dict[str, str] = {}
    access: Access = Access()
    group: tuple[DeviceId, ...] = ()
    group_access: Access | None = None


class SourceRef(Value, frozen=True, kw_only=True):
    """Where an entry was read: file and 1-based line."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


class DeviceLayout(Value, frozen=True, kw_only=True):
    """What one device shall look like; modes that are not named, and None, stay as they are."""

    device: DeviceId
    modes: dict[ModeKind, str] = {}
    partitions: tuple[PartitionSpec, ...] | None = None
    source: SourceRef | None = None


class Layout(Value, frozen=True, kw_only=True):
    """The desired state of the node; devices that are not named stay as they are."""

    name: str
    devices: tuple[DeviceLayout, ...] = ()
    digest: str = ""  # SHA-256 of the canonical JSON of the rest


# --- plan ----------------------------------------------------------------------------------------


class SetMode(Value, frozen=True, kw_only=True, tag="set_mode"):
    """Switch one mode of a device (or of its whole hive, by the mode's scope)."""

    device: DeviceId
    kind: ModeKind
    current: str
    wanted: str


class Destroy(Value, frozen=True, kw_only=True, tag="destroy"):
    """Remove one partition; `partition` is as observed when the plan was made."""

    device: DeviceId
    partition: Partition


class Create(Value, frozen=True, kw_only=True, tag="create"):
    """Make one partition; `spec.placement` is always set."""

    device: DeviceId
    spec: PartitionSpec


class Configure(Value, frozen=True, kw_only=True, tag="configure"):
    """Change the memory cap of a living partition in place; interrupts nobody.

    One that somebody altered (`partition.altered`) becomes what was granted again.
    """

    device: DeviceId
    partition: Partition
    memory_bytes: int | None


Step = SetMode | Destroy | Create | Configure


class Reset(Value, frozen=True, kw_only=True, tag="reset"):
    """Reset one device that nobody is on. No plan has it: only an operator asks for it.

    `only_ask`: do nothing, but refuse where this device is never reset.
    """

    device: DeviceId
    only_ask: bool = False


DeviceStep = Step | Reset


class Interrupt(Value, frozen=True, kw_only=True):
    """Whom a step disturbs: "partition" X, "device" Y, "hive" Z or the "node"."""

    scope: Scope
    subject: str
    why: str


class PlannedStep(Value, frozen=True, kw_only=True):
    """One step, what it interrupts, and how it is undone (`undo` None: it cannot be)."""

    number: int
    step: Step
    interrupts: tuple[Interrupt, ...] = ()
    undo: Step | None = None


class PlanCost(Value, frozen=True, kw_only=True, order=True):
    """What a plan costs, compared in this order; less is better."""

    leased_destroyed: int = 0
    destroyed: int = 0
    interrupted_devices: int = 0
    steps: int = 0


class Plan(Value, frozen=True, kw_only=True):
    """Ordered steps from `observed_sequence` of boot `boot_id` to the layout, each state legal."""

    layout: Layout
    boot_id: str
    observed_sequence: int
    steps: tuple[PlannedStep, ...] = ()
    kept: tuple[PartitionId, ...] = ()
    cost: PlanCost = PlanCost()
    notes: tuple[str, ...] = ()  # e.g. "pending until driver reload"


class StepReport(Value, frozen=True, kw_only=True):
    """What became of one step of a run; also told as progress while it is running."""

    number: int
    step: Step
    state: Literal["running", "done", "pending", "failed", "waiting"]
    undo: bool = False  # the step takes an earlier one back
    error: str = ""
    duration_s: float = 0.0
    attempts: int = 1


class ApplyReport(Value, frozen=True, kw_only=True):
    """What became of a plan. Everything but `applied`, `unchanged` and `pending` is a failure."""

    outcome: Literal[
        "applied", "unchanged", "pending", "rolled_back", "stopped", "stuck", "abandoned"
    ]
    layout: str
    run: int | None = None
    steps: tuple[StepReport, ...] = ()
    error: str = ""
    pending: tuple[str, ...] = ()  # what waits for a reset, a reload or a command, and why
    remaining: tuple[str, ...] = ()  # the exact difference that is left


# --- observation ---------------------------------------------------------------------------------


# A piece made or removed half way: it takes room but is no partition. The `reason` names its
# place and stays the same while it is there.
HALF_MADE: Final = "half_made"


class DeviceFault(Value, frozen=True, kw_only=True):
    """Something wrong with one device, now."""

    device: DeviceId
    kind: str  # "probe_stalled", "lost", "partition_count_mismatch", ...
    reason: str


class Observation(Value, frozen=True, kw_only=True):
    """One backend's answer for one device."""

    device: Device
    partitions: tuple[Partition, ...] = ()
    faults: tuple[DeviceFault, ...] = ()


class Owner(Value, frozen=True, kw_only=True):
    """Another manager of devices seen on this node."""

    name: str  # "kubelet device plug-in", "slurmd", "dcgm", ...
    evidence: str  # "socket /var/lib/kubelet/device-plugins/nvidia-gpu.sock", "process 812 slurmd"
    vendors: tuple[Vendor, ...] = ()  # empty: any


class WorkerState(Value, frozen=True, kw_only=True):
    """How the process of one backend is doing."""

    backend: str
    alive: bool
    pid: int | None = None
    restarts: int = 0
    reason: str = ""


class Snapshot(Value, frozen=True, kw_only=True):
    """The node as seen at one moment. Immutable; its age is `now - taken_at_s`."""

    boot_id: str
    sequence: int
    taken_at_s: float
    taken_wall_s: float
    devices: tuple[Device, ...] = ()
    partitions: tuple[Partition, ...] = ()
    faults: tuple[DeviceFault, ...] = ()
    owners: tuple[Owner, ...] = ()
    workers: tuple[WorkerState, ...] = ()


class Diagnosis(Value, frozen=True, kw_only=True):
    """One line of `doctor`: what was looked at, how it stands, and the cure when it is not well."""

    subject: str
    ok: bool
    found: str
    cure: str = ""
    required: bool = False  # the agent cannot work without it


class Capabilities(Value, frozen=True, kw_only=True):
    """What a backend can do on this host, with its library's version."""

    backend: str
    vendors: tuple[Vendor, ...]
    library: str = ""
    library_version: str = ""
    can_partition: bool = False
    can_share: bool = False
    has_events: bool = False
    notes: tuple[str, ...] = ()


# --- signals and events --------------------------------------------------------------------------


class Quality(StrEnum):
    """Whether there is a value, and if not, why. There is never a zero where there is no value."""

    VALUE = "value"
    NOT_SUPPORTED = "not_supported"
    NOT_PERMITTED = "not_permitted"
    STALE = "stale"


class SignalSpec(Value, frozen=True, kw_only=True):
    """One column of the sampler: what is measured, of what, in which unit, how often it is renewed.

    `name` is the Prometheus name with its base unit last; `subject` a device id or a partition id.
    `counter` values only grow within one epoch of the source.
    """

    name: str
    subject: str
    scope: Scope
    unit: str
    counter: bool = False
    source: str = ""
    refresh_period_s: float | None = None


class Signal(Value, frozen=True, kw_only=True):
    """One measured value with its ages; None unless `quality` is VALUE (or STALE: the last one)."""

    spec: SignalSpec
    quality: Quality
    value: float | None = None
    source_time_s: float | None = None
    read_time_s: float = 0.0
    reason: str = ""


class DeviceEvent(Value, frozen=True, kw_only=True):
    """Something the device told us by itself: a fault code, a reset, a geometry change."""

    device: DeviceId
    kind: str  # "fault", "reset", "geometry", "process"
    code: str = ""  # vendor's code with its class: "xid:79", "ras:umc", "neuron:hbm_ue"
    partition: PartitionId | None = None
    time_s: float = 0.0
    detail: str = ""


# --- evidence and audit --------------------------------------------------------------------------


class Fact(Value, frozen=True, kw_only=True):
    """One thing that was looked at: the raw material of checks.

    `name` is dotted and documented by its collector (`cgroup.cpus_effective`); `value` is JSON;
    `method` says
    how it was read (path, call), `resolution` how fine or how often. `quality` other than VALUE
    means absent.
    """

    subject: str
    name: str
    quality: Quality = Quality.VALUE
    value: Json = None
    reason: str = ""
    method: str = ""
    resolution: str = ""
    read_at_s: float = 0.0


class Verdict(StrEnum):
    """Outcome of a check. Missing evidence is UNKNOWN, never PASS."""

    PASS = "pass"  # noqa: S105
    FAIL = "fail"
    UNKNOWN = "unknown"
    NOT_APPLICABLE = "not_applicable"


class Judgement(Value, frozen=True, kw_only=True):
    """One check's verdict on one subject, with what was expected, what was seen and how."""

    check: str  # stable id: "CPU-01"
    subject: str
    verdict: Verdict
    claim: str
    expected: str = ""
    observed: str = ""
    method: str = ""
    resolution: str = ""
    reason: str = ""


class ResidualClass(Value, frozen=True, kw_only=True):
    """A known attack or interference class that a tier does not close."""

    id: str
    name: str
    text: str
    source: str


class PartitionReport(Value, frozen=True, kw_only=True):
    """The tier of one partition, computed from its judgements, and all that stays open."""

    partition: Partition
    tier: Tier
    reason: str
    simulated: bool
    judgements: tuple[Judgement, ...] = ()
    residual: tuple[str, ...] = ()  # ids of ResidualClass


class ShareReport(Value, frozen=True, kw_only=True):
    """How a shared device stood, with the columns of its last minutes, oldest first.

    `production_ratio` is production's speed against solo (None: nothing was judged then), and
    `lent_ratio` the share of the device's time that its neighbours had.
    """

    device: str
    production: tuple[str, ...] = ()
    opportunistic: tuple[str, ...] = ()
    stage: str
    answer: str
    reason: str = ""
    budget_ratio: float
    lower_ratio: float | None = None
    upper_ratio: float | None = None
    e_value: float = 0.0
    windows: int = 0
    skipped: int = 0
    bypasses: tuple[str, ...] = ()
    history_age_s: tuple[float, ...] = ()
    production_ratio: tuple[float | None, ...] = ()
    lent_ratio: tuple[float, ...] = ()


class AuditResult(Value, frozen=True, kw_only=True):
    """One complete audit. `verdict` is the worst: fail, else unknown, else pass."""

    node: str
    boot_id: str
    sequence: int
    taken_at_s: float
    taken_wall_s: float
    agent_version: str
    verdict: Verdict
    devices: tuple[Device, ...] = ()
    partitions: tuple[PartitionReport, ...] = ()
    node_judgements: tuple[Judgement, ...] = ()
    residual_classes: tuple[ResidualClass, ...] = ()
    evidence_sequence: int | None = None
    evidence_hash: str | None = None
    mode: Literal["events", "polling", "once"] = "once"
    shares: tuple[ShareReport, ...] = ()


class Finding(Value, frozen=True, kw_only=True):
    """A verdict or a tier that changed."""

    check: str
    subject: str
    before: Verdict | None
    after: Verdict
    tier_before: Tier | None
    tier_after: Tier | None
    expected: str
    observed: str
    time_s: float
    time_wall_s: float


# --- leases --------------------------------------------------------------------------------------


class LeaseState(StrEnum):
    """`free -> reserved -> committed -> releasing -> free`; a free lease no longer exists."""

    RESERVED = "reserved"
    COMMITTED = "committed"
    RELEASING = "releasing"


class LeasedPiece(Value, frozen=True, kw_only=True, order=True):
    """One partition of a lease, at the generation it was granted."""

    partition: PartitionId
    generation: int


class Lease(Value, frozen=True, kw_only=True):
    """A grant of partitions to a tenant until a deadline on this node's boot clock.

    `expires_at_s` is None for a committed lease without an end. `token` is the fencing token: it
    only grows, over
    restarts and reboots too.
    """

    id: LeaseId
    tenant: TenantId
    pieces: tuple[LeasedPiece, ...]
    token: int
    state: LeaseState
    boot_id: str
    granted_at_s: float
    expires_at_s: float | None
    epoch: int = 0  # of the brain that granted it
