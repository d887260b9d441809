"""The shared pages of a tenant: orders that the agent writes, and the state that the tenant writes.

The layouts are those of `gate.c`. What a tenant writes is not trusted: it is bounded, checked for
sense, and compared with what the kernel counts.

Rules that stay true in here:

* One writer a page. The agent opens a tenant's state read-only.
* An order without a lease that lies ahead stops the neighbour; a fresh order has none.
* Every byte that is mapped here has its room: a full file system is an error, not a signal.
* A reader of nonsense gets "nothing readable", never numbers.
"""

from __future__ import annotations

import mmap
import os
import struct
from enum import IntEnum
from pathlib import Path
from typing import Final

from alloy_agent.conformance.baseline import Burst
from alloy_agent.conformance.rate import GateOrder
from alloy_agent.errors import BackendError
from alloy_agent.model import Value

MAGIC: Final = 0x315447594F4C4C41
VERSION: Final = 1
SLOTS: Final = 64
RING: Final = 256
HEAD_BYTES: Final = 4096
SLOT_HEAD_BYTES: Final = 256
BURST: Final = struct.Struct("<6Q")
SLOT_BYTES: Final = SLOT_HEAD_BYTES + RING * BURST.size
STATE_BYTES: Final = HEAD_BYTES + SLOTS * SLOT_BYTES
SLOT: Final = struct.Struct("<2I12Q2IQ")
ORDER: Final = struct.Struct("<Q2I3Q3d4Qd2Q")
ORDER_BYTES: Final = 4096
SEQUENCE_AT: Final = 16
FAR_S: Final = 1e6  # stands for "no limit in time" where an infinity will not do
ROLES: Final = {"production": 1, "opportunistic": 2}


class Completions(IntEnum):
    """How a process learns that the device is done with a launch; the least of its libraries."""

    UNSEEN = 0  # it has launched nothing
    NONE = 1  # a launch counts as done when it returns
    STARTED = 2  # when its queue has taken it in
    CALLBACKS = 3  # the stream calls back
    EVENTS = 4  # an event behind each launch, asked for
    COUNTED = 5  # the library counts


class Slot(Value, frozen=True, kw_only=True):
    """One process of a tenant, as it says itself."""

    index: int
    pid: int
    attached_ns: int
    launched: int
    completed: int
    busy_since_s: float
    idle_since_s: float
    bursts: int
    heartbeat_s: float
    waiting: int
    waited_s: float
    device_s: float
    completions: Completions = Completions.UNSEEN
    captured: int = 0  # calls that were only written down, for a graph

    @property
    def outstanding(self) -> int:
        """Launches that are not done."""
        return max(0, self.launched - self.completed)


class OrderPage:
    """The page by which the agent tells one tenant's gates what to do.

    `adopt` takes up the page that an earlier agent made, which gates already look at.
    """

    def __init__(self, path: Path, role: str, *, adopt: bool = False) -> None:
        self.path = path
        self._role = ROLES[role]
        self._map = _open(path, ORDER_BYTES) if adopt else _make(path, ORDER_BYTES, 0o644)
        before, _, generation = struct.unpack_from("<3Q", self._map, SEQUENCE_AT)
        self._sequence = before + before % 2  # odd: whoever wrote it died while writing
        self._generation = generation

    def write(self, order: GateOrder, lease_until_s: float, dead_slots: int = 0) -> None:
        """Publish an order that holds until a time on the boot clock."""
        self._sequence += 2
        self._generation += 1
        struct.pack_into("<Q", self._map, SEQUENCE_AT, self._sequence - 1)
        packed = ORDER.pack(
            MAGIC,
            VERSION,
            self._role,
            self._sequence - 1,
            _ns(lease_until_s),
            self._generation,
            order.duty_ratio,
            min(order.quiet_from_s, FAR_S),
            min(order.quiet_to_s, FAR_S),
            order.hold_from,
            order.hold_to,
            _ns(order.hold_until_s),
            _ns(order.outstanding_s),
            order.share_max_ratio,
            int(order.stopped),
            dead_slots,
        )
        self._map[: len(packed)] = packed
        struct.pack_into("<Q", self._map, SEQUENCE_AT, self._sequence)

    def revoke(self) -> None:
        """Take the lease back at once."""
        self.write(GateOrder(stopped=True), 0.0)

    def close(self) -> None:
        """Let go of the mapping."""
        self._map.close()


