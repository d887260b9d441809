"""One simulated node: calls and their faults, state and its file, processes, events, restarts.

Theory of operation. Every vendor call enters `Machine.call`, which strikes scripted faults, counts
crash points, takes the lock, looks whether another process has changed the machine meanwhile, and
yields the device's state. A call that changes something saves the state before it returns. With a
path, the state file *is* the machine: any process that opens it (the daemon's worker, a one-shot
command, a test) sees the same silicon, and changes are serialised by a lock file.

Rules that stay true in here:

* A scripted hang or wait is sat out without the lock: one stuck device never holds another.
* Nothing is written before the first change, so that reading commands need no writable directory.
* The state file is replaced whole; a process killed at any moment leaves the old or the new state.
  It is not synced: when the host itself goes down, the simulated node may forget its last change.
* State handed out is read only; it changes through calls.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import msgspec

from alloy_agent.silicon import faults, signals
from alloy_agent.silicon.amd import (
    MINOR_LAST,
    RENDER_FIRST,
    RENDER_LAST,
    AmdGpu,
    XcdPartition,
    partitions,
)
from alloy_agent.silicon.boards import BOARDS, AmdBoard, Board, NeuronInstance, NvidiaBoard
from alloy_agent.silicon.neuron import ATTACH_MAX, NeuronDevice, neuron_number
from alloy_agent.silicon.nvidia import NvidiaGpu
from alloy_agent.silicon.refusals import (
    InsufficientResourcesError,
    InUseError,
    InvalidArgumentError,
    LostError,
    NotFoundError,
    NotSupportedError,
)
from alloy_agent.silicon.restarts import restart_devices
from alloy_agent.silicon.state import (
    EVENTS_KEPT,
    Client,
    DeviceState,
    Event,
    Fault,
    FaultState,
    Grant,
    MachineState,
    SignalScript,
)
from alloy_agent.silicon.statefile import Stamp, StateFile

EVENT_POLL_S: Final = 0.05
_NAMESPACE: Final = uuid.UUID("6d1f2b5e-9a43-5c52-8c36-b7f2a1c0d4e8")

# NVIDIA XIDs with a lasting effect. Source: XID catalogue (facts: 79 off the bus, 48 double bit
# error, 63/64 row remap pending or failed, 154 recovery action changed).
_XID_LOST: Final = 79
_XID_DOUBLE_BIT: Final = 48
_XID_REMAP_PENDING: Final = 63
_XID_REMAP_FAILED: Final = 64
_XID_RECOVERY: Final = 154


def boot_clock() -> float:
    """Return the seconds since boot, suspend included."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Machine:
    """A simulated node. Thread-safe."""

    def __init__(
        self,
        initial: MachineState,
        path: Path | None = None,
        clock: Callable[[], float] = boot_clock,
    ) -> None:
        self._file = None if path is None else StateFile(path)
        self._clock = clock
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._stamp: Stamp | None = None
        self._handles: Counter[tuple[str, int | None]] = Counter()
        self._depth = 0
        self.version = 0  # grows whenever the state may have changed; for caches
        self.calls = 0  # crash points met by this process
        self.closed = False
        self._state = initial
        self._by_id = {device.id: device for device in initial.devices}
        self.refresh()

    # --- reading ---

    @property
    def state(self) -> MachineState:
        """The state of this moment; read only."""
        return self._state

    def now_s(self) -> float:
        """Return the machine's clock, `CLOCK_BOOTTIME` unless a test said otherwise."""
        return self._clock()

    def device(self, device: str) -> DeviceState:
        """Return one device, without a vendor call; read only.

        Raises:
            NotFoundError: There is no such device.
        """
        try:
            return self._by_id[device]
        except KeyError:
            raise NotFoundError(f"no device {device}") from None

    def board(self, device: str) -> Board:
        """Return the table of a device's board."""
        return BOARDS[self.device(device).board]

    def nvidia(self, device: str) -> NvidiaGpu:
        """Return the calls of an NVIDIA GPU."""
        board = self.board(device)
        if not isinstance(board, NvidiaBoard):
            raise NotSupportedError(f"{device} is no NVIDIA GPU")
        return NvidiaGpu(self, device, board)

    def amd(self, device: str) -> AmdGpu:
        """Return the calls of an AMD accelerator."""
        board = self.board(device)
        if not isinstance(board, AmdBoard):
            raise NotSupportedError(f"{device} is no AMD accelerator")
        return AmdGpu(self, device, board)

    def neuron(self, device: str) -> NeuronDevice:
        """Return the calls of a Neuron device."""
        board = self.board(device)
        if not isinstance(board, NeuronInstance):
            raise NotSupportedError(f"{device} is no Neuron device")
        return NeuronDevice(self, device, board)

    def amd_partitions(self, device: DeviceState) -> tuple[XcdPartition, ...]:
        """Return the live partitions of an AMD accelerator, without a vendor call."""
        board = BOARDS[device.board]
        if not isinstance(board, AmdBoard):
            raise NotSupportedError(f"{device.id} is no AMD accelerator")
        peers = [
            other.id for other in self._state.devices if isinstance(BOARDS[other.board], AmdBoard)
        ]
        return partitions(
            board,
            device,
            peers.index(device.id),
            minors=range(
                RENDER_FIRST + self._state.display_card,
                (MINOR_LAST if self._state.many_minors else RENDER_LAST) + 1,
            ),
            seed=self._state.seed,
        )

    def hive(self, device: str) -> tuple[str, ...]:
        """Return the ids of all members of an AMD device's hive, itself included."""
        own = self.device(device)
        if not own.hive:
            return (device,)
        return tuple(other.id for other in self._state.devices if other.hive == own.hive)

    def clients(self, device: str) -> tuple[Client, ...]:
        """Return the processes on a device; read only."""
        return tuple(client for client in self._state.clients if client.device == device)

    # --- calls ---

    @contextlib.contextmanager
    def call(self, name: str, device: str, *, change: bool = False) -> Iterator[DeviceState]:
        """Make one vendor call: strike faults, lock, yield the device's state, save a change.

        Raises:
            LostError: The device has gone.
            RefusalError: As scripted.
        """
        self.enter(name, device)
        with self._exclusive() if change else self._lock:
            state = self.device(device)
            if state.lost:
                raise LostError(f"{device}: GPU is lost")
            yield state
            if change:
                self._save()
        if change:
            self.enter(name, device, when="after")

    def enter(self, name: str, device: str | None = None, when: str = "before") -> None:
        """Meet crash points and scripted faults of a call."""
        self.calls += 1
        if self._state.crash_at is not None and self.calls >= self._state.crash_at:
            self._die(name)
        self.refresh()
        if self._state.faults:
            self._strike(name, device, when)

    def refresh(self) -> bool:
        """Take over what another process has changed; return whether there was anything."""
        if self._file is None:
            return False
        stamp = self._file.stamp()
        if stamp is None or stamp == self._stamp:
            return False
        with self._lock:
            state, self._stamp = self._file.read()
            self._state = state
            self._by_id = {device.id: device for device in state.devices}
            self.version += 1
            self._changed.notify_all()
        return True

    def open_handle(self, device: str, instance: int | None = None) -> None:
        """Note that this process holds a vendor handle."""
        with self._lock:
            self._handles[device, instance] += 1

    def close_handle(self, device: str, instance: int | None = None) -> None:
        """Note that a handle was let go."""
        with self._lock:
            self._handles[device, instance] -= 1
            self._handles += Counter()  # drops what is not positive

    def open_handles(self, device: str | None = None) -> int:
        """Return how many handles this process holds, on one device or on all."""
        with self._lock:
            return sum(
                count for (owner, _), count in self._handles.items() if device in {None, owner}
            )

    def process_died(self) -> None:
        """Forget what died with a process of the agent (its handles), after `SimulatedCrash`."""
        with self._lock:
            self._handles.clear()

    def close(self) -> None:
        """Release whoever hangs or waits in this machine."""
        with self._lock:
            self.closed = True
            self._changed.notify_all()

    # --- who holds what ---

    def holders(
        self, device: str, instance: int | None = None, compute: int | None = None
    ) -> tuple[int, ...]:
        """Return the pids that hold a device, or only one instance of it."""
        found = {
            client.pid
            for client in self._state.clients
            if client.device == device
            and instance in {None, client.instance}
            and (compute is None or client.compute_instance in {None, compute})
        }
        for owner, piece in self._handles:
            if owner == device and instance in {None, piece}:
                found.add(os.getpid())
        return tuple(sorted(found))

    def kfd_holders(self, device: str) -> tuple[int, ...]:
        """Return the pids for which the AMD driver refuses to switch a device.

        Kernel 6.12 counts compute processes of the whole node, newer ones those that see the
        device.
        """
        if self._state.kfd_busy_scope == "device":
            return self.holders(device)
        members = [
            other.id for other in self._state.devices if isinstance(BOARDS[other.board], AmdBoard)
        ]
        return tuple(sorted({pid for member in members for pid in self.holders(member)}))

    # --- grants: what only files on the node know ---

    def grants(self, device: str) -> tuple[Grant, ...]:
        """Return the bindings on a device; read only."""
        with self.call("grant.query", device) as state:
            return tuple(state.grants)

    def create_grant(self, device: str, wanted: Grant) -> Grant:
        """Record a binding; its `serial` is given here.

        Raises:
            InsufficientResourcesError: Core runs overlap, or a share of that ordinal exists.
            NotSupportedError: A share of a GPU in MIG mode.
        """
        with self.call("grant.create", device, change=True) as state:
            if wanted.kind != "cores" and state.mig:
                raise NotSupportedError(f"{device}: MIG is on, the GPU cannot be shared")
            for other in state.grants:
                if _collide(wanted, other):
                    raise InsufficientResourcesError(
                        f"{device}: {wanted.kind} {wanted.start}:{wanted.size} overlaps "
                        f"{other.kind} {other.start}:{other.size}"
                    )
            made = msgspec.structs.replace(wanted, serial=self.next_serial())
            state.grants.append(made)
            state.grants.sort(key=lambda grant: (grant.start, grant.kind, grant.ordinal))
            self.emit(device, "geometry", f"{made.kind}+")
            return made

    def destroy_grant(self, device: str, serial: int) -> None:
        """Remove a binding.

        Raises:
            NotFoundError: It is gone already.
            InUseError: A process works within it.
        """
        with self.call("grant.destroy", device, change=True) as state:
            found = _find_grant(state, serial)
            holders = self.grant_holders(device, found)
            if holders:
                raise InUseError(f"{device}: {found.kind} in use", holders=holders)
            state.grants.remove(found)
            self.emit(device, "geometry", f"{found.kind}-")

    def configure_grant(self, device: str, serial: int, memory_bytes: int | None) -> None:
        """Change the memory cap of a living binding."""
        with self.call("grant.configure", device, change=True) as state:
            _find_grant(state, serial).memory_bytes = memory_bytes

    def grant_holders(self, device: str, grant: Grant) -> tuple[int, ...]:
        """Return the pids that work within a binding."""
        cores = set(range(grant.start, grant.start + grant.size))
        return tuple(
            sorted(
                client.pid
                for client in self.clients(device)
                if not client.monitor
                and (
                    cores.intersection(client.cores)
                    if grant.kind == "cores"
                    else client.opportunistic == (grant.kind == "opportunistic")
                )
            )
        )

    # --- what happens to the node ---

    def start_process(self, client: Client) -> Client:
        """Let a process use a device; it may be one that nobody granted anything.

        Raises:
            NotFoundError: The instance or partition it names does not exist.
            InUseError: The Neuron device has no attach slot left.
        """
        with self.call("process.start", client.device, change=True) as state:
            board = BOARDS[state.board]
            if isinstance(board, NvidiaBoard) and client.instance is not None:
                if not any(entry.id == client.instance for entry in state.instances):
                    raise NotFoundError(f"{state.id}: no GPU instance {client.instance}")
            elif isinstance(board, AmdBoard) and client.instance is not None:
                if client.instance >= len(self.amd_partitions(state)):
                    raise NotFoundError(f"{state.id}: no partition {client.instance}")
            elif isinstance(board, NeuronInstance) and len(self.holders(state.id)) >= ATTACH_MAX:
                raise InUseError(f"{state.id}: {ATTACH_MAX} processes are attached")
            self._settle(state)
            self._state.clients.append(client)
            self.emit(state.id, "process", f"pid:{client.pid}+", instance=client.instance)
            return client

    def stop_process(self, pid: int) -> None:
        """End a process everywhere it runs; none of that pid is fine."""
        with self._exclusive():
            for client in [entry for entry in self._state.clients if entry.pid == pid]:
                self._settle(self.device(client.device))
                self._state.clients.remove(client)
                self.emit(client.device, "process", f"pid:{pid}-", instance=client.instance)
            self._save()

    def inject_event(
        self, device: str, code: str, *, instance: int | None = None, detail: str = ""
    ) -> None:
        """Let a device report a fault (`xid:79`, `ras:umc`, `neuron:hbm_ue`), with its effects.

        `xid:79` loses the device; `xid:48` and every `_ue` count an uncorrected error; `xid:63` and
        `xid:64` leave rows to remap; `xid:154` sets the recovery action to `detail`.
        """
        with self._exclusive():
            state = self.device(device)
            kind, _, number = code.partition(":")
            xid = int(number) if kind == "xid" and number.isdecimal() else -1
            state.lost = state.lost or xid == _XID_LOST
            state.row_remap_pending = state.row_remap_pending or xid == _XID_REMAP_PENDING
            state.row_remap_failed = state.row_remap_failed or xid == _XID_REMAP_FAILED
            state.ecc_uncorrected += xid == _XID_DOUBLE_BIT or number.endswith("_ue")
            if xid == _XID_RECOVERY and detail.isdecimal():
                state.recovery_action = int(detail)
            self.emit(device, "fault", code, instance=instance, detail=detail)
            self._save()

    def edit(self, change: Callable[[MachineState], None]) -> None:
        """Change the state as no driver would (tests, demonstrations): lose a device, drop a fence.

        Counters of energy are settled before.
        """
        with self._exclusive():
            for device in self._state.devices:
                self._settle(device)
            change(self._state)
            self._save()

    def set_script(self, device: str, signal: str, script: SignalScript | None) -> None:
        """Let a signal of a device follow a script from now on, or no longer."""
        with self._exclusive():
            scripts = self.device(device).scripts
            scripts.pop(signal, None)
            if script is not None:
                scripts[signal] = msgspec.structs.replace(script, started_s=self.now_s())
            self._save()

    def add_fault(self, fault: Fault) -> int:
        """Script a fault; return its key."""
        with self._exclusive():
            self._state.fault_key += 1
            self._state.faults.append(FaultState(key=self._state.fault_key, fault=fault))
            self._save()
            return self._state.fault_key

    def remove_fault(self, key: int) -> None:
        """Take a scripted fault back; whoever hangs in it goes on."""
        with self._exclusive():
            self._state.faults = [entry for entry in self._state.faults if entry.key != key]
            self._save()

    def clear_faults(self) -> None:
        """Take all scripted faults and the crash point back."""
        with self._exclusive():
            self._state.faults = []
            self._state.crash_at = None
            self._save()

    def crash_at(self, point: int, how: str = "raise") -> None:
        """Die at the `point`-th crash point from now on, once: `raise` or `sigkill`."""
        with self._exclusive():
            self.calls = 0
            self._state.crash_at = point
            self._state.crash_how = "sigkill" if how == "sigkill" else "raise"
            self._save()

    def driver_reload(self) -> None:
        """Unload and load all drivers: instances go, requested memory modes hold, counters restart.

        Raises:
            InUseError: A process uses a device.
        """
        with self._exclusive():
            pids = sorted({client.pid for client in self._state.clients})
            if pids or self._handles:
                raise InUseError("module is in use", holders=tuple(pids or [os.getpid()]))
            restart_devices(self, power_cycle=False)
            self._save()

    def reboot(self) -> None:
        """Restart the node: as a driver reload, and processes, bindings and pending resets go."""
        with self._exclusive():
            self._state.boot += 1
            self._state.clients = []
            self._handles.clear()
            restart_devices(self, power_cycle=True)
            self._save()

    # --- events ---

    def emit(
        self, device: str, kind: str, code: str, *, instance: int | None = None, detail: str = ""
    ) -> None:
        """Add an event; only within a call that changes the state."""
        self._state.event_number += 1
        self._state.events.append(
            Event(
                number=self._state.event_number,
                device=device,
                kind=kind,
                code=code,
                instance=instance,
                time_s=self.now_s(),
                detail=detail,
            )
        )
        del self._state.events[:-EVENTS_KEPT]

    def wait_events(self, after: int, timeout_s: float) -> tuple[Event, ...]:
        """Return the events behind number `after`, waiting for the first up to `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        with self._lock:
            while True:
                self.refresh()
                if self._state.event_number > after or self.closed:
                    return tuple(event for event in self._state.events if event.number > after)
                left = deadline - time.monotonic()
                if left <= 0:
                    return ()
                self._changed.wait(min(left, EVENT_POLL_S))

    # --- names ---

    def next_serial(self) -> int:
        """Return a number never given before on this machine; only within a change."""
        self._state.serial += 1
        return self._state.serial

    def uuid_of(self, *parts: str | int) -> str:
        """Return the UUID that belongs to these names on this machine."""
        text = "/".join(str(part) for part in (self._state.seed, *parts))
        return str(uuid.uuid5(_NAMESPACE, text))

    def neuron_number(self, device: DeviceState) -> int:
        """Return N of a Neuron device's node /dev/neuronN."""
        board = BOARDS[device.board]
        if not isinstance(board, NeuronInstance):
            raise InvalidArgumentError(f"{device.id} is no Neuron device")
        return neuron_number(board, device)

    # --- load and power ---

    def power_model(self, device: DeviceState) -> signals.PowerModel:
        """Return power, heat and energy of a device under the load of this moment."""
        board = BOARDS[device.board]
        return signals.PowerModel(
            wave=signals.wave(self._state.seed, device.id, self._load(device, board)),
            idle_w=board.power_idle_w,
            cap_w=board.power_cap_w,
            limit_c=board.temperature_limit_c,
            energy_j=device.energy_j,
            throttle_s=device.throttle_s,
            since_s=device.energy_since_s,
        )

    def _load(self, device: DeviceState, board: Board) -> float:
        """Return the load of the whole device: each process weighs as much as its piece."""
        total = 0.0
        for client in self._state.clients:
            if client.device != device.id or client.monitor:
                continue
            share = 1.0
            if isinstance(board, NvidiaBoard) and client.instance is not None:
                found = next((e for e in device.instances if e.id == client.instance), None)
                share = 0.0 if found is None else found.size / board.memory_slices
            elif isinstance(board, AmdBoard) and client.instance is not None:
                share = 1.0 / len(self.amd_partitions(device))
            elif isinstance(board, NeuronInstance):
                share = len(client.cores) * device.lnc / board.cores
            total += share * client.load_ratio
        return min(1.0, total)

    def _settle(self, device: DeviceState) -> None:
        signals.settle(device, self.power_model(device), self.now_s())

    # --- inside: faults ---

    def _die(self, name: str) -> None:
        how = self._state.crash_how
        with self._exclusive():
            self._state.crash_at = None
            self._save()
        faults.die(how, name)

    def _strike(self, name: str, device: str | None, when: str) -> None:
        target = self._by_id.get(device) if device is not None else None
        if not any(faults.matches(e.fault, name, target, when) for e in self._state.faults):
            return
        with self._exclusive():
            struck = faults.due(self._state, name, target, when)
            self._save()
        for entry in struck:
            faults.strike(entry, name, device or "node", self._still_scripted)

    def _still_scripted(self, key: int) -> bool:
        with self._lock:
            self.refresh()
            return not self.closed and any(entry.key == key for entry in self._state.faults)

    # --- inside: the state file ---

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Hold the lock for a change, and the file's lock, so that other processes wait."""
        with self._lock:
            if self._file is None or self._depth:
                yield
                return
            with self._file.locked():
                self._depth += 1
                try:
                    self.refresh()
                    yield
                finally:
                    self._depth -= 1

    def _save(self) -> None:
        """Write the state, if it has a file; wake who waits for events."""
        self.version += 1
        if self._file is not None:
            self._stamp = self._file.write(self._state)
        self._changed.notify_all()


def _collide(wanted: Grant, other: Grant) -> bool:
    """Return whether two bindings exclude each other; shares go with other shares."""
    if wanted.kind != "cores" and other.kind != "cores":
        return (wanted.kind, wanted.ordinal) == (other.kind, other.ordinal)
    return wanted.start < other.start + other.size and other.start < wanted.start + wanted.size


def _find_grant(state: DeviceState, serial: int) -> Grant:
    for grant in state.grants:
        if grant.serial == serial:
            return grant
    raise NotFoundError(f"{state.id}: binding {serial} is gone")
