"""Shares of a whole device: who may use it together, with which CU mask and which memory cap.

No driver knows of shares; they are noted in the ledger. Where there is a cgroup v2 tree each share
has a cgroup, `alloy-amd/<bus>/<share>`: who is in it is in the share. A memory cap is the kernel's
`dmem.max` on that cgroup; where the kernel has none, a share with a cap is refused, never made
without it. CU masks stay in the tenants' own hands.

The ledger is written first and taken back when the cgroup or its cap cannot be made, so a crash
leaves at worst a noted share without its cap, which the audit shows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from alloy_agent.backends.amd.fence import unified
from alloy_agent.backends.amd.files import Files, Roots
from alloy_agent.backends.amd.ledger import DeviceEntry, Ledger, Notes, ShareEntry
from alloy_agent.backends.amd.masks import MaskPlan
from alloy_agent.backends.amd.modes import UNKNOWN
from alloy_agent.backends.amd.pieces import Sight
from alloy_agent.errors import BackendError, DeviceBusyError, UnsupportedError
from alloy_agent.host.cgroupfs import CgroupFs
from alloy_agent.host.devicememory import LACKS
from alloy_agent.host.sharegroups import ShareGroups
from alloy_agent.model import Configure, Partition, PartitionSpec, Share

GROUP: Final = "alloy-amd"


class MaskChoice(NamedTuple):
    """What the settings say of CU masks, where a layout says nothing."""

    each: int
    slots: int


class Shares:
    """Makes, changes and removes the shares of all devices."""

    def __init__(
        self,
        files: Files,
        roots: Roots,
        ledger: Ledger,
        masks: MaskChoice,
        cgroups: CgroupFs | None = None,
    ) -> None:
        self._files, self._roots, self._ledger, self._masks = files, roots, ledger, masks
        self._fs = cgroups or CgroupFs()

    def groups(self) -> ShareGroups:
        """Return the cgroups of shares, in the v2 tree that this host has now."""
        mount = unified(self._files, self._roots)
        usable = mount and self._fs.exists(f"{mount}/cgroup.controllers")
        return ShareGroups(mount if usable else None, GROUP, self._fs)

    def create(self, sight: Sight, spec: PartitionSpec) -> None:
        """Note a share, make its cgroup, and cap its memory.

        Raises:
            UnsupportedError: It is no share, or nothing here would hold its cap.
            ConfigError: There is no such mask.
            BackendError: It exists, or the kernel refuses; nothing of it is left.
        """
        if spec.share is Share.EXCLUSIVE:
            raise UnsupportedError(
                f"{spec.device}: partitions follow the compute mode, {spec.profile} is none",
                cure="set the compute mode",
            )
        if sight.modes.compute == UNKNOWN or not sight.nodes:
            raise BackendError(f"{spec.device} is not ready: {sight.modes.compute}")
        each, slots = spec.cu_mask or self._masks
        mask = MaskPlan.of_nodes(sight.nodes, each, slots).of(spec.share, spec.ordinal)
        groups = self.groups()
        _refuse_uncapped(sight, spec.memory_bytes, groups)

        def edit(entry: DeviceEntry, notes: Notes) -> None:
            if any((e.share, e.ordinal) == (spec.share, spec.ordinal) for e in entry.shares):
                raise BackendError(
                    f"{spec.device} has {spec.share} share {spec.ordinal} already",
                    cure="remove it first",
                )
            notes.serial += 1
            entry.shares.append(
                ShareEntry(
                    profile=spec.profile,
                    share=spec.share,
                    ordinal=spec.ordinal,
                    serial=notes.serial,
                    memory_bytes=spec.memory_bytes,
                    cu_mask=mask.text if mask else "",
                    cus=mask.cus if mask else 0,
                    choice=spec.cu_mask,
                )
            )

        self._ledger.change(spec.device, edit)
        try:
            groups.make(sight.bus, spec.profile)
            if spec.memory_bytes is not None:
                _cap(groups, sight.bus, spec.profile, spec.memory_bytes)
        except BackendError:
            groups.remove(sight.bus, spec.profile)
            self._ledger.change(spec.device, _without(spec))
            raise

    def destroy(self, bus: str, partition: Partition) -> None:
        """Forget a share and remove its cgroup.

        Raises:
            UnsupportedError: It is no share.
            DeviceBusyError: Processes are in its cgroup.
        """
        if partition.share is Share.EXCLUSIVE:
            raise UnsupportedError(
                f"{partition.id}: partitions follow the compute mode", cure="set the compute mode"
            )
        groups = self.groups()

        def edit(entry: DeviceEntry, _notes: Notes) -> None:
            here = _share_of(entry, partition)
            if here is None:
                return
            inside = ", ".join(f"pid {pid}" for pid in groups.pids(bus, here.profile))
            if inside:
                cure = f"end the holders: {inside}"
                raise DeviceBusyError(f"{partition.id} is in use", cure=cure)
            entry.shares.remove(here)
            groups.remove(bus, here.profile)

        self._ledger.change(partition.device, edit)

    def configure(self, sight: Sight, step: Configure) -> None:
        """Change the memory cap of a living share in place.

        Raises:
            UnsupportedError: It is no share, or nothing here would hold its cap.
            BackendError: It is gone, or the kernel refuses.
        """
        if step.partition.share is Share.EXCLUSIVE:
            raise UnsupportedError(
                f"{step.partition.id}: its memory is fixed by {step.partition.profile}",
                cure="choose another profile",
            )
        groups = self.groups()
        _refuse_uncapped(sight, step.memory_bytes, groups)

        def edit(entry: DeviceEntry, _notes: Notes) -> None:
            here = _share_of(entry, step.partition)
            if here is None:
                raise BackendError(f"{step.partition.id} is gone", cure="plan again")
            if step.memory_bytes is not None or here.memory_bytes is not None:
                _cap(groups, sight.bus, here.profile, step.memory_bytes)
            here.memory_bytes = step.memory_bytes

        self._ledger.change(step.device, edit)


def _refuse_uncapped(sight: Sight, memory_bytes: int | None, groups: ShareGroups) -> None:
    if memory_bytes is not None and not groups.can_cap(sight.bus):
        raise UnsupportedError(f"{sight.id}: {LACKS}", cure="share without a memory cap")


def _cap(groups: ShareGroups, bus: str, profile: str, memory_bytes: int | None) -> None:
    """Set the cap of a share's cgroup, and read it back."""
    folder = groups.folder(bus, profile)
    if groups.memory is not None and folder is not None:
        groups.make(bus, profile)  # one of a share from before there was a tree
        groups.memory.set_cap(folder, bus, memory_bytes)


def _without(spec: PartitionSpec) -> Callable[[DeviceEntry, Notes], None]:
    def edit(entry: DeviceEntry, _notes: Notes) -> None:
        place = (spec.share, spec.ordinal)
        entry.shares = [e for e in entry.shares if (e.share, e.ordinal) != place]

    return edit


def _share_of(entry: DeviceEntry, partition: Partition) -> ShareEntry | None:
    """Return the binding behind a partition, found by its place; None: there is none.

    Raises:
        BackendError: Another one is in its place.
    """
    for share in entry.shares:
        if (share.share, share.ordinal) != (partition.share, partition.ordinal):
            continue
        if partition.incarnation and not partition.incarnation.endswith(f".share-{share.serial}"):
            raise BackendError(
                f"{partition.id} has been made anew by somebody else",
                cure="look at the devices and plan again",
            )
        return share
    return None
