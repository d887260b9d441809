"""Devices, snapshots and layouts for tests of the planner and the layout reader, and a slow oracle.

The oracle knows nothing of how the planner searches: it lists every way to place the wanted pieces,
one by one, and counts what each would destroy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from alloy_agent.model import (
    Configure,
    Create,
    Destroy,
    Device,
    DeviceId,
    DeviceLayout,
    Layout,
    Mode,
    ModeChange,
    ModeKind,
    Partition,
    PartitionId,
    PartitionSpec,
    Placement,
    Plan,
    Profile,
    Scheme,
    Scope,
    SetMode,
    Snapshot,
    SourceRef,
    Vendor,
)
from alloy_agent.silicon.boards import NVIDIA_BOARDS

Placed = tuple[str, int]  # profile and start
BOARDS = {board.name: board for board in NVIDIA_BOARDS}


def gpu(board: str = "H100-SXM5-80GB", index: int = 0, mig: str = "on") -> Device:
    """Return a simulated GPU of the board's own profile table."""
    shapes = BOARDS[board].profiles
    return Device(
        id=DeviceId(f"GPU-{index}"),
        vendor=Vendor.NVIDIA,
        model=board,
        backend="fake",
        scheme=Scheme.INSTANCES,
        slices=BOARDS[board].memory_slices,
        slice_name="memory slice",
        index=index,
        bus=f"0000:{index:02x}:00.0",
        pci_id=f"0x{BOARDS[board].pci_id:08x}",
        profiles=tuple(
            Profile(
                name=shape.name,
                size=shape.size,
                starts=shape.starts,
                max_count=shape.max_count,
                compute_units=shape.sms,
            )
            for shape in shapes
        ),
        modes=(Mode(kind=ModeKind.MIG, current=mig, available=("off", "on")),),
    )


def cpu(cores: int = 7, memory_gib: int = 16, node: int = 0) -> Device:
    """Return a NUMA node with that many cores to lend."""
    return Device(
        id=DeviceId(f"cpu-{node}"),
        vendor=Vendor.CPU,
        model="Some CPU",
        backend="cpu",
        scheme=Scheme.CORES,
        slices=cores,
        slice_name="core",
        numa_node=node,
        memory_bytes=memory_gib << 30,
        units=tuple(range(1, cores + 1)),
        reserved_units=(0,),
    )


def mi300x(index: int = 0, compute: str = "SPX", memory: str = "NPS1") -> Device:
    """Return an accelerator that is cut by modes, in one hive with its like."""
    profiles = (
        Profile(name="SPX", size=8, starts=(0,), max_count=1),
        Profile(name="DPX", size=4, starts=(0, 4), max_count=2),
        Profile(name="CPX", size=1, starts=tuple(range(8)), max_count=8),
    )
    return Device(
        id=DeviceId(f"amd-{index}"),
        vendor=Vendor.AMD,
        model="MI300X",
        backend="fake",
        scheme=Scheme.MODES,
        slices=8,
        slice_name="XCD",
        index=index,
        hive="hive-1",
        profiles=profiles,
        modes=(
            Mode(kind=ModeKind.COMPUTE, current=compute, available=("SPX", "DPX", "QPX", "CPX")),
            Mode(
                kind=ModeKind.MEMORY,
                current=memory,
                available=("NPS1", "NPS4"),
                change=ModeChange.DRIVER_RELOAD,
                scope=Scope.HIVE,
            ),
        ),
    )


def trainium(cores: int = 8, sizes: tuple[int, ...] = (1, 2, 4, 8)) -> Device:
    """Return a Neuron device that lends runs of these lengths."""
    return Device(
        id=DeviceId("neuron-0"),
        vendor=Vendor.NEURON,
        model="trn2",
        backend="fake",
        scheme=Scheme.CORES,
        slices=cores,
        slice_name="core",
        legal_sizes=sizes,
    )


