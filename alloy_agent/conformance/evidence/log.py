"""The writer of the evidence chain: survives `kill -9`, a full disk and a moved clock.

Durability: `append` returns when its whole batch is on the disk (one `write`, one `fdatasync`),
so a record that a caller was told about is never lost to a crash. A head is signed after
`HEAD_EVERY` records at the latest, when `head_period_s` has passed with something unsigned, at
rotation and at close.

Rules that stay true in here:

* Memory changes after the disk has: a failed write is cut off the file again and leaves the chain
  as it was.
* Files are only ever appended to. Bytes of a batch that a crash left without a line end are moved
  aside to `<file>.torn-<time>`, and a record says so.
* A time in which nothing could be recorded (restart, suspend, clock step, full disk) is itself a
  record.
"""

from __future__ import annotations

import base64
import fcntl
import logging
import os
import threading
import time
from hashlib import sha256
from typing import TYPE_CHECKING, Protocol

import msgspec

from alloy_agent.conformance.evidence.keys import SigningKey
from alloy_agent.conformance.evidence.record import (
    FILE_GLOB,
    FORMAT_VERSION,
    HEAD_EVERY,
    MAX_LINE,
    RETENTION,
    ZERO_HASH,
    Body,
    ChainHead,
    Entry,
    clean,
    decode_line,
    encode_line,
    seal,
)
from alloy_agent.errors import StoreCorruptError, StoreError
from alloy_agent.model import Value

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

LOG = logging.getLogger(__name__)

ROTATE_BYTES = 64 << 20
HEAD_PERIOD_S = 60.0
STEP_TOLERANCE_US = 500_000  # below it, slewing and read jitter are taken for no step
SLEW_PER_MILLE = 1  # the kernel slews by at most 0.5 per mille (adjtimex(2): 500 ppm)
MAX_ITEMS = 256


class Times(Value, frozen=True, kw_only=True):
    """One reading of the three clocks, in microseconds."""

    boottime_us: int
    monotonic_us: int
    wall_us: int


class Clock(Protocol):
    """Where times come from."""

    def now(self) -> Times:
        """Return the three clocks as of now."""
        ...


class SystemClock:
    """The kernel's clocks."""

    def now(self) -> Times:
        """Return `CLOCK_BOOTTIME`, `CLOCK_MONOTONIC` and `CLOCK_REALTIME`."""
        return Times(
            boottime_us=time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1000,
            monotonic_us=time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000,
            wall_us=time.time_ns() // 1000,
        )


class _State(msgspec.Struct):
    """The end of the chain. A batch works on a copy, adopted once it is on the disk."""

    seq: int = 0
    digest: str = ZERO_HASH
    unsigned: int = 0
    signed_at_us: int = 0
    last: Body | None = None
    lost: int = 0


class _Identity(Value, frozen=True, kw_only=True):
    """What is the same in every record of one run."""

    boot: str
    agent: str
    config: str


