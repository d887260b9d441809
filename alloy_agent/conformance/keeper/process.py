"""The process that keeps one shared device: loop, socket, tenants' lifetimes.

    python -m alloy_agent.conformance.keeper [--emulate] [--agent] DEVICE FOLDER LIBRARIES

Beneath a daemon (`--agent`) its standard input is the daemon's life: when that ends, the keeper
shuts the gates, thaws what it froze and leaves; the daemon's next one adopts the tenants. On its
standard output it says one byte whenever something changed that the audit should look at. Without
a daemon it is started by a command, and leaves when nobody has been there for a while.

Rules that stay true in here:

* Whatever an earlier keeper froze is thawed before anything else.
* One keeper a device: the second one finds the lock taken and leaves.
* The socket is root's alone; a request is one JSON object of bounded length.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import selectors
import socket
import sys
import time
from pathlib import Path
from typing import Final

import msgspec

from alloy_agent.conformance.gate.build import library
from alloy_agent.conformance.gate.device import RENEW_S, TICK_S, SharedDevice
from alloy_agent.conformance.gate.freezer import Freezer
from alloy_agent.conformance.keeper import groups, members
from alloy_agent.conformance.keeper.emulator import Emulator
from alloy_agent.conformance.keeper.members import Member
from alloy_agent.conformance.keeper.messages import (
    HISTORY_POINTS,
    HISTORY_STEP_S,
    REQUEST_BYTES,
    Answer,
    Conditions,
    HandOver,
    History,
    Join,
    Policy,
    Request,
    ShareView,
    TenantView,
    Watched,
)
from alloy_agent.conformance.keeper.names import tenant_name
from alloy_agent.conformance.keeper.terms import check_budget, check_process
from alloy_agent.conformance.keeper.watch import Subject, Watcher
from alloy_agent.errors import AlloyError, ConfigError
from alloy_agent.host.cgroups import Cgroup, detect
from alloy_agent.host.clock import boot_id, boottime_s

ALONE_S: Final = 5.0
LET_GO_S: Final = 0.5


class Keeper:
    """One device's loop, its socket and the tenants' lifetimes."""

    def __init__(
        self,
        device: str,
        folder: Path,
        libraries: Path,
        *,
        emulate: bool = False,
        agent: bool = False,
    ) -> None:
        """Take the device, thaw, and adopt who is there.

        Raises:
            BlockingIOError: Another keeper has it.
            AlloyError: It cannot be kept here.
        """
        self._folder, self._device, self._agent = folder, device, agent
        self._lock = os.open(folder / "keeper.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._topology = detect()
        self._tree = self._topology.unified
        self._thawed: tuple[str, ...] = ()
        freezer = None
        if self._topology.hierarchies:
            freezer = Freezer(self._topology, folder / "frozen")
            self._thawed = freezer.recover()
        self.shared = SharedDevice(device, folder, freezer=freezer)
        gate = library(libraries)
        self._emulator = Emulator(folder, libraries) if emulate else None
        self._environment = {"LD_PRELOAD": str(gate)}
        if self._emulator is not None:
            self._environment |= self._emulator.environment
        self._members: dict[str, Member] = {}
        self._given: dict[str, dict[str, str]] = {}  # the environment that each was answered
        self._policy = Policy()
        self._adopted = self._adopt()
        self._leaving = False
        self._cpu_ratio, self._cpu = 0.0, (boottime_s(), time.process_time())
        self._history: list[tuple[float, float | None, float]] = []
        self._told: object = None
        self._dirty = True
        holders = self._emulator.holders if self._emulator is not None else lambda: None
        tree = Path(self._tree.mount) if self._tree is not None else None
        self._watcher = Watcher(gate, tree, holders, self._look_again)
        self._selector = selectors.DefaultSelector()
        self._listen()

    def _listen(self) -> None:
        path = self._folder / "keeper.sock"
        path.unlink(missing_ok=True)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(str(path))
        path.chmod(0o600)
        self._socket.listen(64)
        self._selector.register(self._socket, selectors.EVENT_READ, self._answer)
        if self._agent:
            self._selector.register(0, selectors.EVENT_READ, self._daemon_spoke)

    def _adopt(self) -> tuple[str, ...]:
        """Take up the tenants that an earlier keeper left; tidy up behind those that ended."""
        adopted = []
        for member in members.load(self._folder):
            join = member.join
            if self._is_there(member):
                with contextlib.suppress(AlloyError, OSError):
                    self._add(join, adopt=True)
                    self._members[join.name] = member
                    adopted.append(join.name)
                    continue
            for suffix in ("state", "order"):
                (self._folder / f"{join.name}.{suffix}").unlink(missing_ok=True)
            self._clear(join.cgroup)
        self._limit()
        return tuple(adopted)

    # --- the loop -----------------------------------------------------------------------------

    def run(self) -> None:
        """Keep the device until nobody is there any more, or it is taken over."""
        self._watch()
        self._watcher.start()
        due_s = told_s = looked_s = busy_s = boottime_s()
        try:
            while not self._leaving:
                now_s = boottime_s()
                if now_s >= due_s:
                    self.shared.tick()
                    due_s = max(due_s + TICK_S, now_s)
                else:
                    self.shared.renew()
                if now_s - looked_s >= LET_GO_S:
                    looked_s = now_s
                    self._let_go()
                if self._dirty or now_s - told_s >= 1.0:
                    self._tell(now_s)
                    told_s = now_s
                busy_s = now_s if self._members else busy_s
                if now_s - busy_s > ALONE_S:
                    break
                for key, _ in self._selector.select(RENEW_S):
                    key.data()
        finally:
            self.close()

    def close(self) -> None:
        """Shut the gates, thaw, and take the traces away; tenants that live keep their pages."""
        if self._members:
            self.shared.leave()
        else:
            self.shared.close()
        os.close(self._lock)  # the next keeper need not wait until the kernel has let go of probes
        self._selector.close()
        self._socket.close()
        for name in ("keeper.sock", "status.json", *(() if self._members else (members.FILE,))):
            (self._folder / name).unlink(missing_ok=True)
        if self._emulator is not None:
            (self._emulator.leave if self._members else self._emulator.close)()
        self._watcher.close()

    def _daemon_spoke(self) -> None:
        """The daemon says nothing; that it can be read means that it has ended."""
        self._leaving = self._leaving or not os.read(0, 64)

    def _look_again(self) -> None:
        self._dirty = True

    # --- tenants ------------------------------------------------------------------------------

    def join(self, request: Join) -> dict[str, str]:
        """Take a tenant in and return its environment.

        Raises:
            ConfigError: It cannot be one.
        """
        tenant_name(request.name)
        check_process(request.name, request.pid, {os.getpid()})
        known, member = self._members.get(request.name), members.member_of(request)
        if known is not None and self._is_there(known):
            if known == member:  # its answer came too late for whoever asked, who asks again
                return {**self._given[request.name], **self._environment}
            raise ConfigError(f"tenant {request.name} runs already", cure="give another --name")
        check_budget(request.budget_ratio)
        if not members.lives(member):
            raise ConfigError(f"tenant {request.name}: pid {request.pid} is gone")
        self._let_go()  # a production tenant that has ended must not keep the next one out
        if groups.is_own(request.cgroup) and self._tree is not None:
            # that of an earlier tenant of this name went with it, after this one was given it
            groups.make(request.cgroup, Path(self._tree.folder("")))
        self._watcher.forget(request.name)
        environment = self._add(request, adopt=False)
        self._members[request.name] = member
        self._keep()
        view = self.view(boottime_s())  # whoever gets the answer finds the tenant shown
        self._publish(msgspec.json.encode(view), news=True)
        return {**environment, **self._environment}

    def _join(self, request: Join) -> dict[str, str]:
        """Take a tenant in; of one that is refused no cgroup stays, unless another one has it."""
        try:
            return self.join(request)
        except AlloyError:
            if all(request.cgroup != member.join.cgroup for member in self._members.values()):
                self._clear(request.cgroup)
            raise

    def _add(self, join: Join, *, adopt: bool) -> dict[str, str]:
        self._given[join.name] = given = self.shared.add(
            join.name,
            join.role,
            weight=join.weight,
            cgroup=join.cgroup,
            uid=join.uid,
            pid=join.pid,
            group=self._group(join.cgroup),
            adopt=adopt,
        )
        return given

    def _group(self, path: str) -> Path | None:
        """Return the folder of a tenant's cgroup, None where it has none."""
        tree = self._tree or next(iter(self._topology.hierarchies), None)
        return Path(tree.folder(path)) if path and tree is not None else None

    def _is_there(self, member: Member) -> bool:
        """Whether the tenant's process lives, or one that it left in its cgroup."""
        if members.lives(member):
            return True
        if not member.join.cgroup:
            return False
        with contextlib.suppress(AlloyError):
            return bool(Cgroup(self._topology, member.join.cgroup).pids())
        return False

    def _let_go(self) -> None:
        gone = [name for name, member in self._members.items() if not self._is_there(member)]
        for name in gone:
            self.shared.remove(name)
            self._given.pop(name, None)
            self._clear(self._members.pop(name).join.cgroup)
        if gone:
            with contextlib.suppress(AlloyError):  # no room: the next keeper finds them gone itself
                self._keep()

    def _keep(self) -> None:
        """Put the tenants on disk, and go by what they ask."""
        members.save(self._folder, tuple(self._members.values()))
        self._limit()
        self._watch()
        self._dirty = True

    def _limit(self) -> None:
        """Go by the smallest of the budgets that somebody asks for."""
        asked = [m.join.budget_ratio for m in self._members.values()]
        stated = [ratio for ratio in (*asked, self._policy.budget_ratio) if ratio is not None]
        default = type(self.shared.limits)().budget_ratio
        budget = min(stated, default=default)
        self.shared.limits = msgspec.structs.replace(self.shared.limits, budget_ratio=budget)
        self.shared.audit_limits = msgspec.structs.replace(  # the promise is the budget
            self.shared.audit_limits,
            slo_ratio=budget,
            null_ratio=0.5 * budget,
            tuned_ratio=2.0 * budget,
        )
        self.shared.held = self._policy.held

    def _watch(self) -> None:
        found = []
        for member in self._members.values():
            join = member.join
            if join.role == "opportunistic":
                owner = os.getuid() if join.uid is None else join.uid
                page = str(self._folder / f"{join.name}.state")
                found.append(
                    Subject(
                        name=join.name,
                        pid=join.pid,
                        page=page,
                        owner=owner,
                        cgroup=join.cgroup,
                        nodes=join.nodes,
                    )
                )
        self._watcher.watch(tuple(found))

    def _clear(self, path: str) -> None:
        """Remove the cgroup that we made for a tenant, and what stood above it for this device."""
        if self._tree is not None:
            groups.clear(path, Path(self._tree.folder("")))

    # --- telling ------------------------------------------------------------------------------

    def _tell(self, now_s: float) -> None:
        self._dirty = False
        then_s, used_s = self._cpu
        used = time.process_time()
        if now_s - then_s >= 5.0:
            self._cpu_ratio, self._cpu = (used - used_s) / (now_s - then_s), (now_s, used)
        view = self.view(now_s)
        told = (view.stage == "blind", view.answer, view.bypass, view.held, view.throttled)
        standing = (told, tuple((t.name, t.frozen, t.trouble) for t in view.tenants))
        news, self._told = standing != self._told, standing
        # a folder on a disk may make its writers wait for longer than a lease lasts
        self._watcher.later(lambda: self._publish(msgspec.json.encode(view), news))

    def _publish(self, status: bytes, news: bool) -> None:
        """Put the status in place, and wake the daemon where it changed what others act on."""
        path = self._folder / "status.json"
        fresh = path.with_suffix(".fresh")
        fresh.write_bytes(status)
        fresh.replace(path)
        if news and self._agent:
            os.write(1, b".")

    def view(self, now_s: float) -> ShareView:
        """Return how the device stands."""
        status = self.shared.status()
        loss = status.loss_ratio
        if not self._history or now_s - self._history[-1][0] >= HISTORY_STEP_S:
            production = None if loss is None else 1.0 / (1.0 + max(loss, -0.5))
            self._history.append((now_s, production, status.lent_ratio))
            del self._history[:-HISTORY_POINTS]
        tenants = tuple(self._tenant(tenant) for tenant in status.tenants)
        return ShareView(
            **{**msgspec.structs.asdict(status), "tenants": tenants},
            keeper="agent" if self._agent else "own",
            keeper_pid=os.getpid(),
            boot_id=boot_id(),
            taken_at_s=now_s,
            cpu_ratio=round(self._cpu_ratio, 4),
            emulated=self._emulator is not None,
            thawed=self._thawed,
            adopted=self._adopted,
            witness=self._watcher.cost,
            history=History(
                age_s=tuple(round(now_s - at_s, 1) for at_s, _, _ in self._history),
                production_ratio=tuple(p and round(p, 4) for _, p, _ in self._history),
                lent_ratio=tuple(round(lent, 4) for _, _, lent in self._history),
            ),
        )

    def _tenant(self, status: msgspec.Struct) -> TenantView:
        fields = msgspec.structs.asdict(status)
        member = self._members.get(fields["name"])
        watched = self._watcher.seen.get(fields["name"], Watched())
        trouble = (fields["trouble"],) if fields["trouble"] else ()
        return TenantView(
            **fields,
            pid=0 if member is None else member.join.pid,
            partition="" if member is None else member.join.partition,
            cgroup="" if member is None else member.join.cgroup,
            watched=watched,
            bypass=(*trouble, *watched.bypass),
        )

    # --- requests -----------------------------------------------------------------------------

    def _answer(self) -> None:
        peer, _ = self._socket.accept()
        with peer, contextlib.suppress(OSError):
            peer.settimeout(0.02)  # a peer that dawdles must not cost the neighbours their lease
            peer.sendall(msgspec.json.encode(self._reply(peer.recv(REQUEST_BYTES))))

    def _reply(self, raw: bytes) -> Answer:
        try:
            request: Request = msgspec.json.decode(raw, type=Request)
            if isinstance(request, Join):
                return Answer(environment=self._join(request))
            if isinstance(request, Policy):
                check_budget(request.budget_ratio)
                self._policy = request
                self._limit()
            elif isinstance(request, Conditions):
                self.shared.throttled = request.throttled
            elif isinstance(request, HandOver):
                self._leaving = True
            self._dirty = True
            return Answer()
        except AlloyError as exc:
            return Answer(error=exc.message, cure=exc.cure)
        except (msgspec.MsgspecError, UnicodeDecodeError) as exc:
            return Answer(error=f"no request: {exc}")


def main(arguments: list[str]) -> int:
    """Keep one device; where another keeper does, leave it to that one."""
    options = {word for word in arguments if word.startswith("--")}
    device, folder, libraries = (word for word in arguments if not word.startswith("--"))
    if "--agent" not in options and os.fork():
        return os.EX_OK  # the command that started it must not have it as a child
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 65536)), hard))
    try:
        keeper = Keeper(
            device,
            Path(folder),
            Path(libraries),
            emulate="--emulate" in options,
            agent="--agent" in options,
        )
    except BlockingIOError:
        return os.EX_TEMPFAIL
    except AlloyError as exc:
        sys.stderr.write(f"keeper of {device}: {exc}\n")
        return os.EX_UNAVAILABLE
    keeper.run()
    return os.EX_OK
