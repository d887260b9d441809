"""DRV-01, THR-01, MPS-01: whether an NVIDIA GPU's partitions keep apart in practice."""

from __future__ import annotations

from alloy_agent.conformance.checks.base import (
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
    """A client of an MPS server, and what it limits itself to."""

    pid: int
    thread_percentage: float | None = None


class MpsFact(Shape, frozen=True, kw_only=True):
    """The MPS control daemon of the host."""

    running: bool
    pid: int = 0
    thread_percentage: float | None = None
    pinned_memory: str | None = None
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
    return _mig(partition, device) and not device.simulated


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


def _mps(case: Case) -> Outcome:
    mps = case.get("mps.control", MpsFact)
    expected = "each client limited below the whole GPU, by the server or by itself"
    if not mps.running:
        return not_applicable("no MPS control daemon runs")
    open_ended = [
        f"process {client.pid}"
        for client in mps.clients
        if (mps.thread_percentage or 100) >= 100 and (client.thread_percentage or 100) >= 100
    ]
    if open_ended:
        return failed(expected, f"no limit for {named(open_ended)}")
    told = "nothing" if mps.thread_percentage is None else f"{mps.thread_percentage:g} %"
    return passed(expected, f"daemon {mps.pid} was told {told}, {len(mps.clients)} clients")


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
        supports=HARD,
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
)
