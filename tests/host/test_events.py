"""Events from the kernel: processes, cgroup moves, uevents; clocks and notifications."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alloy_agent.errors import BackendError
from alloy_agent.host import notify
from alloy_agent.host.cgroups import Cgroup, detect
from alloy_agent.host.clock import boot_id, boottime_s, monotonic_offset_s
from alloy_agent.host.procevents import (
    ProcessEvent,
    ProcessEventKind,
    ProcessEvents,
    missing_privilege,
    parse_events,
)
from alloy_agent.host.uevents import Uevent, UeventListener, parse_uevent
from alloy_agent.host.watch import CgroupWatch, ChangeKind

WAIT_S = 20.0  # generous: only to end a test that would hang
RENAMED = """
import ctypes, os, subprocess
ctypes.CDLL(None).prctl(15, ctypes.create_string_buffer(b"\\xff\\xfe\\x80"), 0, 0, 0)
subprocess.run(["/bin/true"], check=True)
"""

needs_connector = pytest.mark.skipif(
    bool(missing_privilege()), reason=f"process connector: {missing_privilege()}"
)


def message(what: int, *numbers: int, kind: int = 3, idx: int = 1) -> bytes:
    body = struct.pack("=IIQ", what, 0, 5_000_000_000) + struct.pack("=6I", *numbers)
    connector = struct.pack("=IIIIHH", idx, 1, 0, 0, len(body), 0)
    return struct.pack("=IHHII", 16 + 20 + len(body), kind, 0, 0, 0) + connector + body


def test_each_kind_of_event_is_unpacked() -> None:
    """Fork, exec, uid and exit carry their process; threads, names and the rest are left out."""
    datagram = (
        message(0x1, 10, 10, 11, 11, 0, 0)
        + message(0x1, 10, 10, 12, 11, 0, 0)  # a thread of 11
        + message(0x2, 11, 11, 0, 0, 0, 0)
        + message(0x4, 11, 11, 0, 0, 0, 0)
        + message(0x200, 11, 11, 0xFFFEFFFE, 0, 0, 0)  # a name that is no UTF-8
        + message(0x80000000, 12, 11, 0, 17, 0, 0)  # a thread ends
        + message(0x80000000, 11, 11, 0, 17, 0, 0)
        + message(0x2, 9, 9, 0, 0, 0, 0, idx=7)
    )
    found = [(e.kind.value, e.pid, e.parent) for e in parse_events(datagram)]
    assert found == [
        ("fork", 11, 10),
        ("exec", 11, None),
        ("uid", 11, None),
        ("exit", 11, None),
    ]
    assert parse_events(datagram, offset_s=2.0)[0].time_s == 7.0


@given(st.binary(max_size=300), st.integers(0, 76))
def test_no_datagram_breaks_the_reader(noise: bytes, cut: int) -> None:
    """Noise, cut messages and absurd lengths give fewer events, never an exception or a loop."""
    parse_events(noise)
    parse_events(message(0x2, 1, 1, 0, 0, 0, 0)[:cut] + noise)
    parse_uevent(noise)
    parse_uevent(b"add@/x\0" + noise)


def collect(events: ProcessEvents, until: int) -> list[ProcessEvent]:
    found: list[ProcessEvent] = []
    end = time.monotonic() + WAIT_S
    while time.monotonic() < end:
        found += events.get(timeout_s=0.2)
        if any(e.kind is ProcessEventKind.EXIT and e.pid == until for e in found):
            break
    return found


@pytest.fixture
def events() -> Iterator[ProcessEvents]:
    stream = ProcessEvents()
    stream.start()
    yield stream
    stream.stop()


@pytest.mark.host
@needs_connector
def test_a_process_is_told_from_fork_to_exit(events: ProcessEvents) -> None:
    """A child's fork, exec and exit arrive in order, stamped with the boot clock."""
    assert (events.mode, events.reason) == ("events", "")
    before = boottime_s()
    child = subprocess.Popen(["/bin/true"])
    child.wait()
    found = [e for e in collect(events, child.pid) if e.pid == child.pid]
    assert [e.kind.value for e in found] == ["fork", "exec", "exit"]
    assert found[0].parent == os.getpid()
    assert before - 1.0 <= found[0].time_s <= boottime_s() + 1.0


