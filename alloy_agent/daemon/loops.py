"""The daemon: its loops, its listeners, and what it does with signals.

    signals ---> main thread: reload, stop, watchdog
    observe      every second and on device events: one snapshot for everyone
    judge        every second: samples to windows, gates, health and usage
    keep         on each new snapshot: bring back what the layout wants and somebody took away
    audit        the auditor's own loop, event-driven
    http, control                  listeners, answered from what the loops have seen

Rules that stay true in here:

* A tick that fails is logged and counted, and the loop goes on; a broken invariant ends the
  process, and the next start recovers.
* `/healthz` looks at the loops alone, never at devices.
* Stopping leaves partitions and tenants as they are, and takes less than two seconds: what is
  being done to a device may end its step, nothing new is begun.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from alloy_agent import __version__
from alloy_agent.daemon import keeping, logs, memory, starts
from alloy_agent.daemon.addresses import share_root, socket_of
from alloy_agent.daemon.api import LayoutRequest
from alloy_agent.daemon.documents import StatusDocument
from alloy_agent.daemon.feed import Feed
from alloy_agent.daemon.node import Node
from alloy_agent.errors import AlloyError, ConfigError, InvariantError, StoreError, StoreFullError
from alloy_agent.host import clock, notify, priority
from alloy_agent.model import (
    ApplyReport,
    AuditResult,
    DeviceEvent,
    DeviceId,
    Layout,
    Lease,
    LeaseState,
    Scope,
    Signal,
    Snapshot,
)
from alloy_agent.store.files import has_room

if TYPE_CHECKING:
    from alloy_agent.config import BrainSettings, Settings
    from alloy_agent.conformance.auditor import Auditor
    from alloy_agent.conformance.checks import Intent
    from alloy_agent.conformance.keeper.messages import ShareView
    from alloy_agent.daemon.claims import Claims
    from alloy_agent.daemon.draining import Outlets
    from alloy_agent.daemon.live import TopDocument
    from alloy_agent.daemon.service import NodeService
    from alloy_agent.daemon.shares import Shares
    from alloy_agent.daemon.telemetry import Telemetry
    from alloy_agent.leases import View
    from alloy_agent.model import Fact
    from alloy_agent.proto import agent_pb2 as pb
    from alloy_agent.store import Store
    from alloy_agent.telemetry.drains import Drained
    from alloy_agent.telemetry.metrics import MetricsPage
    from alloy_agent.uplink.client import Uplink
    from alloy_agent.uplink.desk import LeaseDesk

LOG = logging.getLogger(__name__)

KEEP_PERIOD_S = 5.0
FENCE_PERIOD_S = 5.0
LEASE_PERIOD_S = 1.0
SLOW_PERIOD_S = 10.0  # quantiles to the brain
KEPT_S = 4.0  # of the 6.4 s of frames that a device's page keeps
LATE_S = 30.0  # a loop without a finished tick for so long is not healthy
STOP_JOIN_S = 1.0
TAKE_OVER_S = 600.0  # an old agent beside a new one may have a long step to end
DEFECT = 70  # EX_SOFTWARE of sysexits.h
AGAIN = -1  # no exit code: the state can be written again, so everything is built anew
LIVE_SETTINGS = ("log", "layout")  # what a reload can change; the rest needs a restart


class Loop:
    """One thread that ticks every `period_s`, and at once when woken. Never overlaps itself."""

    def __init__(
        self,
        name: str,
        period_s: float,
        tick: Callable[[], None],
        on_defect: Callable[[BaseException], None],
    ) -> None:
        self.name = name
        self.period_s = period_s
        self.overruns = 0
        self.failures = 0
        self.finished_s = clock.boottime_s()
        self._tick = tick
        self._on_defect = on_defect
        self._wake = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begin to tick, the first time at once."""
        self.finished_s = clock.boottime_s()
        self._thread.start()

    def wake(self) -> None:
        """Tick as soon as possible."""
        self._wake.set()

    def stop(self) -> None:
        """Ask for the end; the tick in hand ends first."""
        self._stop.set()
        self._wake.set()

    def join(self, timeout_s: float) -> bool:
        """Wait for the end; return whether it came."""
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def late(self, now_s: float) -> bool:
        """Whether no tick has finished for much longer than the period."""
        return now_s - self.finished_s > max(LATE_S, 5 * self.period_s)

    def _run(self) -> None:
        while not self._stop.is_set():
            begun_s = time.monotonic()
            self._wake.clear()
            if not self._once():
                return
            left_s = self.period_s - (time.monotonic() - begun_s)
            if left_s <= 0:
                self.overruns += 1
            self._wake.wait(max(left_s, 0.0))

    def _once(self) -> bool:
        """Tick once; return whether to go on."""
        try:
            self._tick()
        except InvariantError as exc:
            self._on_defect(exc)
            return False
        except AlloyError as exc:
            self.failures += 1
            self.finished_s = clock.boottime_s()  # it turns; what it met is not its fault
            LOG.warning("tick_failed", extra={"loop": self.name, "reason": str(exc)})
        except Exception:
            self.failures += 1  # a defect that stays makes the loop late, and /healthz red
            LOG.exception("tick_defect", extra={"loop": self.name})
        else:
            self.finished_s = clock.boottime_s()
        return True


