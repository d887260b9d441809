"""What a node can be asked, whether it answers in this process or through a daemon's socket.

`Node` is the first, `RemoteNode` (over `control.ControlClient`) the second. The command line holds
one of them and cannot tell which.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import msgspec

from alloy_agent.daemon.documents import (
    AccessDocument,
    ApplyDocument,
    DevicesDocument,
    DoctorDocument,
    PlanDocument,
)
from alloy_agent.daemon.resetting import ResetDocument
from alloy_agent.model import ApplyReport, AuditResult, PartitionId, Scope, Value


class LayoutRequest(Value, frozen=True, kw_only=True):
    """A layout file by its content, so that whoever answers needs no access to the caller's files.

    `layout` names one of its layouts. `expected` are the generations that a person saw and agreed
    to change: where one no longer holds, nothing is done. `consent` are the scopes that may be
    interrupted.
    """

    text: str
    file: str
    layout: str | None = None
    expected: dict[PartitionId, int] = msgspec.field(default_factory=dict)
    consent: tuple[Scope, ...] = ()


class Progress(Value, frozen=True, kw_only=True):
    """How far an apply has come: `done` of `total` steps, and the step that is being done."""

    done: int
    total: int
    text: str


OnProgress = Callable[[Progress], None]


class NodeApi(Protocol):
    """The commands of one node. Every method may raise an `AlloyError`."""

    def devices(self) -> DevicesDocument:
        """Return devices, partitions, topology and owners as observed now."""
        ...

    def plan(self, request: LayoutRequest) -> PlanDocument:
        """Return the steps from observed to wanted; changes nothing."""
        ...

    def recover(self) -> ApplyReport | None:
        """Finish or take back what an earlier process began; None where there is nothing."""
        ...

    def apply(self, request: LayoutRequest, on_progress: OnProgress | None = None) -> ApplyDocument:
        """Make the layout so, and keep it as what is desired."""
        ...

    def access(self, partition: str, tenant: str | None, pid: int | None) -> AccessDocument:
        """Bind a tenant (and its process) to a partition; return how to be inside of it."""
        ...

    def release(self, partition: str, tenant: str) -> int:
        """Take a tenant's bindings to a partition back; return how many there were."""
        ...

    def reset(self, device: str) -> ResetDocument:
        """Reset a device that nobody is on; return once it is proved to be ready again."""
        ...

    def audit(self) -> AuditResult:
        """Run every check once, recording the evidence where it can be."""
        ...

    def doctor(self) -> DoctorDocument:
        """Return what this host lacks, each with the cure. Never raises for a lack."""
        ...

    def close(self) -> None:
        """Let go of everything this answers with; leaves partitions as they are."""
        ...
