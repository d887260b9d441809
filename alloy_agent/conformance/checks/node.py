"""Judgements about the node and its devices: PART-01 for what is missing, NODE-01, REC-01."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from alloy_agent.conformance.checks.base import NODE, FactBook, Intent, named
from alloy_agent.conformance.checks.geometry import describe, missing_pieces
from alloy_agent.conformance.checks.shapes import ChainFact
from alloy_agent.model import Condition, Device, DeviceLayout, Judgement, Quality, Snapshot, Verdict

GEOMETRY_CLAIM = "Every piece that the desired layout asks for exists, and every mode is as asked."
DEVICE_CLAIM = "The device answers, so that what is said of its partitions is current."
CHAIN_CLAIM = "The evidence chain is whole: no record changed, missing or lost."


def judge_node(snapshot: Snapshot, book: FactBook, intent: Intent) -> tuple[Judgement, ...]:
    """Return the judgements about devices, and the one about the evidence chain."""
    return (*_devices(snapshot, intent), _chain(book))


def _devices(snapshot: Snapshot, intent: Intent) -> Iterator[Judgement]:
    known = {device.id for device in snapshot.devices}
    for device in snapshot.devices:
        yield _answers(device)
        layout = intent.of_device(device.id)
        if layout is not None:
            yield _geometry(device, layout, snapshot)
    for entry in intent.layout.devices if intent.layout else ():
        if entry.device not in known:
            yield _judgement(
                "PART-01",
                entry.device,
                Verdict.FAIL,
                GEOMETRY_CLAIM,
                "the device",
                "no such device",
            )


def _answers(device: Device) -> Judgement:
    fine = device.condition is Condition.OK
    return _judgement(
        "DEV-00",
        device.id,
        Verdict.PASS if fine else Verdict.UNKNOWN,
        DEVICE_CLAIM,
        Condition.OK.value,
        device.condition.value,
        device.condition_reason,
    )


def _geometry(device: Device, layout: DeviceLayout, snapshot: Snapshot) -> Judgement:
    present = tuple(p for p in snapshot.partitions if p.device == device.id)
    current = {mode.kind: mode.current for mode in device.modes}
    absent = [describe(spec) for spec in missing_pieces(layout.partitions or (), present)]
    absent += [
        f"{kind.value} {wanted}"
        for kind, wanted in layout.modes.items()
        if current.get(kind) != wanted
    ]
    expected = named(
        [f"{kind.value} {wanted}" for kind, wanted in layout.modes.items()]
        + [describe(spec) for spec in layout.partitions or ()],
        "nothing",
    )
    if device.condition is not Condition.OK:
        return _judgement(
            "PART-01",
            device.id,
            Verdict.UNKNOWN,
            GEOMETRY_CLAIM,
            expected,
            "",
            f"the device is {device.condition.value}",
        )
    observed = f"missing: {named(absent)}" if absent else "all present"
    verdict = Verdict.FAIL if absent else Verdict.PASS
    return _judgement("PART-01", device.id, verdict, GEOMETRY_CLAIM, expected, observed)


def _chain(book: FactBook) -> Judgement:
    fact = book.find(NODE, "evidence.chain")
    if fact is None or fact.quality is not Quality.VALUE:
        why = "no evidence is being recorded" if fact is None else fact.reason
        return _judgement("REC-01", NODE, Verdict.UNKNOWN, CHAIN_CLAIM, "a whole chain", "", why)
    try:
        chain = msgspec.convert(fact.value, ChainFact)
    except msgspec.ValidationError as exc:
        return _judgement(
            "REC-01", NODE, Verdict.UNKNOWN, CHAIN_CLAIM, "a whole chain", "", str(exc)
        )
    observed = f"{chain.records} records, {chain.problems} problems"
    if chain.lost_records:
        observed += f", {chain.lost_records} records could not be written"
    bad = chain.problems > 0 or chain.lost_records > 0
    judgement = _judgement(
        "REC-01",
        NODE,
        Verdict.FAIL if bad else Verdict.PASS,
        CHAIN_CLAIM,
        "no problem, nothing lost",
        observed,
        chain.first_problem,
    )
    return msgspec.structs.replace(judgement, method=fact.method, resolution=fact.resolution)


def _judgement(  # noqa: PLR0913, PLR0917 - the columns of a judgement
    check: str,
    subject: str,
    verdict: Verdict,
    claim: str,
    expected: str,
    observed: str,
    reason: str = "",
) -> Judgement:
    return Judgement(
        check=check,
        subject=subject,
        verdict=verdict,
        claim=claim,
        expected=expected,
        observed=observed,
        reason=reason,
        method="snapshot of the backend's read-back",
        resolution="each audit",
    )
