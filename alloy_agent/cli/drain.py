"""`alloy-agent drain` and `undrain`: nothing new on a device or the node, then wait for the rest.

Order: new reservations and claims are refused and slices tainted at once; who is inside may end;
with `--wait` the command returns when nobody is, or names who still is.
"""

from __future__ import annotations

import time
from argparse import Namespace
from typing import TYPE_CHECKING, Any

from alloy_agent.cli import output
from alloy_agent.errors import ConfigError

if TYPE_CHECKING:
    from alloy_agent.control import ControlClient

POLL_S = 0.5
SESSION = "operator"
SPAN_MIN_S = 1.0
SPAN_MAX_S = 366 * 86400.0


def add(commands: Any) -> None:
    """Add both commands to the parser."""
    for name, help_, run_ in (
        ("drain", "take nothing new on a device or the node", run),
        ("undrain", "allow new work again", undo),
    ):
        parser = commands.add_parser(name, help=help_)
        parser.add_argument("subject", nargs="?", default="", help="a device, partition or hive")
        parser.add_argument("--session", default=SESSION, metavar="NAME", help="whose drain it is")
        parser.add_argument("--json", action="store_true", help="print the document")
        parser.set_defaults(run=run_)
        if name == "drain":
            parser.add_argument("--reason", default="drained by the operator", metavar="TEXT")
            parser.add_argument(
                "--for", dest="span", metavar="TIME", help="it ends by itself: 90m, 2h, 3d"
            )
            parser.add_argument(
                "--wait", type=float, metavar="SECONDS", help="until nobody is inside any more"
            )


def run(arguments: Namespace) -> int:
    """Drain, and wait where that was asked for; 1 when somebody is still inside."""
    from alloy_agent.proto import agent_pb2 as pb

    client = _daemon(arguments)
    wish = pb.Drain(
        subject=arguments.subject,
        session=arguments.session,
        reason=arguments.reason,
        ttl_ms=round(span_s(arguments.span) * 1000),
    )
    document = _decoded(client.document(pb.BrainMessage(drain=wish)))
    inside = _inside(client, document)
    until_s = time.monotonic() + (arguments.wait or 0.0)
    while inside and time.monotonic() < until_s:
        time.sleep(min(POLL_S, max(0.0, until_s - time.monotonic())))
        inside = _inside(client, document)
    if arguments.json:
        output.write_json({**document, "inside": inside})
    else:
        _show(document, inside)
    return 1 if inside and arguments.wait is not None else 0


def span_s(text: str | None) -> float:
    """Return the seconds of `--for`; 0 where none was given.

    Raises:
        ConfigError: It is no span of time, or out of range.
    """
    from alloy_agent.decoding.units import duration_seconds

    if text is None:
        return 0.0
    try:
        found = duration_seconds(text)
    except ValueError as exc:
        raise ConfigError(f"--for {text}: no span of time", cure="write 90m, 2h or 3d") from exc
    if not SPAN_MIN_S <= found <= SPAN_MAX_S:
        raise ConfigError(f"--for {text}: not between a second and a year", cure="write 90m or 2h")
    return found


def _show(document: dict[str, Any], inside: dict[str, str]) -> None:
    """Tell in words what is drained, until when, what that takes, and who is still inside."""
    drain = document["drain"] or {}
    where = drain.get("subject") or "the node"
    left = ", ".join(f"{name} ({tenant})" for name, tenant in inside.items())
    ends = ""
    if drain.get("until_wall_s"):
        ends = time.strftime(" until %Y-%m-%d %H:%M:%SZ", time.gmtime(drain["until_wall_s"]))
    output.write(
        f"{where} is drained{ends}; " + (f"still inside: {left}" if left else "nobody is inside")
    )
    if drain.get("scope") != "partition":
        takes = drain.get("takes") or ["no partition"]
        output.paragraph(f"scope {drain.get('scope')}, takes {', '.join(takes)}", "  ")
    for also in document.get("also") or ():
        output.paragraph(f"also {also}", "  ")
    output.flush()


def undo(arguments: Namespace) -> int:
    """Take a drain back."""
    from alloy_agent.proto import agent_pb2 as pb

    client = _daemon(arguments)
    back = pb.Undrain(subject=arguments.subject, session=arguments.session)
    document = _decoded(client.document(pb.BrainMessage(undrain=back)))
    if arguments.json:
        output.write_json(document)
    else:
        drain = document["drain"]
        where = (drain or {}).get("subject") or arguments.subject or "the node"
        output.write(f"{where} takes new work again" if drain else f"{where} was not drained")
        output.flush()
    return 0


def _daemon(arguments: Namespace) -> ControlClient:
    from alloy_agent.cli.sources import settings_of
    from alloy_agent.control import ControlClient
    from alloy_agent.daemon.addresses import command_line, socket_of

    settings = settings_of(arguments)
    path = socket_of(settings)
    client = ControlClient.connect(path)
    if client is None:
        raise ConfigError(
            f"{path}: no daemon listens there, and it is the daemon that keeps drains",
            cure=f"start it: {command_line(settings, 'run')}",
        )
    return client


def _decoded(body: bytes) -> dict[str, Any]:
    import msgspec

    found: dict[str, Any] = msgspec.json.decode(body)
    return found


def _inside(client: ControlClient, document: dict[str, Any]) -> dict[str, str]:
    """Return the partitions that the drain reaches and that still have a tenant, with it."""
    drain = document["drain"] or {}
    subject, whole = drain.get("subject", ""), drain.get("scope") == "node"
    devices = _decoded(client.devices())["devices"]
    return {
        partition["id"]: partition["tenant"]
        for device in devices
        for partition in device["partitions"]
        if partition.get("tenant")
        and (whole or subject in (device["id"], partition["id"], device.get("hive")))
    }
