"""MPS: what the control daemon answers on a real socket, and what of it is believed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alloy_agent.backends.nvidia.mps import (
    ANSWER_MAX,
    Answer,
    Asker,
    Control,
    Server,
    daemons,
    parse_percentage,
    parse_pids,
    untrusted,
)
from alloy_agent.conformance.checks import FactBook, Intent, judge_partition
from alloy_agent.model import Fact, Partition, Snapshot, Verdict
from tests.backends.nvidia.test_backend import fact_of, hosted, process
from tests.backends.nvidia.test_shares import share, with_v2_tree
from tests.fakes.mps import MpsDaemon, endless, never
from tests.fakes.nvml.host import NvidiaHost

CONTROL, SERVER, CLIENT = 9, 10, 21
PATIENT_S = 60.0


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[MpsDaemon]:
    """Run a control daemon with one server and one client."""
    pipes = tmp_path / "pipes"
    with MpsDaemon(tmp_path / "root", pipes) as running:
        running.servers = {SERVER: ("30.0", (CLIENT,))}
        yield running


def control(tmp_path: Path, **how: Any) -> Control:
    """Return the daemon as its process shows it."""
    pipes = str(tmp_path / "pipes")
    return Control(CONTROL, how.get("told"), None, how.get("pipes", pipes), how.get("uid", 0))


def test_the_daemons_own_answers_are_what_counts(daemon: MpsDaemon, tmp_path: Path) -> None:
    """Default, servers, their percentage and clients come over the pipes, once in some seconds."""
    now = [100.0]
    asker = Asker(tmp_path / "root", clock=lambda: now[0], ask_s=PATIENT_S)
    daemon.default = "55.5"
    expected = Answer(55.5, (Server(SERVER, 30.0, (CLIENT,)),))
    assert asker.ask(control(tmp_path)) == expected
    asked = len(daemon.commands)
    assert asker.ask(control(tmp_path)) == expected
    assert len(daemon.commands) == asked
    daemon.servers = {}
    now[0] += 10
    assert asker.ask(control(tmp_path)) == Answer(55.5, ())


@pytest.mark.parametrize(
    ("command", "answer"),
    [
        ("get_default_active_thread_percentage", b"0\n"),
        ("get_default_active_thread_percentage", b"100.1\n"),
        ("get_default_active_thread_percentage", b"\xff\xfe\n"),
        ("get_default_active_thread_percentage", b""),
        ("get_default_active_thread_percentage", endless),
        ("get_default_active_thread_percentage", never),
        ("get_server_list", b"10 rm -rf /\n"),
        ("get_server_list", b"-1\n"),
        ("get_server_list", b"4194305\n"),
        ("get_server_list", b"1\n" * 5000),
    ],
)
def test_a_hostile_answer_is_none(
    command: str, answer: Any, daemon: MpsDaemon, tmp_path: Path
) -> None:
    """Out of range, not text, too long, too late, too many: a reason, never a value."""
    daemon.answers[command] = answer
    ask_s = 0.5 if answer is never else PATIENT_S
    told = Asker(tmp_path / "root", ask_s=ask_s).ask(control(tmp_path))
    assert isinstance(told, str)
    assert "no answer" in told
    assert len(told) < 400


def test_a_server_that_lies_is_unknown_alone(daemon: MpsDaemon, tmp_path: Path) -> None:
    """Nonsense about one server leaves that server without values, and the rest is believed."""
    daemon.servers[11] = ("nonsense", (22,))
    told = Asker(tmp_path / "root", ask_s=PATIENT_S).ask(control(tmp_path))
    assert isinstance(told, Answer)
    assert told.servers == (Server(SERVER, 30.0, (CLIENT,)), Server(11, None, (22,)))


@given(text=st.one_of(st.text(max_size=60), st.from_regex(r"[0-9.\n ]{0,20}", fullmatch=True)))
def test_any_answer_is_read_strictly_or_refused(text: str) -> None:
    """A percentage lies in (0, 100], pids are pids of a kernel; anything else is refused."""
    with contextlib.suppress(ValueError):
        assert 0 < parse_percentage(text) <= 100
    with contextlib.suppress(ValueError):
        assert all(0 < pid < 1 << 22 for pid in parse_pids(text))
    assert len(text) < ANSWER_MAX


def test_only_the_hosts_own_program_is_run(daemon: MpsDaemon, tmp_path: Path) -> None:
    """A program that others can change, that is none, or that is not there, is not run."""
    assert untrusted(daemon.program) == ""
    daemon.program.chmod(0o777)
    asker = Asker(tmp_path / "root")
    told = asker.ask(control(tmp_path))
    assert isinstance(told, str)
    assert "changed by others" in told
    assert daemon.commands == []
    daemon.program.chmod(0o644)
    assert "no program" in untrusted(daemon.program)
    daemon.program.unlink()
    assert "cannot be run" in untrusted(daemon.program)


def test_a_daemon_that_is_gone_is_said_to_be(daemon: MpsDaemon, tmp_path: Path) -> None:
    """Nobody behind the pipes: the program fails, and the reason names the daemon."""
    told = Asker(tmp_path / "root", ask_s=PATIENT_S).ask(
        control(tmp_path, pipes=str(tmp_path / "nobody"))
    )
    assert isinstance(told, str)
    assert "fails" in told
    assert daemon.commands == []


def test_roots_daemon_comes_first(tmp_path: Path) -> None:
    """A user's process of that name does not stand in for the host's daemon."""
    host, _ = hosted(tmp_path)
    process(host, 1)
    for pid, uid in ((8, 1000), (CONTROL, 0)):
        process(host, pid, comm="nvidia-cuda-mps", cmdline="/usr/bin/nvidia-cuda-mps-control")
        status = host.root / f"proc/{pid}/status"
        status.write_text(status.read_text() + f"Uid:\t{uid}\t{uid}\t{uid}\t{uid}\n")
    found, servers = daemons(host.root / "proc")
    assert found is not None
    assert (found.pid, found.uid, servers) == (CONTROL, 0, ())


@pytest.mark.parametrize("kind", ["user", "mnt", "pid"])
def test_root_of_a_container_is_no_daemon(kind: str, tmp_path: Path) -> None:
    """Whoever is in another namespace than the host's is neither its daemon nor a server of it."""
    host, _ = hosted(tmp_path)
    process(host, 1)
    for pid, name in ((8, "control"), (7, "server")):
        command = f"/usr/bin/nvidia-cuda-mps-{name}"
        spaces = {kind: 2}
        process(host, pid, comm="nvidia-cuda-mps", cmdline=command, namespaces=spaces)
        status = host.root / f"proc/{pid}/status"
        status.write_text(status.read_text() + "Uid:\t0\t0\t0\t0\n")
    assert daemons(host.root / "proc") == (None, ())
    process(host, 99, comm="nvidia-cuda-mps", cmdline="/usr/bin/nvidia-cuda-mps-control")
    found, _ = daemons(host.root / "proc")
    assert found is not None
    assert found.pid == 99


