"""`AmdBackend`: sysfs and KFD as the `Backend` interface, `amdsmi` for what only it has.

Theory of operation. The kernel's files are the ground: enumeration and identity from KFD's
topology, modes from the primary's PCI directory, processes from `kfd/proc`, telemetry from
`gpu_metrics`. The vendor's library, where its version is one whose structures are known, adds
events. Everything goes on without it.

Rules that stay true in here:

* Only the primary (PCI) directory has device-wide files; nothing of it is copied to partitions.
* Before a switch every descriptor and event reader of ours is let go: one process with `/dev/kfd`
  open makes the kernel refuse. After it the device is read back, and live partitions are counted.
* A memory mode is asked for on every member of the hive, or on none; it holds after the driver was
  loaded again, which is no step of this backend.
* A read never waits for a device that is being switched: a mode in between is a fault, reported.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Final, TypeVar

from alloy_agent.backends.amd import pieces
from alloy_agent.backends.amd.doctor import Doctor
from alloy_agent.backends.amd.events import EventSource
from alloy_agent.backends.amd.evidence import Collector, Tools, openers
from alloy_agent.backends.amd.files import BUSY, Files, Roots, meaning, translated
from alloy_agent.backends.amd.ledger import DeviceEntry, Ledger, Notes
from alloy_agent.backends.amd.library import Library
from alloy_agent.backends.amd.modes import Modes, read_modes
from alloy_agent.backends.amd.pieces import PREFIX, Sight
from alloy_agent.backends.amd.processes import holders, kfd_processes
from alloy_agent.backends.amd.sampler import Sampler, block_errors
from alloy_agent.backends.amd.shares import MaskChoice, Shares
from alloy_agent.backends.amd.throttle import Throttle
from alloy_agent.backends.amd.topology import Topology, TopologyReader, generation
from alloy_agent.backends.base import SignalSink
from alloy_agent.errors import (
    BackendError,
    DeviceBusyError,
    DeviceLostError,
    UnsupportedError,
)
from alloy_agent.host.cgroupfs import CgroupFs
from alloy_agent.host.clock import boot_id, boottime_s
from alloy_agent.host.deviceprograms import DevicePrograms
from alloy_agent.model import (
    Capabilities,
    Create,
    Destroy,
    Device,
    DeviceEvent,
    DeviceId,
    Diagnosis,
    Fact,
    ModeKind,
    Observation,
    Partition,
    SetMode,
    SignalSpec,
    Step,
    Value,
    Vendor,
)

log = logging.getLogger(__name__)
T = TypeVar("T")

GROUP: Final = "alloy-amd"
UNSETTLED_TRIES: Final = 3
UNSETTLED_WAIT_S: Final = 0.02


class AmdOptions(Value, frozen=True, kw_only=True):
    """What the settings say; see `config.AmdSettings`."""

    state_dir: str | None = None
    sys_root: str = "/sys"
    proc_root: str = "/proc"
    dev_root: str = "/dev"
    debug_root: str = "/sys/kernel/debug"
    library: str = "auto"  # "auto", "off", or the path of libamd_smi.so
    library_deadline_s: float = 10.0
    busy_wait_s: float = 3.0
    settle_wait_s: float = 5.0
    process_isolation: bool | None = None
    opportunistic_cus: int = 0
    opportunistic_slots: int = 2


class AmdBackend:
    """The AMD Instinct accelerators of this host."""

    def __init__(
        self,
        options: AmdOptions | None = None,
        *,
        files: Files | None = None,
        library: Library | None = None,
        cgroups: CgroupFs | None = None,
        clock: Callable[[], float] = boottime_s,
    ) -> None:
        """Join the rooms; nothing is opened before it is asked for.

        Args:
            options: What the settings say.
            files: The file system; tests put a machine behind it.
            library: The vendor's library; by default found as the options say, at first use.
            cgroups: The cgroup trees.
            clock: Boot time in seconds.
        """
        self.name = "amd"
        self.options = options or AmdOptions()
        self.files = files or Files()
        self.roots = Roots(
            sys=self.options.sys_root,
            proc=self.options.proc_root,
            dev=self.options.dev_root,
            debug=self.options.debug_root,
        )
        self._reader = TopologyReader(self.files, self.roots)
        self._clock = clock
        self._boot = boot_id(self.roots.proc)
        self._ledger = Ledger(self.options.state_dir, self._boot)
        masks = MaskChoice(self.options.opportunistic_cus, self.options.opportunistic_slots)
        self._shares = Shares(self.files, self.roots, self._ledger, masks, cgroups or CgroupFs())
        self._library = library or Library.find(
            self.options.library, self.options.library_deadline_s
        )
        self._events = EventSource(self.files, self.roots, self._library, clock)
        self._lock = threading.Lock()
        self._known: dict[DeviceId, str] = {}  # id to PCI address, of every device ever seen
        self._quiet: set[DeviceId] = set()
        self._samplers: dict[DeviceId, Sampler] = {}
        self._programs = DevicePrograms(clock)
        self._throttle = Throttle(self.files, self.roots, self._library, clock)

    # --- what there is ---

    def capabilities(self) -> Capabilities:
        """Return what this backend can do here."""
        return Capabilities(
            backend=self.name,
            vendors=(Vendor.AMD,),
            library="amdsmi" if self._library.usable else "sysfs",
            library_version=self._library.version or self._driver(),
            can_partition=True,
            can_share=True,
            has_events=True,
            notes=(self._library.note,) if self._library.note else (),
        )

    def discover(self) -> tuple[DeviceId, ...]:
        """Return the ids of all devices, by PCI address; one that was seen once stays listed."""
        found: Iterable[str] = ()
        if generation(self.files, self.roots) is not None:
            found = self._reader.read().devices()
        with self._lock:
            for bus in found:
                self._known[DeviceId(f"{PREFIX}{bus}")] = bus
            return tuple(sorted(self._known, key=lambda known: self._known[known]))

    def observe(self, device: DeviceId) -> Observation:
        """Return the device, its partitions and its faults, read back now."""
        sight = self.look(device)
        noted = self._ledger.device(device)
        seen = self._noun(sight, noted)
        return Observation(
            device=seen,
            partitions=self._partitions(sight, noted),
            faults=(*pieces.faults_of(sight, seen), *self._events.faults(device, sight.bus)),
        )

    def look(self, device: DeviceId) -> Sight:
        """Return one reading of a device; a mode in between is given a moment to settle.

        Raises:
            DeviceLostError: It has gone.
        """
        for _ in range(UNSETTLED_TRIES):
            sight = self._glance(device)
            if sight.settled:
                break
            time.sleep(UNSETTLED_WAIT_S)
        return sight

    def _glance(self, device: DeviceId) -> Sight:
        topology = self._reader.read()
        found = topology.devices()
        bus = self._bus(device, found)
        pci = self.roots.pci(bus)
        try:
            epoch = str(self.files.mark(f"{pci}/drm"))
        except OSError as error:
            raise DeviceLostError(
                f"{device} has gone from the bus", cure="drain the node and reset the device"
            ) from error
        peers = {
            node.number: f"{PREFIX}{other}" for other, nodes in found.items() for node in nodes
        }
        return Sight(
            id=device,
            bus=bus,
            index=sorted(self._known).index(device),
            epoch=epoch,
            modes=read_modes(self.files, pci) if found.get(bus) else Modes(),
            nodes=found.get(bus, ()),
            topology=topology,
            peers=peers,
        )

    def _bus(self, device: DeviceId, found: dict[str, object] | dict[str, tuple[T, ...]]) -> str:
        with self._lock:
            for bus in found:
                self._known[DeviceId(f"{PREFIX}{bus}")] = bus
            if device not in self._known:
                raise DeviceLostError(
                    f"{device} is not on this node", cure="look at `alloy-agent devices`"
                )
            return self._known[device]

    def _partitions(self, sight: Sight, noted: DeviceEntry) -> tuple[Partition, ...]:
        if noted.shares:
            return pieces.shares_of(
                sight, self.roots, self._boot, noted.shares, self._shares.groups()
            )
        settled = sight.settled
        cuts = self._ledger.cuts(sight.id, sight.looks) if settled else noted.cuts
        return pieces.partitions_of(sight, self.roots, self._boot, cuts)

    def _noun(self, sight: Sight, noted: DeviceEntry) -> Device:
        device = pieces.device_of(self.files, self.roots, sight, noted, self._driver())
        capped = self._shares.groups().can_cap(sight.bus)
        return pieces.with_caps(device) if capped else device

    def _driver(self) -> str:
        base = f"{self.roots.sys}/module/amdgpu"
        version = self.files.text(f"{base}/version")
        return version or self.files.text(f"{self.roots.proc}/sys/kernel/osrelease") or ""

    # --- changes ---

    def apply(self, step: Step) -> None:
        """Do one step."""
        if isinstance(step, SetMode):
            self._set_mode(step)
        elif isinstance(step, Create):
            self._shares.create(self.look(step.device), step.spec)
        elif isinstance(step, Destroy):
            bus = self._known.get(step.device) or str(step.device).removeprefix(PREFIX)
            self._shares.destroy(bus, step.partition)
        else:
            self._shares.configure(self.look(step.device), step)

    def _set_mode(self, step: SetMode) -> None:
        if step.kind not in {ModeKind.COMPUTE, ModeKind.MEMORY}:
            raise UnsupportedError(
                f"{step.device} has no {step.kind} mode", cure="set its compute or memory mode"
            )
        sight = self.look(step.device)
        offered = sight.modes.computes if step.kind is ModeKind.COMPUTE else sight.modes.memories
        if step.wanted not in offered:
            raise UnsupportedError(
                f"{step.device} has no {step.kind} mode {step.wanted!r}",
                cure=f"use one of {', '.join(offered)}" if offered else "leave its modes alone",
            )
        if step.kind is ModeKind.MEMORY:
            self._ask_memory(sight, step.wanted)
        elif step.wanted != sight.modes.compute:
            self._cut(sight, step.wanted)

    def _cut(self, sight: Sight, wanted: str) -> None:
        """Switch the compute mode, read back by counting partitions, and set isolation again."""
        self._let_go(sight.id)
        path = f"{self.roots.pci(sight.bus)}/current_compute_partition"
        self._write_patiently(sight, path, wanted)
        after = self._settled(sight.id, wanted)
        self._note_cut(after)
        if after.modes.compute != wanted:
            raise BackendError(
                f"{sight.id}: the driver took {wanted} and shows {after.modes.compute}",
                cure="look at the kernel log; the device may need a reset",
            )
        live, expected = len(after.nodes), after.expected
        if live < expected and not self._minors_spent():
            raise BackendError(
                f"{sight.id}: only {live} of {expected} partitions are live after the switch",
                cure="look at the kernel log",
            )
        self._isolate(after)

    def _write_patiently(self, sight: Sight, path: str, wanted: str) -> None:
        """Write, again while the device is busy: processes that ended are still let go of.

        Raises:
            DeviceBusyError: It stays busy; names the holders.
        """
        deadline = self._clock() + self.options.busy_wait_s
        wait_s = 0.05
        while True:
            try:
                self.files.write(path, wanted)
            except OSError as error:
                if error.errno not in BUSY:
                    why = f"{sight.id}: the driver refuses {wanted} ({error.strerror})"
                    raise meaning(error)(why, cure=self._cure(sight, wanted)) from error
                if self._clock() + wait_s > deadline:
                    raise self._busy(sight, wanted) from error
            else:
                return
            time.sleep(wait_s)
            wait_s = min(wait_s * 2, 0.5)

    def _cure(self, sight: Sight, wanted: str) -> str:
        return (
            f"it is in {sight.modes.compute}/{sight.modes.memory}; choose modes that go together "
            f"with {wanted}, and run as root with sysfs writable"
        )

    def _busy(self, sight: Sight, wanted: str) -> DeviceBusyError:
        ids = frozenset(node.gpu_id for node in sight.nodes)
        minors = [node.render_minor for node in sight.nodes if node.render_minor is not None]
        named = holders(kfd_processes(self.files, self.roots), ids)
        named = named or openers(self.files, self.roots, minors)
        return DeviceBusyError(
            f"{sight.id}: {wanted} is refused, the device is in use by {named or 'nobody visible'}",
            cure="end the holders; a monitoring agent that holds /dev/kfd counts too",
        )

    def _settled(self, device: DeviceId, wanted: str) -> Sight:
        """Return the device once it shows the mode and all partitions, or when time is up."""
        deadline = self._clock() + self.options.settle_wait_s
        while True:
            sight = self.look(device)
            done = sight.modes.compute == wanted and len(sight.nodes) >= sight.expected
            settled = done or (sight.settled and self._minors_spent())
            if settled or self._clock() > deadline:
                return sight
            time.sleep(0.05)

    def _note_cut(self, after: Sight) -> None:
        if after.settled:
            self._ledger.cuts(after.id, after.looks)

    def _minors_spent(self) -> bool:
        """Whether the last of the old range of DRM minors is taken."""
        name = f"renderD{pieces.LAST_LEGACY_MINOR}"
        return self.files.there(f"{self.roots.sys}/class/drm/{name}")

    def _isolate(self, sight: Sight) -> None:
        """Set process isolation as the settings say: every switch resets it.

        A failure is no failure of the switch; the audit shows what is in force.
        """
        wanted = self.options.process_isolation
        if wanted is None:
            return
        path = f"{self.roots.pci(sight.bus)}/enforce_isolation"
        words = (self.files.text(path) or "").split()
        try:
            self.files.write(path, " ".join([str(int(wanted))] * max(1, len(words))))
        except OSError as error:
            log.warning(
                "process_isolation_failed",
                extra={"device": sight.id, "wanted": wanted, "reason": error.strerror},
            )
        if wanted:
            self._clean(sight)

    def _clean(self, sight: Sight) -> None:
        """Run the cleaner shader on every partition, and note on which it ran.

        It clears what a tenant of before left in local memory and registers; nobody is on a device
        that has just been cut. Source: kernel amdgpu_gfx.c, `run_cleaner_shader`.
        """
        path = f"{self.roots.pci(sight.bus)}/run_cleaner_shader"
        cleaned = []
        for node in sight.nodes if self.files.there(path) else ():
            try:
                self.files.write(path, str(node.partition))
            except OSError as error:
                log.warning(
                    "cleaner_shader_failed",
                    extra={
                        "device": sight.id,
                        "partition": node.partition,
                        "reason": error.strerror,
                    },
                )
            else:
                cleaned.append(node.partition)

        def edit(entry: DeviceEntry, _notes: Notes) -> None:
            entry.cleaned, entry.cleaned_cut = cleaned, entry.cuts

        self._ledger.change(sight.id, edit)

    def _ask_memory(self, sight: Sight, wanted: str) -> None:
        """Ask every member of the hive; take it back where it was asked if one refuses."""
        members = self._members(sight)
        asked: list[tuple[DeviceId, str]] = []
        try:
            for member, bus in members:
                self._let_go(member)
                path = f"{self.roots.pci(bus)}/current_memory_partition"
                with translated(f"{member}: the driver refuses {wanted}"):
                    self.files.write(path, wanted)
                asked.append((member, bus))
        except BackendError:
            for _, bus in asked:
                with contextlib.suppress(OSError):
                    path = f"{self.roots.pci(bus)}/current_memory_partition"
                    self.files.write(path, sight.modes.memory)
            raise
        for member, bus in members:
            epoch = str(self.files.mark(f"{self.roots.pci(bus)}/drm"))
            self._ledger.change(member, _request(wanted, sight.modes.memory, epoch))

    def _members(self, sight: Sight) -> list[tuple[DeviceId, str]]:
        if not sight.hive:
            return [(sight.id, sight.bus)]
        return [
            (DeviceId(f"{PREFIX}{bus}"), bus)
            for bus, nodes in sight.topology.devices().items()
            if any(node.hive == sight.hive for node in nodes)
        ]

    # --- handles ---

    def quiesce(self, device: DeviceId) -> None:
        """Close every descriptor on the device and the event readers, which hold `/dev/kfd`."""
        self._quiet.add(device)
        self._let_go(device)
        self._events.pause(device)

    def _let_go(self, device: DeviceId) -> None:
        sampler = self._samplers.get(device)
        if sampler is not None:
            sampler.close()
        self._events.let_go()

    def resume(self, device: DeviceId) -> None:
        """Allow descriptors and event readers again."""
        self._quiet.discard(device)
        self._events.resume(device)

    def open_count(self, device: DeviceId) -> int:
        """Return how many descriptors this backend has open on a device, `/dev/kfd` included."""
        sampler = self._samplers.get(device)
        return (sampler.handles if sampler else 0) + self._events.handles

    # --- signals, events, facts ---

    def signal_specs(self, device: DeviceId) -> tuple[SignalSpec, ...]:
        """Return the columns of the device and its partitions of this moment."""
        sight = self.look(device)
        sampler = self._sampler(sight)
        sampler.users(kfd_processes(self.files, self.roots, queues=False))
        sampler.errors(block_errors(self.files, self.roots.pci(sight.bus)))
        return sampler.announce(device, self._partitions(sight, self._ledger.device(device)))

    def _sampler(self, sight: Sight) -> Sampler:
        with self._lock:
            if sight.id not in self._samplers:
                self._samplers[sight.id] = Sampler(self.files, self.roots, sight.bus, self._clock)
            return self._samplers[sight.id]

    def sample(self, device: DeviceId, sink: SignalSink) -> None:
        """Fill the columns that `signal_specs` announced last; reads one table, waits for none."""
        if device in self._quiet:
            return
        if device not in self._samplers:
            self.signal_specs(device)
        sampler = self._samplers[device]
        sampler.fill(self._live(device, sampler), sink)

    def _live(self, device: DeviceId, sampler: Sampler) -> frozenset[str]:
        """Return the partitions announced that are still there, at the cost of one small file."""
        mode = self._events.mode_of(self._known[device])
        noted = self._ledger.device(device)
        if noted.shares:
            return frozenset(f"{device}/{entry.profile}@0" for entry in noted.shares)
        return sampler.ids_of(mode)

    def wait_events(self, timeout_s: float) -> Sequence[DeviceEvent]:
        """Return faults, resets and changes of geometry since the last call, or wait for them."""
        with self._lock:
            known = dict(self._known)
        events = self._events.wait(known, timeout_s)
        processes = None
        for device, sampler in list(self._samplers.items()):
            if device not in self._quiet and sampler.wants_users():
                if processes is None:
                    processes = kfd_processes(self.files, self.roots, queues=False)
                sampler.users(processes)
                sampler.errors(self._events.errors(device))
        return events

    def facts(self, device: DeviceId) -> tuple[Fact, ...]:
        """Return what the device's checks need to see, read now."""
        sight = self.look(device)
        noted = self._ledger.device(device)
        seen = self._noun(sight, noted)
        tools = Tools(
            programs=self._programs,
            throttling=self._throttle.look,
            groups=self._shares.groups(),
        )
        collector = Collector(self.files, self.roots, self._clock(), tools)
        return collector.collect(sight, seen, self._partitions(sight, noted), noted)

    def diagnose(self) -> tuple[Diagnosis, ...]:
        """Return what this host has and lacks for AMD accelerators."""
        return Doctor(self.files, self.roots, self._library, self._driver()).lines()

    def close(self) -> None:
        """Let go of everything."""
        for sampler in self._samplers.values():
            sampler.close()
        self._events.close()
        self._library.close()

    def topology(self) -> Topology:
        """Return the topology of this moment, for tools and tests."""
        return self._reader.read()


def _request(wanted: str, current: str, epoch: str) -> Callable[[DeviceEntry, Notes], None]:
    def edit(entry: DeviceEntry, _notes: Notes) -> None:
        entry.memory_requested = "" if wanted == current else wanted
        entry.requested_epoch = epoch

    return edit
