"""A layout file against the devices: every refusal names line, both sides and the cure."""

from __future__ import annotations

import fnmatch
import hashlib
import re
from typing import Final

import msgspec

from alloy_agent.decoding import size_bytes
from alloy_agent.errors import ConfigError
from alloy_agent.layout.groups import grouped
from alloy_agent.layout.schema import Entry, Filter, LayoutFile, Match, pick
from alloy_agent.layout.shares import shares_of
from alloy_agent.model import (
    Device,
    DeviceId,
    DeviceLayout,
    Layout,
    ModeKind,
    PartitionSpec,
    Placement,
    Profile,
    Scheme,
    Value,
    Vendor,
)
from alloy_agent.planner import compatible, core_profile, fits, format_bytes

_MIG_ENTRY: Final = re.compile(r"(?P<profile>[^@\s]+)(?:@(?P<start>[0-9]{1,4}))?", re.ASCII)
_BUS: Final = re.compile(r"(?:[0-9a-f]{4})?(?P<short>[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7])")
_MAKERS: Final = ("nvidia ", "amd instinct ", "amd ", "aws ")


class _Unsigned(Value, frozen=True, kw_only=True):
    """What the digest of a layout covers: all but the lines, which a comment may move."""

    name: str
    devices: tuple[DeviceLayout, ...]


def choose(layout_file: LayoutFile, name: str | None, devices: tuple[Device, ...]) -> Layout:
    """Return one layout of the file for these devices; others stay as they are.

    Raises:
        ConfigError: The layout is ambiguous, matches nothing, names a device twice, or asks for
            what a device cannot
            be. Nothing has been touched.
    """
    name = pick(layout_file, name)
    entries = layout_file.layouts[name]
    taken: dict[DeviceId, Entry] = {}
    chosen: list[DeviceLayout] = []
    # Entries with groups come last: they choose among the devices that no other entry names.
    for entry in sorted(entries, key=lambda one: one.groups is not None):
        matched = [device for device in devices if _matches(entry, device)]
        if not matched and isinstance(entry.select, Match):
            raise _matches_nothing(entry, entry.select, devices)
        _refuse_ambiguous_index(entry, matched)
        if entry.groups is not None:
            free = [device for device in matched if device.id not in taken]
            found = grouped(entry, entry.groups, free, devices)
            taken |= {one.device: entry for one in found}
            chosen += found
            continue
        for device in matched:
            first = taken.setdefault(device.id, entry)
            if first is not entry:
                raise ConfigError(
                    f"{entry.source}: layout '{name}' has two entries for {_title(device)}: "
                    f"here and on line {first.source.line}",
                    cure="narrow one of the two matches",
                )
            chosen.append(_device_layout(entry, device))
    if entries and not chosen:
        known = ", ".join(_title(device) for device in devices) or "none"
        raise ConfigError(
            f"{layout_file.file}:{layout_file.lines[name]}: layout '{name}' matches no device",
            cure=f"devices here are {known}"[:300],
        )
    return sealed(Layout(name=name, devices=tuple(chosen)))


def sealed(layout: Layout) -> Layout:
    """Return the layout with the digest of its content; lines and file names do not count."""
    bare = tuple(
        DeviceLayout(device=d.device, modes=d.modes, partitions=d.partitions)
        for d in layout.devices
    )
    content = msgspec.json.encode(_Unsigned(name=layout.name, devices=bare), order="deterministic")
    digest = hashlib.sha256(content).hexdigest()
    return Layout(name=layout.name, devices=layout.devices, digest=digest)


# --- which devices -----------------------------------------------------------------------------


def _matches(entry: Entry, device: Device) -> bool:
    if isinstance(entry.select, Filter):
        return _passes(entry, entry.select, device)
    match = entry.select
    return (
        match.vendor in (None, device.vendor)
        and (match.model is None or model_matches(match.model, device.model))
        and (match.uuid is None or match.uuid.lower() in _names(device))
        and (match.bus is None or _same_bus(match.bus, device.bus))
        and match.index in (None, device.index)
        and match.numa in (None, device.numa_node)
    )