@pytest.mark.host
@needs_connector
def test_a_tenant_with_a_broken_name_stops_nobody(events: ProcessEvents) -> None:
    """A process that names itself in invalid UTF-8, and its child, are followed to their ends."""
    tenant = subprocess.Popen([sys.executable, "-c", RENAMED])
    tenant.wait()
    found = collect(events, tenant.pid)
    children = {e.pid for e in found if e.parent == tenant.pid}
    assert len(children) == 1
    assert events.mode == "events"


@pytest.mark.host
@needs_connector
def test_a_storm_of_forks_is_bounded(events: ProcessEvents) -> None:
    """With nobody reading the queue stays bounded, and one RESYNC stands for the rest."""
    small = ProcessEvents(capacity=50)
    small.start()
    try:
        command = "i=0; while [ $i -lt 300 ]; do (:); i=$((i+1)); done"
        subprocess.run(["/bin/sh", "-c", command], check=True)
        end = time.monotonic() + WAIT_S
        while not small.lost_count and time.monotonic() < end:
            time.sleep(0.01)
        found = small.get(timeout_s=WAIT_S)
        assert found[0].kind is ProcessEventKind.RESYNC
        assert len(found) <= 51
        assert small.lost_count > 0
        child = subprocess.Popen(["/bin/true"])
        child.wait()
        assert any(e.pid == child.pid for e in collect(small, child.pid))
    finally:
        small.stop()


def test_without_privilege_it_polls_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the connector is closed, mode and reason say so and a RESYNC comes at each interval."""
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    stream = ProcessEvents(poll_interval_s=0.01)
    stream.start()
    try:
        assert (stream.mode, stream.reason) == ("polling", "not root")
        for _ in range(2):
            assert [e.kind for e in stream.get(WAIT_S)] == [ProcessEventKind.RESYNC]
    finally:
        stream.stop()
    assert stream.get(0) == ()


@pytest.mark.host
def test_a_move_into_a_cgroup_and_out_of_it_is_told() -> None:
    """Moves, changes, new and removed cgroups reach the watcher, on v1 and v2 alike."""
    root = f"alloytest-{os.getpid()}-{time.monotonic_ns()}"
    cgroup = Cgroup(detect(), f"{root}/1c@0")
    cpu = min(os.sched_getaffinity(0))
    cgroup.create((cpu,), (0,), None)
    watch = CgroupWatch()
    tenant = subprocess.Popen(["/bin/sleep", "60"])
    try:
        assert cgroup.cpuset is not None
        leaf, top = cgroup.cpuset.folder(cgroup.path), cgroup.cpuset.mount
        watch.watch([leaf, top, cgroup.cpuset.folder(root)])
        assert watch.refused == ()
        cgroup.move(tenant.pid)
        assert (ChangeKind.WRITTEN, leaf, "cgroup.procs") in seen(watch)
        Path(f"{top}/cgroup.procs").write_text(str(tenant.pid))
        assert (ChangeKind.WRITTEN, top, "cgroup.procs") in seen(watch)
        Path(f"{leaf}/cpuset.cpus").write_text(str(cpu))
        assert (ChangeKind.WRITTEN, leaf, "cpuset.cpus") in seen(watch)
        tenant.kill()
        tenant.wait()
        cgroup.remove()
        assert (ChangeKind.REMOVED, cgroup.cpuset.folder(root), "1c@0") in seen(watch)
    finally:
        tenant.kill()
        tenant.wait()
        watch.close()
        cgroup.remove()
        cgroup.prune_parents()


def seen(watch: CgroupWatch) -> set[tuple[ChangeKind, str, str]]:
    return {(c.kind, c.folder, c.name) for c in watch.wait(WAIT_S)}


@pytest.mark.host
def test_an_emptied_v2_cgroup_is_told() -> None:
    """The kernel's own change of `cgroup.events` arrives where that file is watched."""
    topology = detect()
    tree = topology.unified
    if tree is None:
        pytest.skip("no v2 tree on this host")
    folder = tree.folder(f"alloytest-{os.getpid()}-{time.monotonic_ns()}")
    Path(folder).mkdir()
    watch = CgroupWatch()
    tenant = subprocess.Popen(["/bin/sleep", "60"])
    try:
        Path(f"{folder}/cgroup.procs").write_text(str(tenant.pid))
        watch.watch([f"{folder}/cgroup.events"])
        tenant.kill()
        tenant.wait()
        assert {c.folder for c in watch.wait(WAIT_S)} == {f"{folder}/cgroup.events"}
    finally:
        tenant.kill()
        tenant.wait()
        watch.close()
        Path(folder).rmdir()


