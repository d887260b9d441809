"""Groups of Neuron devices for one tenant: granted whole, entered as one, audited as one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from alloy_agent.backends.neuron import NeuronBackend
from alloy_agent.conformance.checks import Grant, Intent
from alloy_agent.errors import (
    ConfigError,
    DeviceBusyError,
    PlanImpossibleError,
    UnsupportedError,
)
from alloy_agent.model import Destroy, DeviceId, Partition, PartitionReport, TenantId, Tier, Verdict
from alloy_agent.planner.names import find_group
from tests.backends.neuron.test_backend import (
    Opened,
    audit,
    create,
    numbered,
    verdict,
)
from tests.fakes.neuron import MAJOR, FakeNeuronHost


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every look be a fresh one: these tests change the world between two of them."""
    for name in ("OBSERVED_AGE_S", "EVIDENCE_AGE_S"):
        monkeypatch.setattr(f"alloy_agent.backends.neuron.backend.{name}", 0.0)


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Opened]:
    """Make hosts and backends that do not outlive the test."""
    made = Opened(tmp_path)
    yield made
    made.close()


def grant_group(backend: NeuronBackend, numbers: range, size: int) -> list[Partition]:
    """Grant a group and return its members as read back."""
    group = tuple(numbered(backend, n) for n in numbers)
    for device in group:
        backend.apply(create(device, 0, size, group=group))
    return [p for device in group for p in backend.observe(device).partitions]


def enter(host: FakeNeuronHost, members: list[Partition], pid: int, rules: list[str]) -> None:
    """Start one process on all devices of a group, behind these device rules."""
    access = members[0].group_access
    assert access is not None
    host.devices_cgroup("/tenant", rules)
    for number, member in enumerate(members):
        host.start(
            pid,
            int(access.device_nodes[number].removeprefix("/dev/neuron")),
            range(member.placement.size),
            environ=access.environment,
            cgroup="/tenant",
        )


def given(members: list[Partition], *tenants: str) -> Intent:
    """Return the book in which each tenant of a list has a member, the last one the rest."""
    names = [*tenants, *[tenants[-1]] * (len(members) - len(tenants))]
    grants = tuple(
        Grant(partition=member.id, generation=member.generation, tenant=TenantId(name))
        for member, name in zip(members, names, strict=True)
    )
    return Intent(grants=grants)


def node_audit(
    backend: NeuronBackend, members: list[Partition], intent: Intent
) -> list[PartitionReport]:
    """Return the members' reports, each device judged beside all the others."""
    from alloy_agent.conformance.auditor import pids_of
    from alloy_agent.conformance.checks import judge
    from alloy_agent.model import Fact, Snapshot

    seen = [backend.observe(member.device) for member in members]
    snapshot = Snapshot(
        boot_id="b", sequence=1, taken_at_s=0.0, taken_wall_s=0.0,
        devices=tuple(o.device for o in seen),
        partitions=tuple(p for o in seen for p in o.partitions),
    )  # fmt: skip
    facts = [fact for member in members for fact in backend.facts(member.device)]
    owners = Fact(subject="node", name="host.owners", value=[], method="test")
    reports, _ = judge(snapshot, (*pids_of(facts), *facts, owners), intent)
    return list(reports)


