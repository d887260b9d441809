"""What is wrong gets one line that names it, a non-zero exit, and touches no hardware."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from alloy_agent.cli import main
from tests.cli.conftest import Done, Run

LAYOUT = """\
version: v1
layouts:
  bad:
"""

# name: (the file, words that the one line must have)
BAD: dict[str, tuple[str, tuple[str, ...]]] = {
    "broken YAML": ("version: v1\nlayouts: [\n", ("layout.yaml:",)),
    "not YAML at all": ("\x00\x01", ("layout.yaml",)),
    "empty": ("", ("layout.yaml",)),
    "no layouts": ("version: v1\nlayouts: {}\n", ("layout.yaml",)),
    "another version": ("version: v9\nlayouts: {}\n", ("layout.yaml:1", "v9")),
    "unknown key": (
        LAYOUT + "    - match: {vendor: nvidia}\n      mgi: []\n",
        ("layout.yaml:5", "mgi", "mig"),
    ),
    "unknown profile": (
        LAYOUT + "    - match: {vendor: nvidia}\n      mig: [9g.90gb]\n",
        ("layout.yaml:5", "9g.90gb"),
    ),
    "impossible start": (
        LAYOUT + "    - match: {vendor: nvidia}\n      mig: [3g.40gb@1]\n",
        ("layout.yaml:5", "3g.40gb"),
    ),
    "overlap": (
        LAYOUT + "    - match: {vendor: nvidia}\n      mig: [4g.40gb@0, 2g.20gb@2]\n",
        ("layout.yaml:5", "4g.40gb", "2g.20gb"),
    ),
    "over capacity": (
        LAYOUT + "    - match: {vendor: nvidia}\n      mig: [7g.80gb, 1g.10gb]\n",
        ("layout.yaml:5", "7g.80gb"),
    ),
    "two entries for one device": (
        LAYOUT
        + "    - match: {vendor: nvidia}\n      mig: [1g.10gb]\n"
        + "    - match: {index: 0}\n      mig: [2g.20gb]\n",
        ("layout.yaml:6", "line 4"),
    ),
    "matches nothing": (
        LAYOUT + "    - match: {vendor: amd}\n      compute: CPX\n",
        ("layout.yaml:4", "amd"),
    ),
    "an anchor bomb": (
        "a: &a [x,x,x,x,x,x,x,x,x]\nb: &b [*a,*a,*a,*a,*a,*a,*a,*a,*a]\n"
        "c: &c [*b,*b,*b,*b,*b,*b,*b,*b,*b]\nd: [*c,*c,*c,*c,*c,*c,*c,*c,*c]\n",
        ("layout.yaml",),
    ),
}


def one_line(done: Done) -> None:
    assert done.code == 2, done
    assert done.err.startswith("alloy-agent: ")
    assert done.err.count("\n") == 1
    assert "Traceback" not in done.err
    assert done.out == ""


@pytest.mark.parametrize(
    ("command", "case"),
    [*(("plan", case) for case in BAD), ("apply", "unknown key"), ("apply", "overlap")],
)
def test_a_bad_layout_is_one_line(alloy: Run, tmp_path: Path, case: str, command: str) -> None:
    """File, line, the things in conflict and the cure; the state directory is not even made."""
    text, words = BAD[case]
    path = tmp_path / "layout.yaml"
    path.write_text(text)
    arguments = [command, str(path)] + (["--yes"] if command == "apply" else [])
    done = alloy(*arguments)
    one_line(done)
    for word in words:
        assert word in done.err, done.err
    if command == "apply":
        (device,) = alloy("devices", "--json").json["devices"]
        assert [p["profile"] for p in device["partitions"]] == ["whole"], "hardware was touched"


@pytest.mark.parametrize(
    ("path", "word"),
    [("missing.yaml", "no such file"), (".", "directory"), ("binary", "UTF-8")],
)
def test_a_file_that_cannot_be_read(alloy: Run, tmp_path: Path, path: str, word: str) -> None:
    """A missing file, a directory and a binary are named as what they are."""
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    done = alloy("plan", str(tmp_path / path))
    one_line(done)
    assert word in done.err


@pytest.mark.parametrize("spec", ["9xNoSuchBoard", "0xH100-SXM5-80GB", "", "8x", "-1xMI300X"])
def test_a_bad_fake_is_one_line(alloy: Run, spec: str) -> None:
    """Simulated silicon that does not exist is named."""
    one_line(alloy("devices", fake=spec))


def test_simulated_devices_that_cannot_be(alloy: Run, tmp_path: Path) -> None:
    """A file that asks for instances with no place is refused by every command, not half shown."""
    path = tmp_path / "node.yaml"
    path.write_text("boards: [{board: H100, instances: [3g.40gb@0, 3g.40gb@2]}]\n")
    for command in (("devices",), ("plan", "/dev/null"), ("audit",), ("doctor",)):
        done = alloy(*command, fake=str(path))
        assert done.code == 2
        assert done.out == ""
        assert "3g.40gb cannot be placed" in done.err or command[0] == "plan"


def test_a_layout_must_be_chosen_among_several(alloy: Run, layout: Path) -> None:
    """Without `--layout`, or with an unknown one, the names to choose from are said."""
    for arguments in (["plan", str(layout)], ["plan", str(layout), "--layout", "thirds"]):
        done = alloy(*arguments)
        one_line(done)
        assert "halves" in done.err
        assert "whole" in done.err


def test_settings_name_file_and_line(alloy: Run, tmp_path: Path) -> None:
    """A bad settings file is one line with its place."""
    config = tmp_path / "agent.yaml"
    config.write_text("log:\n  levle: info\n")
    done = alloy("--config", str(config), "devices")
    one_line(done)
    assert f"{config}:2" in done.err


def test_a_state_file_of_a_newer_version(alloy: Run, layout: Path, tmp_path: Path) -> None:
    """Newer state is refused and left as it is."""
    import sqlite3

    assert alloy("apply", str(layout), "--layout", "halves", "--yes").code == 0
    database = tmp_path / "state" / "state.db"
    with sqlite3.connect(database) as con:
        con.execute("PRAGMA user_version = 999")
    con.close()
    before = database.read_bytes()
    done = alloy("apply", str(layout), "--layout", "whole", "--yes")
    one_line(done)
    assert "state.db" in done.err
    assert database.read_bytes() == before


def test_a_state_directory_that_is_a_file(alloy: Run, layout: Path, tmp_path: Path) -> None:
    """A path that cannot be a directory is named."""
    (tmp_path / "state").write_text("")
    done = alloy("apply", str(layout), "--layout", "halves", "--yes")
    one_line(done)
    assert str(tmp_path / "state") in done.err


def test_a_device_that_vanished(alloy: Run, layout: Path, tmp_path: Path) -> None:
    """A layout for a device that is no longer there is refused, naming the device."""
    (device,) = alloy("devices", "--json").json["devices"]
    text = layout.read_text().replace("vendor: nvidia", f"uuid: {device['id']}")
    layout.write_text(text)
    assert alloy("plan", str(layout), "--layout", "halves").code == 0
    shutil.rmtree(tmp_path / "state", ignore_errors=True)
    done = alloy("plan", str(layout), "--layout", "halves", fake="1xMI300X", state="other")
    one_line(done)
    assert device["id"] in done.err


@pytest.mark.parametrize(
    "arguments",
    [[], ["nonsense"], ["plan"], ["--nonsense", "devices"], ["evidence"], ["completion", "ksh"]],
)
def test_usage_is_one_line(alloy: Run, arguments: list[str]) -> None:
    """What is no command line says so and where to read on."""
    done = alloy(*arguments)
    one_line(done)
    assert "--help" in done.err


def test_not_root_is_told_the_cure(
    alloy: Run, layout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Changing anything without root is refused with what to do."""
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    for arguments in (["apply", str(layout), "--layout", "halves"], ["run"]):
        done = alloy(*arguments)
        one_line(done)
        assert "sudo" in done.err