def model_matches(pattern: str, model: str) -> bool:
    """Return whether a glob names a model, in any case and with or without the maker in front."""
    pattern, model = pattern.lower(), model.lower()
    names = [model, *(model.removeprefix(maker) for maker in _MAKERS if model.startswith(maker))]
    return any(fnmatch.fnmatchcase(name, pattern) for name in names)


def _names(device: Device) -> set[str]:
    names = {device.id.lower()}
    if device.serial:
        names.add(device.serial.lower())
    return names


def _same_bus(wanted: str, bus: str | None) -> bool:
    return bus is not None and _short_bus(wanted) == _short_bus(bus)


def _short_bus(bus: str) -> str:
    """Return a bus address in lower case with a domain of four digits, as the kernel writes it."""
    bus = bus.strip().lower()
    match = _BUS.fullmatch(bus if bus.count(":") == 2 else f"0000:{bus}")
    return match["short"] if match else bus


def _passes(entry: Entry, chosen: Filter, device: Device) -> bool:
    """Whether a mig-parted entry means this device; only NVIDIA devices are ever meant."""
    if device.vendor is not Vendor.NVIDIA:
        return False
    if chosen.positions is not None and device.index not in chosen.positions:
        return False
    if chosen.pci_ids:
        if device.pci_id is None:
            raise ConfigError(
                f"{entry.at('device-filter')}: {_title(device)} does not tell its PCI id, so that "
                "device-filter cannot be judged",
                cure="name it by devices: [N] instead",
            )
        pci_id = device.pci_id.lower()
        return any(pci_id == wanted or pci_id.startswith(wanted) for wanted in chosen.pci_ids)
    # MIG off is true already of a device that cannot be cut.
    return entry.mig != "none" or device.scheme is Scheme.INSTANCES


def _refuse_ambiguous_index(entry: Entry, matched: list[Device]) -> None:
    """Refuse an index that several devices have, as vendors and the host count from 0 each."""
    match = entry.select
    if not isinstance(match, Match) or match.index is None or len(matched) < 2:
        return
    titles = [f"{_title(device)} of {device.vendor}" for device in matched]
    more = f" and {len(titles) - 4} more" if len(titles) > 4 else ""
    alike = match.vendor is not None or len({device.vendor for device in matched}) == 1
    raise ConfigError(
        f"{entry.at('match')}: index {match.index} is that of {', '.join(titles[:4])}{more}",
        cure="name one by uuid or bus" if alike else "add the vendor",
    )


def _matches_nothing(entry: Entry, match: Match, devices: tuple[Device, ...]) -> ConfigError:
    asked = ", ".join(
        f"{key} {value}"
        for key in ("vendor", "model", "uuid", "bus", "index", "numa")
        if (value := getattr(match, key)) is not None
    )
    titles = [_title(device) for device in devices]
    listed = ", ".join(titles[:8]) + (f" and {len(titles) - 8} more" if len(titles) > 8 else "")
    return ConfigError(
        f"{entry.at('match')}: {asked} matches no device of this node",
        cure=f"devices here are {listed or 'none'}",
    )


def _title(device: Device) -> str:
    return f"{device.id} ({device.model})"


# --- what of each ------------------------------------------------------------------------------


def _device_layout(entry: Entry, device: Device) -> DeviceLayout:
    modes: dict[ModeKind, str] = {}
    partitions: tuple[PartitionSpec, ...] | None = ()
    if entry.mig is not None:
        modes, partitions = _mig(entry, device)
    elif entry.compute is not None or entry.memory_mode is not None:
        modes = _amd(entry, device)
    elif entry.cores is not None or entry.core_memory is not None:
        partitions = _cores(entry, device)
    elif entry.shared is not None:
        modes, partitions = _shared(entry, device)
    return DeviceLayout(device=device.id, modes=modes, partitions=partitions, source=entry.source)


