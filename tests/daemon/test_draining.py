"""Who else is told of drains: the hook, the threads that bring outlets there, and the answer."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alloy_agent.config import DrainSettings, KubernetesSettings, Settings, read_settings
from alloy_agent.daemon import calls
from alloy_agent.daemon.draining import Outlets, outlets_of, reaches_beyond
from alloy_agent.daemon.hook import Hook
from alloy_agent.errors import BackendError, ConfigError
from alloy_agent.model import Scope
from alloy_agent.store import Store
from alloy_agent.telemetry.drains import Drained, Drains
from tests.daemon.harness import Site, daemon, wait_for
from tests.daemon.test_slurm import drain
from tests.fakes import scontrol


def program(folder: Path, body: str, name: str = "hook") -> str:
    """Make a shell script; `$LOG` is a file beside it."""
    path = folder / name
    path.write_text(f"#!/bin/sh\nLOG={folder}/{name}.log\n{body}\n")
    path.chmod(0o700)
    return str(path)


def lines(folder: Path, name: str = "hook") -> list[str]:
    """Return what a script has written into its log."""
    path = folder / f"{name}.log"
    return path.read_text().splitlines() if path.exists() else []


# --- calls ----------------------------------------------------------------------------------------


def test_a_program_is_called_without_a_shell(tmp_path: Path) -> None:
    """Words arrive as they are, and what it says is kept."""
    path = program(tmp_path, 'printf "%s|" "$@"; exit 3')
    called = calls.call([path, "a; rm -rf $HOME", "", "b c"], 60)
    assert (called.code, called.said) == (3, "a; rm -rf $HOME||b c|")
    assert called.failure == "ended with 3: a; rm -rf $HOME||b c|"


@pytest.mark.parametrize("path", ["/dev/null", "/nowhere/at/all", "/etc"])
def test_what_is_no_program_is_a_failure(path: str) -> None:
    """In one line, with the cause."""
    called = calls.call([path], 60)
    assert called.code is None
    assert called.failure.startswith("cannot be run: ")


def test_a_program_that_does_not_end_is_killed_with_what_it_started(tmp_path: Path) -> None:
    """At the deadline the whole group goes, also a child that holds the output open."""
    path = program(tmp_path, 'sleep 600 & echo $! > "$LOG"; echo begun; sleep 600')
    for deadline_s in (1.0, 5.0, 30.0):  # a busy machine may not have come to it before
        called = calls.call([path], deadline_s)
        assert called.code is None
        assert called.failure == f"killed after {deadline_s:g} s"
        if lines(tmp_path):
            break
    child = int(lines(tmp_path)[0])
    wait_for("the end of the child", lambda: not _alive(child))


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_program_that_leaves_something_behind_is_not_waited_for(tmp_path: Path) -> None:
    """A daemon that it started keeps the pipe open: the call is over when the program is."""
    path = program(tmp_path, 'sleep 600 & echo $! > "$LOG"; echo done')
    called = calls.call([path], 300.0)
    os.kill(int(lines(tmp_path)[0]), signal.SIGKILL)
    assert (called.code, called.said) == (0, "done\n")


def test_only_the_end_of_what_is_said_is_kept(tmp_path: Path) -> None:
    """Megabytes of output cost sixteen KiB."""
    path = program(tmp_path, "head -c 4000000 /dev/zero | tr '\\0' x; echo the end")
    called = calls.call([path], 120.0)
    assert called.code == 0
    assert called.said.endswith("xthe end\n")
    assert len(called.said) <= calls.KEPT_BYTES


@given(st.text(max_size=2000))
def test_whatever_is_said_is_one_line_in_the_log(text: str) -> None:
    """Line ends, escapes and bells of a program never reach the log."""
    line = calls.one_line(text)
    assert line.isprintable()
    assert len(line) <= calls.LINE_LENGTH


# --- the hook -------------------------------------------------------------------------------------

MIG = """
version: v1
layouts:
  a:
    - match: {vendor: nvidia}
      mig: [3g.40gb, 3g.40gb]
