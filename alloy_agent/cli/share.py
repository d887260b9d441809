"""`alloy-agent share`: starts a command on a shared device, and shows how shared devices stand."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from alloy_agent.cli import output
from alloy_agent.errors import AlloyError, BackendError, ConfigError

if TYPE_CHECKING:
    from alloy_agent.conformance.keeper.messages import (
        JoinedDocument,
        ShareDocument,
        ShareView,
        TenantView,
    )
    from alloy_agent.conformance.keeper.names import DeviceName, TenantName
    from alloy_agent.daemon.remote import RemoteNode

EMULATED = "emulated"


def add(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser("share", help="share a device under rate control; show shares")
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    status = actions.add_parser("status", help="how every shared device stands")
    status.add_argument("--json", action="store_true", help="print the document")
    status.set_defaults(run=run_status)
    _add_run(actions)
    policy = actions.add_parser("policy", help="what a shared device goes by, over restarts")
    policy.add_argument("device", metavar="DEVICE", help="device id, or 'emulated'")
    policy.add_argument(
        "--budget", type=float, metavar="PERCENT", help="loss allowed to production"
    )
    policy.add_argument("--hold", action="store_true", help="no neighbour is let through")
    policy.add_argument("--json", action="store_true", help="print the document")
    policy.set_defaults(run=run_policy)


def _add_run(actions: Any) -> None:
    start = actions.add_parser(
        "run",
        help="start a command on a shared device",
        usage="alloy-agent share run [-h] (--production | --opportunistic) [--name NAME]\n"
        "       [--weight W] [--budget PERCENT] DEVICE -- COMMAND [ARGUMENT ...]",
    )
    role = start.add_mutually_exclusive_group(required=True)
    role.add_argument("--production", action="store_true", help="it keeps its solo speed")
    role.add_argument("--opportunistic", action="store_true", help="it gets what is left")
    start.add_argument("--name", help="name of the tenant (default: role and pid)")
    start.add_argument("--weight", type=float, default=1.0, help="share among the opportunistic")
    start.add_argument("--budget", type=float, metavar="PERCENT", help="loss allowed to production")
    start.add_argument(
        "device", metavar="DEVICE", help="device id, a shared partition of it, or 'emulated'"
    )
    start.set_defaults(run=run_start)


# --- status -----------------------------------------------------------------------------------


def run_status(arguments: Namespace) -> int:
    """Print every shared device."""
    document, closed = _statuses(arguments)
    if closed and not document.devices:
        raise ConfigError(closed, cure="run it as root")
    if closed:
        output.note(closed)
    if arguments.json:
        import msgspec

        output.write_json(msgspec.to_builtins(document))
        return 0
    lines = [line for view in document.devices for line in lines_of(view)]
    lines += _vacant(arguments, {view.device for view in document.devices})
    for line in lines or ["no device is shared: apply a layout with `shared: {...}`"]:
        output.write(line)
    return 0


def _statuses(arguments: Namespace) -> tuple[ShareDocument, str]:
    """Return what the keepers tell; they are asked by their files, with a daemon or without."""
    from alloy_agent.cli.sources import settings_of
    from alloy_agent.conformance.keeper.messages import ShareDocument
    from alloy_agent.conformance.shares import SharesOnHost
    from alloy_agent.daemon.addresses import share_root

    views, closed = SharesOnHost(share_root(settings_of(arguments))).look()
    return ShareDocument(devices=views), closed


def _vacant(arguments: Namespace, kept: set[str]) -> list[str]:
    """Return a line for each device that is cut into shares and that no keeper keeps."""
    from collections import Counter

    from alloy_agent.cli.sources import open_node
    from alloy_agent.daemon.documents import device_views

    shares: dict[str, Counter[str]] = {}
    try:
        with open_node(arguments) as node:
            for view in device_views(node.devices()):
                found = Counter(p.share for p in view.partitions if p.share != "exclusive")
                if found and view.device.id not in kept:
                    shares[view.device.id] = found
    except AlloyError as exc:  # what the keepers tell stands for itself
        output.note(f"devices without a tenant are not known: {exc}")
    return [
        f"{device}: no tenant yet; it has "
        + ", ".join(f"{count} {role}" for role, count in sorted(found.items(), reverse=True))
        for device, found in shares.items()
    ]


def lines_of(view: ShareView) -> list[str]:
    """Return one shared device as lines of a table."""
    keeper = "the agent" if view.keeper == "agent" else "a keeper of its own"
    loss = "not measured" if view.loss_ratio is None else f"{100 * view.loss_ratio:.1f} %"
    lines = [
        f"{view.device}: {view.stage}, kept by {keeper}"
        f" ({100 * view.cpu_ratio:.1f} % of a core){' · emulated' if view.emulated else ''}",
        f"  production loses {loss} of {100 * view.budget_ratio:g} % allowed;"
        f" {100 * view.lent_ratio:.1f} % of the device is lent",
        f"  audit: {_verdict(view)}",
    ]
    if view.not_in_force:
        lines.append(f"  NOT IN FORCE: the agent's policy: {view.not_in_force}")
    if view.held or view.throttled:
        lines.append(f"  {view.held or f'windows are not comparable: {view.throttled}'}")
    lines.append(
        f"  {'TENANT':<20} {'ROLE':<14} {'WEIGHT':>6} {'PROCS':>5} {'LAUNCHES':>10}"
        f" {'DEVICE S':>9} {'LEASE':<6} STATE"
    )
    lines += [_tenant_line(tenant) for tenant in view.tenants]
    lines += [f"  bypass: {text}" for text in view.bypass]
    return lines


def _verdict(view: ShareView) -> str:
    span = ""
    if view.lower_ratio is not None and view.upper_ratio is not None:
        span = f", slowdown {100 * view.lower_ratio:.2f} to {100 * view.upper_ratio:.2f} %"
    reason = f" ({view.reason})" if view.reason else ""
    left_out = f", {view.skipped} not judged" if view.skipped else ""
    return (
        f"{view.answer}{reason}{span}, e-value {view.e_value:.3g} after {view.windows} windows"
        f"{left_out}"
    )


def _tenant_line(tenant: TenantView) -> str:
    state = "frozen" if tenant.frozen else tenant.trouble or "running"
    lease = "-" if tenant.role == "production" else "valid" if tenant.leased else "none"
    return (
        f"  {tenant.name:<20} {tenant.role:<14} {tenant.weight:>6g} {tenant.processes:>5}"
        f" {tenant.launched:>10} {tenant.device_s:>9.1f} {lease:<6} {state}"
    )


# --- policy -----------------------------------------------------------------------------------


def run_policy(arguments: Namespace) -> int:
    """Set what a shared device goes by; the agent keeps it."""
    import json

    from alloy_agent.cli.sources import require_root
    from alloy_agent.proto import agent_pb2 as pb

    require_root("share policy")
    daemon = _daemon(arguments)
    if daemon is None:
        raise ConfigError(
            "share policy: no agent runs", cure=f"start one: {_run_command(arguments)}"
        )
    wish = pb.SetRatePolicy(
        device=arguments.device,
        loss_budget_ratio=_ratio(arguments.budget) or 0.0,
        enabled=not arguments.hold,
        session=f"uid {os.getuid()}",
    )
    with daemon:
        body = daemon.rate_policy(wish)
    if arguments.json:
        output.write_json(json.loads(body))
        return 0
    from alloy_agent.conformance.rate import RateLimits

    own = f"{100 * RateLimits().budget_ratio:g} %, the node's own budget"
    budget = own if arguments.budget is None else f"{arguments.budget:g} %"
    held = "; no neighbour is let through" if arguments.hold else ""
    device = json.loads(body)["device"]
    output.write(f"{device}: production may lose {budget}{held}")
    output.write("a smaller budget of a tenant or a claim on it holds while that is there")
    return 0


# --- run --------------------------------------------------------------------------------------


def run_start(arguments: Namespace) -> int:
    """Join the device, through the agent where one runs, and turn into the command."""
    from alloy_agent.cli.execute import become, join, prove_fenced
    from alloy_agent.cli.sources import require_root
    from alloy_agent.conformance.keeper.names import tenant_name
    from alloy_agent.model import Access

    argv = arguments.tail
    if not argv:
        raise ConfigError("share run: no command given", cure="write it behind '--'")
    require_root("share run")
    _check(arguments)
    if arguments.name is not None:
        tenant_name(arguments.name)
    daemon = _daemon(arguments)
    if daemon is None:
        joined = _join_alone(arguments)
        output.note(f"no agent runs: {joined.device} has a keeper of its own while it is shared")
    else:
        with daemon:
            joined = _join_agent(arguments, daemon)
        output.note(
            f"{joined.tenant} shares {joined.partition or joined.device}, kept by the agent"
        )
    for line in joined.notes:
        output.note(line)
    # after the keeper was started: it must not be frozen with its tenant
    join(Access(cgroup_procs=joined.cgroup_procs))
    if joined.fence:
        prove_fenced(joined.fence)
    mine = {key: value for key, value in os.environ.items() if key not in joined.unset}
    gates = (joined.environment["LD_PRELOAD"], os.environ.get("LD_PRELOAD"))
    sys.stdout.flush()
    sys.stderr.flush()
    environment = {**mine, **joined.environment, "LD_PRELOAD": " ".join(filter(None, gates))}
    return become(argv, environment)


def _check(arguments: Namespace) -> None:
    if not 0.0 < arguments.weight <= 1000.0:
        raise ConfigError(f"share run: weight {arguments.weight:g}", cure="give 0.001 to 1000")
    _ratio(arguments.budget)


def _ratio(percent: float | None) -> float | None:
    if percent is None:
        return None
    if not 0.0 < percent <= 50.0:
        raise ConfigError(f"budget {percent:g} %", cure="give more than 0 and at most 50")
    return percent / 100.0


def _daemon(arguments: Namespace) -> RemoteNode | None:
    from alloy_agent.cli.sources import quiet_logs, settings_of
    from alloy_agent.daemon.addresses import may_answer

    settings = settings_of(arguments)
    quiet_logs(arguments)
    if not may_answer(settings):
        return None
    from alloy_agent.daemon.remote import find_daemon

    return find_daemon(settings, write=True)


def _run_command(arguments: Namespace) -> str:
    """Return how the agent of this command's state is started."""
    from alloy_agent.cli.sources import settings_of
    from alloy_agent.daemon.addresses import command_line

    return command_line(settings_of(arguments), "run")


