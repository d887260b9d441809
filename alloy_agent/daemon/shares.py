"""The keepers of shared devices beneath the daemon: started, watched, asked, read.

Theory of operation. A keeper (`conformance.keeper`) is a child process for each device that is
shared now; it ends when its standard input does, so that no keeper outlives its daemon. One thread
here starts keepers, notices their end, and hears their one-byte word that something changed. While
no device is shared there is no thread and no process.

Rules that stay true in here:

* What a dead agent froze is thawed before this one opens a device (`thaw_all`).
* Tenants that live are adopted by the next keeper; nobody has to start them again.
* A keeper that a command started hands its device over.
* A keeper that dies is started again, with waits that grow.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import selectors
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

from alloy_agent.conformance.gate.build import library
from alloy_agent.conformance.keeper import client, members
from alloy_agent.conformance.keeper.messages import (
    Conditions,
    HandOver,
    Join,
    Policy,
    Request,
    ShareView,
)
from alloy_agent.errors import AlloyError, BackendError, StoreError
from alloy_agent.host import clock, interpreter

LOG = logging.getLogger(__name__)

LOOK_EVERY_S: Final = 1.0
TELL_EVERY_S: Final = 10.0
WAIT_FIRST_S: Final = 0.1
WAIT_LONGEST_S: Final = 5.0
STOP_S: Final = 1.0


@dataclass
class _Kept:
    """One device's keeper, as the daemon has it."""

    device: str
    folder: Path
    emulate: bool
    process: subprocess.Popen[bytes] | None = None
    failures: int = 0
    not_before_s: float = 0.0
    begun_s: float = 0.0
    policy: Policy = field(default_factory=Policy)
    conditions: Conditions = field(default_factory=Conditions)
    told: set[str] = field(default_factory=set)  # tags of requests that the keeper has taken
    refused: dict[str, str] = field(default_factory=dict)  # tags of those that it has not, and why

    def go_by(self, policy: Policy, conditions: Conditions) -> None:
        """Have the keeper told what is news of these."""
        if policy != self.policy:
            self.policy = policy
            self.told.discard("policy")
        if conditions != self.conditions:
            self.conditions = conditions
            self.told.discard("conditions")


class Hooks(NamedTuple):
    """What the room asks of the daemon, and what it tells.

    `simulated`: whether a device is, so that its keeper emulates it. `policies` and `throttled`:
    what keepers go by, asked each second while a device is shared. `changed`: these devices stand
    otherwise than before. `states`: how these stand should be told, on a change and each ten
    seconds.
    """

    simulated: Callable[[str], bool]
    policies: Callable[[], Mapping[str, Policy]]
    throttled: Callable[[], Mapping[str, str]]
    changed: Callable[[frozenset[str]], None]
    states: Callable[[frozenset[str]], None]


