"""A recipe made into a machine: ids, addresses, hives and the state before the first change."""

from __future__ import annotations

import hashlib
import uuid
from pathlib import Path
from typing import Final

import msgspec

from alloy_agent.errors import ConfigError
from alloy_agent.silicon.amd import auto_mode, fits
from alloy_agent.silicon.boards import BOARDS, AmdBoard, NeuronInstance, NvidiaBoard
from alloy_agent.silicon.boards.amd import partitions_of
from alloy_agent.silicon.machine import Machine
from alloy_agent.silicon.refusals import RefusalError
from alloy_agent.silicon.spec import BoardRecipe, Recipe
from alloy_agent.silicon.state import Client, DeviceState, FaultState, MachineState

_NAMESPACE: Final = uuid.UUID("0b7f4c1d-3a52-5b8e-a6a9-51f0c7f1d2b3")
_NUMA_NODES: Final = 2
_AMD_HIVE: Final = 8  # accelerators on one board


def digest(recipe: Recipe) -> str:
    """Return 16 hex digits that are the same for the same recipe."""
    return hashlib.sha256(msgspec.json.encode(recipe, order="sorted")).hexdigest()[:16]


def open_machine(recipe: Recipe, state_dir: Path | None = None) -> Machine:
    """Return the machine of a recipe, as `state_dir` remembers it, else as new.

    Raises:
        ConfigError: The recipe asks for what the boards cannot do, or the state cannot be read.
    """
    path = None
    if state_dir is not None:
        path = state_dir / f"silicon-{digest(recipe)}.json"
    if path is not None and path.exists():
        return Machine(new_state(recipe), path)
    return Machine(_prepared(recipe), path)


def check(recipe: Recipe) -> None:
    """Return if there can be a machine of this recipe; makes none.

    Raises:
        ConfigError: The recipe asks for what the boards cannot do.
    """
    _prepared(recipe)


def new_state(recipe: Recipe) -> MachineState:
    """Return a machine whose devices are in their factory modes."""
    state = MachineState(
        seed=recipe.seed,
        recipe=digest(recipe),
        kfd_busy_scope=recipe.kfd_busy_scope,
        display_card=recipe.display_card,
    )
    for entry in recipe.boards:
        board = BOARDS[entry.board]
        count = board.devices * entry.count if isinstance(board, NeuronInstance) else entry.count
        for number in range(count):
            state.devices.append(_device(state, entry, number))
    for key, fault in enumerate(recipe.faults, start=1):
        state.faults.append(FaultState(key=key, fault=fault))
    state.fault_key = len(recipe.faults)
    state.crash_at = recipe.crash_at
    state.crash_how = recipe.crash_how
    return state


def _device(state: MachineState, entry: BoardRecipe, number: int) -> DeviceState:
    board = BOARDS[entry.board]
    index = len(state.devices)
    mark = str(uuid.uuid5(_NAMESPACE, f"{state.seed}/{entry.board}/{index}"))
    device = DeviceState(
        id="",
        board=entry.board,
        index=index,
        bus="",
        serial=str(int(mark[:8], 16) % 10**10 + 10**12),
        uuid=mark,
        driver=entry.driver or board.driver,
        passthrough=entry.passthrough,
        fenced=entry.fenced,
    )
    vendor = [d for d in state.devices if type(BOARDS[d.board]) is type(board)]
    if isinstance(board, NvidiaBoard):
        device.uuid = f"GPU-{mark}"
        device.id = device.uuid
        device.minor = len(vendor)
        device.bus = f"0000:{0x1A + 0x11 * (len(vendor) % 13):02x}:{len(vendor) // 13:02x}.0"
        device.numa = len(vendor) * _NUMA_NODES // 8 % _NUMA_NODES
    elif isinstance(board, AmdBoard):
        bus = 0x05 + 0x10 * (len(vendor) % 15)
        device.bus = f"0000:{bus:02x}:{len(vendor) // 15:02x}.0"
        device.id = f"amd-{device.bus}"
        device.serial = f"0x{mark[:8]}{mark[9:13]}{mark[14:18]}"
        device.numa = len(vendor) * _NUMA_NODES // 8 % _NUMA_NODES
        _amd_defaults(device, board, len(vendor))
    else:
        device.bus = board.bdfs[number % board.devices]
        device.serial = mark.replace("-", "")[:16]
        device.id = f"neuron-{device.serial}"
        device.numa = board.numa[number % board.devices]
        device.lnc = board.lnc[0]
    return device


