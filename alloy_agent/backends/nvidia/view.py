"""A GPU in the nouns of the agent: device, partitions, faults, links."""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path
from typing import Final

from alloy_agent.backends.nvidia.gpu import Gpu, Identity
from alloy_agent.backends.nvidia.instances import Piece
from alloy_agent.backends.nvidia.library import LOST, NvmlCallError
from alloy_agent.backends.nvidia.shares import ShareRecord, Shares
from alloy_agent.model import (
    HALF_MADE,
    Access,
    Device,
    DeviceFault,
    Mode,
    ModeChange,
    ModeKind,
    Partition,
    PartitionId,
    Placement,
    Scheme,
    Share,
    Tier,
    TierLimit,
    Vendor,
)

NAME: Final = "nvidia"
COMMON_NODES: Final = ("/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools")
MIG_LIMIT: Final = TierLimit(
    way="mig",
    tier=Tier.HARD,
    reason="memory, compute and faults are cut in hardware; TLB, PCIe and power are shared",
)
SHARED_LIMIT: Final = TierLimit(
    way="shared", tier=Tier.SOFT, reason="tenants share the device in time, under rate control"
)
CAPPED_LIMIT: Final = TierLimit(
    way="shared-capped",
    tier=Tier.ENFORCED,
    reason="device memory is capped below the tenant; compute is shared in time, as at soft",
)
WHOLE_LIMIT: Final = TierLimit(
    way="whole", tier=Tier.HARD, reason="a whole GPU behind its own device node"
)
RECOVERY_FIELD: Final = 230  # NVML_FI_DEV_GET_GPU_RECOVERY_ACTION
# Source: nvml.h, nvmlDeviceGpuRecoveryAction_t.
RECOVERY: Final[dict[int, str]] = {
    1: "reset the GPU",
    2: "restart the node",
    3: "drain peer-to-peer traffic",
    4: "drain the GPU, then reset it",
    5: "recover the IMEX domain",
    6: "reset the bus",
    7: "restart the system",
}