@pytest.mark.parametrize("where", ["missing/x.html", "."])
def test_a_demo_whose_report_cannot_be_written_does_not_begin(
    alloy: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """The path of the report is judged before anything is started."""

    def begun(*_words: object) -> None:
        raise AssertionError("the demo began")

    monkeypatch.setattr("alloy_agent.cli.demo.stage.Stage", begun)
    done = alloy("demo", "--html", str(tmp_path / where))
    assert done.code == 2
    one_line(done)
    assert "name a path that can be written" in done.err


def test_debug_shows_the_traceback(alloy: Run, tmp_path: Path) -> None:
    """With `--debug`, and only then, the failure itself comes out."""
    from alloy_agent.errors import ConfigError

    with pytest.raises(ConfigError):
        alloy("--debug", "plan", str(tmp_path / "missing"))


@settings(
    max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)
@given(
    words=st.lists(
        st.text(alphabet=st.characters(blacklist_characters="\x00"), max_size=12), max_size=5
    )
)
def test_no_command_line_makes_a_traceback(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Any words at all end in a usage line, never in a defect."""
    for command in ("plan", "completion", "evidence"):
        with pytest.raises(SystemExit) as refused:
            main([command, "--no-such-option", *words])
        assert refused.value.code in (0, 2)
        assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("path", ["/dev/zero", "/dev/null", "/proc/self/mem/x", "{folder}/pipe"])
def test_evidence_that_is_none(alloy: Run, tmp_path: Path, path: str) -> None:
    """What is no chain is one line, at once, without opening it."""
    os.mkfifo(tmp_path / "pipe")
    done = alloy("evidence", "verify", path.format(folder=tmp_path))
    assert done.code == 2
    assert done.err.count("\n") == 1
    assert "name a directory or a file" in done.err or "name one of the two" in done.err


@pytest.mark.parametrize(
    "path", ["/dev/zero", "/dev/null", "/proc/kmsg", "{folder}", "{folder}/pipe"]
)
def test_a_layout_that_is_no_file(alloy: Run, tmp_path: Path, path: str) -> None:
    """A device, a pipe, a directory: one line, at once, for what changes and what only plans."""
    os.mkfifo(tmp_path / "pipe")
    named = path.format(folder=tmp_path)
    for command in ("plan", "apply"):
        done = alloy(command, named)
        assert done.code == 2
        assert done.err.count("\n") == 1
        assert named in done.err


def test_a_misspelt_variable_is_said(alloy: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable that sets nothing is named on stderr, with the one that was meant."""
    monkeypatch.setenv("ALLOY_STATEDIR", "/nowhere")
    done = alloy("devices")
    assert "ALLOY_STATEDIR is no setting and is ignored: did you mean ALLOY_STATE_DIR?" in done.err


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["apply", "--state-dir", "x", "FILE"], "alloy-agent --state-dir ... apply"),
        (["devices", "--fake", "1xH100-SXM5-80GB"], "--fake stands before the command"),
        (["devices", "--fake=1xH100-SXM5-80GB"], "--fake stands before the command"),
        (["share", "status", "--debug"], "--debug stands before the command"),
        (["exec", "P", "true"], "write the command to start behind '--'"),
        (["share", "run", "--production", "emulated", "true"], "behind '--'"),
    ],
)
def test_what_stands_in_the_wrong_place_is_told(
    alloy: Run, arguments: list[str], hint: str
) -> None:
    """A global option behind the command, and a command line without its `--`, get a hint."""
    done = alloy(*arguments)
    one_line(done)
    assert "unrecognized arguments" in done.err
    assert hint in done.err


