"""Usage for people and for finance: JSON lines, FOCUS-shaped CSV, a table. Pure.

A row is told as it was written; nothing is merged into "one GPU fraction". FOCUS rows carry both
shares of the device in columns of their own (`x_`), cost columns stay empty without a price list,
and energy is marked as the estimate that it is through the columns for split allocations.

Source: FinOps FOCUS 1.2 column names; columns prefixed `x_` are custom ones by its rules.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

from alloy_agent.model import Value
from alloy_agent.telemetry.metering import NS, SPLIT_METHOD, UsageRow

NS_PER_HOUR: Final = 3600 * NS
LIMITS: Final = (
    "active is an estimate between samples; time that nobody measured is unobserved, not idle",
    "energy of a partition is the device's counter split by active share",
    "on shared partitions (soft) one tenant's use cannot be told from another's interference",
)
COLUMNS: Final = (
    "BillingPeriodStart", "BillingPeriodEnd", "ChargePeriodStart", "ChargePeriodEnd",
    "ChargeCategory", "ChargeClass", "ChargeDescription", "ConsumedQuantity", "ConsumedUnit",
    "PricingQuantity", "PricingUnit", "BilledCost", "EffectiveCost", "ListCost", "ContractedCost",
    "BillingCurrency", "ServiceCategory", "ServiceName", "SkuId", "SkuMeter", "ResourceId",
    "ResourceName", "ResourceType", "RegionId", "AvailabilityZone", "SubAccountId",
    "SubAccountName", "Tags", "AllocatedMethodId", "AllocatedMethodDetails",
    "AllocatedResourceId", "AllocatedResourceName", "AllocatedTags", "x_AllocatedSeconds",
    "x_UsedSeconds", "x_IdleSeconds", "x_UnobservedSeconds", "x_ComputeShare", "x_MemoryShare",
    "x_EnergyJoulesEstimated", "x_Method", "x_Soft", "x_Final", "x_Serial",
)  # fmt: skip


class UsageLine(Value, frozen=True, kw_only=True):
    """One row as JSON shows it: seconds for people, nanoseconds that add up exactly."""

    schema: str = "alloy.usage/v1"
    node: str
    row: UsageRow
    allocated_s: float
    active_s: float
    idle_s: float
    unobserved_s: float
    error_ratio_max: float  # how wrong `active` can be: what was not observed over what was had


def within(rows: Iterable[UsageRow], from_s: float, to_s: float) -> list[UsageRow]:
    """Return the rows that begin in a span of wall time, oldest first."""
    chosen = [row for row in rows if from_s <= row.start_wall_s < to_s]
    return sorted(chosen, key=lambda row: (row.start_wall_s, row.serial))


def line(row: UsageRow, node: str) -> UsageLine:
    """Return a row for JSON."""
    had = row.allocated_ns
    return UsageLine(
        node=node,
        row=row,
        allocated_s=had / 1e9,
        active_s=row.active_ns / 1e9,
        idle_s=row.idle_ns / 1e9,
        unobserved_s=row.unobserved_ns / 1e9,
        error_ratio_max=round(row.unobserved_ns / had, 6) if had else 0.0,
    )


def _time(wall_s: float) -> str:
    return datetime.fromtimestamp(wall_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _month(wall_s: float) -> tuple[str, str]:
    start = datetime.fromtimestamp(wall_s, UTC).replace(
        day=1, hour=0, minute=0, second=0, microsecond=0
    )
    following = start.replace(year=start.year + start.month // 12, month=start.month % 12 + 1)
    return start.strftime("%Y-%m-%dT%H:%M:%SZ"), following.strftime("%Y-%m-%dT%H:%M:%SZ")


def focus_row(row: UsageRow, node: str) -> dict[str, Any]:
    """Return one row by FOCUS column."""
    begin, end = _month(row.start_wall_s)
    piece = bool(row.partition)
    hours = row.allocated_ns / NS_PER_HOUR
    quantity = hours * row.size if piece else (row.energy_j or 0.0)
    unit = "Slice-Hours" if piece else "Joules"
    return {
        "BillingPeriodStart": begin,
        "BillingPeriodEnd": end,
        "ChargePeriodStart": _time(row.start_wall_s),
        "ChargePeriodEnd": _time(row.start_wall_s + row.allocated_ns / 1e9),
        "ChargeCategory": "Usage",
        "ChargeClass": "Correction" if row.kind == "correction" else "",
        "ChargeDescription": _description(row),
        "ConsumedQuantity": f"{quantity:.9g}",
        "ConsumedUnit": unit,
        "PricingQuantity": f"{quantity:.9g}",
        "PricingUnit": unit,
        "ServiceCategory": "Compute",
        "ServiceName": "Alloy partition" if piece else "Alloy device",
        "SkuId": row.profile,
        "SkuMeter": row.profile,
        "ResourceId": f"{row.partition}#{row.generation}" if piece else row.device,
        "ResourceName": row.partition or row.device,
        "ResourceType": "Accelerator partition" if piece else "Accelerator",
        "RegionId": "",
        "AvailabilityZone": node,
        "SubAccountId": row.tenant if piece else "",
        "SubAccountName": row.tenant if piece else "",
        "Tags": _tags(row),
        "AllocatedMethodId": SPLIT_METHOD if piece and row.energy_j is not None else "",
        "AllocatedMethodDetails": LIMITS[1] if piece and row.energy_j is not None else "",
        "AllocatedResourceId": row.device if piece and row.energy_j is not None else "",
        "AllocatedResourceName": row.device if piece and row.energy_j is not None else "",
        "x_AllocatedSeconds": _seconds(row.allocated_ns),
        "x_UsedSeconds": _seconds(row.active_ns),
        "x_IdleSeconds": _seconds(row.idle_ns),
        "x_UnobservedSeconds": _seconds(row.unobserved_ns),
        "x_ComputeShare": "" if row.compute_share is None else f"{row.compute_share:.6g}",
        "x_MemoryShare": "" if row.memory_share is None else f"{row.memory_share:.6g}",
        "x_EnergyJoulesEstimated": "" if row.energy_j is None else f"{row.energy_j:.6g}",
        "x_Method": row.method,
        "x_Soft": str(row.soft).lower(),
        "x_Final": str(row.final).lower(),
        "x_Serial": row.serial,
    }


def _seconds(ns: int) -> str:
    """Return nanoseconds as seconds, to the last digit: columns add up as the rows do."""
    return f"{ns // NS}.{ns % NS:09d}"


def _tags(row: UsageRow) -> str:
    """Return what else is known of a row as a JSON object, as FOCUS has it."""
    tags = {"device": row.device, "lease": row.lease}
    if row.partition:
        tags |= {"generation": str(row.generation), "note": row.note}
    return msgspec.json.encode({key: value for key, value in tags.items() if value}).decode()


def _description(row: UsageRow) -> str:
    if not row.partition:
        return f"energy of {row.device} that no partition was active for"
    shared = ", shared" if row.soft else ""
    return f"{row.profile} on {row.device}{shared}" + (f"; {row.note}" if row.note else "")


def _safe(cell: object) -> object:
    """Keep a spreadsheet from taking a name for a formula."""
    if isinstance(cell, str) and cell[:1] in ("=", "+", "-", "@", "\t", "\r"):
        return "'" + cell
    return cell


def focus(rows: Iterable[UsageRow], node: str) -> Iterator[str]:
    """Yield the lines of a FOCUS-shaped CSV file, its head first."""
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, COLUMNS, restval="", lineterminator="\n")
    writer.writeheader()
    yield buffer.getvalue()
    for row in rows:
        buffer.seek(0)
        buffer.truncate()
        writer.writerow({name: _safe(cell) for name, cell in focus_row(row, node).items()})
        yield buffer.getvalue()
