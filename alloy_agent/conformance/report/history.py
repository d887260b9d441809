"""What changed lately, read back from the evidence chain for a report."""

from __future__ import annotations

from collections import deque
from pathlib import Path

from alloy_agent.conformance.evidence.record import FILE_GLOB, Record, decode_line
from alloy_agent.model import Value

SHOWN_EVENTS = 100
READ_BYTES = 8 << 20  # of the newest files; a report shows the last changes, not the archive


class Event(Value, frozen=True, kw_only=True):
    """One change that the chain holds."""

    sequence: int
    wall_s: float
    kind: str
    subject: str
    check: str
    verdict: str
    text: str


def history_of(directory: Path, limit: int = SHOWN_EVENTS) -> tuple[Event, ...]:
    """Return the newest changes in a chain, newest first; unreadable lines are left out."""
    events: deque[Event] = deque(maxlen=limit)
    for path in _newest(directory):
        try:
            lines = path.read_bytes().splitlines()
        except OSError:
            continue
        for line in lines:
            try:
                record = decode_line(line)
            except ValueError:
                continue
            if record.body.kind in {"judgement", "tier", "gap", "start", "stop"}:
                events.append(_event(record))
    return tuple(reversed(events))


def _newest(directory: Path) -> list[Path]:
    chosen: list[Path] = []
    size = 0
    for path in sorted(directory.glob(FILE_GLOB), reverse=True):
        size += path.stat().st_size
        if chosen and size > READ_BYTES:
            break
        chosen.append(path)
    return chosen[::-1]


def _event(record: Record) -> Event:
    body = record.body
    parts = [body.reason]
    if body.observed:
        parts.append(f"observed {body.observed}")
    if body.expected and body.verdict == "fail":
        parts.append(f"expected {body.expected}")
    return Event(
        sequence=body.seq,
        wall_s=body.wall_us / 1e6,
        kind=body.kind,
        subject=body.subject,
        check=body.check,
        verdict=body.verdict,
        text="; ".join(part for part in parts if part),
    )
