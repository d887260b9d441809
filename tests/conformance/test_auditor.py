"""The audit on this host's own processes and cgroups: what it sees, and how soon."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from alloy_agent.backends.cpu import CpuBackend
from alloy_agent.conformance.auditor import (
    AuditIdentity,
    Auditor,
    Move,
    Timing,
    audit_once,
    exit_code,
)
from alloy_agent.conformance.checks import Grant, Intent
from alloy_agent.conformance.checks.shapes import LeafFact, MemberFact
from alloy_agent.conformance.collect import collect_host, homes, leaf_paths
from alloy_agent.conformance.evidence import EvidenceLog, verify
from alloy_agent.conformance.recording import TIER, Recorder
from alloy_agent.errors import BackendError
from alloy_agent.host import clock
from alloy_agent.host.cgroups import Cgroup, detect
from alloy_agent.model import (
    Access,
    AuditResult,
    Create,
    Destroy,
    Fact,
    Finding,
    Partition,
    PartitionSpec,
    Placement,
    Snapshot,
    TenantId,
    Tier,
    Verdict,
)
from alloy_agent.store.records import LastVerdict
from tests.conformance.world import CPU_PIECE, INTENT, SNAPSHOT, facts

IDENTITY = AuditIdentity(node="this-host", agent_version="1.0")
WITHIN_S = 20.0  # bounds a wait so that a failure ends; no measure of speed


class MemoryStore:
    """Last verdicts in memory, kept between auditors as the store keeps them between starts."""

    def __init__(self) -> None:
        self.rows: dict[tuple[str, str], LastVerdict] = {}

    def last_verdicts(self) -> dict[tuple[str, str], LastVerdict]:
        """Return what is kept."""
        return dict(self.rows)

    def set_last_verdicts(self, verdicts: object, forgotten: object = ()) -> None:
        """Keep and forget."""
        for key in forgotten:  # type: ignore[attr-defined]
            self.rows.pop(key, None)
        self.rows |= {(v.check, v.subject): v for v in verdicts}  # type: ignore[attr-defined]


class Host:
    """This host's CPU with one partition in a cgroup tree of its own."""

    def __init__(self) -> None:
        self.root = f"alloy-test-{uuid.uuid4().hex[:12]}"
        self.backend = CpuBackend(cgroup_root=self.root)
        self.device = next(
            d for d in self.backend.discover() if self.backend.observe(d).device.units
        )
        self.tenant = True
        self.pids: tuple[int, ...] = ()
        self._sequence = 0

    def make(self) -> None:
        """Make the partition: the first lendable core, 256 MiB."""
        spec = PartitionSpec(
            device=self.device,
            profile="1c",
            size=1,
            placement=Placement(start=0, size=1),
            memory_bytes=256 << 20,
        )
        self.backend.apply(Create(device=self.device, spec=spec))

    def remove(self) -> None:
        """Remove whatever is left of the partition."""
        for partition in self.backend.observe(self.device).partitions:
            self.backend.apply(Destroy(device=self.device, partition=partition))
        topology = detect()
        for path in (f"{self.root}/{self.device}", self.root):
            for hierarchy in topology.hierarchies:
                with contextlib.suppress(OSError):
                    Path(hierarchy.folder(path)).rmdir()

    def observe(self) -> Snapshot:
        """Return the node."""
        self._sequence += 1
        seen = self.backend.observe(self.device)
        return Snapshot(
            boot_id=clock.boot_id(),
            sequence=self._sequence,
            taken_at_s=clock.boottime_s(),
            taken_wall_s=clock.wall_s(),
            devices=(seen.device,),
            partitions=tuple(
                msgspec.structs.replace(p, managed=True, generation=1) for p in seen.partitions
            ),
        )

    def device_facts(self, snapshot: Snapshot) -> tuple[Fact, ...]:
        """Return nothing: the host itself shows all that CPU partitions need."""
        return ()

    def intent(self) -> Intent:
        """Return that tenant acme was given the partition."""
        if not self.tenant:
            return Intent()
        return Intent(
            grants=tuple(
                Grant(partition=p.id, generation=1, tenant=TenantId("acme"))
                for p in self.backend.observe(self.device).partitions
            )
        )

    @property
    def partition(self) -> Partition:
        """The partition as it is now."""
        return self.observe().partitions[0]

    def enter(self, pid: int, partition: Partition) -> None:
        """Move a process into the partition, as `exec` does."""
        for file in partition.access.cgroup_procs:
            Path(file).write_text(str(pid), encoding="ascii")

    def leave(self, pid: int) -> None:
        """Move a process to the root of every hierarchy."""
        for hierarchy in detect().hierarchies:
            with contextlib.suppress(OSError):
                Path(hierarchy.folder("")).joinpath("cgroup.procs").write_text(str(pid))


