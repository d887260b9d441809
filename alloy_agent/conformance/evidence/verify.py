"""Verification of an evidence chain from its files alone: no agent, no state, no clock.

The files are read once, in the order of their names. Records are put into the order of their
sequence numbers through a bounded window, so that a missing, a moved and a changed record each
get their own name, and one defect does not make everything after it look broken.

What it proves: every record up to the last signed head is as it was written, in its order, none
removed, provided the public key is the node's. What it cannot prove from the files alone: that
the chain did not go on after its last record. Give the head that a witness outside of the node
kept (`expected_head`), and that is checked too.
"""

from __future__ import annotations

import base64
import fnmatch
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from alloy_agent.conformance.evidence.keys import PublicKey
from alloy_agent.conformance.evidence.record import (
    FILE_GLOB,
    HEAD_EVERY,
    MAX_LINE,
    RETENTION,
    ZERO_HASH,
    ChainHead,
    Record,
    decode_line,
)
from alloy_agent.errors import ConfigError
from alloy_agent.model import Value

if TYPE_CHECKING:
    from collections.abc import Iterator

WINDOW = 200_000  # records that may wait for one that stands further back
BLOCK = 4 << 20
MAX_PROBLEMS = 10_000


class EvidenceProblem(Value, frozen=True, kw_only=True):
    """One thing that is wrong with the chain.

    `kind` is one of changed, malformed, missing, reordered, duplicated, truncated, bad_signature,
    wrong_key, unsigned, no_records. `sequence` is the record's number (of the first, where
    `until` names the last of several), None where it has none; `file` and `line` (from 1) say
    where it stands.
    """

    kind: str
    text: str
    sequence: int | None = None
    until: int | None = None
    file: str = ""
    line: int = 0


class VerifyReport(Value, frozen=True, kw_only=True):
    """What the verification found. `ok` means: no problem."""

    ok: bool
    path: str
    files: int
    records: int
    first_sequence: int | None
    last_sequence: int | None
    last_hash: str
    heads: int
    signed_up_to: int | None
    key_id: str
    key_source: (
        str  # "given", "chain" (the chain's own first key: proves integrity, not origin) or "none"
    )
    problems: tuple[EvidenceProblem, ...] = ()
    notes: tuple[str, ...] = ()
    gaps: int = 0


class _Seen(msgspec.Struct):
    """A record with its place."""

    record: Record
    file: str
    line: int


def verify(
    path: Path,
    public_key: str | bytes | None = None,
    expected_head: ChainHead | None = None,
    *,
    live: bool = False,
) -> VerifyReport:
    """Return what is wrong with the chain in a directory or in one file; reads nothing else.

    Args:
        path: The `evidence` directory, a state directory that holds one, or a single `.jsonl` file.
        public_key: PEM of the node's key. Without it, the key named by the chain's first record
            is used.
        expected_head: A head known from outside of the node, which the chain must contain.
        live: The chain is being written to: an unfinished last line is no problem.

    Raises:
        ConfigError: The path or the key cannot be read.
    """
    key = PublicKey.from_pem(public_key) if public_key is not None else None
    try:
        files = _files(path)
    except OSError as exc:
        raise ConfigError(
            f"evidence {path}: {(exc.strerror or str(exc)).lower()}",
            cure="run as a user who may read it",
        ) from exc
    whole = path.is_dir()
    chain = _Chain(key, expected_head, starts_at=1 if whole else None)
    for file in files:
        try:
            is_last = file == files[-1]
            chain.read(file, is_last=is_last, live=live and is_last)
        except OSError as exc:
            raise ConfigError(
                f"evidence {file}: {exc.strerror or exc}", cure="run as a user who may read it"
            ) from exc
    return chain.report(str(path), len(files))


def _files(path: Path) -> list[Path]:
    """Return the files of a chain, oldest first.

    Raises:
        OSError: This user may not look.
    """
    mode = path.stat().st_mode if os.path.lexists(path) else None
    if mode is None:
        raise ConfigError(f"evidence {path} does not exist", cure="name a directory or a file")
    if stat.S_ISREG(mode):
        return [path]
    if not stat.S_ISDIR(mode):
        raise ConfigError(f"evidence {path} is no directory or file", cure="name one of the two")
    inner = path / "evidence"
    folder = inner if inner.is_dir() else path
    names = os.listdir(folder)  # noqa: PTH208 - unlike glob, it fails where it may not look
    return sorted(folder / name for name in names if fnmatch.fnmatchcase(name, FILE_GLOB))


