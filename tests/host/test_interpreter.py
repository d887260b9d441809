"""Python children: none takes code from the folder in which the agent was started."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import alloy_agent
from alloy_agent.host import interpreter
from tests.daemon.harness import DaemonProcess, Site
from tests.host.hostile import bait, mark_of

PACKAGE = Path(alloy_agent.__file__).parent
HELPER = PACKAGE / "host" / "interpreter.py"
STARTS = {"Popen", "run", "call", "check_call", "check_output"}


def parsed() -> Iterator[tuple[Path, ast.Module]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        yield path, ast.parse(path.read_text(encoding="utf-8"))


def is_attribute(node: ast.AST, of: str, names: set[str]) -> bool:
    return (
        isinstance(node, ast.Attribute)
        and node.attr in names
        and isinstance(node.value, ast.Name)
        and node.value.id == of
    )


def test_only_one_place_names_the_interpreter() -> None:
    """No module but the helper builds the command line of a Python child."""
    found = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}"
        for path, tree in parsed()
        if path != HELPER
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and is_attribute(node, "sys", {"executable"})
    ]
    assert found == []


def test_whoever_starts_a_python_child_says_where_it_stands() -> None:
    """Each start in a module that uses the helper gives a folder; there are such modules."""
    users, found = set(), []
    for path, tree in parsed():
        if not any(is_attribute(n, "interpreter", {"module", "isolated"}) for n in ast.walk(tree)):
            continue
        users.add(path)
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call) or not is_attribute(node.func, "subprocess", STARTS):
                continue
            if all(word.arg != "cwd" for word in node.keywords):
                found.append(f"{path.relative_to(PACKAGE)}:{node.lineno}")
    assert len(users) >= 6
    assert found == []


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """Return a folder whose modules leave a mark when somebody imports them."""
    return bait(tmp_path / "hostile")


def test_the_bait_is_taken_by_a_careless_start(hostile: Path) -> None:
    """`python -c` in the folder runs what lies there; the helper's command lines do not."""
    careless = [sys.executable, "-c", "import json"]
    assert subprocess.run(careless, cwd=hostile, capture_output=True, check=False).returncode
    mark = mark_of(hostile)
    assert "json" in mark.read_text()
    mark.unlink()
    for words in (interpreter.isolated("-c", "import json"), interpreter.module("json.tool", "-h")):
        subprocess.run(words, cwd=hostile, capture_output=True, check=True)
    assert not mark.exists()


def test_an_empty_entry_of_the_path_is_not_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty entry means the folder one stands in: children do not get it."""
    monkeypatch.setenv("PYTHONPATH", f":/a{os.pathsep}{os.pathsep}/b:")
    monkeypatch.setenv("LD_PRELOAD", "/gate.so")
    found = interpreter.environment(without={"LD_PRELOAD"})
    parts = found["PYTHONPATH"].split(os.pathsep)
    assert parts[-2:] == ["/a", "/b"]
    assert "" not in parts
    assert "LD_PRELOAD" not in found
    assert "LD_PRELOAD" in interpreter.environment()


@pytest.mark.host
@pytest.mark.slow
def test_run_takes_no_code_from_where_root_stands(
    hostile: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon with its workers gets ready; nothing that lies there is imported."""
    site = Site(tmp_path / "site", "1xA100-SXM4-40GB", cpu=True)
    site.folder.mkdir()
    command = site.command
    monkeypatch.setattr(site, "command", lambda *words: [command()[0], "-P", *command(*words)[1:]])
    monkeypatch.chdir(hostile)
    daemon = DaemonProcess(site)
    try:
        daemon.ready()
        assert daemon.stop() == 0
    finally:
        if daemon.process.poll() is None:
            daemon.kill()
        site.clean()
    assert not mark_of(hostile).exists()
