"""The two file formats, as they are written, and one entry type that both are read into.

Native: `version: v1` and `layouts:`. The other is NVIDIA's mig-parted format, `version: v1` and
`mig-configs:`, taken as it is: device filters are PCI ids, `devices` are positions on the node,
`mig-devices` are counts by profile. Each entry keeps the lines of its parts, since every later
refusal names them.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

from msgspec import Meta, field

from alloy_agent.decoding import (
    Located,
    convert,
    located_error,
    parse_yaml,
    unknown_name,
)
from alloy_agent.errors import ConfigError
from alloy_agent.model import SourceRef, Value, Vendor

ENTRIES_MAX: Final = 4096
PIECES_MAX: Final = 1024

Count = Annotated[int, Meta(ge=0, le=PIECES_MAX)]
Index = Annotated[int, Meta(ge=0, le=65535)]
Name = Annotated[str, Meta(min_length=1, max_length=255)]
Names = Annotated[tuple[Name, ...], Meta(max_length=PIECES_MAX)]
Run = Annotated[int, Meta(ge=1, le=65536)]
Runs = Annotated[tuple[Run, ...], Meta(max_length=PIECES_MAX)]
Group = Annotated[int, Meta(ge=1, le=65536)] | Name  # a size, or "size@first"
Groups = Annotated[tuple[Group, ...], Meta(min_length=1, max_length=PIECES_MAX)]
Caps = Annotated[tuple[int | Name, ...], Meta(max_length=PIECES_MAX)]


class Match(Value, frozen=True, kw_only=True):
    """Which devices an entry is for; all that is given must hold."""

    vendor: Vendor | None = None
    model: Name | None = None
    uuid: Name | None = None
    bus: Name | None = None
    index: Index | None = None
    numa: Index | None = None


class Shared(Value, frozen=True, kw_only=True):
    """How many tenants of each sort share a device under rate control.

    The memory caps are of each share of that sort; `cu_mask` is how many CUs of every XCD each
    opportunistic share gets (AMD), production has the rest.
    """

    production: Annotated[int, Meta(ge=0, le=1)] = 1
    opportunistic: Annotated[int, Meta(ge=0, le=64)] = 1
    production_memory: int | Name | None = None
    opportunistic_memory: int | Name | None = None
    cu_mask: Annotated[int, Meta(ge=1, le=128)] | None = None


class NativeEntry(Value, frozen=True, kw_only=True):
    """One entry of a layout as written."""

    match: Match
    mig: Name | Names | None = None
    compute: Name | None = None
    memory: Name | Caps | None = None
    cores: Runs | None = None
    groups: Groups | None = None
    shared: Shared | None = None


class NativeFile(Value, frozen=True, kw_only=True):
    """The native format."""

    version: Literal["v1"]
    layouts: dict[str, Annotated[tuple[NativeEntry, ...], Meta(max_length=ENTRIES_MAX)]]


class PartedEntry(Value, frozen=True, kw_only=True, rename="kebab"):
    """One entry of a mig-parted configuration as written."""

    devices: Literal["all"] | tuple[Index, ...]
    mig_enabled: bool
    device_filter: Name | tuple[Name, ...] | None = None
    mig_devices: dict[str, Count] = field(default_factory=dict)


class PartedFile(Value, frozen=True, kw_only=True, rename="kebab"):
    """The mig-parted format."""

    version: Literal["v1"]
    mig_configs: dict[str, Annotated[tuple[PartedEntry, ...], Meta(max_length=ENTRIES_MAX)]]


class Filter(Value, frozen=True, kw_only=True):
    """The selection of a mig-parted entry: PCI ids in lower case, and positions; empty: all."""

    pci_ids: tuple[str, ...] = ()
    positions: tuple[int, ...] | None = None


class Entry(Value, frozen=True, kw_only=True):
    """One entry of either format; `lines` has the line of each part, by its written path."""

    select: Match | Filter
    source: SourceRef
    lines: dict[str, int] = field(default_factory=dict)
    mig: tuple[str, ...] | Literal["none"] | None = None
    compute: str | None = None
    memory_mode: str | None = None
    cores: tuple[int, ...] | None = None
    core_memory: tuple[int | str, ...] | None = None
    groups: tuple[int | str, ...] | None = None
    shared: Shared | None = None

    def at(self, path: str) -> str:
        """Return file and line of a part, or of the entry."""
        return f"{self.source.file}:{self.lines.get(path, self.source.line)}"


class LayoutFile(Value, frozen=True, kw_only=True):
    """A layout file of either format, typed and with lines, not yet resolved against devices."""

    file: str
    format: Literal["native", "mig-parted"]
    layouts: dict[str, tuple[Entry, ...]]
    lines: dict[str, int]


def read_layout(text: str, file: str) -> LayoutFile:
    """Return a layout file, native or mig-parted.

    Raises:
        ConfigError: "file:line: path: cause" with the cure.
    """
    tree = parse_yaml(text, file)
    keys = tree.value if isinstance(tree.value, dict) else {}
    if "layouts" in keys and "mig-configs" in keys:
        raise ConfigError(
            f"{file}:{tree.key_lines['mig-configs']}: mig-configs and layouts (line "
            f"{tree.key_lines['layouts']}) in one file",
            cure="keep one of the two formats",
        )
    if "mig-configs" in keys:
        layouts = _parted(tree)
        lines = tree.at("mig-configs").key_lines
        return LayoutFile(file=file, format="mig-parted", layouts=layouts, lines=lines)
    layouts = _native(tree)
    return LayoutFile(
        file=file, format="native", layouts=layouts, lines=tree.at("layouts").key_lines
    )


def _native(tree: Located) -> dict[str, tuple[Entry, ...]]:
    typed = convert(tree, NativeFile)
    if not typed.layouts:
        raise located_error(tree.at("layouts"), ("layouts",), "holds no layout", "add one")
    return {
        name: tuple(
            _native_entry(entry, tree.at("layouts", name, number), ("layouts", name, number))
            for number, entry in enumerate(entries)
        )
        for name, entries in typed.layouts.items()
    }


def _native_entry(entry: NativeEntry, node: Located, path: tuple[str | int, ...]) -> Entry:
    if entry.match == Match():
        cure = "name a vendor, model, uuid, bus, index or numa node"
        raise located_error(node.at("match"), (*path, "match"), "is empty", cure)
    _refuse_combination(entry, node, path)
    mig: tuple[str, ...] | Literal["none"] | None = None
    if isinstance(entry.mig, str):
        if entry.mig != "none":
            cure = f"write none, or a list: [{entry.mig}]"
            raise located_error(node.at("mig"), (*path, "mig"), f"'{entry.mig}' is no list", cure)
        mig = "none"
    else:
        mig = entry.mig
    return Entry(
        select=entry.match,
        source=SourceRef(file=node.file, line=node.line),
        lines=_lines(node),
        mig=mig,
        compute=entry.compute,
        memory_mode=entry.memory if isinstance(entry.memory, str) else None,
        cores=entry.cores,
        core_memory=None if isinstance(entry.memory, str) else entry.memory,
        groups=entry.groups,
        shared=entry.shared,
    )


# What may stand together in one entry: each row is one way of cutting a device.
_WAYS: Final = ({"mig"}, {"compute", "memory"}, {"cores", "memory"}, {"groups"}, {"shared"})


def _refuse_combination(entry: NativeEntry, node: Located, path: tuple[str | int, ...]) -> None:
    keys = ("mig", "compute", "memory", "cores", "groups", "shared")
    given = [key for key in keys if getattr(entry, key) is not None]
    if not given:
        raise located_error(
            node, path, "asks for nothing", f"add one of {', '.join(keys)}, or remove the entry"
        )
    if any(way.issuperset(given) for way in _WAYS):
        return
    first, second = next(
        (a, b) for a in given for b in given if a < b and not any({a, b} <= way for way in _WAYS)
    )
    lines = (node.key_lines.get(first, 0), node.key_lines.get(second, 0))
    at = Located(None, node.file, max(lines))
    raise located_error(
        at,
        path,
        f"'{first}' (line {lines[0]}) and '{second}' (line {lines[1]}) cannot be combined",
        "keep one of the two",
    )


def _lines(node: Located) -> dict[str, int]:
    """Return the lines of an entry's keys and of the items of its lists."""
    lines = dict(node.key_lines)
    for key, part in node.children():
        for index, item in part.children() if isinstance(part.value, list) else ():
            lines[f"{key}[{index}]"] = item.line
    return lines