@pytest.fixture
def host() -> Iterator[Host]:
    """Yield a host with one partition, and clean up."""
    made = Host()
    made.make()
    try:
        yield made
    finally:
        made.remove()


@contextlib.contextmanager
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """Yield a child that does nothing, and end it."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition; fail if it does not come."""
    end = time.monotonic() + WITHIN_S
    while not condition():
        assert time.monotonic() < end, "did not happen"
        time.sleep(0.005)


def verdict(result: AuditResult, check: str) -> Verdict:
    """Return the verdict of a check on the one partition."""
    (report,) = result.partitions
    return next(j.verdict for j in report.judgements if j.check == check)


@pytest.mark.host
def test_a_partition_of_this_host_is_enforced(host: Host, tmp_path: Path) -> None:
    """Cores and memory cap of a real cgroup are proved from the kernel, and recorded."""
    store = MemoryStore()
    with sleeper() as child:
        host.enter(child.pid, host.partition)
        with EvidenceLog.open(tmp_path, boot_id="b", agent_version="1") as log:
            result = audit_once(host, IDENTITY, store=store, evidence=log)
            head = log.head
        host.leave(child.pid)
    (report,) = result.partitions
    assert report.tier is Tier.ENFORCED, report.reason
    assert result.verdict is Verdict.PASS, [
        j for j in (*report.judgements, *result.node_judgements) if j.verdict == "fail"
    ]
    assert (result.evidence_sequence, result.evidence_hash) == (head.sequence, head.hash)
    assert store.rows[TIER, report.partition.id].tier is Tier.ENFORCED
    assert verify(tmp_path / "evidence").ok


@pytest.mark.host
def test_breaches_on_this_host_are_seen(host: Host) -> None:
    """A widened cpuset, a raised cap, a half-moved process and a pinned intruder each fail."""
    partition = host.partition
    topology = detect()
    group = Cgroup(topology, homes((partition,), topology)[0].path)
    cpuset, memory = topology.of("cpuset"), topology.of("memory")
    assert cpuset is not None
    assert memory is not None
    cpus = Path(cpuset.folder(group.path), "cpuset.cpus")
    granted = cpus.read_text()
    frozen = msgspec.structs.replace(host.observe())

    class Still:
        """The node as it was before the breach: what the partition is meant to be."""

        observe = staticmethod(lambda: frozen)
        device_facts, intent = host.device_facts, host.intent

    cpus.write_text("0-1")
    assert verdict(audit_once(Still(), IDENTITY), "CPU-01") is Verdict.FAIL
    cpus.write_text(granted)
    assert verdict(audit_once(Still(), IDENTITY), "CPU-01") is Verdict.PASS
    group.set_memory(512 << 20)
    assert verdict(audit_once(Still(), IDENTITY), "MEM-01") is Verdict.FAIL
    group.set_memory(256 << 20)
    assert verdict(audit_once(Still(), IDENTITY), "MEM-01") is Verdict.PASS
    with sleeper() as child:
        Path(memory.folder(group.path), "cgroup.procs").write_text(str(child.pid))
        assert verdict(audit_once(Still(), IDENTITY), "CGR-03") is Verdict.FAIL
        host.leave(child.pid)
    with sleeper() as child:
        os.sched_setaffinity(child.pid, {host.backend.observe(host.device).device.units[0]})
        assert verdict(audit_once(Still(), IDENTITY), "CPU-04") is Verdict.FAIL