@pytest.mark.parametrize(
    ("instance", "numbers", "cores", "visible"),
    [
        ("trn1.32xlarge", range(4, 8), 2, "8-15"),
        ("trn2.48xlarge", range(8, 16), 4, "32-63"),
        ("inf2.24xlarge", range(1, 4), 2, "2-7"),
    ],
)
def test_a_group_is_entered_as_one_run_of_cores(
    opened: Opened, instance: str, numbers: range, cores: int, visible: str
) -> None:
    """Once all members are granted, each tells nodes, cores and meeting point of all."""
    backend = opened.backend(opened.host(instance))
    members = grant_group(backend, numbers, cores)
    for member in members:
        access = member.group_access
        assert access is not None
        assert access.device_nodes == tuple(f"/dev/neuron{n}" for n in numbers)
        assert access.environment["NEURON_RT_VISIBLE_CORES"] == visible
        assert access.environment["NEURON_PROCESS_TAG"] == f"{members[0].id}+{len(members) - 1}"
        assert "NEURON_RT_ROOT_COMM_ID" in access.environment
        assert len(member.access.device_nodes) == 1  # alone it opens its own device and no other
    assert find_group(f"{members[1].id}+", members) == tuple(members)
    assert find_group(f"{members[0].id}+{len(members) - 1}", members) == tuple(members)
    assert find_group(members[2].id, members) == (members[2],)
    with pytest.raises(ConfigError, match="more, not 99"):
        find_group(f"{members[0].id}+99", members)


def test_a_group_that_is_not_whole_cannot_be_entered_as_one(opened: Opened) -> None:
    """While a member is missing, or is no member any more, nobody is handed the group."""
    backend = opened.backend(opened.host("trn1.32xlarge"))
    group = tuple(numbered(backend, n) for n in range(4))
    for device in group[:3]:
        backend.apply(create(device, 0, 2, group=group))
    members = [p for device in group for p in backend.observe(device).partitions]
    assert [member.group_access for member in members] == [None] * 3
    with pytest.raises(ConfigError, match=f"{group[3]} is missing"):
        find_group(f"{members[0].id}+", members)
    backend.apply(create(group[3], 0, 2))  # granted alone
    members = [p for device in group for p in backend.observe(device).partitions]
    assert members[0].group_access is None
    with pytest.raises(ConfigError, match="is in no group"):
        find_group(f"{members[3].id}+", members)


def test_groups_that_cannot_work_are_refused_by_the_backend_too(opened: Opened) -> None:
    """Whoever makes the plan: no grant is recorded for devices on which collectives do not work."""
    backend = opened.backend(opened.host("trn1.32xlarge"))
    devices = tuple(numbered(backend, n) for n in range(16))
    with pytest.raises(PlanImpossibleError, match="collectives do not work on devices 1, 2, 3, 4"):
        backend.apply(create(devices[1], 0, 2, group=devices[1:5]))
    with pytest.raises(UnsupportedError, match="is not known"):
        backend.apply(create(devices[0], 0, 2, group=(devices[0], DeviceId("neuron-elsewhere"))))
    with pytest.raises(UnsupportedError, match="in a group"):
        backend.apply(create(devices[0], 0, 1, group=devices[:4]))
    assert not backend.observe(devices[0]).partitions


def test_a_tenant_of_a_whole_group_is_audited_as_one(opened: Opened) -> None:
    """One tenant of all members, behind a fence of exactly their nodes: every member passes."""
    host = opened.host("trn1.32xlarge")
    backend = opened.backend(host)
    members = grant_group(backend, range(4, 8), 2)
    enter(host, members, 900, [f"c {MAJOR}:{n} rwm" for n in range(4, 8)])
    for report in node_audit(backend, members, given(members, "blue")):
        for check in ("NRN-01", "NRN-02", "NRN-04", "DEV-02"):
            assert verdict(report, check).verdict is Verdict.PASS, (check, report)
        assert report.tier is Tier.ENFORCED  # linked: hard is out of reach


def test_a_group_fence_that_is_too_wide_or_shared_is_found(opened: Opened) -> None:
    """A fence over a fifth device fails, and so does that of a group which two tenants have."""
    host = opened.host("trn1.32xlarge")
    backend = opened.backend(host)
    members = grant_group(backend, range(4, 8), 2)
    enter(host, members, 900, [f"c {MAJOR}:{n} rwm" for n in range(4, 9)])
    reports = node_audit(backend, members, given(members, "blue"))
    assert {verdict(r, "NRN-02").verdict for r in reports} == {Verdict.FAIL}
    assert "/dev/neuron8" in verdict(reports[0], "NRN-02").observed
    host.devices_cgroup("/tenant", [f"c {MAJOR}:{n} rwm" for n in range(4, 8)])
    split = node_audit(backend, members, given(members, "red", "blue"))
    assert {verdict(r, "NRN-02").verdict for r in split} == {Verdict.FAIL}


