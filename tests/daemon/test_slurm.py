"""The node in Slurm: one suite over a stand-in for `scontrol` and over a real slurmctld."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alloy_agent.config import DrainSettings
from alloy_agent.daemon import needs
from alloy_agent.daemon.slurm import MARK, Slurm, change_for, node_of, reason_of
from alloy_agent.errors import BackendError
from alloy_agent.model import Scope
from alloy_agent.telemetry.drains import Drained
from tests.daemon import slurmlab
from tests.fakes import scontrol

DEADLINE_S = 60.0


def drain(subject: str = "GPU-0", reason: str = "fan", session: str = "ops") -> Drained:
    """Return a drain of a device."""
    return Drained(
        subject=subject,
        scope=Scope.DEVICE if subject else Scope.NODE,
        session=session,
        reason=reason,
        since_s=1.0,
        since_wall_s=1.7e9,
    )


HELD = (drain(),)


class Lab:
    """A node, with what an administrator does to it."""

    def __init__(self, program: str) -> None:
        self.program = program
        self.slurm = Slurm(program, slurmlab.NODE, DEADLINE_S)

    def admin(self, *words: str) -> None:
        """Update the node as somebody else."""
        argv = [self.program, "update", f"NodeName={slurmlab.NODE}", *words]
        subprocess.run(argv, check=True, timeout=60)

    def node(self) -> tuple[bool, bool, str]:
        """Return whether it takes jobs, whether it is drained, and why."""
        found = self.slurm.look()
        return found.takes_jobs, found.drained, found.reason


@pytest.fixture(params=["stand-in", pytest.param("slurmctld", marks=pytest.mark.host)])
def lab(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Lab]:
    """Give a node that takes jobs, of a stand-in and of a real cluster."""
    if request.param == "stand-in":
        yield Lab(str(scontrol.install(tmp_path, slurmlab.NODE)))
        return
    lack = slurmlab.lacking()
    if lack:
        pytest.skip(lack)
    with (
        tempfile.TemporaryDirectory(prefix="alloy-slurm-") as folder,
        slurmlab.cluster(Path(folder)) as conf,
    ):
        monkeypatch.setenv("SLURM_CONF", str(conf))
        yield Lab(str(slurmlab.program("scontrol")))


def test_a_node_is_drained_with_our_reason_kept_current_and_taken_back(lab: Lab) -> None:
    """Drained once, the reason follows what is held, and the node takes jobs again after it."""
    lab.slurm.bring(HELD)
    assert lab.node() == (False, True, f"{MARK}device GPU-0, session ops: fan")
    lab.slurm.bring(HELD)
    both = (*HELD, drain("GPU-1", "link; \"quoted\" 'twice' $HOME = x"))
    lab.slurm.bring(both)
    assert lab.node() == (False, True, reason_of(both))
    lab.slurm.bring(both[1:])
    assert lab.node()[2] == reason_of(both[1:])
    lab.slurm.bring(())
    assert lab.node() == (True, False, "")
    lab.slurm.bring(())
    assert lab.node() == (True, False, "")


def test_what_somebody_else_drained_is_never_touched(lab: Lab) -> None:
    """Not our reason: neither replaced when we drain, nor resumed when we do not."""
    lab.admin("State=DRAIN", "Reason=firmware, ask Jo")
    for held in (HELD, (), HELD):
        lab.slurm.bring(held)
        assert lab.node() == (False, True, "firmware, ask Jo")
    lab.admin("State=RESUME")
    assert lab.node()[0]
    lab.slurm.bring(HELD)  # looked at again: now it is ours
    assert lab.node() == (False, True, reason_of(HELD))


def test_a_drain_that_somebody_takes_over_is_theirs(lab: Lab) -> None:
    """We drained, an administrator wrote a reason of their own: it stays when ours ends."""
    lab.slurm.bring(HELD)
    lab.admin("State=DRAIN", "Reason=keep out")
    lab.slurm.bring(())
    assert lab.node() == (False, True, "keep out")


def test_a_drain_that_somebody_takes_back_is_set_again(lab: Lab) -> None:
    """Resumed over there while it is held here: drained at the next look."""
    lab.slurm.bring(HELD)
    lab.admin("State=RESUME")
    assert lab.node()[0]
    lab.slurm.bring(HELD)
    assert lab.node() == (False, True, reason_of(HELD))


def test_a_node_that_went_down_stays_down(lab: Lab) -> None:
    """Only our DRAIN flag goes; a node that is down under our reason is not resumed."""
    lab.slurm.bring(HELD)
    lab.admin("State=DOWN", f"Reason={reason_of(HELD)}")
    lab.slurm.bring(())
    takes_jobs, drained, _ = lab.node()
    assert (takes_jobs, drained) == (False, False)


def test_a_node_that_is_down_for_another_reason_keeps_it(lab: Lab) -> None:
    """Down by somebody else's word: the reason is not overwritten by a drain of ours."""
    lab.admin("State=DOWN", "Reason=power supply")
    lab.slurm.bring(HELD)
    assert lab.node()[2] == "power supply"