class StatePage:
    """A tenant's own page, read only."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        self._seen: dict[int, tuple[int, int]] = {}  # slot -> (generation, bursts fetched)

    def close(self) -> None:
        """Let go of the file."""
        os.close(self._file)

    def grown(self) -> bool:
        """Whether the file was made longer than a page is."""
        return os.fstat(self._file).st_size > STATE_BYTES

    def mend(self) -> str:
        """Cut a longer file back; return what was wrong with its length, or nothing."""
        if os.fstat(self._file).st_size < STATE_BYTES:
            return "its page was cut short"
        if not self.grown():
            return ""
        handle = os.open(f"/proc/self/fd/{self._file}", os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.ftruncate(handle, STATE_BYTES)
        finally:
            os.close(handle)
        return "its page was made longer"

    def slots(self) -> tuple[Slot, ...] | None:
        """Return the processes on the page, or None where it makes no sense.

        The file is read, not mapped: a tenant that truncates it cannot kill the agent.
        """
        head = os.pread(self._file, 16, 0)
        if len(head) < 16 or struct.unpack("<Q2I", head) != (MAGIC, VERSION, SLOTS):
            return None
        found = []
        for index in range(SLOTS):
            raw = os.pread(self._file, SLOT.size, HEAD_BYTES + index * SLOT_BYTES)
            if len(raw) < SLOT.size:
                return None
            if raw[:4] != b"\0\0\0\0":
                found.append(_slot(index, raw))
        return tuple(found)

    def bursts(self, slot: Slot) -> tuple[tuple[Burst, ...], int]:
        """Return the busy periods of a slot since the last call, and how many were lost."""
        generation, before = self._seen.get(slot.index, (0, 0))
        if generation != slot.attached_ns or slot.bursts < before:
            before = 0
        first = max(before, slot.bursts - RING + 8)
        found = []
        for number in range(first, slot.bursts):
            at = HEAD_BYTES + slot.index * SLOT_BYTES + SLOT_HEAD_BYTES
            raw = os.pread(self._file, BURST.size, at + number % RING * BURST.size)
            burst = _burst(raw) if len(raw) == BURST.size else None
            if burst is not None:
                found.append(burst)
        self._seen[slot.index] = (slot.attached_ns, slot.bursts)
        return tuple(found), first - before


def no_room(path: Path, exc: OSError) -> BackendError:
    """Return the error of a file of a share that cannot be written."""
    return BackendError(f"{path}: {exc.strerror}", cure=f"make room in {path.parent}")


def make_state(path: Path, uid: int, gid: int) -> None:
    """Make a tenant's state page, which the tenant alone may write."""
    page = _make(path, STATE_BYTES, 0o644)
    struct.pack_into("<Q2I", page, 0, MAGIC, VERSION, SLOTS)
    page.close()
    os.chown(path, uid, gid)


def _make(path: Path, size: int, mode: int) -> mmap.mmap:
    """Return a mapping of a fresh file; an old one of that name goes, whoever still has it."""
    path.unlink(missing_ok=True)
    handle = -1
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        os.posix_fallocate(handle, 0, size)
        return mmap.mmap(handle, size)
    except OSError as exc:
        path.unlink(missing_ok=True)
        raise no_room(path, exc) from exc
    finally:
        if handle >= 0:
            os.close(handle)


def _open(path: Path, size: int) -> mmap.mmap:
    """Return a mapping of a file that is there already."""
    handle = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        if os.fstat(handle).st_size != size:
            raise BackendError(f"{path} is no page", cure="start the tenant again")
        os.posix_fallocate(handle, 0, size)
        return mmap.mmap(handle, size)
    except OSError as exc:
        raise no_room(path, exc) from exc
    finally:
        os.close(handle)


def _slot(index: int, raw: bytes) -> Slot:
    fields = SLOT.unpack(raw)
    return Slot(
        index=index,
        pid=fields[0],
        attached_ns=fields[2],
        launched=fields[3],
        completed=fields[4],
        busy_since_s=fields[5] * 1e-9,
        idle_since_s=fields[6] * 1e-9,
        bursts=fields[7],
        heartbeat_s=fields[10] * 1e-9,
        waiting=fields[11],
        waited_s=fields[12] * 1e-9,
        device_s=fields[13] * 1e-9,
        completions=Completions(min(fields[15], Completions.COUNTED)),
        captured=fields[16],
    )


def _burst(raw: bytes) -> Burst | None:
    started, ended, idle_since, kernels, signature, _ = BURST.unpack(raw)
    if not idle_since <= started <= ended or not 0 < kernels < 1 << 32:
        return None
    return Burst(
        started_s=started * 1e-9,
        ended_s=ended * 1e-9,
        idle_since_s=idle_since * 1e-9,
        kernels=kernels,
        signature=signature,
        contended=True,  # until the neighbours' own pages say otherwise
    )


def _ns(seconds: float) -> int:
    return max(0, min(int(seconds * 1e9), (1 << 64) - 1))
