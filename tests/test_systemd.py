"""The unit file: clean for systemd, sandboxed as promised, and fit for the program it starts."""

from __future__ import annotations

import configparser
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
UNIT = ROOT / "systemd" / "alloy-agent.service"
ANALYZE = shutil.which("systemd-analyze")
needs_systemd = pytest.mark.skipif(ANALYZE is None, reason="systemd-analyze is not installed")


def unit(section: str) -> dict[str, list[str]]:
    """Return the directives of a section, each with all its values."""
    found: dict[str, list[str]] = {}
    current = ""
    for line in UNIT.read_text().splitlines():
        if line.startswith("["):
            current = line.strip("[]")
        elif "=" in line and not line.startswith("#") and current == section:
            key, _, value = line.partition("=")
            found.setdefault(key, []).append(value)
    return found


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """Return the unit with a command that is there on every host."""
    path = tmp_path / UNIT.name
    path.write_text(UNIT.read_text().replace("alloy-agent run", "/bin/true"))
    return path


@needs_systemd
def test_systemd_finds_nothing_wrong(installed: Path) -> None:
    """No unknown directive, no bad value, no missing command."""
    done = subprocess.run(
        [str(ANALYZE), "verify", "--man=no", str(installed)],
        capture_output=True,
        text=True,
        check=False,
    )
    mentions = [line for line in done.stderr.splitlines() if UNIT.name in line]
    assert (done.returncode, mentions) == (0, [])


@needs_systemd
def test_the_exposure_is_at_most_four(installed: Path) -> None:
    """Systemd's own rating of the sandbox, 0 (best) to 10."""
    done = subprocess.run(
        [str(ANALYZE), "security", "--offline=true", "--threshold=40", str(installed)],
        capture_output=True,
        text=True,
        check=False,
    )
    rating = re.search(r"exposure level for \S+: ([0-9.]+)", done.stdout)
    assert rating is not None, done.stdout + done.stderr
    assert done.returncode == 0
    assert float(rating[1]) <= 4.0


def test_the_unit_fits_to_the_agent() -> None:
    """Its directories are the agent's defaults, and it comes back before a kubelet forgets it."""
    from alloy_agent.config import Settings

    service = unit("Service")
    assert Settings().state_dir == f"/var/lib/{service['StateDirectory'][0]}"
    assert Settings().socket_path.startswith(f"/run/{service['RuntimeDirectory'][0]}/")
    assert service["Type"] == ["notify"]
    assert int(service["RestartSec"][0]) < 28
    assert service["RestartPreventExitStatus"] == ["2"]


def test_everything_left_open_is_explained() -> None:
    """Each capability of the unit and each hole in the sandbox stands in the documentation."""
    text = (ROOT / "docs" / "systemd.md").read_text()
    for capability in unit("Service")["CapabilityBoundingSet"][0].split():
        assert capability in text, capability
    for name in ("ProtectKernelTunables", "PrivateDevices", "ProtectControlGroups", "ProtectProc"):
        assert name in text
        assert name not in unit("Service")


def test_the_example_of_keys_is_a_drop_in() -> None:
    """It parses, and its variables are settings of the agent."""
    from alloy_agent.config import setting_names, variable_of

    path = ROOT / "systemd" / "alloy-agent.service.d" / "tls.conf.example"
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.read_string(path.read_text())
    known = {variable_of(name) for name in setting_names()}
    for line in path.read_text().splitlines():
        if line.startswith("Environment="):
            assert line.split("=")[1] in known


def test_the_agent_runs_where_memory_cannot_become_code(tmp_path: Path) -> None:
    """MemoryDenyWriteExecute, as the kernel enforces it: an audit runs to its end."""
    program = (
        "import ctypes, os, sys\n"
        "if ctypes.CDLL(None).prctl(65, 1, 0, 0, 0):  # PR_SET_MDWE, Linux 6.3\n"
        "    sys.exit(99)\n"
        "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])\n"
    )
    done = subprocess.run(
        [
            *(sys.executable, "-c", program, "-m", "alloy_agent", "--state-dir", str(tmp_path)),
            *("--fake", "1xH100-SXM5-80GB", "devices"),
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if done.returncode == 99:
        pytest.skip("the kernel on this host only (6.3 or later) can be asked for this")
    assert done.returncode == 0, done.stderr
    assert "H100" in done.stdout
