"""Runs of plans: begin, step by step, verify, roll back, take up again after a crash.

For each step: intent on disk, device quiesced, one call, device read back, outcome on disk, device
resumed. After a crash the device is the truth and the journal says what was meant.

Rules that stay true in here:

* Nothing is called on hardware without an intent on disk, and nothing counts as done without a
  read-back.
* At start-up only what the journal says was begun is finished or undone. A piece that no step of a
  run names is never touched, whoever made it.
* A device is always resumed, however its step ended.
* A mode that waits for a reset or reload is reported as pending: not done, not undone, and not
  asked for again.
* A call that has not returned is not entered again; its step stays `unknown` until the device
  answers.
* One run at a time. `stop` lets the step in hand end, then leaves the run for `recover`.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from typing import TYPE_CHECKING, Literal, Protocol

import msgspec

from alloy_agent.errors import (
    ApplyError,
    BackendError,
    DeviceBusyError,
    DeviceStalledError,
    StalePlanError,
)
from alloy_agent.model import (
    ApplyReport,
    Condition,
    Destroy,
    Device,
    DeviceId,
    Observation,
    Plan,
    PlannedStep,
    Scope,
    Snapshot,
    Step,
    StepReport,
    Value,
)
from alloy_agent.planner.geometry import difference
from alloy_agent.planner.steps import describe
from alloy_agent.reconciler.current import refuse_if_stale, refuse_without_consent
from alloy_agent.reconciler.readback import (
    Outcome,
    ReadBack,
    before_of,
    judge,
    reach,
    ref,
    way_back,
)
from alloy_agent.store.records import Before, Entry, EntryState, Run, RunStatus
from alloy_agent.worker.client import WorkerDownError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from alloy_agent.store import Store

log = logging.getLogger(__name__)

ALL_SCOPES = frozenset(Scope)
OWN_SCOPES = frozenset({Scope.PARTITION, Scope.DEVICE})  # what a layout's own devices imply
_TOLD: dict[EntryState, Literal["done", "pending", "failed"]] = {
    EntryState.DONE: "done",
    EntryState.PENDING: "pending",
    EntryState.FAILED: "failed",
}


class WorkerLike(Protocol):
    """What the reconciler asks of the process of one backend."""

    def observe(self, device: DeviceId, deadline_s: float | None = None) -> Observation:
        """Return what the device says now."""
        ...

    def apply(self, step: Step) -> None:
        """Do one step."""
        ...

    def quiesce(self, device: DeviceId) -> None:
        """Let go of the device; returns when no handle is left, or raises at the deadline."""
        ...

    def resume(self, device: DeviceId) -> None:
        """Take the device up again."""
        ...


class ObserverLike(Protocol):
    """Where snapshots come from."""

    def observe(self) -> Snapshot:
        """Return the node as it is now."""
        ...


class Limits(Value, frozen=True, kw_only=True):
    """How long to wait for others.

    A busy device is tried again with waits that grow from first to longest, with jitter. A worker
    that died in a step is waited for, since its device has to be read before anything else.
    """

    busy_deadline_s: float = 10.0
    busy_wait_first_s: float = 0.05
    busy_wait_longest_s: float = 2.0
    worker_deadline_s: float = 10.0
    worker_wait_s: float = 0.1


class UnverifiedError(BackendError):
    """A call succeeded and the device does not show what it promised."""


class _Job:
    """One run while it is worked on."""

    def __init__(
        self,
        run: int,
        plan: Plan,
        snapshot: Snapshot,
        progress: Callable[[StepReport], None] | None,
    ) -> None:
        self.run = run
        self.plan = plan
        self.devices: dict[DeviceId, Device] = {d.id: d for d in snapshot.devices}
        self.progress = progress
        self.steps: list[StepReport] = []
        self.pending: list[str] = []
        self.waiting: set[DeviceId] = set()  # devices whose mode is pending

    def tell(self, report: StepReport) -> None:
        """Keep the report of a step that ended, and tell it."""
        if report.state != "running":
            self.steps.append(report)
        if self.progress is not None:
            with contextlib.suppress(OSError):  # a reader that went away does not stop a run
                self.progress(report)


class Reconciler:
    """The one room that changes hardware."""

    def __init__(
        self,
        workers: Mapping[str, WorkerLike],
        observer: ObserverLike,
        store: Store,
        *,
        limits: Limits | None = None,
    ) -> None:
        """Join the rooms.

        Args:
            workers: By name of their backend, as `Device.backend` says it.
            observer: For whole snapshots before a run and after it.
            store: Opened for writing.
            limits: How patient to be with a busy device.
        """
        self._workers = workers
        self._observer = observer
        self._store = store
        self._limits = limits or Limits()
        self._busy = threading.Lock()
        self._stopping = threading.Event()

    def stop(self) -> None:
        """Let the step in hand end and begin no other; returns at once, from any thread."""
        self._stopping.set()

    # --- apply ---

    def apply(
        self,
        plan: Plan,
        consent: frozenset[Scope] = OWN_SCOPES,
        on_progress: Callable[[StepReport], None] | None = None,
    ) -> ApplyReport:
        """Bring the node from what was planned for to the layout; return what became of it.

        Args:
            plan: Made from a recent snapshot.
            consent: Scopes that may be interrupted; by default not beyond the layout's own devices.
            on_progress: Told each step as it begins and as it ends.

        Raises:
            StalePlanError, ConsentError, ApplyError: Refused; nothing was touched.
            StoreError: The journal cannot be written; the run is left for `recover`.
        """
        with self._one_run():
            if (run := self._store.unfinished()) is not None:
                raise ApplyError(
                    f"run {run.id} towards layout {run.plan.layout.name} was interrupted",
                    cure="let the agent recover it first",
                )
            snapshot = self._observer.observe()
            refuse_if_stale(plan, snapshot, self._store.leases())
            refuse_without_consent(plan, consent)
            if not plan.steps:
                self._store.set_desired(plan.layout)
                return ApplyReport(outcome="unchanged", layout=plan.layout.name)
            job = _Job(self._store.begin(plan), plan, snapshot, on_progress)
            log.info("run_begun", extra={"run": job.run, "layout": plan.layout.name})
            return self._forward(job)

    @contextlib.contextmanager
    def _one_run(self) -> Iterator[None]:
        if not self._busy.acquire(blocking=False):
            raise ApplyError("another change of this node is running", cure="wait for its end")
        try:
            yield
        finally:
            self._busy.release()

    def _forward(self, job: _Job, done: frozenset[int] = frozenset()) -> ApplyReport:
        for planned in job.plan.steps:
            if planned.number in done:
                continue
            if self._stopping.is_set():
                return self._leave(job)
            if job.waiting.intersection(reach(planned.step, job.devices.values())):
                self._skip(job, planned)
                continue
            try:
                self._do(job, planned.number, planned.step)
            except DeviceStalledError as exc:
                return self._end(job, RunStatus.STUCK, str(exc))
            except BackendError as exc:
                if self._stopping.is_set() and isinstance(exc, DeviceBusyError):
                    return self._leave(job)
                return self._roll_back(job, str(exc))
        return self._end(job, RunStatus.PENDING if job.pending else RunStatus.APPLIED)

    def _leave(self, job: _Job) -> ApplyReport:
        self._store.set_run_status(job.run, RunStatus.INTERRUPTED)
        return self._report(job, "stopped", "stopped between two steps; the next start goes on")

    def _skip(self, job: _Job, planned: PlannedStep) -> None:
        text = f"{describe(planned.step)}: waits for the pending mode"
        job.pending.append(text)
        job.tell(StepReport(number=planned.number, step=planned.step, state="waiting", error=text))

    def _end(self, job: _Job, status: RunStatus, error: str = "") -> ApplyReport:
        self._store.finish(job.run, status, error)
        log.info("run_ended", extra={"run": job.run, "status": status.value, "reason": error})
        outcomes: dict[RunStatus, str] = {
            RunStatus.PENDING: "pending",
            RunStatus.APPLIED: "applied",
        }
        return self._report(job, outcomes.get(status, status.value), error)

    def _report(self, job: _Job, outcome: str, error: str = "") -> ApplyReport:
        remaining: tuple[str, ...] = ()
        if outcome not in ("applied", "pending"):
            remaining = difference(job.plan.layout, self._observer.observe())
        return msgspec.convert(
            {
                "outcome": outcome,
                "layout": job.plan.layout.name,
                "run": job.run,
                "steps": tuple(job.steps),
                "error": error,
                "pending": tuple(job.pending),
                "remaining": remaining,
            },
            ApplyReport,
        )

    # --- one step ---

    def _do(self, job: _Job, number: int, step: Step, *, undo: bool = False) -> None:
        """Journal, do and verify one step.

        Raises:
            BackendError: The device refused, or does not show what was promised; journalled as
                failed.
        """
        devices = reach(step, job.devices.values())
        before = before_of(self._look(job, devices))
        position = self._store.intent(job.run, number, step, before=before, undo=undo)
        job.tell(StepReport(number=number, step=step, state="running", undo=undo))
        self._carry_out(job, position, number, step, before, undo=undo)

    def _carry_out(  # noqa: PLR0913
        self, job: _Job, position: int, number: int, step: Step, before: Before, *, undo: bool
    ) -> None:
        """Do the step whose intent is on disk at `position`, and put its outcome there."""
        devices = reach(step, job.devices.values())
        begun_s, tries = time.monotonic(), _Count()
        with self._quiesced(job, devices) as quiesce:
            try:
                failure = self._try(job, step, tries, quiesce)
                back = judge(step, before, self._look(job, devices))
                if isinstance(failure, WorkerDownError) and back.outcome is not Outcome.DONE:
                    failure = self._try(
                        job, step, tries, quiesce
                    )  # from half-way, as after a crash
                    back = judge(step, before, self._look(job, devices))
            except BackendError as exc:
                self._unknown(job, position, number, step, exc)
                raise
            if isinstance(failure, WorkerDownError) and back.outcome is Outcome.DONE:
                failure = None  # the answer was lost, the step was not
            if back.outcome is Outcome.PENDING and not isinstance(failure, DeviceBusyError):
                failure = None  # the device has taken the wish, however the call puts that
            if failure is None and back.outcome in (Outcome.UNTOUCHED, Outcome.PARTLY):
                failure = UnverifiedError(
                    f"{describe(step)}: the device took the call, but {back.why}"
                )
            state = self._settle(position, back, failure, run=job.run)
        report = StepReport(
            number=number,
            step=step,
            state=_TOLD[state],
            undo=undo,
            error=str(failure) if failure else back.why,
            duration_s=time.monotonic() - begun_s,
            attempts=tries.count,
        )
        if state is EntryState.PENDING:
            job.pending.append(f"{describe(step)}: {back.why}")
            job.waiting.update(devices)
        job.tell(report)
        if failure is not None:
            raise failure

    def _try(
        self, job: _Job, step: Step, tries: _Count, quiesce: Callable[[], None]
    ) -> BackendError | None:
        """Quiesce and make the call; return why it failed.

        Raises:
            DeviceStalledError: The call has not returned.
        """
        try:
            quiesce()
            self._call(job, step, tries)
        except DeviceStalledError:
            raise
        except BackendError as exc:
            return exc
        return None

    def _settle(
        self, position: int, back: ReadBack, failure: BackendError | None, *, run: int
    ) -> EntryState:
        """Put the outcome of a step on disk and return it."""
        if failure is not None:
            state = EntryState.FAILED
        elif back.outcome is Outcome.PENDING:
            state = EntryState.PENDING
        else:
            state = EntryState.DONE
        error = str(failure) if failure else None
        self._store.outcome(run, position, error, state=state, made=back.made, gone=back.gone)
        return state

    def _unknown(
        self, job: _Job, position: int, number: int, step: Step, exc: BackendError
    ) -> None:
        self._store.outcome(job.run, position, str(exc), state=EntryState.UNKNOWN)
        job.tell(StepReport(number=number, step=step, state="failed", error=str(exc)))

    @contextlib.contextmanager
    def _quiesced(self, job: _Job, devices: Iterable[DeviceId]) -> Iterator[Callable[[], None]]:
        """Lend a function that quiesces the devices; whatever happens then, they are resumed."""
        names = tuple(devices)

        def quiesce() -> None:
            for name in names:
                self._worker(job, name).quiesce(name)

        try:
            yield quiesce
        finally:
            for name in names:
                try:
                    self._worker(job, name).resume(name)
                except BackendError as exc:
                    log.warning("resume_failed", extra={"device": name, "reason": str(exc)})

    def _call(self, job: _Job, step: Step, tries: _Count) -> None:
        """Make the one call, again with growing waits while the device is busy."""
        import tenacity  # 50 ms that a command which only looks does not pay

        limits = self._limits
        worker = self._worker(job, step.device)
        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(DeviceBusyError),
            wait=tenacity.wait_exponential(
                multiplier=limits.busy_wait_first_s, max=limits.busy_wait_longest_s
            )
            + tenacity.wait_random(0, limits.busy_wait_first_s),
            stop=tenacity.stop_any(
                tenacity.stop_after_delay(limits.busy_deadline_s),
                tenacity.stop_when_event_set(self._stopping),
            ),
            sleep=tenacity.sleep_using_event(self._stopping),
            reraise=True,
        )
        for attempt in retrying:
            with attempt:
                tries.count = attempt.retry_state.attempt_number
                worker.apply(step)

    def _look(self, job: _Job, devices: Iterable[DeviceId]) -> tuple[Observation, ...]:
        """Observe some devices, waiting a while for a worker that died to be back."""
        import tenacity  # as above

        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(WorkerDownError),
            wait=tenacity.wait_fixed(self._limits.worker_wait_s),
            stop=tenacity.stop_after_delay(self._limits.worker_deadline_s),
            reraise=True,
        )
        return tuple(retrying(self._worker(job, name).observe, name) for name in devices)

    def _worker(self, job: _Job, device: DeviceId) -> WorkerLike:
        known = job.devices.get(device)
        if known is None or known.backend not in self._workers:
            raise BackendError(f"device {device} has no worker", cure="see `alloy-agent doctor`")
        return self._workers[known.backend]

    # --- roll-back ---

    def _roll_back(self, job: _Job, cause: str) -> ApplyReport:
        """Undo what the run has done, newest first, each step journalled and verified."""
        self._store.set_run_status(job.run, RunStatus.ROLLING_BACK, cause)
        log.warning("run_rolling_back", extra={"run": job.run, "reason": cause})
        for entry in self._to_undo(job):
            try:
                self._undo(job, entry)
            except BackendError as exc:
                error = f"{cause}; undoing step {entry.number} failed too: {exc}"
                return self._end(job, RunStatus.STUCK, error)
        return self._end(job, RunStatus.ROLLED_BACK, cause)

    def _to_undo(self, job: _Job) -> tuple[Entry, ...]:
        record = self._store.run(job.run)
        entries = () if record is None else record.entries
        undone = {e.number for e in entries if e.undo and e.state is EntryState.DONE}
        begun: dict[int, Entry] = {}
        for entry in entries:
            if not entry.undo and entry.number not in undone:
                begun[entry.number] = _joined(begun.get(entry.number), entry)
        return tuple(reversed(begun.values()))

    def _undo(self, job: _Job, entry: Entry) -> None:
        """Bring one step's devices back to what they were before it.

        Raises:
            BackendError: There is no way back, or the device refuses it.
        """
        now = self._look(job, reach(entry.step, job.devices.values()))
        planned = next((p for p in job.plan.steps if p.number == entry.number), None)
        step = way_back(None if planned is None else planned.undo, entry, now)
        if step is not None:
            self._do(job, entry.number, step, undo=True)

    # --- recovery ---

    def recover(
        self,
        replan: Callable[[], Plan | None] | None = None,
        consent: frozenset[Scope] = ALL_SCOPES,
        on_progress: Callable[[StepReport], None] | None = None,
    ) -> ApplyReport | None:
        """Finish or undo what an earlier process had begun; None when there was nothing.

        Makes no call on hardware except for the steps that the journal says were begun, and those
        planned behind them in the same run.

        Args:
            replan: Plans from what is there to what is desired; called when the interrupted plan no
                longer fits, for example after a restart of the node.
            consent: For a plan from `replan`; the interrupted run has its consent already.
            on_progress: As in `apply`.
        """
        with self._one_run():
            snapshot = self._observer.observe()
            self._note_boot(snapshot)
            run = self._store.unfinished()
            if run is None:
                self._settle_unknown(snapshot)
                return None
            job = _Job(run.id, run.plan, snapshot, on_progress)
            log.warning("run_recovering", extra={"run": run.id, "status": run.status.value})
            report = self._take_up(job, run, snapshot)
        if report.outcome == "abandoned" and replan is not None:
            plan = replan()
            if plan is not None:
                return self.apply(plan, consent, on_progress)
        return report

    def _note_boot(self, snapshot: Snapshot) -> None:
        """After a restart of the node, forget pieces of ours that did not outlive it."""
        if self._store.meta("boot_id") == snapshot.boot_id:
            return
        living = {ref(piece) for piece in snapshot.partitions}
        answering = {d.id for d in snapshot.devices if d.condition is Condition.OK}
        silent = tuple(d.id for d in snapshot.devices if d.id not in answering)
        for partition, incarnation in self._store.managed().items():
            kept = any(r.partition == partition and r.incarnation == incarnation for r in living)
            if not kept and not partition.startswith(tuple(f"{name}/" for name in silent)):
                self._store.set_managed(partition, None)
        self._store.set_meta("boot_id", snapshot.boot_id)

    def _take_up(self, job: _Job, run: Run, snapshot: Snapshot) -> ApplyReport:
        if run.boot_id != snapshot.boot_id:
            return self._end(job, RunStatus.ABANDONED, "the node was restarted meanwhile")
        failure = self._settle_open(job, run)
        run = self._store.run(run.id) or run
        if isinstance(failure, DeviceStalledError):
            return self._end(job, RunStatus.STUCK, str(failure))
        if run.status is RunStatus.ROLLING_BACK:
            return self._roll_back(job, run.detail or "interrupted while rolling back")
        last = next((e for e in reversed(run.entries) if not e.undo), None)
        if failure is None and run.status is RunStatus.RUNNING and last is not None:
            failure = BackendError(last.error) if last.state is EntryState.FAILED else None
        if failure is not None:
            return self._roll_back(job, str(failure))
        return self._continue(job, run)

    def _continue(self, job: _Job, run: Run) -> ApplyReport:
        settled = (EntryState.DONE, EntryState.PENDING)
        done = frozenset(e.number for e in run.entries if not e.undo and e.state in settled)
        for entry in run.entries:
            if entry.state is EntryState.PENDING and not entry.undo:
                job.pending.append(f"{describe(entry.step)}: {entry.error or 'pending'}")
                job.waiting.update(reach(entry.step, job.devices.values()))
        self._store.set_run_status(run.id, RunStatus.RUNNING)
        if not job.waiting:
            try:
                refuse_if_stale(run.plan, self._observer.observe(), self._store.leases(), done)
            except StalePlanError as exc:
                return self._end(job, RunStatus.ABANDONED, exc.message)
        return self._forward(job, done)

    def _settle_open(self, job: _Job, run: Run) -> BackendError | None:
        """Bring the step that was cut off to an end; return why that failed.

        Done already: noted. Not done, or half: the same step again under the same intent, which
        backends allow from any half-done state.
        """
        for entry in run.entries:
            if entry.state not in (EntryState.INTENT, EntryState.UNKNOWN):
                continue
            try:
                now = self._look(job, reach(entry.step, job.devices.values()))
                back = judge(entry.step, entry.before, now)
                if back.outcome in (Outcome.DONE, Outcome.PENDING):
                    self._tidy(job, entry.step)
                    self._settle(entry.position, back, None, run=run.id)
                    continue
                self._carry_out(
                    job, entry.position, entry.number, entry.step, entry.before, undo=entry.undo
                )
            except BackendError as exc:
                return exc
        return None

    def _tidy(self, job: _Job, step: Step) -> None:
        """Let a removal that was cut off end, since what shows no piece may still lie around.

        Aimed at one incarnation, it cannot reach a successor; that nothing is left is no failure.
        """
        if not isinstance(step, Destroy) or not step.partition.incarnation:
            return
        with self._quiesced(job, (step.device,)) as quiesce:
            failure = self._try(job, step, _Count(), quiesce)
        if failure is not None:
            log.info("nothing_to_tidy", extra={"device": step.device, "reason": str(failure)})

    def _settle_unknown(self, snapshot: Snapshot) -> None:
        """Note what became of calls that never returned, where their devices answer again."""
        for run in self._store.runs():
            for entry in run.entries:
                if entry.state is not EntryState.UNKNOWN or run.boot_id != snapshot.boot_id:
                    continue
                job = _Job(run.id, run.plan, snapshot, None)
                try:
                    now = self._look(job, reach(entry.step, job.devices.values()))
                except BackendError:
                    continue  # still does not answer; asked again at the next recovery
                back = judge(entry.step, entry.before, now)
                done = back.outcome in (Outcome.DONE, Outcome.PENDING)
                failure = None if done else BackendError(f"{entry.error}; {back.why}")
                self._settle(entry.position, back, failure, run=run.id)


class _Count:
    """How often a call was tried."""

    count = 0


def _joined(earlier: Entry | None, later: Entry) -> Entry:
    """Return two tries of one step as one: from before the first, with the marks of both."""
    if earlier is None:
        return later
    return msgspec.structs.replace(
        later,
        before=earlier.before,
        made=(*earlier.made, *later.made),
        gone=(*earlier.gone, *later.gone),
    )
