"""The fake backend: simulated silicon of all vendors behind the `Backend` interface.

It behaves as the vendors' own backends do: the same nouns, tiers, refusals and absences, each
device marked `simulated`. Handles are real: sampling a GPU opens one on it and on each of its
instances, and until `quiesce` lets go of them they are why a change fails with "in use".

Facts, whose names all backends share. Of a device:

| name | value |
| --- | --- |
| `device.geometry` | list of `{id, profile, start, size, incarnation}`, as read back |
| `device.modes` | `{kind: {current, pending}}` |
| `device.clients` | list of `{pid, comm, partition, granted, monitor}`; `partition` "" is in none |
| `driver.version`, `driver.floor` | the floor is the oldest driver known to be safe |

Of a partition (one that has gone has none):

| name | value |
| --- | --- |
| `partition.exists` | true |
| `partition.processes` | list of `{pid, comm, memory_bytes}` |
| `partition.memory` | `{limit_bytes, used_bytes, enforced_by}`: instance, driver, device or none |
| `partition.own_nodes` | device nodes that no neighbour may open; empty: all are shared |
| `cgroup.device_fence` | `{by, allowed}`: the rule in force ("": none) and the nodes it allows |
| `mig.instance` | `{uuid, gpu_instance, instance_slices, compute_instances, compute_slices}` |
| `amd.partition` | modes, live and expected count, render node, memory domains, isolation |
| `neuron.cores` | `{cores, lnc, whole_device, device_nodes}`; cores by their sysfs numbers |

A fact of another vendor's primitive is not there at all.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from alloy_agent.backends.base import SignalSink
from alloy_agent.backends.fake.amd import AmdHalf
from alloy_agent.backends.fake.collect import Half, collect
from alloy_agent.backends.fake.neuron import NeuronHalf
from alloy_agent.backends.fake.nvidia import NvidiaHalf
from alloy_agent.backends.fake.sampling import Column, Sampler, columns
from alloy_agent.backends.fake.words import find_grant, translated
from alloy_agent.errors import BackendError, DeviceBusyError, UnsupportedError
from alloy_agent.model import (
    Capabilities,
    Configure,
    Create,
    Destroy,
    Device,
    DeviceEvent,
    DeviceId,
    Diagnosis,
    Fact,
    Json,
    Observation,
    Partition,
    PartitionId,
    SetMode,
    SignalSpec,
    Step,
    Vendor,
)
from alloy_agent.silicon.boards import BOARDS, AmdBoard, NvidiaBoard
from alloy_agent.silicon.build import open_machine
from alloy_agent.silicon.machine import Machine
from alloy_agent.silicon.spec import parse_specs
from alloy_agent.silicon.state import Client, Event


class FakeBackend:
    """Simulated devices of one machine."""

    def __init__(self, machine: Machine) -> None:
        self.name = "fake"
        self.machine = machine
        self._halves: dict[Vendor, Half] = {
            Vendor.NVIDIA: NvidiaHalf(machine),
            Vendor.AMD: AmdHalf(machine),
            Vendor.NEURON: NeuronHalf(machine),
        }
        self._lock = threading.Lock()
        self._quiet: set[str] = set()
        self._handles: dict[str, tuple[int | None, ...]] = {}
        self._samplers: dict[str, Sampler] = {}
        self._versions: dict[str, int] = {}
        self._seen = machine.state.event_number

    @classmethod
    def from_specs(cls, specs: Sequence[str], state_dir: str | None = None) -> Self:
        """Return a backend over the machine that `--fake` options describe.

        Args:
            specs: As given on the command line; see `silicon.spec`.
            state_dir: Where the machine is remembered; None: it ends with the process.

        Raises:
            ConfigError: A specification or the remembered state is not usable.
        """
        return cls(open_machine(parse_specs(specs), None if state_dir is None else Path(state_dir)))

    def capabilities(self) -> Capabilities:
        """Return what the simulated node can do."""
        vendors = {_vendor(self.machine, device.id) for device in self.machine.state.devices}
        return Capabilities(
            backend=self.name,
            vendors=tuple(vendor for vendor in Vendor if vendor in vendors),
            library="simulated silicon",
            can_partition=True,
            can_share=True,
            has_events=True,
            notes=("simulated devices: no work runs on them",),
        )

    def discover(self) -> tuple[DeviceId, ...]:
        """Return the ids of all devices, lost ones too."""
        with translated("node"):
            self.machine.enter("node.discover")
        return tuple(DeviceId(device.id) for device in self.machine.state.devices)

    def observe(self, device: DeviceId) -> Observation:
        """Return the device and its partitions as the machine has them now."""
        with translated(device):
            half = self._half(device)
            seen = half.device(device)
            partitions = half.partitions(seen)
            faults = tuple(half.faults(seen, partitions))
        return Observation(device=seen, partitions=partitions, faults=faults)

    def apply(self, step: Step) -> None:
        """Do one step on the machine."""
        with translated(step.device):
            half = self._half(step.device)
            if isinstance(step, SetMode):
                half.set_mode(step)
            elif isinstance(step, Create):
                half.create(step)
            elif isinstance(step, Destroy):
                half.destroy(step.partition)
            else:
                self._configure(step)

    def refuse_reset(self, device: DeviceId) -> None:
        """Refuse what the agent resets on no host: it has no more to offer for a simulated one."""
        vendor = _vendor(self.machine, device)
        if vendor is not Vendor.NEURON:
            raise UnsupportedError(
                f"{device}: the agent does not reset devices of {vendor}",
                cure="it is simulated: load its drivers again, which resets all of them, "
                "see 'python -m alloy_agent.silicon --help'",
            )

    def reset(self, device: DeviceId) -> None:
        """Reset a Neuron device that nobody holds, as its driver would."""
        self.refuse_reset(device)
        with translated(device):
            held = self.machine.holders(device)
            if held:
                raise DeviceBusyError(
                    f"{device}: its node is open in {', '.join(map(str, held[:8]))}",
                    cure="end them",
                )
            self.machine.neuron(device).reset()
            if self.machine.device(device).needs_reset:
                raise BackendError(f"{device}: the reset has failed", cure="replace the instance")

    def _configure(self, step: Configure) -> None:
        grant = find_grant(self.machine, step.partition)
        if grant is None:
            raise UnsupportedError(
                f"{step.partition.id}: its memory is fixed by {step.partition.profile}",
                cure="choose another profile",
            )
        self.machine.configure_grant(step.device, grant.serial, step.memory_bytes)

    def quiesce(self, device: DeviceId) -> None:
        """Close every handle on the device; sampling leaves it alone until `resume`."""
        with self._lock:
            self._quiet.add(device)
            self._versions.pop(device, None)
            self._close_handles(device)

    def resume(self, device: DeviceId) -> None:
        """Let sampling open handles again."""
        with self._lock:
            self._quiet.discard(device)

    def signal_specs(self, device: DeviceId) -> tuple[SignalSpec, ...]:
        """Return the columns of the device and its partitions of this moment."""
        with translated(device):
            found = self._columns(device)
        sampler = Sampler(tuple(column.spec for column in found))
        with self._lock:
            self._samplers[device] = sampler
            self._versions.pop(device, None)
        return sampler.specs

    def sample(self, device: DeviceId, sink: SignalSink) -> None:
        """Fill the columns that `signal_specs` announced last."""
        with translated(device):
            if device in self._quiet:
                return
            with self.machine.call("device.sample", device):
                pass
            if device not in self._samplers:
                self.signal_specs(device)
            sampler = self._samplers[device]
            if self._versions.get(device) != self.machine.version:
                version = self.machine.version
                sampler.bind(self._columns(device))
                self._versions[device] = version
                self._open_handles(device)
            sampler.fill(self.machine.now_s(), sink)

    def wait_events(self, timeout_s: float) -> Sequence[DeviceEvent]:
        """Return what the devices reported since the last call, waiting up to `timeout_s`."""
        with translated("node"):
            self.machine.enter("node.wait_events")
        events = self.machine.wait_events(self._seen, timeout_s)
        if events:
            self._seen = events[-1].number
        return tuple(self._event(event) for event in events)

    def facts(self, device: DeviceId) -> tuple[Fact, ...]:
        """Return what the checks need of the device and its partitions, read now."""
        with translated(device):
            half = self._half(device)
            with self.machine.call("device.facts", device):
                pass
            seen = half.device(device)
            return collect(self.machine, half, seen, half.partitions(seen))

    def diagnose(self) -> tuple[Diagnosis, ...]:
        """Return one line: simulated devices lack nothing."""
        count = len(self.machine.state.devices)
        return (Diagnosis(subject="simulated devices", ok=True, found=f"{count} devices"),)

    def close(self) -> None:
        """Let go of all handles, and of whoever waits in the machine."""
        with self._lock:
            for device in list(self._handles):
                self._close_handles(device)
        self.machine.close()

    # --- inside ---

    def _half(self, device: str) -> Half:
        return self._halves[_vendor(self.machine, device)]

    def _columns(self, device: str) -> list[Column]:
        half = self._half(device)
        seen = half.device(device)
        partitions = half.partitions(seen)
        return columns(self.machine, seen, self._with_clients(half, seen, partitions))

    def _with_clients(
        self, half: Half, device: Device, partitions: tuple[Partition, ...]
    ) -> list[tuple[Partition, list[Client]]]:
        places: dict[str, list[Client]] = {partition.id: [] for partition in partitions}
        for client in self.machine.clients(device.id):
            place = half.partition_of(client, partitions)
            if place is not None:
                places[place.id].append(client)
        return [(partition, places[partition.id]) for partition in partitions]

    def _open_handles(self, device: str) -> None:
        """Hold what a telemetry library would hold: the GPU and each instance of it."""
        if _vendor(self.machine, device) is Vendor.NEURON:
            return  # read through sysfs: the device node stays closed
        instances = [entry.id for entry in self.machine.device(device).instances]
        with self._lock:
            self._close_handles(device)
            if device in self._quiet:
                return
            self._handles[device] = (None, *instances)
            for piece in self._handles[device]:
                self.machine.open_handle(device, piece)

    def _close_handles(self, device: str) -> None:
        for piece in self._handles.pop(device, ()):
            self.machine.close_handle(device, piece)

    def _event(self, event: Event) -> DeviceEvent:
        return DeviceEvent(
            device=DeviceId(event.device),
            kind=event.kind,
            code=event.code,
            partition=self._partition_of(event),
            time_s=event.time_s,
            detail=event.detail,
        )

    def _partition_of(self, event: Event) -> PartitionId | None:
        """Return the partition that an event names by instance; None: the whole device."""
        if event.instance is None:
            return None
        state = self.machine.device(event.device)
        board = BOARDS[state.board]
        if isinstance(board, NvidiaBoard):
            for entry in state.instances:
                shape = next(s for s in board.profiles if s.vendor_id == entry.profile)
                if entry.id == event.instance:
                    return PartitionId(f"{event.device}/{shape.name}@{entry.start}")
        elif isinstance(board, AmdBoard):
            for piece in self.machine.amd_partitions(state):
                if piece.number == event.instance:
                    mode = state.compute_mode or "whole"
                    return PartitionId(f"{event.device}/{mode}@{piece.first_xcd}")
        return None


def _vendor(machine: Machine, device: str) -> Vendor:
    board = machine.board(device)
    if isinstance(board, NvidiaBoard):
        return Vendor.NVIDIA
    return Vendor.AMD if isinstance(board, AmdBoard) else Vendor.NEURON


def open_backend(options: dict[str, Json]) -> FakeBackend:
    """Return the backend of a `BackendSpec`: `specs` (texts) and `state_dir` (text or null)."""
    specs, state_dir = options.get("specs"), options.get("state_dir")
    if not isinstance(specs, (list, tuple)):
        raise UnsupportedError("fake: no specs")
    return FakeBackend.from_specs(
        [str(spec) for spec in specs], None if state_dir is None else str(state_dir)
    )
