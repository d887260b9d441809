"""NRN-03, NRN-04: the core configuration that was meant, and cores that nobody granted.

The tiers follow from what the driver enforces: it fences devices by their nodes, and cores by
nothing. So what is said of cores is seen from outside, or it is unknown.
"""

from __future__ import annotations

from collections.abc import Iterable

from alloy_agent.conformance.checks.base import (
    ANY_IN_FORCE,
    Case,
    Check,
    Need,
    Outcome,
    compare,
    cpu_list,
    failed,
    named,
    passed,
)
from alloy_agent.conformance.checks.shapes import ClientFact, NeuronFact
from alloy_agent.model import Device, ModeKind, Partition, Share, Vendor, Verdict

UNPROVEN = ("environment", "nothing")


def _neuron(partition: Partition, device: Device) -> bool:
    return device.vendor is Vendor.NEURON and partition.share is Share.EXCLUSIVE


def _has_choice(partition: Partition, device: Device) -> bool:
    return _neuron(partition, device) and any(m.kind is ModeKind.LNC for m in device.modes)


def _configuration(case: Case) -> Outcome:
    shown = case.get("neuron.cores", NeuronFact)
    current = next(m.current for m in case.device.modes if m.kind is ModeKind.LNC)
    layout = case.intent.of_device(case.device.id)
    wanted = layout.modes.get(ModeKind.LNC, current) if layout is not None else current
    why = "the tenant counts its cores under another configuration than it was granted"
    return compare(f"LNC {wanted}", f"LNC {shown.lnc}", why)


def _nobodys(case: Case) -> Outcome:
    clients = case.get("device.clients", tuple[ClientFact, ...])
    place = case.partition.placement
    mine = set(case.partition.units or range(place.start, place.stop))
    whole = place.size == case.device.slices
    others = [c for c in clients if not c.monitor and c.partition != case.partition.id]
    expected = f"cores {cpu_list(mine)} held by nobody but their tenant"
    intruders = [c for c in others if mine & set(c.cores) or (whole and not c.partition)]
    if intruders:
        return failed(expected, _who(intruders))
    hidden = [c for c in others if not c.partition and (not c.cores or _unproven(c))]
    if hidden:
        return Outcome(
            verdict=Verdict.UNKNOWN,
            expected=expected,
            observed=_who(hidden),
            reason="a process of nobody is on the device, and nothing proves on which cores",
        )
    return passed(expected, "nobody else")


def _unproven(client: ClientFact) -> bool:
    return client.cores_from.startswith(UNPROVEN)


def _who(clients: Iterable[ClientFact]) -> str:
    return named(
        f"{c.comm or 'process'}[{c.pid}] of {c.partition or 'nobody'}"
        + (f" on cores {cpu_list(c.cores)}" if c.cores else "")
        for c in clients
    )


CHECKS: tuple[Check, ...] = (
    Check(
        id="NRN-03",
        claim="The tenant runs under the logical core configuration that was meant.",
        applies=_has_choice,
        needs=(Need(name="neuron.cores", shape=NeuronFact),),
        judge=_configuration,
        proves=False,
        supports=ANY_IN_FORCE,
        required_for=ANY_IN_FORCE,
    ),
    Check(
        id="NRN-04",
        claim="No process of nobody, and none of another tenant, holds the partition's cores.",
        applies=_neuron,
        needs=(Need(name="device.clients", shape=tuple[ClientFact, ...], of="device"),),
        judge=_nobodys,
        proves=False,
        supports=ANY_IN_FORCE,
        required_for=ANY_IN_FORCE,
    ),
)