class CapsMinors:
    """The nodes of `/dev/nvidia-caps`: their numbers are fixed while the driver is loaded.

    The driver does not make them; without them a container cannot be given its instance, so they
    are made when an instance is. They stay after it: the number is the place's, not the tenant's,
    and what may open one is decided by the device rules of its container.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._file = root / "proc/driver/nvidia-caps/mig-minors"
        self._minors: dict[str, int] | None = None

    def nodes(self, gpu: int, piece: Piece) -> tuple[str, ...]:
        """Return the capability nodes of an instance and its compute instances."""
        keys = [f"gpu{gpu}/gi{piece.ident}/access"]
        keys += [f"gpu{gpu}/gi{piece.ident}/ci{compute.ident}/access" for compute in piece.compute]
        table = self._table()
        return tuple(f"/dev/nvidia-caps/nvidia-cap{table[key]}" for key in keys if key in table)

    def ensure(self, gpu: int, piece: Piece) -> None:
        """Make the nodes of an instance that are missing, as far as this host lets us."""
        major = self._major()
        if major is None:
            return
        for node in self.nodes(gpu, piece):
            path = self._root / node.lstrip("/")
            number = int(node.rpartition("nvidia-cap")[2])
            with contextlib.suppress(OSError):  # what stays missing is a fault of the device
                path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
                os.mknod(path, stat.S_IFCHR | 0o444, os.makedev(major, number))

    def _major(self) -> int | None:
        try:
            lines = (self._root / "proc/devices").read_text().splitlines()
        except OSError:
            return None
        words = [line.split() for line in lines]
        return next((int(w[0]) for w in words if w[1:] == ["nvidia-caps"]), None)

    def _table(self) -> dict[str, int]:
        if self._minors is None:
            found = {}
            try:
                for line in self._file.read_text().splitlines():
                    name, _, number = line.rpartition(" ")
                    if number.isdecimal():
                        found[name] = int(number)
            except OSError:
                return {}
            self._minors = found
        return self._minors


def device(gpu: Gpu, driver: str, others: tuple[Gpu, ...] = (), *, capped: bool = False) -> Device:
    """Return the GPU as it is now; `capped`: memory of its shares can be capped."""
    known = gpu.identity()
    mig = gpu.mig() if known.mig_capable else None
    modes = () if mig is None else (_mode(mig, known),)
    slices = max((s.profile.size + max(s.profile.starts) for s in known.shapes), default=1)
    on = mig is not None and mig[0]
    fabric = gpu.topology.fabric(gpu)
    mig_limit = (MIG_LIMIT,) if known.mig_capable else ()
    computed = any(not shape.named for shape in known.shapes)
    return Device(
        id=gpu.id,
        vendor=Vendor.NVIDIA,
        model=known.name,
        backend=NAME,
        scheme=Scheme.INSTANCES if known.mig_capable else Scheme.WHOLE,
        slices=slices,
        slice_name="memory slice" if known.mig_capable else "GPU",
        index=gpu.index,
        bus=known.bus,
        pci_id=known.pci_id,
        serial=known.serial,
        numa_node=known.numa,
        driver=driver or None,
        memory_bytes=known.memory_bytes,
        compute_units=known.multiprocessors,
        profiles=tuple(shape.profile for shape in known.shapes),
        modes=modes,
        links=gpu.topology.links(gpu, others, mig=on),
        hive=fabric.domain,
        tier_limits=(*mig_limit, WHOLE_LIMIT, SHARED_LIMIT, *((CAPPED_LIMIT,) if capped else ())),
        fault_note="profile names are computed: this driver does not tell them" if computed else "",
    )


def _mode(mig: tuple[bool, bool], known: Identity) -> Mode:
    current, pending = mig
    return Mode(
        kind=ModeKind.MIG,
        current=_word(current),
        pending=_word(pending) if pending != current else None,
        available=("on", "off"),
        change=ModeChange.NOW if known.resetless else ModeChange.DEVICE_RESET,
    )


def _word(on: bool) -> str:
    return "on" if on else "off"


def mig_on(seen: Device) -> bool:
    """Whether the device is in MIG mode."""
    return any(mode.kind is ModeKind.MIG and mode.current == "on" for mode in seen.modes)


def partitions(
    gpu: Gpu, seen: Device, pieces: tuple[Piece, ...], caps: CapsMinors, shares: Shares
) -> tuple[Partition, ...]:
    """Return the instances that can be used; while MIG is off the shares, or the whole GPU."""
    if not mig_on(seen):
        records = shares.of(gpu.id)
        if records:
            return tuple(_share(gpu, seen, record, shares) for record in records)
        return (whole(gpu, seen),)
    return tuple(_instance(gpu, piece, caps) for piece in pieces if piece.compute)


def parent_nodes(gpu: Gpu) -> tuple[str, ...]:
    """Return the nodes that anyone on this GPU needs."""
    minor = gpu.identity().minor
    own = () if minor is None else (f"/dev/nvidia{minor}",)
    return (*own, *COMMON_NODES)


def whole(gpu: Gpu, seen: Device) -> Partition:
    """Return the whole GPU as one piece."""
    return Partition(
        id=PartitionId(f"{gpu.id}/whole@0"),
        device=gpu.id,
        profile="whole",
        placement=Placement(start=0, size=seen.slices),
        incarnation=str(gpu.id),
        uuid=str(gpu.id),
        memory_bytes=seen.memory_bytes,
        compute_units=seen.compute_units,
        access=Access(device_nodes=parent_nodes(gpu), environment=visible(str(gpu.id))),
    )


def _share(gpu: Gpu, seen: Device, record: ShareRecord, shares: Shares) -> Partition:
    return Partition(
        id=PartitionId(f"{gpu.id}/{record.profile}@0"),
        device=gpu.id,
        profile=record.profile,
        placement=Placement(start=0, size=seen.slices),
        incarnation=record.serial,
        memory_bytes=record.memory_bytes,
        share=Share(record.share),
        ordinal=record.ordinal,
        altered=_altered(gpu, record, shares),
        locator={"share": record.serial},
        access=Access(
            cgroup_procs=shares.procs_file(record),
            device_nodes=parent_nodes(gpu),
            environment=visible(str(gpu.id)),
        ),
    )


def _altered(gpu: Gpu, record: ShareRecord, shares: Shares) -> str:
    """Return in which way a share's memory cap is not what was granted; "" if it is."""
    if record.memory_bytes is None:
        return ""
    limit = shares.limit(gpu, record)
    if limit is not None and limit.hard_bytes == record.memory_bytes:
        return ""
    shown = "none" if limit is None or limit.hard_bytes is None else f"{limit.hard_bytes} bytes"
    return f"has {shown} as memory cap in force, granted were {record.memory_bytes} bytes"


