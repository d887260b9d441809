"""Read-only measurements on the NVIDIA GPUs of this host: `python -m tests.hardware.nvidia`.

Changes no mode, makes and removes nothing, resets nothing. It writes one JSON document: inventory,
how often each field value really renews, GPM at 10 Hz, who uses the GPUs, whether memory limits can
be had, an event wait, and the cost of each call in microseconds. Done within four minutes; a
section that a driver does not support says so and the others go on.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import msgspec

from alloy_agent.backends.base import SignalSink
from alloy_agent.backends.nvidia import NvidiaBackend, open_backend
from alloy_agent.backends.nvidia.gpu import Gpu, field_number
from alloy_agent.backends.nvidia.library import NvmlCallError
from alloy_agent.backends.nvidia.topology import fabric_of
from alloy_agent.errors import AlloyError
from alloy_agent.model import Quality

SCHEMA: Final = "alloy.hardware/v1"
BUDGET_S: Final = 200.0
FIELDS: Final[dict[int, str]] = {
    3: "ecc_corrected_volatile",
    4: "ecc_uncorrected_volatile",
    74: "throttle_power_ns",
    75: "throttle_thermal_ns",
    76: "throttle_sync_boost_ns",
    82: "memory_temperature_c",
    83: "energy_mj",
    94: "pcie_replays",
    138: "nvlink_tx_kib",
    139: "nvlink_rx_kib",
    142: "remapped_corrected",
    143: "remapped_uncorrected",
    144: "remap_pending",
    145: "remap_failed",
    184: "resetless_mig",
    185: "power_average_mw",
    186: "power_instant_mw",
    194: "slowdown_t_limit_c",
    197: "pcie_tx_bytes",
    198: "pcie_rx_bytes",
    199: "mig_query_without_mode",
    230: "recovery_action",
    269: "throttle_sw_thermal_ns",
    270: "throttle_hw_thermal_ns",
    271: "throttle_power_brake_ns",
}
CALLS: Final[tuple[tuple[str, tuple[Any, ...]], ...]] = (
    ("nvmlDeviceGetUUID", ()),
    ("nvmlDeviceGetMigMode", ()),
    ("nvmlDeviceGetMemoryInfo", ()),
    ("nvmlDeviceGetPowerUsage", ()),
    ("nvmlDeviceGetTotalEnergyConsumption", ()),
    ("nvmlDeviceGetTemperature", (0,)),
    ("nvmlDeviceGetMarginTemperature", ()),
    ("nvmlDeviceGetCurrentClocksEventReasons", ()),
    ("nvmlDeviceGetUtilizationRates", ()),
    ("nvmlDeviceGetComputeRunningProcesses", ()),
    ("nvmlDeviceGetRemappedRows", ()),
    ("nvmlDeviceGetTotalEccErrors", (0, 0)),
    ("nvmlDeviceGetFieldValues", ([83, 186, 74, 76, 269, 270, 271],)),
    ("nvmlDeviceGetFieldValues", (list(FIELDS),)),
    ("nvmlDeviceGetNvLinkState", (0,)),
)


class Sink(SignalSink):
    """Takes a sample and keeps the last value of each slot."""

    def __init__(self) -> None:
        self.slots: dict[int, tuple[float, Quality, float | None]] = {}

    def put(
        self,
        slot: int,
        value: float,
        quality: Quality = Quality.VALUE,
        source_time_s: float | None = None,
    ) -> None:
        """Keep one value."""
        self.slots[slot] = (value, quality, source_time_s)


def costs(gpu: Gpu, count: int) -> Iterator[dict[str, Any]]:
    """Yield median, p99 and largest cost of each call, in microseconds."""
    for name, arguments in CALLS:
        label = name if not arguments else f"{name}({_shown(arguments)})"
        spent: list[float] = []
        try:
            for _ in range(count):
                begin = time.perf_counter_ns()
                gpu.call(name, *arguments)
                spent.append((time.perf_counter_ns() - begin) / 1e3)
                if sum(spent) > 2e6:
                    break
        except NvmlCallError as failure:
            yield {"call": label, "refused": str(failure)}
            continue
        spent.sort()
        yield {
            "call": label,
            "median_us": round(statistics.median(spent), 1),
            "p99_us": round(spent[int(len(spent) * 0.99)], 1),
            "max_us": round(spent[-1], 1),
            "samples": len(spent),
        }


def _shown(arguments: tuple[Any, ...]) -> str:
    return ", ".join(f"{len(a)} fields" if isinstance(a, list) else str(a) for a in arguments)


def renewals(gpu: Gpu, seconds: float) -> list[dict[str, Any]]:
    """Return, by field, its error or how often value and time stamp changed while we watched."""
    try:
        gpu.call("nvmlDeviceGetFieldValues", list(FIELDS))
    except NvmlCallError as failure:
        return [{"refused": str(failure)}]
    changes: dict[int, list[float]] = {field: [] for field in FIELDS}
    stamps: dict[int, int] = dict.fromkeys(FIELDS, 0)
    last: dict[int, tuple[float | None, int]] = {}
    errors: dict[int, int] = {}
    reads = 0
    end = time.monotonic() + seconds
    while (now := time.monotonic()) < end:
        reads += 1
        for value in gpu.call("nvmlDeviceGetFieldValues", list(FIELDS)):
            field = int(value.fieldId)
            if value.nvmlReturn != 0:
                errors[field] = int(value.nvmlReturn)
                continue
            number, stamp = field_number(value), int(value.timestamp)
            before = last.get(field)
            if before is not None:
                if before[0] != number:
                    changes[field].append(now)
                stamps[field] += before[1] != stamp
            last[field] = (number, stamp)
        time.sleep(0.001)
    return [_renewal(field, changes, stamps, last, errors, reads) for field in FIELDS]


def _renewal(  # noqa: PLR0917 - the columns of one row
    field: int,
    changes: dict[int, list[float]],
    stamps: dict[int, int],
    last: dict[int, tuple[float | None, int]],
    errors: dict[int, int],
    reads: int,
) -> dict[str, Any]:
    row: dict[str, Any] = {"field": field, "name": FIELDS[field]}
    if field in errors:
        return row | {"code": errors[field]}
    times = changes[field]
    gaps = [b - a for a, b in itertools.pairwise(times)]
    return row | {
        "value": last[field][0],
        "changes": len(times),
        "stamp_changes": stamps[field],
        "reads": reads,
        "median_gap_ms": round(statistics.median(gaps) * 1e3, 1) if gaps else None,
    }


def activity(backend: NvidiaBackend, gpu: Gpu, seconds: float) -> dict[str, Any]:
    """Return what ten samples a second of the whole backend read, and what each cost."""
    specs = backend.signal_specs(gpu.id)
    sink, spent = Sink(), []
    for _ in range(max(2, int(seconds * 10))):
        begin = time.perf_counter_ns()
        backend.sample(gpu.id, sink)
        spent.append((time.perf_counter_ns() - begin) / 1e3)
        time.sleep(0.1)
    backend.quiesce(gpu.id)
    backend.resume(gpu.id)
    spent.sort()
    return {
        "gpm": gpu.identity().gpm,
        "median_us": round(statistics.median(spent), 1),
        "max_us": round(spent[-1], 1),
        "samples": len(spent),
        "open_after_quiesce": backend.open_count(gpu.id),
        "signals": [
            {
                "name": spec.name,
                "subject": spec.subject,
                "quality": sink.slots[slot][1].value,
                "value": sink.slots[slot][0] if sink.slots[slot][1] is Quality.VALUE else None,
            }
            for slot, spec in enumerate(specs)
        ],
    }


def memory_limits(backend: NvidiaBackend, gpu: Gpu) -> dict[str, Any]:
    """Return whether the driver has memory limits for cgroups; sets none."""
    found: dict[str, Any] = {"symbol": backend.nvml.has("nvmlDeviceGetMemoryLimits_v1")}
    root = Path("/sys/fs/cgroup")
    files = [root / "dmem.capacity", root / "unified/dmem.capacity"]
    found["dmem"] = [file.read_text().splitlines() for file in files if file.exists()]
    kind = getattr(backend.nvml.module, "c_nvmlGetMemoryLimits_v1_t", None)
    if found["symbol"] and kind is not None:
        limits = kind()
        limits.nameSpace = ctypes.c_char_p(b"/").value
        try:
            gpu.call("nvmlDeviceGetMemoryLimits_v1", limits)
            found["root"] = {"soft": int(limits.softLimit), "hard": int(limits.hardLimit)}
        except NvmlCallError as failure:
            found["refused"] = str(failure)
    return found


def guarded(section: Callable[[], Any]) -> Any:
    """Return a section, or why there is none: one that fails must not cost the others."""
    try:
        return section()
    except (AlloyError, NvmlCallError, OSError) as error:
        return {"refused": str(error)}


def events(backend: NvidiaBackend, seconds: float) -> dict[str, Any]:
    """Return what arrived while waiting, and how long the wait really was."""
    begin = time.monotonic()
    found = backend.wait_events(seconds)
    waited_s = round(time.monotonic() - begin, 3)
    return {"waited_s": waited_s, "events": [msgspec.to_builtins(event) for event in found]}


def measured(backend: NvidiaBackend, seconds: float) -> dict[str, Any]:
    """Return the whole document."""
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "vendor": "nvidia",
        "capabilities": msgspec.to_builtins(backend.capabilities()),
        "doctor": [msgspec.to_builtins(line) for line in backend.diagnose()],
        "gpus": [],
    }
    begin = time.monotonic()
    try:
        devices = backend.discover()
    except AlloyError as error:
        document["refused"] = str(error)
        return document
    document["events"] = guarded(lambda: events(backend, 1.0))
    for number, device in enumerate(devices):
        gpu = backend._gpu(device)
        full = number == 0 and time.monotonic() - begin < BUDGET_S
        entry: dict[str, Any] = {
            "observation": guarded(lambda: msgspec.to_builtins(backend.observe(device))),  # noqa: B023
            "fabric": guarded(lambda: fabric_of(gpu)._asdict()),  # noqa: B023
            "facts": guarded(lambda: msgspec.to_builtins(backend.facts(device))),  # noqa: B023
            "memory_limits": guarded(lambda: memory_limits(backend, gpu)),  # noqa: B023
        }
        if full:  # the costs of one GPU stand for its like
            entry["costs"] = guarded(lambda: list(costs(gpu, 200)))  # noqa: B023
            entry["fields"] = guarded(lambda: renewals(gpu, seconds))  # noqa: B023
            entry["activity"] = guarded(lambda: activity(backend, gpu, seconds))  # noqa: B023
        document["gpus"].append(entry)
    document["took_s"] = round(time.monotonic() - begin, 1)
    return document


def main(arguments: list[str] | None = None, options: dict[str, Any] | None = None) -> int:
    """Measure, write the document, and say where it is."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", metavar="OUT", help="file to write; else standard output")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each watched section")
    parser.add_argument("--library", default="", help="path of libnvidia-ml.so.1")
    given = parser.parse_args(arguments)
    backend = open_backend(options or {"library": given.library})
    try:
        document = measured(backend, min(given.seconds, 60.0))
    finally:
        backend.close()
    text = json.dumps(document, indent=1, default=str) + "\n"
    if given.json:
        Path(given.json).write_text(text, encoding="utf-8")
    else:
        sys.stdout.write(text)
    return 0 if document["gpus"] else 3


if __name__ == "__main__":
    sys.exit(main())