def pieces(device: Device, placed: Iterable[Placed]) -> tuple[Partition, ...]:
    """Return living pieces of a device."""
    sizes = {profile.name: profile.size for profile in device.profiles}
    return tuple(piece(device, name, start, sizes[name]) for name, start in placed)


def piece(
    device: Device, profile: str, start: int, size: int, memory_bytes: int | None = None
) -> Partition:
    """Return one living piece."""
    return Partition(
        id=PartitionId(f"{device.id}/{profile}@{start}"),
        device=device.id,
        profile=profile,
        placement=Placement(start=start, size=size),
        incarnation=f"made-{profile}-{start}",
        memory_bytes=memory_bytes,
        managed=True,
    )


def snapshot(devices: Sequence[Device], partitions: Iterable[Partition] = ()) -> Snapshot:
    """Return the node as seen now."""
    return Snapshot(
        boot_id="boot",
        sequence=7,
        taken_at_s=1.0,
        taken_wall_s=2.0,
        devices=tuple(devices),
        partitions=tuple(partitions),
    )


def wanted(device: Device, *profiles: str, mig: str = "on", line: int = 3) -> DeviceLayout:
    """Return the wish for these profiles ("3g.40gb" or "3g.40gb@4") on a GPU."""
    specs = []
    by_name = {profile.name: profile for profile in device.profiles}
    for text in profiles:
        name, _, start = text.partition("@")
        size = by_name[name].size
        place = Placement(start=int(start), size=size) if start else None
        specs.append(PartitionSpec(device=device.id, profile=name, size=size, placement=place))
    return DeviceLayout(
        device=device.id,
        modes={ModeKind.MIG: mig},
        partitions=tuple(specs),
        source=SourceRef(file="layout.yaml", line=line),
    )


def runs(
    device: Device, *sizes: int, memory: Sequence[int | None] = (), line: int = 3
) -> DeviceLayout:
    """Return the wish for runs of cores, with memory caps in bytes if given."""
    caps = memory or (None,) * len(sizes)
    specs = tuple(
        PartitionSpec(device=device.id, profile=f"{size}c", size=size, memory_bytes=cap)
        for size, cap in zip(sizes, caps, strict=True)
    )
    return DeviceLayout(
        device=device.id, partitions=specs, source=SourceRef(file="layout.yaml", line=line)
    )


def layout(*devices: DeviceLayout) -> Layout:
    """Return a layout of these wishes."""
    return Layout(name="test", devices=devices)


class Replay(NamedTuple):
    """What is left after the steps of a plan were done one by one."""

    partitions: dict[PartitionId, Partition]
    modes: dict[tuple[DeviceId, ModeKind], str]


def replay(plan: Plan, before: Snapshot) -> Replay:
    """Do a plan's steps on a table of pieces and check after each that the state is legal."""
    alive = {part.id: part for part in before.partitions}
    devices = {device.id: device for device in before.devices}
    modes = {(d.id, mode.kind): mode.current for d in before.devices for mode in d.modes}
    for planned in plan.steps:
        step = planned.step
        match step:
            case Destroy():
                assert alive.pop(step.partition.id) == step.partition
            case Create():
                made = _made(step)
                assert made.id not in alive
                alive[made.id] = made
            case Configure():
                assert alive[step.partition.id] == step.partition
                old = step.partition
                alive[old.id] = piece(
                    devices[old.device],
                    old.profile,
                    old.placement.start,
                    old.placement.size,
                    step.memory_bytes,
                )
            case SetMode():
                assert modes[step.device, step.kind] == step.current
                modes[step.device, step.kind] = step.wanted
                if step.kind is ModeKind.MIG:
                    assert not any(part.device == step.device for part in alive.values())
        for device in before.devices:
            assert_legal(device, [p for p in alive.values() if p.device == device.id], modes)
    return Replay(alive, modes)


def _made(step: Create) -> Partition:
    assert step.spec.placement is not None
    return Partition(
        id=PartitionId(f"{step.device}/{step.spec.profile}@{step.spec.placement.start}"),
        device=step.device,
        profile=step.spec.profile,
        placement=step.spec.placement,
        incarnation="new",
        memory_bytes=step.spec.memory_bytes,
        share=step.spec.share,
        ordinal=step.spec.ordinal,
    )