def _parted(tree: Located) -> dict[str, tuple[Entry, ...]]:
    typed = convert(tree, PartedFile)
    if not typed.mig_configs:
        raise located_error(
            tree.at("mig-configs"), ("mig-configs",), "holds no configuration", "add one"
        )
    return {
        name: tuple(
            _parted_entry(
                entry, tree.at("mig-configs", name, number), ("mig-configs", name, number)
            )
            for number, entry in enumerate(entries)
        )
        for name, entries in typed.mig_configs.items()
    }


def _parted_entry(entry: PartedEntry, node: Located, path: tuple[str | int, ...]) -> Entry:
    counted = {name: count for name, count in entry.mig_devices.items() if count}
    if counted and not entry.mig_enabled:
        raise located_error(
            node.at("mig-devices"),
            (*path, "mig-devices"),
            f"asks for pieces while mig-enabled (line {node.at('mig-enabled').line}) is false",
            "set mig-enabled: true, or remove mig-devices",
        )
    if sum(counted.values()) > PIECES_MAX:
        cause = f"more than {PIECES_MAX} pieces"
        raise located_error(node.at("mig-devices"), (*path, "mig-devices"), cause, "ask for fewer")
    pieces: list[str] = []
    lines = _lines(node)
    for name, count in counted.items():
        for _ in range(count):
            lines[f"mig[{len(pieces)}]"] = node.at("mig-devices").key_lines.get(name, node.line)
            pieces.append(name)
    return Entry(
        select=Filter(
            pci_ids=_pci_ids(entry, node.at("device-filter"), (*path, "device-filter")),
            positions=None if entry.devices == "all" else entry.devices,
        ),
        source=SourceRef(file=node.file, line=node.line),
        lines=lines,
        mig=tuple(pieces) if entry.mig_enabled else "none",
    )


