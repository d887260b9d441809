"""Names of shared devices and tenants: judged before they are part of any path, everywhere."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alloy_agent.cli import main
from alloy_agent.conformance.gate import build
from alloy_agent.conformance.keeper import client, groups
from alloy_agent.conformance.keeper.messages import Join
from alloy_agent.conformance.keeper.names import device_name, tenant_name
from alloy_agent.conformance.keeper.process import Keeper
from alloy_agent.daemon.sharing import join_reply
from alloy_agent.errors import ConfigError
from alloy_agent.host.cgroups import detect
from alloy_agent.proto import agent_pb2 as pb

HOSTILE = (
    "..",
    ".",
    ".hidden",
    "../../../alloy-no-such-name",
    "/alloy-no-such-name",
    "a/b",
    "a b",
    "a\nb",
    "a\0b",
    "n" * 65,
    "é",
    "\N{MATHEMATICAL BOLD CAPITAL A}" * 64,
)
DEVICES = ("", "..", ".", "a/b", "/", "a\nb", "a\0b", "n" * 129)


@given(st.text(max_size=80))
def test_any_name_that_passes_is_one_part_of_a_path(text: str) -> None:
    """Whatever is taken for a name stays in its folder and fits a file's name."""
    for judge in (tenant_name, device_name):
        try:
            name = judge(text)
        except ConfigError:
            continue
        inside = os.path.normpath(f"/folder/{name}")
        assert inside == f"/folder/{name}"
        assert Path(inside).parent == Path("/folder")
    if len(text) <= 64 and text.isascii() and text.isalnum():
        assert tenant_name(text) == text


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_tenant_is_refused_by_the_daemon_and_by_the_keeper(name: str) -> None:
    """Neither has anything else touched: there is no node, no keeper and no device to touch."""
    wish = pb.Join(subject="emulated", tenant=name, share=pb.SHARE_OPPORTUNISTIC, pid=1)
    with pytest.raises(ConfigError, match="is no name"):
        join_reply(cast(Any, None), cast(Any, None), pb.BrainMessage(id="1", join=wish))
    keeper = Keeper.__new__(Keeper)
    with pytest.raises(ConfigError, match="is no name"):
        keeper.join(Join(name=name, role="opportunistic", pid=os.getpid()))


@pytest.mark.parametrize("name", DEVICES)
def test_a_hostile_device_has_no_folder(name: str, tmp_path: Path) -> None:
    """What is no part of a path names no folder of a device."""
    with pytest.raises(ConfigError, match="is no device"):
        client.folder_of(tmp_path, name)


def test_a_group_goes_with_what_is_empty_above_and_below_it(tmp_path: Path) -> None:
    """A tenant's group is removed whole; another tenant's stays, and so does a foreign folder."""
    device, other = device_name("d"), tenant_name("other")
    path, procs = groups.own_group(tmp_path / "share", device, tenant_name("n"), tmp_path)
    kept, _ = groups.own_group(tmp_path / "share", device, other, tmp_path)
    assert procs == (str(tmp_path / path / "cgroup.procs"),)
    (tmp_path / path / "made" / "by" / "it").mkdir(parents=True)
    groups.clear(path, tmp_path)
    assert not (tmp_path / path).exists()
    assert (tmp_path / kept).is_dir()
    (tmp_path / "foreign" / "a" / "b" / "c").mkdir(parents=True)
    for wrong in ("", "foreign/a/b/c", "alloy-share/../foreign/a", "alloy-share/x/y"):
        groups.clear(wrong, tmp_path)
    assert (tmp_path / "foreign" / "a" / "b" / "c").is_dir()
    groups.clear(kept, tmp_path)
    assert not (tmp_path / "alloy-share").exists()


def test_of_a_tenant_who_is_refused_no_group_stays(tmp_path: Path) -> None:
    """A keeper that refuses removes what was made for the tenant, and nothing of one it has."""
    name = tenant_name("n")
    path, _ = groups.own_group(tmp_path, device_name("d"), name, tmp_path)
    request = Join(name=name, role="opportunistic", pid=2**22 + 1, cgroup=path)  # no such process
    keeper = Keeper.__new__(Keeper)
    tree = SimpleNamespace(folder=lambda below: str(tmp_path / below))
    keeper.__dict__ |= {"_members": {}, "_tree": tree}
    with pytest.raises(ConfigError, match="is gone"):
        keeper._join(request)
    assert not (tmp_path / path).exists()
    path, _ = groups.own_group(tmp_path, device_name("d"), name, tmp_path)
    keeper.__dict__ |= {"_members": {"m": SimpleNamespace(join=request)}}
    with pytest.raises(ConfigError, match="is gone"):
        keeper._join(request)
    assert (tmp_path / path).is_dir()


