"""MEM-04, MEM-06: the device memory caps of shares, below the tenant; one claim for all vendors.

A cap is a kernel's or a driver's: `dmem.max` of a cgroup, or the driver's own limit on a cgroup.
Both are read back; that a cap was asked for is nothing. MEM-06 looks at the share's own cgroup,
MEM-04 at the cgroups that its tenants are really in: a cap on a cgroup that nobody is in caps
nobody. Together they are what makes a share more than soft in memory; in compute it stays soft,
and the report lists what stays open there.
"""

from __future__ import annotations

from alloy_agent.conformance.checks.base import (
    Case,
    Check,
    Need,
    Outcome,
    counted,
    failed,
    named,
    passed,
    size,
)
from alloy_agent.conformance.checks.shapes import CapFact, MemoryFact
from alloy_agent.model import Device, Partition, Share, Tier, Vendor

CAPPED = (Tier.ENFORCED, Tier.SOFT)
VENDORS = frozenset({Vendor.NVIDIA, Vendor.AMD})
ENFORCERS = frozenset({"driver", "dmem"})


def _share(partition: Partition, device: Device) -> bool:
    """Return whether it is a share whose tenants are in cgroups: simulated ones are in none."""
    shared = partition.share is not Share.EXCLUSIVE
    return shared and device.vendor in VENDORS and not device.simulated


def _uncapped(case: Case) -> str:
    return "no memory cap was granted" if case.partition.memory_bytes is None else ""


def _tenants(case: Case) -> Outcome:
    caps = case.get("cgroup.device_memory", tuple[CapFact, ...])
    wanted = case.partition.memory_bytes or 0
    expected = f"at most {size(wanted)} binds every tenant's cgroup"
    loose = [
        f"{cap.cgroup}: {size(cap.ceiling_bytes)}"
        for cap in caps
        if cap.ceiling_bytes is None or cap.ceiling_bytes > wanted
    ]
    if loose:
        return failed(expected, named(loose), "the cap is not in force")
    return passed(expected, counted(len(caps), "cgroup", "cgroups"))


def _own(case: Case) -> Outcome:
    memory = case.get("partition.memory", MemoryFact)
    expected = f"{size(case.partition.memory_bytes)} enforced below the tenant"
    observed = f"{size(memory.limit_bytes)} by {memory.enforced_by}"
    if memory.enforced_by not in ENFORCERS or memory.limit_bytes != case.partition.memory_bytes:
        return failed(expected, observed)
    return passed(expected, f"{observed}, {size(memory.used_bytes)} in use")


CHECKS: tuple[Check, ...] = (
    Check(
        id="MEM-04",
        claim="The kernel or the driver caps the device memory of the share's tenants.",
        applies=_share,
        needs=(Need(name="cgroup.device_memory", shape=tuple[CapFact, ...]),),
        judge=_tenants,
        exempt=_uncapped,
        about_tenant=True,
        proves=False,
        supports=CAPPED,
        required_for=(Tier.ENFORCED,),
    ),
    Check(
        id="MEM-06",
        claim="The memory cap of a share is in force on its cgroup, below the tenant.",
        applies=_share,
        needs=(Need(name="partition.memory", shape=MemoryFact),),
        judge=_own,
        exempt=_uncapped,
        supports=CAPPED,
        required_for=CAPPED,
        proves=False,
    ),
)