def _lines(path: Path) -> Iterator[tuple[bytes, bool]]:
    """Yield each line and whether it is complete, never holding more than a block and one line."""
    rest = b""
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            parts = (rest + block).split(b"\n")
            rest = parts.pop()
            for part in parts:
                yield part, True
            if len(rest) > MAX_LINE:
                yield rest[:MAX_LINE], True  # malformed, by its length
                rest = b""
    if rest:
        yield rest, False


class _Chain:
    """The state of one verification: what has been seen, in file order and in sequence order."""

    def __init__(
        self, key: PublicKey | None, expected: ChainHead | None, starts_at: int | None
    ) -> None:
        self._key = key
        self._source = "given" if key else "none"
        self._expected = expected
        self._expected_met = False
        self._first: int | None = starts_at  # where the chain must begin; None: where it does
        self._began_at: int | None = None
        self._next: int | None = starts_at
        self._last: _Seen | None = None  # the record before `_next`, None behind a hole
        self._pending: dict[int, _Seen] = {}
        self._missing: set[int] = set()
        self._holes = 0  # unreadable lines that stand where `_next` is expected
        self._unsigned = 0
        self._signed_up_to: int | None = None
        self._heads = self._records = self._gaps = 0
        self._problems: list[EvidenceProblem] = []
        self._dropped = 0
        self._removals: list[tuple[int, int]] = []  # record that says so, last record removed

    # --- file order ---------------------------------------------------------------------------

    def read(self, path: Path, *, is_last: bool, live: bool = False) -> None:
        """Take in one file."""
        name = path.name
        for number, (raw, complete) in enumerate(_lines(path), start=1):
            if not complete and live:
                break
            if not complete:
                self._torn(name, number, len(raw), is_last=is_last)
                continue
            try:
                record = decode_line(raw)
            except ValueError as exc:
                self._unreadable(name, number, str(exc))
                continue
            self._records += 1
            self._arrive(_Seen(record, name, number))

    def _arrive(self, seen: _Seen) -> None:
        sequence = seen.record.body.seq
        if self._next is None:
            self._next = sequence
        if sequence == self._next:
            if self._pending:
                self._reordered(seen)
            self._holes = 0
            self._accept(seen)
            self._drain()
        elif seen.record.stated != seen.record.actual:
            # its own number cannot be trusted: it stands for the record that is expected here
            self._unreadable(seen.file, seen.line, "its hash is not its content's", kind="changed")
        elif sequence < self._next:
            self._late(seen)
        elif sequence in self._pending:
            self._duplicated(seen)
        else:
            self._ahead(seen)

    def _ahead(self, seen: _Seen) -> None:
        """Keep a record that is further on than expected; what lies between may still come."""
        sequence = seen.record.body.seq
        if self._holes and self._next is not None and sequence - self._next <= self._holes:
            self._next, self._last, self._holes = (
                sequence,
                None,
                0,
            )  # the unreadable lines were they
            self._accept(seen)
            self._drain()
            return
        if self._pending and sequence < max(self._pending):
            self._reordered(seen)
        self._pending[sequence] = seen
        if len(self._pending) > WINDOW:
            self._give_up_waiting()

    def _late(self, seen: _Seen) -> None:
        sequence = seen.record.body.seq
        if sequence in self._missing:
            self._missing.discard(sequence)
            self._reordered(seen)
        elif self._began_at is not None and sequence < self._began_at:
            self._reordered(seen)
        else:
            self._duplicated(seen)

    def _give_up_waiting(self) -> None:
        """Name what has not come as missing, and go on behind it."""
        if self._next is None or not self._pending:
            return
        resume = min(self._pending)
        absent = range(self._next, resume)
        if len(absent) <= MAX_PROBLEMS:
            self._missing.update(absent)
        if len(absent) > self._holes:
            self._problem(
                "missing",
                f"{_span(absent.start, absent.stop - 1)} missing",
                sequence=absent.start,
                until=absent.stop - 1,
            )
        self._next, self._last, self._holes = resume, None, 0
        self._drain()

    def _drain(self) -> None:
        while self._next in self._pending:
            self._accept(self._pending.pop(self._next))

    # --- sequence order -----------------------------------------------------------------------

    def _accept(self, seen: _Seen) -> None:
        """Check one record against the one before it, and make it the last."""
        record = seen.record
        body = record.body
        if self._began_at is None:
            self._began_at = body.seq
        intact = record.stated == record.actual
        if not intact:
            self._problem("changed", f"record {body.seq} was changed", seen=seen)
        self._check_link(seen, intact=intact)
        if body.kind == "start":
            self._learn_key(seen)
        elif body.kind == "gap":
            self._gaps += 1
            self._learn_retention(seen, intact=intact)
        if body.kind == "head":
            self._check_head(seen, intact=intact)
        else:
            self._count_unsigned(seen)
        self._check_expected(seen)
        self._last = seen
        self._next = body.seq + 1

    def _check_link(self, seen: _Seen, *, intact: bool) -> None:
        body = seen.record.body
        if body.seq == 1:
            if body.prev != ZERO_HASH and intact:
                self._problem("changed", "record 1 follows another record", seen=seen)
            return
        last = self._last
        if last is None or not intact or last.record.body.seq != body.seq - 1:
            return
        if body.prev not in (last.record.actual, last.record.stated):
            self._problem(
                "changed",
                f"record {last.record.body.seq} is not the one that record {body.seq} follows",
                seen=last,
            )

    def _learn_key(self, seen: _Seen) -> None:
        """Adopt the key of the chain's first record when none was given."""
        raw = seen.record.body.data.get("public_key")
        if self._key is not None or not isinstance(raw, str):
            return
        try:
            self._key = PublicKey.from_raw(base64.b64decode(raw, validate=True))
        except ValueError:
            self._problem("wrong_key", "the chain's own key is unreadable", seen=seen)
            return
        self._source = "chain"

    def _learn_retention(self, seen: _Seen, *, intact: bool) -> None:
        """Note up to which record old files were removed by policy, as the chain itself says."""
        until = seen.record.body.data.get("removed_until")
        if intact and isinstance(until, int) and seen.record.body.reason == RETENTION:
            self._removals.append((seen.record.body.seq, until))

    def _check_head(self, seen: _Seen, *, intact: bool) -> None:
        body = seen.record.body
        self._heads += 1
        self._unsigned = 0
        if self._key is None:
            return
        stated = body.data.get("key")
        if stated != self._key.id:
            self._problem(
                "wrong_key",
                f"head {body.seq} is signed by key {stated}, not by {self._key.id}",
                seen=seen,
            )
        elif not self._key.verifies(seen.record.sig, seen.record.raw_body):
            if intact:  # a changed head has been named already
                self._problem(
                    "bad_signature",
                    f"the signature of head {body.seq} does not fit: "
                    f"records after {self._signed_up_to or 0} may have been rewritten",
                    seen=seen,
                )
        else:
            self._signed_up_to = body.seq

    def _count_unsigned(self, seen: _Seen) -> None:
        self._unsigned += 1
        if self._unsigned == HEAD_EVERY:
            self._problem(
                "unsigned",
                f"{HEAD_EVERY} records up to {seen.record.body.seq} without a signed head",
                seen=seen,
            )

    def _check_expected(self, seen: _Seen) -> None:
        expected = self._expected
        if expected is None or seen.record.body.seq != expected.sequence:
            return
        self._expected_met = True
        if seen.record.actual != expected.hash:
            self._problem(
                "changed",
                f"record {expected.sequence} is not the head that was expected",
                seen=seen,
            )

    # --- naming -------------------------------------------------------------------------------

    def _problem(
        self,
        kind: str,
        text: str,
        *,
        seen: _Seen | None = None,
        sequence: int | None = None,
        until: int | None = None,
    ) -> None:
        self._add(
            EvidenceProblem(
                kind=kind,
                text=text,
                sequence=seen.record.body.seq if seen else sequence,
                until=until,
                file=seen.file if seen else "",
                line=seen.line if seen else 0,
            )
        )

    def _add(self, problem: EvidenceProblem) -> None:
        if len(self._problems) < MAX_PROBLEMS:
            self._problems.append(problem)
        else:
            self._dropped += 1

    def _reordered(self, seen: _Seen) -> None:
        self._problem("reordered", f"record {seen.record.body.seq} is out of its place", seen=seen)

    def _duplicated(self, seen: _Seen) -> None:
        self._problem("duplicated", f"record {seen.record.body.seq} stands twice", seen=seen)

    def _unreadable(self, file: str, line: int, why: str, kind: str = "malformed") -> None:
        place = None if self._next is None else self._next + self._holes
        self._holes += 1
        self._add(
            EvidenceProblem(
                kind=kind,
                text=f"{file}:{line} stands where record {place or 'one'} is expected: {why}",
                sequence=place,
                file=file,
                line=line,
            )
        )

    def _torn(self, file: str, line: int, size: int, *, is_last: bool) -> None:
        where = "the last file ends" if is_last else f"{file} ends"
        self._problem(
            "truncated", f"{where} within a record ({size} bytes without a line end, line {line})"
        )

    # --- result -------------------------------------------------------------------------------

    def report(self, path: str, files: int) -> VerifyReport:
        """Return the verdict after all files."""
        while self._pending:
            self._give_up_waiting()
        self._check_end()
        last = self._last.record if self._last else None
        return VerifyReport(
            ok=not self._problems,
            path=path,
            files=files,
            records=self._records,
            first_sequence=self._began_at,
            last_sequence=last.body.seq if last else None,
            last_hash=last.actual if last else "",
            heads=self._heads,
            signed_up_to=self._signed_up_to,
            key_id=self._key.id if self._key else "",
            key_source=self._source,
            problems=tuple(self._problems),
            notes=tuple(self._notes(last.body.seq if last else 0)),
            gaps=self._gaps,
        )

    @property
    def _removed_until(self) -> int:
        """Up to which record files were removed; only signed records can say so."""
        signed = self._signed_up_to or 0
        return max((until for sequence, until in self._removals if sequence <= signed), default=0)

    def _forgive_retention(self) -> None:
        """Drop the complaint about a missing front that the chain accounts for."""
        self._problems = [
            problem
            for problem in self._problems
            if not (
                problem.kind == "missing"
                and problem.sequence == 1
                and (problem.until or 1) <= self._removed_until
            )
        ]

    def _check_end(self) -> None:
        self._forgive_retention()
        if self._records == 0:
            self._problem("no_records", "there is no record")
        elif self._heads == 0 and self._first is not None:
            self._problem("unsigned", "there is no signed head")
        if self._expected is not None and not self._expected_met:
            self._problem(
                "truncated",
                f"the chain does not reach record {self._expected.sequence}, known to exist",
                sequence=self._expected.sequence,
            )

    def _notes(self, last: int) -> Iterator[str]:
        if self._source == "chain":
            yield (
                "checked against the key in the chain itself: this proves that the records fit "
                "together, not that this node made them; give the node's public key for that"
            )
        elif self._source == "none":
            yield "no key was given and no start record is here: signatures are unchecked"
        signed = self._signed_up_to or 0
        if last > signed:
            yield f"{_span(signed + 1, last)} not covered by a signed head yet"
        if self._expected is None:
            yield (
                "records removed from the end show only against a head known from outside "
                "(--head SEQUENCE:HASH)"
            )
        if self._first is None and self._began_at not in (None, 1):
            yield f"one file only: records before {self._began_at} were not looked at"
        if self._removed_until and (self._began_at or 0) > 1:
            yield f"{_span(1, self._removed_until)} removed by retention, as the chain records"
        if self._dropped:
            yield f"{self._dropped} further problems are not listed"


def _span(first: int, last: int) -> str:
    return f"record {first} is" if first == last else f"records {first} to {last} are"
