"""A state directory that root made, looked at by somebody else: said, and never a defect."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from alloy_agent.conformance.checks import FactBook, judge_partition
from alloy_agent.conformance.checks.base import Intent
from alloy_agent.conformance.shares import share_facts
from alloy_agent.model import Fact, Verdict
from tests.rate.test_share_views import DEVICE, FRONT, OURS, SNAPSHOT, tenant, view

# Everything is loaded by a first look as root: the interpreter's own folders may be closed too.
LOOK = """
import os, sys
from alloy_agent.cli import main
own, theirs = sys.argv[1:]
commands = (["audit"], ["share", "status"], ["share", "status", "--json"])
for command in commands:
    main(["--state-dir", own, *command])
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
sys.stdout.flush()
print("---", flush=True)
print("---", file=sys.stderr, flush=True)
codes = [main(["--state-dir", theirs, *command]) for command in commands]
print("codes", *codes)
"""


@pytest.fixture
def state() -> Iterator[Path]:
    """Give a state directory with a folder of shared devices, below one that others may enter."""
    if os.geteuid() != 0:
        pytest.skip("needs root")
    with tempfile.TemporaryDirectory(prefix="alloy-") as name:
        Path(name).chmod(0o755)
        made = Path(name) / "state"
        (made / "share" / "emulated").mkdir(parents=True)
        (made / "share" / "emulated" / "status.json").write_bytes(b"{}")
        (Path(name) / "own").mkdir()
        yield made


@pytest.mark.host
@pytest.mark.parametrize("closed", [".", "share", "share/emulated"])
def test_another_user_is_told_what_is_not_permitted(state: Path, closed: str) -> None:
    """Audit answers "unknown" (3), status refuses (2) and names the folder; neither is a defect."""
    (state / closed).chmod(0o700)
    done = subprocess.run(
        [sys.executable, "-c", LOOK, str(state.parent / "own"), str(state)],
        env={**os.environ, "ALLOY_BACKENDS_CPU": "off"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said = done.stderr.partition("---\n")[2]
    assert "codes 3 2 2" in done.stdout.partition("---\n")[2], said
    assert "defect" not in said
    place = state / "share" / "emulated" if closed == "share/emulated" else state / "share"
    assert said.count(f"{place}: not permitted for uid 65534: run it as root\n") == 2


def test_what_may_not_be_read_is_unknown() -> None:
    """No check of a share passes or fails on a keeper's word that this user may not read."""
    pids = [Fact(subject=p.id, name="partition.pids", value=[]) for p in (FRONT, OURS)]
    for piece in (FRONT, OURS):
        book = FactBook([*share_facts(SNAPSHOT, (), "/x: not permitted for uid 1"), *pids])
        report = judge_partition(piece, DEVICE, SNAPSHOT, book, Intent())
        found = [j for j in report.judgements if j.check.startswith(("RATE-", "BYP-"))]
        assert found
        assert {j.verdict for j in found} == {Verdict.UNKNOWN}
        assert all("not permitted for uid 1" in j.reason for j in found)
    told = view(tenant("p", "production"), tenant("n", "opportunistic"))
    assert share_facts(SNAPSHOT, (told,), "/x: closed") == share_facts(SNAPSHOT, (told,))