@pytest.mark.host
def test_nested_cgroups_are_leaves_and_members(host: Host) -> None:
    """A cgroup that a tenant makes below its own is a leaf, and who is in it is a member."""
    partition = host.partition
    topology = detect()
    home = homes((partition,), topology)[0]
    folders = [Path(h.folder(f"{home.path}/inner")) for h in home.hierarchies]
    cpuset = topology.of("cpuset")
    with sleeper() as child:
        for hierarchy, folder in zip(home.hierarchies, folders, strict=True):
            folder.mkdir()
            if hierarchy == cpuset and hierarchy.version == 1:
                for name in ("cpuset.mems", "cpuset.cpus"):
                    (folder / name).write_text((folder.parent / name).read_text())
            (folder / "cgroup.procs").write_text(str(child.pid))
        seen = {f.name: f.value for f in collect_host(host.observe()) if f.subject == partition.id}
        members = msgspec.convert(seen["cgroup.members"], list[MemberFact])
        leaves = msgspec.convert(seen["cgroup.memory_leaves"], list[LeafFact])
        host.leave(child.pid)
    until(lambda: all(_removed(folder) for folder in folders))
    assert [(m.pid, m.lacks) for m in members] == [(child.pid, ())]
    assert [leaf.path for leaf in leaves] == [f"/{home.path}/inner"]
    assert leaf_paths(home.hierarchies[0], home.path) == (home.path,)


def _removed(folder: Path) -> bool:
    with contextlib.suppress(OSError):
        folder.rmdir()
    return not folder.exists()


@contextlib.contextmanager
def running(host: Host, **options: object) -> Iterator[tuple[Auditor, list[Move], list[Finding]]]:
    """Yield a started auditor after its first result, with what it tells."""
    moves: list[Move] = []
    findings: list[Finding] = []
    auditor = Auditor(
        host,
        IDENTITY,
        on_move=moves.append,
        on_finding=findings.append,
        **options,  # type: ignore[arg-type]
    )
    auditor.start()
    try:
        until(lambda: auditor.latest is not None)
        yield auditor, moves, findings
    finally:
        auditor.stop()


SLOW = Timing(period_s=600.0, poll_period_s=600.0)  # only events can notice anything


@pytest.mark.host
def test_events_tell_of_processes_that_enter_and_leave(host: Host) -> None:
    """With polls out of the way, moves, forks and exits inside of a partition are noticed."""
    partition = host.partition
    with running(host, timing=SLOW) as (auditor, moves, _):
        assert auditor.mode == "events"
        with sleeper() as child:
            host.enter(child.pid, partition)
            until(lambda: any(m.pid == child.pid and m.entered for m in moves))
        until(lambda: any(m.pid == child.pid and not m.entered for m in moves))
        with sleeper() as child:
            host.enter(child.pid, partition)
            until(lambda: any(m.pid == child.pid and m.entered for m in moves))
            host.leave(child.pid)
            until(lambda: any(m.pid == child.pid and not m.entered for m in moves))


@pytest.mark.host
def test_events_re_judge_a_partition(host: Host) -> None:
    """A process placed on granted cores by an exec, and a raised cap, become findings by events."""
    partition = host.partition
    core = partition.units[0]
    with running(host, timing=SLOW, store=MemoryStore()) as (auditor, _, findings):
        child = subprocess.Popen(["/usr/bin/taskset", "-c", str(core), "/bin/sleep", "600"])
        until(lambda: any(f.check == "CPU-04" and f.after is Verdict.FAIL for f in findings))
        child.kill()
        child.wait()
        until(lambda: any(f.check == "CPU-04" and f.after is Verdict.PASS for f in findings))
        topology = detect()
        group = Cgroup(topology, homes((partition,), topology)[0].path)
        group.set_memory(512 << 20)
        until(lambda: any(f.check == "MEM-01" and f.after is Verdict.FAIL for f in findings))
        lowered = [f for f in findings if f.check == TIER]
        assert lowered[0].tier_before is Tier.ENFORCED
        assert auditor.latest is not None
        assert auditor.latest.verdict is Verdict.FAIL


