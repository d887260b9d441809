"""Counts calls of a library's symbol by the processes of a cgroup, in the kernel.

A uprobe event per CPU, restricted to a v2 cgroup: nothing inside of the container takes part, and
nothing inside can see or stop it. Only the descriptors' end removes the trap, and that waits for a
grace period, so attaching and detaching belong off the hot threads.

Source: perf_event_open(2); Documentation/trace/uprobetracer.rst.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from alloy_agent.errors import BackendError, NotPermittedError, UnsupportedError

SYSCALL: Final = {"x86_64": 298, "aarch64": 241}
TYPE_FILE: Final = Path("/sys/bus/event_source/devices/uprobe/type")
ATTR_BYTES: Final = 128
CGROUP_FLAG: Final = 4
CLOEXEC_FLAG: Final = 8
SHT_DYNSYM: Final = 11
NAME_MOST: Final = 256  # bytes of a symbol's name that are compared


class Witness:
    """One symbol of one file, counted for one cgroup."""

    def __init__(self, library: Path, symbol: str, cgroup: Path, offset: int | None = None) -> None:
        """Attach; `offset` is where the symbol's code begins, where that is known already.

        Raises:
            UnsupportedError: The kernel has no uprobe events, or the file no such symbol.
            NotPermittedError: CAP_PERFMON is missing.
        """
        self.symbol = symbol
        self._files: list[int] = []
        # the kernel reads the path while it opens the event; it must live until then
        self._path = ctypes.create_string_buffer(os.fsencode(library))
        offset = symbol_offset(library, symbol) if offset is None else offset
        group = os.open(cgroup, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for cpu in sorted(online()):
                self._files.append(self._open(offset, group, cpu))
        except BaseException:
            self.close()
            raise
        finally:
            os.close(group)

    def count(self) -> int:
        """Return the calls since it was attached."""
        return sum(int(struct.unpack("<Q", os.read(file, 8))[0]) for file in self._files)

    def close(self) -> None:
        """Detach; takes about as long as a grace period of the kernel."""
        while self._files:
            os.close(self._files.pop())

    def _open(self, offset: int, group: int, cpu: int) -> int:
        try:
            kind = int(TYPE_FILE.read_text(encoding="ascii"))
            number = SYSCALL[platform.machine()]
        except (OSError, ValueError, KeyError) as exc:
            raise UnsupportedError(
                "the kernel has no uprobe events here",
                cure="enable CONFIG_UPROBE_EVENTS; the vendor's own counts are used meanwhile",
            ) from exc
        attr = bytearray(ATTR_BYTES)
        struct.pack_into("<IIQ", attr, 0, kind, ATTR_BYTES, 0)
        struct.pack_into("<QQ", attr, 56, ctypes.addressof(self._path), offset)
        raw = (ctypes.c_char * ATTR_BYTES).from_buffer(attr)
        call = ctypes.CDLL(None, use_errno=True).syscall
        file = int(call(number, raw, group, cpu, -1, CGROUP_FLAG | CLOEXEC_FLAG))
        if file >= 0:
            return file
        code = ctypes.get_errno()
        what = f"counting calls of {self.symbol}: {os.strerror(code)}"
        if code in {1, 13}:
            raise NotPermittedError(what, cure="grant CAP_PERFMON")
        raise UnsupportedError(what, cure="enable CONFIG_CGROUP_PERF and mount the v2 tree")


def online() -> frozenset[int]:
    """Return the CPUs that are online."""
    from alloy_agent.host.cpulist import parse_cpu_list

    text = Path("/sys/devices/system/cpu/online").read_text(encoding="ascii").strip()
    return frozenset(parse_cpu_list(text))


def symbol_offset(library: Path, symbol: str) -> int:
    """Return where in the file a dynamic symbol's code begins.

    Raises:
        UnsupportedError: The file is no 64-bit ELF, or has no such symbol.
    """
    offset = symbol_offsets(library, (symbol,)).get(symbol)
    if offset is None:
        raise UnsupportedError(f"{library} has no dynamic symbol {symbol}")
    return offset


def symbol_offsets(library: Path, symbols: Iterable[str]) -> dict[str, int]:
    """Return where in the file the code of each dynamic symbol begins that the file has.

    Raises:
        BackendError: The file cannot be read, or is no 64-bit ELF.
    """
    try:
        with library.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as data:
            return _offsets(data, {symbol.encode() for symbol in symbols})
    except (OSError, struct.error, IndexError, ValueError, OverflowError) as exc:
        raise BackendError(
            f"{library}: {exc}", cure="name the library as the tenant has it"
        ) from exc


def _offsets(data: mmap.mmap, symbols: set[bytes]) -> dict[str, int]:
    if data[:5] != b"\x7fELF\x02":
        raise ValueError("no 64-bit ELF file")
    table, size, count = (
        struct.unpack_from("<Q", data, 40)[0],
        *struct.unpack_from("<HH", data, 58),
    )
    sections = [struct.unpack_from("<IIQQQQIIQQ", data, table + n * size) for n in range(count)]
    found: dict[str, int] = {}
    for section in sections:
        if section[1] != SHT_DYNSYM:
            continue
        names = sections[section[6]][4]
        for at in range(section[4], section[4] + section[5], 24):
            name, _, _, index, value, _ = struct.unpack_from("<IBBHQQ", data, at)
            if not index:
                continue
            label = data[names + name : names + name + NAME_MOST].partition(b"\0")[0]
            if label in symbols:
                home = sections[index]
                found[label.decode()] = int(value - home[3] + home[4])
    return found
