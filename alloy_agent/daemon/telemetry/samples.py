"""Samples of the node for the brain and other watchers, straight from the columns of the pages."""

from __future__ import annotations

import math
import threading
from typing import TYPE_CHECKING

from alloy_agent.daemon.telemetry.load import HEADROOM
from alloy_agent.daemon.telemetry.newest import Newest
from alloy_agent.host import clock

if TYPE_CHECKING:
    from alloy_agent.daemon.telemetry.joined import Telemetry
    from alloy_agent.model import Snapshot
    from alloy_agent.proto import agent_pb2 as pb
    from alloy_agent.uplink.fast import FastPlan


class Samples:
    """Makes samples, for any thread.

    Args:
        telemetry: Whose workers, gates and headroom.
    """

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry
        self._lock = threading.Lock()
        self._newest = Newest(telemetry.workers)
        self._plan: FastPlan | None = None
        self._made_for = (-1, -1)
        self._rooms: tuple[tuple[str, int], ...] = ()

    def message(self, snapshot: Snapshot, revision: int, number: int) -> pb.Fast:
        """Return sample `number` of the node, its rows those of a revision of its shape."""
        from alloy_agent.uplink.fast import Readings

        telemetry, newest = self._telemetry, self._newest
        with self._lock:
            now_s = clock.boottime_s()
            newest.take(now_s)
            if self._made_for != (newest.revision, revision) or self._plan is None:
                self._plan = self._new_plan(snapshot)
                self._made_for = (newest.revision, revision)
            headrooms = telemetry.headrooms
            left = [
                math.nan
                if (room := headrooms.get(key)) is None or room.least is None
                else room.least
                for key in self._rooms
            ]
            readings = Readings(
                [*newest.values, *left],
                [*newest.times_s, *([now_s] * len(left))],
                newest.codes + bytes(len(left)),
            )
            gates = telemetry.gate_rows()
            return self._plan.message(readings, gates, now_s, (revision, revision), number)

    def _new_plan(self, snapshot: Snapshot) -> FastPlan:
        from alloy_agent.uplink.fast import FastPlan

        self._rooms = tuple((str(p.id), p.generation) for p in snapshot.partitions)
        signals = [(spec.subject, spec.name) for spec in self._newest.specs]
        signals += [(subject, HEADROOM) for subject, _ in self._rooms]
        return FastPlan(
            signals, [p.id for p in snapshot.partitions], [d.id for d in snapshot.devices]
        )
