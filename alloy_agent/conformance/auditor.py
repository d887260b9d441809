"""The audit: once, or continuously.

Continuously means: a process event (fork, exec, exit, change of user) or a write to a partition's
cgroup re-judges only the partitions that it touches, within a batch of `BATCH_S`; a poll compares
the geometry with the last one; and every check runs again each `period_s`. Where the kernel sends
no process events, `mode` is "polling" and the delay is that of the poll.

Rules that stay true in here:

* A result is always whole: what was not judged again is carried over from the last full audit.
* Events are hints. What is judged is read from the kernel after them.
* A process joins a partition in several writes, and it and its binding end one after the other. A
  failure that rests on where processes are is therefore looked at again before it is told.
* Nothing in here changes a partition, and no failure of a device, the disk or a listener ends the
  loop.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import select
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, Protocol

import msgspec

from alloy_agent.conformance.checks import (
    FactBook,
    Intent,
    judge,
    residual_table,
    worst,
)
from alloy_agent.conformance.collect import HostView
from alloy_agent.conformance.evidence import EvidenceLog, VerifyReport, verify
from alloy_agent.conformance.fences import as_told, combined
from alloy_agent.conformance.recording import Recorder, VerdictStore, chain_fact
from alloy_agent.errors import AlloyError, BackendError
from alloy_agent.host import clock
from alloy_agent.host.processes import ProcessInfo
from alloy_agent.host.procevents import ProcessEventKind, ProcessEvents
from alloy_agent.host.watch import CgroupWatch
from alloy_agent.model import (
    AuditResult,
    Fact,
    Finding,
    Judgement,
    Partition,
    PartitionId,
    PartitionReport,
    Quality,
    ShareReport,
    Snapshot,
    Value,
    Verdict,
)

LOG = logging.getLogger(__name__)

Mode = Literal["events", "polling", "once"]

EXIT_CODES = {Verdict.PASS: 0, Verdict.NOT_APPLICABLE: 0, Verdict.FAIL: 1, Verdict.UNKNOWN: 3}

BATCH_S = 0.02  # events within it are judged together, so that a fork storm costs a bounded share
DEEP_EVERY = 6  # full audits between two that read the threads of outsiders too
WHOLE_CHAIN_EVERY_S = 3600.0
WATCH_WAIT_S = 0.5
PASSING_CHECKS = frozenset({"PART-04", "CGR-03", "CGR-04", "CPU-03", "CPU-04", "MIG-04", "DEV-02"})
PASSING_S = 0.03  # a start or an end takes a few milliseconds
PASSING_LOOKS = 2


def exit_code(verdict: Verdict) -> int:
    """Return the exit status of `audit`: 0 pass, 1 a fail, 3 an unknown (2 is argparse's)."""
    return EXIT_CODES[verdict]


class Sources(Protocol):
    """Where an audit gets what it judges."""

    def observe(self) -> Snapshot:
        """Return the node as it is now, or as it was a moment ago."""
        ...

    def device_facts(self, snapshot: Snapshot) -> Sequence[Fact]:
        """Return what the backends show of all devices; a device that fails has no facts."""
        ...

    def intent(self) -> Intent:
        """Return what ought to be."""
        ...


class Shared(Protocol):
    """Where an audit learns how shared devices stand; changes between two looks at devices."""

    def facts(self, snapshot: Snapshot) -> Sequence[Fact]:
        """Return the facts of the devices that are cut into shares."""
        ...

    def reports(self) -> tuple[ShareReport, ...]:
        """Return what the result shows of each shared device."""
        ...


class AuditIdentity(Value, frozen=True, kw_only=True):
    """Who audits."""

    node: str
    agent_version: str


class Move(Value, frozen=True, kw_only=True):
    """A process that came into a partition or left it."""

    partition: PartitionId
    pid: int
    comm: str
    entered: bool
    noticed_at_s: float


class Timing(Value, frozen=True, kw_only=True):
    """How often the continuous audit looks."""

    period_s: float = 10.0
    poll_period_s: float = 0.5
    events: bool = True


def audit_once(  # noqa: PLR0913 - what is judged, by whom, and where it is kept
    sources: Sources,
    identity: AuditIdentity,
    *,
    store: VerdictStore | None = None,
    evidence: EvidenceLog | None = None,
    shared: Shared | None = None,
    proc_root: str = "/proc",
    host_root: str = "",
) -> AuditResult:
    """Run every check once, record what changed, and return the result."""
    for looks_left in range(PASSING_LOOKS, -1, -1):
        snapshot = sources.observe()
        view = HostView(snapshot, proc_root, host_root)
        more = shared.facts(snapshot) if shared is not None else ()
        device_facts = sources.device_facts(snapshot)
        facts = collect_all(snapshot, view, device_facts, chain_fact(evidence), *more)
        reports, judgements = judge(snapshot, facts, sources.intent())
        if not looks_left or not doubtful({}, reports):
            break
        time.sleep(PASSING_S)
    shares = shared.reports() if shared is not None else ()
    result = assemble(identity, snapshot, reports, judgements, mode="once", shares=shares)
    Recorder(store, evidence).record(result)
    return with_head(result, evidence)


def doubtful(
    before: Mapping[PartitionId, PartitionReport], reports: Iterable[PartitionReport]
) -> set[PartitionId]:
    """Return the partitions with a new failure that may be a process on its way in or out."""
    found = set()
    for report in reports:
        known = before.get(report.partition.id)
        failed = {j.check for j in known.judgements if j.verdict is Verdict.FAIL} if known else ()
        if any(
            judgement.verdict is Verdict.FAIL
            and judgement.check in PASSING_CHECKS
            and judgement.check not in failed
            for judgement in report.judgements
        ):
            found.add(report.partition.id)
    return found


def collect_all(
    snapshot: Snapshot, view: HostView, device_facts: Sequence[Fact], *more: Fact
) -> FactBook:
    """Return all facts of a snapshot; what the host itself shows outranks a backend's word."""
    devices = {device.id: device for device in snapshot.devices}
    told = [*pids_of(device_facts), *device_facts]
    facts = [*told, *as_told(told), *view.node_facts(), *more]
    for partition in snapshot.partitions:
        if partition.device in devices:
            facts += view.partition_facts(partition, devices[partition.device])
    book = FactBook(facts)
    return book.merged(fence_facts(book, view, snapshot.partitions))


def fence_facts(book: FactBook, view: HostView, partitions: Iterable[Partition]) -> list[Fact]:
    """Return processes and fences of accelerators' partitions, as backend and host show them."""
    behind = view.tenants()
    return [
        fact
        for partition in partitions
        if partition.access.device_nodes and not partition.access.cgroup_procs
        for fact in combined(book, partition.id, behind.get(partition.id))
    ]


def assemble(  # noqa: PLR0913 - the parts of a result
    identity: AuditIdentity,
    snapshot: Snapshot,
    reports: Sequence[PartitionReport],
    judgements: Sequence[Judgement],
    mode: Mode,
    *,
    shares: tuple[ShareReport, ...] = (),
) -> AuditResult:
    """Return one result from its parts."""
    return AuditResult(
        node=identity.node,
        boot_id=snapshot.boot_id,
        sequence=snapshot.sequence,
        taken_at_s=clock.boottime_s(),
        taken_wall_s=clock.wall_s(),
        agent_version=identity.agent_version,
        verdict=worst(reports, judgements),
        devices=snapshot.devices,
        partitions=tuple(reports),
        node_judgements=tuple(judgements),
        residual_classes=residual_table(reports),
        mode=mode,
        shares=shares,
    )


def with_head(result: AuditResult, evidence: EvidenceLog | None) -> AuditResult:
    """Return the result with the head of the chain that holds it."""
    if evidence is None:
        return result
    head = evidence.head
    return msgspec.structs.replace(result, evidence_sequence=head.sequence, evidence_hash=head.hash)


def pids_of(facts: Iterable[Fact]) -> list[Fact]:
    """Return who works in partitions without cgroups, from what their device shows."""
    found = []
    for fact in facts:
        if fact.name != "partition.processes":
            continue
        if fact.quality is not Quality.VALUE:  # the reason why nobody can tell goes along
            found.append(msgspec.structs.replace(fact, name="partition.pids"))
            continue
        clients = fact.value if isinstance(fact.value, list) else []
        pids = [c["pid"] for c in clients if isinstance(c, dict) and not c.get("monitor")]
        found.append(msgspec.structs.replace(fact, name="partition.pids", value=pids))
    return found


class Auditor:
    """The continuous audit; one thread that judges, and one that waits for cgroup changes."""

    def __init__(  # noqa: PLR0913 - each argument is one neighbour
        self,
        sources: Sources,
        identity: AuditIdentity,
        *,
        store: VerdictStore | None = None,
        evidence: EvidenceLog | None = None,
        timing: Timing | None = None,
        on_result: Callable[[AuditResult], None] | None = None,
        on_finding: Callable[[Finding], None] | None = None,
        on_move: Callable[[Move], None] | None = None,
        shared: Shared | None = None,
        proc_root: str = "/proc",
        host_root: str = "",
    ) -> None:
        """Prepare to audit.

        Args:
            sources: What is judged.
            identity: Who judges.
            store: Keeps last verdicts; None: nothing is remembered over a restart.
            evidence: The chain; None: nothing is recorded, and REC-01 says so.
            timing: How often to look.
            on_result: Called with each new result, on the auditor's thread.
            on_finding: Called with each finding, on the auditor's thread.
            on_move: Called with each process that came or left, on the auditor's thread.
            shared: How shared devices stand; None: nobody tells.
            proc_root: Where procfs is.
            host_root: Where the host's root file system is seen.
        """
        self._sources, self._identity = sources, identity
        self._evidence = evidence
        self._recorder = Recorder(store, evidence)
        self._timing = timing or Timing()
        self._on_result, self._on_finding, self._on_move = on_result, on_finding, on_move
        self._shared = shared
        self._reconsidered: queue.SimpleQueue[str] = queue.SimpleQueue()  # devices, by their shares
        self._roots = (proc_root, host_root)
        self._judging = threading.RLock()
        self._wake, self._stop = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        self._watcher: threading.Thread | None = None
        self._watch: CgroupWatch | None = None
        self._events: ProcessEvents | None = None
        self._written = False  # a watched cgroup was written to
        self._drained = threading.Event()
        self._latest: AuditResult | None = None
        self._snapshot: Snapshot | None = None
        self._view: HostView | None = None
        self._book = FactBook(())
        self._reports: dict[PartitionId, PartitionReport] = {}
        self._full_count = 0
        self._whole_at_s = float("-inf")
        self._whole: VerifyReport | None = None

    # --- what callers do ----------------------------------------------------------------------

    @property
    def latest(self) -> AuditResult | None:
        """The last result, or None before the first."""
        return self._latest

    @property
    def mode(self) -> Mode:
        """Whether process events drive the audit, or only polling."""
        events = self._events
        return "events" if events is not None and events.mode == "events" else "polling"

    @property
    def alive(self) -> bool:
        """Whether the loop is running; a watchdog should ask."""
        return self._thread is not None and self._thread.is_alive()

    def start(self) -> None:
        """Listen, audit once, and go on until `stop`."""
        if self._timing.events:
            self._events = ProcessEvents(
                poll_interval_s=self._timing.poll_period_s, on_event=self._wake.set
            )
            self._events.start()
            self._start_watch()
        self._thread = threading.Thread(target=self._run, name="auditor", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the loop and let go of the listeners; the evidence log stays open."""
        self._stop.set()
        self._wake.set()
        for thread in (self._thread, self._watcher):
            if thread is not None and thread is not threading.current_thread():
                thread.join(timeout=10)
        if self._events is not None:
            self._events.stop()
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    def reconsider(self, devices: Iterable[str]) -> None:
        """Judge the partitions of some devices again at once; callable from any thread."""
        for device in devices:
            self._reconsidered.put(device)
        self._wake.set()

    def audit_now(self) -> AuditResult:
        """Run every check now and return the result; callable from any thread.

        Raises:
            AlloyError: The node cannot be observed at all.
        """
        with self._judging:
            return self._full(deep=True)

    # --- the loop -----------------------------------------------------------------------------

    def _run(self) -> None:
        next_full = next_poll = 0.0
        while not self._stop.is_set():
            now = clock.boottime_s()
            if now >= next_full:
                self._guarded(self._periodic)
                next_full = clock.boottime_s() + self._timing.period_s
                next_poll = clock.boottime_s() + self._timing.poll_period_s
            elif now >= next_poll:
                self._guarded(self._poll)
                next_poll = clock.boottime_s() + self._timing.poll_period_s
            else:
                self._wait(min(next_full, next_poll) - now)

    def _wait(self, timeout_s: float) -> None:
        if self._wake.wait(timeout=max(0.0, timeout_s)) and not self._stop.wait(BATCH_S):
            self._wake.clear()
            self._guarded(self._react)

    def _guarded(self, tick: Callable[[], None]) -> None:
        """Run one tick; a failure that is explained is logged, and the loop goes on."""
        try:
            with self._judging:
                tick()
        except (AlloyError, OSError) as exc:
            LOG.warning("audit_failed", extra={"reason": str(exc)})

    def _periodic(self) -> None:
        now = clock.boottime_s()
        if self._evidence is not None and now - self._whole_at_s >= WHOLE_CHAIN_EVERY_S:
            self._whole_at_s = now
            threading.Thread(target=self._verify_chain, name="evidence-verify", daemon=True).start()
        self._full(deep=self._full_count % DEEP_EVERY == 0)

    def _verify_chain(self) -> None:
        """Verify all files of the chain, away from the loop."""
        evidence = self._evidence
        if evidence is None:
            return
        try:
            self._whole = verify(evidence.directory, evidence.public_key_pem, live=True)
        except AlloyError as exc:
            LOG.warning("evidence_not_verified", extra={"reason": str(exc)})

    def _poll(self) -> None:
        """Look whether the geometry is still what was judged; sign a head if one is due."""
        if self._evidence is not None:
            with contextlib.suppress(AlloyError):
                self._evidence.tick()
        snapshot = self._sources.observe()
        if self._snapshot is None or _geometry(snapshot) != _geometry(self._snapshot):
            self._full(deep=False, snapshot=snapshot)
        else:
            self._catch_up(all_partitions=False)

    def _full(
        self, *, deep: bool, snapshot: Snapshot | None = None, looks: int = PASSING_LOOKS
    ) -> AuditResult:
        snapshot = snapshot or self._sources.observe()
        self._full_count += 1
        old = self._view
        self._snapshot = snapshot
        self._view = HostView(snapshot, *self._roots, deep=deep)
        self._note_moves(old, self._view)
        chain = chain_fact(self._evidence, self._whole)
        device_facts = self._sources.device_facts(snapshot)
        shared = self._shared.facts(snapshot) if self._shared is not None else ()
        self._book = collect_all(snapshot, self._view, device_facts, chain, *shared)
        reports, judgements = judge(snapshot, self._book, self._sources.intent())
        if looks and doubtful(self._reports, reports):
            self._stop.wait(PASSING_S)
            return self._full(deep=deep, looks=looks - 1)
        self._reports = {report.partition.id: report for report in reports}
        self._rewatch()
        return self._publish(judgements, whole=True)

    def _react(self) -> None:
        """Judge again what the waiting events touch."""
        self._react_to_shares()
        events = self._events.get(timeout_s=0) if self._events is not None else ()
        written = self._drain()
        if written or any(event.kind is ProcessEventKind.RESYNC for event in events):
            self._catch_up(all_partitions=written)
        else:
            self._rejudge(self._take({event.pid for event in events}))

    def _react_to_shares(self) -> None:
        """Judge again the partitions of the devices whose keeper said that something changed."""
        devices: set[str] = set()
        with contextlib.suppress(queue.Empty):
            while True:
                devices.add(self._reconsidered.get_nowait())
        if devices and self._snapshot is not None:
            self._rejudge({p.id for p in self._snapshot.partitions if p.device in devices})

    def _catch_up(self, *, all_partitions: bool) -> None:
        """Find out what changed without the help of events, and judge that again."""
        view = self._view
        if view is None:
            return
        touched = self._take(view.stale())
        if all_partitions:  # a cgroup was written to: CPUs or caps may be others now
            touched |= {home.partition.id for home in view.homes}
        self._rejudge(touched)

    def _take(self, pids: set[int]) -> set[PartitionId]:
        """Read some processes again and return the partitions that they touch."""
        view = self._view
        if view is None or not pids:
            return set()
        before = {pid: view.processes.get(pid) for pid in pids}
        view.refresh(pids)
        touched: set[PartitionId] = set()
        for pid, old in before.items():
            new = view.processes.get(pid)
            touched |= self._moved(view, old, new)
            if old is None or new is None or old.cpus_allowed != new.cpus_allowed:
                touched |= _reached(view, old) | _reached(view, new)
        return touched

    def _moved(
        self, view: HostView, old: ProcessInfo | None, new: ProcessInfo | None
    ) -> set[PartitionId]:
        was = view.places_of(old) if old else set()
        now = view.places_of(new) if new else set()
        process = new or old
        if process is not None:
            for partition in was ^ now:
                self._tell_move(partition, process, entered=partition in now)
        return was | now

    def _rejudge(self, partitions: set[PartitionId], looks: int = PASSING_LOOKS) -> None:
        """Judge some partitions again with fresh facts of the host."""
        snapshot, view = self._snapshot, self._view
        if snapshot is None or view is None or not partitions:
            return
        devices = {device.id: device for device in snapshot.devices}
        fresh = [*view.node_facts(), chain_fact_kept(self._book)]
        for partition in snapshot.partitions:
            if partition.id in partitions:
                fresh += view.partition_facts(partition, devices[partition.device])
        chosen = [p for p in snapshot.partitions if p.id in partitions]
        fresh += fence_facts(self._book, view, chosen)
        if self._shared is not None:
            fresh += self._shared.facts(snapshot)
        self._book = self._book.merged(fact for fact in fresh if fact is not None)
        reports, judgements = judge(snapshot, self._book, self._sources.intent(), only=partitions)
        changed = {report.partition.id: report for report in reports}
        if looks and (doubts := doubtful(self._reports, reports)):
            self._stop.wait(PASSING_S)
            inside = {pid for partition, pid in _membership(view) if partition in doubts}
            touched = self._take(inside | view.stale())
            self._rejudge(partitions | touched, looks - 1)
            return
        if all(self._reports.get(ident) == report for ident, report in changed.items()):
            return
        self._reports |= changed
        self._publish(judgements, whole=False)

    def _publish(self, judgements: Sequence[Judgement], *, whole: bool) -> AuditResult:
        if self._snapshot is None:
            raise BackendError("nothing was observed yet")
        reports = tuple(
            self._reports[p.id] for p in self._snapshot.partitions if p.id in self._reports
        )
        shares = self._shared.reports() if self._shared is not None else ()
        result = assemble(
            self._identity, self._snapshot, reports, judgements, mode=self.mode, shares=shares
        )
        findings = self._recorder.record(result, whole=whole)
        result = with_head(result, self._evidence)
        self._latest = result
        if self._on_result is not None:
            self._on_result(result)
        for finding in findings:
            _log_finding(finding)
            if self._on_finding is not None:
                self._on_finding(finding)
        return result

    # --- processes that move ------------------------------------------------------------------

    def _note_moves(self, old: HostView | None, new: HostView) -> None:
        """Tell of processes that are elsewhere than in the view before."""
        if old is None:
            return
        was, now = _membership(old), _membership(new)
        for partition, pid in sorted(was ^ now):
            process = new.processes.get(pid) or old.processes.get(pid)
            if process is not None:
                self._tell_move(partition, process, entered=(partition, pid) in now)

    def _tell_move(self, partition: PartitionId, process: ProcessInfo, *, entered: bool) -> None:
        if self._on_move is None:
            return
        self._on_move(
            Move(
                partition=partition,
                pid=process.pid,
                comm=process.comm,
                entered=entered,
                noticed_at_s=clock.boottime_s(),
            )
        )

    # --- cgroup changes -----------------------------------------------------------------------

    def _start_watch(self) -> None:
        try:
            self._watch = CgroupWatch()
        except AlloyError as exc:
            LOG.warning("no_cgroup_events", extra={"reason": str(exc)})
            return
        self._watcher = threading.Thread(target=self._listen, name="cgroup-watch", daemon=True)
        self._watcher.start()

    def _listen(self) -> None:
        """Wake the loop when cgroup changes wait; the watch itself belongs to the loop."""
        poll = select.poll()
        if self._watch is not None:
            poll.register(self._watch.fileno(), select.POLLIN)
        while not self._stop.is_set():
            if poll.poll(WATCH_WAIT_S * 1000):
                self._drained.clear()
                self._written = True
                self._wake.set()
                self._drained.wait(WATCH_WAIT_S)

    def _drain(self) -> bool:
        """Take the cgroup changes that wait, and return whether there were any."""
        if not self._written or self._watch is None:
            return False
        self._written = False
        changes = self._watch.wait(0)
        self._drained.set()
        return bool(changes)

    def _rewatch(self) -> None:
        """Watch the cgroups of all partitions, and the roots into which processes escape."""
        if self._watch is None or self._view is None:
            return
        folders: list[str] = []
        for home in self._view.homes:
            for hierarchy in home.hierarchies:
                folders += [hierarchy.folder(home.path), hierarchy.mount]
        self._watch.watch(dict.fromkeys(folders))


def chain_fact_kept(book: FactBook) -> Fact | None:
    """Return what is known of the chain; a process event is no reason to read it again."""
    return book.find("node", "evidence.chain")


def _geometry(snapshot: Snapshot) -> tuple[object, ...]:
    """Return what a change of geometry changes, and nothing that ages."""
    devices = tuple((d.id, d.condition, d.modes, d.units) for d in snapshot.devices)
    pieces = tuple(
        (
            p.id,
            p.incarnation,
            p.generation,
            p.placement,
            p.units,
            p.memory_bytes,
            p.altered,
            p.tenant,
        )
        for p in snapshot.partitions
    )
    return devices, pieces


def _membership(view: HostView) -> set[tuple[PartitionId, int]]:
    return {
        (home.partition.id, process.pid)
        for process in view.processes.values()
        for home in view.home_of(process)
    }


def _reached(view: HostView, process: ProcessInfo | None) -> set[PartitionId]:
    """Return the partitions on whose cores a narrowly placed process may run."""
    if process is None or set(process.cpus_allowed) >= set(view.cpus):
        return set()
    return {
        partition
        for partition, cpus in view.granted.items()
        if set(cpus) & set(process.cpus_allowed)
    }


def _log_finding(finding: Finding) -> None:
    level = logging.INFO if finding.after is Verdict.PASS else logging.WARNING
    LOG.log(
        level,
        "finding",
        extra={
            "check": finding.check,
            "subject": finding.subject,
            "before": finding.before,
            "after": finding.after,
            "expected": finding.expected,
            "observed": finding.observed,
        },
    )