def _refuse_key(entry: Entry, device: Device, key: str, cure: str) -> ConfigError:
    return ConfigError(
        f"{entry.at(key)}: '{key}' does not apply to {_title(device)}, "
        f"which is cut by {_WAY_WORDS[device.scheme]}",
        cure=cure,
    )


_WAY_WORDS: Final = {
    Scheme.INSTANCES: "mig",
    Scheme.MODES: "compute and memory modes",
    Scheme.CORES: "cores",
    Scheme.WHOLE: "nothing",
}
_OWN_KEY: Final = {
    Scheme.INSTANCES: "use mig, or narrow the match",
    Scheme.MODES: "use compute, or narrow the match",
    Scheme.CORES: "use cores, or narrow the match",
    Scheme.WHOLE: "remove it from the layout, or use shared",
}


def _mig(entry: Entry, device: Device) -> tuple[dict[ModeKind, str], tuple[PartitionSpec, ...]]:
    if device.scheme is not Scheme.INSTANCES:
        key = "mig" if isinstance(entry.select, Match) else "mig-enabled"
        raise _refuse_key(entry, device, key, _OWN_KEY[device.scheme])
    switchable = any(mode.kind is ModeKind.MIG for mode in device.modes)
    if entry.mig == "none" or entry.mig is None:
        return ({ModeKind.MIG: "off"} if switchable else {}), ()
    specs = [
        _mig_spec(entry, device, text, f"mig[{number}]") for number, text in enumerate(entry.mig)
    ]
    _refuse_overlap(entry, device, specs, "mig")
    _refuse_overfull(entry, device, specs, "mig")
    return ({ModeKind.MIG: "on"} if switchable else {}), tuple(specs)


def _mig_spec(entry: Entry, device: Device, text: str, path: str) -> PartitionSpec:
    match = _MIG_ENTRY.fullmatch(text)
    if match is None:
        raise ConfigError(
            f"{entry.at(path)}: {path}: '{text[:40]}' is no profile",
            cure="write profile or profile@start, like 3g.40gb@4",
        )
    profile = _mig_profile(entry, device, match["profile"], path)
    if match["start"] is None:
        return PartitionSpec(device=device.id, profile=profile.name, size=profile.size)
    start = int(match["start"])
    if start not in profile.starts:
        raise ConfigError(
            f"{entry.at(path)}: {path}: {profile.name} cannot start at {start} on {_title(device)}",
            cure=f"its starts are {', '.join(map(str, profile.starts))}",
        )
    place = Placement(start=start, size=profile.size)
    return PartitionSpec(device=device.id, profile=profile.name, size=profile.size, placement=place)


def _mig_profile(entry: Entry, device: Device, name: str, path: str) -> Profile:
    if not device.profiles:
        raise ConfigError(
            f"{entry.at(path)}: {path}: {_title(device)} lists no profiles now",
            cure="see `alloy-agent doctor`; some drivers list them only with MIG on",
        )
    for profile in device.profiles:
        if profile.name.lower() == name.lower():
            return profile
    known = ", ".join(profile.name for profile in device.profiles)
    raise ConfigError(
        f"{entry.at(path)}: {path}: {_title(device)} has no profile '{name[:40]}'",
        cure=f"its profiles are {known}",
    )


def _refuse_overlap(entry: Entry, device: Device, specs: list[PartitionSpec], key: str) -> None:
    """Refuse two pinned pieces on one slice, naming both."""
    pinned = [(n, spec) for n, spec in enumerate(specs) if spec.placement is not None]
    for later, (n, spec) in enumerate(pinned):
        for m, other in pinned[:later]:
            here, there = spec.placement, other.placement
            if here is None or there is None or not here.overlaps(there):
                continue
            line = entry.lines.get(f"{key}[{m}]", entry.source.line)
            raise ConfigError(
                f"{entry.at(f'{key}[{n}]')}: {key}[{n}]: {spec.profile}@{here.start} overlaps "
                f"{other.profile}@{there.start} (line {line}) on {_title(device)}",
                cure="move one of the two, or leave its start out",
            )