def _role(arguments: Namespace) -> str:
    return "production" if arguments.production else "opportunistic"


def _name(arguments: Namespace) -> str:
    if arguments.name is None:
        return f"{_role(arguments)}-{os.getpid()}"
    return str(arguments.name)


def _join_agent(arguments: Namespace, daemon: RemoteNode) -> JoinedDocument:
    from alloy_agent.proto import agent_pb2 as pb

    share = pb.SHARE_PRODUCTION if arguments.production else pb.SHARE_OPPORTUNISTIC
    return daemon.join(
        pb.Join(
            subject=arguments.device,
            tenant=_name(arguments),
            share=share,
            weight=arguments.weight,
            loss_budget_ratio=_ratio(arguments.budget) or 0.0,
            pid=os.getpid(),
        )
    )


def _join_alone(arguments: Namespace) -> JoinedDocument:
    """Join under a keeper of the device's own, which this starts where there is none."""
    from alloy_agent.cli.sources import settings_of
    from alloy_agent.conformance.gate.build import library
    from alloy_agent.conformance.keeper import client
    from alloy_agent.conformance.keeper.messages import Join, JoinedDocument
    from alloy_agent.conformance.keeper.names import device_name, tenant_name
    from alloy_agent.daemon.addresses import share_root
    from alloy_agent.daemon.admission import admit_alone

    settings = settings_of(arguments)
    root, device = share_root(settings), device_name(_device_alone(arguments))
    client.folder_of(root, device)  # is it too deep for sockets?
    name = tenant_name(_name(arguments))
    admit_alone(settings, device, name)
    libraries = Path(settings.state_dir) / "lib"
    library(libraries)  # a host that cannot build it is told so before anything is made
    group, procs = _own_group(root, device, name) if arguments.opportunistic else ("", ())
    request = Join(
        name=name,
        role=_role(arguments),
        pid=os.getpid(),
        weight=arguments.weight,
        cgroup=group,
        budget_ratio=_ratio(arguments.budget),
    )
    try:
        environment = client.join(device, root, libraries, request)
    except BackendError:  # nobody answers; a keeper that refuses tidies up by itself
        _ungroup(group)
        raise
    return JoinedDocument(
        device=device, partition="", tenant=name, environment=environment, cgroup_procs=procs
    )


