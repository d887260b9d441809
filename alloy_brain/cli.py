"""`alloy-brain`: serve, and ask one that serves. Standard output carries the answer alone.

Exit codes: 0 done; 1 the brain said no; 2 it could not be asked; 130 interrupted.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

SIZES = {"": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}
DURATIONS_MS = {"MS": 1, "S": 1000, "": 1000, "M": 60_000, "H": 3_600_000, "D": 86_400_000}
VENDORS = ("nvidia", "amd", "neuron", "cpu")
TIERS = ("hard", "enforced", "soft", "advisory")
SHARES = ("exclusive", "production", "opportunistic")
LOCALITIES = ("any", "one_node", "one_device", "one_hive")
SHELLS = ("bash", "zsh", "tcsh")
Row = Sequence[str]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code."""
    arguments = build_parser().parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        return 141
    except Exception as exc:  # noqa: BLE001 - what is not expected is raised again
        return _failed(exc, getattr(arguments, "brain", ""))


def _failed(exc: Exception, brain: str) -> int:
    """Print a failure as one line and return its exit code; `brain` is who was asked."""
    from alloy_brain.client import PlacementError
    from alloy_brain.identity import IdentityError
    from alloy_brain.ledger import LedgerError

    if isinstance(exc, PlacementError) and exc.unreachable:
        _say(
            f"no brain answers at {brain} ({exc.unreachable}): start one with "
            "'alloy-brain serve', or name another with --brain"
        )
        return 2
    if isinstance(exc, PlacementError):
        possible = f" (possible: {'; '.join(exc.possible)})" if exc.possible else ""
        _say(f"{exc.code}: {exc.message}{possible}")
        return 2 if exc.refusal is None else 1
    if isinstance(exc, (IdentityError, LedgerError, OSError)):
        _say(str(exc))
        return 2
    raise exc


