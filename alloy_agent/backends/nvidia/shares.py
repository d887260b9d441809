"""Shares of a GPU that is not cut: who may use it together, and each one's memory cap.

No driver knows of shares, so they are kept in one file on `/run`, which ends with the boot as the
tenants do. Each share has a cgroup in the v2 tree, where there is one: that is how a process is
told from the other tenants', and what the driver's memory limit is set on.

The memory limit is the driver's own (`nvmlDeviceSetMemoryLimits_v1`, driver R615 and later on
cgroup v2) or, where the driver charges its memory to cgroups and has no such call, the kernel's
`dmem.max`. Either is below the tenant. Where there is neither, a share with a cap is refused rather
than made without.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from alloy_agent.backends.nvidia.gpu import Gpu
from alloy_agent.backends.nvidia.library import ABSENT, NvmlCallError
from alloy_agent.errors import BackendError, DeviceBusyError, UnsupportedError
from alloy_agent.host.cgroupfs import CgroupFs
from alloy_agent.host.sharegroups import ShareGroups
from alloy_agent.model import PartitionSpec, Share

UNLIMITED: Final = 0xFFFFFFFFFFFFFFFF  # pynvml: NVML_DEVICE_MEMORY_LIMIT_MAX
GROUP: Final = "alloy-nvidia"
SETTER: Final = "nvmlDeviceSetMemoryLimits_v1"


class ShareRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One share, as kept in the file."""

    device: str
    profile: str
    share: Literal["production", "opportunistic"]
    ordinal: int
    serial: str
    memory_bytes: int | None = None


class Limit(msgspec.Struct, frozen=True, kw_only=True):
    """A memory limit as the driver or the kernel tells it; None: there is no limit."""

    hard_bytes: int | None
    used_bytes: int
    by: Literal["driver", "dmem"]