def assert_legal(
    device: Device, here: Sequence[Partition], modes: dict[tuple[DeviceId, ModeKind], str]
) -> None:
    """Check that the device could hold these pieces: in range, apart, at legal starts."""
    exclusive = [part for part in here if part.share == "exclusive"]
    used: set[int] = set()
    for part in exclusive:
        cells = set(range(part.placement.start, part.placement.stop))
        assert part.placement.stop <= device.slices
        assert not used & cells, f"{part.id} overlaps"
        used |= cells
    if device.scheme is Scheme.INSTANCES:
        by_name = {profile.name: profile for profile in device.profiles}
        counts = Counter(part.profile for part in exclusive)
        assert all(counts[name] <= by_name[name].max_count for name in counts)
        assert all(part.placement.start in by_name[part.profile].starts for part in exclusive)
        assert not exclusive or modes[device.id, ModeKind.MIG] == "on"


# --- the oracle --------------------------------------------------------------------------------


def all_layouts(device: Device) -> list[tuple[Placed, ...]]:
    """Return every legal set of placed pieces of one device, the empty one too."""
    found: list[tuple[Placed, ...]] = []

    def grow(position: int, placed: tuple[Placed, ...]) -> None:
        if position >= device.slices:
            found.append(placed)
            return
        grow(position + 1, placed)
        counts = Counter(name for name, _ in placed)
        for profile in device.profiles:
            free = position in profile.starts and position + profile.size <= device.slices
            if free and counts[profile.name] < profile.max_count:
                grow(position + profile.size, (*placed, (profile.name, position)))

    grow(0, ())
    return found


class Oracle:
    """Answers by exhaustion how few pieces a change of layout has to destroy."""

    def __init__(self, device: Device) -> None:
        self.layouts = all_layouts(device)
        self._bit: dict[Placed, int] = {}
        self.by_multiset: dict[tuple[str, ...], list[int]] = {}
        for placed in self.layouts:
            names = tuple(sorted(name for name, _ in placed))
            self.by_multiset.setdefault(names, []).append(self.mask(placed))

    def mask(self, placed: Iterable[Placed]) -> int:
        """Return a set of placed pieces as bits."""
        return sum(1 << self._bit.setdefault(item, len(self._bit)) for item in placed)

    def fewest_destroyed(
        self, before: Sequence[Placed], after: tuple[str, ...], leased: Sequence[Placed] = ()
    ) -> int | None:
        """Return the least number of pieces destroyed, or None when leased ones leave no way."""
        have, held = self.mask(before), self.mask(leased)
        kept = [
            (have & target).bit_count()
            for target in self.by_multiset[after]
            if held & target == held
        ]
        return len(before) - max(kept) if kept else None


def fewest_destroyed_runs(
    slices: int, before: Sequence[tuple[int, int]], sizes: Sequence[int], leased: frozenset[int]
) -> int | None:
    """Return the least number of runs destroyed to have runs of these sizes; None: impossible.

    Args:
        slices: Length of the row.
        before: Start and size of the living runs.
        sizes: Wanted sizes.
        leased: Indices into `before` of the runs that must stay.
    """
    have = set(before)
    held = {before[index] for index in leased}
    best: int | None = None
    for target in _arrangements(slices, tuple(sizes)):
        if held <= target:
            lost = len(have - target)
            best = lost if best is None else min(best, lost)
    return best


def _arrangements(
    slices: int, sizes: tuple[int, ...], start: int = 0
) -> Iterator[set[tuple[int, int]]]:
    if not sizes:
        yield set()
        return
    for size in sorted(set(sizes)):
        rest = list(sizes)
        rest.remove(size)
        for here in range(start, slices - size + 1):
            for tail in _arrangements(slices, tuple(rest), here + size):
                yield {(here, size), *tail}
