"""What a check is, and how facts reach it.

A check is data and one pure function. It declares the facts it needs; where one is absent,
unreadable or of another shape, the verdict is UNKNOWN before the function is asked. Whether a
check applies depends on the partition, the device and what was intended, never on facts, so that
a fact which is missing can only ever lower a tier. The one exception is a claim about a tenant:
it is NOT_APPLICABLE where nobody was given the partition and the list of its processes was read
and is empty. A list that is missing is no such list, and makes the verdict UNKNOWN.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar, cast

import msgspec

from alloy_agent.model import (
    Device,
    DeviceLayout,
    Fact,
    Judgement,
    Layout,
    Partition,
    PartitionId,
    Quality,
    Snapshot,
    TenantId,
    Tier,
    Value,
    Verdict,
)

T = TypeVar("T")

NODE = "node"  # subject of facts and judgements about the whole node
SHOWN = 8  # how many offenders a judgement names before it counts the rest

# why a claim about a tenant says nothing yet
VACANT = "nobody is inside; judged as soon as a process enters"

HARD = (Tier.HARD,)
ENFORCED = (Tier.HARD, Tier.ENFORCED)
ANY_IN_FORCE = (Tier.HARD, Tier.ENFORCED, Tier.SOFT)


class Grant(Value, frozen=True, kw_only=True):
    """One partition that a tenant was given, at the generation it had then."""

    partition: PartitionId
    generation: int
    tenant: TenantId
    lease: str = ""
    pid: int | None = None


class Intent(Value, frozen=True, kw_only=True):
    """What ought to be: the desired layout, and who was given what. None: nobody said."""

    layout: Layout | None = None
    grants: tuple[Grant, ...] = ()

    def of_device(self, device: str) -> DeviceLayout | None:
        """Return what the layout says of one device, or None."""
        if self.layout is None:
            return None
        return next((entry for entry in self.layout.devices if entry.device == device), None)


class Outcome(Value, frozen=True, kw_only=True):
    """What a check's function says."""

    verdict: Verdict
    expected: str = ""
    observed: str = ""
    reason: str = ""


class Need(Value, frozen=True, kw_only=True):
    """A fact that a check cannot do without: its name, its shape, and whose fact it is."""

    name: str
    shape: Any
    of: str = "partition"  # "partition", "device" or "node"


# who works in the partition, asked before a claim about its tenant
INSIDE = Need(name="partition.pids", shape=tuple[int, ...])


class Case(Value, frozen=True, kw_only=True):
    """Everything that one check may look at. `values` holds the needed facts, decoded."""

    partition: Partition
    device: Device
    snapshot: Snapshot
    intent: Intent
    values: dict[str, Any] = {}  # noqa: RUF012 - msgspec copies it

    def get(self, name: str, _shape: type[T]) -> T:
        """Return a needed fact's value; the runner has decoded it to its shape already."""
        return cast("T", self.values[name])

    @property
    def siblings(self) -> tuple[Partition, ...]:
        """The other partitions of the same device."""
        return tuple(
            other
            for other in self.snapshot.partitions
            if other.device == self.device.id and other.id != self.partition.id
        )

    @property
    def group_nodes(self) -> tuple[str, ...]:
        """The device nodes of the partition's group, while one tenant was given all of it."""
        piece = self.partition
        if piece.group_access is None:
            return ()
        members = {p.id: p.generation for p in self.snapshot.partitions if p.group == piece.group}
        given = {
            g.partition for g in self.intent.grants if members.get(g.partition) == g.generation
        }
        tenants = {g.tenant for g in self.intent.grants if g.partition in given}
        whole = len(members) == len(piece.group) and given == set(members)
        return piece.group_access.device_nodes if whole and len(tenants) == 1 else ()


class Check(Value, frozen=True, kw_only=True):
    """One claim about a partition.

    `exempt` returns why the claim says nothing here, from the partition and the intent alone (""
    if it does). `about_tenant` claims say nothing while the partition is vacant. `supports` are
    the tiers that the claim is evidence for; `required_for` those that do not hold without it.
    `method` and `resolution` say how it looks where its facts do not say so themselves.
    """

    id: str
    claim: str
    applies: Callable[[Partition, Device], bool]
    judge: Callable[[Case], Outcome]
    needs: tuple[Need, ...] = ()
    exempt: Callable[[Case], str] | None = None
    about_tenant: bool = False
    supports: tuple[Tier, ...] = ANY_IN_FORCE
    required_for: tuple[Tier, ...] = ANY_IN_FORCE
    proves: bool = True
    method: str = "snapshot of the backend's read-back"
    resolution: str = "each audit"


