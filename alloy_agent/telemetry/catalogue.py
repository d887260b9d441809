"""What fault codes mean: `faults.json`, one versioned table for all vendors, with its sources.

Classes:

* `application`: a tenant's program; counted, never closes a device's gate by itself.
* `informational`: counted.
* `watch`: the device is degraded and may be used.
* `reset`, `reboot`, `other`: the gate closes; `action` says what helps.
* `companion`: says nothing alone; waits for the codes that come with it.
* `verdict`: the driver's own verdict, which wins over the table.
* `done`: the vendor says that a reset has been done.

How a fault ends (`clear`): `at_once`; `quiet` for `clear_after_s`; `reset` or `reboot`, then
validated; `seen` when the agent finds the device well again for a while; `verdict` when the driver
takes it back; `operator`. An operator's validated undrain ends every one of them.

A code that is not in the table closes the gate and is reported, never ignored.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final, Literal

import msgspec

from alloy_agent.model import Scope, Value

FILE: Final = Path(__file__).with_name("faults.json")

FaultClass = Literal[
    "application", "informational", "watch", "reset", "reboot", "other", "companion", "verdict",
    "done",
]  # fmt: skip
Clear = Literal["at_once", "quiet", "reset", "reboot", "seen", "verdict", "operator"]


class Repeat(Value, frozen=True, kw_only=True):
    """So many of a code on one device within a time call for a look at the device."""

    count: int
    within_s: float


class FaultRow(Value, frozen=True, kw_only=True, rename={"fault_class": "class"}):
    """What one code means. `weight` is what one occurrence adds to the device's penalty."""

    code: str
    fault_class: FaultClass
    scope: Scope
    action: str
    clear: Clear
    weight: int
    title: str
    clear_after_s: float = 0.0
    repeat: Repeat | None = None
    companions: tuple[str, ...] = ()
    alone: FaultClass = "other"


class _Unknown(Value, frozen=True, kw_only=True, rename={"fault_class": "class"}):
    fault_class: FaultClass
    scope: Scope
    action: str
    clear: Clear
    weight: int
    title: str


class _File(Value, frozen=True, kw_only=True):
    schema: Literal["alloy.faults/v1"]
    version: str
    sources: dict[str, str]
    verdicts: dict[str, str]
    unknown: _Unknown
    rows: tuple[FaultRow, ...]


class Catalogue:
    """The table by code."""

    def __init__(self, data: bytes) -> None:
        """Take the text of a catalogue.

        Raises:
            ValueError: It is none, or has two rows for one code.
        """
        file = msgspec.json.decode(data, type=_File)
        self.version = file.version
        self.sources = file.sources
        self.verdicts = file.verdicts
        self.rows = {row.code: row for row in file.rows}
        if len(self.rows) != len(file.rows):
            raise ValueError("the fault catalogue has two rows for one code")
        self._unknown = file.unknown

    def of(self, code: str) -> FaultRow:
        """Return what a code means; one that is not known closes the gate and is reported."""
        row = self.rows.get(code)
        if row is not None:
            return row
        unknown = self._unknown
        return FaultRow(
            code=code,
            fault_class=unknown.fault_class,
            scope=unknown.scope,
            action=unknown.action,
            clear=unknown.clear,
            weight=unknown.weight,
            title=unknown.title,
        )

    def knows(self, code: str) -> bool:
        """Whether a code has a row of its own."""
        return code in self.rows


def load(path: Path = FILE) -> Catalogue:
    """Return the catalogue that this version ships, or the one of a file."""
    return Catalogue(path.read_bytes())
