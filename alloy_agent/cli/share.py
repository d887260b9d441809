"""`alloy-agent share`: starts a command on a shared device, and shows how shared devices stand."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

from alloy_agent.cli import output
from alloy_agent.errors import ConfigError


def add(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser("share", help="share a device under rate control; show shares")
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    status = actions.add_parser("status", help="how every shared device stands")
    status.add_argument("--json", action="store_true", help="print the document")
    status.set_defaults(run=run_status)
    start = actions.add_parser(
        "run",
        help="start a command on a shared device",
        usage="alloy-agent share run [-h] (--production | --opportunistic) [--name NAME]"
        " [--weight W] [--budget PERCENT] DEVICE -- COMMAND [ARGUMENT ...]",
    )
    role = start.add_mutually_exclusive_group(required=True)
    role.add_argument("--production", action="store_true", help="it keeps its solo speed")
    role.add_argument("--opportunistic", action="store_true", help="it gets what is left")
    start.add_argument("--name", help="name of the tenant (default: role and pid)")
    start.add_argument("--weight", type=float, default=1.0, help="share among the opportunistic")
    start.add_argument("--budget", type=float, metavar="PERCENT", help="loss allowed to production")
    start.add_argument("device", metavar="DEVICE", help="device id, or 'emulated'")
    start.set_defaults(run=run_start)


def share_root(arguments: Namespace) -> Path:
    """Return the folder of all shared devices."""
    from alloy_agent.cli.sources import settings_of

    return Path(settings_of(arguments).socket_path).parent / "share"


def run_status(arguments: Namespace) -> int:
    """Print every shared device."""
    from alloy_agent.conformance.gate.keeper import statuses

    found = statuses(share_root(arguments))
    if arguments.json:
        output.write_json({"schema": "alloy.share/v1", "devices": list(found)})
        return 0
    if not found:
        output.write("no device is shared now")
    for entry in found:
        _show(entry)
    return 0


def _show(entry: dict[str, Any]) -> None:
    loss = entry["loss_ratio"]
    output.write(
        f"{entry['device']}: {entry['stage']}, production loses"
        f" {'nothing measured' if loss is None else f'{100 * loss:.1f} %'},"
        f" {100 * entry['lent_ratio']:.1f} % of the device is lent,"
        f" audit: {entry['answer']} {entry['reason']}".rstrip()
    )
    for tenant in entry["tenants"]:
        state = tenant["trouble"] or ("frozen" if tenant["frozen"] else "running")
        output.write(
            f"  {tenant['name']} {tenant['role']} weight {tenant['weight']:g}:"
            f" {tenant['processes']} processes, {tenant['launched']} launches,"
            f" {tenant['device_s']:.1f} s of device time, {state}"
        )


def run_start(arguments: Namespace) -> int:
    """Join the device and turn into the command."""
    from alloy_agent.cli.execute import become
    from alloy_agent.cli.sources import require_root
    from alloy_agent.conformance.gate.keeper import Join, join

    argv = arguments.tail
    if not argv:
        raise ConfigError("share run: no command given", cure="write it behind '--'")
    if "/" in arguments.device or arguments.device.startswith("."):
        raise ConfigError(f"share run: {arguments.device!r} is no device")
    require_root("share run")
    role = "production" if arguments.production else "opportunistic"
    name = arguments.name or f"{role}-{os.getpid()}"
    group, procs = _own_cgroup(arguments.device, name) if arguments.opportunistic else ("", None)
    request = Join(
        name=name,
        role=role,
        pid=os.getpid(),
        weight=arguments.weight,
        cgroup=group,
        budget_ratio=arguments.budget / 100.0 if arguments.budget is not None else None,
    )
    environment = join(arguments.device, share_root(arguments), request)
    if procs is not None:  # after the keeper was started: it must not be frozen with its tenant
        procs.write_text("0\n", encoding="ascii")
    preload = " ".join(filter(None, (environment["LD_PRELOAD"], os.environ.get("LD_PRELOAD"))))
    sys.stdout.flush()
    return become(argv, {**os.environ, **environment, "LD_PRELOAD": preload})


def _own_cgroup(device: str, name: str) -> tuple[str, Path | None]:
    """Make a v2 cgroup that can be frozen; return its path and its `cgroup.procs`, or nothing."""
    from alloy_agent.host.cgroups import detect

    tree = detect().unified
    if tree is None:
        output.note("no v2 cgroup tree: this tenant cannot be frozen if its gate fails")
        return "", None
    path = f"alloy-share/{device}/{name}"
    folder = Path(tree.folder(path))
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        output.note(f"no cgroup for this tenant, it cannot be frozen: {exc}")
        return "", None
    return path, folder / "cgroup.procs"
