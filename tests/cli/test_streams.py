"""Standard streams that are closed, full, narrow, or of a locale that has no box characters."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

AGENT = [sys.executable, "-m", "alloy_agent"]
COMMANDS = (["devices"], ["audit"], ["audit", "--json"], ["doctor"])


def environment(**more: str) -> dict[str, str]:
    """Return variables that keep this host's own cores out of it."""
    return {
        **{k: v for k, v in os.environ.items() if not k.startswith(("ALLOY_", "LC_", "LANG"))},
        "ALLOY_BACKENDS_CPU": "off",
        "ALLOY_CPU_CGROUP_ROOT": "alloy-none",
        **more,
    }


def run(
    folder: Path, *arguments: str, redirect: str = "", **more: str
) -> subprocess.CompletedProcess[str]:
    """Run one command through a shell that redirects its streams."""
    line = [*AGENT, "--state-dir", str(folder), "--fake", "1xH100", *arguments]
    return subprocess.run(
        ["/bin/sh", "-c", f'exec "$@" {redirect}', "sh", *line],
        env=environment(**more),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_a_locale_without_box_characters_is_enough(tmp_path: Path, arguments: list[str]) -> None:
    """In the POSIX locale, without UTF-8 mode, every answer comes in ASCII."""
    done = run(tmp_path, *arguments, LC_ALL="POSIX", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
    assert done.returncode == 0, done.stderr
    assert done.stdout.isascii()
    assert done.stderr == ""


@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_a_full_disk_behind_the_answer_is_said(tmp_path: Path, arguments: list[str]) -> None:
    """An answer that could not be written is one line and its own exit code, never success."""
    done = run(tmp_path, *arguments, redirect="> /dev/full")
    assert done.returncode == 74
    assert done.stderr == (
        "alloy-agent: standard output: no space left on device: the answer is not complete\n"
    )


@pytest.mark.parametrize("redirect", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams_are_nowhere(tmp_path: Path, redirect: str) -> None:
    """A command whose streams are closed does its work, and prints into none of its files."""
    done = run(tmp_path, "audit", redirect=redirect)
    assert done.returncode == 0, done.stderr
    for file in tmp_path.rglob("*"):
        if file.is_file():
            assert b"audit of" not in file.read_bytes()
    chain = run(tmp_path, "evidence", "verify", str(tmp_path))
    assert chain.returncode == 0, chain.stdout


@pytest.mark.parametrize(
    ("variables", "coloured"),
    [
        ({"TERM": "xterm"}, True),
        ({"TERM": "dumb"}, False),
        ({"TERM": "xterm", "NO_COLOR": "1"}, False),
    ],
)
def test_a_terminal_gets_what_it_can_show(
    tmp_path: Path, variables: dict[str, str], coloured: bool
) -> None:
    """Colours where the terminal has them and nobody said no; never wider than the terminal."""
    for arguments in (["devices"], ["audit"]):
        text = on_terminal(tmp_path, arguments, 80, variables)
        assert ("\x1b[" in text) is coloured
        if not coloured:
            assert max(len(line) for line in text.splitlines()) <= 80


def on_terminal(folder: Path, arguments: list[str], columns: int, variables: dict[str, str]) -> str:
    """Return what a command writes to a terminal of that width."""
    import fcntl
    import struct
    import termios

    ours, theirs = pty.openpty()
    try:
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        more = {"COLUMNS": "", **variables}
        with subprocess.Popen(
            [*AGENT, "--state-dir", str(folder), "--fake", "1xH100", *arguments],
            env=environment(**more),
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
        ) as running:
            os.close(theirs)
            theirs = -1
            chunks = []
            while True:
                try:
                    chunk = os.read(ours, 65536)
                except OSError:  # EIO: nobody has the other side open any more
                    break
                if not chunk:
                    break
                chunks.append(chunk)
            assert running.wait(60) == 0
    finally:
        os.close(ours)
        if theirs >= 0:
            os.close(theirs)
    return b"".join(chunks).decode().replace("\r\n", "\n")


@pytest.mark.parametrize("name", ["-", "/dev/stdin"])
def test_a_dash_is_standard_input(tmp_path: Path, name: str) -> None:
    """Plan and apply read what is piped into them; an error names the stream and the line."""
    layout = "version: v1\nlayouts:\n  a:\n    - match: {vendor: nvidia}\n      mig: [7g.80gb]\n"
    line = [*AGENT, "--state-dir", str(tmp_path), "--fake", "1xH100-SXM5-80GB"]
    for text, code in ((layout, 0), (layout.replace("mig:", "mgi:"), 2)):
        done = subprocess.run(
            [*line, "plan", name],
            env=environment(),
            input=text,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == code, done.stderr
        assert "7g.80gb" in done.stdout if code == 0 else "/dev/stdin:5" in done.stderr
