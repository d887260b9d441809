"""Read-only measurements on the NVIDIA GPUs of this host: `python -m tests.hardware.nvidia`.

Changes no mode, makes and removes nothing, resets nothing. It writes one JSON document: inventory,
how often each field value really renews, GPM at 10 Hz and at which gap it begins to answer, who
uses the GPUs and which process of this host each pid is, whether memory limits can be had, an event
wait, and the cost of each call in microseconds.

Done within four minutes, whatever the driver does: each section has a thread and a deadline, and
one that hangs or that a driver does not support says so and the others go on.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import msgspec

from alloy_agent.backends.base import SignalSink
from alloy_agent.backends.nvidia import NvidiaBackend, open_backend
from alloy_agent.backends.nvidia.gpu import Gpu, field_number
from alloy_agent.backends.nvidia.library import Nvml, NvmlCallError
from alloy_agent.backends.nvidia.processes import fence_of, name_of, open_nodes
from alloy_agent.backends.nvidia.sighting import sighted
from alloy_agent.backends.nvidia.topology import fabric_of
from alloy_agent.errors import AlloyError
from alloy_agent.host.pidspace import initial_namespace
from alloy_agent.model import DeviceId, Quality

SCHEMA: Final = "alloy.hardware/v1"
BUDGET_S: Final = 200.0  # for all sections; what is left of four minutes is for start and end
SECTION_S: Final = 45.0
GAPS_MS: Final = (20, 50, 80, 100, 120, 200)
GPM_TRIES: Final = 5
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
    found: dict[str, Any] = {
        "symbol": backend.nvml.has("nvmlDeviceGetMemoryLimits_v1"),
        "shares_can_be_capped": backend._shares.can_limit(gpu),
    }
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


class Clock:
    """How much of the time for everything is left."""

    def __init__(self, budget_s: float) -> None:
        self._end_s = time.monotonic() + budget_s
        self.stuck = 0

    def left_s(self) -> float:
        """Return the seconds that are left for a section."""
        return min(SECTION_S, self._end_s - time.monotonic())

    def guarded(self, section: Callable[[], Any]) -> Any:
        """Return a section, or why there is none: one that fails or hangs costs no other.

        A call into the driver cannot be ended from outside, so one that hangs keeps its thread.
        """
        left_s = self.left_s()
        if left_s <= 0:
            return {"refused": "no time is left for it"}
        found: list[Any] = []

        def work() -> None:
            try:
                found.append(section())
            except (AlloyError, NvmlCallError, OSError) as error:
                found.append({"refused": str(error)})

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        thread.join(left_s)
        if thread.is_alive():
            self.stuck += 1
            return {"refused": f"no answer within {left_s:.0f} s"}
        return found[0] if found else {"refused": "it ended without a result"}


def gpm(backend: NvidiaBackend, gpu: Gpu) -> dict[str, Any]:
    """Return, by the gap between two samples, how often GPM gave a value, and what a turn costs."""
    nvml, module = backend.nvml, backend.nvml.module
    if not gpu.identity().gpm:
        return {"refused": "this GPU has no GPM"}
    one, two = nvml.call("nvmlGpmSampleAlloc"), nvml.call("nvmlGpmSampleAlloc")
    rows = []
    try:
        for gap_ms in GAPS_MS:
            told, spent = 0, []
            for _ in range(GPM_TRIES):
                gpu.call("nvmlGpmSampleGet", one)
                time.sleep(gap_ms / 1e3)
                begin = time.perf_counter_ns()
                gpu.call("nvmlGpmSampleGet", two)
                told += _compared(module, nvml, one, two)
                spent.append((time.perf_counter_ns() - begin) / 1e3)
            rows.append({"gap_ms": gap_ms, "values": told, "median_us": statistics.median(spent)})
    finally:
        for sample in (one, two):
            nvml.call("nvmlGpmSampleFree", sample)
    return {"tries": GPM_TRIES, "gaps": rows}


def _compared(module: Any, nvml: Nvml, one: Any, two: Any) -> bool:
    """Return whether two samples can be compared."""
    request = module.c_nvmlGpmMetricsGet_t()
    request.version, request.numMetrics = module.NVML_GPM_METRICS_GET_VERSION, 1
    request.sample1, request.sample2 = one, two
    request.metrics[0].metricId = 2
    try:
        nvml.call("nvmlGpmMetricsGet", request)
    except NvmlCallError:
        return False
    return int(request.metrics[0].nvmlReturn) == 0


def attribution(gpu: Gpu, proc: Path) -> dict[str, Any]:
    """Return each pid that the driver tells, and which process of this host it is."""
    told = gpu.told_processes()
    if told is None:
        return {"refused": "this driver does not tell who computes on the GPU"}
    seen = sighted(proc, (pid for pid, _, _ in told))
    rows = []
    for pid, instance, used in told:
        sight = seen[pid]
        fence = fence_of(proc, sight.pid)
        rows.append(
            {
                "driver_pid": pid,
                "host_pid": sight.pid,
                "note": sight.note,
                "instance": instance,
                "memory_bytes": used,
                "comm": name_of(proc, sight.pid),
                "nodes": list(open_nodes(proc, sight.pid)),
                "fence": fence._asdict(),
            }
        )
    return {"initial_namespace": initial_namespace(str(proc)), "processes": rows}


def events(backend: NvidiaBackend, seconds: float) -> dict[str, Any]:
    """Return what arrived while waiting, and how long the wait really was."""
    begin = time.monotonic()
    found = backend.wait_events(seconds)
    waited_s = round(time.monotonic() - begin, 3)
    return {"waited_s": waited_s, "events": [msgspec.to_builtins(event) for event in found]}


def measured(
    backend: NvidiaBackend, seconds: float, proc: Path = Path("/proc"), budget_s: float = BUDGET_S
) -> dict[str, Any]:
    """Return the whole document."""
    clock, begin = Clock(budget_s), time.monotonic()
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "vendor": "nvidia",
        "capabilities": clock.guarded(lambda: msgspec.to_builtins(backend.capabilities())),
        "doctor": clock.guarded(lambda: [msgspec.to_builtins(x) for x in backend.diagnose()]),
        "gpus": [],
    }
    devices = clock.guarded(backend.discover)
    if isinstance(devices, dict):
        return document | devices
    document["events"] = clock.guarded(lambda: events(backend, 1.0))
    for number, device in enumerate(devices):
        document["gpus"].append(_gpu(backend, device, clock, seconds if number == 0 else 0, proc))
    document["took_s"] = round(time.monotonic() - begin, 1)
    document["stuck"] = clock.stuck
    return document


def _gpu(
    backend: NvidiaBackend, device: DeviceId, clock: Clock, seconds: float, proc: Path
) -> dict[str, Any]:
    """Return what one GPU showed; the costs of one stand for its like (`seconds` 0: left out)."""
    gpu = backend._gpu(device)
    sections: dict[str, Callable[[], Any]] = {
        "observation": lambda: msgspec.to_builtins(backend.observe(device)),
        "fabric": lambda: fabric_of(gpu)._asdict(),
        "facts": lambda: msgspec.to_builtins(backend.facts(device)),
        "processes": lambda: attribution(gpu, proc),
        "memory_limits": lambda: memory_limits(backend, gpu),
    }
    if seconds:
        sections |= {
            "costs": lambda: list(costs(gpu, 200)),
            "gpm": lambda: gpm(backend, gpu),
            "fields": lambda: renewals(gpu, seconds),
            "activity": lambda: activity(backend, gpu, seconds),
        }
    before = clock.stuck
    entry: dict[str, Any] = {"id": device}
    for name, section in sections.items():
        waits = clock.stuck > before  # a GPU that hung once is not asked again
        entry[name] = {"refused": "the GPU hangs"} if waits else clock.guarded(section)
    return entry


def main(arguments: list[str] | None = None, options: dict[str, Any] | None = None) -> int:
    """Measure, write the document, and say where it is."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", metavar="OUT", help="file to write; else standard output")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each watched section")
    parser.add_argument("--library", default="", help="path of libnvidia-ml.so.1")
    given = parser.parse_args(arguments)
    opened = options or {"library": given.library}
    backend = open_backend(opened)
    root = opened.get("root")
    proc = Path(root if isinstance(root, str) else "/") / "proc"
    document = measured(backend, min(given.seconds, SECTION_S / 2), proc)
    if not document.get("stuck"):  # one that hangs holds what closing would wait for
        backend.close()
    text = json.dumps(document, indent=1, default=str) + "\n"
    if given.json:
        Path(given.json).write_text(text, encoding="utf-8")
    else:
        sys.stdout.write(text)
    return 0 if document["gpus"] else 3


if __name__ == "__main__":
    sys.exit(main())