def _say(line: str) -> None:
    print(f"alloy-brain: {' '.join(line.split())}", file=sys.stderr)


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line: the cause, then where to read on."""

    def error(self, message: str) -> NoReturn:
        """Print one line and exit with 2."""
        _say(f"{message}: see '{self.prog} --help'")
        self.exit(2)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of every command."""
    from alloy_agent import __version__

    parser = Parser(
        prog="alloy-brain",
        description="Place work on partitions that agents prove, and write down why.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"alloy-brain {__version__}")
    commands = parser.add_subparsers(
        dest="command", metavar="COMMAND", required=True, parser_class=Parser
    )
    _add_serve(commands)
    _add_place(commands)
    release = _asking(commands, "release", "give a lease back", _release)
    release.add_argument("lease")
    release.add_argument("--tenant", default="", help="whose it is")
    explain = _asking(commands, "explain", "why a request was placed where it is", _explain)
    explain.add_argument("id", help="a decision (d-...), a lease (l-...) or a request")
    nodes = _asking(commands, "nodes", "the nodes and how they are", _nodes)
    nodes.add_argument("node", nargs="?", default="")
    leases = _asking(commands, "leases", "who has what", _leases)
    leases.add_argument("--tenant", default="")
    leases.add_argument("--node", default="")
    _add_drains(commands)
    completion = commands.add_parser("completion", help="print a completion script")
    completion.add_argument("shell", choices=SHELLS)
    completion.set_defaults(run=_completion)
    return parser


def _add_drains(commands: Any) -> None:
    for name, text, run in (
        ("drain", "take nothing new on a node, or on a part of it", _drain),
        ("undrain", "take new work there again", _undrain),
    ):
        parser = _asking(commands, name, text, run)
        parser.add_argument("node")
        parser.add_argument(
            "subject", nargs="?", default="", help="a device, hive or partition; else all of it"
        )
        parser.add_argument("--session", default="operator", metavar="NAME", help="whose it is")
        if name == "drain":
            parser.add_argument("--reason", default="drained by the operator", metavar="TEXT")
            parser.add_argument(
                "--ttl", type=_duration, default=0, metavar="TIME", help="it ends by itself"
            )


def _add_tls(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tls-ca", metavar="PEM", help="authority of the other side")
    parser.add_argument("--tls-certificate", metavar="PEM")
    parser.add_argument("--tls-key", metavar="PEM")


def _asking(
    commands: Any, name: str, text: str, run: Callable[[argparse.Namespace], int]
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text)
    parser.add_argument("--brain", default="127.0.0.1:7443", metavar="ADDRESS")
    parser.add_argument("--json", action="store_true", help="print JSON")
    _add_tls(parser)
    parser.set_defaults(run=run)
    return parser


def _add_serve(commands: Any) -> None:
    parser = commands.add_parser("serve", help="serve agents and clients until told to stop")
    parser.add_argument("--listen", default="127.0.0.1:7443", metavar="ADDRESS")
    parser.add_argument(
        "--ledger", default="/var/lib/alloy-brain/brain.db", help="SQLite file or postgresql:// URL"
    )
    parser.add_argument("--name", default="brain")
    parser.add_argument("--term", type=_whole, default=1, help="at least this term of office")
    parser.add_argument("--insecure", action="store_true", help="plain text off loopback")
    parser.add_argument("--spiffe-nodes", metavar="ID", help="id of agents; {node} is their name")
    parser.add_argument("--spiffe-clients", metavar="ID", help="id of whoever asks")
    parser.add_argument(
        "--price", action="append", default=[], metavar="MODEL=PER_HOUR", help="breaks ties"
    )
    parser.add_argument("--log-level", default="info", choices=("debug", "info", "warning"))
    _add_tls(parser)
    parser.set_defaults(run=_serve)


def _add_place(commands: Any) -> None:
    parser = _asking(commands, "place", "place a request", _place)
    parser.add_argument("--tenant", required=True)
    parser.add_argument("--request", default="", help="its id; the same again, the same answer")
    parser.add_argument("--count", type=_whole, default=1)
    parser.add_argument("--vendor", choices=VENDORS)
    parser.add_argument("--model", default="", metavar="GLOB")
    parser.add_argument("--profile", default="", metavar="GLOB")
    parser.add_argument("--memory", type=_size, default=0, metavar="SIZE", help="at least: 10GiB")
    parser.add_argument("--compute-units", type=_whole, default=0)
    parser.add_argument("--share", choices=SHARES)
    parser.add_argument("--tier", choices=TIERS, help="weakest tier that will do")
    parser.add_argument("--locality", choices=LOCALITIES)
    parser.add_argument("--ttl", type=_duration, default=0, help="how long: 1h; until released")
    parser.add_argument("--label", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--reserve-only", action="store_true")
    parser.add_argument("--dry-run", action="store_true")


def _whole(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 on")
    return int(text)


def _measured(text: str, units: dict[str, int], what: str) -> int:
    match = re.fullmatch(r"([0-9]{1,12}(?:\.[0-9]{1,6})?)([A-Za-z]*)", text)
    if match is None or match[2].upper() not in units:
        known = ", ".join(unit.lower() for unit in units if unit)
        raise argparse.ArgumentTypeError(f"{text!r} is no {what}: a number and one of {known}")
    return round(float(match[1]) * units[match[2].upper()])


def _size(text: str) -> int:
    return _measured(text, SIZES, "size")


def _duration(text: str) -> int:
    return _measured(text, DURATIONS_MS, "duration")


# --- serve ----------------------------------------------------------------------------------------


def _serve(arguments: argparse.Namespace) -> int:
    """Serve until told to stop."""
    from alloy_brain.serving import serve

    return serve(arguments)


def _completion(arguments: argparse.Namespace) -> int:
    """Print a completion script."""
    import shtab

    print(shtab.complete(build_parser(), shell=arguments.shell))
    return 0


# --- asking ---------------------------------------------------------------------------------------


def _client(arguments: argparse.Namespace) -> Any:
    from alloy_brain.client import BrainClient
    from alloy_brain.identity import LOOPBACK, IdentityError, require_address

    require_address(arguments.brain, "--brain")
    files = (arguments.tls_ca, arguments.tls_certificate, arguments.tls_key)
    if all(files):
        return BrainClient(arguments.brain, files)
    if any(files) or not LOOPBACK.fullmatch(arguments.brain):
        raise IdentityError(
            f"{arguments.brain}: give --tls-ca, --tls-certificate and --tls-key together"
        )
    return BrainClient(arguments.brain)


def _place(arguments: argparse.Namespace) -> int:
    """Place and print the lease."""
    import secrets

    from alloy_agent.proto import agent_pb2 as pb
    from alloy_agent.proto import placement_pb2 as pl

    demand = pl.Demand(
        count=arguments.count,
        vendor=pb.Vendor.Value(f"VENDOR_{(arguments.vendor or 'unspecified').upper()}"),
        model=arguments.model,
        profile=arguments.profile,
        memory_bytes=arguments.memory,
        compute_units=arguments.compute_units,
        share=pb.Share.Value(f"SHARE_{(arguments.share or 'unspecified').upper()}"),
    )
    request = pl.PlaceRequest(
        request=arguments.request or f"r-{secrets.token_hex(8)}",
        tenant=arguments.tenant,
        demands=[demand],
        tier_floor=pb.Tier.Value(f"TIER_{(arguments.tier or 'unspecified').upper()}"),
        locality=pl.Locality.Value(f"LOCALITY_{(arguments.locality or 'unspecified').upper()}"),
        lease_ttl_ms=arguments.ttl,
        reserve_only=arguments.reserve_only,
        dry_run=arguments.dry_run,
        node_labels=dict(label.partition("=")[::2] for label in arguments.label),
    )
    with _client(arguments) as client:
        reply = client.place(request)
    if arguments.json:
        return _print_json("alloy.placement/v1", reply)
    _table(
        ("NODE", "PARTITION", "GENERATION", "TOKEN", "TIER"),
        [
            (
                one.node,
                one.partition.id,
                str(one.partition.generation),
                str(one.token),
                _tier(one.tier),
            )
            for one in reply.granted
        ],
    )
    state = pb.LeaseState.Name(reply.state)[12:].lower() if reply.lease else "dry run"
    print(f"lease {reply.lease or '-'}, {state}, decision {reply.decision}")
    return 0


def _release(arguments: argparse.Namespace) -> int:
    """Release a lease and print its state."""
    from alloy_agent.proto import agent_pb2 as pb

    with _client(arguments) as client:
        reply = client.release(arguments.lease, arguments.tenant, "released by hand")
    if arguments.json:
        return _print_json("alloy.release/v1", reply)
    print(f"lease {reply.lease}: {pb.LeaseState.Name(reply.state)[12:].lower()}")
    return 0


def _drain(arguments: argparse.Namespace) -> int:
    """Drain a node, or a part of it, and print what that reaches."""
    from alloy_agent.proto import agent_pb2 as pb

    wish = pb.Drain(
        subject=arguments.subject,
        reason=arguments.reason,
        session=arguments.session,
        ttl_ms=arguments.ttl,
    )
    with _client(arguments) as client:
        reply = client.drain(arguments.node, wish)
    document = json.loads(reply.document.json)
    if arguments.json:
        json.dump({**document, "node": reply.node}, sys.stdout, indent=2)
        sys.stdout.write("\n")
        return 0
    drained = document["drain"]
    takes = ", ".join(drained["takes"]) or "no partition"
    print(f"{_where(arguments)} is drained ({drained['scope']}); it reaches {takes}")
    return 0


def _undrain(arguments: argparse.Namespace) -> int:
    """Take a drain back."""
    from alloy_agent.proto import agent_pb2 as pb

    back = pb.Undrain(subject=arguments.subject, session=arguments.session)
    with _client(arguments) as client:
        reply = client.undrain(arguments.node, back)
    document = json.loads(reply.document.json)
    if arguments.json:
        json.dump({**document, "node": reply.node}, sys.stdout, indent=2)
        sys.stdout.write("\n")
        return 0
    was = document["drain"] is not None
    print(f"{_where(arguments)} {'takes new work again' if was else 'was not drained'}")
    return 0


def _where(arguments: argparse.Namespace) -> str:
    return f"{arguments.node}/{arguments.subject}" if arguments.subject else str(arguments.node)


def _explain(arguments: argparse.Namespace) -> int:
    """Print a decision record."""
    kind = {"d-": "decision", "l-": "lease"}.get(arguments.id[:2], "request")
    with _client(arguments) as client:
        found = client.explain(**{kind: arguments.id})
    document = json.loads(found.document.json)
    if arguments.json:
        json.dump(document, sys.stdout, indent=2)
        sys.stdout.write("\n")
        return 0
    for line in explained(document):
        print(line)
    return 0


def explained(document: dict[str, Any]) -> list[str]:
    """Return a decision record in words: what was chosen, then why every other was not."""
    wish, choice = document["wish"], document["choice"]
    outcome = "placed" if document["placed"] else choice["refusal"] or "not placed"
    lines = [
        f"decision {document['id']} for {wish['tenant']}: {outcome}"
        + (f", lease {document['lease']}" if document["lease"] else ""),
    ]
    if choice["message"]:
        lines.append(f"  because {choice['message']}")
    rows = []
    for one in document["candidates"]:
        shut = [g for g in one["gates"] if g["state"] != "open"]
        scores = one["scores"]
        verdict = "chosen" if one["chosen"] else "open" if one["open"] else "out"
        headroom = scores["headroom_ratio"]
        rows.append(
            (
                one["node"],
                f"{one['device']}/{one['profile']}",
                str(len(one["free"])),
                verdict,
                "-" if headroom is None else f"{headroom:.0%} {scores['scarcest']}",
                f"{scores['fragments']:+.3f}",
                f"{scores['cost']:.3f}",
                "; ".join(f"{g['gate']} {g['state']}: {g['reason']}" for g in shut),
            )
        )
    order = {"chosen": 0, "open": 1, "out": 2}
    rows.sort(key=lambda row: (order[row[3]], row))
    titles = ("NODE", "CANDIDATE", "FREE", "VERDICT", "HEADROOM", "FRAGMENTS", "COST", "WHY NOT")
    lines.extend(_lines(titles, rows))
    if document["omitted_nodes"]:
        lines.append(f"the facts of {document['omitted_nodes']} nodes were lost with the brain")
    if document["replayed"] is not None:
        replayed = "gives the same choice" if document["replayed"] else "GIVES ANOTHER CHOICE"
        lines.append(f"replayed from its snapshots it {replayed}")
    return lines


def _nodes(arguments: argparse.Namespace) -> int:
    """Print the nodes."""
    with _client(arguments) as client:
        nodes = client.nodes(arguments.node, full=arguments.json and bool(arguments.node))
        if arguments.node and not nodes:
            return _no_node(arguments.node, client.nodes())
    if arguments.json:
        return _print_json("alloy.nodes/v1", *nodes, member="nodes")
    _table(
        ("NODE", "STREAM", "HEARD", "DEVICES", "PARTITIONS", "LEASED", "HEALTHY"),
        [
            (
                node.node,
                "up" if node.connected else "down",
                f"{node.last_heard_age_ms / 1e3:.1f} s ago",
                str(node.device_count),
                str(node.partition_count),
                str(node.leased_count),
                str(node.open_gates),
            )
            for node in nodes
        ],
    )
    return 0


def _no_node(name: str, nodes: Sequence[Any]) -> int:
    """Say that there is no such node, and which there are."""
    known = ", ".join(sorted(node.node for node in nodes)[:4]) or "none"
    _say(f"NOT_FOUND: node {name}: known are {known}")
    return 1


def _leases(arguments: argparse.Namespace) -> int:
    """Print the leases."""
    from alloy_agent.proto import agent_pb2 as pb

    with _client(arguments) as client:
        leases = client.leases(arguments.tenant, arguments.node)
    if arguments.json:
        return _print_json("alloy.leases/v1", *leases, member="leases")
    _table(
        ("LEASE", "TENANT", "STATE", "PIECES", "ENDS"),
        [
            (
                one.lease,
                one.tenant,
                pb.LeaseState.Name(one.state)[12:].lower(),
                ", ".join(f"{g.node}/{g.partition.id}" for g in one.granted),
                f"in {one.expires_in_ms / 1e3:.0f} s" if one.expires_in_ms else "when released",
            )
            for one in leases
        ],
    )
    return 0


def _tier(number: int) -> str:
    return TIERS[number - 1] if 1 <= number <= len(TIERS) else "not judged"


def _print_json(schema: str, *messages: Any, member: str = "") -> int:
    from google.protobuf.json_format import MessageToDict

    found = [MessageToDict(m, preserving_proto_field_name=True) for m in messages]
    document = {"schema": schema, member: found} if member else {"schema": schema, **found[0]}
    json.dump(document, sys.stdout, indent=2)
    sys.stdout.write("\n")
    return 0


def _table(titles: Row, rows: Sequence[Row]) -> None:
    for line in _lines(titles, rows):
        print(line)


def _lines(titles: Row, rows: Sequence[Row]) -> list[str]:
    """Return a table as lines; names that others chose carry no control characters."""
    clean = [[_printable(cell) for cell in row] for row in (titles, *rows)]
    widths = [max(len(row[n]) for row in clean) for n in range(len(titles))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in clean
    ]


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in text)