class Seen:
    """The newest of everything, for those who only read."""

    def __init__(self) -> None:
        self.snapshot: Snapshot | None = None
        self.snapshot_due = False  # something said that the node has changed
        self.audit: AuditResult | None = None
        self.keeping = keeping.Keeping()


class Daemon:
    """The agent as a service.

    Args:
        settings: What to run.
        reread: Returns the settings anew, for SIGHUP.
        standalone: Embed the reference brain.
    """

    def __init__(
        self, settings: Settings, *, reread: Callable[[], Settings], standalone: bool = False
    ) -> None:
        self.settings = settings
        self.standalone = standalone
        self.seen = Seen()
        self.feed = Feed(self._leases)
        self.node: Node
        self.page: MetricsPage
        self.desk: LeaseDesk | None = None
        self.auditor: Auditor | None = None
        self.uplink: Uplink | None = None
        self.telemetry: Telemetry | None = None
        self.claims: Claims | None = None
        self.shares: Shares | None = None
        self._opening = threading.Lock()
        self._outlets: Outlets | None = None
        self._early: list[DeviceEvent] = []  # came before the telemetry was there
        self._slow_s = 0.0
        self._reread = reread
        self._inbox: queue.SimpleQueue[int | BaseException] = queue.SimpleQueue()
        self._started_s = clock.boottime_s()
        self._loops: dict[str, Loop] = {}
        self._layout: Layout | None = None
        self._layout_text: LayoutRequest | None = None
        self._metrics_url = ""
        self._starts: tuple[starts.Start, ...] = ()

    # --- life ---

    def run(self) -> int:
        """Run until a signal; return the exit code.

        Raises:
            AlloyError: The daemon cannot start; nothing was changed.
        """
        if self.standalone and self.settings.brain.address is not None:
            raise ConfigError(
                f"run --standalone: brain.address is {self.settings.brain.address}",
                cure="leave out one of the two: a node obeys one brain",
            )
        memory.one_arena()
        priority.take_turns()
        if self.settings.sampler.raise_priority:
            priority.go_first()
        logs.configure(self.settings.log.level, self.settings.log.format)
        with contextlib.ExitStack() as stack:
            stack.enter_context(_signals(self._inbox.put))
            self._start(stack)
            return self._serve()

    def _start(self, stack: contextlib.ExitStack) -> None:
        """Build everything, in an order in which a refusal comes before any effect."""
        self._layout_text = _layout_file(self.settings)
        self._thaw()
        self.node = Node(
            self.settings, write=True, sample=True, salvage=True, on_event=self._on_event
        )
        self._start_claims(stack)
        self._enter_node(stack)
        self._starts = starts.begin(Path(self.settings.state_dir))
        self._log_settings()
        self._start_shares(stack)
        self._start_telemetry(stack)
        self._start_web(stack)
        self._start_audit(stack)
        self._start_brain(stack, self._start_control(stack))
        self._start_loops(stack)
        if self.claims is not None:
            self.claims.attach()
            stack.callback(self.claims.stop)  # first of all: calls in hand still need the rooms

    def _thaw(self) -> None:
        """Undo the freezes of an agent that died, before anything that may take its time."""
        root = share_root(self.settings)
        if root.is_dir():
            from alloy_agent.daemon.shares import thaw_all

            thaw_all(root)

    def _start_shares(self, stack: contextlib.ExitStack) -> None:
        """Keep the devices that are shared already; the room is opened when it is needed first."""
        if self.node.degraded:
            return
        stack.callback(self._stop_shares)
        root = share_root(self.settings)
        if next(root.glob("*/members.json"), None) is not None:
            self._share_room().start()

    def _stop_shares(self) -> None:
        if self.shares is not None:
            self.shares.stop()

    def _share_room(self) -> Shares:
        """Return the room of shared devices; a node that shares none never loads it."""
        with self._opening:
            if self.shares is None:
                self.shares = self._open_shares()
            return self.shares

    def _open_shares(self) -> Shares:
        from alloy_agent.daemon.shares import Hooks, Shares
        from alloy_agent.daemon.shareviews import rate_states
        from alloy_agent.daemon.sharing import Throttles, policies, stated_policies

        throttles, node = Throttles(), self.node

        def states(devices: frozenset[str]) -> None:
            self.feed.rated(rate_states(devices, shares.views(), clock.boottime_s()))

        shares = Shares(
            share_root(self.settings),
            Path(self.settings.state_dir) / "lib",
            Hooks(
                simulated=self._is_simulated,
                policies=lambda: policies(stated_policies(node), node.store.claims()),
                throttled=lambda: throttles.look(self.measured()),
                changed=self._on_shares,
                states=states,
            ),
        )
        self.feed.rates_of(
            lambda: rate_states(
                [v.device for v in shares.views()], shares.views(), clock.boottime_s()
            )
        )
        return shares

    def _is_simulated(self, device: str) -> bool:
        snapshot = self.seen.snapshot or self.node.observe()
        return any(d.id == device and d.simulated for d in snapshot.devices)

    def _on_shares(self, devices: frozenset[str]) -> None:
        if self.auditor is not None:
            self.auditor.reconsider(devices)

    def _start_claims(self, stack: contextlib.ExitStack) -> None:
        """Let a kubelet find the agent before devices are opened: its calls wait meanwhile."""
        if not self.settings.kubernetes.enabled:
            return
        from alloy_agent.daemon.claims import Claims

        self.claims = Claims(self)
        stack.callback(self.claims.stop)
        self.claims.start()

    def _enter_node(self, stack: contextlib.ExitStack) -> None:
        """Open the node; during an update beside an old agent, once that one has ended."""
        until_s = time.monotonic() + (TAKE_OVER_S if self.settings.kubernetes.instance else 0.0)
        while True:
            try:
                stack.enter_context(self.node)
            except StoreError:
                if time.monotonic() >= until_s or not self._inbox.empty():
                    raise
                time.sleep(0.2)
            else:
                return

    def _log_settings(self) -> None:
        from alloy_agent.config import unknown_variables

        fields = {"version": __version__, "pid": os.getpid(), "node": self.settings.node_name}
        settings = msgspec.to_builtins(self.settings)
        settings["socket_path"] = str(socket_of(self.settings))  # in force, not as it was set
        LOG.info("starting", extra={**fields, "settings": settings})
        if len(self._starts) > 1 and not self._starts[-2].asked:
            LOG.warning("ended_before", extra={"reason": self._starts[-2].ended})
        for variable, close in unknown_variables(os.environ):
            LOG.warning("unknown_variable", extra={"variable": variable, "meant": close})

    def _start_telemetry(self, stack: contextlib.ExitStack) -> None:
        """Take up health, drains and usage as they were, and listen from now on."""
        from alloy_agent.daemon.telemetry import Hooks, Telemetry
        from alloy_agent.daemon.telemetry.samples import Samples
        from alloy_agent.telemetry.kernel_log import KernelLog

        settings, kept = self.settings.telemetry, not self.node.degraded
        hooks = Hooks(
            health=self.feed.health_changed,
            gates=self.feed.gates_changed,
            usage=self.feed.used,
            drains=self._on_drain,
        )
        store = self.node.store if kept else None
        telemetry = Telemetry(
            self.node.workers,
            hooks,
            store=store,
            state_dir=Path(self.settings.state_dir) if kept else None,
            shadow=settings.shadow,
            kernel_log=KernelLog if settings.kernel_log else None,
        )
        stack.callback(telemetry.close)
        self.feed.judge_by(Samples(telemetry).message, telemetry.draining)
        self.telemetry = telemetry
        self.node.drains = lambda: telemetry.drains
        early, self._early = self._early, []
        for event in early:
            telemetry.event(event)
        self._start_outlets(stack, telemetry, store)

    def _start_outlets(
        self, stack: contextlib.ExitStack, telemetry: Telemetry, store: Store | None
    ) -> None:
        """Bring Slurm and the hook to what is drained already, and from now on."""
        from alloy_agent.daemon.draining import Outlets, outlets_of

        self._outlets = Outlets(outlets_of(self.settings, store), lambda: telemetry.drains)
        stack.callback(self._outlets.stop)
        self._outlets.start()

    def _on_drain(self, _drained: Drained, _begins: bool) -> None:
        self.feed.drains_changed()
        if self._outlets is not None:
            self._outlets.changed()

    def _start_web(self, stack: contextlib.ExitStack) -> None:
        from alloy_agent.daemon.web import Pages, WebServer

        self.page = self._metrics_page()
        if not self.settings.metrics.enabled:
            return
        dcgm = self._dcgm_page().render if self.settings.metrics.dcgm else None
        pages = Pages(
            metrics=self.page.render,
            health=self.health,
            ready=lambda: self.ready() or (self.node.degraded if self.node.full else None),
            openmetrics=self.page.render_openmetrics,
            dcgm=dcgm,
        )
        server = WebServer(self.settings.metrics, pages)
        stack.callback(server.stop)
        server.start()
        self._metrics_url = server.url
        paths = ("/metrics", "/healthz", "/readyz")
        LOG.info("serving", extra={"what": "http", "addresses": [server.url + p for p in paths]})

    def _start_audit(self, stack: contextlib.ExitStack) -> None:
        settings = self.settings.audit
        if not settings.enabled:
            return
        from alloy_agent.conformance.auditor import Auditor, Timing

        degraded = bool(self.node.degraded)
        self.auditor = Auditor(
            self,
            self.node.identity,
            store=None if degraded else self.node.store,
            evidence=self.node.evidence(),
            timing=Timing(
                period_s=settings.period_s,
                poll_period_s=settings.poll_period_s,
                events=settings.events,
            ),
            on_result=self._on_audit,
            on_finding=self.feed.found,
            shared=self.node.shared,
        )
        self.auditor.start()
        stack.callback(self.auditor.stop)

    def _on_audit(self, result: AuditResult) -> None:
        self.seen.audit = result
        self.feed.audited(result)

    # What the auditor judges: `conformance.auditor.Sources`.

    def observe(self) -> Snapshot:
        """Return the node as it is now, for the auditor and for everyone else."""
        before = self.seen.snapshot
        snapshot = self.node.observe()
        self.seen.snapshot = snapshot
        self.feed.saw(snapshot)
        keep = self._loops.get("keep")
        if keep is not None and (
            before is None or keeping.geometry(before) != keeping.geometry(snapshot)
        ):
            keep.wake()
        return snapshot

    def device_facts(self, snapshot: Snapshot) -> Sequence[Fact]:
        """Return what the backends show of all devices."""
        return self.node.device_facts(snapshot)

    def intent(self) -> Intent:
        """Return what ought to be."""
        return self.node.intent()

    def _start_control(self, stack: contextlib.ExitStack) -> NodeService:
        from alloy_agent.control import ControlServer
        from alloy_agent.daemon.service import NodeService

        path = socket_of(self.settings)
        if not self.node.degraded:
            self.desk = self._new_desk()
        service = NodeService(
            self.node,
            status=self.status,
            audit=self.audit_now,
            metrics=self.page.render,
            touched=self._touched,
            watch=self.feed.watch,
            handle=None if self.desk is None else self._handle,
            top=self.top,
        )
        server = ControlServer(service, path, on_defect=self._on_defect)
        server.start()
        stack.callback(server.stop)
        LOG.info("serving", extra={"what": "control", "addresses": [f"unix:{path}"]})
        return service

    def _start_brain(self, stack: contextlib.ExitStack, service: NodeService) -> None:
        """Dial the brain that the settings name; what it asks is done by the socket's service."""
        settings = self.settings.brain
        if self.standalone and not self.node.degraded:
            settings = self._embed_brain(stack)
        if settings.address is None or self.node.degraded:
            return
        from alloy_agent.control import answer
        from alloy_agent.daemon.pushing import PushLoop
        from alloy_agent.uplink.client import Uplink
        from alloy_agent.uplink.outbox import Outbox

        store = self.node.store
        outbox = Outbox(store, self.node.name, clock.boot_id(), settings.outbox_records)
        self.uplink = Uplink(
            settings,
            outbox,
            self._hello,
            self.feed.state,
            lambda command, emit: answer(service, _for_brains(command), emit),
            self._on_defect,
        )
        self.feed.forward(outbox.add, self.uplink.offer)
        self._loops["telemetry"] = PushLoop(
            self.node.workers, 1.0 / settings.rate_hz, self.tick_telemetry, self._on_defect
        )
        self.uplink.start()
        stack.callback(self.uplink.stop)
        LOG.info("dialling", extra={"brain": settings.address})

    def _embed_brain(self, stack: contextlib.ExitStack) -> BrainSettings:
        """Start the reference brain in this process; return how to dial it.

        Its ledger and its socket are in the state directory, which is root's alone. Its term is
        above that of any brain this node has obeyed, since its operator wants it in office.
        """
        from alloy_brain.embedded import EmbeddedBrain
        from alloy_brain.identity import IdentityError
        from alloy_brain.ledger import LedgerError
        from alloy_brain.server import BrainSettings as Serving

        state_dir = Path(self.settings.state_dir)
        obeyed = 0 if self.desk is None else self.desk.ledger.brain_epoch
        serving = Serving(
            address=f"unix:{state_dir / 'brain.sock'}",
            ledger=str(state_dir / "brain.db"),
            name=f"{self.node.name}-standalone",
            least_term=obeyed + 1,
        )
        try:
            brain = stack.enter_context(EmbeddedBrain(serving))
        except (IdentityError, LedgerError) as exc:
            raise ConfigError(f"run --standalone: {exc}") from exc
        LOG.info("serving", extra={"what": "placement", "addresses": [brain.address]})
        return msgspec.structs.replace(self.settings.brain, address=brain.address)

    def _drain(self, telemetry: Telemetry, command: pb.BrainMessage) -> pb.Reply:
        """Drain or undrain; what cannot be kept is refused, and a full disk stops every change."""
        from alloy_agent.daemon.draining import drain_reply, reaches_beyond

        if self.node.degraded:
            raise StoreError(f"no changes are made: {self.node.degraded}")
        try:
            return drain_reply(
                telemetry,
                command,
                self.observe,
                lambda drained: reaches_beyond(self.settings, drained),
            )
        except StoreFullError as exc:
            self.node.degrade(str(exc), full=True)
            raise

    def _handle(self, command: pb.BrainMessage) -> pb.Reply:
        """Do what changes only this node's books: leases, drains, shared devices."""
        from alloy_agent.daemon.words import check_words

        check_words(command)
        kind = command.WhichOneof("body")
        if kind in ("drain", "undrain") and self.telemetry is not None:
            return self._drain(self.telemetry, command)
        if kind in ("join", "set_rate_policy") and not self.node.degraded:
            from alloy_agent.daemon.sharing import join_reply, policy_reply

            if kind == "join":
                reply = join_reply(self.node, self._share_room(), command)
                self._touched()
                return reply
            reply = policy_reply(self.node, command)
            if self.shares is not None:
                self.shares.look()
            return reply
        if self.desk is None:
            from alloy_agent.proto.failures import unknown_command_reply

            return unknown_command_reply(command.id, "a command that needs the lease book")
        return self.desk.handle(command)

    def _hello(self) -> pb.Hello:
        """Return who this node is."""
        from alloy_agent.leases import Ledger
        from alloy_agent.uplink import codec

        capabilities = []
        for worker in self.node.workers:
            with contextlib.suppress(AlloyError):  # it is down; snapshots say so
                capabilities.append(worker.capabilities())
        return codec.hello(
            node=self.node.name,
            cluster="",
            boot_id=clock.boot_id(),
            agent_version=__version__,
            capabilities=capabilities,
            ledger=Ledger() if self.desk is None else self.desk.ledger,
            now_s=clock.boottime_s(),
        )

    def tick_telemetry(self) -> None:
        """Offer the brain one sample of the node; only the newest counts."""
        if self.uplink is None:
            return
        sample = self.feed.sample()
        if sample is not None:
            self.uplink.offer(sample)
        now_s = clock.boottime_s()
        if self.telemetry is not None and now_s - self._slow_s >= SLOW_PERIOD_S:
            self._slow_s = now_s
            quantiles = self.telemetry.quantiles(now_s)
            named = ((name, key[0], found) for key, name, found in quantiles)
            self.uplink.offer(self.feed.slow(named))

    def tick_judge(self) -> None:
        """Turn what was sampled and observed into windows, gates, health and usage."""
        snapshot = self.seen.snapshot
        if snapshot is None or self.telemetry is None:
            return
        leases = {str(p.partition): str(x.id) for x in self._leases() for p in x.pieces}
        self.telemetry.tick(snapshot, leases)

    def _start_loops(self, stack: contextlib.ExitStack) -> None:
        self._add_loop("observe", self.settings.observe.period_s, self.tick_observe)
        self._add_loop("judge", min(self.settings.telemetry.period_s, KEPT_S), self.tick_judge)
        self._add_loop("keep", KEEP_PERIOD_S, self.tick_keep)
        self._add_loop("fences", FENCE_PERIOD_S, self.node.sweep_fences)
        if self.desk is not None:
            self._add_loop("leases", LEASE_PERIOD_S, self.tick_leases)
        if self.claims is not None and not self.node.degraded:
            self._add_loop("kubernetes", LEASE_PERIOD_S, self.claims.tick)
        stack.callback(self._stop_loops)
        for loop in self._loops.values():
            loop.start()

    def _add_loop(self, name: str, period_s: float, tick: Callable[[], None]) -> None:
        self._loops[name] = Loop(name, period_s, tick, self._on_defect)

    def _stop_loops(self) -> None:
        """Stop all loops; a device call that does not return is left to its worker's end."""
        if self.node.reconciler is not None:
            self.node.reconciler.stop()
        for loop in self._loops.values():
            loop.stop()
        until_s = time.monotonic() + STOP_JOIN_S
        for loop in self._loops.values():
            if not loop.join(max(0.0, until_s - time.monotonic())):
                LOG.warning("loop_left", extra={"loop": loop.name})

    # --- main thread ---

    def _serve(self) -> int:
        """Wait for signals and feed the watchdog; return the exit code."""
        interval_s = notify.watchdog_interval_s()
        announced = False
        while True:
            try:
                message = self._inbox.get(
                    timeout=min(interval_s or 1.0, 1.0 if announced else 0.05)
                )
            except queue.Empty:
                message = None
            if isinstance(message, BaseException):
                LOG.critical("defect", exc_info=message)
                self._ended(f"defect: {message}", asked=False)
                return DEFECT
            if message in (signal.SIGTERM, signal.SIGINT):
                LOG.info("stopping", extra={"signal": signal.Signals(message).name})
                notify.sd_notify(notify.STOPPING)
                self._ended(f"stopped by {signal.Signals(message).name}", asked=True)
                return 0
            if message == signal.SIGHUP:
                self._reload()
            if self.node.full and has_room(Path(self.settings.state_dir)):
                LOG.warning("room_again", extra={"was": self.node.degraded})
                self._ended("started anew: there is room for the state again", asked=True)
                return AGAIN
            announced = announced or self._announce()
            if interval_s is not None and self.health() is None:
                notify.sd_notify(notify.WATCHDOG)

    def _ended(self, why: str, *, asked: bool) -> None:
        starts.end(Path(self.settings.state_dir), why, asked=asked)

    def _announce(self) -> bool:
        """Tell the service manager once that the node was seen; return whether it was."""
        if self.ready() is not None:
            return False
        snapshot = self.seen.snapshot
        devices = 0 if snapshot is None else len(snapshot.devices)
        LOG.info("ready", extra={"devices": devices, "degraded": self.node.degraded})
        restarts = starts.summary(self._starts)
        line = f"{devices} device{'' if devices == 1 else 's'}"
        notify.sd_notify(notify.READY, notify.status("; ".join(filter(None, (line, restarts)))))
        memory.settle()
        return True

    # --- reload ---

    def _reload(self) -> None:
        """Read settings and layout again; whatever is wrong leaves the old ones in force."""
        notify.sd_notify(notify.reloading(clock.boottime_s()))
        try:
            settings = self._reread()
            text = _layout_file(settings)
            layout = self._resolve(text)
        except AlloyError as exc:
            LOG.error("reload_refused", extra={"reason": str(exc)})  # noqa: TRY400 - one line, by contract
        else:
            self._adopt(settings, text, layout)
        notify.sd_notify(notify.READY)

    def _resolve(self, text: LayoutRequest | None) -> Layout | None:
        """Return the layout of a file, checked against the devices and the planner."""
        if text is None:
            return None
        snapshot = self.node.observe()
        layout = self.node.layout_of(text, snapshot)
        self.node.plan_for(layout, snapshot)
        return layout

    def _adopt(self, settings: Settings, text: LayoutRequest | None, layout: Layout | None) -> None:
        waiting = [
            name
            for name in settings.__struct_fields__
            if name not in LIVE_SETTINGS and getattr(settings, name) != getattr(self.settings, name)
        ]
        if waiting:
            LOG.warning("restart_needed", extra={"settings": waiting})
        logs.configure(settings.log.level, settings.log.format)
        self.settings = msgspec.structs.replace(
            self.settings, log=settings.log, layout=settings.layout
        )
        self._layout_text = text
        self._layout = layout
        self.seen.keeping = keeping.Keeping()
        LOG.info("reloaded", extra={"layout": None if layout is None else layout.name})
        self._loops["keep"].wake()

    # --- ticks ---

    def tick_observe(self) -> None:
        """Take a snapshot for everyone, unless the auditor has just taken one."""
        seen = self.seen.snapshot
        fresh_s = self.settings.observe.period_s / 2
        due, self.seen.snapshot_due = self.seen.snapshot_due, False
        if due or seen is None or clock.boottime_s() - seen.taken_at_s > fresh_s:
            self.observe()

    def tick_keep(self) -> None:
        """Bring the node back to its layout, where nobody is hurt by it."""
        if self.node.degraded:
            return
        self.node.recover()
        snapshot = self.node.observe()
        if self._layout_text is not None and self._layout is None:
            self._layout = self.node.layout_of(self._layout_text, snapshot)
        layout = self._layout or self.node.store.desired()
        if layout is None:
            self.seen.keeping = keeping.Keeping()
            return
        self._keep(layout, snapshot)

    def _keep(self, layout: Layout, snapshot: Snapshot) -> None:
        now_s, seen = clock.boottime_s(), keeping.situation(layout, snapshot)
        if keeping.waits(self.seen.keeping, seen, now_s):
            return
        try:
            plan = self.node.plan_for(layout, snapshot)
            if not plan.steps:
                self._kept(layout)
                return
            reason = keeping.hindrance(plan, snapshot)
            if reason:
                self._note(keeping.Keeping(reason=reason))
                return
            LOG.info("drift", extra={"layout": layout.name, "steps": len(plan.steps)})
            report = self.node.carry_out(plan, frozenset({Scope.PARTITION, Scope.DEVICE}))
        except StoreError:
            raise
        except AlloyError as exc:
            self._note(keeping.after_failure(self.seen.keeping, str(exc), seen, now_s))
            return
        self._after(report, seen, now_s)

    def _kept(self, layout: Layout) -> None:
        """Note that the node is as wanted; a layout from a file becomes the desired one."""
        if self.node.store.desired() != layout:
            self.node.store.set_desired(layout)
        self._note(keeping.Keeping())

    def _after(self, report: ApplyReport, seen: str, now_s: float) -> None:
        self._touched()
        if report.outcome in ("applied", "unchanged", "stopped"):
            self._note(keeping.Keeping())
        elif report.outcome == "pending":
            self._note(keeping.Keeping(reason="; ".join(report.pending)))
        else:
            reason = report.error or report.outcome
            self._note(keeping.after_failure(self.seen.keeping, reason, seen, now_s))

    def _note(self, now: keeping.Keeping) -> None:
        """Remember how keeping stands, and say so once when it changes."""
        if now.reason != self.seen.keeping.reason:
            if now.reason:
                LOG.warning("layout_not_kept", extra={"reason": now.reason})
            else:
                LOG.info("layout_kept")
        self.seen.keeping = now

    # --- leases ---

    def _new_desk(self) -> LeaseDesk:
        from alloy_agent.uplink.desk import LeaseDesk

        return LeaseDesk(self.node.store, self._view, self.feed.lease_changed)

    def layout_devices(self) -> frozenset[DeviceId]:
        """Return the devices whose pieces an operator's layout file fixes."""
        layout = self._layout
        found = () if layout is None else layout.devices
        return frozenset(one.device for one in found if one.partitions is not None)

    def _leases(self) -> tuple[Lease, ...]:
        return () if self.desk is None else self.desk.ledger.leases

    def _view(self) -> View:
        """Return the node as a lease command sees it: fresh, since a grant rests on generations."""
        from alloy_agent.daemon import admission
        from alloy_agent.leases import View

        snapshot = self.node.observe()
        claimed = self.node.tenancy.claimed(snapshot.partitions)
        return View(
            now_s=clock.boottime_s(),
            boot_id=snapshot.boot_id,
            generations={p.id: p.generation for p in snapshot.partitions if p.id not in claimed},
            blocked=admission.blocked(self.node.drained(), snapshot),
            standalone=self.settings.brain.address is None,
        )

    def tick_leases(self) -> None:
        """End what has run out, and clear what is being released once nobody is inside."""
        desk = self.desk
        if desk is None or self.seen.snapshot is None or not desk.ledger.leases:
            return
        desk.tick()
        releasing = [x for x in desk.ledger.leases if x.state is LeaseState.RELEASING]
        if not releasing:
            return
        inside = self.node.occupied()
        for lease in releasing:
            if not any(piece.partition in inside for piece in lease.pieces):
                desk.cleared(lease.id)

    def audit_now(self) -> AuditResult:
        """Run every check now."""
        result = self.auditor.audit_now() if self.auditor is not None else self.node.audit()
        self.seen.audit = result
        return result

    # --- what others ask ---

    def _on_event(self, event: DeviceEvent) -> None:
        LOG.info(
            "device_event",
            extra={"device": event.device, "kind": event.kind, "code": event.code},
        )
        if self.telemetry is None:
            self._early.append(event)
        else:
            self.telemetry.event(event)
        self._touched()

    def _touched(self) -> None:
        """Look at once: something has changed."""
        self.seen.snapshot_due = True
        if "observe" in self._loops:
            self._loops["observe"].wake()

    def _on_defect(self, defect: BaseException) -> None:
        if isinstance(defect, InvariantError):
            self._inbox.put(defect)

    def health(self) -> str | None:
        """Return why the agent itself is not well, or None."""
        now_s = clock.boottime_s()
        late = [loop.name for loop in self._loops.values() if loop.late(now_s)]
        return f"loops without progress: {', '.join(late)}" if late else None

    def ready(self) -> str | None:
        """Return why the agent cannot be relied on yet, or None."""
        return "the node has not been seen yet" if self.seen.snapshot is None else None

    def status(self) -> StatusDocument:
        """Return how the daemon is doing."""
        now_s = clock.boottime_s()
        snapshot, audit = self.seen.snapshot, self.seen.audit
        desired = None if self.node.degraded else self.node.store.desired()
        return StatusDocument(
            node=self.node.name,
            version=__version__,
            pid=os.getpid(),
            boot_id=clock.boot_id(),
            uptime_s=round(now_s - self._started_s, 3),
            state_dir=self.settings.state_dir,
            fake=self.settings.fake,
            socket=str(socket_of(self.settings)),
            metrics=self._metrics_url,
            snapshot_sequence=None if snapshot is None else snapshot.sequence,
            snapshot_age_s=None if snapshot is None else round(now_s - snapshot.taken_at_s, 6),
            verdict=None if audit is None else audit.verdict,
            audit_age_s=None if audit is None else round(now_s - audit.taken_at_s, 6),
            layout=None if desired is None else desired.name,
            kept=self.seen.keeping.reason,
            degraded=self.node.degraded,
            workers=tuple(worker.state() for worker in self.node.workers),
            overruns={loop.name: loop.overruns for loop in self._loops.values()},
            starts=self._starts,
        )

    def measured(self) -> tuple[Signal, ...]:
        """Return the newest value of every signal of every worker, where it can be one."""
        from alloy_agent.telemetry.signals import all_sane

        return all_sane(signal for worker in self.node.workers for signal in worker.signals())

    def top(self) -> TopDocument:
        """Return what the live view shows."""
        from alloy_agent.daemon.live import top_document

        return top_document(
            self.node.name,
            self.seen.snapshot,
            self.seen.audit,
            self.telemetry,
            self.measured(),
            self._share_views(),
        )

    def _share_views(self) -> tuple[ShareView, ...]:
        return () if self.shares is None else self.shares.views()

    def _share_families(self) -> Iterable[Any]:
        views = self._share_views()
        if not views:
            return ()
        from alloy_agent.daemon.shareviews import share_families

        return share_families(views)

    def _metrics_page(self) -> MetricsPage:
        from alloy_agent.telemetry import metrics

        page = metrics.MetricsPage(self.settings.metrics.series_max, metrics.REUSE_S)
        now = clock.boottime_s
        page.add("agent", self._agent_families)
        page.add("node", lambda: metrics.snapshot_families(self.seen.snapshot, now()))
        page.add("audit", lambda: metrics.audit_families(self.seen.audit, now()))
        page.add("signals", self._signal_families)
        page.add("shares", self._share_families)
        if self.telemetry is not None:
            for name, collect in self.telemetry.collectors():
                page.add(name, collect)
        return page

    def _dcgm_page(self) -> MetricsPage:
        from alloy_agent.telemetry import dcgm, metrics

        page = metrics.MetricsPage(self.settings.metrics.series_max, metrics.REUSE_S)
        page.add(
            "dcgm",
            lambda: dcgm.families(
                self.seen.snapshot,
                self.measured(),
                {} if self.telemetry is None else self.telemetry.health,
                self.node.name,
                clock.boottime_s(),
            ),
        )
        return page

    def _signal_families(self) -> Iterable[Any]:
        from alloy_agent.telemetry import metrics

        snapshot = self.seen.snapshot
        pieces = () if snapshot is None else snapshot.partitions
        generations = {str(p.id): p.generation for p in pieces}
        return metrics.signal_families(self.measured(), clock.boottime_s(), generations)

    def _agent_families(self) -> Iterable[Any]:
        from alloy_agent.telemetry import metrics

        counts = {loop.name: (loop.overruns, loop.failures) for loop in self._loops.values()}
        reasons = (self.node.degraded, self.seen.keeping.reason)
        yield from metrics.agent_families(__version__, counts, *reasons)


def _for_brains(command: pb.BrainMessage) -> pb.BrainMessage:
    """Return a command of a brain; what only this host may ask becomes one that is not known."""
    body = command.WhichOneof("body")
    if body in ("join", "reset_device"):
        command.ClearField(body)
    return command


@contextlib.contextmanager
def _signals(put: Callable[[int], None]) -> Any:
    """Put the signals of a service into a queue, and give the old handlers back at the end."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    old = {number: signal.signal(number, lambda n, _frame: put(n)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def _layout_file(settings: Settings) -> LayoutRequest | None:
    """Return the text of the layout file that the settings name.

    Raises:
        ConfigError: It cannot be read, or is no layout file.
    """
    if settings.layout.file is None:
        return None
    from alloy_agent.decoding import read_text
    from alloy_agent.layout import read_layout

    path = Path(settings.layout.file)
    text = read_text(path)
    read_layout(text, str(path))
    return LayoutRequest(text=text, file=str(path), layout=settings.layout.name)


__all__ = ["ConfigError", "Daemon", "Loop", "Seen"]