class EvidenceLog:
    """The single writer of one node's chain. Methods may be called from any thread."""

    def __init__(  # noqa: PLR0913 - `open` is the way in; this only keeps what it found
        self,
        *,
        directory: Path,
        key: SigningKey,
        identity: _Identity,
        clock: Clock,
        rotate_bytes: int,
        head_period_s: float,
        keep_files: int,
    ) -> None:
        self._directory = directory
        self._key = key
        self._identity = identity
        self._clock = clock
        self._rotate_bytes = rotate_bytes
        self._head_period_us = int(head_period_s * 1_000_000)
        self._keep_files = keep_files
        self._lock = threading.Lock()
        self._state = _State()
        self._guard = -1
        self._file = -1
        self._path = directory
        self._size = 0

    @classmethod
    def open(  # noqa: PLR0913 - each is a named setting of the chain
        cls,
        state_dir: Path,
        *,
        boot_id: str,
        agent_version: str,
        config_digest: str = "",
        clock: Clock | None = None,
        rotate_bytes: int = ROTATE_BYTES,
        head_period_s: float = HEAD_PERIOD_S,
        keep_files: int = 0,
    ) -> EvidenceLog:
        """Return the chain under `state_dir/evidence`, begun or continued.

        Args:
            state_dir: Holds `evidence/` and `keys/`.
            boot_id: The boot of this node.
            agent_version: Goes into every record.
            config_digest: Of the settings in force; goes into every record.
            clock: Where times come from; None: the kernel.
            rotate_bytes: A file that has grown to this size is closed.
            head_period_s: Longest time that a record stays unsigned, while `tick` is called.
            keep_files: Closed files beyond this number are removed, with a record; 0 keeps all.

        Raises:
            StoreError: The directory cannot be written, or another process writes this chain.
            StoreCorruptError: The last record cannot be trusted; nothing was changed.
        """
        key = SigningKey.load_or_create(state_dir / "keys")
        directory = state_dir / "evidence"
        identity = _Identity(boot=boot_id, agent=clean(agent_version), config=clean(config_digest))
        log = cls(
            directory=directory,
            key=key,
            identity=identity,
            clock=clock or SystemClock(),
            rotate_bytes=rotate_bytes,
            head_period_s=head_period_s,
            keep_files=keep_files,
        )
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            log._guard = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
            log._take_guard()
            log._begin()
        except OSError as exc:
            log._release()
            raise _disk_error(directory, exc) from exc
        except StoreError:
            log._release()
            raise
        return log

    # --- what callers do ----------------------------------------------------------------------

    @property
    def head(self) -> ChainHead:
        """The last record."""
        return ChainHead(sequence=self._state.seq, hash=self._state.digest)

    @property
    def lost_records(self) -> int:
        """How many records the disk has refused and the chain does not account for yet."""
        return self._state.lost

    @property
    def newest_file(self) -> Path:
        """The file that is being written."""
        return self._path

    @property
    def directory(self) -> Path:
        """Where all files of the chain are."""
        return self._directory

    @property
    def key(self) -> SigningKey:
        """The key that signs this chain's heads."""
        return self._key

    @property
    def public_key_pem(self) -> str:
        """The key to give to those who verify."""
        return self._key.public.pem

    def append(self, entries: Sequence[Entry]) -> ChainHead:
        """Record all entries or none, durably, and return the last record.

        Raises:
            StoreError: The disk refused (full, read-only, gone); the chain is as it was, and the
                number of records lost is recorded with the next batch that succeeds.
        """
        with self._lock:
            self._write([*self._gaps(), *entries], lost=len(entries))
            return self.head

    def tick(self) -> ChainHead:
        """Record clock gaps, and sign a head if one is due; call it about once a second.

        Raises:
            StoreError: The disk refused.
        """
        with self._lock:
            gaps = self._gaps()
            now_us = self._clock.now().monotonic_us
            due = now_us - self._state.signed_at_us >= self._head_period_us
            if gaps or (due and self._state.unsigned):
                self._write(gaps, head=due)
            return self.head

    def sign_head(self) -> ChainHead:
        """Sign the chain as it stands, unless it ends with a head, and return that head.

        Raises:
            StoreError: The disk refused.
        """
        with self._lock:
            if self._state.unsigned:
                self._write([], head=True)
            return self.head

    def close(self) -> None:
        """Record the orderly end, sign it, and let go of the files. Closing twice does nothing."""
        with self._lock:
            if self._file < 0:
                return
            try:
                self._write([*self._gaps(), Entry(kind="stop", reason="orderly stop")], head=True)
            finally:
                self._release()

    def __enter__(self) -> EvidenceLog:
        """Return the log itself."""
        return self

    def __exit__(self, *_exc: object) -> None:
        """Close the log."""
        self.close()

    # --- writing ------------------------------------------------------------------------------

    def _write(self, entries: Sequence[Entry], *, head: bool = False, lost: int = 0) -> None:
        """Put a batch on the disk, then adopt the state it leads to."""
        if self._file < 0:
            raise StoreError("the evidence chain is closed", cure="open it again")
        if self._state.lost:
            note = Entry(
                kind="gap",
                reason="the disk refused records",
                data={"lost_records": self._state.lost},
            )
            entries = [note, *entries]
        draft = msgspec.structs.replace(self._state, lost=0)
        payload = b"".join(self._lines(draft, entries, head=head))
        try:
            self._put(payload)
        except OSError as exc:
            self._state.lost += lost
            raise _disk_error(self._path, exc) from exc
        self._state = draft
        if self._size >= self._rotate_bytes:
            self._rotate()

    def _lines(self, draft: _State, entries: Sequence[Entry], *, head: bool) -> Iterator[bytes]:
        now = self._clock.now()
        for entry in entries:
            yield self._line(draft, entry, now)
            if draft.unsigned >= HEAD_EVERY - 1:
                yield self._head_line(draft, now)
        if head and draft.unsigned:
            yield self._head_line(draft, now)

    def _line(self, draft: _State, entry: Entry, now: Times, *, signed: bool = False) -> bytes:
        body = self._body(draft, entry, now)
        raw, digest = seal(body)
        draft.seq, draft.digest, draft.last = body.seq, digest, body
        draft.unsigned += 1
        return encode_line(raw, digest, self._key.sign(raw) if signed else "")

    def _head_line(self, draft: _State, now: Times) -> bytes:
        line = self._line(
            draft, Entry(kind="head", data={"key": self._key.public.id}), now, signed=True
        )
        draft.unsigned, draft.signed_at_us = 0, now.monotonic_us
        return line

    def _body(self, draft: _State, entry: Entry, now: Times) -> Body:
        data = {
            name: tuple(clean(item) for item in value[:MAX_ITEMS])
            if isinstance(value, tuple)
            else clean(value)
            if isinstance(value, str)
            else value
            for name, value in entry.data.items()
        }
        return Body(
            v=FORMAT_VERSION,
            seq=draft.seq + 1,
            prev=draft.digest,
            boot=self._identity.boot,
            agent=self._identity.agent,
            config=self._identity.config,
            boottime_us=now.boottime_us,
            monotonic_us=now.monotonic_us,
            wall_us=now.wall_us,
            kind=entry.kind,
            subject=clean(entry.subject),
            check=clean(entry.check),
            verdict=clean(entry.verdict),
            expected=clean(entry.expected),
            observed=clean(entry.observed),
            method=clean(entry.method),
            resolution=clean(entry.resolution),
            reason=clean(entry.reason),
            tenant=clean(entry.tenant),
            lease=clean(entry.lease),
            data=data,
        )

    def _put(self, payload: bytes) -> None:
        """Append bytes durably; on failure the file ends where it ended before."""
        try:
            view = memoryview(payload)
            while view:
                view = view[os.write(self._file, view) :]
            os.fdatasync(self._file)
        except OSError:
            os.ftruncate(self._file, self._size)
            raise
        self._size += len(payload)

    def _rotate(self) -> None:
        """End this file with a signed head and go on in the next; on failure go on in this one."""
        if self._state.unsigned:
            draft = msgspec.structs.replace(self._state)
            line = self._head_line(draft, self._clock.now())
            try:
                self._put(line)
            except OSError as exc:
                LOG.warning("evidence rotation put off", extra={"cause": str(exc)})
                return
            self._state = draft
        try:
            self._open_file(self._directory / _file_name(self._state.seq + 1))
            self._retain()
        except OSError as exc:
            LOG.warning("evidence rotation put off", extra={"cause": str(exc)})

    def _retain(self) -> None:
        """Remove the oldest closed files beyond what is kept, after a record that says so."""
        closed = sorted(p for p in self._directory.glob(FILE_GLOB) if p != self._path)
        surplus = closed[: -self._keep_files] if self._keep_files else []
        if not surplus:
            return
        kept_from = int(closed[len(surplus)].stem.rpartition("-")[2])
        note = Entry(
            kind="gap",
            reason=RETENTION,
            data={"removed_until": kept_from - 1, "files": tuple(path.name for path in surplus)},
        )
        draft = msgspec.structs.replace(self._state)
        payload = b"".join(self._lines(draft, [note], head=True))
        self._put(payload)
        self._state = draft
        for path in surplus:
            path.unlink(missing_ok=True)

    def _open_file(self, path: Path) -> None:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(path, flags, 0o600)
        os.fsync(self._guard)
        if self._file >= 0:
            os.close(self._file)
        self._file, self._path = descriptor, path
        self._size = os.fstat(descriptor).st_size

    # --- opening ------------------------------------------------------------------------------

    def _take_guard(self) -> None:
        try:
            fcntl.flock(self._guard, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            raise StoreError(
                f"another agent writes the evidence in {self._directory}",
                cure="stop it, or use another --state-dir",
            ) from exc

    def _begin(self) -> None:
        """Find the end of the chain, repair a torn tail, and record what happened meanwhile."""
        entries: list[Entry] = []
        files = sorted(self._directory.glob(FILE_GLOB))
        for path in reversed(files):
            torn = self._cut_torn(path)
            if torn is not None:
                entries.append(torn)
            self._state = self._end_of(path)
            if self._state.seq:
                break
        self._open_file(files[-1] if files else self._directory / _file_name(1))
        if self._state.seq:
            entries += [self._restart_entry(), *self._gaps()]
        entries.append(self._start_entry())
        self._write(entries, head=True)

    def _start_entry(self) -> Entry:
        raw = base64.b64encode(self._key.public.raw).decode("ascii")
        return Entry(
            kind="start",
            reason="the agent started",
            data={"key": self._key.public.id, "public_key": raw, "head_every": HEAD_EVERY},
        )

    def _restart_entry(self) -> Entry:
        last = self._state.last
        now = self._clock.now()
        if last is None:  # only for the type: a state with a sequence has its last body
            return Entry(kind="gap", reason="restart")
        same_boot = last.boot == self._identity.boot
        away = now.boottime_us - last.boottime_us if same_boot else now.wall_us - last.wall_us
        return Entry(
            kind="gap",
            reason="restart" if same_boot else "reboot",
            data={
                "away_us": away,
                "orderly": last.kind == "stop",
                "previous_boot": last.boot,
                "measured_by": "boottime" if same_boot else "wall clock",
            },
        )

    def _cut_torn(self, path: Path) -> Entry | None:
        """Move what a crash left behind the last line end aside; return the record of it."""
        size = path.stat().st_size
        start = max(0, size - 2 * MAX_LINE)
        with path.open("rb") as file:
            file.seek(start)
            tail = file.read()
        hole = tail.find(b"\0")  # blocks that never reached the disk read as zeros
        good = tail.rfind(b"\n", 0, hole if hole >= 0 else len(tail)) + 1
        if good == len(tail):
            return None
        if good == 0 and start > 0:
            raise _corrupt(path, "its end is no record")
        fragment = tail[good:]
        aside = path.with_name(f"{path.name}.torn-{self._clock.now().wall_us}")
        with aside.open("xb") as kept:
            kept.write(fragment)
            kept.flush()
            os.fsync(kept.fileno())
        os.truncate(path, start + good)
        return Entry(
            kind="gap",
            reason="torn record cut aside",
            subject=path.name,
            data={
                "bytes": len(fragment),
                "sha256": sha256(fragment).hexdigest(),
                "kept_as": aside.name,
            },
        )

    def _end_of(self, path: Path) -> _State:
        """Return the state that a file's last record leaves; sequence 0 if it has none."""
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 2 * MAX_LINE))
            lines = file.read().splitlines()
        if not lines:
            return _State()
        try:
            record = decode_line(lines[-1])
            before = decode_line(lines[-2]) if len(lines) > 1 else record
        except ValueError as exc:
            raise _corrupt(path, str(exc)) from exc
        if record.stated != record.actual:
            raise _corrupt(path, f"record {record.body.seq} was changed")
        ended = record.body.kind == "head" and before.body.kind == "stop"
        return _State(
            seq=record.body.seq,
            digest=record.actual,
            unsigned=0 if record.body.kind == "head" else 1,
            last=before.body if ended else record.body,
        )

    # --- clocks -------------------------------------------------------------------------------

    def _gaps(self) -> list[Entry]:
        """Return a record for a suspend and for a step of the wall clock since the last record."""
        last = self._state.last
        if last is None or last.boot != self._identity.boot:
            return []
        now = self._clock.now()
        entries = []
        slept = (now.boottime_us - now.monotonic_us) - (last.boottime_us - last.monotonic_us)
        if slept >= STEP_TOLERANCE_US:
            entries.append(Entry(kind="gap", reason="suspend", data={"length_us": slept}))
        elapsed = now.boottime_us - last.boottime_us
        step = (now.wall_us - last.wall_us) - elapsed
        if abs(step) >= STEP_TOLERANCE_US + elapsed * SLEW_PER_MILLE // 1000:
            entries.append(Entry(kind="gap", reason="clock step", data={"step_us": step}))
        return entries

    def _release(self) -> None:
        for descriptor in (self._file, self._guard):
            if descriptor >= 0:
                os.close(descriptor)
        self._file = self._guard = -1


def _file_name(first_sequence: int) -> str:
    return f"evidence-{first_sequence:012d}.jsonl"


def _disk_error(path: Path, exc: OSError) -> StoreError:
    return StoreError(
        f"evidence {path}: {exc.strerror or exc}",
        cure="free space or make the state directory writable; observation goes on",
    )


def _corrupt(path: Path, why: str) -> StoreCorruptError:
    return StoreCorruptError(
        f"evidence {path}: {why}",
        cure=f"run `alloy-agent evidence verify {path.parent}`, then move the directory aside",
    )