def _instance(gpu: Gpu, piece: Piece, caps: CapsMinors) -> Partition:
    profile = piece.shape.profile
    uuids = [compute.uuid for compute in piece.compute]
    minor = gpu.identity().minor
    own = () if minor is None else caps.nodes(minor, piece)
    return Partition(
        id=piece_id(gpu, piece),
        device=gpu.id,
        profile=profile.name,
        placement=piece.placement,
        incarnation=piece.incarnation,
        uuid=uuids[0] if len(uuids) == 1 else None,
        memory_bytes=profile.memory_bytes,
        compute_units=profile.compute_units,
        locator={
            "gi": str(piece.ident),
            "ci": ",".join(str(compute.ident) for compute in piece.compute),
        },
        access=Access(
            device_nodes=(*parent_nodes(gpu), *own), environment=visible(",".join(uuids))
        ),
    )


def piece_id(gpu: Gpu, piece: Piece) -> PartitionId:
    """Return the id of the piece at its location."""
    return PartitionId(f"{gpu.id}/{piece.shape.profile.name}@{piece.placement.start}")


def visible(uuids: str) -> dict[str, str]:
    """Return the variables that show a tenant its piece and nothing else."""
    return {"CUDA_VISIBLE_DEVICES": uuids, "NVIDIA_VISIBLE_DEVICES": uuids}


def faults(
    gpu: Gpu, seen: Device, pieces: tuple[Piece, ...], rows: RowsSeen
) -> tuple[DeviceFault, ...]:
    """Return what is wrong with the GPU now; the driver's own verdict first."""
    found = []
    action = gpu.field(RECOVERY_FIELD)
    if action:
        text = RECOVERY.get(int(action), "unknown to this agent")
        found.append(("recovery_action", f"action {int(action)}: {text}"))
    found += [
        (
            HALF_MADE,
            f"{piece.shape.profile.name}@{piece.placement.start} without compute instance",
        )
        for piece in pieces
        if not piece.compute
    ]
    for mode in seen.modes:
        if mode.pending is not None and mode.change is not ModeChange.NOW:
            found.append(("reset_required", "a mode change waits for a reset"))
    found += rows.faults(gpu)
    return tuple(DeviceFault(device=gpu.id, kind=kind, reason=reason) for kind, reason in found)


def missing_nodes(
    gpu: Gpu, partitions: tuple[Partition, ...], root: Path
) -> tuple[DeviceFault, ...]:
    """Return a fault for each partition whose capability nodes do not exist on this host."""
    if not (root / "dev").is_dir():
        return ()
    found = []
    for partition in partitions:
        nodes = [n for n in partition.access.device_nodes if n.startswith("/dev/nvidia-caps/")]
        missing = [node for node in nodes if not (root / node.lstrip("/")).exists()]
        if missing:
            reason = f"{partition.profile}@{partition.placement.start}: no {', '.join(missing)}"
            found.append(DeviceFault(device=gpu.id, kind="device_node_missing", reason=reason))
    return tuple(found)


class RowsSeen:
    """Row remapping: unreadable while instances live, so the last answer is remembered."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[bool, bool]] = {}

    def faults(self, gpu: Gpu) -> list[tuple[str, str]]:
        """Return what is wrong with the GPU's memory rows, as far as it is known."""
        try:
            rows = gpu.maybe("nvmlDeviceGetRemappedRows")
        except NvmlCallError as failure:
            if failure.code in LOST:
                raise
            rows = None
        if rows is not None:
            self._last[gpu.id] = (bool(rows[2]), bool(rows[3]))
        pending, failed = self._last.get(gpu.id, (False, False))
        found = []
        if failed:
            found.append(("row_remap_failed", "rows could not be remapped: replace the GPU"))
        if pending:
            found.append(("row_remap_pending", "rows are remapped at the next reset"))
        return found

    def note(self, device: str, xid: int) -> None:
        """Take over what an XID says of the rows: 63 remap pending, 64 remap failed."""
        pending, failed = self._last.get(device, (False, False))
        self._last[device] = (pending or xid == 63, failed or xid == 64)

    def clear(self, device: str) -> None:
        """Forget, after a reset."""
        with contextlib.suppress(KeyError):
            del self._last[device]
