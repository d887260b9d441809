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
    parser.add_argument(
        "--environment",
        metavar="PARTITION",
        help="print the variables of a tenant of this partition, as an environment file",
    )
    parser.set_defaults(run=run)


def run(arguments: Namespace) -> int:
    """Print devices, partitions, legal profiles, topology and owners."""
    from alloy_agent.cli.sources import open_node

    with open_node(arguments) as node:
        document = node.devices()
        said = frozenset(getattr(node, "notes", ()))  # a node of our own says them at its end
    if arguments.environment:
        output.write(environment_file(document, arguments.environment))
    elif arguments.json:
        output.write_json(document)
    else:
        show(document, said)
    return 0


def environment_file(document: DevicesDocument, name: str) -> str:
    """Return a partition's variables, for `EnvironmentFile=` of systemd or `--env-file`.

    Names that a tenant must not have stand in a comment: set to nothing they would still be read.

    Raises:
        ConfigError: The name means no partition, or several.
    """
    from alloy_agent.daemon.documents import device_views
    from alloy_agent.planner.names import find_partition

    entry = find_partition(name, [p for v in device_views(document) for p in v.partitions])
    lines = [f"{key}={value}" for key, value in sorted(entry.environment.items())]
    unset = [key for key in entry.unset if key not in entry.environment]
    if unset:
        lines.append(f"# unset: {' '.join(unset)}")
    return "\n".join(lines)


def show(document: DevicesDocument, said: frozenset[str] = frozenset()) -> None:
    """Print a devices document for people, without the notes that are said anyway."""
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
        if line not in said:
            output.note(line)


def _show_devices(views: tuple[DeviceView, ...]) -> None:
    columns = (
        Column("#", right=True),
        Column("DEVICE", flexible=True),
        Column("MODEL", flexible=True),
        Column("MEMORY", right=True),
        Column("SLICES", right=True),
        Column("STATE", flexible=True),
    )
    rows = [
        (
            str(v.device.index),
            v.device.id,
            v.device.model,
            _size(v.device.memory_bytes),
            str(v.device.slices),
            _state(v.device),
        )
        for v in views
    ]
    output.table(columns, rows)
    if len({v.device.index for v in views}) < len(views):
        output.write("# counts for each vendor alone, and for all simulated devices together")


def _size(memory_bytes: int | None) -> str:
    from alloy_agent.daemon.documents import size_text

    return size_text(memory_bytes)


def _state(device: Device) -> str:
    """Return the condition of a device, its modes and its fault note in few words."""
    parts = [] if device.condition == "ok" else [f"{device.condition}: {device.condition_reason}"]
    if device.simulated:
        parts.append("simulated")
    for mode in device.modes:
        pending = f" (pending {mode.pending})" if mode.pending else ""
        parts.append(f"{mode.kind}={mode.current}{pending}")
    if device.fault_note:
        parts.append(device.fault_note)
    return ", ".join(parts) or "ok"


def _tiers(device: Device) -> str:
    return ", ".join(f"{limit.way} {limit.tier}" for limit in device.tier_limits) or "none"


def _show_partitions(views: tuple[DeviceView, ...]) -> None:
    from alloy_agent.daemon.documents import span
    from alloy_agent.planner.names import short_names, shortened

    names = short_names(view.device.id for view in views)
    partitions = [p for v in views for p in v.partitions]
    output.write("")
    if not partitions:
        output.write("no partitions")
        return
    columns = (
        Column("PARTITION"),
        Column("GEN", right=True),
        Column("AT", right=True),
        Column("MEMORY", right=True),
        Column("TIER"),
        Column("TENANT", flexible=True),
        Column("MADE BY"),
    )
    rows = [
        (
            str(p.id),
            str(p.generation or "-"),
            span(p.start, p.size),
            _size(p.memory_bytes),
            p.tier or "-",
            p.tenant or "-",
            p.made_by,
        )
        for p in partitions
    ]
    if not output.fits(columns, rows):
        rows = [(shortened(row[0], names), *row[1:]) for row in rows]
    output.table(columns, rows)


def _show_profiles(views: tuple[DeviceView, ...]) -> None:
    """Print the legal profiles once for all devices that offer the same ones."""
    groups: dict[tuple[str, str, tuple[Profile, ...]], list[str]] = {}
    for view in views:
        key = (view.device.model, _tiers(view.device), view.device.profiles)
        groups.setdefault(key, []).append(view.device.id)
    columns = (
        Column("PROFILE", flexible=True),
        Column("SIZE", right=True),
        Column("MEMORY", right=True),
        Column("UNITS", right=True),
        Column("MAX", right=True),
        Column("STARTS", flexible=True),
    )
    for (model, tiers, profiles), ids in groups.items():
        output.write("")
        output.paragraph(f"{model} ({_many(ids)}): best tier by {tiers}", "  ")
        if not profiles:
            continue
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
    rows = []
    for view in views:
        kinds: dict[str, list[str]] = {}
        for link in view.device.links:
            kinds.setdefault(link.kind, []).append(link.peer)
        if kinds:
            shown = "; ".join(f"{kind}: {_peers(peers, views)}" for kind, peers in kinds.items())
            rows.append((str(view.device.index), view.device.id, shown))
    if rows:
        output.write("")
        columns = (
            Column("#", right=True),
            Column("DEVICE", flexible=True),
            Column("LINKS", flexible=True),
        )
        output.table(columns, rows)


def _peers(peers: list[str], views: tuple[DeviceView, ...]) -> str:
    """Return peers by their short numbers where they are devices of this node."""
    numbers = {str(view.device.id): f"#{view.device.index}" for view in views}
    return " ".join(numbers.get(peer, peer) for peer in peers)
