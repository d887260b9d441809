"""`alloy-agent evidence`: verifies a chain from its files alone; prints the key that signs it."""

from __future__ import annotations

import re
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from alloy_agent.cli import output
from alloy_agent.errors import ConfigError

if TYPE_CHECKING:
    from alloy_agent.conformance.evidence import ChainHead, VerifyReport
    from alloy_agent.conformance.evidence.verify import EvidenceProblem

SHOWN_PROBLEMS = 20


def add(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser("evidence", help="verify evidence; print the signing key")
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    check = actions.add_parser("verify", help="verify chain and signatures; needs no agent")
    check.add_argument("path", metavar="PATH", help="state directory, evidence directory or file")
    check.add_argument("--public-key", metavar="PEM", help="file with the node's public key")
    check.add_argument("--head", metavar="SEQ:HASH", help="a head that the chain must contain")
    check.add_argument("--json", action="store_true", help="print the document")
    check.set_defaults(run=run_verify)
    key = actions.add_parser("key", help="print the public key of this node (PEM)")
    key.set_defaults(run=run_key)


def run_verify(arguments: Namespace) -> int:
    """Print what is wrong with a chain; exit with 1 if anything is."""
    from alloy_agent.cli.sources import read_text
    from alloy_agent.conformance.evidence import verify

    pem = read_text(arguments.public_key) if arguments.public_key else None
    head = parse_head(arguments.head) if arguments.head else None
    report = verify(Path(arguments.path), public_key=pem, expected_head=head)
    if arguments.json:
        output.write_json({"schema": "alloy.verify/v1", "report": report})
    else:
        show(report)
    return 0 if report.ok else 1


def parse_head(text: str) -> ChainHead:
    """Return the head that `SEQ:HASH` names.

    Raises:
        ConfigError: It is none.
    """
    from alloy_agent.conformance.evidence import ChainHead

    match = re.fullmatch(r"([0-9]{1,18}):([0-9a-fA-F]{64})", text)
    if match is None:
        raise ConfigError(
            f"--head {text!r} is no head", cure="write sequence:hash, the hash as 64 hex digits"
        )
    return ChainHead(sequence=int(match[1]), hash=match[2].lower())


def show(report: VerifyReport) -> None:
    """Print a verification for people: the first bad record first."""
    for problem in report.problems[:SHOWN_PROBLEMS]:
        output.paragraph(_line(problem), "  ")
    if len(report.problems) > SHOWN_PROBLEMS:
        output.write(f"and {len(report.problems) - SHOWN_PROBLEMS} more problems")
    state = "verified" if report.ok else "NOT verified"
    output.paragraph(
        f"{report.path}: {state}: {report.records} records in {report.files} files, "
        f"{report.heads} signed heads, signed up to {report.signed_up_to or 0}, "
        f"key {report.key_id or 'none'} ({report.key_source}), {report.gaps} gaps",
        "  ",
    )
    if report.last_sequence is not None:
        output.write(f"head {report.last_sequence}:{report.last_hash}")
    for line in report.notes:
        output.paragraph(f"note: {line}", "  ")


def _line(problem: EvidenceProblem) -> str:
    where = f" ({problem.file}:{problem.line})" if problem.file else ""
    return f"{problem.kind}: {problem.text}{where}"


def run_key(arguments: Namespace) -> int:
    """Print the public key; it is made when the agent first writes evidence."""
    from alloy_agent.cli.sources import settings_of
    from alloy_agent.conformance.evidence.keys import PUBLIC_FILE

    path = Path(settings_of(arguments).state_dir) / "keys" / PUBLIC_FILE
    try:
        output.write(path.read_text(encoding="ascii"))
    except FileNotFoundError as exc:
        raise ConfigError(
            f"{path}: there is no key yet", cure="run 'alloy-agent audit' once, which makes it"
        ) from exc
    except OSError as exc:
        reason = (exc.strerror or str(exc)).lower()
        raise ConfigError(f"{path}: {reason}", cure="run as root, or check --state-dir") from exc
    except UnicodeDecodeError as exc:
        raise ConfigError(f"{path}: is no PEM file", cure="restore it from a backup") from exc
    return 0
