"""The documents name what there is: every path, every command, every JSON document."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from alloy_agent.cli.frame import build_parser
from alloy_brain.cli import build_parser as build_brain_parser

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])
FOLDERS = "scripts|examples|deploy|docs|systemd|benchmarks|tests|proto"
NAMED = re.compile(rf"(?<![\w./~-])((?:{FOLDERS})/[A-Za-z0-9_./*-]*[A-Za-z0-9_/*])")
MODULE = re.compile(r"python -m ((?:benchmarks|scripts|tests|alloy_agent|alloy_brain)[\w.]*)")
LINK = re.compile(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)")
SCHEMA = re.compile(r"\"(alloy\.[a-z-]+/v[0-9]+)\"")
ROOMS = ("alloy_agent/cli", "alloy_agent/daemon", "alloy_agent/telemetry", "alloy_brain")
NOT_PRINTED = {"alloy.starts/v1", "alloy.faults/v1"}  # files that are read, no answers


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_path_that_a_document_names_is_there(page: Path) -> None:
    """Paths of this repository, modules to run and links lead somewhere."""
    text = page.read_text(encoding="utf-8")
    missing = [name for name in NAMED.findall(text) if not list(ROOT.glob(name.rstrip("/")))]
    for name in MODULE.findall(text):
        place = ROOT / name.replace(".", "/")
        if not (place.is_dir() or place.with_suffix(".py").is_file()):
            missing.append(f"python -m {name}")
    missing += [link for link in LINK.findall(text) if not (page.parent / link).exists()]
    assert missing == []


def subcommands(
    parser: argparse.ArgumentParser, before: str = ""
) -> Iterator[tuple[str, set[str]]]:
    """Yield each command that does something, with its long options."""
    inner = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    for action in inner:
        for name, child in action.choices.items():
            yield from subcommands(child, f"{before} {name}".strip())
    if not inner:
        options = {o for a in parser._actions for o in a.option_strings if o.startswith("--")}
        yield before, options - {"--help"}


def rows(page: str) -> dict[str, str]:
    """Return each row of a table of commands: the first word of a cell, and the whole row."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    found: dict[str, str] = {}
    for line in text.splitlines():
        if line.startswith("| `"):
            for name in re.findall(r"`([^`]+)`", line.split(" | ")[0]):
                found[name.replace("\\|", "|")] = line.replace("\\|", "|")
    return found


def test_every_command_and_option_is_in_the_document_of_commands() -> None:
    """`docs/cli.md` calls itself complete: each command has a row that names all its options."""
    table = rows("cli.md")
    missing = []
    for command, options in subcommands(build_parser()):
        named = [row for name, row in table.items() if re.match(rf"{command}(\s|$)", name)]
        row = named[0] if named else ""
        if not named:
            missing.append(command)
        missing += [f"{command} {option}" for option in sorted(options) if option not in row]
    assert missing == []


def test_every_command_of_the_brain_is_in_its_document() -> None:
    """`docs/brain.md` names each."""
    text = (ROOT / "docs" / "brain.md").read_text(encoding="utf-8")
    names = [command for command, _ in subcommands(build_brain_parser())]
    assert [name for name in names if not re.search(rf"\b{name}\b", text)] == []


def test_every_json_document_of_a_command_is_in_the_table() -> None:
    """A schema that a command can print has its row in `docs/cli.md` or `docs/brain.md`."""
    sources = [path for part in ROOMS for path in (ROOT / part).rglob("*.py")]
    found = {name for path in sources for name in SCHEMA.findall(path.read_text(encoding="utf-8"))}
    schemas = found - NOT_PRINTED
    assert len(schemas) > 10
    text = "".join((ROOT / "docs" / p).read_text(encoding="utf-8") for p in ("cli.md", "brain.md"))
    assert sorted(name for name in schemas if f"`{name}`" not in text) == []
