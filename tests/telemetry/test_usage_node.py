"""Usage of a real agent that is killed: what the command prints, in all its forms, adds up."""

from __future__ import annotations

import csv
import io
import json
import re
import time
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from alloy_agent.control import ControlClient
from alloy_agent.host import clock
from alloy_agent.proto import agent_pb2 as pb
from alloy_agent.telemetry import export
from alloy_agent.telemetry.ledger import CHECKPOINT_S
from tests.daemon.harness import Site, daemon, wait_for

LAYOUT = """version: v1
layouts:
  two:
    - match: {vendor: nvidia}
      mig: [1g.10gb, 2g.20gb]
"""
# What the standard calls the columns that a usage row of a piece of a device needs.
# Source: FinOps FOCUS 1.2, cost and usage data set; the columns on allocation are of its successor.
FOCUS = {
    "BillingPeriodStart", "BillingPeriodEnd", "ChargePeriodStart", "ChargePeriodEnd",
    "ChargeCategory", "ChargeClass", "ResourceId", "ResourceName", "ResourceType",
    "ServiceCategory", "ServiceName", "SkuId", "SkuMeter", "ConsumedQuantity", "ConsumedUnit",
    "PricingQuantity", "PricingUnit", "SubAccountId", "SubAccountName", "RegionId",
    "AvailabilityZone", "Tags", "AllocatedMethodId", "AllocatedMethodDetails",
    "AllocatedResourceId", "AllocatedResourceName", "AllocatedTags",
}  # fmt: skip


def access(site: Site, partition: str, tenant: str, *, release: bool = False) -> None:
    """Bind a tenant to a partition of a running daemon, or let it go."""
    client = ControlClient.connect(site.state / "agent.sock")
    assert client is not None
    wish = pb.Access(partition=partition, tenant=tenant, release=release)
    client.document(pb.BrainMessage(access=wish))
    client.close()


def rows(site: Site, *words: str) -> list[dict[str, Any]]:
    """Return the rows of partitions, as `usage --format json` prints them."""
    done = site.run("usage", "--format", "json", *words)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line)["row"] for line in done.stdout.splitlines()]
    return [row for row in found if row["partition"]]


def measured(site: Site, tenant: str) -> int:
    """Return what a tenant's rows say was measured, closed ones and the one that goes on."""
    if not (site.state / "usage/open.json").exists():
        return 0
    return total(rows(site, "--tenant", tenant), "active_ns", "idle_ns")


def total(found: list[dict[str, Any]], *names: str) -> int:
    """Return a sum over rows and columns."""
    return sum(row[name] for row in found for name in names)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    """Give a node with one simulated H100 and nothing of the host."""
    return Site(tmp_path, "1xH100-SXM5-80GB")


@pytest.mark.slow
def test_usage_adds_up_over_a_kill_and_says_the_same_in_every_form(
    site: Site, tmp_path: Path
) -> None:
    """Killed in the middle: exact sums, what was measured is kept, the gap is unobserved."""
    layout = tmp_path / "layout.yaml"
    layout.write_text(LAYOUT)
    environment = {"ALLOY_LAYOUT_FILE": str(layout)}
    begun_s = clock.boottime_s()
    with daemon(site, **environment) as running:
        wait_for("the partitions", lambda: len(site.partitions()) == 2)
        small, large = sorted(p["id"] for p in site.partitions())
        access(site, small, "acme")
        access(site, large, "bolt")
        wait_for(
            "a checkpoint of what was measured",
            lambda: measured(site, "acme") > 0 and measured(site, "bolt") > 0,
        )
        running.kill()
        killed_s = clock.boottime_s()
    # What is on disk is at most CHECKPOINT_S old, and all that a crash may lose.
    assert CHECKPOINT_S <= 10.0
    before = {tenant: measured(site, tenant) for tenant in ("acme", "bolt")}
    time.sleep(3.0)  # nobody measures
    up_s = clock.boottime_s()
    with daemon(site, **environment):
        wait_for("going on", lambda: measured(site, "acme") > before["acme"])
        access(site, small, "acme", release=True)
        wait_for(
            "the row", lambda: [r["final"] for r in rows(site, "--tenant", "acme")][-1:] == [True]
        )
        found = rows(site)
    after_s = clock.boottime_s()

    for row in found:
        parts = row["active_ns"] + row["idle_ns"] + row["unobserved_ns"]
        assert parts == row["allocated_ns"]
    for tenant in ("acme", "bolt"):
        mine = [row for row in found if row["tenant"] == tenant]
        assert total(mine, "idle_ns", "active_ns") >= before[tenant], "measured is kept"
        gap_s = total(mine, "unobserved_ns") / 1e9
        assert gap_s >= up_s - killed_s, "the time without an agent is unobserved"
        assert total(mine, "allocated_ns") / 1e9 <= after_s - begun_s
    _same_in_every_form(site, [row for row in found if row["tenant"] == "acme"])


def _same_in_every_form(site: Site, found: list[dict[str, Any]]) -> None:
    """Fail unless table, JSON and FOCUS tell the same of a tenant whose rows are closed."""
    span = ("--from", "1h", "--tenant", "acme")
    text = site.run("usage", "--format", "focus", *span).stdout
    lines = list(csv.DictReader(io.StringIO(text)))
    assert set(export.COLUMNS) >= FOCUS
    assert {c for c in lines[0] if not c.startswith("x_")} >= FOCUS
    assert len(lines) == len(found)
    for line, row in zip(lines, found, strict=True):
        seconds = {
            name: Decimal(line[f"x_{name}Seconds"])
            for name in ("Allocated", "Used", "Idle", "Unobserved")
        }
        assert seconds["Allocated"] * 10**9 == row["allocated_ns"]
        assert seconds["Used"] + seconds["Idle"] + seconds["Unobserved"] == seconds["Allocated"]
        assert line["ResourceId"] == f"{row['partition']}#{row['generation']}"
        assert line["ChargePeriodStart"] <= line["ChargePeriodEnd"]
        assert json.loads(line["Tags"])["device"] == row["device"]
        assert line["BilledCost"] == line["ListCost"] == ""
        split = bool(line["x_EnergyJoulesEstimated"])
        assert bool(line["AllocatedMethodId"]) == bool(line["AllocatedResourceName"]) == split
    table = site.run("usage", *span).stdout
    had_s = total(found, "allocated_ns") / 1e9
    told = re.search(r"acme: had ([\d.]+) (s|min)", table)
    assert told is not None
    assert abs(float(told[1]) * (60 if told[2] == "min" else 1) - had_s) <= 0.01 * had_s
    assert site.run("usage", "--from", "5m", "--to", "10m").returncode == 2
    assert rows(site, "--to", "1h") == []
