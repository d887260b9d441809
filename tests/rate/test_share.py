"""`share run` and `share status` without an agent: a keeper, an emulated device, real tenants."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from alloy_agent.conformance.keeper import client
from alloy_agent.conformance.keeper.messages import Conditions, HandOver, Policy
from alloy_agent.errors import ConfigError
from alloy_agent.host.cgroups import detect
from tests.daemon.harness import gone
from tests.host.hostile import bait, mark_of
from tests.rate.conftest import NEIGHBOUR, PRODUCTION, eventually

pytestmark = [pytest.mark.host, pytest.mark.slow]
WITHIN_S = 180.0  # a bound for a machine on which many others work

SLIPPING = NEIGHBOUR.replace(
    "while time",
    """
import subprocess
bare = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"}
code = "import ctypes, os, time\\nemu = ctypes.CDLL(os.environ['ALLOY_EMU_LIBRARY'])\\n"
code += "while True:\\n    emu.emuLaunchKernel(3, 100)\\n    time.sleep(0.005)\\n"
subprocess.Popen([sys.executable, "-c", code], env=bare)
while time""",
    1,
)


# what is read of a device whose keeper has not told for a while
EMPTY: dict[str, Any] = {
    "tenants": [],
    "adopted": None,
    "thawed": None,
    "held": None,
    "throttled": None,
    "budget_ratio": None,
    "skipped": -1,
    "keeper": "",
    "keeper_pid": 0,
}


class Shell:
    """The command line with a run folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = folder / "settings.yaml"
        self.config.write_text(f"socket_path: {folder}/agent.sock\n", encoding="utf-8")
        self.device = folder / "share" / "emulated"
        self.started: list[subprocess.Popen[str]] = []

    def argv(self, *arguments: str) -> list[str]:
        frame = [sys.executable, "-m", "alloy_agent", "--config", str(self.config)]
        return [*frame, "--state-dir", str(self.folder / "state"), *arguments]

    def run(self, role: str, name: str, program: str, *options: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", program, "300"]
        argv = self.argv("share", "run", role, "--name", name, *options, "emulated", "--")
        process = subprocess.Popen(
            [*argv, *command], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        self.started.append(process)
        return process

    def status(self) -> dict[str, Any]:
        """Return how the device stands, by what its keeper wrote last; wait for its first word."""
        assert eventually(lambda: bool(client.views(self.device.parent)), WITHIN_S)
        for view in client.views(self.device.parent):
            return dict(json.loads(msgspec.json.encode(view)))
        return {**EMPTY}

    def tenant(self, name: str) -> dict[str, Any]:
        views = client.views(self.device.parent)
        found = json.loads(msgspec.json.encode(views[0]))["tenants"] if views else []
        return next((t for t in found if t["name"] == name), {})

    def keeper(self) -> int:
        """Return the pid of the keeper once it has told it."""
        assert eventually(lambda: bool(self.status()["keeper_pid"]), WITHIN_S)
        return int(self.status()["keeper_pid"])

    def launched(self, name: str) -> int:
        return int(self.tenant(name).get("launched", 0))

    def clean(self) -> None:
        for process in self.started:
            process.kill()
        end_tenants(self.folder)  # and what they left behind, which has their pipes
        for process in self.started:
            process.communicate()


def command_of(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def parent_of(pid: int) -> int:
    stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    return int(stat.rpartition(")")[2].split()[1])


def processes_of(folder: Path) -> list[int]:
    """Return the processes that name a folder in their command or their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            text = (path / "cmdline").read_bytes() + (path / "environ").read_bytes()
            if os.fsencode(folder) + b"/" in text and int(path.name) != os.getpid():
                found.append(int(path.name))
    return found


def groups_of(root: Path) -> list[Path]:
    """Return the cgroups that were made for the tenants of an agent; a keeper takes them away."""
    tree = detect().unified
    if tree is None:
        return []
    agent = hashlib.sha256(os.fsencode(root)).hexdigest()[:8]
    return list(Path(tree.folder("alloy-share")).glob(f"{agent}/**/cgroup.procs"))


def built(libraries: tuple[Path, Path], state: Path) -> None:
    """Put the libraries where keepers look for them: compiling takes long on a busy machine."""
    for library in libraries:
        place = state / "lib" / library.parent.name
        place.mkdir(parents=True, exist_ok=True)
        shutil.copy2(library, place / library.name)


def end_tenants(folder: Path) -> None:
    """Kill every process of a folder that launches."""
    for pid in processes_of(folder):
        if b"emuLaunchKernel" in command_of(pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.fixture
def shell(libraries: tuple[Path, Path]) -> Iterator[Shell]:
    if os.geteuid() != 0:
        pytest.skip("needs root")
    with tempfile.TemporaryDirectory(prefix="alloy-") as name:
        folder = Path(name)
        made = Shell(folder)
        built(libraries, folder / "state")
        yield made
        made.clean()
        # keeper and emulated device leave by themselves once their tenants are gone
        left = eventually(lambda: not processes_of(folder), WITHIN_S)
        assert left, [command_of(pid) for pid in processes_of(folder)]
        assert not groups_of(folder / "share")


def test_two_tenants_share_and_a_third_production_is_refused(shell: Shell) -> None:
    """Both run and are shown; a second production tenant is refused in one line."""
    shell.run("--production", "p", PRODUCTION)
    assert eventually(lambda: shell.launched("p") > 40, WITHIN_S)
    shell.run("--opportunistic", "n", NEIGHBOUR, "--budget", "5")
    assert eventually(lambda: shell.launched("n") > 20, WITHIN_S)
    assert [path.parent.name for path in groups_of(shell.device.parent)].count("n") == 1
    twice = shell.run("--opportunistic", "n", NEIGHBOUR)
    assert twice.wait(WITHIN_S) == 2  # and the group of the first stays
    assert [path.parent.name for path in groups_of(shell.device.parent)].count("n") == 1
    refused = shell.run("--production", "q", PRODUCTION)
    assert refused.wait(WITHIN_S) == 2
    assert refused.stderr is not None
    text = refused.stderr.read()
    assert "has production tenant p already" in text
    assert text.count("\n") == 1
    assert eventually(
        lambda: shell.tenant("n").get("watched", {}).get("witness") == "uprobe counters", WITHIN_S
    )
    assert eventually(lambda: shell.status()["budget_ratio"] == 0.05, WITHIN_S)
    assert eventually(lambda: shell.status()["keeper"] == "own", WITHIN_S)
    assert shell.tenant("n").get("bypass", []) == []
    done = subprocess.run(
        shell.argv("share", "status", "--json"), capture_output=True, text=True, check=True
    )
    document = json.loads(done.stdout)
    assert document["schema"] == "alloy.share/v1"
    assert [d["device"] for d in document["devices"]] == ["emulated"]
    text = subprocess.run(
        shell.argv("share", "status"), capture_output=True, text=True, check=True
    ).stdout
    assert "kept by a keeper of its own" in text
    assert "audit: " in text


def test_a_killed_keeper_stops_the_neighbour_and_its_successor_adopts_it(shell: Shell) -> None:
    """The next keeper thaws what was noted as frozen and takes up the tenant that is there."""
    shell.run("--opportunistic", "n", NEIGHBOUR)
    assert eventually(lambda: shell.launched("n") > 20, WITHIN_S)
    os.kill(shell.keeper(), signal.SIGKILL)
    note = shell.device / "frozen" / "x.frozen"
    note.write_text("alloy-no-such-group", encoding="utf-8")
    shell.run("--opportunistic", "m", NEIGHBOUR)
    assert eventually(lambda: shell.launched("m") > 20, WITHIN_S)
    assert not note.exists()
    assert eventually(lambda: shell.status()["thawed"] == ["alloy-no-such-group"], WITHIN_S)
    assert eventually(lambda: shell.status()["adopted"] == ["n"], WITHIN_S)
    before = shell.launched("n")
    assert eventually(lambda: shell.launched("n") > before, WITHIN_S)


def test_a_child_without_the_gate_is_found(shell: Shell) -> None:
    """A process that took the preload off shows by its maps and by the kernel's count."""
    shell.run("--opportunistic", "n", SLIPPING)
    assert eventually(lambda: bool(shell.tenant("n").get("bypass")), WITHIN_S)
    assert eventually(
        lambda: any("not beneath the gate" in text for text in shell.tenant("n").get("bypass", ())),
        WITHIN_S,
    )
    assert eventually(
        lambda: any("the kernel" in text for text in shell.tenant("n").get("bypass", ())), WITHIN_S
    )


def test_a_keeper_goes_by_what_it_is_told(shell: Shell) -> None:
    """The smallest budget holds, a held device lends nothing, throttled windows do not count."""
    shell.run("--production", "p", PRODUCTION, "--budget", "3")
    shell.run("--opportunistic", "n", NEIGHBOUR)
    assert eventually(lambda: shell.launched("n") > 20, WITHIN_S)
    client.ask(shell.device, Policy(budget_ratio=0.01, held="a test"))
    assert eventually(lambda: shell.status()["held"] == "a test", WITHIN_S)
    assert eventually(lambda: shell.status()["budget_ratio"] == 0.01, WITHIN_S)
    assert eventually(lambda: shell.tenant("n").get("leased") is False, WITHIN_S)
    client.ask(shell.device, Policy())
    assert eventually(lambda: shell.status()["budget_ratio"] == 0.03, WITHIN_S)
    before = shell.launched("n")
    assert eventually(lambda: shell.launched("n") > before, WITHIN_S)
    client.ask(shell.device, Conditions(throttled="hot"))
    assert eventually(lambda: shell.status()["throttled"] == "hot", WITHIN_S)
    skipped = shell.status()["skipped"]
    assert eventually(lambda: shell.status()["skipped"] > skipped, WITHIN_S)
    with pytest.raises(ConfigError, match="loss budget 90 %"):
        client.ask(shell.device, Policy(budget_ratio=0.9))


def test_a_device_is_handed_over(shell: Shell) -> None:
    """A keeper that is asked to leaves its tenants to the next one."""
    shell.run("--opportunistic", "n", NEIGHBOUR)
    assert eventually(lambda: shell.launched("n") > 20, WITHIN_S)
    first = shell.keeper()
    assert parent_of(first) not in {process.pid for process in shell.started}
    client.ask(shell.device, HandOver())
    assert eventually(lambda: gone(first), WITHIN_S)
    shell.run("--opportunistic", "m", NEIGHBOUR)
    assert eventually(lambda: shell.launched("m") > 0, WITHIN_S)
    assert eventually(lambda: shell.status()["adopted"] == ["n"], WITHIN_S)


def test_a_folder_too_deep_for_sockets_is_said_at_once(tmp_path: Path) -> None:
    """A path that no socket can have is refused before anything is started."""
    with pytest.raises(ConfigError, match="too long for a socket"):
        client.folder_of(tmp_path / ("deep" * 30), "emulated")


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--opportunistic", "--weight", "0", "emulated", "--", "true"], "weight 0"),
        (["--production", "--budget", "80", "emulated", "--", "true"], "budget 80 %"),
        (["--production", "a/b", "--", "true"], "a/b: there is none"),
        (["--production", "emulated"], "no command given"),
    ],
)
def test_nonsense_is_refused_in_one_line(shell: Shell, arguments: list[str], word: str) -> None:
    """Bad options start nothing and say what is wrong."""
    done = subprocess.run(
        shell.argv("share", "run", *arguments), capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert word in done.stderr
    assert done.stderr.count("\n") == 1


def test_no_code_is_taken_from_where_root_stands(shell: Shell, tmp_path: Path) -> None:
    """Keeper and emulated device come up; nothing that lies in the folder is imported."""
    hostile = bait(tmp_path / "hostile")
    argv = shell.argv("share", "run", "--production", "--name", "p", "emulated", "--", "true")
    argv.insert(1, "-P")  # as the installed command is: it does not look there itself
    done = subprocess.run(argv, cwd=hostile, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not mark_of(hostile).exists()


def test_a_keeper_that_stood_still_has_not_made_its_tenant_a_stranger(shell: Shell) -> None:
    """A command whose first request is taken late asks again, and its program runs."""
    shell.run("--opportunistic", "n", NEIGHBOUR)
    assert eventually(lambda: shell.launched("n") > 20, WITHIN_S)
    keeper = shell.keeper()
    os.kill(keeper, signal.SIGSTOP)
    try:
        late = shell.run("--opportunistic", "late", NEIGHBOUR)
        # it asks once more only after it has given its first request up
        assert eventually(lambda: waiting(shell.device / "keeper.sock") >= 2, WITHIN_S)
    finally:
        os.kill(keeper, signal.SIGCONT)
    assert eventually(lambda: shell.launched("late") > 20 or late.poll() is not None, WITHIN_S)
    assert late.poll() is None


def waiting(path: Path) -> int:
    """Return how many connections to a socket of a stopped process nobody has accepted yet."""
    lines = Path("/proc/net/unix").read_text(encoding="utf-8", errors="replace").splitlines()
    fields = [line.split() for line in lines if line.endswith(f" {path}")]
    return sum(1 for line in fields if line[5] != "01")