class Shares:
    """The shared devices of a node, for the daemon.

    Args:
        root: The folder of all shared devices.
        libraries: Where the gate is, or is built; `/run` may allow no code.
        hooks: What the rest of the daemon says and hears, on the thread of this room.
    """

    def __init__(self, root: Path, libraries: Path, hooks: Hooks) -> None:
        self.root, self._libraries, self._hooks = root, libraries, hooks
        self.joining = threading.Lock()
        self._kept: dict[str, _Kept] = {}
        self._told_s = 0.0
        self._policies: Mapping[str, Policy] = {}
        self._views: dict[str, ShareView] = {}
        self._lock = threading.RLock()
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake_read, selectors.EVENT_READ, None)

    # --- life ---

    def start(self) -> None:
        """Take up the devices on which an earlier agent, or a command, left tenants."""
        for path in sorted(self.root.glob(f"*/{members.FILE}")):
            if members.load(path.parent):
                self._ensure(path.parent.name)

    def stop(self) -> None:
        """Have every keeper leave; tenants stay, production goes on, the others wait."""
        with self._lock:
            self._stopping = True
            processes = [kept.process for kept in self._kept.values() if kept.process is not None]
        for process in processes:
            if process.stdin is not None:
                with contextlib.suppress(OSError):
                    process.stdin.close()
        self._wake()
        until_s = time.monotonic() + STOP_S
        for process in processes:  # one that still detaches probes has let go of all else
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, until_s - time.monotonic()))
        if self._thread is not None:
            self._thread.join(STOP_S)

    # --- what others ask ---

    def join(self, device: str, request: Join) -> dict[str, str]:
        """Return the environment of a new tenant, once the device's keeper has it.

        Raises:
            BackendError: No keeper came up.
            ConfigError: The keeper refuses.
            UnsupportedError: There is no gate on this host, and no compiler to build it.
        """
        folder = client.folder_of(self.root, device)
        library(self._libraries)  # a host that cannot build it is told so at once
        self._ensure(device)
        until_s = time.monotonic() + client.START_S
        while time.monotonic() < until_s:
            try:
                answer = client.ask(folder, request)
            except OSError:
                self._ensure(device)
                time.sleep(client.LOOK_AGAIN_S)
                continue
            self._wake()
            return answer.environment
        raise BackendError(
            f"the keeper of {device} does not come up", cure="read the log of `alloy-agent run`"
        )

    def views(self) -> tuple[ShareView, ...]:
        """Return how every shared device stood a moment ago."""
        oldest_s = clock.boottime_s() - 5.0
        with self._lock:
            return tuple(view for view in self._views.values() if view.taken_at_s > oldest_s)

    def look(self) -> None:
        """Look at once: a policy has changed."""
        self._wake()

    # --- the thread ---

    def _ensure(self, device: str) -> None:
        """Have a keeper for a device; it is started on the thread of this room."""
        folder = client.folder_of(self.root, device)
        with self._lock:
            if self._stopping:
                raise BackendError("the agent is stopping", cure="start it again")
            if device not in self._kept:
                folder.mkdir(mode=0o755, parents=True, exist_ok=True)
                kept = _Kept(device, folder, device == "emulated" or self._hooks.simulated(device))
                self._kept[device] = kept
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name="shares", daemon=True)
                    self._thread.start()
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # full: it wakes anyway
            os.write(self._wake_write, b".")

    def _run(self) -> None:
        """Look each second while a device is shared, and at once when something is said."""
        while not self._stopping:
            for key, _ in self._selector.select(self._patience_s()):
                with contextlib.suppress(OSError):
                    if not os.read(key.fd, 4096):
                        self._selector.unregister(key.fd)  # a keeper has closed it: it is ending
            try:
                self._look()
            except (AlloyError, OSError) as exc:
                LOG.warning("shares_not_read", extra={"reason": str(exc)})

    def _patience_s(self) -> float | None:
        """Return how long nothing has to be done by itself; None: until something is said."""
        now_s = time.monotonic()
        with self._lock:
            waits = [k.not_before_s - now_s for k in self._kept.values() if k.process is None]
            return max(0.0, min([LOOK_EVERY_S, *waits])) if self._kept else None

    def _look(self) -> None:
        with self._lock:
            kept = list(self._kept.values())
        if kept:
            try:
                self._policies = self._hooks.policies()
            except StoreError as exc:  # what was in force stays so
                LOG.warning("policies_not_read", extra={"reason": str(exc)})
            policies, throttled = self._policies, self._hooks.throttled()
            for one in kept:
                one.go_by(
                    policies.get(one.device, Policy()),
                    Conditions(throttled=throttled.get(one.device, "")),
                )
                self._attend(one)
        self._read()

    def _attend(self, kept: _Kept) -> None:
        """Start a keeper that is not there, notice one that has ended, tell one what is news."""
        if kept.process is None:
            if not self._stopping and time.monotonic() >= kept.not_before_s:
                self._start(kept)
            return
        code = kept.process.poll()
        if code is not None:
            self._ended(kept, code)
            return
        for request in (kept.policy, kept.conditions):
            tag = str(request.__struct_config__.tag)
            if tag not in kept.told and self._tell(kept, request):
                kept.told.add(tag)

    @staticmethod
    def _tell(kept: _Kept, request: Request) -> bool:
        """Return whether a keeper goes by a request now; one that it refuses is asked again."""
        tag, why = str(request.__struct_config__.tag), ""
        try:
            client.ask(kept.folder, request)
        except OSError:  # it is not up yet
            return False
        except AlloyError as exc:
            why = str(exc)
        if why and why != kept.refused.get(tag):
            fields = {"device": kept.device, "request": tag, "reason": why}
            LOG.warning("keeper_refuses", extra=fields)
        kept.refused[tag] = why
        with contextlib.suppress(OSError):
            client.tell_refused(kept.folder, "; ".join(filter(None, kept.refused.values())))
        return not why

    def _start(self, kept: _Kept) -> None:
        kept.not_before_s = time.monotonic() + LOOK_EVERY_S  # where it cannot be started
        argv = client.command(
            kept.device, kept.folder, self._libraries, emulate=kept.emulate, agent=True
        )
        kept.process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            env=client.environment(),
            cwd=interpreter.FOLDER,
        )
        kept.begun_s, kept.told, kept.refused = time.monotonic(), set(), {}
        if kept.process.stdout is not None:
            self._selector.register(kept.process.stdout, selectors.EVENT_READ, kept.device)
        LOG.info("keeper_started", extra={"device": kept.device, "pid": kept.process.pid})

    def _ended(self, kept: _Kept, code: int) -> None:
        """Take leave of a keeper; start it again unless nobody is on its device any more."""
        process, kept.process = kept.process, None
        if process is not None:
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(process.stdout)  # type: ignore[arg-type]
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    with contextlib.suppress(OSError):
                        stream.close()
        if code == os.EX_OK and not members.load(kept.folder):
            with self._lock:
                self._kept.pop(kept.device, None)
            with contextlib.suppress(OSError):
                client.tell_refused(kept.folder, "")
            LOG.info("keeper_left", extra={"device": kept.device})
            return
        if code == os.EX_TEMPFAIL:  # a command's keeper has the device
            with contextlib.suppress(OSError, AlloyError):
                client.ask(kept.folder, HandOver())
        long = time.monotonic() - kept.begun_s > WAIT_LONGEST_S
        kept.failures = 1 if long else kept.failures + 1
        wait_s = min(WAIT_LONGEST_S, WAIT_FIRST_S * 2.0 ** min(kept.failures - 1, 10))
        kept.not_before_s = time.monotonic() + wait_s
        LOG.warning(
            "keeper_ended",
            extra={"device": kept.device, "code": code, "again_in_s": round(wait_s, 3)},
        )

    def _read(self) -> None:
        """Read how the devices stand, and tell of those that changed."""
        fresh = {view.device: view for view in client.views(self.root)}
        with self._lock:
            before, self._views = self._views, fresh
        news = {
            device
            for device in before.keys() | fresh.keys()
            if standing(before.get(device)) != standing(fresh.get(device))
        }
        for device in sorted(news):
            _log(device, before.get(device), fresh.get(device))
        if news:
            self._hooks.changed(frozenset(news))
        now_s = time.monotonic()
        due = now_s - self._told_s >= TELL_EVERY_S
        self._told_s = now_s if due else self._told_s
        told = frozenset(news | (fresh.keys() if due else set()))
        if told:
            self._hooks.states(told)


