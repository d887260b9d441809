"""DRV-01, THR-01, MPS-01 to MPS-03: whether an NVIDIA GPU's partitions keep apart in practice."""

from __future__ import annotations

from alloy_agent.conformance.checks.base import (
    ENFORCED,
    HARD,
    Case,
    Check,
    Need,
    Outcome,
    failed,
    named,
    not_applicable,
    passed,
)
from alloy_agent.conformance.checks.shapes import Shape
from alloy_agent.model import Device, ModeKind, Partition, Share, Tier, Vendor, Verdict


class ThrottlingFact(Shape, frozen=True, kw_only=True):
    """Why the clocks of a device are held back now; empty: they are not."""

    reasons: tuple[str, ...]


class MpsClient(Shape, frozen=True, kw_only=True):
    """A process on the device, and what limits it: itself, and the server whose client it is."""

    pid: int
    thread_percentage: float | None = None
    server: int | None = None
    server_percentage: float | None = None


class MpsFact(Shape, frozen=True, kw_only=True):
    """The MPS control daemon of the host; `asked`: its values are its own answers."""

    running: bool
    pid: int = 0
    uid: int | None = None
    asked: bool = False
    reason: str = ""
    thread_percentage: float | None = None
    pinned_memory: str | None = None
    compute_mode: str | None = None
    servers: tuple[int, ...] = ()
    clients: tuple[MpsClient, ...] = ()


def _mig(partition: Partition, device: Device) -> bool:
    on = any(mode.kind is ModeKind.MIG and mode.current == "on" for mode in device.modes)
    return device.vendor is Vendor.NVIDIA and on and partition.share is Share.EXCLUSIVE


def _shared(partition: Partition, device: Device) -> bool:
    """A simulated driver has neither memory limits nor MPS."""
    shared = partition.share is not Share.EXCLUSIVE
    return device.vendor is Vendor.NVIDIA and shared and not device.simulated


def _measured(partition: Partition, device: Device) -> bool:
    """Simulated devices have clocks that nobody holds back, and would only ever pass."""
    amd = device.vendor is Vendor.AMD and partition.share is Share.EXCLUSIVE
    return (amd or _mig(partition, device)) and not device.simulated


def numbers(version: str) -> tuple[int, ...]:
    """Return a driver version as numbers; empty if it is none.

    >>> numbers("580.95.05") > numbers("525.53")
    True
    """
    parts = version.strip().split(".")
    return tuple(int(part) for part in parts) if all(p.isdecimal() for p in parts) else ()


def _driver(case: Case) -> Outcome:
    version, floor = case.get("driver.version", str), case.get("driver.floor", str)
    expected = f"driver {floor} or newer"
    if not numbers(version) or not numbers(floor):
        reason = f"driver version {version!r} cannot be compared with {floor!r}"
        return Outcome(verdict=Verdict.UNKNOWN, expected=expected, reason=reason)
    if numbers(version) < numbers(floor):
        return failed(expected, version, "this driver is older than MIG on this GPU")
    return passed(expected, version)


def _alone(case: Case) -> str:
    return "" if case.siblings else "no co-tenant on this device"


def _throttling(case: Case) -> Outcome:
    reasons = case.get("device.throttling", ThrottlingFact).reasons
    expected = "clocks held back by nothing that co-tenants share"
    if reasons:
        return Outcome(
            verdict=Verdict.UNKNOWN,
            expected=expected,
            observed=named(reasons),
            reason="throttled now: a co-tenant's load slows this one, nothing can be compared",
        )
    return passed(expected, "not throttled")


NO_DAEMON = "no MPS control daemon runs"


def _given(client: MpsClient, default: float | None) -> float:
    """Return the percentage that the daemon holds a client to.

    A server that runs already keeps the percentage it began with, so the daemon's default counts
    only where its server's is not known.
    """
    above = client.server_percentage if client.server_percentage is not None else default
    return 100.0 if above is None else above


def _limit(client: MpsClient, default: float | None) -> float:
    """Return the lowest percentage that anyone says of a client, its own variables included."""
    own = 100.0 if client.thread_percentage is None else client.thread_percentage
    return min(_given(client, default), own)