"""
NODE = drain("", "driver update", "night")
GPU = drain()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """Give a store."""
    store = Store.open(tmp_path / "state")
    yield store
    store.close()


def test_each_drain_and_each_end_is_told_once_over_restarts(tmp_path: Path, store: Store) -> None:
    """In order, with scope, subject, session and reason; a new process tells only what is new."""
    path = program(tmp_path, 'echo "$@" >> "$LOG"')
    Hook((path, "-q"), 60, 5, store).bring((GPU,))
    hook = Hook((path, "-q"), 60, 5, store)
    hook.bring((GPU,))
    hook.bring((GPU, NODE))
    Hook((path, "-q"), 60, 5, store).bring((NODE,))
    Hook((path, "-q"), 60, 5, store).bring(())
    assert lines(tmp_path) == [
        "-q drain device GPU-0 ops fan",
        "-q drain node node night driver update",
        "-q undrain device GPU-0 ops fan",
        "-q undrain node node night driver update",
    ]


def test_a_hook_that_fails_is_called_again_and_given_up_at_last(
    tmp_path: Path, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    """Each failure is due again, the last one is an error in the log, and then life goes on."""
    path = program(tmp_path, 'echo "$1" >> "$LOG"; printf "bad\\n\\033[2Jday\\n" >&2; exit 1')
    hook = Hook((path,), 60, 3, store)
    for _ in range(2):
        with pytest.raises(BackendError, match=r"drain GPU-0: ended with 1: bad \[2Jday"):
            hook.bring((GPU,))
    with caplog.at_level(logging.ERROR):
        hook.bring((GPU,))
    assert [r.message for r in caplog.records] == ["hook_given_up"]
    hook.bring((GPU,))
    assert lines(tmp_path) == ["drain"] * 3


def test_the_end_of_a_drain_is_told_also_where_its_beginning_failed(
    tmp_path: Path, store: Store
) -> None:
    """Whatever half a call has done, there is a call to take it back, also after a crash."""
    path = program(tmp_path, 'echo "$1" >> "$LOG"; test "$1" = undrain')
    with pytest.raises(BackendError):
        Hook((path,), 60, 3, store).bring((GPU,))
    Hook((path,), 60, 3, store).bring(())
    assert lines(tmp_path) == ["drain", "undrain"]


def test_a_damaged_record_of_what_was_told_tells_all_again(tmp_path: Path, store: Store) -> None:
    """At least once, never not at all."""
    path = program(tmp_path, 'echo "$1" >> "$LOG"')
    store.set_meta("drains_told", "no json")
    Hook((path,), 60, 3, store).bring((GPU,))
    assert lines(tmp_path) == ["drain"]


# --- outlets --------------------------------------------------------------------------------------


class Recorder:
    """An outlet that fails as often as told, and remembers what it was brought to."""

    name = "recorder"

    def __init__(self, failures: list[Exception]) -> None:
        self.failures = failures
        self.brought: list[Drains] = []

    def bring(self, held: Drains) -> None:
        """Fail, or remember."""
        if self.failures:
            raise self.failures.pop()
        self.brought.append(held)


def test_an_outlet_is_brought_to_what_is_held_however_often_it_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From the start, again after failures and after a defect, and at once after a change."""
    monkeypatch.setattr("alloy_agent.daemon.draining.RETRY_MIN_S", 0.01)
    monkeypatch.setattr("alloy_agent.daemon.draining.RETRY_MAX_S", 0.02)
    held: list[Drains] = [(GPU,)]
    outlet = Recorder([RuntimeError("a defect"), BackendError("no answer"), BackendError("none")])
    outlets = Outlets((outlet,), lambda: held[-1])
    outlets.start()
    try:
        wait_for("the first", lambda: outlet.brought[-1:] == [(GPU,)])
        held.append((GPU, NODE))
        outlets.changed()
        wait_for("the change", lambda: outlet.brought[-1:] == [(GPU, NODE)])
        held.append(())
        outlets.changed()
        wait_for("the end", lambda: outlet.brought[-1:] == [()])
    finally:
        outlets.stop()


def test_without_settings_there_is_no_outlet_and_no_thread() -> None:
    """Nothing is paid for what is not set up."""
    assert outlets_of(Settings(node_name="n"), None) == ()


def test_the_answer_says_who_else_takes_nothing_new() -> None:
    """A device takes the whole node in Slurm, a partition what overlaps it in Kubernetes."""
    settings = Settings(
        node_name="n1.example.org",
        drain=DrainSettings(slurm=True),
        kubernetes=KubernetesSettings(enabled=True),
    )
    piece: Drained = drain("GPU-0/1g@0")
    also = reaches_beyond(settings, _scoped(piece, Scope.PARTITION))
    assert any("node n1 as a whole" in one for one in also)
    assert any("overlaps" in one for one in also)
    assert len(reaches_beyond(settings, GPU)) == 1
    assert reaches_beyond(settings, NODE) == ()
    assert reaches_beyond(Settings(node_name="n1"), GPU) == ()


def _scoped(drained: Drained, scope: Scope) -> Drained:
    import msgspec

    return msgspec.structs.replace(drained, scope=scope)


# --- settings -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("drain:\n  hook: [bin/hook]\n", r"a.yaml:2: drain.hook: 'bin/hook' is no absolute path"),
        ("drain:\n  hook: /bin/hook\n", r"a.yaml:2: drain.hook"),
        ("drain:\n  slurm: maybe\n", r"a.yaml:2: drain.slurm"),
        ("drain:\n  slurm: true\n  slurm_node: a,b\n", r"a.yaml:3: drain.slurm_node"),
        ("drain:\n  deadline_s: 1h\n", r"a.yaml:2: drain.deadline_s"),
        ("drain:\n  hook_attempts: 0\n", r"a.yaml:2: drain.hook_attempts"),
        ("telemetry:\n  hook: /bin/hook\n", r"a.yaml:2: .*hook"),
    ],
)
def test_bad_settings_are_refused_by_file_and_line(tmp_path: Path, text: str, words: str) -> None:
    """One line that names what is wrong and where."""
    path = tmp_path / "a.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        read_settings(path)