def test_a_node_that_slurm_does_not_know_is_named(lab: Lab) -> None:
    """One line with the node and what scontrol said; `doctor` says the same with the cure."""
    with pytest.raises(BackendError, match=r"show nope: .*not found"):
        Slurm(lab.program, "nope", DEADLINE_S).bring(HELD)
    settings = DrainSettings(slurm=True, scontrol=lab.program)
    (bad,) = needs.outlets(settings, "nope")
    assert (bad.ok, bad.required) == (False, True)
    assert "slurm_node" in bad.cure
    (good,) = needs.outlets(settings, slurmlab.NODE)
    assert good.ok, good.found


# --- pure -----------------------------------------------------------------------------------------


def test_doctor_names_a_missing_scontrol_and_a_hook_that_is_none(tmp_path: Path) -> None:
    """Each with its path and the cure; nothing is said of outlets that are not set up."""
    settings = DrainSettings(
        slurm=True, scontrol=str(tmp_path / "scontrol"), hook=(str(tmp_path / "hook"),)
    )
    slurm, hook = needs.outlets(settings, "n1")
    assert "scontrol: not there" in slurm.found
    assert "slurm-client" in slurm.cure
    assert not hook.ok
    assert needs.outlets(DrainSettings(), "n1") == ()


@pytest.mark.parametrize(
    ("state", "takes_jobs", "drained"),
    [
        ("IDLE", True, False),
        ("MIXED+PLANNED", True, False),
        ("IDLE+DRAIN+NOT_RESPONDING", False, True),
        ("ALLOCATED+DRAIN", False, True),
        ("DOWN*", False, False),
        ("DOWN+DRAIN", False, True),
        ("DRAINED", False, True),
        ("IDLE+FAIL", False, False),
    ],
)
def test_states_are_read(state: str, takes_jobs: bool, drained: bool) -> None:
    """Base states, flags and the marks behind them, as versions of Slurm print them."""
    node = node_of(f"NodeName=n Arch=x\n   State={state} ThreadsPerCore=1\n")
    assert node is not None
    assert (node.takes_jobs, node.drained, node.reason) == (takes_jobs, drained, "")


@given(st.text(max_size=400), st.text(max_size=50))
def test_any_reason_becomes_one_plain_line_that_is_read_back(text: str, session: str) -> None:
    """Whatever an operator writes: bounded, printable, marked as ours, and the same when read."""
    reason = reason_of((drain(reason=text, session=session),))
    assert reason.startswith(MARK)
    assert re.fullmatch(r"[ -~]{1,200}", reason)
    node = node_of(f"   State=IDLE+DRAIN X=1\n   Reason={reason} [root@2026-11-30T11:09:43]\n")
    assert node is not None
    assert node.ours
    assert node.reason == reason.strip()
    assert change_for(node, ()) == ("State=UNDRAIN",)


@given(st.text(max_size=300))
def test_any_answer_is_a_node_or_none(text: str) -> None:
    """Whatever scontrol prints, reading it does not fail."""
    node = node_of(text)
    assert node is None or isinstance(node.reason, str)
