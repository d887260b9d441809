"""The witness, and the look for ways around the gate, on a thread beside the control loop.

Each second the processes in the tenants' cgroups are looked at from outside: who uses the device,
and is the gate mapped there. The launch symbols of every driver library that they map are counted
by the kernel (`gate.witness`) and compared with what the tenant's page says. On our own stubs the
probes stay; on a foreign library, where a hit costs a trap, they stand for `WINDOW_S` in
`WINDOW_EVERY_S`.

Rules that stay true in here:

* Attaching and detaching take milliseconds to hundreds of them: never on the control loop.
* A window in which a process came or went that cannot be accounted for is not compared; that is
  "nobody can tell", and never "all is well".
* A tenant that cannot be watched has the reason in its `witness`.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec

from alloy_agent.conformance.gate.entries import LAUNCHES
from alloy_agent.conformance.gate.living import pids_below
from alloy_agent.conformance.gate.pages import StatePage
from alloy_agent.conformance.gate.witness import Witness, symbol_offsets
from alloy_agent.conformance.keeper.messages import Watched, WitnessCost, counts_differ
from alloy_agent.errors import AlloyError
from alloy_agent.host.processes import read_bytes
from alloy_agent.model import Value

LOOK_EVERY_S: Final = 1.0
WINDOW_S: Final = 0.5
WINDOW_EVERY_S: Final = 30.0
MAPS_EVERY_S: Final = 10.0
MAPS_GROWN_S: Final = 2.0  # where the process's size changed: it may have loaded something
CGROUPS_MOST: Final = 1024  # of one tenant: who makes more of them hides in them
SPAN_S: Final = 10.0  # over which a slow trickle around the gate adds up
DRIVERS: Final = ("libcuda.so", "libamdhip64.so", "liballoyemu.so")
GATE: Final = "liballoygate.so"
NOP: Final = bytes.fromhex("0f1f440000")  # our own entry points begin with it
File = tuple[int, int]  # device and inode


class Subject(Value, frozen=True, kw_only=True):
    """One tenant to be watched: its page, its cgroup ("": none), and the nodes of the device."""

    name: str
    pid: int  # tells it from an earlier tenant of that name
    page: str
    owner: int
    cgroup: str
    nodes: tuple[str, ...] = ()


class Mapped(Value, frozen=True, kw_only=True):
    """The libraries of one process that matter: drivers by file, and what gates it has."""

    drivers: dict[tuple[int, int], str]
    gated: bool  # the agent's gate is mapped
    foreign: bool  # some gate is

    @property
    def sound(self) -> bool:
        """Whether nothing in it asks for another look soon."""
        return self.gated and bool(self.drivers)


class Reading(Value, frozen=True, kw_only=True):
    """One look at both counts. The page was read before and after the kernel's counters.

    This thread may be put aside in between, so what the page said at the moment of the kernel's
    count is known to lie from `least` to `most` only.
    """

    at_s: float
    least: int
    most: int
    kernel: int


def launches_between(then: Reading, now: Reading) -> tuple[int, int]:
    """Return the launches of a window by the page and by the kernel.

    Of what the page may have counted, the number that is nearest to the kernel's is taken.
    """
    witnessed = now.kernel - then.kernel
    least, most = now.least - then.most, now.most - then.least
    return max(0, min(max(witnessed, least), most)), witnessed


@dataclass
class _Tally:
    """The launches that a page has counted since it began, over slots that come and go."""

    page: StatePage
    total: int = 0
    _slots: dict[int, tuple[int, int]] = field(default_factory=dict)

    def read(self) -> bool:
        """Take the page's counts; return whether all of them are accounted for."""
        slots = self.page.slots()
        if slots is None:
            return False
        whole = True
        for slot in slots:
            born_ns, before = self._slots.get(slot.index, (0, 0))
            if born_ns and born_ns != slot.attached_ns:
                whole, before = False, 0  # the slot's last owner may have launched since we looked
            called = slot.launched + slot.captured  # the kernel counts calls, not what they do
            if called < before:
                whole, before = False, called
            self.total += called - before
            self._slots[slot.index] = (slot.attached_ns, called)
        return whole


