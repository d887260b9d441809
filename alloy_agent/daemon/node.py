"""Every room of one node, built and joined: for a command that acts once and for the daemon alike.

`Node(settings)` is a context manager. Entering it starts one worker process for each backend and
opens the store meanwhile; leaving it ends them. A command opens the store for reading only, which
works beside a daemon and on a read-only disk, unless it says that it will write.

Rules that stay true in here:

* One change at a time: whatever changes hardware or the books holds `_changing`.
* A store that cannot be trusted stops every change and nothing else: `degraded` says why.
* Nothing of ours is left behind: no process, no socket, no temporary file.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import msgspec

from alloy_agent import __version__
from alloy_agent.backends import backend_specs
from alloy_agent.errors import (
    AlloyError,
    ConfigError,
    StoreCorruptError,
    StoreError,
    StoreFullError,
)
from alloy_agent.host import clock
from alloy_agent.model import (
    ApplyReport,
    AuditResult,
    Device,
    DeviceEvent,
    Diagnosis,
    Fact,
    Layout,
    Occupant,
    Partition,
    PartitionId,
    PartitionReport,
    Plan,
    Quality,
    Scope,
    Snapshot,
    StepReport,
    TenantId,
)
from alloy_agent.worker import Worker, WorkerSettings

if TYPE_CHECKING:
    from alloy_agent.config import Settings
    from alloy_agent.conformance.auditor import AuditIdentity
    from alloy_agent.conformance.checks import Intent
    from alloy_agent.conformance.evidence import EvidenceLog
    from alloy_agent.conformance.shares import SharesOnHost
    from alloy_agent.daemon import documents
    from alloy_agent.daemon.api import LayoutRequest, OnProgress
    from alloy_agent.daemon.resetting import ResetDocument
    from alloy_agent.daemon.tenancy import Tenancy
    from alloy_agent.observer import Observer
    from alloy_agent.reconciler import Reconciler
    from alloy_agent.store import Store
    from alloy_agent.telemetry.drains import Drains

LOG = logging.getLogger(__name__)

DEFAULT_TENANT = "local"
NOWHERE = "/nonexistent/alloy"  # read-only, a state directory that is not there is an empty one


class _Unknown:
    """The generations for whom the books are closed: none is known, and 0 says so."""

    def generation_of(self, partition: PartitionId, incarnation: str, /) -> int:
        """Return 0."""
        del partition, incarnation
        return 0


class Node:
    """One node. Methods may be called from any thread.

    Args:
        settings: What to build.
        write: Open the state for writing; one process at a time can.
        sample: Run the samplers; a command has no use for them.
        lenient: Where the state cannot be written, read it instead and say so in `notes`.
        salvage: Go on without trustworthy state, observing only, instead of failing.
        on_event: Told of each device event.
    """

    def __init__(  # noqa: PLR0913 - what a command and the daemon ask differently
        self,
        settings: Settings,
        *,
        write: bool = False,
        sample: bool = False,
        lenient: bool = False,
        salvage: bool = False,
        on_event: Callable[[DeviceEvent], None] | None = None,
    ) -> None:
        self.settings = settings
        self.name = settings.node_name
        self.notes: list[str] = []
        self.degraded = ""
        self.full = False  # degraded for want of room
        self._write = write
        self._sample = sample
        self._lenient = lenient
        self._books_closed = False  # to this user: generations, makers and tenants are not known
        self._salvage = salvage
        self._evidence: EvidenceLog | None = None
        self.drains: Callable[[], Drains] | None = None  # a daemon's; else what the store keeps
        self._changing = threading.RLock()
        worker_settings = WorkerSettings(
            rate_hz=settings.sampler.rate_hz,
            cpu_share_max=settings.sampler.cpu_budget_ratio,
            realtime=settings.sampler.raise_priority,
            observe_deadline_s=settings.observe.call_deadline_s,
            open_deadline_s=settings.observe.start_deadline_s,
            apply_deadline_s=settings.observe.change_deadline_s,
            backoff_base_s=settings.observe.restart_min_s,
            backoff_cap_s=settings.observe.restart_max_s,
        )
        self.workers: tuple[Worker, ...] = tuple(
            Worker(spec, worker_settings, sample=sample, on_event=on_event)
            for spec in backend_specs(settings)
        )
        self.store: Store
        self.observer: Observer
        self.tenancy: Tenancy
        self.reconciler: Reconciler | None = None

    # --- life ---

    def __enter__(self) -> Node:
        """Start the workers and open the store.

        Raises:
            StoreError: The state cannot be opened; nothing was started.
            ConfigError: Simulated silicon cannot be as it was asked for.
        """
        if self.settings.fake:
            from alloy_agent.silicon import build
            from alloy_agent.silicon.spec import parse_specs

            build.check(parse_specs(self.settings.fake))
        if self._sample:
            self.store = self._open_store()  # refused before anything is started
        try:
            for worker in self.workers:
                worker.start()
            # What follows is imported while the workers start, which takes as long.
            from alloy_agent.daemon.tenancy import Tenancy
            from alloy_agent.observer import Observer

            if not self._sample:
                self.store = self._open_store()
            self.tenancy = Tenancy(self.store)
            self.observer = Observer(
                self.workers,
                _Unknown() if self._books_closed else self.store,
                managed=self.tenancy.managed,
                tenant_of=self.tenancy.tenant_of,
                occupants_of=self.tenancy.occupants_of,
            )
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        _type: type[BaseException] | None,
        _value: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End all workers, in parallel, and close the store. Harmless when repeated."""
        threads = [threading.Thread(target=worker.stop) for worker in self.workers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._evidence is not None:
            with contextlib.suppress(StoreError):  # said when it was refused first
                self._evidence.close()
            self._evidence = None
        store = getattr(self, "store", None)
        if store is not None:
            store.close()

    def _open_store(self) -> Store:
        from alloy_agent.store import Store

        path = Path(self.settings.state_dir)
        try:
            return Store.open(path, read_only=not self._write)
        except StoreCorruptError as exc:
            if self._write and not (self._salvage or self._lenient):
                raise
            self.degrade(str(exc))
            self.notes.append(f"nothing is recorded: {exc}")
            return Store.open(path, read_only=True, rebuild=True)
        except StoreError as exc:
            if self._write and self._salvage and isinstance(exc, StoreFullError):
                self.degrade(str(exc), full=True)
                self.notes.append(f"nothing is recorded: {exc}")
                return Store.open(path, read_only=True, rebuild=True)
            if self._write and self._lenient:
                self._write = False
                self.notes.append(f"nothing is recorded: {exc}")
                return self._open_store()
            if self._write:
                raise
            reason = str(exc) if _readable(path) else f"{path} is not readable for this user"
            self._books_closed = True
            self.notes.append(f"generations, makers and tenants are not known: {reason}")
            return Store.open(NOWHERE, read_only=True)

    def degrade(self, reason: str, *, full: bool = False) -> None:
        """Stop every change, for `reason`; observation goes on. `full`: room would end it."""
        if not self.degraded:
            self.degraded, self.full = reason, full
            LOG.error("degraded", extra={"reason": reason})

    # --- looking ---

    def observe(self) -> Snapshot:
        """Return the node as it is now, with what the books say of it."""
        self.tenancy.refresh()
        return self.observer.observe()

    def devices(self) -> documents.DevicesDocument:
        """Return the devices document, with the tiers that evidence proves now."""
        from alloy_agent.daemon import documents

        snapshot, reports = self.look(self.observe())
        now_s = clock.boottime_s()
        return documents.devices_document(self.name, snapshot, now_s, reports, self.notes)

    # --- layouts ---

    def layout_of(self, request: LayoutRequest, snapshot: Snapshot) -> Layout:
        """Return the layout that a request names, resolved against the devices of a snapshot.

        Raises:
            ConfigError: With file and line.
        """
        from alloy_agent.layout import choose, read_layout

        file = read_layout(request.text, request.file)
        try:
            return choose(file, request.layout, snapshot.devices)
        except ConfigError as exc:
            down = [
                f"worker {w.backend} is down: {w.reason}" for w in snapshot.workers if not w.alive
            ]
            if not down:
                raise
            raise ConfigError(f"{exc.message} ({'; '.join(down)})", cure=exc.cure) from exc

    def plan_for(self, layout: Layout, snapshot: Snapshot) -> Plan:
        """Return the steps from a snapshot to a layout.

        Raises:
            PlanImpossibleError: There are none.
        """
        from alloy_agent.planner import plan

        held = self.tenancy.leased(snapshot.partitions) | self.tenancy.claimed(snapshot.partitions)
        return plan(layout, snapshot, held)

    def plan(self, request: LayoutRequest) -> documents.PlanDocument:
        """Return the plan document; changes nothing."""
        from alloy_agent.daemon import documents

        snapshot = self.observe()
        plan = self.plan_for(self.layout_of(request, snapshot), snapshot)
        return documents.plan_document(self.name, plan, snapshot)

    def apply(
        self, request: LayoutRequest, on_progress: OnProgress | None = None
    ) -> documents.ApplyDocument:
        """Make a layout so, and keep it as what is desired."""
        from alloy_agent.daemon import documents

        with self._changing:
            self.recover()
            snapshot = self.observe()
            _refuse_changed(request, snapshot)
            plan = self.plan_for(self.layout_of(request, snapshot), snapshot)
            report = self.carry_out(plan, frozenset(request.consent), on_progress)
        return documents.apply_document(self.name, report, plan.notes)

    def carry_out(
        self, plan: Plan, consent: frozenset[Scope], on_progress: OnProgress | None = None
    ) -> ApplyReport:
        """Have the reconciler do a plan; a store that fails meanwhile ends all changes."""
        from alloy_agent.daemon.api import Progress
        from alloy_agent.planner import describe

        reconciler = self._changer()
        total = len(plan.steps)

        def tell(step: StepReport) -> None:
            if on_progress is not None:
                text = describe(step.step)
                done = step.number - 1 if step.state == "running" else step.number
                on_progress(Progress(done=done, total=total, text=text))

        try:
            with self._changing:
                return reconciler.apply(plan, consent, tell)
        except StoreError as exc:
            self.degrade(str(exc), full=isinstance(exc, StoreFullError))
            raise

    def recover(self) -> ApplyReport | None:
        """Finish or take back what an earlier process began and did not end."""
        reconciler = self._changer()
        with self._changing:
            self.sweep_fences()
            return reconciler.recover()

    def _changer(self) -> Reconciler:
        if self.degraded:
            raise StoreError(f"no changes are made: {self.degraded}")
        if not self._write:
            raise StoreError("this node was opened for looking only")
        with self._changing:
            if self.reconciler is None:
                from alloy_agent.reconciler import Reconciler

                workers = {worker.name: worker for worker in self.workers}
                self.reconciler = Reconciler(workers, self, self.store)
            return self.reconciler

    # --- tenants ---

    def access(
        self, partition: str, tenant: str | None, pid: int | None
    ) -> documents.AccessDocument:
        """Bind a tenant, and its process, to a partition; return how to be inside of it.

        Raises:
            ConfigError: There is no such partition, another tenant is in it, or it is drained and
                the tenant is not in it yet.
            BackendError: The kernel refused the fence of its device nodes.
        """
        from alloy_agent.daemon import admission, documents, fencing
        from alloy_agent.planner.names import find_group
        from alloy_agent.store import Binding

        self._changer()
        with self._changing:
            snapshot = self.observe()
            members = find_group(partition, snapshot.partitions)
            found, name = members[0], _tenant(members, tenant)
            admission.admit(self, members, name, snapshot)
            started, occupant = _start_ticks(pid), _occupant(pid)
            device = next(d for d in snapshot.devices if d.id == found.device)
            entered = found
            if len(members) > 1 and found.group_access is not None:
                entered = msgspec.structs.replace(found, access=found.group_access)
            fence = fencing.fence(entered, device, self.tenancy.bindings())
            for member in members:
                self.store.bind(
                    Binding(
                        partition=member.id,
                        generation=member.generation,
                        tenant=name,
                        since_s=clock.boottime_s(),
                        boot_id=snapshot.boot_id,
                        pid=pid,
                        start_ticks=started,
                        occupant=occupant,
                    )
                )
        return documents.AccessDocument(
            node=self.name,
            partition=found.id,
            generation=found.generation,
            tenant=name,
            access=fence.access,
            fence=fence.path,
            notes=fence.notes,
        )

    def drained(self) -> Drains:
        """Return what takes no new tenant by somebody's word."""
        from alloy_agent.daemon import admission

        return admission.kept(self.store) if self.drains is None else self.drains()

    def occupied(self) -> frozenset[PartitionId]:
        """Return the partitions that a process is inside of now."""
        snapshot = self.observe()
        bound = {binding.partition for binding in self.tenancy.bindings()}
        inside = {p.id for p in snapshot.partitions if _has_processes(p)}
        return frozenset(bound | inside)

    def release(self, partition: str, tenant: str) -> int:
        """Take the bindings of a tenant to a partition back; return how many there were."""
        from alloy_agent.planner.names import find_partition

        self._changer()
        with self._changing:
            found = find_partition(partition, self.observe().partitions)
            gone = self.store.unbind(found.id, tenant=TenantId(tenant) if tenant else None)
            self.sweep_fences()
        return gone

    def reset(self, device: str) -> ResetDocument:
        """Reset a device that nobody is on; return once it is proved to be ready again."""
        from alloy_agent.daemon.resetting import reset_device

        self._changer()
        with self._changing:
            return reset_device(self, device)

    def sweep_fences(self) -> None:
        """Take away the device fences of tenants that are gone. It can be repeated."""
        if self._write and not self.degraded:
            from alloy_agent.daemon import fencing

            with self._changing:
                self.tenancy.refresh()
                fencing.sweep(self.tenancy.bindings())

    # --- audit and doctor ---

    def device_facts(self, snapshot: Snapshot) -> list[Fact]:
        """Return the backends' facts; backends side by side, a device that fails has none."""
        workers = {worker.name: worker for worker in self.workers}
        devices: dict[str, list[Device]] = {}
        for device in snapshot.devices:
            devices.setdefault(device.backend, []).append(device)
        found: list[Fact] = []

        def ask(backend: str) -> None:
            for device in devices[backend]:
                try:
                    found.extend(workers[backend].facts(device.id))
                except AlloyError as exc:
                    LOG.warning("no_facts", extra={"device": device.id, "reason": str(exc)})

        threads = [
            threading.Thread(target=ask, args=(name,)) for name in devices if name in workers
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found + self._container_facts(snapshot)

    def _container_facts(self, snapshot: Snapshot) -> list[Fact]:
        """Return what the containers of prepared claims have."""
        kubernetes = self.settings.kubernetes
        if not self.tenancy.driver or not any(p.occupants for p in snapshot.partitions):
            return []
        from alloy_agent.host.cgroupfs import detect
        from alloy_agent.host.processes import iter_processes
        from alloy_agent.kubernetes.cdi import CdiDirectory
        from alloy_agent.kubernetes.containers import facts_of

        folder = CdiDirectory(Path(kubernetes.cdi_dir), kubernetes.driver)
        processes = tuple(one for one in iter_processes() if not one.kernel_thread)
        return facts_of(snapshot, self.store.claims(), folder, processes, detect())

    @property
    def shared(self) -> SharesOnHost:
        """How the shared devices of this host stand, as their keepers tell."""
        from alloy_agent.conformance.shares import SharesOnHost
        from alloy_agent.daemon.addresses import share_root

        return SharesOnHost(share_root(self.settings))

    def intent(self) -> Intent:
        """Return what ought to be: the desired layout, and who was given what."""
        from alloy_agent.conformance.checks.base import Grant, Intent

        grants = tuple(
            Grant(partition=b.partition, generation=b.generation, tenant=b.tenant, pid=b.pid)
            for b in self.tenancy.bindings()
        )
        leased = tuple(
            Grant(
                partition=piece.partition,
                generation=piece.generation,
                tenant=lease.tenant,
                lease=lease.id,
            )
            for lease in self.tenancy.leases()
            for piece in lease.pieces
        )
        return Intent(layout=self.store.desired(), grants=(*leased, *grants))

    def look(self, snapshot: Snapshot) -> tuple[Snapshot, tuple[PartitionReport, ...]]:
        """Judge a snapshot without recording anything.

        Returns:
            The snapshot with who else manages its devices, and the partitions' reports.
        """
        from alloy_agent.conformance.auditor import collect_all
        from alloy_agent.conformance.checks import NODE, judge
        from alloy_agent.conformance.checks.shapes import OwnerFact
        from alloy_agent.conformance.collect import HostView
        from alloy_agent.conformance.owners import as_owners

        shared = self.shared.facts(snapshot)
        facts = collect_all(snapshot, HostView(snapshot), self.device_facts(snapshot), *shared)
        fact = facts.find(NODE, "host.owners")
        if fact is not None and fact.quality is Quality.VALUE:
            owners = as_owners(msgspec.convert(fact.value, tuple[OwnerFact, ...]))
            snapshot = msgspec.structs.replace(snapshot, owners=owners)
        return snapshot, judge(snapshot, facts, self.intent())[0]

    def evidence(self) -> EvidenceLog | None:
        """Return the evidence chain, opened at first use; None where it cannot be written."""
        if self._evidence is None and self._write and not self.degraded:
            from alloy_agent.conformance.evidence import EvidenceLog

            audit = self.settings.audit
            try:
                self._evidence = EvidenceLog.open(
                    Path(self.settings.state_dir),
                    boot_id=clock.boot_id(),
                    agent_version=__version__,
                    config_digest=_digest(self.settings),
                    rotate_bytes=audit.rotate_bytes,
                    head_period_s=audit.sign_period_s,
                )
            except StoreError as exc:
                self.notes.append(f"no evidence is recorded: {exc}")
                LOG.error("no_evidence", extra={"reason": str(exc)})  # noqa: TRY400 - explained
        return self._evidence

    @property
    def identity(self) -> AuditIdentity:
        """Who audits."""
        from alloy_agent.conformance.auditor import AuditIdentity

        return AuditIdentity(node=self.name, agent_version=__version__)

    def audit(self) -> AuditResult:
        """Run every check once, recording the evidence where it can be."""
        from alloy_agent.conformance.auditor import audit_once

        evidence = self.evidence()  # opened while the workers still start
        store = self.store if self._write and not self.degraded else None
        return audit_once(self, self.identity, store=store, evidence=evidence, shared=self.shared)

    def doctor(self) -> documents.DoctorDocument:
        """Return what this host lacks for the agent and for each backend."""
        from alloy_agent.daemon import documents, needs
        from alloy_agent.daemon.addresses import socket_of
        from alloy_agent.daemon.draining import slurm_name

        place = needs.this_place(self.settings.state_dir, str(socket_of(self.settings)))
        found: list[Diagnosis] = list(needs.diagnose(place))
        found += needs.outlets(self.settings.drain, slurm_name(self.settings))
        for worker in self.workers:
            try:
                found.extend(worker.diagnose())
            except AlloyError as exc:
                found.append(
                    Diagnosis(subject=worker.name, ok=False, found=str(exc), cure=exc.cure)
                )
        return documents.doctor_document(self.name, found)


def _digest(settings: Settings) -> str:
    """Return a hash of the settings in force, which evidence names."""
    body = msgspec.json.encode(settings, order="deterministic")
    return hashlib.sha256(body).hexdigest()


def _readable(path: Path) -> bool:
    """Whether this user may look into the state directory at all; opens nothing."""
    try:
        (path / "state.db").stat()
    except PermissionError:
        return False
    except OSError:
        return True
    return os.access(path / "state.db", os.R_OK, effective_ids=True)


def _refuse_changed(request: LayoutRequest, snapshot: Snapshot) -> None:
    """Raise where a generation that somebody agreed to change no longer holds."""
    from alloy_agent.errors import StalePlanError

    generations = {p.id: p.generation for p in snapshot.partitions}
    for partition, generation in request.expected.items():
        found = generations.get(partition)
        if found != generation:
            now = "is gone" if found is None else f"is now at generation {found}"
            raise StalePlanError(
                f"partition {partition}: planned at generation {generation}, {now}",
                cure="plan again",
            )


def _tenant(members: Sequence[Partition], tenant: str | None) -> TenantId:
    """Return the tenant to bind: the one who is there, or the one who asks."""
    name = tenant
    for partition in members:
        holder = partition.tenant
        if holder is not None and name not in (None, holder):
            raise ConfigError(
                f"partition {partition.id}: tenant {holder} is in it, not {name}",
                cure=f"use --tenant {holder}, or another partition",
            )
        name = name or holder
    return TenantId(name or DEFAULT_TENANT)


def _has_processes(partition: Partition) -> bool:
    """Whether a process is in one of the control groups of a partition."""
    for path in partition.access.cgroup_procs:
        try:
            if Path(path).read_text(encoding="ascii").strip():
                return True
        except OSError:
            continue  # the group has gone: nobody is in it
    return False


def _occupant(pid: int | None) -> Occupant | None:
    """Return who a process is, by its control groups; None where they say nothing of it."""
    if pid is None:
        return None
    from alloy_agent.host.processes import read_process
    from alloy_agent.kubernetes.attribution import of_workload
    from alloy_agent.kubernetes.pods import workload_of

    process = read_process(pid)
    found = None if process is None else of_workload(workload_of(process.cgroups))
    return None if found is None or found.kind == "host" else found


def _start_ticks(pid: int | None) -> int | None:
    """Return when a process was started, which tells it from a later one with its number.

    Raises:
        ConfigError: There is no such process: whoever gets its number next is not meant.
    """
    if pid is None:
        return None
    from alloy_agent.host.processes import start_ticks

    started = start_ticks(pid)
    if started is None:
        raise ConfigError(f"process {pid}: it has ended", cure="start it again")
    return started
