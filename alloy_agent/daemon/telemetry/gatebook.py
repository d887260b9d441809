"""The gates of every device and partition, judged again where what they rest on has changed.

Most subjects are well most of the time: their signals are fresh, nothing is hot, nothing waits for
its dwell. What then decides is said in a few words, and while these stay the same, so do the gates;
their ages are those of when they were judged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from alloy_agent.daemon.telemetry.newest import NOT_SUPPORTED, VALUE, Newest
from alloy_agent.model import Scope, Share
from alloy_agent.telemetry import gates
from alloy_agent.telemetry.signals import AGE_FLOOR_S

if TYPE_CHECKING:
    from alloy_agent.model import Device, DeviceFault, Partition, Snapshot
    from alloy_agent.telemetry.headroom import Headroom
    from alloy_agent.uplink.fast import GateRow

MARGIN: Final = "alloy_device_temperature_headroom_celsius"
REQUIRED: Final = {  # of the freshness gate, where the source has them
    Scope.DEVICE: ("alloy_device_memory_used_bytes", MARGIN),
    Scope.PARTITION: (
        "alloy_partition_compute_active_ratio",
        "alloy_partition_memory_used_bytes",
    ),
}
Opinions = dict[str, gates.Opinion]
Words = tuple[str, str, gates.GateState, str]


class Grounds(NamedTuple):
    """What a round of judging rests on."""

    snapshot: Snapshot
    now_s: float
    closed_by: Callable[[str], str]  # the fault of a device that forbids placement
    drained: Callable[[str], str]  # why a subject is drained
    headrooms: Mapping[tuple[str, int], Headroom]


class _OfDevice(NamedTuple):
    """What a device's gates and those of its partitions share."""

    closed_by: str
    shape: gates.Opinion


