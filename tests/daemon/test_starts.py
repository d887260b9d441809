"""The memory of starts and ends: why the agent was restarted is known to the next run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alloy_agent.cli import main
from alloy_agent.daemon import starts
from alloy_agent.host import clock


def test_an_end_that_was_asked_for_is_no_restart(tmp_path: Path) -> None:
    """A run that was told to stop leaves nothing to report."""
    starts.begin(tmp_path)
    starts.end(tmp_path, "stopped by SIGTERM", asked=True)
    runs = starts.begin(tmp_path)
    assert [one.ended for one in runs] == ["stopped by SIGTERM", ""]
    assert starts.summary(runs) == ""
    assert runs[-1].pid == os.getpid()


def test_a_run_that_nobody_closed_is_closed_by_the_next(tmp_path: Path) -> None:
    """Within one boot it was killed; across boots the machine was restarted, which is no fault."""
    starts.begin(tmp_path)
    runs = starts.begin(tmp_path)
    assert runs[0].ended == starts.UNSEEN
    assert starts.summary(runs).startswith("restarted once since boot")
    text = (tmp_path / starts.FILE).read_text()
    (tmp_path / starts.FILE).write_text(text.replace(clock.boot_id(), "an earlier boot"))
    again = starts.begin(tmp_path)
    assert again[-2].ended == starts.NEW_BOOT
    assert starts.summary(again) == ""


@pytest.mark.parametrize(
    ("environ", "told"),
    [
        (("watchdog", "killed", "ABRT"), "watchdog: killed by SIGABRT"),
        (("core-dump", "dumped", "SEGV"), "core-dump: killed by SIGSEGV, with a core dump"),
        (("exit-code", "exited", "70"), "exit-code: exit code 70"),
        (("oom-kill", "killed", "KILL"), "oom-kill: killed by SIGKILL"),
        (("timeout", "", ""), "timeout"),
    ],
)
def test_the_manager_says_how_a_run_ended(
    environ: tuple[str, str, str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its variables become the end of the run that is open, and of no other."""
    names = ("SERVICE_RESULT", "EXIT_CODE", "EXIT_STATUS")
    for name, value in zip(names, environ, strict=True):
        monkeypatch.setenv(name, value)
    starts.begin(tmp_path)
    assert main(["--state-dir", str(tmp_path), "run", "--ended"]) == 0
    (run,) = starts.read(tmp_path)
    assert run.ended == told
    monkeypatch.setenv("SERVICE_RESULT", "exit-code")
    assert main(["--state-dir", str(tmp_path), "run", "--ended"]) == 0
    assert starts.read(tmp_path) == (run,)
    assert told in starts.summary(starts.begin(tmp_path))


def test_without_a_manager_nothing_is_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Called by hand, `--ended` changes nothing."""
    monkeypatch.delenv("SERVICE_RESULT", raising=False)
    starts.begin(tmp_path)
    assert main(["--state-dir", str(tmp_path), "run", "--ended"]) == 0
    assert starts.read(tmp_path)[-1].ended == ""


def test_the_memory_is_bounded(tmp_path: Path) -> None:
    """A loop of crashes keeps the newest ends only."""
    for _ in range(starts.KEPT + 5):
        runs = starts.begin(tmp_path)
    assert len(runs) == len(starts.read(tmp_path)) == starts.KEPT


@given(st.binary(max_size=200))
def test_any_content_is_a_beginning(data: bytes) -> None:
    """Whatever stands in the file, the agent starts; damage is begun anew."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / starts.FILE).write_bytes(data)
        assert starts.begin(Path(folder))[-1].ended == ""


def test_a_directory_that_refuses_stops_nobody(tmp_path: Path) -> None:
    """No state directory: the run begins all the same."""
    assert starts.begin(tmp_path / "absent")[-1].pid == os.getpid()
    starts.end(tmp_path / "absent", "x", asked=True)