def _pci_ids(entry: PartedEntry, node: Located, path: tuple[str | int, ...]) -> tuple[str, ...]:
    """Return the filter's ids in lower case. Device with or without vendor (10de) behind it."""
    given = entry.device_filter
    if given is None:
        return ()
    ids = []
    for text in (given,) if isinstance(given, str) else given:
        pci_id = text.strip().lower()
        digits = pci_id.removeprefix("0x")
        if len(digits) not in (4, 8) or not set(digits) <= set("0123456789abcdef"):
            cure = 'write it like "0x20B010DE"'
            raise located_error(node, path, f"'{text[:40]}' is no PCI id", cure)
        ids.append(f"0x{digits}")
    return tuple(ids)


def pick(layout_file: LayoutFile, name: str | None) -> str:
    """Return the name of the layout to use: the given one, or the only one there is.

    Raises:
        ConfigError: No such layout, or several and none named.
    """
    names = layout_file.layouts
    if name is None:
        if len(names) == 1:
            return next(iter(names))
        listed = ", ".join(f"{n} (line {layout_file.lines.get(n, 0)})" for n in names)
        raise ConfigError(
            f"{layout_file.file}: holds {len(names)} layouts: {listed}"[:400],
            cure="choose one with --layout NAME (daemon: layout.name)",
        )
    if name not in names:
        raise ConfigError(
            f"{layout_file.file}: no layout '{name[:60]}'", cure=unknown_name(name, names)
        )
    return name