# --- the command ------------------------------------------------------------------------------


@pytest.fixture
def folder() -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("needs root")
    with tempfile.TemporaryDirectory(prefix="alloy-") as name:
        yield Path(name)


def environment(folder: Path) -> dict[str, str]:
    """Return an environment in which the CPU's partitions of others are not seen."""
    return {**os.environ, "ALLOY_CPU_CGROUP_ROOT": folder.name}


def share_run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Return what `share run` came to, without an agent."""
    frame = [sys.executable, "-m", "alloy_agent", "--state-dir", str(folder / "state")]
    return subprocess.run(
        [*frame, "share", "run", *arguments, "--", "/bin/echo", "ran"],
        env=environment(folder),
        capture_output=True,
        text=True,
        check=False,
    )


def nothing_was_made(folder: Path) -> bool:
    """Whether there is no folder of a shared device, and no cgroup of this agent's."""
    root = folder / "state" / "share"
    tree = detect().unified
    agent = hashlib.sha256(os.fsencode(root)).hexdigest()[:8]
    made = tree is not None and Path(tree.folder(f"{groups.OWN_GROUP}/{agent}")).exists()
    return not root.exists() and not made


@pytest.mark.host
@pytest.mark.parametrize("name", [name for name in HOSTILE if "\0" not in name])
def test_a_hostile_name_makes_nothing(folder: Path, name: str) -> None:
    """The command says so in one line, and made neither folder nor cgroup."""
    done = share_run(folder, "--opportunistic", "--name", name, "emulated")
    assert done.returncode == 2
    assert "is no name" in done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""
    assert nothing_was_made(folder)
    tree = detect().unified
    assert tree is None or not Path(tree.folder("alloy-no-such-name")).exists()


@pytest.mark.host
@pytest.mark.parametrize(
    ("device", "word"),
    [
        ("nope", "no device or partition of this name"),
        ("emulatd", "did you mean emulated?"),
        ("Emulated", "did you mean emulated?"),
        ("emulated/..", "there is none"),
        ("", "is no device"),
        ("../x", "there is none"),
    ],
)
@pytest.mark.parametrize("role", ["--production", "--opportunistic"])
def test_an_unknown_device_is_refused_without_an_agent(
    folder: Path, role: str, device: str, word: str
) -> None:
    """A device is `emulated` or there; a typo runs nothing, in no role, and is told what is close.

    Two tenants of two names would have two control loops, and nobody would protect production.
    """
    done = share_run(folder, role, device)
    assert done.returncode == 2
    assert word in done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""
    assert nothing_was_made(folder)


def test_without_a_compiler_no_tenant_shares_a_device(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A host that has no gate and cannot build it refuses in one line, and makes no cgroup."""
    monkeypatch.setattr(build, "BUNDLED", folder / "none")
    monkeypatch.setenv("PATH", str(folder))
    state = ("--state-dir", str(folder / "state"))
    for role in ("--production", "--opportunistic"):
        assert main([*state, "share", "run", role, "emulated", "--", "true"]) == 2
        said = capsys.readouterr().err
        assert "no C compiler: install gcc, or use an image or a package" in said
        assert said.count("\n") == 1
        assert nothing_was_made(folder)


@pytest.mark.host
def test_a_device_without_shares_is_refused_without_an_agent(folder: Path) -> None:
    """A device that no layout cut into shares has no tenants who share it."""
    listed = subprocess.run(
        [sys.executable, "-m", "alloy_agent", "--state-dir", str(folder / "state"), "devices"],
        env=environment(folder),
        capture_output=True,
        text=True,
        check=True,
    )
    if "cpu-node0" not in listed.stdout:
        pytest.skip("no CPU node is a device of this host")
    done = share_run(folder, "--production", "cpu-node0")
    assert done.returncode == 2
    assert "has no production share" in done.stderr
    assert nothing_was_made(folder)
