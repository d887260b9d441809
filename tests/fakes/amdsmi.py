"""The vendor's library below its own, unmodified Python wrapper: a stand-in for the loaded .so.

`FakeSmi` is what `ctypes.CDLL` would return. Calls take the wrapper's ctypes values and answer from
a generated tree's machine. Every other symbol exists and answers NOT_SUPPORTED.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import sys
from collections.abc import Iterator
from typing import Any

from alloy_agent.backends.amd.library import Library, Tried
from alloy_agent.silicon.state import DeviceState
from tests.fakes.amd_tree import Tree

SUCCESS, NOT_SUPPORTED, NOT_INIT, MORE_DATA, NO_DATA = 0, 2, 32, 39, 40
NUMBERS = {"vmfault": 1, "thermal_throttle": 2, "gpu_pre_reset": 3, "gpu_post_reset": 4}
NUMBERS["ring_hang"] = 5


class Function:
    """One symbol; the wrapper sets its types and calls it."""

    def __init__(self, name: str, call: Any) -> None:
        self.name, self._call = name, call
        self.restype: Any = None
        self.argtypes: Any = None

    def __call__(self, *arguments: Any) -> int:
        return int(self._call(*arguments))


class FakeSmi:
    """A loaded library over a tree. `lacks` are symbols that it has not."""

    def __init__(self, tree: Tree, lacks: frozenset[str] = frozenset()) -> None:
        self._tree, self._lacks = tree, lacks
        self.running = False
        self.readers: set[int] = set()
        self.masks: dict[int, int] = {}
        self.queue: list[tuple[int, int, bytes]] = []
        self.garbage_addresses = False
        self.violations: dict[str, frozenset[str]] = {}
        self.records: dict[str, list[tuple[bytes, int]]] = {}  # bytes of one, severity
        self._functions: dict[str, Function] = {}

    def __getattr__(self, name: str) -> Function:
        if name in self._lacks or not name.startswith("amdsmi_"):
            raise AttributeError(f"undefined symbol: {name}")
        if name not in self._functions:
            call = getattr(type(self), f"_{name.removeprefix('amdsmi_')}", None)
            bound = (lambda *_: NOT_SUPPORTED) if call is None else call.__get__(self)
            self._functions[name] = Function(name, bound)
        return self._functions[name]

    def push(self, device: str, partition: int, name: str, message: bytes = b"") -> None:
        """Let a partition report an event."""
        index = [self._tree.id_of(state) for state in self._devices()].index(device)
        self.queue.append((handle_of(index, partition), NUMBERS[name], message))

    # --- the calls ---

    def _init(self, _flags: Any) -> int:
        self.running = True
        return SUCCESS

    def _shut_down(self) -> int:
        self.running = False
        return SUCCESS

    def _get_socket_handles(self, count: Any, handles: Any) -> int:
        if not self.running:
            return NOT_INIT
        return fill(count, handles, [1000 + index for index in range(len(self._devices()))])

    def _get_processor_handles(self, socket: Any, count: Any, handles: Any) -> int:
        index = int(socket.value) - 1000
        live = self._tree.machine.amd_partitions(self._devices()[index])
        return fill(count, handles, [handle_of(index, piece.number) for piece in live])

    def _get_gpu_device_bdf(self, handle: Any, bdf: Any) -> int:
        index, partition = divmod(int(handle.value) - 2000, 16)
        _, bus, rest = self._devices()[index].bus.split(":")
        value = self._tree.odd.domain << 16 | int(bus, 16) << 8
        value |= int(rest.partition(".")[0], 16) << 3 | partition
        if self.garbage_addresses:
            value = 0x6461_6572_5220_20A6
        ctypes.memmove(ctypes.byref(bdf._obj), value.to_bytes(8, "little"), 8)
        return SUCCESS

    def _init_gpu_event_notification(self, handle: Any) -> int:
        self.readers.add(int(handle.value))
        self._tree.machine.open_handle(self._of(handle).id)
        return SUCCESS

    def _set_gpu_event_notification_mask(self, handle: Any, mask: Any) -> int:
        self.masks[int(handle.value)] = int(mask.value)
        return SUCCESS

    def _stop_gpu_event_notification(self, handle: Any) -> int:
        self.readers.discard(int(handle.value))
        self._tree.machine.close_handle(self._of(handle).id)
        return SUCCESS

    def _get_gpu_event_notification(self, _wait_ms: Any, count: Any, data: Any) -> int:
        room, told = int(count._obj.value), 0
        while self.queue and told < room:
            handle, event, message = self.queue.pop(0)
            if handle in self.readers and self.masks.get(handle, 0) >> (event - 1) & 1:
                data[told].processor_handle = handle
                data[told].event = event
                data[told].message = message
                told += 1
        count._obj.value = told
        return SUCCESS if told else NO_DATA

    def _get_violation_status(self, handle: Any, status: Any) -> int:
        now = self.violations.get(self._tree.id_of(self._of(handle)))
        if now is None:
            return NOT_SUPPORTED
        ctypes.memset(ctypes.byref(status._obj), 0xFF, ctypes.sizeof(status._obj))
        for name in ("prochot_thrm", "ppt_pwr", "socket_thrm", "vr_thrm", "hbm_thrm"):
            setattr(status._obj, f"active_{name}", int(name in now))
        return SUCCESS

    def _get_gpu_cper_entries(self, handle: Any, *arguments: Any) -> int:
        severities, buffer, size, _, count, cursor = arguments
        records = self.records.get(self._tree.id_of(self._of(handle)), [])
        wanted = [r for r in records[cursor._obj.value :] if int(severities.value) >> r[1] & 1]
        room, told, raw = int(count._obj.value), 0, b""
        for data, _ in wanted[:room]:
            if len(raw) + len(data) > int(size._obj.value):
                break
            raw, told = raw + data, told + 1
        ctypes.memmove(buffer, raw, len(raw))
        size._obj.value, count._obj.value = len(raw), told
        cursor._obj.value += told
        if not told:
            return NO_DATA
        return SUCCESS if told == len(wanted) else MORE_DATA

    def _devices(self) -> list[DeviceState]:
        return [state for state in self._tree.machine.state.devices if not state.lost]

    def _of(self, handle: Any) -> DeviceState:
        return self._devices()[(int(handle.value) - 2000) // 16]


def handle_of(index: int, partition: int) -> int:
    """Return the handle of a partition; it is void after every switch."""
    return 2000 + index * 16 + partition


def fill(count: Any, handles: Any, values: list[int]) -> int:
    """Answer the two-call pattern: how many, then which."""
    if handles is not None:
        for number, value in enumerate(values[: int(count._obj.value)]):
            handles[number] = value
    count._obj.value = len(values)
    return SUCCESS


@contextlib.contextmanager
def loaded(smi: FakeSmi | None) -> Iterator[None]:
    """Let the wrapper find this library when it is imported, or none; forget it afterwards."""
    before = ctypes.CDLL
    forget()

    def open_library(name: object, *_arguments: object, **_options: object) -> FakeSmi:
        if smi is None:
            raise OSError(f"{name}: cannot open shared object file")
        return smi

    ctypes.CDLL = open_library  # type: ignore[assignment,misc]
    try:
        yield
    finally:
        ctypes.CDLL = before  # type: ignore[misc]
        forget()


def forget() -> None:
    """Drop the wrapper from the modules, since it binds its library when it is imported."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "amdsmi"]:
        del sys.modules[name]
    importlib.invalidate_caches()


def library_over(smi: FakeSmi) -> Library:
    """Return a library whose trial went well and whose wrapper runs over `smi`."""
    from alloy_agent.backends.amd.library import load_wrapper

    def loader(path: str) -> Any:
        with loaded(smi):
            return load_wrapper(path)

    return Library(lambda: Tried(path="/opt/rocm/lib/libamd_smi.so", version=(26, 0, 0)), loader)