class GateBook:
    """Gates by subject and name; guarded by whoever owns it."""

    def __init__(self) -> None:
        self.limits = gates.GateLimits()
        self.gates: dict[str, dict[str, gates.Gate]] = {}
        self._said: dict[str, Words] = {}  # of subjects whose gates wait for nothing
        self._rows: dict[str, GateRow] | None = None
        self._required: dict[str, tuple[tuple[str, int], ...]] = {}
        self._revision = -1

    def forget(self, subjects: frozenset[str]) -> None:
        """Drop the gates of subjects that are gone."""
        for subject in [subject for subject in self.gates if subject not in subjects]:
            del self.gates[subject]
            self._said.pop(subject, None)
            self._rows = None

    def judge(self, newest: Newest, grounds: Grounds) -> bool:
        """Judge every gate; return whether one is in another state than before."""
        snapshot, now_s = grounds.snapshot, grounds.now_s
        if newest.revision != self._revision:
            self._revision = newest.revision
            self._required, self._said = {}, {}
        age_s = max(0.0, now_s - snapshot.taken_at_s)
        faults: dict[str, list[DeviceFault]] = {}
        for fault in snapshot.faults:
            faults.setdefault(fault.device, []).append(fault)
        unseen = gates.topology(None, (), age_s)
        of: dict[str, _OfDevice] = {}
        changed = False
        for device in snapshot.devices:
            shape = gates.topology(device, faults.get(device.id, ()), age_s)
            common = of[device.id] = _OfDevice(grounds.closed_by(device.id), shape)
            words = self._words(device.id, Scope.DEVICE, common, newest, grounds)
            if words is not None and self._is_cool(device.id, newest, now_s):
                if self._said.get(device.id) == words:
                    continue
            else:
                words = None
            opinions = self._common(device.id, Scope.DEVICE, common, newest, grounds)
            self._add_thermal(opinions, device, newest, now_s)
            changed |= self._put(device.id, opinions, words, now_s)
        for piece in snapshot.partitions:
            common = of.get(piece.device) or _OfDevice(grounds.closed_by(piece.device), unseen)
            words = None
            if piece.share is Share.EXCLUSIVE and self._is_open(piece.device, "thermal"):
                words = self._words(piece.id, Scope.PARTITION, common, newest, grounds)
            if words is not None and self._said.get(piece.id) == words:
                continue
            opinions = self._common(piece.id, Scope.PARTITION, common, newest, grounds)
            self._add_inherited(opinions, piece, grounds)
            changed |= self._put(piece.id, opinions, words, now_s)
        return changed

    def _words(
        self, subject: str, scope: Scope, of: _OfDevice, newest: Newest, grounds: Grounds
    ) -> Words | None:
        """Return what decides the gates of a subject whose signals are all fresh; else None."""
        now_s, codes, times_s = grounds.now_s, newest.codes, newest.times_s
        for _, place in self._places(subject, scope, newest):
            if codes[place] != VALUE or now_s - times_s[place] > AGE_FLOOR_S:
                return None
        return (of.closed_by, grounds.drained(subject), of.shape.state, of.shape.reason)

    def _places(self, subject: str, scope: Scope, newest: Newest) -> tuple[tuple[str, int], ...]:
        """Return the required signals that a source has, and where they stand."""
        required = self._required.get(subject)
        if required is None:
            required = self._required[subject] = tuple(
                (name, newest.places[subject, name])
                for name in REQUIRED[scope]
                if (subject, name) in newest.places
            )
        return required

    def _is_cool(self, device: str, newest: Newest, now_s: float) -> bool:
        """Whether a device's temperature is no reason against anything, or not known at all."""
        place = newest.places.get((device, MARGIN), -1)
        if place < 0 or newest.codes[place] == NOT_SUPPORTED:
            return True
        fresh = newest.codes[place] == VALUE and now_s - newest.times_s[place] <= AGE_FLOOR_S
        return fresh and newest.values[place] >= self.limits.thermal_close_c

    def _is_open(self, subject: str, name: str) -> bool:
        gate = self.gates.get(subject, {}).get(name)
        return gate is None or gate.state is gates.GateState.OPEN

    def _common(
        self, subject: str, scope: Scope, of: _OfDevice, newest: Newest, grounds: Grounds
    ) -> Opinions:
        found = {
            "health": gates.health(of.closed_by),
            "drain": gates.health(grounds.drained(subject)),
            "topology": of.shape,
        }
        fresh = _freshness(self._places(subject, scope, newest), newest, grounds.now_s)
        if fresh is not None:
            found["freshness"] = fresh
        return found

    def _add_thermal(self, found: Opinions, device: Device, newest: Newest, now_s: float) -> None:
        place = newest.places.get((device.id, MARGIN), -1)
        if place < 0 or newest.codes[place] == NOT_SUPPORTED:
            return
        age_s = max(0.0, now_s - newest.times_s[place])
        fresh = newest.codes[place] == VALUE and age_s <= newest.limit_s(place)
        margin_c = newest.values[place] if fresh else None
        found["thermal"] = gates.thermal(margin_c, age_s, self.limits)

    def _add_inherited(self, found: Opinions, piece: Partition, grounds: Grounds) -> None:
        """Add what a partition takes from its device, and what only shared ones have."""
        thermal = self.gates.get(piece.device, {}).get("thermal")
        if thermal is not None and thermal.state is not gates.GateState.OPEN:
            found["thermal"] = gates.Opinion(state=thermal.state, reason=thermal.reason)
        if piece.share is not Share.EXCLUSIVE:
            room = grounds.headrooms.get((str(piece.id), piece.generation))
            least, scarcest = (None, "") if room is None else (room.least, room.scarcest)
            found["headroom"] = gates.headroom(least, scarcest, 0.0, self.limits)

    def _put(self, subject: str, opinions: Opinions, words: Words | None, now_s: float) -> bool:
        """Judge a subject; `words` stand for its opinions until they change, None: never."""
        before = self.gates.get(subject, {})
        after = gates.judge(before, opinions, now_s, self.limits.dwell_s)
        self.gates[subject] = after
        self._rows = None
        if words is None or any(gate.latched for gate in after.values()):
            self._said.pop(subject, None)
        else:
            self._said[subject] = words
        return any(
            name not in before or before[name].state is not gate.state
            for name, gate in after.items()
        )

    def deciding(self) -> dict[str, gates.Gate]:
        """Return the gate that decides for each device and partition."""
        found = {}
        for subject, table in self.gates.items():
            worst = gates.worst(tuple(table.values()))
            if worst is not None:
                found[subject] = worst
        return found

    def rows(self) -> Mapping[str, GateRow]:
        """Return the gates of each subject together, as the wire has them."""
        from alloy_agent.uplink.fast import GateRow

        if self._rows is None:
            words = {gates.GateState.OPEN: True, gates.GateState.CLOSED: False}
            self._rows = {
                subject: GateRow(open=words.get(gate.state), gate=gate.gate, reason=gate.reason)
                for subject, gate in self.deciding().items()
            }
        return self._rows


def _freshness(
    required: Sequence[tuple[str, int]], newest: Newest, now_s: float
) -> gates.Opinion | None:
    """Return the freshness of a subject, if its source has anything that must be fresh."""
    ages: dict[str, tuple[float | None, float]] = {}
    for name, place in required:
        if newest.codes[place] == NOT_SUPPORTED:
            continue
        known = not math.isnan(newest.values[place]) and newest.times_s[place] > 0
        age_s = max(0.0, now_s - newest.times_s[place]) if known else None
        ages[name] = (age_s, newest.limit_s(place))
    return gates.freshness(ages) if ages else None