# --- the daemon -----------------------------------------------------------------------------------


def test_a_running_agent_tells_slurm_and_the_hook_over_a_restart(
    site: Site, tmp_path: Path
) -> None:
    """Drained for a device, kept over kill -9, ended by its time: both have been told of each."""
    slurm = scontrol.install(tmp_path, "n1")
    hook = program(tmp_path, 'echo "$1 $2 $4" >> "$LOG"')
    environment = {
        "ALLOY_NODE_NAME": "n1.example.org",
        "ALLOY_DRAIN_SLURM": "true",
        "ALLOY_DRAIN_SCONTROL": str(slurm),
        "ALLOY_DRAIN_HOOK": hook,
    }
    site.environment.update(environment)

    def reason() -> str:
        return (tmp_path / "slurm.json").read_text()

    with daemon(site) as running:
        gpu = site.document("devices", "--json")["devices"][0]["id"]
        done = site.run("drain", gpu, "--reason", "fan", "--session", "s1")
        assert done.returncode == 0, done.stderr
        assert "also Slurm: node n1 as a whole" in done.stdout
        wait_for("Slurm", lambda: f"device {gpu}, session s1: fan" in reason())
        wait_for("the hook", lambda: lines(tmp_path) == ["drain device s1"])
        running.kill()
    with daemon(site):
        done = site.run("drain", gpu, "--reason", "fan", "--session", "s1", "--for", "2s")
        assert " until 20" in done.stdout, done.stderr
        wait_for("the end in Slurm", lambda: "alloy-agent:" not in reason())
        wait_for("the end at the hook", lambda: lines(tmp_path)[1:] == ["undrain device s1"])
        assert "was not drained" in site.run("undrain", gpu).stdout


def test_a_span_that_is_none_is_refused(site: Site) -> None:
    """`--for` wants a number with its unit, within a year; nothing is drained."""
    with daemon(site):
        for span in ("soon", "0s", "400d", "5"):
            done = site.run("drain", "--for", span)
            assert done.returncode == 2
            assert done.stderr.startswith(f"alloy-agent: --for {span}: ")
        assert "was not drained" in site.run("undrain").stdout


def test_what_is_drained_takes_no_new_tenant_with_an_agent_and_without(
    site: Site, tmp_path: Path
) -> None:
    """Who is inside may start more; anybody else is refused in one line, until it is undrained."""
    layout = tmp_path / "layout.yaml"
    layout.write_text(MIG)
    assert site.run("apply", str(layout), "--yes").returncode == 0
    first, second = (piece["id"] for piece in site.partitions())
    gpu = first.partition("/")[0]
    short = gpu[:12]
    with subprocess.Popen(
        site.command("exec", first, "--tenant", "old", "--", "sleep", "600"), env=site.environment
    ) as old:
        try:
            comm = Path(f"/proc/{old.pid}/comm")
            wait_for("the tenant", lambda: comm.read_text().strip() == "sleep")
            with daemon(site) as running:
                assert site.run("drain", short, "--reason", "fan", "--for", "2h").returncode == 0
                _refused(site, gpu, first, second)
                nowhere = site.run("undrain", "nope")
                assert nowhere.returncode == 2
                assert "no device, partition or hive of that name" in nowhere.stderr
                running.kill()
            _refused(site, gpu, first, second)
            alone = site.run("undrain", short)
            assert alone.returncode == 2
            assert f"alloy-agent --state-dir {site.state} " in alone.stderr
            with daemon(site):
                assert f"{gpu} takes new work again" in site.run("undrain", short).stdout
                assert site.run("exec", second, "--tenant", "new", "--", "true").returncode == 0
        finally:
            old.kill()


def _refused(site: Site, drained: str, mine: str, other: str) -> None:
    """Check that the tenant inside may start more, and that a new one is told who drained it."""
    assert site.run("exec", mine, "--tenant", "old", "--", "true").returncode == 0
    done = site.run("exec", other, "--tenant", "new", "--", "true")
    assert done.returncode == 125
    assert done.stderr.count("\n") == 1
    assert f"{drained} is drained by session operator, until 20" in done.stderr
    assert ": fan: take it back with " in done.stderr
    assert f"undrain {drained}' or wait until then" in done.stderr
    hook = site.run("slurm", "prolog", SLURM_JOB_ID="7", SLURM_JOB_GPUS="0")
    assert hook.returncode == 2
    assert "is drained by session operator" in hook.stderr