def _refuse_overfull(entry: Entry, device: Device, specs: list[PartitionSpec], key: str) -> None:
    """Refuse more than the device holds, naming the first piece without room and the others."""
    limits = {profile.name: profile.max_count for profile in device.profiles}
    counts: dict[str, int] = {}
    for number, spec in enumerate(specs):
        counts[spec.profile] = counts.get(spec.profile, 0) + 1
        if counts[spec.profile] > limits.get(spec.profile, PIECES_UNLIMITED):
            raise ConfigError(
                f"{entry.at(f'{key}[{number}]')}: {key}[{number}]: {counts[spec.profile]} x "
                f"{spec.profile} on {_title(device)}, which has at most {limits[spec.profile]}",
                cure=f"keep {limits[spec.profile]}",
            )
    if fits(device, tuple(specs)):
        return
    count = next(n for n in range(1, len(specs) + 1) if not fits(device, tuple(specs[:n])))
    last, before = specs[count - 1], ", ".join(_written(spec) for spec in specs[: count - 1])
    first_line = entry.lines.get(f"{key}[0]", entry.source.line)
    beside = f" beside {before} (from line {first_line})" if before else ""
    raise ConfigError(
        f"{entry.at(f'{key}[{count - 1}]')}: {key}[{count - 1}]: {_written(last)} has no room on "
        f"{_title(device)}{beside}",
        cure=f"take one away; the device has {device.slices} {device.slice_name}s",
    )


PIECES_UNLIMITED: Final = 1 << 30


def _written(spec: PartitionSpec) -> str:
    return f"{spec.profile}@{spec.placement.start}" if spec.placement else spec.profile


def _amd(entry: Entry, device: Device) -> dict[ModeKind, str]:
    keys = {"compute": ModeKind.COMPUTE, "memory": ModeKind.MEMORY}
    asked = {"compute": entry.compute, "memory": entry.memory_mode}
    modes: dict[ModeKind, str] = {}
    for key, kind in keys.items():
        value = asked[key]
        if value is None:
            continue
        mode = next((mode for mode in device.modes if mode.kind is kind), None)
        if device.scheme is not Scheme.MODES or mode is None:
            raise _refuse_key(entry, device, key, _OWN_KEY[device.scheme])
        known = {name.upper(): name for name in mode.available}
        if known and value.upper() not in known:
            raise ConfigError(
                f"{entry.at(key)}: {_title(device)} has no {key} mode '{value[:40]}'",
                cure=f"its modes are {', '.join(mode.available)}",
            )
        modes[kind] = known.get(value.upper(), value)
    _refuse_incompatible(entry, device, modes)
    return modes


def _refuse_incompatible(entry: Entry, device: Device, modes: dict[ModeKind, str]) -> None:
    now = {mode.kind: mode.current for mode in device.modes}
    after = {**now, **modes}
    compute, memory = after.get(ModeKind.COMPUTE), after.get(ModeKind.MEMORY)
    if compute is None or memory is None or compatible(compute, memory):
        return
    key = "memory" if ModeKind.MEMORY in modes else "compute"
    stays = "" if len(modes) == 2 else f" ({'compute' if key == 'memory' else 'memory'} stays)"
    line = entry.lines.get("compute", entry.source.line)
    where = f" (line {line})" if ModeKind.COMPUTE in modes and key == "memory" else ""
    raise ConfigError(
        f"{entry.at(key)}: {compute}{where} does not work with {memory}{stays} on {_title(device)}",
        cure="name both modes, for example CPX with NPS4, or SPX with NPS1",
    )


def _cores(entry: Entry, device: Device) -> tuple[PartitionSpec, ...]:
    if entry.cores is None:
        raise ConfigError(
            f"{entry.at('memory')}: a list of memory sizes stands without cores",
            cure="add cores: with as many items",
        )
    if device.scheme is not Scheme.CORES:
        raise _refuse_key(entry, device, "cores", _OWN_KEY[device.scheme])
    _refuse_sizes(entry, device, entry.cores)
    memory = _core_memory(entry, device, entry.cores)
    specs = [
        PartitionSpec(device=device.id, profile=core_profile(size), size=size, memory_bytes=cap)
        for size, cap in zip(entry.cores, memory, strict=True)
    ]
    if not fits(device, tuple(specs)):
        _refuse_overfull(entry, device, specs, "cores")
    return tuple(specs)


