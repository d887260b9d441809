"""Readers of /proc: hostile names, processes that go, threads that sit elsewhere."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from alloy_agent.host.processes import (
    iter_processes,
    parse_cgroups,
    parse_stat,
    parse_status,
    printable,
    read_process,
    start_ticks,
)

STAT_REST = b" S 7 1 1 0 -1 4194304 1 0 0 0 30 12 0 0 20 0 3 0 4711 1 1 " + b"0 " * 14 + b"5 0 0"
NAMED = """
import ctypes, sys
name = bytes.fromhex(sys.argv[1])
ctypes.CDLL(None).prctl(15, ctypes.create_string_buffer(name), 0, 0, 0)
print("ready", flush=True)
sys.stdin.read()
"""


@given(st.binary(max_size=15).filter(lambda name: b"\0" not in name))
def test_any_name_is_told_apart_from_the_fields(name: bytes) -> None:
    """Names with spaces, newlines, parentheses or broken UTF-8 do not shift a field."""
    stat = parse_stat(b"42 (" + name + b")" + STAT_REST)
    assert stat.comm == name
    assert (stat.pid, stat.ppid, stat.thread_count, stat.start_ticks) == (42, 7, 3, 4711)
    assert (stat.cpu_ticks, stat.last_cpu) == (42, 5)


@given(st.binary(max_size=200))
def test_no_stat_line_does_more_than_raise_value_error(raw: bytes) -> None:
    """Any bytes are a stat line or a ValueError."""
    try:
        parse_stat(raw)
    except ValueError:
        return


@given(st.binary(max_size=200))
def test_no_status_does_more_than_raise_value_error(raw: bytes) -> None:
    """Any bytes are a status or a ValueError, wherever they are cut."""
    try:
        parse_status(raw + b"\nUid:\t1" + raw + b"\nCpus_allowed_list:\t" + raw)
    except ValueError:
        return


@given(st.binary(max_size=200))
def test_any_cgroup_file_gives_printable_paths(raw: bytes) -> None:
    """Hostile cgroup names come out printable, so that they can stand in a table or a log."""
    for controller, path in parse_cgroups(b"3:cpuset:/" + raw).items():
        assert (controller + path).isprintable()


@given(st.binary(max_size=20), st.binary(max_size=20))
def test_two_names_never_look_the_same(one: bytes, other: bytes) -> None:
    """Escaping loses nothing: equal text means equal bytes, and JSON takes it."""
    assert (printable(one) == printable(other)) == (one == other)
    assert printable(one).isprintable()
    msgspec.json.encode(printable(one))


def test_escapes_of_characters_and_of_bytes_differ() -> None:
    """A control character in UTF-8 and the bare byte of its number stay two names."""
    assert printable(b"\x85") != printable("\x85".encode())


def test_cgroups_of_all_kinds_are_told_apart() -> None:
    """Co-mounted controllers share a path, v2 is the empty name, a path may hold colons."""
    raw = b"4:cpu,cpuacct:/a\n1:name=systemd:/s\n0::/x:y (deleted)\nnoise\n"
    assert parse_cgroups(raw) == {
        "cpu": "/a",
        "cpuacct": "/a",
        "name=systemd": "/s",
        "": "/x:y (deleted)",
    }


@pytest.mark.parametrize(
    "name", [b"\xff\xfe\x80", b"a)b (c\nd", b"\x1b[31mred", b"back\\slash", b") S 1 2 3"]
)
def test_a_tenant_with_a_hostile_name_is_read(name: bytes) -> None:
    """A live process that names itself in such bytes is read like any other."""
    tenant = subprocess.Popen(
        [sys.executable, "-c", NAMED, name.hex()], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert tenant.stdout is not None
        assert tenant.stdout.readline() == b"ready\n"
        process = read_process(tenant.pid)
        assert process is not None
        assert process.comm == printable(name[:15])
        assert (process.pid, process.ppid, process.uid) == (tenant.pid, os.getpid(), os.getuid())
        assert process.start_ticks == start_ticks(tenant.pid)
        assert not process.kernel_thread
        assert process.cpus_allowed == tuple(sorted(os.sched_getaffinity(tenant.pid)))
    finally:
        tenant.communicate()


def test_a_thread_with_its_own_affinity_is_seen() -> None:
    """Each thread's own CPUs are read, not its leader's."""
    cpu = min(os.sched_getaffinity(0))
    ready, done = threading.Event(), threading.Event()
    tids: list[int] = []

    def run() -> None:
        os.sched_setaffinity(0, {cpu})
        tids.append(threading.get_native_id())
        ready.set()
        done.wait()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert ready.wait(10)
        process = read_process(os.getpid(), threads=True)
        assert process is not None
        found = {t.tid: t.cpus_allowed for t in process.threads}
        assert found[tids[0]] == (cpu,)
        assert os.getpid() not in found
    finally:
        done.set()
        thread.join()


def test_a_process_that_goes_is_not_listed(tmp_path: Path) -> None:
    """Files that vanish or are cut short in the middle of a read leave the process out."""
    for pid, text in ((5, ""), (6, "6 (cut"), (7, None)):
        (tmp_path / str(pid)).mkdir()
        if text is not None:
            (tmp_path / str(pid) / "stat").write_text(text)
    assert list(iter_processes(tmp_path)) == []
    assert read_process(5, tmp_path) is None
    assert start_ticks(7, tmp_path) is None


def test_everyone_is_listed_with_kernel_threads_apart() -> None:
    """This process and its parent are among all, and where kernel threads show they are marked."""
    everyone = {p.pid: p for p in iter_processes()}
    assert os.getpid() in everyone
    kernel = [p for p in everyone.values() if p.kernel_thread]
    assert all(p.ppid in {0, 2} for p in kernel)
    assert not everyone[os.getpid()].kernel_thread


def test_a_storm_of_exits_breaks_no_listing() -> None:
    """Listing while hundreds of processes start and end never raises and never invents one."""
    storm = subprocess.Popen(
        ["/bin/sh", "-c", "i=0; while [ $i -lt 400 ]; do /bin/true & i=$((i+1)); done; wait"]
    )
    try:
        while storm.poll() is None:
            for process in iter_processes(threads=True):
                assert process.start_ticks >= 0
                assert process.cpus_allowed
    finally:
        storm.kill()
        storm.wait()
