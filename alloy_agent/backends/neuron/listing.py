"""`neuron-ls`: bus addresses, NUMA nodes and processes of each device, where the program is there.

It is run without a shell, by its absolute path, one at a time (old drivers fail two at once), with
a deadline, and not again before some seconds have passed. Its answer is optional in every field.

Source: Neuron tools documentation, neuron-ls; shapes as of SDK 2.25 to 2.32.
"""

from __future__ import annotations

import logging
import os
import re
import subprocess
import threading
import time
from collections.abc import Iterator
from typing import Any, Final

import msgspec

from alloy_agent.model import Value

_LOG = logging.getLogger(__name__)

DEADLINE_S: Final = 3.0
FRESH_S: Final = 30.0  # addresses and NUMA nodes do not change; processes are read elsewhere too
# How the tool is asked for JSON: up to SDK 2.33, and from 2.34 on (announcement of October 2026).
JSON_OPTIONS: Final = (("--json-output",), ("--output-format", "json"))
REFUSED: Final = "neuron-ls ended with"
BACK_OFF_S: Final = 60.0  # after a failure
OUTPUT_BYTES: Final = 4 << 20
_BDF: Final = re.compile(r"(?:[0-9a-f]{4,8}:)?[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")


class ListedProcess(Value, frozen=True, kw_only=True):
    """A process on a device, by the tool; it says nothing of cores."""

    pid: int
    command: str = ""
    runtime: str = ""


class ListedDevice(Value, frozen=True, kw_only=True):
    """What the tool says of one device; absent fields are None."""

    number: int
    bus: str | None = None
    numa: int | None = None
    cpu_affinity: str | None = None
    connected_to: tuple[int, ...] | None = None
    cores: int | None = None
    lnc: int | None = None
    memory_bytes: int | None = None
    core_ids: tuple[int, ...] = ()
    processes: tuple[ListedProcess, ...] = ()


class Listing(Value, frozen=True, kw_only=True):
    """One answer of the tool; `problem` says why it is none, or what in it made no sense."""

    devices: tuple[ListedDevice, ...] = ()
    problem: str = ""
    read_at_s: float = 0.0

    def of(self, number: int) -> ListedDevice | None:
        """Return what is said of one device."""
        return next((entry for entry in self.devices if entry.number == number), None)


def parse_listing(raw: bytes) -> Listing:
    """Return what `neuron-ls` printed as JSON; entries that make no sense are named.

    Tools of SDK 2.34 put the list of devices below a name, beside what concerns all of them.
    """
    try:
        told: Any = msgspec.json.decode(raw)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as exc:
        return Listing(problem=f"neuron-ls printed no JSON ({exc})")
    if isinstance(told, dict):
        lists = [part for part in told.values() if _lists_devices(part)]
        told = lists[0] if len(lists) == 1 else told
    if not isinstance(told, list):
        return Listing(problem="neuron-ls printed no list")
    found: dict[int, ListedDevice] = {}
    bad = 0
    for entry in told:
        device = _device(entry) if isinstance(entry, dict) else None
        if device is None or device.number in found:
            bad += 1
        else:
            found[device.number] = device
    problem = f"neuron-ls: {bad} entries make no sense" if bad else ""
    return Listing(devices=tuple(found.values()), problem=problem)


def _lists_devices(part: Any) -> bool:
    entries = part if isinstance(part, list) else ()
    return any(isinstance(entry, dict) and "neuron_device" in entry for entry in entries)


def _device(entry: dict[str, Any]) -> ListedDevice | None:
    number = _number(entry.get("neuron_device"))
    if number is None:
        return None
    peers = entry.get("connected_to")
    return ListedDevice(
        number=number,
        bus=_bus(entry.get("bdf")),
        numa=_number(entry.get("numa_node")),
        cpu_affinity=_text(entry.get("cpu_affinity")),
        connected_to=tuple(_numbers(peers)) if isinstance(peers, list) else None,
        cores=_number(entry.get("nc_count")),
        lnc=_number(entry.get("logical_neuroncore_config")),
        memory_bytes=_number(entry.get("memory_size")),
        core_ids=tuple(_numbers(entry.get("neuroncore_ids"))),
        processes=tuple(_processes(entry.get("neuron_processes"))),
    )