@dataclass
class _Watch:
    """What is known of one tenant."""

    subject: Subject
    maps: Maps
    tally: _Tally | None = None
    inode: int = 0
    misshapen: str = ""  # what was once wrong with the page's length
    whole: bool = True  # all of its processes can be looked at
    refused: set[File] = field(default_factory=set)
    probes: dict[File, list[Witness]] = field(default_factory=dict)
    stubs: bool = True  # all probed libraries are our own: the probes may stay
    why: str = "no process of it maps a driver library"
    sampled_s: float = -WINDOW_EVERY_S
    readings: list[Reading] = field(default_factory=list)  # oldest first; the last began a window


class Watcher:
    """Watches the tenants of one device until it is closed.

    Args:
        gate: The interposer that tenants are started with.
        tree: The v2 cgroup tree's mount, None: there is none.
        holders: Returns the processes that have the device open, None: the device does not tell.
        changed: Told, on the watcher's thread, that a tenant now stands otherwise.
    """

    def __init__(
        self,
        gate: Path,
        tree: Path | None,
        holders: Callable[[], frozenset[int] | None],
        changed: Callable[[], None],
    ) -> None:
        self._tree, self._holders, self._changed = tree, holders, changed
        self._gate_path = gate
        self._gate_stat = gate.stat()
        self._subjects: tuple[Subject, ...] = ()
        self._watches: dict[str, _Watch] = {}
        self._cost = WitnessCost()
        self.seen: dict[str, Watched] = {}
        self._tasks: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._stop, self._news = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    @property
    def cost(self) -> WitnessCost:
        """What the witness has cost so far."""
        probes = sum(len(p) for w in list(self._watches.values()) for p in w.probes.values())
        return msgspec.structs.replace(self._cost, probes=probes)

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def watch(self, subjects: tuple[Subject, ...]) -> None:
        """Watch these from now on."""
        self._subjects = subjects

    def forget(self, name: str) -> None:
        """Forget what was seen of an earlier tenant of that name."""
        self.seen = {known: seen for known, seen in self.seen.items() if known != name}

    def later(self, task: Callable[[], None]) -> None:
        """Have something done on the watcher's thread, which may wait where the loop must not."""
        self._tasks.put(task)
        self._news.set()

    def close(self, timeout_s: float = 5.0) -> None:
        """Detach; descriptors that are not closed in time end with the process."""
        self._stop.set()
        self._news.set()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        due_s = 0.0
        while not self._stop.is_set():
            self._news.clear()
            self._do_tasks()
            if time.monotonic() >= due_s:
                due_s = time.monotonic() + LOOK_EVERY_S
                with contextlib.suppress(AlloyError, OSError):
                    self._look()
            self._news.wait(max(0.0, due_s - time.monotonic()))
        for watch in self._watches.values():
            self._detach(watch)

    def _do_tasks(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                task = self._tasks.get_nowait()
                with contextlib.suppress(OSError):
                    task()

    def _look(self) -> None:
        wanted = {subject.name: subject for subject in self._subjects}
        for name, watch in list(self._watches.items()):
            if wanted.get(name) != watch.subject:
                self._detach(watch)
                if watch.tally is not None:
                    watch.tally.page.close()
                del self._watches[name]
        holders = self._holders()
        seen: dict[str, Watched] = {}
        for name, subject in wanted.items():
            if self._stop.is_set():
                return
            watch = self._watches.get(name) or self._take_up(subject)
            seen[name] = self._judge(watch, holders)
        before = {name: watched.bypass for name, watched in self.seen.items()}
        self.seen = seen
        if before != {name: watched.bypass for name, watched in seen.items()}:
            self._changed()

    def _take_up(self, subject: Subject) -> _Watch:
        watch = _Watch(subject, Maps(self._gate_path))
        with contextlib.suppress(OSError):
            watch.tally = _Tally(StatePage(Path(subject.page)))
            watch.inode = Path(subject.page).stat().st_ino
        self._watches[subject.name] = watch
        return watch

    # --- who is there -------------------------------------------------------------------------

    def _judge(self, watch: _Watch, holders: frozenset[int] | None) -> Watched:
        mapped = watch.maps.of(self._pids(watch))
        unmapped: list[int] = []
        foreign: list[int] = []
        static: list[int] = []
        for pid, maps in mapped.items():
            if not maps.drivers and not self._has_open(pid, watch.subject.nodes, holders):
                continue
            if not maps.gated:
                (foreign if maps.foreign else unmapped).append(pid)
            if not maps.drivers:
                static.append(pid)
        counted = self._count(watch, mapped)
        return msgspec.structs.replace(
            counted,
            looked=True,
            page_trouble=self._page_trouble(watch),
            unmapped_pids=tuple(unmapped),
            foreign_pids=tuple(foreign),
            static_pids=tuple(static),
        )

    def _pids(self, watch: _Watch) -> tuple[int, ...]:
        if self._tree is None or not watch.subject.cgroup:
            return ()
        found, watch.whole = pids_below(self._tree / watch.subject.cgroup, CGROUPS_MOST)
        return tuple(sorted(found))

    @staticmethod
    def _has_open(pid: int, nodes: tuple[str, ...], holders: frozenset[int] | None) -> bool:
        if holders is not None:
            return pid in holders
        if not nodes:
            return False
        with contextlib.suppress(OSError):
            for entry in os.scandir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    if os.readlink(entry.path) in nodes:  # noqa: PTH115 - one call of many
                        return True
        return False

    def _page_trouble(self, watch: _Watch) -> str:
        """Return what is wrong with a tenant's page or the look at it, "" if nothing."""
        try:
            page = Path(watch.subject.page).stat(follow_symlinks=False)
        except OSError:
            return "its page is gone"
        if watch.inode and page.st_ino != watch.inode:
            return "its page was replaced"
        if page.st_uid != watch.subject.owner or page.st_mode & 0o022:
            return "its page may be written by others"
        if watch.tally is not None:
            found = watch.tally.page.mend()  # each time, whatever is known already
            watch.misshapen = watch.misshapen or found
        if watch.misshapen:
            return watch.misshapen
        return self._gate_trouble() if watch.whole else "its processes cannot all be looked at"

    def _gate_trouble(self) -> str:
        """Return what is wrong with the interposer's file, "" if nothing."""
        try:
            gate = self._gate_path.stat()
        except OSError:
            return "the gate's library is gone"
        was = self._gate_stat
        if (gate.st_ino, gate.st_size, gate.st_mtime_ns) != (
            was.st_ino,
            was.st_size,
            was.st_mtime_ns,
        ):
            return "the gate's library was changed on disk"
        return ""

    # --- the kernel's count -------------------------------------------------------------------

    def _count(self, watch: _Watch, mapped: dict[int, Mapped]) -> Watched:
        """Return the counts of the newest window that is complete."""
        last = self.seen.get(watch.subject.name, Watched())
        if watch.tally is None or not watch.subject.cgroup or self._tree is None:
            return Watched(witness="no v2 cgroup of its own, in which the kernel could count")
        now_s = time.monotonic()
        due = watch.stubs or now_s - watch.sampled_s >= WINDOW_EVERY_S
        if due:
            self._attach(watch, mapped)
        if not watch.probes:
            return Watched(witness=watch.why) if due else last
        if not watch.stubs:
            self._stop.wait(WINDOW_S)
            found = self._compare(watch)
            self._detach(watch)
            watch.sampled_s = time.monotonic()
            return found
        return self._compare(watch)

    def _attach(self, watch: _Watch, mapped: dict[int, Mapped]) -> None:
        """Probe the libraries that are not probed yet, and begin a new window if there are any."""
        added = False
        for maps in mapped.values():
            for file, path in maps.drivers.items():
                if file not in watch.probes and file not in watch.refused:
                    added = self._probe(watch, file, Path(path)) or added
        if added and watch.tally is not None:
            _, reading = _read(watch, watch.tally)
            watch.readings = [reading]

    def _probe(self, watch: _Watch, file: File, path: Path) -> bool:
        begun_s = time.monotonic()
        probes: list[Witness] = []
        try:
            folder = (self._tree or Path()) / watch.subject.cgroup
            offsets = symbol_offsets(path, LAUNCHES)
            probes.extend(Witness(path, s, folder, offset) for s, offset in offsets.items())
            stub = bool(offsets) and _is_stub(path, offsets)
        except (AlloyError, OSError) as exc:
            for probe in probes:
                probe.close()
            watch.why = str(exc)
            if path.exists():  # the process lives: it will be so the next time
                watch.refused.add(file)
            return False
        watch.stubs = watch.stubs and stub
        watch.probes[file] = probes
        self._cost = msgspec.structs.replace(
            self._cost,
            attached=self._cost.attached + len(probes),
            attaching_s=self._cost.attaching_s + time.monotonic() - begun_s,
        )
        return True

    def _compare(self, watch: _Watch) -> Watched:
        """Return what page and kernel counted in the window in hand, and begin the next one."""
        if watch.tally is None:
            return Watched(witness="its page cannot be read")
        word = "uprobe counters" if watch.stubs else f"uprobe counters, {WINDOW_S} s in 30 s"
        whole, now = _read(watch, watch.tally)
        last = watch.readings[-1]
        if not whole:
            watch.readings = [now]
            why = "a process came or went in this window"
            return Watched(window_s=round(now.at_s - last.at_s, 3), witness=why)
        launched, witnessed = launches_between(last, now)
        took_s = now.at_s - last.at_s
        watch.readings = [r for r in watch.readings if r.at_s > now.at_s - SPAN_S] or [last]
        if not counts_differ(launched, witnessed):  # a trickle adds up over the span
            launched, witnessed = launches_between(watch.readings[0], now)
            took_s = now.at_s - watch.readings[0].at_s
        watch.readings.append(now)
        return Watched(
            launched=launched, witnessed=witnessed, window_s=round(took_s, 3), witness=word
        )

    def _detach(self, watch: _Watch) -> None:
        begun_s = time.monotonic()
        for probes in watch.probes.values():
            for probe in probes:
                probe.close()
        watch.probes.clear()
        watch.stubs = True
        took_s = time.monotonic() - begun_s
        self._cost = msgspec.structs.replace(
            self._cost, detaching_s=self._cost.detaching_s + took_s
        )


def _read(watch: _Watch, tally: _Tally) -> tuple[bool, Reading]:
    """Return one look at both counts, and whether all of the page is accounted for."""
    whole = tally.read()
    least = tally.total
    kernel = sum(probe.count() for probes in watch.probes.values() for probe in probes)
    whole = tally.read() and whole
    return whole, Reading(at_s=time.monotonic(), least=least, most=tally.total, kernel=kernel)


def _is_stub(path: Path, offsets: dict[str, int]) -> bool:
    """Whether every entry begins with the NOP that makes a probe cheap: our own library."""
    with path.open("rb") as file:
        for offset in offsets.values():
            file.seek(offset)
            if file.read(len(NOP)) != NOP:
                return False
    return True


class Maps:
    """The libraries that processes have mapped, read again when a process's size says so."""

    def __init__(self, gate: Path) -> None:
        self._digest = _digest(gate)
        self._kept: dict[int, tuple[bytes, float, Mapped]] = {}
        self._same: dict[File, bool] = {}

    def of(self, pids: tuple[int, ...]) -> dict[int, Mapped]:
        """Return what each process has mapped; a process that is gone is left out."""
        found: dict[int, Mapped] = {}
        now_s = time.monotonic()
        for pid in pids:
            size = read_bytes(f"/proc/{pid}/statm").partition(b" ")[0]
            known = self._kept.get(pid)
            if known is not None:
                still_s = MAPS_EVERY_S if known[0] == size else MAPS_GROWN_S
                if known[2].sound and now_s - known[1] < still_s:
                    found[pid] = known[2]
                    continue
            mapped = self._read(pid)
            if mapped is not None:
                found[pid] = mapped
                self._kept[pid] = (size, now_s, mapped)
        self._kept = {pid: kept for pid, kept in self._kept.items() if pid in found}
        return found

    def _read(self, pid: int) -> Mapped | None:
        try:
            text = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return None
        drivers: dict[File, str] = {}
        gates: dict[File, bool] = {}
        for line in text.splitlines():
            parts = line.split(None, 5) if ".so" in line else ()
            if len(parts) < 6:
                continue
            name = parts[5].rpartition("/")[2]
            if not name.startswith((GATE, *DRIVERS)):
                continue
            major, _, minor = parts[3].partition(":")
            file = (os.makedev(int(major, 16), int(minor, 16)), int(parts[4]))
            if name.startswith(GATE):
                gates[file] = self._ours(file, f"/proc/{pid}/map_files/{parts[0]}")
            else:
                # the mapped file itself, whatever lies at its path by now
                drivers.setdefault(file, f"/proc/{pid}/map_files/{parts[0]}")
        return Mapped(drivers=drivers, gated=any(gates.values()), foreign=bool(gates))

    def _ours(self, file: File, path: str) -> bool:
        """Whether a mapped gate has the content of the agent's, wherever it lies."""
        if file not in self._same:
            with contextlib.suppress(OSError):
                self._same[file] = _digest(Path(path)) == self._digest
        return self._same.get(file, False)


def _digest(path: Path) -> bytes:
    return hashlib.sha256(path.read_bytes()).digest()
