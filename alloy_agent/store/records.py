"""The rows of the store that are no nouns of the whole agent, as frozen values."""

from __future__ import annotations

from enum import StrEnum

from alloy_agent.model import (
    DeviceId,
    Layout,
    ModeKind,
    Occupant,
    PartitionId,
    Plan,
    Step,
    TenantId,
    Tier,
    Value,
    Verdict,
)


class RunStatus(StrEnum):
    """How far a run of a plan came. The first three are unfinished: `recover` takes them up."""

    RUNNING = "running"
    ROLLING_BACK = "rolling_back"
    INTERRUPTED = "interrupted"  # stopped between steps, or a call that has not returned
    APPLIED = "applied"
    PENDING = "pending"  # a mode waits for a reset or a driver reload
    ROLLED_BACK = "rolled_back"
    STUCK = "stuck"  # the roll-back failed; the remaining difference was reported
    ABANDONED = "abandoned"  # the node had changed under an interrupted run


UNFINISHED = (RunStatus.RUNNING, RunStatus.ROLLING_BACK, RunStatus.INTERRUPTED)


class EntryState(StrEnum):
    """What became of one journalled step."""

    INTENT = "intent"  # on disk before the hardware is touched; nothing is known about it yet
    DONE = "done"
    PENDING = "pending"
    FAILED = "failed"
    UNKNOWN = "unknown"  # the call has not returned


class PieceRef(Value, frozen=True, kw_only=True, order=True):
    """One living piece: where it is and which incarnation."""

    partition: PartitionId
    incarnation: str


class Before(Value, frozen=True, kw_only=True):
    """What the devices that a step reaches looked like right before it."""

    pieces: tuple[PieceRef, ...] = ()
    modes: tuple[tuple[DeviceId, ModeKind, str], ...] = ()
    caps: tuple[tuple[PartitionId, int], ...] = ()
    by_mode: tuple[PieceRef, ...] = ()  # those of `pieces` that are there by a mode, not by a step
    half: tuple[tuple[DeviceId, str], ...] = ()  # half-made pieces, by reason


class Entry(Value, frozen=True, kw_only=True):
    """One step of a run, or the undoing of one, in the order in which they were begun."""

    run: int
    position: int
    number: int  # of the planned step
    undo: bool
    step: Step
    before: Before
    state: EntryState
    error: str = ""
    made: tuple[PieceRef, ...] = ()
    gone: tuple[PieceRef, ...] = ()


class Run(Value, frozen=True, kw_only=True):
    """One run of a plan with all that was journalled of it."""

    id: int
    boot_id: str
    status: RunStatus
    plan: Plan
    previous: Layout | None
    started_wall_s: float
    detail: str = ""
    entries: tuple[Entry, ...] = ()


class Binding(Value, frozen=True, kw_only=True):
    """A tenant in one incarnation of a partition. `pid` None: bound without a process of ours."""

    partition: PartitionId
    generation: int
    tenant: TenantId
    since_s: float
    boot_id: str
    pid: int | None = None
    start_ticks: int | None = None  # tells a process from a later one with its pid
    occupant: Occupant | None = None  # who that process was, before it went into the partition


class LastVerdict(Value, frozen=True, kw_only=True):
    """The last verdict of a check on a subject, or (check `TIER`) the last tier of a partition."""

    check: str
    subject: str
    verdict: Verdict
    tier: Tier | None = None
    observed: str = ""
    since_wall_s: float = 0.0


class OutboxRow(Value, frozen=True, kw_only=True):
    """One event that waits for the brain's acknowledgement; its key is (node, epoch, sequence)."""

    node: str
    epoch: int
    sequence: int
    kind: str
    payload: bytes
    time_wall_s: float


class OutboxState(Value, frozen=True, kw_only=True):
    """How full the outbox is, and how many events were dropped because it was full."""

    rows: int
    size_bytes: int
    acknowledged: int
    dropped: int