def _device_alone(arguments: Namespace) -> str:
    """Return the device that is meant, without an agent; it is there and cut into shares.

    Raises:
        ConfigError: It is not, or it is a simulated one, which only an agent can have emulated.
    """
    if arguments.device == EMULATED:
        return EMULATED
    from alloy_agent.cli.sources import seldom_collected, settings_of
    from alloy_agent.daemon.node import Node
    from alloy_agent.daemon.sharing import piece_for
    from alloy_agent.model import Share

    with seldom_collected(), Node(settings_of(arguments)) as node:
        snapshot = node.observe()
    piece = piece_for(arguments.device, Share(_role(arguments)), snapshot)
    if any(d.id == piece.device and d.simulated for d in snapshot.devices):
        raise ConfigError(
            "share run: simulated devices are shared through an agent alone",
            cure=f"start one first: {_run_command(arguments)}",
        )
    return str(piece.device)


def _own_group(root: Path, device: DeviceName, name: TenantName) -> tuple[str, tuple[str, ...]]:
    """Make a v2 cgroup that can be frozen; return its path and `cgroup.procs`, or nothing."""
    from alloy_agent.conformance.keeper.groups import own_group
    from alloy_agent.host.cgroups import detect

    tree = detect().unified
    group = own_group(root, device, name, Path(tree.folder(""))) if tree is not None else ("", ())
    if not group[0]:
        output.note("no v2 cgroup for this tenant: it cannot be frozen if its gate fails")
    return group


def _ungroup(path: str) -> None:
    from alloy_agent.conformance.keeper.groups import clear
    from alloy_agent.host.cgroups import detect

    tree = detect().unified
    if tree is not None:
        clear(path, Path(tree.folder("")))
