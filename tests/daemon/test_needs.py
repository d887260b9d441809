"""What `doctor` says of hosts that have and that lack things."""

from __future__ import annotations

from pathlib import Path

import pytest

from alloy_agent.daemon import needs
from alloy_agent.daemon.documents import doctor_document
from alloy_agent.model import Diagnosis

MOUNTS = (
    "30 24 0:26 / /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset\n"
    "31 24 0:27 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
)
CGROUPS = "#subsys_name\thierarchy\tnum_cgroups\tenabled\ncpuset\t1\t1\t1\nmemory\t2\t1\t1\n"


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    root = tmp_path / "proc"
    (root / "self/ns").mkdir(parents=True)
    (root / "sys/kernel/random").mkdir(parents=True)
    (root / "pressure").mkdir()
    (root / "pressure/cpu").write_text("some avg10=0.00\n")
    (root / "self/status").write_text("Name:\tx\nCapEff:\t000001ffffffffff\n")
    (root / "self/mountinfo").write_text(MOUNTS)
    (root / "cgroups").write_text(CGROUPS)
    (root / "self/ns/pid").symlink_to("pid:[4026531836]")
    (root / "sys/kernel/osrelease").write_text("6.18.0-cloud\n")
    (root / "sys/kernel/random/boot_id").write_text("0d9c3e5f-0000-0000-0000-000000000000\n")
    return root


def look(proc: Path, tmp_path: Path, **changes: object) -> dict[str, Diagnosis]:
    place = needs.Place(
        state_dir=str(tmp_path / "state"),
        socket_path=str(tmp_path / "agent.sock"),
        proc_root=str(proc),
        **changes,  # type: ignore[arg-type]
    )
    return {d.subject: d for d in needs.diagnose(place)}


def test_a_good_host_lacks_nothing(proc: Path, tmp_path: Path) -> None:
    """Every need is met, so the document is well."""
    found = look(proc, tmp_path)
    assert [d.subject for d in found.values() if not d.ok] == []
    assert doctor_document("n", tuple(found.values())).ok


@pytest.mark.parametrize(
    ("subject", "file", "content"),
    [
        ("kernel", "sys/kernel/osrelease", "4.4.0\n"),
        ("control groups", "self/mountinfo", ""),
        ("capabilities", "self/status", "CapEff:\t0000000000000000\n"),
    ],
)
def test_each_lack_is_named_with_a_cure(
    proc: Path, tmp_path: Path, subject: str, file: str, content: str
) -> None:
    """A host without a thing gets a diagnosis of that thing, with what to do."""
    (proc / file).write_text(content)
    found = look(proc, tmp_path)[subject]
    assert not found.ok
    assert found.cure


def test_another_user_is_told_to_be_root(proc: Path, tmp_path: Path) -> None:
    """Without root, permissions are missing and process events are polled."""
    found = look(proc, tmp_path, euid=1000)
    assert not found["permissions"].ok
    assert "polled" in found["process events"].found


def test_an_old_python_is_named(proc: Path, tmp_path: Path) -> None:
    """An interpreter below the least version is required to be replaced."""
    assert not look(proc, tmp_path, python=(3, 9))["python"].ok


def test_a_look_that_fails_is_a_diagnosis(proc: Path, tmp_path: Path) -> None:
    """A host on which something cannot be read gets a line instead of a failure."""
    for path in (proc / "self/status", proc / "sys/kernel/osrelease"):
        path.unlink()
    (proc / "sys/kernel/random/boot_id").unlink()
    found = look(proc, tmp_path)
    assert sum("cannot be looked at" in d.found for d in found.values()) == 3


def test_only_what_is_required_makes_a_host_unwell() -> None:
    """A limitation leaves the exit code at 0; a missing requirement does not."""
    limited = Diagnosis(subject="a", ok=False, found="no")
    missing = Diagnosis(subject="b", ok=False, found="no", required=True)
    assert doctor_document("n", (limited,)).ok
    assert not doctor_document("n", (limited, missing)).ok