@pytest.mark.host
def test_a_process_on_its_way_in_is_no_finding(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """Joining takes several writes: half way is no breach, staying half way is one."""
    monkeypatch.setattr("alloy_agent.conformance.auditor.PASSING_S", 0.5)
    partition = host.partition
    with running(host, timing=SLOW, store=MemoryStore()) as (_, moves, findings):
        for _attempt in range(2):
            with sleeper() as child:
                for file in partition.access.cgroup_procs:
                    Path(file).write_text(str(child.pid), encoding="ascii")
                    time.sleep(0.1)
                until(lambda: any(m.pid == child.pid and m.entered for m in moves))
            until(lambda: any(m.pid == child.pid and not m.entered for m in moves))
        assert [f for f in findings if f.after is Verdict.FAIL] == []
        with sleeper() as child:
            Path(partition.access.cgroup_procs[0]).write_text(str(child.pid), encoding="ascii")
            until(lambda: any(f.check == "CGR-03" and f.after is Verdict.FAIL for f in findings))


@pytest.mark.host
def test_one_audit_waits_for_a_process_on_its_way_in(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An audit that meets a start half way tells of the process where it ends up."""
    monkeypatch.setattr("alloy_agent.conformance.auditor.PASSING_S", 0.5)
    partition = host.partition
    first, *others = partition.access.cgroup_procs
    with sleeper() as child:
        Path(first).write_text(str(child.pid), encoding="ascii")

        def finish() -> None:
            for file in others:
                Path(file).write_text(str(child.pid), encoding="ascii")

        timer = threading.Timer(0.3, finish)
        timer.start()
        assert verdict(audit_once(host, IDENTITY), "CGR-03") is Verdict.PASS
        timer.join()
        host.leave(child.pid)
        Path(first).write_text(str(child.pid), encoding="ascii")
        assert verdict(audit_once(host, IDENTITY), "CGR-03") is Verdict.FAIL


@pytest.mark.host
def test_without_events_polls_notice_and_say_so(host: Host) -> None:
    """With events switched off the mode is polling, and moves are still found."""
    partition = host.partition
    timing = Timing(period_s=600.0, poll_period_s=0.1, events=False)
    with running(host, timing=timing) as (auditor, moves, _), sleeper() as child:
        assert auditor.mode == "polling"
        assert auditor.latest is not None
        assert auditor.latest.mode == "polling"
        host.enter(child.pid, partition)
        until(lambda: any(m.pid == child.pid and m.entered for m in moves))
        host.leave(child.pid)
        until(lambda: any(m.pid == child.pid and not m.entered for m in moves))


@pytest.mark.host
def test_a_foreign_change_of_geometry_is_noticed(host: Host) -> None:
    """A partition that somebody removes is gone from the next poll's result."""
    timing = Timing(period_s=600.0, poll_period_s=0.1)
    store = MemoryStore()
    with running(host, timing=timing, store=store) as (auditor, _, _findings):
        host.backend.apply(Destroy(device=host.device, partition=host.partition))
        until(lambda: auditor.latest is not None and not auditor.latest.partitions)
        until(lambda: not any(subject.endswith("@0") for _, subject in store.rows))


@pytest.mark.host
def test_a_fork_storm_does_not_stop_the_audit(host: Host) -> None:
    """While hundreds of processes come and go, a move is still noticed."""
    partition = host.partition
    script = "for i in $(seq 1 400); do /bin/true; done"
    with running(host, timing=SLOW) as (_, moves, _findings), sleeper() as child:
        storm = subprocess.Popen(["/bin/sh", "-c", script])
        host.enter(child.pid, partition)
        until(lambda: any(m.pid == child.pid and m.entered for m in moves))
        storm.wait()
        host.leave(child.pid)


class Flaky:
    """Sources that fail a few times before they answer."""

    def __init__(self) -> None:
        self.calls = 0

    def observe(self) -> Snapshot:
        """Fail twice, then return a node without processes."""
        self.calls += 1
        if self.calls < 3:
            raise BackendError("driver does not answer")
        bare = msgspec.structs.replace(CPU_PIECE, access=Access())
        return msgspec.structs.replace(SNAPSHOT, partitions=(bare,))

    def device_facts(self, snapshot: Snapshot) -> tuple[Fact, ...]:
        """Return the world's facts."""
        return facts()

    def intent(self) -> Intent:
        """Return the world's intent."""
        return INTENT


def test_a_failing_node_does_not_end_the_loop() -> None:
    """Observation that fails is tried again, and the auditor stops when told."""
    sources = Flaky()
    auditor = Auditor(
        sources, IDENTITY, timing=Timing(period_s=0.05, poll_period_s=0.05, events=False)
    )
    auditor.start()
    until(lambda: auditor.latest is not None)
    before = threading.active_count()
    auditor.stop()
    assert threading.active_count() < before
    assert sources.calls >= 3


def result_with(check: str, verdict_now: Verdict, tier: Tier) -> AuditResult:
    """Return a result of one partition in which one check has a verdict."""
    from alloy_agent.conformance.auditor import assemble
    from alloy_agent.conformance.checks import judge

    reports, node = judge(SNAPSHOT, facts(), INTENT, only={CPU_PIECE.id})
    (report,) = reports
    judgements = tuple(
        msgspec.structs.replace(j, verdict=verdict_now) if j.check == check else j
        for j in report.judgements
    )
    changed = msgspec.structs.replace(report, judgements=judgements, tier=tier)
    return assemble(IDENTITY, SNAPSHOT, [changed], node, "once")


def test_findings_come_once_and_survive_a_restart() -> None:
    """A change of verdict is told once; a new start with the same store does not repeat it."""
    store = MemoryStore()
    good = result_with("CPU-01", Verdict.PASS, Tier.ENFORCED)
    bad = result_with("CPU-01", Verdict.FAIL, Tier.ADVISORY)
    recorder = Recorder(store, None)
    assert recorder.record(good) == ()
    told = recorder.record(bad)
    assert {(f.check, f.before, f.after) for f in told} == {
        ("CPU-01", Verdict.PASS, Verdict.FAIL),
        (TIER, Verdict.PASS, Verdict.UNKNOWN),
    }
    assert recorder.record(bad) == ()
    assert Recorder(store, None).record(bad) == ()
    (back, tier) = Recorder(store, None).record(good)
    assert back.after is Verdict.PASS
    assert (tier.tier_before, tier.tier_after) == (Tier.ADVISORY, Tier.ENFORCED)


def test_a_failure_at_first_sight_is_a_finding() -> None:
    """A check that fails when it is first looked at is told, with what was expected and seen."""
    (finding, *_) = Recorder(MemoryStore(), None).record(
        result_with("CPU-01", Verdict.FAIL, Tier.ADVISORY)
    )
    assert (finding.before, finding.after) == (None, Verdict.FAIL)
    assert finding.expected
    assert finding.observed


def test_evidence_holds_changes_and_a_full_disk_does_not_stop_the_audit(tmp_path: Path) -> None:
    """Changes are in the chain; when it cannot be written, findings are still returned."""
    log = EvidenceLog.open(tmp_path, boot_id="b", agent_version="1")
    recorder = Recorder(None, log)
    recorder.record(result_with("CPU-01", Verdict.PASS, Tier.ENFORCED))
    at = log.head.sequence
    recorder.record(result_with("CPU-01", Verdict.PASS, Tier.ENFORCED))
    assert log.head.sequence == at  # nothing changed, nothing is recorded within the period
    log.close()
    findings = recorder.record(result_with("CPU-01", Verdict.FAIL, Tier.ADVISORY))
    assert {finding.check for finding in findings} == {"CPU-01", TIER}
    text = log.newest_file.read_text()
    assert '"check":"CPU-01"' in text
    assert '"kind":"tier"' in text
    assert '"kind":"audit"' in text


@pytest.mark.parametrize(
    ("verdict_now", "code"), [(Verdict.PASS, 0), (Verdict.FAIL, 1), (Verdict.UNKNOWN, 3)]
)
def test_exit_codes(verdict_now: Verdict, code: int) -> None:
    """0 pass, 1 a fail, 3 an unknown."""
    assert exit_code(verdict_now) == code
