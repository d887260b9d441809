"""`neuron-monitor`: one long-lived child whose JSON lines tell which process is on which core.

The child is read by one thread. Only the newest report is kept: one that stops is restarted with
back-off, one that floods is read and thrown away but for a few lines a second, and a line that is
cut short or longer than any report is dropped. All of it is counted and none of it is waited for.

Source: Neuron tools documentation, neuron-monitor. Groups repeat every period as configured; the
sums of `execution_stats` are those of one period, latencies are null where nothing ran.
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import msgspec

from alloy_agent.backends.neuron.listing import clean_environment
from alloy_agent.model import Value

_LOG = logging.getLogger(__name__)

LINE_BYTES: Final = 4 << 20  # a report of 144 devices with everything on is below 2 MB
PARSED_PER_S: Final = 5  # more reports than this in a second tell nothing new
SKIPPED_AT_ONCE: Final = 64  # so many more are thrown away before the rest of the second is waited
SILENT_PERIODS: Final = 5.0  # without a report for so long the child counts as stuck
SILENT_MIN_S: Final = 5.0
BACK_OFF_FIRST_S: Final = 1.0
BACK_OFF_MAX_S: Final = 60.0
PAUSE_POLL_S: Final = 0.2
STEADY_S: Final = 30.0  # a child that lived this long was well


class Latency(NamedTuple):
    """Percentiles of one period, in seconds."""

    p50_s: float
    p99_s: float


class RuntimeReport(Value, frozen=True, kw_only=True):
    """One process with the runtime in it, over one period.

    `cores` maps global logical cores to their busy ratio. The counts are of this period.
    """

    pid: int
    tag: str = ""
    cores: dict[int, float] = {}  # noqa: RUF012 - msgspec copies it
    core_memory_bytes: dict[int, int] = {}  # noqa: RUF012
    host_memory_bytes: int | None = None
    device_memory_bytes: int | None = None
    completed: int | None = None
    failed: int | None = None
    errors: dict[str, int] = {}  # noqa: RUF012
    latency_p50_s: float | None = None
    latency_p99_s: float | None = None
    period_s: float | None = None
    problems: tuple[str, ...] = ()


class HardwareCounts(Value, frozen=True, kw_only=True):
    """Error counters of one device, as the monitor tells them."""

    number: int
    mem_ecc_corrected: int | None = None
    mem_ecc_uncorrected: int | None = None
    sram_ecc_corrected: int | None = None
    sram_ecc_uncorrected: int | None = None


class Report(Value, frozen=True, kw_only=True):
    """One line of the monitor, and when it was read."""

    runtimes: tuple[RuntimeReport, ...] = ()
    hardware: tuple[HardwareCounts, ...] = ()
    lnc: int | None = None
    instance_type: str = ""
    problems: tuple[str, ...] = ()
    read_at_s: float = 0.0

    def of(self, pid: int) -> RuntimeReport | None:
        """Return what is told of one process."""
        return next((entry for entry in self.runtimes if entry.pid == pid), None)


def parse_report(raw: bytes) -> Report | None:
    """Return a report; None if the line is none. Whatever makes no sense in it is left out."""
    try:
        told: Any = msgspec.json.decode(raw)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None
    if not isinstance(told, dict):
        return None
    hardware = _table(told, "neuron_hardware_info")
    runtimes = told.get("neuron_runtime_data")
    counters = _table(_table(told, "system_data"), "neuron_hw_counters").get("neuron_devices")
    problems = [str(part["error"])[:200] for part in (hardware,) if part.get("error")]
    return Report(
        runtimes=tuple(entry for item in _list(runtimes) if (entry := _runtime(item)) is not None),
        hardware=tuple(found for item in _list(counters) if (found := _counts(item)) is not None),
        lnc=_count(hardware.get("logical_neuroncore_config")),
        instance_type=str(_table(told, "instance_info").get("instance_type") or "")[:64],
        problems=tuple(problems),
    )


def _runtime(told: Any) -> RuntimeReport | None:
    pid = _count(told.get("pid")) if isinstance(told, dict) else None
    if not pid:
        return None
    report = _table(told, "report")
    cores, memory = _table(report, "neuroncore_counters"), _table(report, "memory_used")
    runs = _table(report, "execution_stats")
    used = _table(memory, "neuron_runtime_used_bytes")
    summary = _table(runs, "execution_summary")
    latency = _latency(_table(runs, "latency_stats"))
    errors = [str(p["error"])[:200] for p in (told, cores, memory, runs) if p.get("error")]
    return RuntimeReport(
        pid=pid,
        tag=str(told.get("neuron_runtime_tag") or "")[:256],
        cores=_busy(_table(cores, "neuroncores_in_use")),
        core_memory_bytes=_memory(used),
        host_memory_bytes=_count(used.get("host")),
        device_memory_bytes=_count(used.get("neuron_device")),
        completed=_count(summary.get("completed")),
        failed=_sum(summary, skip="completed"),
        errors=_counts_of(_table(runs, "error_summary")),
        latency_p50_s=None if latency is None else latency.p50_s,
        latency_p99_s=None if latency is None else latency.p99_s,
        period_s=_real(runs.get("period")),
        problems=tuple(errors),
    )


def _busy(told: dict[str, Any]) -> dict[int, float]:
    found = {}
    for name, entry in told.items():
        core = _key(name)
        busy = _real(entry.get("neuroncore_utilization")) if isinstance(entry, dict) else None
        if core is not None:
            found[core] = min(1.0, max(0.0, (busy or 0.0) / 100.0))
    return found


def _memory(used: dict[str, Any]) -> dict[int, int]:
    told = _table(_table(used, "usage_breakdown"), "neuroncore_memory_usage")
    found = {}
    for name, entry in told.items():
        core = _key(name)
        if core is not None and isinstance(entry, dict):
            found[core] = sum(_counts_of(entry).values())
    return found


def _latency(told: dict[str, Any]) -> Latency | None:
    device = told.get("device_latency") or told.get("total_latency")
    if not isinstance(device, dict):
        return None
    p50, p99 = _real(device.get("p50")), _real(device.get("p99"))
    return None if p50 is None or p99 is None else Latency(p50, p99)


def _counts(told: Any) -> HardwareCounts | None:
    number = _count(told.get("neuron_device_index")) if isinstance(told, dict) else None
    if number is None:
        return None
    return HardwareCounts(
        number=number,
        mem_ecc_corrected=_count(told.get("mem_ecc_corrected")),
        mem_ecc_uncorrected=_count(told.get("mem_ecc_uncorrected")),
        sram_ecc_corrected=_count(told.get("sram_ecc_corrected")),
        sram_ecc_uncorrected=_count(told.get("sram_ecc_uncorrected")),
    )


def _table(told: Any, name: str) -> dict[str, Any]:
    part = told.get(name) if isinstance(told, dict) else None
    return part if isinstance(part, dict) else {}


def _list(told: Any) -> list[Any]:
    return told if isinstance(told, list) else []


def _count(told: Any) -> int | None:
    if isinstance(told, bool) or not isinstance(told, int) or not 0 <= told < 1 << 63:
        return None
    return told


def _counts_of(told: dict[str, Any]) -> dict[str, int]:
    return {name: count for name, entry in told.items() if (count := _count(entry)) is not None}


def _sum(told: dict[str, Any], skip: str) -> int | None:
    counts = _counts_of({name: entry for name, entry in told.items() if name != skip})
    return sum(counts.values()) if counts else None


def _real(told: Any) -> float | None:
    if isinstance(told, bool) or not isinstance(told, (int, float)):
        return None
    value = float(told)
    return value if 0.0 <= value < 1e18 else None


def _key(name: str) -> int | None:
    return int(name) if name.isascii() and name.isdigit() and len(name) < 6 else None


class MonitorHealth(Value, frozen=True, kw_only=True):
    """How the child is doing. What is wrong with it says nothing about any device."""

    running: bool
    reports: int = 0
    restarts: int = 0
    dropped_lines: int = 0  # cut short, too long, or no report
    skipped_lines: int = 0  # more of them than are worth reading
    problem: str = ""


class Monitor:
    """The child and its newest report. Thread-safe; `start` more than once is fine."""

    def __init__(self, tools_dir: str, period_s: float) -> None:
        self._path = f"{tools_dir}/neuron-monitor"
        self.period_s = max(1.0, period_s)
        self._changed = threading.Condition()
        self._report: Report | None = None
        self._thread: threading.Thread | None = None
        self._child: subprocess.Popen[bytes] | None = None
        self._closing = threading.Event()
        self._paused = 0
        self._reports = self._restarts = self._dropped = self._skipped = 0
        self._problem = "not started"
        self._window = (0.0, 0)
        self._heard_s = 0.0

    def start(self) -> bool:
        """Start the child if it is there; return whether it is."""
        if not os.access(self._path, os.X_OK):
            self._problem = f"no {self._path}"
            return False
        with self._changed:
            if self._thread is None and not self._closing.is_set():
                self._problem = ""
                self._thread = threading.Thread(
                    target=self._run, name="neuron-monitor", daemon=True
                )
                self._thread.start()
        return True

    def latest(self, wait_s: float = 0.0) -> Report | None:
        """Return the newest report, unless it is too old to be about now.

        Args:
            wait_s: How long to wait for the first one.
        """
        with self._changed:
            if self._report is None and wait_s > 0 and self._thread is not None:
                self._changed.wait_for(lambda: self._report is not None, wait_s)
            report = self._report
        if report is None or boot_s() - report.read_at_s > self._silent_s():
            return None
        return report

    def after(self, moment_s: float, wait_s: float) -> Report | None:
        """Return a report that was read after a moment of the boot clock, waiting for it."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._report is not None and self._report.read_at_s > moment_s, wait_s
            )
        report = self.latest()
        return report if report is not None and report.read_at_s > moment_s else None

    def health(self) -> MonitorHealth:
        """Return how the child is doing."""
        with self._changed:
            child = self._child
            return MonitorHealth(
                running=child is not None and child.poll() is None,
                reports=self._reports,
                restarts=self._restarts,
                dropped_lines=self._dropped,
                skipped_lines=self._skipped,
                problem=self._problem,
            )

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Keep the child away meanwhile: it has device nodes open, which forbids a reset."""
        with self._changed:
            self._paused += 1
            child = self._child
        if child is not None:
            child.kill()
            child.wait()
        try:
            yield
        finally:
            with self._changed:
                self._paused -= 1

    def close(self) -> None:
        """End the child and its reader."""
        self._closing.set()
        with self._changed:
            child, thread = self._child, self._thread
        if child is not None:
            child.kill()
        if thread is not None:
            thread.join(timeout=5.0)

    # --- inside: the reader's thread ---

    def _run(self) -> None:
        back_off_s = BACK_OFF_FIRST_S
        while not self._closing.is_set():
            if self._paused:
                self._closing.wait(PAUSE_POLL_S)
                continue
            began_s = time.monotonic()
            problem = self._one_child()
            with self._changed:
                self._problem = problem
                self._restarts += 1
            lived_s = time.monotonic() - began_s
            back_off_s = BACK_OFF_FIRST_S if lived_s > STEADY_S else back_off_s
            _LOG.info("neuron_monitor_ended", extra={"problem": problem, "again_in_s": back_off_s})
            self._closing.wait(back_off_s)
            back_off_s = min(BACK_OFF_MAX_S, back_off_s * 2)

    def _one_child(self) -> str:
        """Run one child until it ends, is silent for too long, or we close; return why."""
        settings = self._settings()
        try:
            child = subprocess.Popen(
                [self._path, "-c", f"/dev/fd/{settings}"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=clean_environment(),
                pass_fds=(settings,),
                bufsize=0,
            )
        except OSError as exc:
            return f"neuron-monitor cannot be run ({exc.strerror})"
        finally:
            os.close(settings)
        with self._changed:
            self._child = child
            unwanted = self._closing.is_set() or self._paused > 0
        try:
            if unwanted:
                return "not wanted now"
            return self._read(child)
        finally:
            child.kill()
            child.wait()
            if child.stdout is not None:
                child.stdout.close()

    def _settings(self) -> int:
        """Return a descriptor of the child's settings, which need no file on disk."""
        metrics = ("neuroncore_counters", "memory_used", "execution_stats")
        settings = {
            "period": f"{self.period_s:g}s",
            "neuron_runtimes": [
                {"tag_filter": ".*", "metrics": [{"type": name} for name in metrics]}
            ],
            "system_metrics": [{"type": "neuron_hw_counters", "period": "5s"}],
        }
        descriptor = os.memfd_create("neuron-monitor.conf", os.MFD_CLOEXEC)
        os.write(descriptor, msgspec.json.encode(settings))
        os.lseek(descriptor, 0, os.SEEK_SET)
        return descriptor

    def _silent_s(self) -> float:
        return max(SILENT_MIN_S, SILENT_PERIODS * self.period_s)

    def _read(self, child: subprocess.Popen[bytes]) -> str:
        import select

        assert child.stdout is not None  # noqa: S101 - a pipe was asked for
        pipe = child.stdout.fileno()
        poll = select.poll()
        poll.register(pipe, select.POLLIN)
        self._heard_s = time.monotonic()
        rest, too_long = b"", False
        while not self._closing.is_set():
            if not poll.poll(200):
                if time.monotonic() - self._heard_s > self._silent_s():
                    return f"neuron-monitor was silent for {self._silent_s():g} s"
                continue
            chunk = os.read(pipe, 1 << 16)
            if not chunk:
                self._dropped += bool(rest)
                return f"neuron-monitor ended with {child.wait()}"
            *lines, rest = (rest + chunk).split(b"\n")
            for number, line in enumerate(lines):
                if too_long and number == 0:
                    too_long = False
                elif line.strip():
                    self._take(line)
            if len(rest) > LINE_BYTES:
                self._dropped += not too_long
                rest, too_long = b"", True
        return "closing"

    def _take(self, line: bytes) -> None:
        now_s = time.monotonic()
        since_s, parsed = self._window
        if now_s - since_s >= 1.0:
            since_s, parsed = now_s, 0
        if parsed >= PARSED_PER_S:
            # A flood is not read as fast as it comes: the full pipe holds the child back.
            self._skipped += 1
            if self._skipped % SKIPPED_AT_ONCE == 0:
                self._closing.wait(since_s + 1.0 - now_s)
            return
        self._window = (since_s, parsed + 1)
        report = parse_report(line)
        if report is None:
            self._dropped += 1
            return
        self._heard_s = now_s
        with self._changed:
            self._report = msgspec.structs.replace(report, read_at_s=boot_s())
            self._reports += 1
            self._problem = ""
            self._changed.notify_all()


def boot_s() -> float:
    """Return the boot clock, in seconds."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