def shared_with_mps(daemon: MpsDaemon, tmp_path: Path) -> tuple[NvidiaHost, Partition]:
    """Return a shared GPU with a client in the share, the daemon's process and its server."""
    host, ident = hosted(tmp_path)
    del daemon
    with_v2_tree(host)
    (whole,) = host.backend.observe(ident).partitions
    host.backend.apply(share(ident))
    (piece,) = host.backend.observe(ident).partitions
    Path(piece.access.cgroup_procs[0]).write_text(f"{CLIENT}\n{SERVER}\n")
    host.run(whole, pid=CLIENT)
    process(host, 1)
    environ = {"CUDA_MPS_PIPE_DIRECTORY": str(tmp_path / "pipes")}
    for pid, name in ((CONTROL, "control"), (SERVER, "server")):
        command = f"/usr/bin/nvidia-cuda-mps-{name}"
        process(host, pid, comm="nvidia-cuda-mps", cmdline=command, environ=environ)
    return host, piece


def verdicts(host: NvidiaHost, piece: Partition) -> dict[str, Verdict]:
    """Return what the MPS checks say of a share."""
    host.backend._mps = Asker(host.root, ask_s=PATIENT_S)
    seen = host.backend.observe(piece.device)
    snapshot = Snapshot(
        boot_id="b",
        sequence=1,
        taken_at_s=0.0,
        taken_wall_s=0.0,
        devices=(seen.device,),
        partitions=seen.partitions,
    )
    value = fact_of(host, piece.device, piece.device, "mps.control").value
    book = FactBook([Fact(subject=piece.device, name="mps.control", value=value)])
    report = judge_partition(seen.partitions[0], seen.device, snapshot, book, Intent())
    found = report.judgements
    return {each.check: each.verdict for each in found if each.check.startswith("MPS")}


def test_clients_are_held_to_what_their_server_gives(daemon: MpsDaemon, tmp_path: Path) -> None:
    """A server's 30 % holds its client whatever the default says; 100 % holds nobody."""
    host, piece = shared_with_mps(daemon, tmp_path)
    host.library.compute_mode = 3
    expected = {"MPS-01": Verdict.PASS, "MPS-02": Verdict.PASS, "MPS-03": Verdict.PASS}
    assert verdicts(host, piece) == expected
    daemon.servers = {SERVER: ("100.0", (CLIENT,))}
    assert verdicts(host, piece)["MPS-01"] is Verdict.FAIL


def test_ways_around_the_daemon_are_found(daemon: MpsDaemon, tmp_path: Path) -> None:
    """A process that is nobody's client, and a mode that lets clients leave, each fail."""
    host, piece = shared_with_mps(daemon, tmp_path)
    daemon.servers = {SERVER: ("30.0", ())}
    found = verdicts(host, piece)
    assert (found["MPS-02"], found["MPS-03"]) == (Verdict.FAIL, Verdict.FAIL)


def test_without_an_answer_the_environment_is_told_as_such(
    daemon: MpsDaemon, tmp_path: Path
) -> None:
    """Who cannot be asked proves nothing with what it was started with: unknown, or a failure."""
    host, piece = shared_with_mps(daemon, tmp_path)
    daemon.program.unlink()
    value = fact_of(host, piece.device, piece.device, "mps.control").value
    assert value["asked"] is False
    assert "cannot be run" in value["reason"]
    assert verdicts(host, piece)["MPS-03"] is Verdict.UNKNOWN