def test_what_cannot_be_watched_is_named(tmp_path: Path) -> None:
    """A directory that is not there is reported as refused, the others are watched."""
    watch = CgroupWatch()
    try:
        watch.watch([str(tmp_path), str(tmp_path / "gone")])
        assert watch.refused == (str(tmp_path / "gone"),)
        (tmp_path / "new").mkdir()
        assert seen(watch) == {(ChangeKind.MADE, str(tmp_path), "new")}
        watch.watch([])
        (tmp_path / "newer").mkdir()
        assert watch.wait(0.05) == ()
    finally:
        watch.close()


def test_a_uevent_is_read_with_its_properties() -> None:
    """Action, path and subsystem of an announcement are told; udev's own format is none."""
    raw = b"remove@/devices/x\0ACTION=remove\0SUBSYSTEM=drm\0NAME=\xff\0"
    event = parse_uevent(raw, 3.0)
    assert event is not None
    assert (event.action, event.path, event.subsystem) == ("remove", "/devices/x", "drm")
    assert event.properties["NAME"] == "\\xff"
    assert parse_uevent(b"libudev\0\xfe\xed") is None


@pytest.mark.host
def test_uevents_of_this_host_arrive() -> None:
    """A synthetic announcement of the kernel reaches the listener."""
    found: list[Uevent] = []
    listener = UeventListener(found.append, frozenset({"mem"}))
    listener.start()
    try:
        assert (listener.mode, listener.reason) == ("events", "")
        end = time.monotonic() + WAIT_S
        while not found and time.monotonic() < end:
            Path("/sys/class/mem/null/uevent").write_text("change")
            time.sleep(0.02)
    finally:
        listener.stop()
    assert {(e.action, e.subsystem) for e in found} == {("change", "mem")}


# --- service manager, clock ------------------------------------------------------------------


@pytest.mark.parametrize("abstract", [False, True])
def test_the_service_manager_hears_every_state(abstract: bool, tmp_path: Path) -> None:
    """States arrive as one datagram, over a path and over the abstract namespace."""
    name = f"@alloytest-{os.getpid()}" if abstract else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(f"\0{name[1:]}" if abstract else name)
        manager.settimeout(WAIT_S)
        environ = {"NOTIFY_SOCKET": name}
        assert notify.sd_notify(notify.READY, notify.status("two\nlines"), environ=environ)
        assert manager.recv(1024) == b"READY=1\nSTATUS=two lines"
        assert notify.sd_notify(notify.reloading(boottime_s()), environ=environ)
        state, stamp = manager.recv(1024).decode().split("\n")
        now_us = time.clock_gettime(time.CLOCK_MONOTONIC) * 1e6
        assert state == "RELOADING=1"
        assert abs(int(stamp.removeprefix("MONOTONIC_USEC=")) - now_us) < 60e6


def test_nobody_listening_is_no_error(tmp_path: Path) -> None:
    """Without a manager, or with one that has gone, sending says False and nothing else."""
    for name in ("", "relative", str(tmp_path / "gone"), "@nobody-there"):
        assert not notify.sd_notify(notify.READY, environ={"NOTIFY_SOCKET": name})


@pytest.mark.parametrize(
    ("environ", "interval_s"),
    [
        ({}, None),
        ({"WATCHDOG_USEC": "20000000"}, 10.0),
        ({"WATCHDOG_USEC": "20000000", "WATCHDOG_PID": "41"}, 10.0),
        ({"WATCHDOG_USEC": "20000000", "WATCHDOG_PID": "42"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
    ],
)
def test_the_watchdog_is_fed_at_half_its_period(
    environ: dict[str, str], interval_s: float | None
) -> None:
    """The interval is half of what the manager allows, for the process it means and no other."""
    assert notify.watchdog_interval_s(environ, pid=41) == interval_s


def test_the_boot_is_known_by_its_id(tmp_path: Path) -> None:
    """The boot id is the kernel's; without it the error says what to mount."""
    assert len(boot_id()) == 36
    with pytest.raises(BackendError, match="mount the host's /proc"):
        boot_id(tmp_path)
    assert monotonic_offset_s() >= -0.01
