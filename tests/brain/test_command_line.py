"""The command line of the brain: bad input is one line with its cure, sizes are in words."""

from __future__ import annotations

import socket

import pytest

from alloy_agent import __version__
from alloy_brain.cli import main
from alloy_brain.gates import size


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Run one command line that must fail with 2, and return its one line."""
    try:
        code = main(words)
    except SystemExit as exc:
        code = int(exc.code or 0)
    told = capsys.readouterr()
    assert code == 2
    assert told.out == ""
    (line,) = told.err.splitlines()
    assert line.startswith("alloy-brain: ")
    return line


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ((), "COMMAND"),
        (("bogus",), "bogus"),
        (("place",), "--tenant"),
        (("place", "--tenant", "t", "--memory", "5x"), "5x"),
        (("place", "--tenant", "t", "--ttl", "4y"), "4y"),
        (("serve", "--term", "-1"), "--term"),
    ],
)
def test_usage_is_one_line(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], named: str
) -> None:
    """What is no command line says what is wrong and where to read on."""
    line = refused(capsys, *words)
    assert named in line
    assert "--help" in line


@pytest.mark.parametrize("address", ["foo", "localhost:", "localhost:99999", ":7443", "a b:1"])
def test_what_is_no_address_is_called_so(capsys: pytest.CaptureFixture[str], address: str) -> None:
    """Neither side takes it, and neither talks of TLS instead."""
    for words in (("serve", "--listen", address), ("nodes", "--brain", address)):
        line = refused(capsys, *words)
        assert f"{words[1]} {address}: no address" in line
        assert "HOST:PORT" in line


def test_where_no_brain_runs_the_cure_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    """The address, why nobody answers, and how to have one."""
    with socket.socket() as taken:  # bound and not listening: nobody can answer there
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        line = refused(capsys, "nodes", "--brain", address)
    assert f"no brain answers at {address} (connection refused)" in line
    assert "alloy-brain serve" in line
    assert "UNAVAILABLE" not in line


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    """`--version` names the program and its version."""
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"alloy-brain {__version__}\n"


@pytest.mark.parametrize("shell", ["bash", "zsh", "tcsh"])
def test_completion_knows_every_command(capsys: pytest.CaptureFixture[str], shell: str) -> None:
    """The script names the commands."""
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert all(name in script for name in ("serve", "place", "explain", "undrain"))


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (None, "0 B"),
        (1023, "1023 B"),
        (256 << 20, "256 MiB"),
        (100 << 30, "100 GiB"),
        (int(79.6 * (1 << 30)), "79.6 GiB"),
        (1 << 45, "32 TiB"),
    ],
)
def test_sizes_are_in_words(count: int | None, words: str) -> None:
    """Bytes are told in the unit that a person would take."""
    assert size(count) == words