def _mps(case: Case) -> Outcome:
    mps = case.get("mps.control", MpsFact)
    expected = "each client limited below the whole GPU, by the server or by itself"
    if not mps.running:
        return not_applicable(NO_DAEMON)
    open_ended = [
        f"process {client.pid}"
        for client in mps.clients
        if _limit(client, mps.thread_percentage) >= 100
    ]
    if open_ended:
        return failed(expected, f"no limit for {named(open_ended)}", mps.reason)
    if not mps.asked:
        reason = f"variables of processes say so and nobody else: {mps.reason or 'not asked'}"
        return Outcome(verdict=Verdict.UNKNOWN, expected=expected, reason=reason)
    own_word = [f"process {c.pid}" for c in mps.clients if _given(c, mps.thread_percentage) >= 100]
    if own_word:
        reason = f"only its own variable limits {named(own_word)}, and it can take that back"
        return Outcome(verdict=Verdict.UNKNOWN, expected=expected, reason=reason)
    told = "nothing" if mps.thread_percentage is None else f"{mps.thread_percentage:g} %"
    return passed(expected, f"daemon {mps.pid} gives {told}, {len(mps.clients)} clients")


def _no_way_around(case: Case) -> Outcome:
    mps = case.get("mps.control", MpsFact)
    expected = "compute mode exclusive, so that no client leaves the server"
    if not mps.running:
        return not_applicable(NO_DAEMON)
    if mps.compute_mode is None:
        reason = "the driver does not tell the compute mode"
        return Outcome(verdict=Verdict.UNKNOWN, expected=expected, reason=reason)
    if mps.compute_mode != "exclusive":
        return failed(expected, f"compute mode {mps.compute_mode}", "a client may leave MPS")
    return passed(expected, mps.compute_mode)


def _all_clients(case: Case) -> Outcome:
    mps = case.get("mps.control", MpsFact)
    expected = "every process on the GPU is a client of the daemon's servers"
    if not mps.running:
        return not_applicable(NO_DAEMON)
    if not mps.asked:
        return Outcome(verdict=Verdict.UNKNOWN, expected=expected, reason=mps.reason)
    outside = [f"process {client.pid}" for client in mps.clients if client.server is None]
    if outside:
        return failed(expected, named(outside), "limits of MPS do not hold it")
    return passed(expected, f"{len(mps.clients)} clients of daemon {mps.pid}")


def _need(name: str, shape: object) -> Need:
    return Need(name=name, shape=shape, of="device")


CHECKS: tuple[Check, ...] = (
    Check(
        id="DRV-01",
        claim="The driver is not older than the partitioning that it is trusted with.",
        applies=_mig,
        needs=(_need("driver.version", str), _need("driver.floor", str)),
        judge=_driver,
        proves=False,
        supports=HARD,
        required_for=HARD,
    ),
    Check(
        id="THR-01",
        claim="Power and heat do not couple co-tenants now.",
        applies=_measured,
        needs=(_need("device.throttling", ThrottlingFact),),
        judge=_throttling,
        exempt=_alone,
        proves=False,
        supports=ENFORCED,
        required_for=(),
    ),
    Check(
        id="MPS-01",
        claim="Where an MPS server runs, it or its clients hold to a limit below the whole GPU.",
        applies=_shared,
        needs=(_need("mps.control", MpsFact),),
        judge=_mps,
        proves=False,
        supports=(Tier.SOFT,),
        required_for=(),
    ),
    *(
        Check(
            id=ident,
            claim=claim,
            applies=_shared,
            needs=(_need("mps.control", MpsFact),),
            judge=judge,
            proves=False,
            supports=(Tier.SOFT,),
            required_for=(),
        )
        for ident, claim, judge in (
            ("MPS-02", "No client of MPS can leave it and use the GPU on its own.", _no_way_around),
            ("MPS-03", "Where MPS runs, every process on the GPU is its client.", _all_clients),
        )
    ),
)
