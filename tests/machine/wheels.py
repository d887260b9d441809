"""The agent and all that it needs as wheels in one folder: what an offline host is given."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PLATFORMS = ("manylinux2014_x86_64", "manylinux_2_28_x86_64", "manylinux_2_34_x86_64")


class StepError(Exception):
    """A step of making a machine failed: its words."""


def run(*argv: str) -> None:
    """Do a command.

    Raises:
        StepError: It failed.
    """
    done = subprocess.run(argv, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode != 0:
        words = (done.stderr or done.stdout).strip()[-2000:]
        raise StepError(f"{' '.join(argv[:6])}: exit {done.returncode}: {words}")


def collect(folder: Path, python: str, more: tuple[str, ...] = ()) -> None:
    """Put the agent's wheel, those that it needs (locked), pip and pipx into a folder.

    Args:
        folder: Made anew.
        python: Version of the interpreter that is to install them, such as "3.11".
        more: Further requirements.
    """
    source = folder.parent / "source"
    source.mkdir(parents=True)
    for name in ("alloy_agent", "alloy_brain"):
        shutil.copytree(
            ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", ".*_cache")
        )
    for name in ("pyproject.toml", "README.md", "LICENSE", "requirements.lock"):
        shutil.copy(ROOT / name, source / name)
    pip = (sys.executable, "-m", "pip", "-q", "--disable-pip-version-check")
    run(*pip, "wheel", "--no-deps", "-w", str(folder), str(source))
    platforms = [word for one in PLATFORMS for word in ("--platform", one)]
    wheel = next(folder.glob("alloy_agent-*.whl"))
    run(
        *(*pip, "download", "-d", str(folder), "--only-binary", ":all:"),
        *("--python-version", python, *platforms),
        *("-c", str(source / "requirements.lock")),
        *(str(wheel), "pip", "pipx", *more),
    )
    shutil.rmtree(source)
