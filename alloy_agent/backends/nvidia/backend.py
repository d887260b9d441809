"""The NVIDIA backend: every GPU of this host through NVML."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from alloy_agent.backends.base import SignalSink
from alloy_agent.backends.nvidia import cutting, evidence, view
from alloy_agent.backends.nvidia.doctor import diagnose
from alloy_agent.backends.nvidia.events import EventWaiter
from alloy_agent.backends.nvidia.gpu import Gpu
from alloy_agent.backends.nvidia.instances import Piece
from alloy_agent.backends.nvidia.library import Nvml, NvmlCallError, translated
from alloy_agent.backends.nvidia.mps import Asker
from alloy_agent.backends.nvidia.shares import Shares
from alloy_agent.backends.nvidia.signals import CALLS_MAX, Sampler
from alloy_agent.errors import DeviceBusyError, UnsupportedError
from alloy_agent.host.cgroupfs import CgroupFs
from alloy_agent.host.deviceprograms import DevicePrograms
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
    Observation,
    Partition,
    SetMode,
    Share,
    SignalSpec,
    Step,
    Vendor,
)

_UUID_LABEL: Final = "GPU UUID:"


class NvidiaBackend:
    """All GPUs that the driver knows, each by its UUID."""

    def __init__(self, nvml: Nvml, root: Path = Path("/"), cgroups: CgroupFs | None = None) -> None:
        self.name = view.NAME
        self.calls_max = CALLS_MAX
        self.nvml = nvml
        self._root = root
        self._proc = root / "proc"
        self._lock = threading.Lock()
        self._gpus: dict[str, Gpu] = {}
        self._caps = view.CapsMinors(root)
        self._rows = view.RowsSeen()
        self._shares = Shares(root, cgroups)
        self._programs = DevicePrograms()
        self._mps = Asker(root)
        self._quiet: set[str] = set()
        self._samplers: dict[str, Sampler] = {}
        self._driver = ""
        self._waiter = EventWaiter(nvml, lambda: tuple(self._gpus.values()))

    def capabilities(self) -> Capabilities:
        """Return what this backend can do here."""
        version, notes = "", []
        try:
            version = str(self.nvml.call("nvmlSystemGetNVMLVersion"))
        except NvmlCallError as failure:
            notes.append(str(failure))
        return Capabilities(
            backend=self.name,
            vendors=(Vendor.NVIDIA,),
            library="libnvidia-ml.so.1",
            library_version=version,
            can_partition=not notes,
            can_share=not notes,
            has_events=not notes,
            notes=tuple(notes),
        )

    # --- devices ---

    def discover(self) -> tuple[DeviceId, ...]:
        """Return the ids of all GPUs, those that do not answer or have vanished too."""
        with translated("node"):
            count = int(self.nvml.call("nvmlDeviceGetCount"))
            uuids = [self._uuid_at(index) for index in range(count)]
            with contextlib.suppress(NvmlCallError):
                self._driver = str(self.nvml.call("nvmlSystemGetDriverVersion"))
        found = {uuid: index for index, uuid in enumerate(uuids) if uuid}
        for uuid in self._on_bus():
            found.setdefault(uuid, len(found))
        with self._lock:
            for uuid, index in found.items():
                if uuid not in self._gpus:
                    self._gpus[uuid] = Gpu(self.nvml, uuid, self._root, index)
            return tuple(gpu.id for gpu in sorted(self._gpus.values(), key=lambda g: g.index))

    def _uuid_at(self, index: int) -> str | None:
        """Return the UUID at a place of this moment's enumeration; None: it does not answer."""
        try:
            handle = self.nvml.call("nvmlDeviceGetHandleByIndex", index)
            return str(self.nvml.call("nvmlDeviceGetUUID", handle))
        except NvmlCallError:
            return None

    def _on_bus(self) -> list[str]:
        """Return the UUIDs that the kernel driver lists, whether or not NVML still does."""
        found = []
        for file in sorted((self._proc / "driver/nvidia/gpus").glob("*/information")):
            with contextlib.suppress(OSError):
                lines = file.read_text().splitlines()
                found += [line for line in lines if line.startswith(_UUID_LABEL)]
        uuids = [line.removeprefix(_UUID_LABEL).strip() for line in found]
        return [uuid for uuid in uuids if uuid.startswith("GPU-") and "?" not in uuid]

    def observe(self, device: DeviceId) -> Observation:
        """Return the GPU, its partitions and its faults, read back now."""
        gpu = self._gpu(device)
        with translated(device), gpu.lock:
            seen, partitions, pieces = self._read(gpu)
            faults = view.faults(gpu, seen, pieces, self._rows)
            faults += view.missing_nodes(gpu, partitions, self._root)
        return Observation(device=seen, partitions=partitions, faults=faults)

    def _read(self, gpu: Gpu) -> tuple[Device, tuple[Partition, ...], tuple[Piece, ...]]:
        others = tuple(self._gpus.values())
        seen = view.device(gpu, self._driver, others, capped=self._shares.can_limit(gpu))
        pieces = gpu.pieces() if view.mig_on(seen) else ()
        gpu.names = {piece.ident: view.piece_id(gpu, piece) for piece in pieces if piece.compute}
        return seen, view.partitions(gpu, seen, pieces, self._caps, self._shares), pieces

    def _gpu(self, device: str) -> Gpu:
        gpu = self._gpus.get(device)
        if gpu is None:
            self.discover()
            gpu = self._gpus.get(device)
        if gpu is None:
            raise UnsupportedError(f"no GPU {device}", cure="list the devices")
        return gpu

    # --- changes ---

    def apply(self, step: Step) -> None:
        """Do one step on one GPU."""
        gpu = self._gpu(step.device)
        with translated(step.device), gpu.lock:
            if isinstance(step, SetMode):
                self._set_mode(gpu, step)
            elif isinstance(step, Create):
                if step.spec.share is Share.EXCLUSIVE:
                    self._create(gpu, step)
                else:
                    self._shares.create(gpu, step.spec)
            elif isinstance(step, Destroy):
                self._destroy(gpu, step.partition)
            else:
                self._configure(gpu, step)

    def _create(self, gpu: Gpu, step: Create) -> None:
        piece = cutting.create(gpu, step)
        minor = gpu.identity().minor
        if minor is not None:
            self._caps.ensure(minor, piece)

    def _set_mode(self, gpu: Gpu, step: SetMode) -> None:
        if step.wanted == "on" and self._shares.of(gpu.id):
            raise DeviceBusyError(f"{gpu.id}: the GPU is shared", cure="destroy its shares first")
        cutting.set_mode(gpu, step, self._proc)

    def _destroy(self, gpu: Gpu, partition: Partition) -> None:
        if partition.share is Share.EXCLUSIVE:
            cutting.destroy(gpu, partition)
            return
        record = self._shares.find(gpu.id, partition.profile, partition.incarnation)
        if record is not None:
            self._shares.destroy(gpu, record)

    def _configure(self, gpu: Gpu, step: Configure) -> None:
        partition = step.partition
        record = None
        if partition.share is not Share.EXCLUSIVE:
            record = self._shares.find(gpu.id, partition.profile, partition.incarnation)
        if record is None:
            raise UnsupportedError(
                f"{partition.id}: its memory is fixed by {partition.profile}",
                cure="choose another profile",
            )
        self._shares.configure(gpu, record, step.memory_bytes)

    def quiesce(self, device: DeviceId) -> None:
        """Let go of every handle on the GPU; sampling and events leave it alone until `resume`."""
        gpu = self._gpu(device)
        self._quiet.add(device)
        self._waiter.exclude(device)
        with gpu.lock:
            sampler = self._samplers.pop(device, None)
            if sampler is not None:
                sampler.release()
            gpu.forget_handle()

    def resume(self, device: DeviceId) -> None:
        """Allow handles on the GPU again."""
        self._quiet.discard(device)
        self._waiter.include(device)

    def open_count(self, device: DeviceId) -> int:
        """Return how many handles are kept on a GPU: buffers, registrations, MIG devices."""
        sampler = self._samplers.get(device)
        held = 0 if sampler is None else sampler.handles()
        return held + self._waiter.registrations(device)

    # --- signals ---

    def signal_specs(self, device: DeviceId) -> tuple[SignalSpec, ...]:
        """Return the columns of the GPU and its partitions of this moment."""
        gpu = self._gpu(device)
        with translated(device), gpu.lock:
            _, partitions, _ = self._read(gpu)
            before = self._samplers.pop(device, None)
            if before is not None:
                before.release()
            sampler = Sampler(gpu, partitions, self.calls_max)
            self._samplers[device] = sampler
        return sampler.specs

    def sample(self, device: DeviceId, sink: SignalSink) -> None:
        """Fill the columns that `signal_specs` announced last."""
        if device in self._quiet:
            return
        gpu = self._gpu(device)
        if device not in self._samplers:
            self.signal_specs(device)
        with translated(device), gpu.lock:
            if device in self._quiet:
                return
            sampler = self._samplers.get(device)
            if sampler is not None:
                sampler.fill(sink)

    def wait_events(self, timeout_s: float) -> Sequence[DeviceEvent]:
        """Return what the driver reported, waiting up to `timeout_s` for the first."""
        if not self._gpus:
            self.discover()
        with translated("node"):
            events = self._waiter.wait(timeout_s)
        for event in events:
            if event.kind == "reset":
                self._rows.clear(event.device)
            elif event.code.startswith("xid:"):
                self._rows.note(event.device, int(event.code.removeprefix("xid:")))
        return events

    # --- evidence ---

    def facts(self, device: DeviceId) -> tuple[Fact, ...]:
        """Return what the checks of the GPU and its partitions need, read now."""
        gpu = self._gpu(device)
        with translated(device), gpu.lock:
            seen, partitions, pieces = self._read(gpu)
            reading = evidence.Reading(
                gpu, seen, partitions, pieces, self._proc, self._shares, self._programs, self._mps
            )
            return evidence.collect(reading)

    def diagnose(self) -> tuple[Diagnosis, ...]:
        """Return what this host has and lacks for NVIDIA GPUs."""
        return diagnose(self.nvml, self._root)

    def close(self) -> None:
        """Let go of everything."""
        self._waiter.close()
        for device in list(self._samplers):
            with contextlib.suppress(NvmlCallError):
                self._samplers.pop(device).release()
        self.nvml.close()