def standing(view: ShareView | None) -> tuple[object, ...]:
    """Return what of a shared device others act on, and nothing that only ages."""
    if view is None:
        return ()
    tenants = tuple((t.name, t.role, t.partition, t.frozen, t.bypass) for t in view.tenants)
    told = tuple((t.name, t.watched.witnessed is None) for t in view.tenants)
    why = (view.held, view.throttled, view.not_in_force)
    return (view.stage == "blind", view.answer, *why, tenants, told)


def thaw_all(root: Path) -> tuple[str, ...]:
    """Thaw what dead keepers left frozen; return the cgroups. A living keeper's are its own."""
    thawed: list[str] = []
    for folder in sorted({note.parent.parent for note in root.glob("*/frozen/*.frozen")}):
        try:
            thawed += _thaw(folder)
        except (AlloyError, OSError) as exc:  # the other devices' tenants must run again
            LOG.warning("not_thawed", extra={"device": folder.name, "reason": str(exc)})
    for path in thawed:
        LOG.warning("thawed", extra={"cgroup": path, "why": "an agent that ended had frozen it"})
    return tuple(thawed)


def _thaw(folder: Path) -> tuple[str, ...]:
    from alloy_agent.conformance.gate.freezer import Freezer
    from alloy_agent.host.cgroups import detect

    lock = os.open(folder / "keeper.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return ()
    else:
        return Freezer(detect(), folder / "frozen").recover()
    finally:
        os.close(lock)


def _log(device: str, before: ShareView | None, after: ShareView | None) -> None:
    if after is None:
        LOG.info("share_ended", extra={"device": device})
        return
    if before is None or before.keeper_pid != after.keeper_pid:
        extra = {"device": device, "adopted": after.adopted, "thawed": after.thawed}
        LOG.info("share_kept", extra=extra)
    known = set() if before is None else set(before.bypass)
    for text in after.bypass:
        if text not in known:
            LOG.warning("bypass", extra={"device": device, "found": text})
    if before is not None and before.answer != after.answer:
        LOG.info("share_verdict", extra={"device": device, "answer": after.answer})
