"""Claims of Kubernetes on this node: the driver joined to the daemon's rooms."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

from alloy_agent.conformance.owners import find_owners
from alloy_agent.daemon.draining import in_words
from alloy_agent.errors import StoreError
from alloy_agent.host.processes import iter_processes
from alloy_agent.kubernetes.driver import KubernetesDriver, Now
from alloy_agent.model import (
    ApplyReport,
    Layout,
    PartitionId,
    Plan,
    Scope,
    Snapshot,
    Vendor,
    Verdict,
)
from alloy_agent.telemetry.drains import over, reached_by
from alloy_agent.telemetry.health import Level

if TYPE_CHECKING:
    from alloy_agent.daemon.loops import Daemon

LOG = logging.getLogger(__name__)


class ClaimedNode:
    """The node as claims change it: `kubernetes.hardware.NodeLike`."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon

    def observe(self) -> Snapshot:
        """Return the node as it is now, with what the books say of it."""
        return self._daemon.node.observe()

    def leased(self, snapshot: Snapshot) -> frozenset[PartitionId]:
        """Return the pieces that leases hold."""
        return self._daemon.node.tenancy.leased(snapshot.partitions)

    def desired(self) -> Layout | None:
        """Return the layout that the node keeps."""
        return self._daemon.node.store.desired()

    def carry_out(self, plan: Plan, consent: frozenset[Scope]) -> ApplyReport:
        """Do a plan, after whatever an earlier run left."""
        self._daemon.node.recover()
        return self._daemon.node.carry_out(plan, consent)


class Claims:
    """What the daemon starts, ticks and stops."""

    def __init__(self, daemon: Daemon) -> None:
        """Build the driver.

        Raises:
            ConfigError: No API server is known.
        """
        self._daemon = daemon
        settings = daemon.settings
        self.driver = KubernetesDriver(
            settings.kubernetes,
            settings.node_name,
            os.environ,
            self._owned,
            lambda: daemon.health() or "",
        )

    def start(self) -> None:
        """Make the sockets."""
        self.driver.start()

    def attach(self) -> None:
        """Answer calls and publish; a node that makes no changes takes no claims."""
        node = self._daemon.node
        if node.degraded:
            LOG.error("no_claims", extra={"reason": node.degraded})
            self.driver.plugin.attach(_Degraded(node.degraded))
            return
        node.tenancy.driver = self.driver.settings.driver
        self.driver.attach(ClaimedNode(self._daemon), node.store, self._refuse)

    def _refuse(self, subject: str) -> str:
        """Return why a device or the node takes no new claim: a drain, which outlives a restart."""
        node = self._daemon.node
        held = node.drained()
        found = over(held, subject, self._daemon.seen.snapshot or node.observe()) if held else None
        if found is None:
            return ""
        return f"{found.subject or 'the node'} is drained: {found.reason}"

    def stop(self) -> None:
        """Unregister."""
        self.driver.stop()

    def tick(self) -> None:
        """Publish what was seen last."""
        daemon = self._daemon
        snapshot, audit = daemon.seen.snapshot, daemon.seen.audit
        if snapshot is None or self.driver.preparer is None:
            return
        daemon.node.tenancy.containers = self.driver.containers
        draining, drains = self._draining(snapshot)
        failing: frozenset[str] = frozenset()
        if audit is not None:
            failing = frozenset(
                str(report.partition.id)
                for report in audit.partitions
                if any(one.verdict is Verdict.FAIL for one in report.judgements)
            )
        self.driver.tick(
            Now(
                snapshot=snapshot,
                leased=frozenset(map(str, daemon.node.tenancy.leased(snapshot.partitions))),
                sick=self._sick(snapshot),
                draining=draining,
                drains=drains,
                drained=self._drained(),
                failing=failing,
                static=daemon.layout_devices(),
            )
        )

    def _sick(self, snapshot: Snapshot) -> dict[str, str]:
        """Return the devices that take nothing new, by the fault catalogue's word."""
        telemetry = self._daemon.telemetry
        if telemetry is None:
            return {}
        found = {}
        for device in snapshot.devices:
            health = telemetry.health.get(str(device.id))
            if health is not None and health.level in (Level.FAILED, Level.QUARANTINED):
                found[str(device.id)] = health.reason
        return found

    def _draining(self, snapshot: Snapshot) -> tuple[frozenset[str], dict[str, str]]:
        """Return what takes nothing new by somebody's word, and why: devices, pieces, the node."""
        telemetry = self._daemon.telemetry
        if telemetry is None or not telemetry.drains:
            return frozenset(), {}
        held = telemetry.drains
        subjects = telemetry.draining()
        reasons = {}
        for drain in held:
            reached = set(reached_by(drain, snapshot)) & subjects
            if drain.scope is Scope.NODE:
                reached.add("")
            reasons.update(dict.fromkeys(reached, drain.reason))
        whole = {""} if any(one.scope is Scope.NODE for one in held) else set()
        return subjects | whole, reasons

    def _drained(self) -> dict[str, str]:
        """Return every drain in words, for the node's condition."""
        telemetry = self._daemon.telemetry
        held = () if telemetry is None else telemetry.drains
        return {f"{d.scope} {d.subject}".strip(): in_words(d) for d in held}

    @staticmethod
    def _owned() -> frozenset[Vendor]:
        """Return the vendors whose devices another driver or plug-in hands out on this node."""
        rivals = [one for one in find_owners(iter_processes()) if one.rival]
        return frozenset(vendor for one in rivals for vendor in one.vendors)


class _Degraded:
    """Answers every call with why nothing is changed."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def prepare(self, ref: object, deadline_s: float) -> tuple[()]:
        """Refuse."""
        del deadline_s
        raise StoreError(f"{ref}: no changes are made: {self._reason}")

    def unprepare(self, ref: object, deadline_s: float) -> None:
        """Refuse."""
        self.prepare(ref, deadline_s)
