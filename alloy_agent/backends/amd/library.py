"""The vendor's `amdsmi`, where it can be trusted: right version, tried in a child first.

The wrapper's structures are frozen at one version of the library and nothing checks that the
library agrees: 25.x returns garbage with SUCCESS, 26.2 and later write past the wrapper's buffers.
So the version decides before anything else is called. Without the library the agent runs on; the
reason stands in `note` and in `doctor`.

Source: `amdsmi` 7.0.2, `amdsmi_wrapper.py`; sizes of structures in `amdsmi.h` 26.0 to 26.5.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import io
import json
import os
import subprocess
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

from alloy_agent.backends.amd.cper import Record, parse
from alloy_agent.host import interpreter
from alloy_agent.model import Value

VERSION_MAJOR: Final = 26
VERSION_MINOR_MAX: Final = 1  # 26.2 has other structures than the wrapper
OFF, AUTO = "off", "auto"
SIGNALS: Final = {-6: "SIGABRT", -7: "SIGBUS", -9: "SIGKILL", -11: "SIGSEGV"}

# amdsmi_evt_notification_type_t. The wrapper's Python enumeration lacks 5 and mixes up 7 and 8.
EVENTS: Final = {
    1: "vmfault",
    2: "thermal_throttle",
    3: "gpu_pre_reset",
    4: "gpu_post_reset",
    5: "ring_hang",
}
EVENT_MASK: Final = sum(1 << (number - 1) for number in EVENTS)
EVENTS_MAX: Final = 16
MORE_DATA: Final = 39
ABSENT: Final = 0xFF  # of a byte
# `active_*` of amdsmi_violation_status_t, where 1 is "now".
VIOLATIONS: Final = {
    "prochot_thrm": "processor hot",
    "ppt_pwr": "package power limit",
    "socket_thrm": "socket temperature",
    "vr_thrm": "voltage regulator temperature",
    "hbm_thrm": "memory temperature",
    "gfx_clk_below_host_limit": "clock below the host's limit",
}
CPER_BYTES: Final = 1 << 18
CPER_RECORDS: Final = 20
CPER_ROUNDS: Final = 8  # for what came since the last look
CPER_SEVERITIES: Final = 0b111  # all of amdsmi_cper_sev_t


class Wrapper(Protocol):
    """The part of `amdsmi.amdsmi_wrapper` that is used, unmodified. Calls return a status."""

    amdsmi_evt_notification_data_t: Any
    amdsmi_processor_handle: Any
    amdsmi_socket_handle: Any
    amdsmi_bdf_t: Any
    amdsmi_violation_status_t: Any
    amdsmi_cper_hdr_t: Any

    def amdsmi_init(self, flags: Any) -> int:
        """Start the library."""
        ...

    def amdsmi_shut_down(self) -> int:
        """End it."""
        ...

    def amdsmi_get_socket_handles(self, count: Any, handles: Any) -> int:
        """Return the physical GPUs."""
        ...

    def amdsmi_get_processor_handles(self, socket: Any, count: Any, handles: Any) -> int:
        """Return a GPU's partitions."""
        ...

    def amdsmi_get_gpu_device_bdf(self, handle: Any, bdf: Any) -> int:
        """Return a partition's address."""
        ...

    def amdsmi_init_gpu_event_notification(self, handle: Any) -> int:
        """Open an event reader."""
        ...

    def amdsmi_set_gpu_event_notification_mask(self, handle: Any, mask: Any) -> int:
        """Choose its events."""
        ...

    def amdsmi_get_gpu_event_notification(self, wait_ms: Any, count: Any, data: Any) -> int:
        """Wait for events of all readers."""
        ...

    def amdsmi_stop_gpu_event_notification(self, handle: Any) -> int:
        """Close an event reader."""
        ...

    def amdsmi_get_violation_status(self, handle: Any, status: Any) -> int:
        """Return what holds a device back; sleeps for 100 ms."""
        ...

    def amdsmi_get_gpu_cper_entries(  # noqa: PLR0913, PLR0917 - the library's own
        self,
        handle: Any,
        severities: Any,
        buffer: Any,
        size: Any,
        headers: Any,
        count: Any,
        cursor: Any,
    ) -> int:
        """Return error records from a cursor on."""
        ...