def test_a_group_tag_of_ones_own_making_is_nobodys(opened: Opened) -> None:
    """Who tags itself as a group that was never granted is nobody's on the devices it reached."""
    host = opened.host("trn1.32xlarge")
    backend = opened.backend(host)
    devices = [numbered(backend, n) for n in range(2)]
    for device in devices:
        backend.apply(create(device, 0, 2))
    (first,) = backend.observe(devices[0]).partitions
    forged = {"NEURON_PROCESS_TAG": f"{first.id}+1", "NEURON_RT_VISIBLE_CORES": "0-3"}
    for number in range(2):
        host.start(900, number, range(2), environ=forged, modes=(os.O_RDWR,))
    for device in devices:
        (report,) = audit(backend, device).values()
        assert verdict(report, "NRN-04").verdict is Verdict.FAIL


LOCKS = """
import fcntl, os, signal, sys
held = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT, 0o600)
fcntl.flock(held, fcntl.LOCK_EX)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_lock_that_the_dead_left_behind_holds_nobody_up(opened: Opened) -> None:
    """The record's lock goes with its holder, however it died: the next grant is made at once."""
    host = opened.host("trn1.2xlarge")
    backend = opened.backend(host)
    (device,) = backend.discover()
    host.state_dir.mkdir(exist_ok=True)
    lock = host.state_dir / "neuron.lock"
    done = subprocess.run([sys.executable, "-c", LOCKS, str(lock)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert lock.exists()
    backend.apply(create(device, 0, 2))
    assert len(backend.observe(device).partitions) == 1


def test_a_control_descriptor_that_outlives_its_tenant_keeps_the_cores(opened: Opened) -> None:
    """A process that dies but for its reservation still holds the cores, and they are not lent."""
    host = opened.host("trn1.2xlarge")
    backend = opened.backend(host)
    (device,) = backend.discover()
    backend.apply(create(device, 0, 2))
    (partition,) = backend.observe(device).partitions
    host.start(4242, 0, (), environ=partition.access.environment, modes=(os.O_WRONLY,))
    step = Destroy(device=device, partition=partition)
    with pytest.raises(DeviceBusyError, match="pid 4242"):
        backend.apply(step)
    host.end(4242)
    backend.apply(step)
    assert not backend.observe(device).partitions


def test_a_device_without_tables_is_lent_and_nothing_made_up(opened: Opened) -> None:
    """Trainium3: cores, memory and configurations as documented; no groups, and no core order."""
    host = opened.host("trn2.48xlarge", tools=False)
    for number in range(16):
        (host.folder(number) / "info/architecture/device_name").write_text("Trainium3\n")
    host.set_product_name("trn3.something")
    backend = opened.backend(host)
    device = backend.discover()[0]
    seen = backend.observe(device).device
    assert (seen.model, seen.slices, seen.memory_bytes) == (
        "Trainium3 (unknown instance)", 4, 144 << 30,
    )  # fmt: skip
    assert seen.group_sizes == ()
    assert next(limit for limit in seen.tier_limits if limit.way == "whole").tier is Tier.ENFORCED
    backend.apply(create(device, 0, 2))
    (part,) = backend.observe(device).partitions
    assert part.units == ()
    (report,) = audit(backend, device).values()
    assert verdict(report, "NRN-01").verdict is Verdict.UNKNOWN
    assert "core order is not known" in verdict(report, "NRN-01").reason
    backend.apply(Destroy(device=device, partition=part))
    backend.apply(create(device, 0, 4))
    (whole,) = backend.observe(device).partitions
    assert whole.units == tuple(range(8))
