"""The Neuron backend: sysfs for what is there, the record for what was granted, `/proc` for who."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Final

import msgspec

from alloy_agent.backends.base import SignalSink
from alloy_agent.backends.neuron import facts as evidence
from alloy_agent.backends.neuron.access import Run, access_of
from alloy_agent.backends.neuron.board import Board, BoardReader, describe, physical
from alloy_agent.backends.neuron.doctor import diagnose
from alloy_agent.backends.neuron.events import EventSource, reset_event
from alloy_agent.backends.neuron.groups import group_access, refuse_group
from alloy_agent.backends.neuron.holders import KernelNumbers, NodeNumbers, Scan, Scanner
from alloy_agent.backends.neuron.listing import Lister, Listing
from alloy_agent.backends.neuron.monitor import Monitor, Report
from alloy_agent.backends.neuron.occupancy import Occupant, occupants, place_of
from alloy_agent.backends.neuron.options import NeuronOptions
from alloy_agent.backends.neuron.record import Contents, DeviceRecord, Grant, Record
from alloy_agent.backends.neuron.reset import reset_device, reset_file
from alloy_agent.backends.neuron.signals import Sampler, columns
from alloy_agent.backends.neuron.tree import DeviceTree, NeuronTree, read_attribute, whole_number
from alloy_agent.errors import (
    BackendError,
    DeviceBusyError,
    DeviceLostError,
    UnsupportedError,
)
from alloy_agent.host.clock import boot_id, boottime_s
from alloy_agent.host.deviceprograms import DevicePrograms
from alloy_agent.model import (
    Capabilities,
    Condition,
    Configure,
    Create,
    Destroy,
    Device,
    DeviceEvent,
    DeviceFault,
    DeviceId,
    Diagnosis,
    Fact,
    ModeKind,
    Observation,
    Partition,
    PartitionId,
    PartitionSpec,
    Placement,
    SetMode,
    Share,
    SignalSpec,
    Step,
    Vendor,
)

MARGIN_S: Final = 0.5
OBSERVED_AGE_S: Final = 2.0  # of a look at all processes, which costs 10 ms on a busy host
EVIDENCE_AGE_S: Final = 0.2  # so that an audit of all devices looks once
REPORT_WAIT_S: Final = 1.5  # how long evidence waits for the monitor's first report


class NeuronBackend:
    """The Neuron devices of this host."""

    def __init__(
        self,
        options: NeuronOptions | None = None,
        numbers: NodeNumbers | None = None,
    ) -> None:
        """Open the backend; no device needs to be there yet.

        Args:
            options: Where things are.
            numbers: How device numbers behind paths are told.
        """
        self.name = "neuron"
        self.options = options or NeuronOptions()
        self._tree = NeuronTree(self.options.sys_root)
        self._reader = BoardReader(self._tree, self.options.product_name_file)
        self._lister = Lister(self.options.tools_dir)
        self.monitor = Monitor(self.options.tools_dir, self.options.monitor_period_s)
        self._scanner = Scanner(self.options.proc_root, numbers or KernelNumbers())
        self._record = Record(self.options.state_dir, boot_id(self.options.proc_root))
        self._events = EventSource(self.options.kernel_log)
        self._known: dict[DeviceId, int] = {}  # ids ever seen, with the number of the moment
        self._samplers: dict[DeviceId, Sampler] = {}
        self._quiet: set[DeviceId] = set()
        self._lock = threading.Lock()
        self._programs = DevicePrograms()

    # --- what there is ---

    def capabilities(self) -> Capabilities:
        """Return what this backend can do here; without a driver it waits for one."""
        waiting = not self._tree.devices()
        notes = ["core sets are the agent's record: the runtime reads them in the tenant's process"]
        if waiting:
            notes.append(f"waiting-driver: {self._missing()}")
        return Capabilities(
            backend=self.name,
            vendors=(Vendor.NEURON,),
            library="aws-neuron-driver",
            library_version=self._tree.driver_version(),
            can_partition=not waiting,
            can_share=not waiting,
            has_events=True,
            notes=tuple(notes),
        )

    def discover(self) -> tuple[DeviceId, ...]:
        """Return the ids of all devices, those that vanished too.

        Raises:
            BackendError: The driver is late, so that how many there are is not known yet.
        """
        boards = self._boards()
        if not boards and not self._known:
            raise BackendError(
                f"neuron: waiting-driver: {self._missing()}",
                cure="load the driver (modprobe neuron), or set backends.neuron to off",
            )
        return tuple(sorted(self._known, key=lambda device: (self._known[device], device)))

    def observe(self, device: DeviceId) -> Observation:
        """Return the device as sysfs shows it, the granted runs, and who stands in the way."""
        board, _ = self._board(device)
        seen, partitions = self._seen(board)
        scan = self._scanner.scan(self._nodes(), age_s=OBSERVED_AGE_S)
        there = self._occupants(board, seen, scan, self.monitor.latest())
        return Observation(
            device=seen,
            partitions=partitions,
            faults=_faults(board, seen, partitions, there),
        )

    def _listing(self) -> Listing:
        return self._lister.listing(tuple(device.number for device in self._tree.devices()))

    def _boards(self) -> dict[DeviceId, tuple[Board, DeviceTree]]:
        boards = self._reader.read(self._listing())
        with self._lock:
            self._known |= {ident: board.number for ident, (board, _) in boards.items()}
        return boards

    def _board(self, device: DeviceId) -> tuple[Board, DeviceTree]:
        number = self._known.get(device)
        found = None if number is None else self._reader.read(self._listing(), number).get(device)
        found = found or self._boards().get(device)
        if found is None:
            raise DeviceLostError(
                f"{device}: the driver no longer shows it", cure="reload the driver, or replace it"
            )
        return found

    def _peers(self) -> dict[int, DeviceId]:
        return {number: device for device, number in self._known.items()}

    def _missing(self) -> str:
        if not self._tree.loaded():
            return "the neuron module is not loaded"
        return "the neuron module is loaded and shows no device yet"

    def _lnc(self, board: Board, record: DeviceRecord) -> int:
        """Return the configuration that processes start with: as set, else the node's default."""
        default = whole_number(read_attribute(self.options.default_lnc_file).text)
        for lnc in (record.lnc, default):
            if lnc is not None and lnc in board.lnc_choices:
                return lnc
        return board.lnc_choices[0]

    def _seen(
        self, board: Board, contents: Contents | None = None
    ) -> tuple[Device, tuple[Partition, ...]]:
        contents = contents or self._record.read()
        record = contents.of(board.id)
        device = describe(
            board,
            lnc=self._lnc(board, record),
            driver=self._tree.driver_version(),
            peers=self._peers(),
            share_hbm_bank=self.options.share_hbm_bank,
        )
        return device, tuple(
            self._partition(board, device, grant, contents) for grant in record.grants
        )

    def _partition(
        self, board: Board, device: Device, grant: Grant, contents: Contents
    ) -> Partition:
        ident = PartitionId(f"{board.id}/{grant.profile}@{grant.start}")
        run = Run(
            number=board.number,
            start=grant.start,
            size=grant.size,
            lnc=grant.lnc,
            device_cores=max(1, board.cores // grant.lnc),
        )
        counted_from = board.number if self.options.core_numbers == "container" else 0
        units = physical(board, grant.lnc, range(grant.start, grant.start + grant.size))
        whole = grant.size == device.slices
        shared = grant.share is not Share.EXCLUSIVE
        return Partition(
            id=ident,
            device=board.id,
            profile=grant.profile,
            placement=Placement(start=grant.start, size=grant.size),
            incarnation=grant.incarnation,
            # The driver has no quota per core: a part of a device has no memory of its own.
            memory_bytes=board.memory_bytes if whole and not shared else grant.memory_bytes,
            compute_units=None if shared else grant.size * grant.lnc,
            units=() if shared else units or (),
            share=grant.share,
            ordinal=grant.ordinal,
            locator={"grant": str(grant.serial), "lnc": str(grant.lnc)},
            access=access_of(
                [run],
                ident,
                has_lnc=len(board.lnc_choices) > 1,
                ports_from=self.options.ports_from,
                counted_from=counted_from,
            ),
            group=tuple(DeviceId(member) for member in grant.group),
            group_access=group_access(
                board, device, grant, contents, known=self._known, options=self.options
            ),
        )

    # --- who is there ---

    def _nodes(self) -> dict[int, int]:
        """Return the number of each device node, with the number of its device."""
        return {
            board.rdev: board.number
            for board, _ in self._boards().values()
            if board.rdev is not None
        }

    def _scan(self) -> Scan:
        return self._scanner.scan(self._nodes())

    def _occupants(
        self, board: Board, device: Device, scan: Scan, report: Report | None
    ) -> tuple[Occupant, ...]:
        relative = self.options.core_numbers == "container"
        return occupants(board.number, device.slices, scan.holders, report, relative=relative)

    def _report(self, scan: Scan) -> Report | None:
        """Return the monitor's report, waiting for the first one while somebody is there."""
        if not self.options.monitor or not scan.holders or not self.monitor.start():
            return self.monitor.latest()
        report = self.monitor.latest(wait_s=REPORT_WAIT_S)
        attached = {holder.pid for holder in scan.holders if holder.data}
        if report is None or attached <= {told.pid for told in report.runtimes}:
            return report
        # Somebody came after the last report: the next one may tell of them.
        return self.monitor.after(boottime_s(), self.monitor.period_s + MARGIN_S) or report

    # --- changes ---

    def apply(self, step: Step) -> None:
        """Do one step: grant or take back a run of cores, or set the core configuration."""
        if isinstance(step, SetMode):
            self._set_mode(step)
        elif isinstance(step, Create):
            self._create(step)
        elif isinstance(step, Destroy):
            self._destroy(step)
        else:
            self._configure(step)

    def _set_mode(self, step: SetMode) -> None:
        board, _ = self._board(step.device)
        if step.kind is not ModeKind.LNC or step.wanted not in {str(v) for v in board.lnc_choices}:
            choices = " or ".join(str(value) for value in sorted(board.lnc_choices))
            raise UnsupportedError(
                f"{step.device}: no mode {step.kind} {step.wanted}", cure=f"set lnc to {choices}"
            )
        holders = self._scan().of(board.number)
        wanted = int(step.wanted)

        def update(record: DeviceRecord, _serial: int) -> DeviceRecord:
            lnc = self._lnc(board, record)
            if lnc == wanted:
                return record
            if holders:
                raise _held(step.device, "the device", [h.named() for h in holders])
            if record.grants:
                raise DeviceBusyError(
                    f"{step.device}: cores are granted under LNC {lnc}",
                    cure="take the grants back first",
                )
            return msgspec.structs.replace(record, lnc=wanted)

        self._record.change(step.device, update)

    def _create(self, step: Create) -> None:
        board, _ = self._board(step.device)
        device, partitions = self._seen(board)
        _refuse_unfit(device, step.spec)
        refuse_group(board, device, step.spec, self._known)
        spec, place = step.spec, step.spec.placement
        if place is None:
            raise BackendError(f"{step.device}: {spec.profile} has no placement")
        scan = self._scan()
        there = self._occupants(board, device, scan, self._report(scan))

        def update(record: DeviceRecord, serial: int) -> DeviceRecord:
            wanted = Grant(
                serial=serial,
                share=spec.share,
                profile=spec.profile,
                start=place.start,
                size=place.size,
                ordinal=spec.ordinal,
                lnc=self._lnc(board, record),
                memory_bytes=spec.memory_bytes,
                group=tuple(spec.group),
            )
            for other in record.grants:
                if _collide(wanted, other):
                    raise BackendError(
                        f"{step.device}: cores {place.start} to {place.stop - 1} overlap "
                        f"{other.profile}@{other.start}",
                        cure="take that grant back first",
                    )
            self._refuse_held(step.device, place, there, partitions)
            grants = sorted((*record.grants, wanted), key=lambda g: (g.start, g.share, g.ordinal))
            return msgspec.structs.replace(record, grants=tuple(grants))

        self._record.change(step.device, update)

    def _refuse_held(
        self,
        device: DeviceId,
        place: Placement,
        there: Sequence[Occupant],
        partitions: Sequence[Partition],
    ) -> None:
        """Raise if somebody who belongs to no grant may be on a core of the run."""
        strangers = [
            one.holder.named()
            for one in there
            if not one.monitor and place_of(one, partitions) is None and one.may_be_on(place)
        ]
        if strangers:
            raise _held(device, f"cores {place.start} to {place.stop - 1}", strangers)

    def _destroy(self, step: Destroy) -> None:
        board, _ = self._board(step.device)
        device, partitions = self._seen(board)
        wanted = step.partition
        scan = self._scan()
        there = self._occupants(board, device, scan, self._report(scan))
        inside = [o.holder.named() for o in there if _is_inside(o, wanted, partitions)]

        def update(record: DeviceRecord, _serial: int) -> DeviceRecord:
            grant = _find(record, wanted)
            if grant is None:
                return record
            if inside:
                raise _held(step.device, wanted.id, inside)
            left = tuple(g for g in record.grants if g is not grant)
            return msgspec.structs.replace(record, grants=left)

        self._record.change(step.device, update)

    def _configure(self, step: Configure) -> None:
        if step.partition.share is Share.EXCLUSIVE:
            raise UnsupportedError(
                f"{step.partition.id}: the driver has no memory limit per core",
                cure="grant the whole device",
            )

        def update(record: DeviceRecord, _serial: int) -> DeviceRecord:
            grant = _find(record, step.partition)
            if grant is None:
                raise BackendError(f"{step.partition.id}: it is gone", cure="plan again")
            changed = msgspec.structs.replace(grant, memory_bytes=step.memory_bytes)
            grants = tuple(changed if g is grant else g for g in record.grants)
            return msgspec.structs.replace(record, grants=grants)

        self._record.change(step.device, update)

    def refuse_reset(self, device: DeviceId) -> None:
        """Refuse a device whose driver has no reset."""
        reset_file(self._board(device)[1])

    def reset(self, device: DeviceId) -> None:
        """Reset the device through the driver; return once it is proved to be ready again."""
        board, tree = self._board(device)

        def holders() -> tuple[str, ...]:
            return tuple(holder.named() for holder in self._scan().of(board.number))

        with self.monitor.paused():
            reset_device(tree, board.cores, holders)
        self._events.tell(reset_event(device))

    # --- telemetry ---

    def quiesce(self, device: DeviceId) -> None:
        """Stop sampling the device. There is no handle to let go: its node is never opened."""
        with self._lock:
            self._quiet.add(device)

    def resume(self, device: DeviceId) -> None:
        """Let sampling go on."""
        with self._lock:
            self._quiet.discard(device)

    def signal_specs(self, device: DeviceId) -> tuple[SignalSpec, ...]:
        """Return the columns of the device and its granted runs; starts the monitor."""
        board, tree = self._board(device)
        seen, partitions = self._seen(board)
        if self.options.monitor:
            self.monitor.start()
        sampler = Sampler(columns(board, tree, seen, partitions, self.monitor), tree)
        with self._lock:
            self._samplers[device] = sampler
        return sampler.specs

    def sample(self, device: DeviceId, sink: SignalSink) -> None:
        """Fill the columns that `signal_specs` announced last."""
        if device in self._quiet:
            return
        sampler = self._samplers.get(device)
        if sampler is None:
            self.signal_specs(device)
            sampler = self._samplers[device]
        if not sampler.present():
            raise DeviceLostError(f"{device}: the driver no longer shows it")
        record = self._record.read().of(device)
        sampler.fill({grant.incarnation for grant in record.grants}, sink)

    def wait_events(self, timeout_s: float) -> Sequence[DeviceEvent]:
        """Return what the kernel log told of devices, and changes of the record by others."""
        return self._events.wait(timeout_s, self._record, self._event_devices)

    def _event_devices(self) -> dict[DeviceId, tuple[Board, DeviceTree]]:
        return self._boards()

    # --- evidence ---

    def facts(self, device: DeviceId) -> tuple[Fact, ...]:
        """Return what the checks of the device and its partitions need, read now."""
        board, tree = self._board(device)
        scan = self._scanner.scan(self._nodes(), deep=True, age_s=EVIDENCE_AGE_S)
        report = self._report(scan)
        seen, partitions = self._seen(board)
        look = evidence.Look(
            board=board,
            tree=tree,
            device=seen,
            partitions=partitions,
            scan=scan,
            report=report,
            there=self._occupants(board, seen, scan, report),
            nodes=self._nodes(),
            listing=self._listing(),
            monitor=self.monitor.health(),
            now_s=boottime_s(),
        )
        return evidence.collect(look, self.options.proc_root, self._programs)

    def diagnose(self) -> tuple[Diagnosis, ...]:
        """Return how driver, tools and permissions stand."""
        return diagnose(self._tree, self.options, self._record, self.monitor.health())

    def open_count(self, device: DeviceId) -> int:
        """Return how many of the device's nodes this process holds: always none."""
        number = self._known.get(device)
        import os

        own = [h for h in self._scan().holders if h.pid == os.getpid()]
        return sum(number in holder.devices for holder in own)

    def close(self) -> None:
        """End the monitor and let go of the kernel log."""
        self.monitor.close()
        self._events.close()


def _refuse_unfit(device: Device, spec: PartitionSpec) -> None:
    """Raise if the device cannot have such a piece at all."""
    place = spec.placement
    if device.condition is not Condition.OK:
        raise BackendError(f"{device.id}: {device.condition_reason}", cure="drain and replace it")
    if place is None or place.stop > device.slices or place.size != spec.size:
        raise BackendError(f"{device.id}: no cores {place}", cure=f"it has {device.slices} cores")
    if spec.share is not Share.EXCLUSIVE:
        return
    profile = next((p for p in device.profiles if p.name == spec.profile), None)
    if profile is None or profile.size != spec.size:
        names = ", ".join(p.name for p in device.profiles)
        raise UnsupportedError(f"{device.id}: no profile {spec.profile}", cure=f"use {names}")
    if place.start not in profile.starts:
        raise UnsupportedError(
            f"{device.id}: {spec.profile} does not start at core {place.start}",
            cure="two cores of LNC 1 share a memory bank: take both, or allow share_hbm_bank",
        )


def _collide(wanted: Grant, other: Grant) -> bool:
    """Whether two grants exclude each other; shares go with other shares."""
    exclusive = Share.EXCLUSIVE in {wanted.share, other.share}
    if not exclusive:
        return (wanted.share, wanted.ordinal) == (other.share, other.ordinal)
    return wanted.start < other.start + other.size and other.start < wanted.start + wanted.size


def _find(record: DeviceRecord, partition: Partition) -> Grant | None:
    """Return the grant behind a partition; None: there is none any more.

    Raises:
        BackendError: Another one is in its place.
    """
    place = (partition.share, partition.placement.start, partition.placement.size)
    for grant in record.grants:
        if (grant.share, grant.start, grant.size) != place or grant.ordinal != partition.ordinal:
            continue
        if partition.incarnation not in {"", grant.incarnation}:
            raise BackendError(
                f"{partition.id} has been made anew by somebody else",
                cure="look at the devices and plan again",
            )
        return grant
    return None


def _is_inside(one: Occupant, partition: Partition, partitions: Sequence[Partition]) -> bool:
    """Whether a process is in a partition, or may be for all that is known."""
    if one.monitor:
        return False
    home = place_of(one, partitions)
    if home is not None and home.id == partition.id:
        return True
    if partition.share is not Share.EXCLUSIVE:
        return home is None
    if one.cores is None:
        return home is None
    return one.may_be_on(partition.placement)


def _held(device: DeviceId, what: str, holders: Sequence[str]) -> DeviceBusyError:
    return DeviceBusyError(
        f"{device}: {what} still held by {', '.join(holders[:8])}",
        cure="end the holders; it is free by itself once their descriptors are gone",
    )


def _faults(
    board: Board,
    device: Device,
    partitions: Sequence[Partition],
    there: Sequence[Occupant],
) -> tuple[DeviceFault, ...]:
    """Return what is wrong with the device now."""
    found = []
    if device.condition is Condition.FAILED:
        kind = "reset_required" if board.reset_state == "2" else "no_identity"
        found.append(DeviceFault(device=board.id, kind=kind, reason=device.condition_reason))
    for one in there:
        if one.monitor or place_of(one, partitions) is not None:
            continue
        cores = "unknown cores" if one.cores is None else f"cores {list(one.cores)}"
        found.append(
            DeviceFault(
                device=board.id,
                kind="draining",
                reason=f"{cores} still held by {one.holder.named()}, whom nobody granted them",
            )
        )
    return tuple(found)
