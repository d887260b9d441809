"""This node in Slurm: drained there while anything on it is drained here.

Slurm drains whole nodes, so that a drain of any scope keeps new jobs off the node; running jobs go
on. Its reason carries our mark, and is what tells our drain from those of others.

    what Slurm shows              drained here                  not drained here
    takes jobs                    State=DRAIN Reason=ours       nothing
    our reason                    reason kept current           State=UNDRAIN
    somebody else's reason        nothing, looked at again      nothing

Rules that stay true in here:

* A node that somebody else drained or took down is never changed, not even its reason.
* UNDRAIN takes our DRAIN flag alone; a node that went down meanwhile stays down (RESUME would not).
* Every change is read back.

Source: scontrol(1) of Slurm 22.05, sections "update NodeName" and "show"; tried against
slurmctld 22.05.8.
"""

from __future__ import annotations

import logging
import re
from typing import Final

from alloy_agent.daemon import calls
from alloy_agent.daemon.draining import told
from alloy_agent.errors import BackendError
from alloy_agent.model import Value
from alloy_agent.telemetry.drains import Drains

LOG = logging.getLogger(__name__)

MARK: Final = "alloy-agent: "
REASON_LENGTH: Final = 200
OUT_OF_USE: Final = frozenset(("DOWN", "DRAIN", "DRAINED", "DRAINING", "FAIL", "FAILING"))
DRAINED: Final = frozenset(("DRAIN", "DRAINED", "DRAINING"))
_STATE: Final = re.compile(r"^ *State=(\S+)", re.MULTILINE)
# Behind the reason stands who gave it and when: "Reason=text [root@2026-11-30T11:09:43]".
_REASON: Final = re.compile(r"^ *Reason=(.*?)(?: \[[^\[\]]*@[^\[\]]*\])?$", re.MULTILINE)


class SlurmNode(Value, frozen=True, kw_only=True):
    """How Slurm shows a node: the flags of its state, and why it is out of use."""

    state: frozenset[str]
    reason: str

    @property
    def takes_jobs(self) -> bool:
        """Whether new jobs may come."""
        return not self.state & OUT_OF_USE

    @property
    def drained(self) -> bool:
        """Whether it is drained, by anybody."""
        return bool(self.state & DRAINED)

    @property
    def ours(self) -> bool:
        """Whether it is out of use by our word."""
        return not self.takes_jobs and self.reason.startswith(MARK)


def node_of(shown: str) -> SlurmNode | None:
    """Return a node as `scontrol show node` printed it; None: that is no node."""
    state, reason = _STATE.search(shown), _REASON.search(shown)
    if state is None:
        return None
    flags = frozenset(flag.rstrip("*~#!%$@^-") for flag in state[1].upper().split("+"))
    return SlurmNode(state=flags, reason="" if reason is None else reason[1].strip())


def reason_of(held: Drains) -> str:
    """Return the reason that Slurm is given: one line of plain characters."""
    text = MARK + "; ".join(told(drain) for drain in held)
    plain = re.sub(r"[^ -~]|[\[\]]", "?", " ".join(text.split()))
    return plain if len(plain) <= REASON_LENGTH else plain[: REASON_LENGTH - 3] + "..."


def change_for(node: SlurmNode, held: Drains) -> tuple[str, ...]:
    """Return the words of `scontrol update` that bring a node to what is held; (): none are due."""
    if not held:
        return ("State=UNDRAIN",) if node.ours and node.drained else ()
    wanted = reason_of(held)
    if node.takes_jobs or (node.ours and (not node.drained or node.reason != wanted)):
        return ("State=DRAIN", f"Reason={wanted}")
    return ()


class Slurm:
    """One node of a cluster, through `scontrol`.

    Args:
        scontrol: The program.
        node: The node's name in Slurm.
        deadline_s: How long one call may take.
    """

    name: Final = "slurm"

    def __init__(self, scontrol: str, node: str, deadline_s: float) -> None:
        self._scontrol = scontrol
        self._node = node
        self._deadline_s = deadline_s
        self._others = ""  # whose reason was met last

    def bring(self, held: Drains) -> None:
        """Have the node drained there, or our drain taken back.

        Raises:
            BackendError: `scontrol` failed, or the change did not come about.
        """
        node = self.look()
        change = change_for(node, held)
        if change:
            self._run("update", f"NodeName={self._node}", *change)
            node = self.look()
            if change_for(node, held):
                raise BackendError(
                    f"slurm node {self._node}: {'+'.join(sorted(node.state))} after {change[0]}"
                )
            LOG.warning(
                "slurm_drained" if held else "slurm_undrained",
                extra={"node": self._node, "reason": node.reason},
            )
        others = node.reason if held and not node.ours else ""
        if others and others != self._others:
            fields = {"node": self._node, "reason": calls.one_line(others)}
            LOG.warning("slurm_out_of_use_by_others", extra=fields)
        self._others = others

    def look(self) -> SlurmNode:
        """Return the node as Slurm shows it.

        Raises:
            BackendError: `scontrol` failed, or there is no such node.
        """
        shown = self._run("show", "node", self._node)
        node = node_of(shown)
        if node is None:
            raise BackendError(
                f"slurm node {self._node}: {calls.one_line(shown) or 'nothing'} is no node",
                cure="set drain.slurm_node to its NodeName",
            )
        return node

    def _run(self, *words: str) -> str:
        called = calls.call([self._scontrol, *words], self._deadline_s)
        if called.failure:
            raise BackendError(f"{self._scontrol} {words[0]} {self._node}: {called.failure}")
        return called.said