class FactBook:
    """Facts by subject and name. Of two facts of one name, the later one counts."""

    def __init__(self, facts: Iterable[Fact]) -> None:
        self._facts: dict[tuple[str, str], Fact] = {(f.subject, f.name): f for f in facts}

    def find(self, subject: str, name: str) -> Fact | None:
        """Return the fact, or None."""
        return self._facts.get((subject, name))

    def merged(self, facts: Iterable[Fact]) -> FactBook:
        """Return a book in which the given facts replace older ones of their name."""
        book = FactBook(())
        book._facts = self._facts | {(f.subject, f.name): f for f in facts}
        return book

    def all(self) -> tuple[Fact, ...]:
        """Return every fact."""
        return tuple(self._facts.values())


def run(check: Check, case: Case, book: FactBook) -> Judgement:
    """Return the verdict of one check on one partition; UNKNOWN where evidence is missing."""
    exempt = check.exempt(case) if check.exempt else ""
    if exempt:
        return _judgement(check, case, [], not_applicable(exempt))
    subjects: Mapping[str, str] = {
        "partition": case.partition.id,
        "device": case.device.id,
        "node": NODE,
    }
    values: dict[str, Any] = {}
    used: list[Fact] = []
    asks_who = check.about_tenant and not _given(case)
    for need in (INSIDE, *check.needs) if asks_who else check.needs:
        fact = book.find(subjects[need.of], need.name)
        problem = _absence(need, fact)
        if fact is None or problem:
            return _judgement(check, case, used, Outcome(verdict=Verdict.UNKNOWN, reason=problem))
        try:
            values[need.name] = msgspec.convert(fact.value, need.shape)
        except msgspec.ValidationError as exc:
            reason = f"fact {need.name} makes no sense: {exc}"
            return _judgement(check, case, used, Outcome(verdict=Verdict.UNKNOWN, reason=reason))
        used.append(fact)
        if need is INSIDE and not values[need.name]:
            return _judgement(check, case, used, not_applicable(VACANT))
    outcome = check.judge(msgspec.structs.replace(case, values=values))
    return _judgement(check, case, used, outcome)


def _given(case: Case) -> bool:
    """Whether anybody was given the partition, at whatever generation."""
    ident = case.partition.id
    return case.partition.tenant is not None or any(
        grant.partition == ident for grant in case.intent.grants
    )


def _absence(need: Need, fact: Fact | None) -> str:
    if fact is None:
        return f"nobody reported {need.name}"
    if fact.quality is not Quality.VALUE:
        why = fact.reason or fact.quality.value.replace("_", " ")
        return f"{need.name} could not be read: {why}"
    return ""


def _judgement(check: Check, case: Case, used: list[Fact], outcome: Outcome) -> Judgement:
    return Judgement(
        check=check.id,
        subject=case.partition.id,
        verdict=outcome.verdict,
        claim=check.claim,
        expected=outcome.expected,
        observed=outcome.observed,
        method=_joined((fact.method for fact in used), check.method),
        resolution=_joined((fact.resolution for fact in used), check.resolution),
        reason=outcome.reason,
    )


def _joined(parts: Iterable[str], default: str) -> str:
    return "; ".join(dict.fromkeys(part for part in parts if part)) or default


# --- small words that outcomes are made of -----------------------------------------------------


def passed(expected: str, observed: str, reason: str = "") -> Outcome:
    """Return a PASS."""
    return Outcome(verdict=Verdict.PASS, expected=expected, observed=observed, reason=reason)


def failed(expected: str, observed: str, reason: str = "") -> Outcome:
    """Return a FAIL."""
    return Outcome(verdict=Verdict.FAIL, expected=expected, observed=observed, reason=reason)


def not_applicable(reason: str) -> Outcome:
    """Return a NOT_APPLICABLE."""
    return Outcome(verdict=Verdict.NOT_APPLICABLE, reason=reason)


def compare(expected: object, observed: object, reason: str = "") -> Outcome:
    """Return PASS if both read the same, else FAIL with the reason."""
    if expected == observed:
        return passed(str(expected), str(observed))
    return failed(str(expected), str(observed), reason)


def named(items: Iterable[str], none: str = "none") -> str:
    """Return the first few of many, and how many more there are."""
    listed = list(items)
    if not listed:
        return none
    more = f" and {len(listed) - SHOWN} more" if len(listed) > SHOWN else ""
    return ", ".join(listed[:SHOWN]) + more


def counted(number: int, one: str, many: str) -> str:
    """Return a number with its word: "1 leaf", "no process", "3 processes"."""
    return f"{number or 'no'} {one if number in {0, 1} else many}"


def cpu_list(cpus: Iterable[int]) -> str:
    """Return CPUs as ranges, "0-3,8", or "none"."""
    runs: list[list[int]] = []
    for cpu in sorted(set(cpus)):
        if runs and cpu == runs[-1][1] + 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(f"{a}" if a == b else f"{a}-{b}" for a, b in runs) or "none"


def size(count: int | None) -> str:
    """Return bytes as a person reads them without losing a byte: "8 GiB", "8589934593 bytes"."""
    if count is None:
        return "no limit"
    for unit, name in ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB")):
        if count and count % unit == 0:
            return f"{count // unit} {name}"
    return f"{count} bytes"