def _processes(told: Any) -> Iterator[ListedProcess]:
    for entry in told if isinstance(told, list) else ():
        pid = _number(entry.get("pid")) if isinstance(entry, dict) else None
        if pid:
            command = (_text(entry.get("command")) or "")[:256]
            runtime = (_text(entry.get("neuron_runtime_version")) or "")[:64]
            yield ListedProcess(pid=pid, command=command, runtime=runtime)


def _number(told: Any) -> int | None:
    """Return a number told as one or as text; negative ones mean none."""
    if isinstance(told, str) and told.isascii() and told.isdigit() and len(told) < 20:
        told = int(told)
    if isinstance(told, bool) or not isinstance(told, int) or not 0 <= told < 1 << 63:
        return None
    return told


def _numbers(told: Any) -> Iterator[int]:
    for entry in told if isinstance(told, list) else ():
        number = _number(entry)
        if number is not None:
            yield number


def _text(told: Any) -> str | None:
    return told if isinstance(told, str) and told.isprintable() else None


def _bus(told: Any) -> str | None:
    """Return a bus address with its domain, which some versions leave out."""
    if not isinstance(told, str) or not _BDF.fullmatch(told.lower()):
        return None
    return told.lower() if told.count(":") == 2 else f"0000:{told.lower()}"


class Lister:
    """Runs the tool when its last answer is old. Thread-safe."""

    def __init__(self, tools_dir: str, sys_root: str = "/sys") -> None:
        self._path = f"{tools_dir}/neuron-ls"
        self._sys_root = sys_root
        self._lock = threading.Lock()
        self._words: tuple[str, ...] = JSON_OPTIONS[0]
        self._last = Listing()
        self._next_s = 0.0
        self._of: tuple[int, ...] = ()

    def listing(self, numbers: tuple[int, ...]) -> Listing:
        """Return an answer for the devices that are there now, at most some seconds old."""
        with self._lock:
            now_s = time.monotonic()
            if now_s < self._next_s and numbers == self._of:
                return self._last
            self._last, self._of = self._run(), numbers
            failed = not self._last.devices
            self._next_s = time.monotonic() + (BACK_OFF_S if failed else FRESH_S)
            return self._last

    def _run(self) -> Listing:
        if not os.access(self._path, os.X_OK):
            return Listing(problem=f"no {self._path}")
        answer = self._ask(self._words)
        if answer.devices or not answer.problem.startswith(REFUSED):
            return answer
        # The other generation's option; the one that works is remembered.
        other = next(words for words in JSON_OPTIONS if words != self._words)
        second = self._ask(other)
        if second.devices:
            self._words = other
            return second
        return answer

    def _ask(self, words: tuple[str, ...]) -> Listing:
        try:
            done = subprocess.run(
                [self._path, *words],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=DEADLINE_S,
                env=clean_environment(),
                check=False,
            )
        except subprocess.TimeoutExpired:
            return Listing(problem=f"neuron-ls did not answer within {DEADLINE_S:g} s")
        except OSError as exc:
            return Listing(problem=f"neuron-ls cannot be run ({exc.strerror})")
        if done.returncode:
            said = (done.stderr or done.stdout)[:200].decode("utf-8", "replace").strip()
            _LOG.debug("neuron_ls_failed", extra={"rc": done.returncode, "said": said})
            return Listing(problem=f"{REFUSED} {done.returncode}: {said}")
        answer = parse_listing(done.stdout[:OUTPUT_BYTES])
        return msgspec.structs.replace(answer, read_at_s=time.clock_gettime(time.CLOCK_BOOTTIME))


def clean_environment() -> dict[str, str]:
    """Return the environment that vendor programs are given: nothing of the agent's own."""
    return {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C"}