def _refuse_sizes(entry: Entry, device: Device, cores: tuple[int, ...]) -> None:
    total = 0
    for number, size in enumerate(cores):
        path = f"cores[{number}]"
        if device.legal_sizes and size not in device.legal_sizes:
            raise ConfigError(
                f"{entry.at(path)}: {path}: {_title(device)} has no runs of {size} "
                f"{device.slice_name}s",
                cure=f"legal are {', '.join(map(str, device.legal_sizes))}",
            )
        total += size
        if total > device.slices:
            raise _too_many_cores(entry, device, cores[: number + 1])


def _too_many_cores(entry: Entry, device: Device, cores: tuple[int, ...]) -> ConfigError:
    """Return the refusal of the last of these runs, which does not fit behind the others."""
    path, total = f"cores[{len(cores) - 1}]", sum(cores)
    asked = f"{total} {device.slice_name}{'' if total == 1 else 's'}"
    if len(cores) > 1:
        first = entry.lines.get("cores[0]", entry.source.line)
        before = ", ".join(map(str, cores[:-1]))
        asked = f"{cores[-1]} behind {before} (from line {first}) makes {asked}"
    reserved = len(device.reserved_units)
    kept = f" ({reserved} more stay with the system)" if reserved else ""
    return ConfigError(
        f"{entry.at(path)}: {path}: {asked}, {_title(device)} has {device.slices} to lend{kept}",
        cure=f"take away {total - device.slices}",
    )


def _core_memory(entry: Entry, device: Device, cores: tuple[int, ...]) -> tuple[int | None, ...]:
    if entry.core_memory is None:
        return (None,) * len(cores)
    if device.vendor is not Vendor.CPU:
        raise ConfigError(
            f"{entry.at('memory')}: the memory of {_title(device)} goes with its cores",
            cure="remove memory",
        )
    if len(entry.core_memory) != len(cores):
        raise ConfigError(
            f"{entry.at('memory')}: {len(entry.core_memory)} memory sizes for {len(cores)} runs of "
            f"cores (line {entry.lines.get('cores', entry.source.line)})",
            cure="give one size for each run",
        )
    sizes: list[int | None] = []
    total = 0
    for number, written in enumerate(entry.core_memory):
        size = _one_size(entry, written, f"memory[{number}]")
        total += size
        limit = device.memory_bytes
        if limit is not None and total > limit:
            first = entry.lines.get("memory[0]", entry.source.line)
            before = f" behind {format_bytes(total - size)} (from line {first})" if number else ""
            raise ConfigError(
                f"{entry.at(f'memory[{number}]')}: memory[{number}]: {format_bytes(size)}{before} "
                f"is more than the {format_bytes(limit >> 20 << 20)} of {_title(device)}",
                cure=f"take away {format_bytes(-(-(total - limit) >> 20) << 20)}",
            )
        sizes.append(size)
    return tuple(sizes)


MEMORY_MIN_BYTES: Final = 4 << 20  # below this not even a shell starts in a cgroup


def _one_size(entry: Entry, written: int | str, path: str) -> int:
    try:
        size = size_bytes(written) if isinstance(written, str) else written
    except ValueError as exc:
        raise ConfigError(f"{entry.at(path)}: {path}: {exc}") from exc
    if size < MEMORY_MIN_BYTES:
        raise ConfigError(
            f"{entry.at(path)}: {path}: {size} bytes are too few for any program",
            cure=f"give at least {format_bytes(MEMORY_MIN_BYTES)}",
        )
    return size


def _shared(entry: Entry, device: Device) -> tuple[dict[ModeKind, str], tuple[PartitionSpec, ...]]:
    specs = shares_of(entry, device)
    switchable = any(mode.kind is ModeKind.MIG for mode in device.modes)
    return ({ModeKind.MIG: "off"} if switchable else {}), specs
