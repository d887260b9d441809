"""`share run` and `share status`, with a keeper, an emulated device and real tenants."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.rate.conftest import NEIGHBOUR, PRODUCTION, eventually

pytestmark = [pytest.mark.host, pytest.mark.slow]


class Shell:
    """The command line with a run folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = folder / "settings.yaml"
        self.config.write_text(f"socket_path: {folder}/agent.sock\n", encoding="utf-8")
        self.started: list[subprocess.Popen[str]] = []

    def argv(self, *arguments: str) -> list[str]:
        frame = [sys.executable, "-m", "alloy_agent", "--config", str(self.config)]
        return [*frame, "--state-dir", str(self.folder / "state"), *arguments]

    def run(self, role: str, name: str, program: str, seconds: str = "60") -> None:
        command = [sys.executable, "-c", program, seconds]
        argv = self.argv("share", "run", role, "--name", name, "emulated", "--", *command)
        self.started.append(
            subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        )

    def status(self) -> dict[str, Any]:
        done = subprocess.run(
            self.argv("share", "status", "--json"), capture_output=True, text=True, check=True
        )
        document = json.loads(done.stdout)
        assert document["schema"] == "alloy.share/v1"
        return document["devices"][0] if document["devices"] else {"tenants": []}

    def launched(self, name: str) -> int:
        return sum(t["launched"] for t in self.status()["tenants"] if t["name"] == name)


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    if os.geteuid() != 0:
        pytest.skip("needs root")
    made = Shell(tmp_path)
    yield made
    for process in made.started:
        process.kill()
        process.communicate()
    # the keeper leaves by itself once its tenants are gone
    assert eventually(lambda: not (tmp_path / "share/emulated/status.json").exists(), 30.0)


def test_two_tenants_share_and_a_third_production_is_refused(shell: Shell) -> None:
    """Both run and are shown; a second production tenant is refused in one line."""
    shell.run("--production", "p", PRODUCTION)
    assert eventually(lambda: shell.launched("p") > 40, 30.0)
    shell.run("--opportunistic", "n", NEIGHBOUR)
    assert eventually(lambda: shell.launched("n") > 20, 30.0)
    shell.run("--production", "q", PRODUCTION)
    refused = shell.started[-1]
    assert refused.wait(30) == 2
    assert refused.stderr is not None
    text = refused.stderr.read()
    assert "has production tenant p already" in text
    assert text.count("\n") == 1


def test_a_killed_keeper_stops_the_neighbour_and_its_successor_thaws(shell: Shell) -> None:
    """A killed keeper's lease runs out; what it had noted as frozen is thawed next."""
    shell.run("--opportunistic", "n", NEIGHBOUR)
    assert eventually(lambda: shell.launched("n") > 20, 30.0)
    folder = shell.folder / "share/emulated"
    for process in Path("/proc").glob("[0-9]*"):
        command = _command(process)
        if "alloy_agent.conformance.gate.keeper" in command and str(folder) in command:
            os.kill(int(process.name), signal.SIGKILL)
    note = folder / "frozen" / "x.frozen"
    note.write_text("alloy-no-such-group", encoding="utf-8")
    shell.run("--opportunistic", "m", NEIGHBOUR)
    assert eventually(lambda: shell.launched("m") > 20, 30.0)
    assert not note.exists()


def _command(process: Path) -> str:
    try:
        return (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""