class Shares:
    """The shares of all GPUs."""

    def __init__(self, root: Path, fs: CgroupFs | None = None) -> None:
        self._root = root
        self._fs = fs or CgroupFs()
        self._folder = root / "run/alloy"
        self._file = self._folder / "nvidia-shares.json"

    def of(self, device: str) -> tuple[ShareRecord, ...]:
        """Return the shares of one GPU, by kind and number.

        Raises:
            BackendError: The file is damaged.
        """
        found = [record for record in self._read() if record.device == device]
        return tuple(sorted(found, key=lambda record: (record.share, record.ordinal)))

    def create(self, gpu: Gpu, spec: PartitionSpec) -> None:
        """Record a share, make its cgroup, and set its memory limit."""
        mig = gpu.mig()
        if mig is not None and mig[0]:
            raise UnsupportedError(f"{gpu.id}: MIG is on", cure="set mig off to share the GPU")
        kind: Literal["production", "opportunistic"] = (
            "production" if spec.share is Share.PRODUCTION else "opportunistic"
        )
        record = ShareRecord(
            device=str(gpu.id),
            profile=spec.profile,
            share=kind,
            ordinal=spec.ordinal,
            serial=uuid.uuid4().hex,
            memory_bytes=spec.memory_bytes,
        )
        with self._locked():
            known = self._read()
            if any(_same_place(record, other) for other in known):
                raise BackendError(f"{gpu.id}: share {spec.profile} exists", cure="plan again")
            if spec.memory_bytes is not None:
                self._need_limits(gpu)
            self._write([*known, record])
            self.groups.make(record.device, record.profile)
            if spec.memory_bytes is not None:
                try:
                    self.set_limit(gpu, record, spec.memory_bytes)
                except (NvmlCallError, BackendError):
                    self.groups.remove(record.device, record.profile)
                    self._write(known)
                    raise

    def destroy(self, gpu: Gpu, record: ShareRecord) -> None:
        """Forget a share; refused while processes are in its cgroup."""
        with self._locked():
            pids = self.pids(record)
            if pids:
                holders = ", ".join(f"pid {pid}" for pid in pids)
                raise DeviceBusyError(
                    f"{gpu.id}: share {record.profile} is in use",
                    cure=f"end the holders: {holders}",
                )
            if record.memory_bytes is not None:
                self.set_limit(gpu, record, None)
            self.groups.remove(record.device, record.profile)
            self._write([other for other in self._read() if other.serial != record.serial])

    def configure(self, gpu: Gpu, record: ShareRecord, memory_bytes: int | None) -> None:
        """Change a living share's memory limit in place."""
        with self._locked():
            self._need_limits(gpu)
            self.set_limit(gpu, record, memory_bytes)
            changed = msgspec.structs.replace(record, memory_bytes=memory_bytes)
            known = self._read()
            self._write([changed if other.serial == record.serial else other for other in known])

    def find(self, device: str, profile: str, incarnation: str) -> ShareRecord | None:
        """Return the share of that name; None: there is none.

        Raises:
            BackendError: Another one is in its place.
        """
        for record in self.of(device):
            if record.profile == profile:
                if incarnation not in {"", record.serial}:
                    raise BackendError(
                        f"{device}/{profile}@0 has been made anew by somebody else",
                        cure="look at the devices and plan again",
                    )
                return record
        return None

    # --- cgroups ---

    @property
    def groups(self) -> ShareGroups:
        """The cgroups of the shares, in the tree that this host has now."""
        tree = self._tree()
        return ShareGroups(None if tree is None else str(tree), GROUP, self._fs)

    def _tree(self) -> Path | None:
        for place in ("sys/fs/cgroup/unified", "sys/fs/cgroup"):
            if (self._root / place / "cgroup.controllers").exists():
                return self._root / place
        return None

    def procs_file(self, record: ShareRecord) -> tuple[str, ...]:
        """Return where a tenant's pid is written to be in the share."""
        return self.groups.procs(record.device, record.profile)

    def pids(self, record: ShareRecord) -> tuple[int, ...]:
        """Return the processes in a share's cgroup and below it."""
        return self.groups.pids(record.device, record.profile)

    # --- memory limits ---

    def can_limit(self, gpu: Gpu) -> bool:
        """Whether the driver or the kernel can cap a share's memory on this host."""
        return not self._lacks(gpu)

    def _lacks(self, gpu: Gpu) -> str:
        if self._tree() is None:
            return "memory limits need the cgroup v2 tree"
        if gpu.nvml.has(SETTER) or self.groups.can_cap(gpu.identity().bus):
            return ""
        return "this driver has no memory limits, and charges its memory to no cgroup"

    def _need_limits(self, gpu: Gpu) -> None:
        missing = self._lacks(gpu)
        if missing:
            raise UnsupportedError(
                f"{gpu.id}: {missing}", cure="share without a memory cap, or use MIG"
            )

    def set_limit(self, gpu: Gpu, record: ShareRecord, memory_bytes: int | None) -> None:
        """Set the limit on the share's cgroup, the driver's rather than the kernel's; read back."""
        if not self._tell_driver(gpu, record, memory_bytes):
            groups, bus = self.groups, gpu.identity().bus
            if groups.memory is not None:
                folder = groups.folder(record.device, record.profile) or ""
                groups.memory.set_cap(folder, bus, memory_bytes)
        seen = self.limit(gpu, record)
        if seen is None or seen.hard_bytes != memory_bytes:
            shown = "nothing" if seen is None else seen.hard_bytes
            raise BackendError(
                f"{gpu.id}: the driver took a memory limit of {memory_bytes} and shows {shown}"
            )

    def _tell_driver(self, gpu: Gpu, record: ShareRecord, memory_bytes: int | None) -> bool:
        """Set the driver's own limit; return whether it has any, where the kernel has one too."""
        if not gpu.nvml.has(SETTER):
            return False
        limits = self._limits(gpu, record, "c_nvmlSetMemoryLimits_v1_t")
        limits.softLimit = 0
        limits.hardLimit = UNLIMITED if memory_bytes is None else memory_bytes
        try:
            gpu.call(SETTER, limits)
        except NvmlCallError as failure:
            if failure.code in ABSENT and self.groups.can_cap(gpu.identity().bus):
                return False
            raise
        return True

    def limit(self, gpu: Gpu, record: ShareRecord) -> Limit | None:
        """Return the limit in force; None where neither driver nor kernel tells one."""
        if self._tree() is None:
            return None
        if gpu.nvml.has("nvmlDeviceGetMemoryLimits_v1"):
            limits = self._limits(gpu, record, "c_nvmlGetMemoryLimits_v1_t")
            try:
                gpu.call("nvmlDeviceGetMemoryLimits_v1", limits)
            except NvmlCallError as failure:
                if failure.code not in ABSENT:
                    raise
            else:
                hard = int(limits.hardLimit)
                return Limit(
                    hard_bytes=None if hard == UNLIMITED else hard,
                    used_bytes=int(limits.currentUsed),
                    by="driver",
                )
        cap = self.groups.cap(record.device, record.profile, gpu.identity().bus)
        if cap is None:
            return None
        return Limit(hard_bytes=cap.max_bytes, used_bytes=cap.current_bytes, by="dmem")

    def _limits(self, gpu: Gpu, record: ShareRecord, kind: str) -> Any:
        group = self.groups.path(record.device, record.profile) or ""
        return getattr(gpu.nvml.module, kind)(nameSpace=group.encode())

    # --- the file ---

    def _read(self) -> list[ShareRecord]:
        try:
            return msgspec.json.decode(self._file.read_bytes(), type=list[ShareRecord])
        except FileNotFoundError:
            return []
        except (OSError, msgspec.MsgspecError) as error:
            raise BackendError(
                f"{self._file}: shares cannot be read ({error})", cure="remove the file"
            ) from error

    def _write(self, records: list[ShareRecord]) -> None:
        temporary = self._file.with_suffix(f".{os.getpid()}")
        with temporary.open("wb") as file:
            file.write(msgspec.json.encode(records))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self._file)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        try:
            self._folder.mkdir(mode=0o755, parents=True, exist_ok=True)
            lock = os.open(self._folder / "nvidia-shares.lock", os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise BackendError(
                f"{self._folder}: shares cannot be kept ({error.strerror})",
                cure="run the agent as root",
            ) from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)


def _same_place(one: ShareRecord, other: ShareRecord) -> bool:
    same = one.profile == other.profile or (one.share, one.ordinal) == (other.share, other.ordinal)
    return one.device == other.device and same
