"""One device as it is now: its identity, its shape and its links, from sysfs, tables and tools."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from alloy_agent.backends.neuron.listing import ListedDevice, Listing
from alloy_agent.backends.neuron.topology import (
    core_order,
    find_instance,
    find_product,
    group_sizes,
    is_linked,
)
from alloy_agent.backends.neuron.tree import DeviceTree, NeuronTree, read_attribute
from alloy_agent.model import (
    Condition,
    Device,
    DeviceId,
    Link,
    Mode,
    ModeChange,
    ModeKind,
    Profile,
    Scheme,
    Tier,
    TierLimit,
    Value,
    Vendor,
)
from alloy_agent.silicon.boards.shapes import NeuronInstance

_SERIAL: Final = re.compile(r"[0-9a-f]{16}")
RESET_INVALID: Final = "2"

CORES_LIMIT: Final = TierLimit(
    way="cores",
    tier=Tier.SOFT,
    reason="tenants share the device node; core reservation binds only those who ask",
)
BANK_LIMIT: Final = TierLimit(
    way="cores",
    tier=Tier.SOFT,
    reason="tenants share the device node, and with LNC 1 two cores share one memory bank",
)
UNLINKED_LIMIT: Final = TierLimit(
    way="whole", tier=Tier.HARD, reason="a whole device, linked to no other, behind its own node"
)
LINKED_LIMIT: Final = TierLimit(
    way="whole",
    tier=Tier.ENFORCED,
    reason="fenced by its node, but NeuronLink reaches the other devices of the group",
)
SHARED_LIMIT: Final = TierLimit(
    way="shared", tier=Tier.SOFT, reason="tenants share the device in time, under rate control"
)


class Board(Value, frozen=True, kw_only=True):
    """What is known of one device, before any grant.

    Attributes:
        rdev: Number of its node; None: the driver does not tell.
        order: Physical cores in the order of logical ones; None: not known now.
        lnc_choices: Legal logical core configurations, the default first.
        missing: How many devices of the instance are not there.
    """

    id: DeviceId
    number: int
    rdev: int | None
    serial: str
    bus: str | None
    product: str
    instance: NeuronInstance | None
    cores: int
    order: tuple[int, ...] | None
    lnc_choices: tuple[int, ...]
    memory_bytes: int | None
    neighbours: tuple[int, ...]
    linked: bool
    numa: int | None
    reset_state: str
    adapters: tuple[str, ...] = ()  # EFA adapters of the same NUMA node
    missing: int = 0
    problems: tuple[str, ...] = ()


BoardAndTree = tuple[Board, DeviceTree]


class BoardReader:
    """Reads devices; what cannot change while the driver is loaded is read once.

    A driver that is loaded again makes new directories, so the directory's inode tells. A device
    of which anything could not be read is read again each time: the driver may just be starting.
    """

    def __init__(self, tree: NeuronTree, product_name_file: str) -> None:
        self._tree, self._product_name_file = tree, product_name_file
        self._kept: dict[int, tuple[tuple[object, ...], Board]] = {}

    def read(self, listing: Listing, only: int | None = None) -> dict[DeviceId, BoardAndTree]:
        """Return the devices that the driver shows now, or only the one of a number."""
        devices = self._tree.devices()
        told = read_attribute(self._product_name_file).text or ""
        node_id = self._tree.class_attribute("node_id_4").text or ""
        found: dict[DeviceId, BoardAndTree] = {}
        for device in devices:
            if only in {None, device.number}:
                listed = listing.of(device.number)
                about = (device.inode(), listed, told, node_id, len(devices))
                board = self._board(device, about)
                found[board.id] = (board, device)
        return found

    def _board(self, device: DeviceTree, about: tuple[Any, ...]) -> Board:
        kept = self._kept.get(device.number)
        if kept is not None and kept[0] == about:
            return msgspec.structs.replace(kept[1], reset_state=device.text("reset"))
        _, listed, told, node_id, count = about
        board = _board(device, listed, told, node_id, count)
        near = self._tree.fabric_adapters()
        adapters = tuple(name for name, node in near.items() if node == board.numa)
        board = msgspec.structs.replace(board, adapters=adapters)
        self._kept.pop(device.number, None)
        if board.serial and not board.problems:
            self._kept[device.number] = (about, board)
        return board


def _board(
    device: DeviceTree, listed: ListedDevice | None, told: str, node_id: str, count: int
) -> Board:
    product = device.text("device_name")
    instance = find_instance(told, product, count)
    table = instance or find_product(product)
    serial = device.text("serial_number")
    serial = serial if _SERIAL.fullmatch(serial) and serial.strip("0") else ""
    bus = listed.bus if listed is not None else None
    cores = device.number_of("core_count") or len(device.cores()) or (table.cores if table else 0)
    neighbours = _neighbours(device, listed, instance)
    order = None if table is None else core_order(table, device.number, node_id)
    if table is None:
        order = tuple(range(cores))
    return Board(
        id=_identity(device.number, serial, bus),
        number=device.number,
        rdev=_rdev(device.text("dev")),
        serial=serial,
        bus=bus,
        product=product or "Neuron device",
        instance=instance,
        cores=cores,
        order=order if order is None or len(order) == cores else tuple(range(cores)),
        lnc_choices=table.lnc if table is not None else (1,),
        memory_bytes=_memory(listed, table),
        neighbours=neighbours,
        linked=is_linked(instance, device.number, neighbours, count),
        numa=listed.numa if listed is not None else None,
        reset_state=device.text("reset"),
        missing=max(0, instance.devices - count) if instance is not None else 0,
        problems=tuple(device.problems.values()),
    )


def _identity(number: int, serial: str, bus: str | None) -> DeviceId:
    """Return the id: by serial, else by bus address. Old devices have neither without a tool."""
    return DeviceId(f"neuron-{serial or bus or f'unidentified-{number}'}")


def _rdev(text: str) -> int | None:
    import os

    major, _, minor = text.partition(":")
    if not (major.isdigit() and minor.isdigit() and len(text) < 16):
        return None
    return os.makedev(int(major), int(minor))


def _memory(listed: ListedDevice | None, table: NeuronInstance | None) -> int | None:
    if listed is not None and listed.memory_bytes:
        return listed.memory_bytes
    return table.memory_bytes if table is not None else None


def _neighbours(
    device: DeviceTree, listed: ListedDevice | None, instance: NeuronInstance | None
) -> tuple[int, ...]:
    """Return the linked devices: as the driver tells, else the tool, else the instance's table."""
    text = device.text("connected_devices")
    parts = [part.strip() for part in text.split(",")] if text else []
    if parts and all(part.isdigit() for part in parts):
        return tuple(int(part) for part in parts)
    if listed is not None and listed.connected_to:
        return listed.connected_to
    if "connected_devices" in device.problems and instance is not None:  # for root only
        return instance.neighbours[device.number] if device.number < instance.devices else ()
    return ()


