"""The offline bundle: reproducible, and enough to install from with no network."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "scripts" / "bundle.py"
PYTHON = f"{sys.version_info[0]}.{sys.version_info[1]}"


def bundle(*arguments: str, epoch: str = "1700000000") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        env={**os.environ, "SOURCE_DATE_EPOCH": epoch},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    """Return a folder that looks as if it held wheels."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    (folder / "requirements.txt").write_text("alloy-agent==0 --hash=sha256:00\n")
    (folder / "alloy_agent-0-py3-none-any.whl").write_bytes(b"wheel")
    return folder


def test_two_archives_of_one_content_are_the_same(wheels: Path, tmp_path: Path) -> None:
    """Neither when nor by whom it was packed is in the archive; its sums are those of its files."""
    found = []
    for name in ("one.tar.gz", "two.tar.gz"):
        assert bundle("pack", str(tmp_path / name), "--wheels", str(wheels)).returncode == 0
        found.append((tmp_path / name).read_bytes())
        os.utime(wheels / "requirements.txt", (1, 1))
    assert found[0] == found[1]
    with tarfile.open(tmp_path / "one.tar.gz") as tar:
        tar.extractall(tmp_path, filter="data")
    packed = tmp_path / "alloy-agent"
    done = subprocess.run(
        ["/usr/bin/sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=packed, check=False
    )
    assert done.returncode == 0
    assert (packed / "systemd/alloy-agent.service").is_file()
    assert (packed / "deploy/daemonset/base/daemonset.yaml").is_file()


def test_what_is_missing_is_said_and_nothing_is_left(tmp_path: Path, wheels: Path) -> None:
    """No folder of wheels, a folder in use, a place that cannot be written: one line each."""
    target = tmp_path / "x.tar.gz"
    done = bundle("pack", str(target), "--wheels", str(tmp_path / "no"))
    assert (done.returncode, "make it with" in done.stderr) == (1, True)
    assert "is not empty" in bundle("wheels", str(wheels)).stderr
    done = bundle("pack", str(tmp_path / "no/x.tar.gz"), "--wheels", str(wheels))
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert not list(tmp_path.glob("x.tar.gz*"))


@pytest.mark.slow
@pytest.mark.host
def test_the_bundle_installs_with_no_network(tmp_path: Path) -> None:
    """Made for real, then installed by its own notes in an empty network namespace."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("an empty network namespace needs root and unshare")
    wheels, archive = tmp_path / "wheels", tmp_path / "bundle.tar.gz"
    done = bundle("wheels", str(wheels), "--python", PYTHON)
    assert done.returncode == 0, done.stderr
    (wheel,) = wheels.glob("alloy_agent-*.whl")
    with zipfile.ZipFile(wheel) as content:
        gates = [name for name in content.namelist() if "/built/" in name]
    assert {Path(name).name for name in gates} == {"liballoygate.so", "liballoyemu.so"}
    document = json.loads((wheels / "sbom.cdx.json").read_text())
    assert document["bomFormat"] == "CycloneDX"
    pinned = [line.split("==")[0] for line in (wheels / "requirements.txt").read_text().split("\n")]
    assert {one["name"] for one in document["components"]} == {p for p in pinned if p}
    assert bundle("pack", str(archive), "--wheels", str(wheels)).returncode == 0
    with tarfile.open(archive) as tar:
        tar.extractall(tmp_path, filter="data")
    packed, venv = tmp_path / "alloy-agent", tmp_path / "venv"
    notes = (packed / "INSTALL.txt").read_text()
    lines = [line for line in notes.splitlines() if line.startswith("    ")]
    begin = next(n for n, line in enumerate(lines) if "python3 -m venv" in line)
    end = next(n for n, line in enumerate(lines) if "ln -s" in line)
    script = "\n".join(lines[begin:end]).replace("/opt/alloy", str(venv))
    script = script.replace("python3 -m venv", f"{sys.executable} -m venv")
    clean = {
        "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": str(tmp_path),
        "PIP_CONFIG_FILE": "/dev/null",
    }
    offline = ("unshare", "--net", "/bin/sh", "-ec")
    done = subprocess.run(
        [*offline, script], cwd=packed, env=clean, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    shown = subprocess.run(
        [str(venv / "bin/alloy-agent"), "--state-dir", str(tmp_path), "--fake", "mixed", "devices"],
        env=clean,
        capture_output=True,
        text=True,
        check=False,
    )
    assert shown.returncode == 0, shown.stderr
    assert "H100" in shown.stdout