def test_the_hint_knows_every_global_option() -> None:
    """What the frame adds is what the hint looks for."""
    import argparse

    from alloy_agent.cli import frame

    parser = argparse.ArgumentParser(add_help=False)
    frame.add_globals(parser)
    names = {name for action in parser._actions for name in action.option_strings}
    assert names == set(frame.GLOBALS)


SHARED = """\
version: v1
layouts:
  shared:
    - match: {vendor: nvidia}
      shared: {production: 1, opportunistic: 2}
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_shared_device_before_its_first_tenant(alloy: Run, tmp_path: Path) -> None:
    """Status lists it with its shares; by part of its name it is the one that is meant."""
    before = alloy("share", "status")
    assert before.code == 0
    assert "no device is shared" in before.out
    layout = tmp_path / "layout.yaml"
    layout.write_text(SHARED, encoding="utf-8")
    assert alloy("apply", str(layout), "--yes").code == 0
    device = str(alloy("devices", "--json").json["devices"][0]["id"])
    shown = alloy("share", "status")
    assert shown.code == 0
    assert shown.out == f"{device}: no tenant yet; it has 1 production, 2 opportunistic\n"
    typo = alloy("share", "run", "--production", f"{device[:-1]}x", "--", "true")
    one_line(typo)
    assert f"did you mean {device}" in typo.err
    for name in (device, device[:12], f"{device}/production-0@0"):
        simulated = alloy("share", "run", "--production", name, "--", "true")
        one_line(simulated)
        assert "shared through an agent alone" in simulated.err
    assert not (tmp_path / "state" / "share").exists()


def test_the_usage_of_share_run_fits(alloy: Run) -> None:
    """A terminal of 80 columns shows it whole."""
    done = alloy("share", "run", "--help")
    assert done.code == 0
    assert max(map(len, done.out.splitlines())) <= 80