def describe(
    board: Board,
    *,
    lnc: int,
    driver: str,
    peers: Mapping[int, DeviceId],
    share_hbm_bank: bool,
) -> Device:
    """Return the device as everyone else knows it, its cores counted as logical ones."""
    slices = max(1, board.cores // lnc)
    banks = paired(board, lnc) and not share_hbm_bank
    condition, reason = _condition(board)
    mode = Mode(
        kind=ModeKind.LNC,
        current=str(lnc),
        available=tuple(str(value) for value in sorted(board.lnc_choices)),
        change=ModeChange.PROCESS_START,
    )
    whole = LINKED_LIMIT if board.linked else UNLINKED_LIMIT
    return Device(
        id=board.id,
        vendor=Vendor.NEURON,
        model=f"{board.product} ({_instance_name(board)})",
        backend="neuron",
        scheme=Scheme.CORES,
        slices=slices,
        slice_name="core",
        index=board.number,
        condition=condition,
        condition_reason=reason,
        bus=board.bus,
        pci_id=f"0x{board.instance.pci_id:08x}" if board.instance is not None else None,
        serial=board.serial or None,
        numa_node=board.numa,
        driver=driver or None,
        memory_bytes=board.memory_bytes,
        compute_units=board.cores,
        profiles=_profiles(board, slices, step=2 if banks else 1),
        modes=(mode,) if len(board.lnc_choices) > 1 else (),
        links=_links(board, peers),
        tier_limits=(BANK_LIMIT if paired(board, lnc) else CORES_LIMIT, whole, SHARED_LIMIT),
        legal_sizes=tuple(range(2, slices + 1, 2)) if banks else (),
        group_sizes=group_sizes(board.instance, board.number, peers),
        fault_note=_note(board),
    )


def paired(board: Board, lnc: int) -> bool:
    """Whether two logical cores share one memory bank (Trainium2 with LNC 1)."""
    return lnc == 1 and len(board.lnc_choices) > 1


def _instance_name(board: Board) -> str:
    return board.instance.name if board.instance is not None else "unknown instance"


def _condition(board: Board) -> tuple[Condition, str]:
    if board.reset_state == RESET_INVALID:
        return Condition.FAILED, "a reset has failed: the device takes nobody until a driver reload"
    if not board.serial and board.bus is None:
        return Condition.FAILED, "it tells neither serial nor bus address, so it cannot be named"
    if not board.cores:
        return Condition.FAILED, "the driver tells no cores"
    return Condition.OK, ""


def _note(board: Board) -> str:
    """Return what is not well but leaves the device in use."""
    notes = []
    if board.missing:
        notes.append(f"{board.missing} devices of the instance are missing")
    if board.linked and not board.neighbours:
        notes.append("the driver tells no links, which is degraded and not unlinked")
    return "; ".join(notes)


def _links(board: Board, peers: Mapping[int, DeviceId]) -> tuple[Link, ...]:
    links = [] if board.numa is None else [Link(peer=f"numa:{board.numa}", kind="numa")]
    rate = board.instance.link_bytes_per_s if board.instance is not None else None
    links += [
        Link(peer=peers[number], kind="neuronlink", bandwidth_bytes_per_s=rate, hops=1)
        for number in dict.fromkeys(board.neighbours)
        if number in peers and number != board.number
    ]
    links += [Link(peer=f"efa:{name}", kind="efa") for name in board.adapters]
    return tuple(links)


def _profiles(board: Board, slices: int, step: int) -> tuple[Profile, ...]:
    memory = board.memory_bytes
    return tuple(
        Profile(
            name=f"{size}c",
            size=size,
            starts=tuple(range(0, slices - size + 1, step)),
            max_count=slices // size,
            memory_bytes=None if memory is None else memory * size // slices,
            compute_units=size * board.cores // slices,
        )
        for size in range(step, slices + 1, step)
    )


def physical(board: Board, lnc: int, cores: Sequence[int]) -> tuple[int, ...] | None:
    """Return the physical cores behind logical ones of the device; None: not known now."""
    if board.order is None:
        # All of them are all of them, in whatever order.
        whole = lnc and len(set(cores)) * lnc == board.cores
        return tuple(range(board.cores)) if whole else None
    found: list[int] = []
    for core in cores:
        found += board.order[core * lnc : (core + 1) * lnc]
    return tuple(found)
