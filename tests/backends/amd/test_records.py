"""What only the vendor's library tells: error records, and what holds the clocks back."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alloy_agent.backends.amd import AmdBackend
from alloy_agent.backends.amd.cper import HEADER, Record, parse
from alloy_agent.backends.amd.metrics import Metrics, held_back
from alloy_agent.model import DeviceEvent, DeviceId
from alloy_agent.telemetry.catalogue import load
from tests.fakes.amd_tree import Tree, tree_of
from tests.fakes.amdsmi import FakeSmi, library_over

UNCORRECTED, FATAL, CORRECTED = 0, 1, 2


def record(severity: int, ident: str, body: int = 40, **fields: bytes | int) -> bytes:
    """Return one record of a severity, with sections of `body` bytes behind it."""
    when = bytes((7, 52, 11, 0, 30, 11, 26, 20))
    length = int(fields.get("length", HEADER.size + body))
    signature = fields.get("signature", b"CPER")
    identity = ident.encode().ljust(8, b"\0")
    head = (signature, 0x100, 0xFFFFFFFF, 1, severity, 0, length, when)
    rest = (b"", b"", b"", b"", identity, 0, 0, b"")
    return HEADER.pack(*head, *rest) + bytes(body)


def test_the_header_is_as_long_as_the_wrappers() -> None:
    """The record header has 128 bytes, as in the UEFI specification and in the wrapper."""
    assert HEADER.size == 128


def test_records_follow_each_other_by_their_lengths() -> None:
    """Severity, id and date of each, whatever the sections behind a header are long."""
    raw = record(FATAL, "a", 8) + record(CORRECTED, "b", 300) + record(UNCORRECTED, "c", 0)
    assert parse(raw, 20) == (
        Record("fatal", 1, "a", "2026-11-30 11:52:07"),
        Record("corrected", 1, "b", "2026-11-30 11:52:07"),
        Record("uncorrected", 1, "c", "2026-11-30 11:52:07"),
    )
    assert len(parse(raw, 2)) == 2


@pytest.mark.parametrize(
    "broken",
    [
        record(FATAL, "x", length=10),
        record(FATAL, "x", length=1 << 30),
        record(FATAL, "x", signature=b"RIFF"),
        record(7, "x"),
    ],
)
def test_nothing_behind_a_broken_record_is_believed(broken: bytes) -> None:
    """A length that cannot be, another signature or severity ends the reading there."""
    raw = record(CORRECTED, "good") + broken + record(FATAL, "y")
    assert [found.ident for found in parse(raw, 20)] == ["good"]
    cut = record(CORRECTED, "good") + record(FATAL, "x")[:-1]
    assert [found.ident for found in parse(cut, 20)] == ["good"]


@given(raw=st.binary(max_size=600), count=st.integers(0, 30))
def test_any_bytes_are_read_without_a_crash(raw: bytes, count: int) -> None:
    """Whatever is in the buffer, at most so many records come out, each of a known severity."""
    for prefix in (b"", record(FATAL, "a")):
        found = parse(prefix + raw, count)
        assert len(found) <= count
        assert {one.severity for one in found} <= {"fatal", "uncorrected", "corrected"}


def opened(tmp_path: Path, spec: str = "2xMI300X") -> tuple[Tree, FakeSmi, AmdBackend]:
    """Return a node whose library is used."""
    tree = tree_of(spec, tmp_path)
    smi = FakeSmi(tree)
    backend = tree.backend(library=library_over(smi))
    assert backend._library.open()
    return tree, smi, backend


def awaited(backend: AmdBackend) -> list[DeviceEvent]:
    """Return what one look at the records of all devices brings, however long a look takes."""
    looked, found = backend._events._records_s, []
    backend._events._records_s = -1e9
    for _ in range(600):
        found += [e for e in backend.wait_events(0.05) if e.code.startswith("ras:")]
        if backend._events._records_s > looked:
            return found
    raise AssertionError("nobody looked at the records")


def test_records_are_events_once_and_old_ones_are_none(tmp_path: Path) -> None:
    """What stood there at the start is history; each later record is one event of its device."""
    _, smi, backend = opened(tmp_path)
    first, second = backend.discover()
    smi.records[first] = [(record(FATAL, "old"), FATAL)]
    assert awaited(backend) == []
    smi.records[first] += [(record(CORRECTED, f"n{n}"), CORRECTED) for n in range(30)]
    smi.records[second] = [(record(FATAL, "bad"), FATAL)]
    found = awaited(backend)
    assert [(e.device, e.code) for e in found].count((first, "ras:cper_ce")) == 30
    assert [(e.device, e.kind) for e in found if e.code == "ras:fatal"] == [(second, "fault")]
    assert "bad" in next(e.detail for e in found if e.code == "ras:fatal")
    assert awaited(backend) == []


def test_every_code_of_a_record_is_in_the_catalogue() -> None:
    """No record falls to what the catalogue says of unknown codes; VM faults are the tenant's."""
    from alloy_agent.backends.amd.events import SEVERITIES
    from alloy_agent.backends.amd.library import EVENTS

    catalogue = load()
    for code in (*SEVERITIES.values(), *(f"amd:{name}" for name in EVENTS.values())):
        assert catalogue.knows(code), code


def test_the_library_says_what_holds_the_clocks_back(tmp_path: Path) -> None:
    """Violations that are active now are the reasons of THR-01; none active is an empty list."""
    _, smi, backend = opened(tmp_path, "1xMI300X")
    device = backend.discover()[0]
    smi.violations[device] = frozenset({"ppt_pwr", "hbm_thrm"})
    assert throttling(backend, device) == ["package power limit", "memory temperature"]
    smi.violations[device] = frozenset()
    assert throttling(backend, device) == []


def throttling(backend: AmdBackend, device: DeviceId) -> object:
    """Return the reasons that the backend gives now."""
    value = next(f for f in backend.facts(device) if f.name == "device.throttling").value
    assert isinstance(value, dict)
    return value["reasons"]


def test_without_the_library_residencies_are_compared() -> None:
    """A residency that grew held the clocks back; one that went back tells nothing."""

    def table(**values: int) -> Metrics:
        return Metrics(revision=8, values=values)

    base = {"accumulation_counter": 10, "ppt_residency_acc": 5, "hbm_thm_residency_acc": 2}
    before = table(**base)
    assert held_back(before, table(**base | {"accumulation_counter": 20})) == ()
    after = base | {"accumulation_counter": 20, "ppt_residency_acc": 9}
    assert held_back(before, table(**after)) == ("package power limit",)
    assert held_back(before, table(**after | {"hbm_thm_residency_acc": 1})) is None
    assert held_back(before, before) is None
    assert held_back(table(temperature_hotspot=1), table(temperature_hotspot=1)) is None