def _amd_defaults(device: DeviceState, board: AmdBoard, ordinal: int) -> None:
    if board.xgmi_bytes_per_s:
        mark = uuid.uuid5(_NAMESPACE, f"hive/{ordinal // _AMD_HIVE}").hex[:16]
        device.hive = f"0x{mark}"
    if board.compute_modes:
        device.memory_mode = "NPS1"
        device.compute_mode = auto_mode(board, "NPS1")
        device.isolation = [0] * partitions_of(device.compute_mode, board.xcds)


def _prepared(recipe: Recipe) -> MachineState:
    """Return the machine with the modes, instances and processes that the recipe asks for."""
    plain = msgspec.structs.replace(recipe, faults=(), crash_at=None)
    state = new_state(plain)
    machine = Machine(state)
    index = 0
    for entry in recipe.boards:
        board = BOARDS[entry.board]
        count = entry.count * (board.devices if isinstance(board, NeuronInstance) else 1)
        for device in state.devices[index : index + count]:
            try:
                _prepare_device(machine, device, entry)
            except RefusalError as error:
                raise ConfigError(
                    f"simulated {entry.board}: {error}",
                    cure="change its `mig`, `instances`, `compute`, `memory` or `lnc`",
                ) from error
        index += count
    _start_processes(machine, recipe)
    finished = new_state(recipe)
    for name in ("faults", "fault_key", "crash_at", "crash_how", "recipe"):
        setattr(state, name, getattr(finished, name))
    return state


def _prepare_device(machine: Machine, device: DeviceState, entry: BoardRecipe) -> None:
    board = BOARDS[entry.board]
    if isinstance(board, NvidiaBoard):
        if entry.mig or entry.instances:
            device.mig = device.mig_pending = True  # before the agent came; no call of ours
        for text in entry.instances:
            _make_instance(machine, device, board, text)
    elif isinstance(board, AmdBoard):
        if entry.memory is not None:
            if entry.memory not in board.memory_modes or not board.compute_modes:
                raise RefusalError(f"no memory mode {entry.memory}")
            device.memory_mode = entry.memory
            device.compute_mode = auto_mode(board, entry.memory)
        if entry.compute is not None:
            if not fits(board, entry.compute, device.memory_mode):
                raise RefusalError(f"compute mode {entry.compute} in {device.memory_mode}")
            device.compute_mode = entry.compute
        device.isolation = [0] * len(machine.amd_partitions(device))
    elif entry.lnc is not None:
        machine.neuron(device.id).set_lnc(entry.lnc)


def _make_instance(machine: Machine, device: DeviceState, board: NvidiaBoard, text: str) -> None:
    name, at, start = text.partition("@")
    shape = board.profile(name)
    if shape is None or (at and not start.isdecimal()):
        known = ", ".join(profile.name for profile in board.profiles)
        raise RefusalError(f"no instance {text!r} (profiles: {known}, each with or without @start)")
    gpu = machine.nvidia(device.id)
    made = gpu.create_gpu_instance(shape.vendor_id, int(start) if at else None)
    gpu.create_compute_instance(made.id)


def _start_processes(machine: Machine, recipe: Recipe) -> None:
    for process in recipe.processes:
        target = next(
            (
                device.id
                for device in machine.state.devices
                if process.device in {device.id, f"#{device.index}"}
            ),
            None,
        )
        if target is None:
            raise ConfigError(
                f"simulated process {process.pid}: no device {process.device!r}",
                cure=f"name one of #0 to #{len(machine.state.devices) - 1}",
            )
        fields = msgspec.structs.asdict(process) | {"device": target}
        try:
            machine.start_process(Client(**fields))
        except RefusalError as error:
            raise ConfigError(
                f"simulated process {process.pid}: {error}", cure="change the process"
            ) from error
