"""`alloy-agent devices`: what is on this node, how it can be cut, and who else manages it."""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING, Any

from alloy_agent.cli import output
from alloy_agent.cli.output import Column

if TYPE_CHECKING:
    from alloy_agent.daemon.documents import DevicesDocument, DeviceView
    from alloy_agent.model import Device, Profile


def add(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser("devices", help="show devices, partitions, profiles and owners")
    parser.add_argument("--json", action="store_true", help="print the document")
    parser.set_defaults(run=run)


def run(arguments: Namespace) -> int:
    """Print devices, partitions, legal profiles, topology and owners."""
    from alloy_agent.cli.sources import open_node

    with open_node(arguments) as node:
        document = node.devices()
    if arguments.json:
        output.write_json(document)
    else:
        show(document)
    return 0


def show(document: DevicesDocument) -> None:
    """Print a devices document for people."""
    from alloy_agent.daemon.documents import device_views

    views = device_views(document)
    if not views:
        output.write("no devices: see 'alloy-agent doctor', or add simulated ones with --fake")
    else:
        _show_devices(views)
        _show_partitions(views)
        _show_profiles(views)
        _show_links(views)
    for owner in document.owners:
        output.paragraph(f"also managed by {owner.name}: {owner.evidence}", "  ")
    for fault in document.faults:
        output.paragraph(f"fault on {fault.device}: {fault.kind}: {fault.reason}", "  ")
    for worker in document.workers:
        if not worker.alive:
            output.paragraph(f"worker {worker.backend} is down: {worker.reason}", "  ")
    for line in document.notes:
        output.note(line)


def _show_devices(views: tuple[DeviceView, ...]) -> None:
    columns = (
        Column("DEVICE", flexible=True),
        Column("MODEL", flexible=True),
        Column("MEMORY", right=True),
        Column("SLICES", right=True),
        Column("NUMA", right=True),
        Column("STATE", flexible=True),
        Column("BEST TIER", flexible=True),
    )
    rows = [
        (
            v.device.id,
            v.device.model + (" (simulated)" if v.device.simulated else ""),
            _size(v.device.memory_bytes),
            f"{v.device.slices} {v.device.slice_name}",
            "-" if v.device.numa_node is None else str(v.device.numa_node),
            _state(v.device),
            _tiers(v.device),
        )
        for v in views
    ]
    output.table(columns, rows)


def _size(memory_bytes: int | None) -> str:
    from alloy_agent.daemon.documents import size_text

    return size_text(memory_bytes)


def _state(device: Device) -> str:
    """Return the condition of a device, its modes and its fault note in few words."""
    parts = [] if device.condition == "ok" else [f"{device.condition}: {device.condition_reason}"]
    for mode in device.modes:
        pending = f" (pending {mode.pending})" if mode.pending else ""
        parts.append(f"{mode.kind}={mode.current}{pending}")
    if device.fault_note:
        parts.append(device.fault_note)
    return ", ".join(parts) or "ok"


def _tiers(device: Device) -> str:
    return ", ".join(f"{limit.way}: {limit.tier}" for limit in device.tier_limits) or "-"


def _show_partitions(views: tuple[DeviceView, ...]) -> None:
    from alloy_agent.daemon.documents import span

    partitions = [p for v in views for p in v.partitions]
    output.write("")
    if not partitions:
        output.write("no partitions")
        return
    columns = (
        Column("PARTITION", flexible=True),
        Column("GEN", right=True),
        Column("AT", right=True),
        Column("MEMORY", right=True),
        Column("TIER"),
        Column("TENANT", flexible=True),
        Column("MADE BY"),
    )
    rows = [
        (
            p.id,
            str(p.generation),
            span(p.start, p.size),
            _size(p.memory_bytes),
            p.tier or "-",
            p.tenant or "-",
            "alloy" if p.managed else "others",
        )
        for p in partitions
    ]
    output.table(columns, rows)


def _show_profiles(views: tuple[DeviceView, ...]) -> None:
    """Print the legal profiles once for all devices that offer the same ones."""
    groups: dict[tuple[str, tuple[Profile, ...]], list[str]] = {}
    for view in views:
        if view.device.profiles:
            key = (view.device.model, view.device.profiles)
            groups.setdefault(key, []).append(view.device.id)
    columns = (
        Column("PROFILE", flexible=True),
        Column("SIZE", right=True),
        Column("MEMORY", right=True),
        Column("UNITS", right=True),
        Column("MAX", right=True),
        Column("STARTS", flexible=True),
    )
    for (model, profiles), ids in groups.items():
        output.write("")
        output.write(f"profiles of {model} ({_many(ids)})")
        rows = [
            (
                p.name,
                str(p.size),
                _size(p.memory_bytes),
                "-" if p.compute_units is None else str(p.compute_units),
                str(p.max_count),
                _starts(p.starts),
            )
            for p in profiles
        ]
        output.table(columns, rows)


def _many(ids: list[str]) -> str:
    return ids[0] if len(ids) == 1 else f"{len(ids)} devices"


def _starts(starts: tuple[int, ...]) -> str:
    """Return starts as a list, or as a range where every slice is one."""
    if len(starts) > 3 and starts == tuple(range(starts[0], starts[-1] + 1)):
        return f"{starts[0]}-{starts[-1]}"
    return " ".join(str(s) for s in starts)


def _show_links(views: tuple[DeviceView, ...]) -> None:
    """Print the topology: for each device its peers, by kind of link."""
    lines = []
    for view in views:
        kinds: dict[str, list[str]] = {}
        for link in view.device.links:
            kinds.setdefault(link.kind, []).append(link.peer)
        for kind, peers in kinds.items():
            shown = ", ".join(peers) if len(peers) <= 2 else f"{len(peers)} peers"
            lines.append(f"  {view.device.id}  {kind}  {shown}")
    if lines:
        output.write("")
        output.write("links")
        for line in lines:
            output.paragraph(line, "    ")