class LibraryEvent(Value, frozen=True, kw_only=True):
    """One event of the library, for one partition of one device."""

    bus: str  # of the device
    function: int  # PCI function, which is the partition's number
    name: str
    message: str


class Tried(Value, frozen=True, kw_only=True):
    """What a child process found out."""

    path: str = ""
    version: tuple[int, int, int] | None = None
    trouble: str = ""


def candidates(policy: str, environ: dict[str, str] | None = None) -> list[str]:
    """Return the paths to try, in the wrapper's own order."""
    env = dict(os.environ) if environ is None else environ
    if policy not in {AUTO, OFF}:
        return [policy]
    home = env.get("ROCM_HOME", env.get("ROCM_PATH"))
    first = [f"{home}/lib/libamd_smi.so"] if home else []
    return [*first, "libamd_smi.so", f"{env.get('ROCM_PATH', '/opt/rocm')}/lib/libamd_smi.so"]


def attempt(paths: Sequence[str], deadline_s: float) -> Tried:
    """Return what a child found when it opened and started the library; it is killed if stuck."""
    command = interpreter.isolated(str(Path(__file__).with_name("probe.py").absolute()), *paths)
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            timeout=deadline_s,
            stdin=subprocess.DEVNULL,
            cwd=interpreter.FOLDER,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Tried(trouble=f"amdsmi_init did not return within {deadline_s:g} s")
    except OSError as error:
        return Tried(trouble=f"no child process to try it in: {error.strerror}")
    if done.returncode:
        how = SIGNALS.get(done.returncode, f"exit status {done.returncode}")
        return Tried(trouble=f"the library ends its process ({how}) when it is started")
    try:
        found = json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        return Tried(trouble="the library wrote over the answer of the child")
    return _judged(found)


def _judged(found: dict[str, Any]) -> Tried:
    errors = "; ".join(str(error) for error in found.get("errors", ()))
    path = str(found.get("path") or "")
    if not path:
        return Tried(trouble=f"libamd_smi.so is not there ({errors})" if errors else "not there")
    if not found.get("version"):
        return Tried(path=path, trouble=f"it lacks a function: {errors}")
    major, minor, release = (int(number) for number in found["version"])
    version = (major, minor, release)
    if major != VERSION_MAJOR or minor > VERSION_MINOR_MAX:
        trouble = (
            f"version {major}.{minor} has other structures than the wrapper, which knows "
            f"{VERSION_MAJOR}.0 to {VERSION_MAJOR}.{VERSION_MINOR_MAX}"
        )
        return Tried(path=path, version=version, trouble=trouble)
    status = int(found.get("status", 0))
    if status:
        return Tried(path=path, version=version, trouble=f"amdsmi_init fails with status {status}")
    return Tried(path=path, version=version)


def load_wrapper(path: str) -> Wrapper:
    """Return the vendor's wrapper, loaded over the library at a path. Its prints go nowhere.

    Raises:
        ImportError, OSError, KeyError, AttributeError: As the wrapper does when something lacks.
    """
    home = str(Path(path).parent.parent)
    before = os.environ.get("ROCM_HOME")
    if path.endswith("/lib/libamd_smi.so"):
        os.environ["ROCM_HOME"] = home
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            from amdsmi import amdsmi_wrapper
    finally:
        if before is None:
            os.environ.pop("ROCM_HOME", None)
        else:
            os.environ["ROCM_HOME"] = before
    wrapper: Wrapper = amdsmi_wrapper
    return wrapper


class Library:
    """The library, or the reason why there is none. Nothing is loaded before `open`."""

    def __init__(
        self,
        trial: Callable[[], Tried],
        loader: Callable[[str], Wrapper] = load_wrapper,
        note: str = "",
    ) -> None:
        self._trial, self._loader = trial, loader
        self._lock = threading.Lock()
        self._wrapper: Wrapper | None = None
        self._tried: Tried | None = None
        self._buses: dict[int, tuple[str, int]] = {}
        self._readers: list[Any] = []
        self._cursors: dict[str, int] = {}
        self.note = note

    @classmethod
    def find(cls, policy: str, deadline_s: float) -> Library:
        """Return the library that a policy asks for: "auto", "off" or a path."""
        if policy == OFF:
            return cls(lambda: Tried(trouble="switched off in the settings"))
        return cls(lambda: attempt(candidates(policy), deadline_s))

    @property
    def usable(self) -> bool:
        """Whether it was opened and is the right one."""
        return self._wrapper is not None

    @property
    def version(self) -> str:
        """Its version; empty: it was not looked at, or there is none."""
        if self._tried is None or self._tried.version is None:
            return ""
        return ".".join(str(number) for number in self._tried.version)

    def tried(self) -> Tried:
        """Return what the trial in a child showed; made once, and may take its deadline."""
        with self._lock:
            if self._tried is None:
                self._tried = self._trial()
                self._say(self._tried.trouble)
            return self._tried

    def open(self) -> bool:
        """Load and start it, if the trial went well; return whether it can be used."""
        tried = self.tried()
        with self._lock:
            if self._wrapper is not None or tried.trouble or self.note:
                return self._wrapper is not None
            try:
                wrapper = self._loader(tried.path)
                status = wrapper.amdsmi_init(2)
            except (ImportError, OSError, KeyError, AttributeError) as error:
                self._say(f"{type(error).__name__}: {error}")
                return False
            if status:
                self._say(f"amdsmi_init fails with status {status}")
                return False
            self._wrapper = wrapper
            return True

    def _say(self, trouble: str) -> None:
        if trouble:
            self.note = f"amdsmi is not used: {' '.join(trouble.split())}"

    # --- events ---

    @property
    def readers(self) -> int:
        """How many event readers hold `/dev/kfd`."""
        return len(self._readers)

    def start_events(self, buses: frozenset[str]) -> None:
        """Open an event reader on each processor of these devices; cross-checked by address.

        A library whose libdrm failed returns addresses that are no device's: those are left alone.
        """
        wrapper = self._wrapper
        if wrapper is None or self._readers:
            return
        for handle in _processors(wrapper):
            bdf = wrapper.amdsmi_bdf_t()
            if wrapper.amdsmi_get_gpu_device_bdf(handle, ctypes.byref(bdf)):
                continue
            bus, function = _address(bdf)
            if bus not in buses or wrapper.amdsmi_init_gpu_event_notification(handle):
                continue
            mask = ctypes.c_uint64(EVENT_MASK)
            wrapper.amdsmi_set_gpu_event_notification_mask(handle, mask)
            self._readers.append(handle)
            self._buses[int(handle.value or 0)] = (bus, function)

    def stop_events(self) -> None:
        """Close every event reader, and with them `/dev/kfd`."""
        wrapper = self._wrapper
        if wrapper is not None:
            for handle in self._readers:
                wrapper.amdsmi_stop_gpu_event_notification(handle)
        self._readers.clear()
        self._buses.clear()

    def events(self, timeout_s: float) -> list[LibraryEvent]:
        """Return what the readers got, waiting up to `timeout_s`; messages may hold any byte."""
        wrapper = self._wrapper
        if wrapper is None or not self._readers:
            return []
        data = (wrapper.amdsmi_evt_notification_data_t * EVENTS_MAX)()
        count = ctypes.c_uint32(EVENTS_MAX)
        wait_ms = ctypes.c_int(int(timeout_s * 1000))
        if wrapper.amdsmi_get_gpu_event_notification(wait_ms, ctypes.byref(count), data):
            return []
        found = []
        for entry in data[: min(count.value, EVENTS_MAX)]:
            place = self._buses.get(int(entry.processor_handle or 0))
            name = EVENTS.get(int(entry.event))
            if place is not None and name is not None:
                text = bytes(entry.message).decode("utf-8", "backslashreplace")
                found.append(LibraryEvent(bus=place[0], function=place[1], name=name, message=text))
        return found

    # --- what only the library tells ---

    def violations(self, bus: str) -> tuple[str, ...] | None:
        """Return what holds a device's clocks back now; None: it cannot be told.

        Takes the 100 ms that the library sleeps; never for the sampler.
        """
        wrapper, handle = self._wrapper, self._primary(bus)
        if wrapper is None or handle is None:
            return None
        status = wrapper.amdsmi_violation_status_t()
        if wrapper.amdsmi_get_violation_status(handle, ctypes.byref(status)):
            return None
        told = {name: int(getattr(status, f"active_{name}")) for name in VIOLATIONS}
        if all(value == ABSENT for value in told.values()):
            return None
        return tuple(VIOLATIONS[name] for name, value in told.items() if value == 1)

    def records(self, bus: str) -> tuple[Record, ...]:
        """Return the device's error records since the last call; those of before are left out."""
        wrapper, handle = self._wrapper, self._primary(bus)
        if wrapper is None or handle is None:
            return ()
        first = bus not in self._cursors
        found: list[Record] = []
        for _ in range(CPER_ROUNDS):
            status, more = self._read_records(wrapper, handle, bus)
            found += more
            if status != MORE_DATA or not more:
                break
        self._cursors.setdefault(bus, 0)  # none so far: whatever comes is new
        return () if first else tuple(found)

    def _read_records(self, wrapper: Wrapper, handle: Any, bus: str) -> tuple[int, list[Record]]:
        buffer = ctypes.create_string_buffer(CPER_BYTES)
        size, count = ctypes.c_uint64(CPER_BYTES), ctypes.c_uint64(CPER_RECORDS)
        cursor = ctypes.c_uint64(self._cursors.get(bus, 0))
        kind = ctypes.POINTER(wrapper.amdsmi_cper_hdr_t)
        headers = ctypes.cast((kind * CPER_RECORDS)(), ctypes.POINTER(kind))
        status = wrapper.amdsmi_get_gpu_cper_entries(
            handle,
            ctypes.c_uint32(CPER_SEVERITIES),
            buffer,
            ctypes.byref(size),
            headers,
            ctypes.byref(count),
            ctypes.byref(cursor),
        )
        if status not in {0, MORE_DATA}:
            return status, []
        self._cursors[bus] = int(cursor.value)
        used = min(int(size.value), CPER_BYTES)
        return status, list(parse(buffer.raw[:used], min(int(count.value), CPER_RECORDS)))

    def _primary(self, bus: str) -> Any:
        """Return the handle of a device's first partition; None: the library has no such device."""
        wrapper = self._wrapper
        if wrapper is None:
            return None
        for handle in _processors(wrapper):
            bdf = wrapper.amdsmi_bdf_t()
            told = not wrapper.amdsmi_get_gpu_device_bdf(handle, ctypes.byref(bdf))
            if told and _address(bdf) == (bus, 0):
                return handle
        return None

    def close(self) -> None:
        """Stop the readers and the library."""
        with self._lock:
            self.stop_events()
            if self._wrapper is not None:
                self._wrapper.amdsmi_shut_down()
                self._wrapper = None


def _processors(wrapper: Wrapper) -> list[Any]:
    sockets = _handles(wrapper.amdsmi_socket_handle, wrapper.amdsmi_get_socket_handles)
    found: list[Any] = []
    for socket in sockets:
        ask = functools.partial(wrapper.amdsmi_get_processor_handles, socket)
        found += _handles(wrapper.amdsmi_processor_handle, ask)
    return found


def _handles(kind: Any, ask: Callable[[Any, Any], int]) -> list[Any]:
    """Return handles of the two-call pattern: how many, then which."""
    count = ctypes.c_uint32(0)
    if ask(ctypes.byref(count), None) or not count.value:
        return []
    room = (kind * count.value)()
    if ask(ctypes.byref(count), room):
        return []
    return [ctypes.c_void_p(room[number]) for number in range(min(count.value, len(room)))]


def _address(bdf: Any) -> tuple[str, int]:
    raw = int.from_bytes(bytes(bdf)[:8], "little")
    function, device, bus, domain = raw & 7, raw >> 3 & 0x1F, raw >> 8 & 0xFF, raw >> 16
    return f"{domain & 0xFFFFFFFF:04x}:{bus:02x}:{device:02x}.0", function
