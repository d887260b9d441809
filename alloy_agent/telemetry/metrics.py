"""The Prometheus page: collectors that make metric families, each isolated from the others.

A collector that raises costs its own families and shows as `alloy_collector_up{collector="..."} 0`;
the rest of the page is served. Collectors read values that are already in memory, never a device,
so that a scrape neither waits for the sampler nor makes it wait. One scrape is rendered at a time,
and scrapes that come within `REUSE_S` of one another share a page: a storm of them costs one.

Rules that stay true in here:

* A number that could not be read has no sample; there is never a zero in its place. A value that
  is older than its limit has none either, and its age stays.
* Identities that re-appear carry their generation, so that two incarnations are two series; the
  series of a partition that is gone are not on the next page.
* Descriptions stand in `_info` alone; other series carry `device` or `partition` and `generation`.
* No timestamps: they would keep series alive that are gone.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from alloy_agent.model import (
    AuditResult,
    Condition,
    Quality,
    Scope,
    Signal,
    SignalSpec,
    Snapshot,
    Tier,
    Verdict,
)
from alloy_agent.telemetry import signals as readings
from alloy_agent.telemetry.exposition import (
    LABELS_CACHED,
    Family,
    Kind,
    begun_text,
    counter,
    gauge,
    info,
    number,
    render,
    single,
)
from alloy_agent.telemetry.gates import Gate, GateState
from alloy_agent.telemetry.health import DeviceHealth, Level

if TYPE_CHECKING:
    from alloy_agent.telemetry.window import Quantiles

LOG = logging.getLogger(__name__)

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"
SERIES_MAX: Final = 6000
REUSE_S: Final = 0.1

Collect = Callable[[], Iterable[Family]]

DEVICE: Final = ("device",)
PIECE: Final = ("partition", "generation")
BY_SIGNAL: Final = ("signal", "subject")
CONDITIONS: Final = tuple(map(str, Condition))
GATE_STATES: Final = tuple(map(str, GateState))
LEVELS: Final = tuple(map(str, Level))
TIERS: Final = tuple(map(str, Tier))


class MetricsPage:
    """A page of named collectors, rendered on demand.

    Args:
        series_max: What is over it is left out and counted.
    """

    def __init__(self, series_max: int = SERIES_MAX, reuse_s: float = 0.0) -> None:
        self._collectors: dict[str, Collect] = {}
        self._series_max = series_max
        self._reuse_s = reuse_s
        self._lock = threading.Lock()
        self._pages: dict[bool, tuple[float, bytes]] = {}
        self._failures: dict[str, int] = {}
        self._dropped = 0
        self.scrapes = 0

    def add(self, name: str, collect: Collect) -> None:
        """Add a collector; its name is the label of `alloy_collector_up`."""
        self._collectors[name] = collect

    def render(self, *, openmetrics: bool = False) -> bytes:
        """Return the page. Never raises."""
        with self._lock:
            made_s, page = self._pages.get(openmetrics, (float("-inf"), b""))
            if time.monotonic() - made_s < self._reuse_s:
                return page
            page = self._render(openmetrics=openmetrics)
            self._pages[openmetrics] = (time.monotonic(), page)
            return page

    def render_openmetrics(self) -> bytes:
        """Return the page in the form of OpenMetrics."""
        return self.render(openmetrics=True)

    def _render(self, *, openmetrics: bool) -> bytes:
        begun_s = time.perf_counter()
        self.scrapes += 1
        parts: list[str] = []
        up = gauge(
            "alloy_collector_up", "Whether a collector answered this scrape.", ("collector",)
        )
        room, written = self._series_max, 0
        for name, collect in self._collectors.items():
            try:
                text, added, dropped = render(collect(), room - written, openmetrics=openmetrics)
            except Exception:
                LOG.exception("collector_failed", extra={"collector": name})
                self._failures[name] = self._failures.get(name, 0) + 1
                up.add((name,), 0.0)
                continue
            up.add((name,), 1.0)
            parts.append(text)
            written += added
            self._dropped += dropped
        parts.append(self._own(up, written, time.perf_counter() - begun_s, openmetrics))
        if openmetrics:
            parts.append("# EOF\n")
        return "".join(parts).encode()

    def _own(self, up: Family, written: int, took_s: float, openmetrics: bool) -> str:
        """Return what the page says of itself; it has room always."""
        failures = counter(
            "alloy_collector_failures", "Times that a collector failed.", ("collector",)
        )
        for name in self._collectors:
            failures.add((name,), self._failures.get(name, 0))
        own = (
            up,
            failures,
            single("gauge", "alloy_scrape_series", "Series on this page.", written),
            single(
                "counter",
                "alloy_scrape_series_dropped",
                "Series left out at the cap.",
                self._dropped,
            ),
            single("counter", "alloy_scrapes", "Pages that were rendered.", self.scrapes),
            single("gauge", "alloy_scrape_duration_seconds", "Time to make this page.", took_s),
        )
        return render(own, self._series_max, openmetrics=openmetrics)[0]


# --- the node -------------------------------------------------------------------------------------


def snapshot_families(snapshot: Snapshot | None, now_s: float) -> Iterator[Family]:
    """Yield what the node looks like: devices, conditions, partitions, workers, faults."""
    if snapshot is None:
        return
    age_s = max(0.0, now_s - snapshot.taken_at_s)
    yield single("gauge", "alloy_snapshot_age_seconds", "Age of the newest observation.", age_s)
    yield single(
        "gauge", "alloy_snapshot_sequence", "Number of the newest observation.", snapshot.sequence
    )
    yield from _device_families(snapshot)
    yield from _partition_families(snapshot)
    yield from _worker_families(snapshot)


def _device_families(snapshot: Snapshot) -> Iterator[Family]:
    about = info(
        "alloy_device",
        "One device.",
        ("device", "vendor", "model", "simulated", "driver", "bus", "index"),
    )
    condition = gauge(
        "alloy_device_condition",
        "1 for the condition that a device is in.",
        ("device", "condition"),
    )
    fault = gauge("alloy_device_fault", "1 for each fault of a device.", ("device", "kind"))
    size = gauge("alloy_device_memory_size_bytes", "Memory that a device has.", DEVICE)
    for device in snapshot.devices:
        simulated = str(device.simulated).lower()
        labels = (device.id, device.vendor, device.model, simulated, device.driver or "")
        about.add((*labels, device.bus or "", str(device.index)), 1)
        condition.add_state((device.id,), CONDITIONS, device.condition)
        if device.memory_bytes is not None:
            size.add((device.id,), device.memory_bytes)
    for key in dict.fromkeys((f.device, f.kind) for f in snapshot.faults):
        fault.add(key, 1)
    yield from (about, condition, fault, size)


def _partition_families(snapshot: Snapshot) -> Iterator[Family]:
    about = info(
        "alloy_partition",
        "One partition.",
        (*PIECE, "device", "profile", "tenant", "managed", "uuid", "share"),
    )
    memory = gauge("alloy_partition_memory_bytes", "Memory that a partition has.", PIECE)
    names = ("kind", "namespace", "pod", "pod_uid", "container", "claim", "claim_uid", "job")
    users = info(
        "alloy_partition_occupant",
        "One user of a partition: a container of a pod, a batch job, a unit.",
        (*PIECE, "device", *names, "unit"),
    )
    for p in snapshot.partitions:
        for one in p.occupants:
            said = (*(getattr(one, name) for name in names), one.unit)
            users.add((p.id, str(p.generation), p.device, *said), 1)
        key = (p.id, str(p.generation))
        managed = str(p.managed).lower()
        about.add((*key, p.device, p.profile, p.tenant or "", managed, p.uuid or "", p.share), 1)
        if p.memory_bytes is not None:
            memory.add(key, p.memory_bytes)
    yield from (about, memory, users)


def _worker_families(snapshot: Snapshot) -> Iterator[Family]:
    up = gauge("alloy_worker_up", "Whether the process of a backend runs.", ("backend",))
    restarts = counter(
        "alloy_worker_restarts", "Times that a backend's process was started again.", ("backend",)
    )
    for worker in snapshot.workers:
        up.add((worker.backend,), worker.alive)
        restarts.add((worker.backend,), worker.restarts)
    yield from (up, restarts)


def audit_families(audit: AuditResult | None, now_s: float) -> Iterator[Family]:
    """Yield the verdicts and tiers of the newest audit."""
    if audit is None:
        return
    age_s = max(0.0, now_s - audit.taken_at_s)
    yield single("gauge", "alloy_audit_age_seconds", "Age of the newest audit.", age_s)
    verdict = gauge("alloy_audit_verdict", "1 for the verdict of the newest audit.", ("verdict",))
    for value in Verdict:
        verdict.add((value,), audit.verdict is value)
    checks = gauge(
        "alloy_check_verdict",
        "1 for the verdict of a check on a subject.",
        ("check", "subject", "verdict"),
    )
    tiers = gauge(
        "alloy_partition_tier",
        "1 for the tier that evidence proves for a partition.",
        (*PIECE, "tier"),
    )
    judgements = list(audit.node_judgements)
    for report in audit.partitions:
        judgements.extend(report.judgements)
        piece = report.partition
        tiers.add_state((piece.id, str(piece.generation)), TIERS, report.tier)
    for judgement in judgements:
        checks.add((judgement.check, judgement.subject, judgement.verdict), 1)
    yield from (verdict, checks, tiers)


# --- signals --------------------------------------------------------------------------------------


def signal_families(
    signals: Sequence[Signal], now_s: float, generations: Mapping[str, int] | None = None
) -> Iterator[Family]:
    """Yield one family for each signal name, with a sample where there is a fresh value.

    Args:
        signals: The newest ones, sane.
        now_s: The boot clock.
        generations: Of each partition; a partition without one is gone and has no series.
    """
    families: dict[str, Family] = {}
    age = gauge("alloy_signal_age_seconds", "Age of a value at its source.", BY_SIGNAL)
    refresh = gauge("alloy_source_refresh_seconds", "Measured time between two values.", BY_SIGNAL)
    ages, periods = age.lines, refresh.lines
    missing: dict[str, int] = {}
    for signal in signals:
        spec, value = signal.spec, signal.value
        name, subject, period_s = spec.name, spec.subject, spec.refresh_period_s
        piece = spec.scope is Scope.PARTITION
        generation = generations.get(subject) if piece and generations is not None else 0
        if generation is None:
            continue
        if value is None:
            missing[signal.quality] = missing.get(signal.quality, 0) + 1
            continue
        taken_s = signal.source_time_s
        age_s = now_s - (signal.read_time_s if taken_s is None else taken_s)
        value_is, age_is, period_is = _begun(name, subject, generation, piece, spec.counter)
        ages.append(f"{age_is}{age_s:.4g}\n" if age_s > 0 else f"{age_is}0.0\n")
        if period_s is not None:
            periods.append(period_is + number(period_s))
        stale = signal.quality is not Quality.VALUE or (
            age_s > readings.AGE_FLOOR_S and age_s > readings.limit_s(spec)
        )
        if stale and not spec.counter:
            missing["stale"] = missing.get("stale", 0) + 1
            continue
        family = families.get(name)
        if family is None:
            family = families[name] = _family_of(spec)
        family.lines.append(value_is + number(value))
    absent = gauge("alloy_signal_absent", "Signals without a fresh value, by why.", ("quality",))
    for quality, times in sorted(missing.items()):
        absent.add((quality,), times)
    yield from families.values()
    yield from (age, refresh, absent)


@lru_cache(maxsize=LABELS_CACHED)
def _begun(
    name: str, subject: str, generation: int, piece: bool, counter: bool
) -> tuple[str, str, str]:
    """Return the lines of a signal's value, age and refresh period, up to their numbers."""
    sample = f"{name.removesuffix('_total')}_total" if counter else name
    return (
        begun_text(sample, PIECE, (subject, str(generation)))
        if piece
        else begun_text(sample, DEVICE, (subject,)),
        begun_text("alloy_signal_age_seconds", BY_SIGNAL, (name, subject)),
        begun_text("alloy_source_refresh_seconds", BY_SIGNAL, (name, subject)),
    )


def _family_of(spec: SignalSpec) -> Family:
    kind: Kind = "counter" if spec.counter else "gauge"
    labels = PIECE if spec.scope is Scope.PARTITION else DEVICE
    return Family(kind, spec.name, f"{spec.name} from {spec.source or 'its backend'}.", labels)


def counter_families(
    counters: Mapping[tuple[str, str], readings.Count],
) -> Iterator[Family]:
    """Yield how the counters of devices behave."""
    resets = counter(
        "alloy_source_resets", "Times that a device's counter began anew.", ("signal", "device")
    )
    glitches = counter(
        "alloy_source_glitches", "Readings of a counter that were not believed.",
        ("signal", "device"),
    )  # fmt: skip
    for (device, name), state in counters.items():
        resets.add((name, device), state.resets)
        glitches.add((name, device), state.glitches)
    yield from (resets, glitches)


# --- judgements -----------------------------------------------------------------------------------


def window_families(
    quantiles: Iterable[tuple[tuple[str, int], str, Quantiles]],
    headrooms: Mapping[tuple[str, int], Any],
) -> Iterator[Family]:
    """Yield headroom and the coverage of its windows."""
    left = gauge(
        "alloy_partition_headroom_p95_ratio",
        "What P95 of the last minute leaves of a resource.",
        (*PIECE, "resource"),
    )
    device_left = gauge(
        "alloy_device_headroom_p95_ratio",
        "What P95 of the last minute leaves of a resource.",
        ("device", "resource"),
    )
    for (subject, generation), room in headrooms.items():
        for resource, ratio in room.ratios.items():
            if ratio is None:
                continue
            if generation or "/" in subject:
                left.add((subject, str(generation), resource), ratio)
            else:
                device_left.add((subject, resource), ratio)
    coverage = gauge(
        "alloy_window_coverage_ratio",
        "Samples counted over samples expected.",
        ("subject", "resource", "window"),
    )
    for (subject, _), resource, found in quantiles:
        coverage.add((subject, resource, f"{found.span_s:g}s"), found.coverage_ratio)
    yield from (left, device_left, coverage)


def gate_families(gates: Mapping[str, Mapping[str, Gate]]) -> Iterator[Family]:
    """Yield every gate: 1 for the state that it is in."""
    family = gauge("alloy_gate", "1 for the state that a gate is in.", ("subject", "gate", "state"))
    for subject, table in gates.items():
        for name, gate in table.items():
            family.add_state((subject, name), GATE_STATES, gate.state)
    yield family


def health_families(
    devices: Mapping[str, DeviceHealth], version: str, unattributed: int, now_s: float
) -> Iterator[Family]:
    """Yield the health of devices, and every fault event by its code."""
    level = gauge("alloy_health_state", "1 for the state that a device is in.", ("device", "state"))
    events = counter("alloy_device_fault_events", "Fault events by code.", ("device", "code"))
    open_ = gauge(
        "alloy_device_open_fault",
        "1 for each fault that has not ended.",
        ("device", "code", "class", "action", "scope"),
    )
    stalled = gauge("alloy_probe_stalled_seconds", "How long a device has not answered.", DEVICE)
    for device, known in devices.items():
        level.add_state((device,), LEVELS, known.level)
        for code, times in known.counts.items():
            events.add((device, code), times)
        for fault in known.faults:
            labels = (device, fault.code, fault.fault_class, fault.action, fault.scope)
            open_.add(labels, 1)
            if fault.code == "probe:stalled" and fault.good_s is None:
                stalled.add((device,), max(0.0, now_s - fault.first_s))
    about = info("alloy_fault_catalogue", "The table of fault codes.", ("version",))
    about.add((version,), 1)
    yield from (level, events, open_, stalled, about)
    yield single(
        "counter",
        "alloy_kernel_faults_unattributed",
        "Faults in the kernel's log of no known device.",
        unattributed,
    )


def usage_families(
    seconds: Mapping[tuple[str, int, str], tuple[float, float, float]],
    users: Mapping[tuple[str, int, str], tuple[str, str]] | None = None,
) -> Iterator[Family]:
    """Yield what tenants had and used since their allocation began or the agent took it up.

    Tenants of one name, one after the other, are series of their own by the UIDs of their users.
    """
    labels = (*PIECE, "tenant", "claim_uid", "pod_uid")
    who = users or {}
    allocated = counter(
        "alloy_metering_allocated_seconds", "Time that a tenant has a partition.", labels
    )
    used = counter("alloy_metering_used_seconds", "Of it, time that compute was active.", labels)
    idle = counter("alloy_metering_idle_seconds", "Of it, time that compute was idle.", labels)
    unseen = counter("alloy_metering_unobserved_seconds", "Of it, time nobody measured.", labels)
    for (partition, generation, tenant), (active_s, idle_s, unobserved_s) in seconds.items():
        uids = who.get((partition, generation, tenant), ("", ""))
        key = (partition, str(generation), tenant, *uids)
        allocated.add(key, active_s + idle_s + unobserved_s)
        used.add(key, active_s)
        idle.add(key, idle_s)
        unseen.add(key, unobserved_s)
    yield from (allocated, used, idle, unseen)


# --- the agent itself -----------------------------------------------------------------------------


def sampler_families(
    samplers: Mapping[str, tuple[Any, Sequence[tuple[float, int]]]],
) -> Iterator[Family]:
    """Yield how each worker samples: rate, lateness, misses, cost and scheduling.

    Args:
        samplers: By backend: its `worker.board.SamplerState`, and its lateness histogram as upper
            edge and count of each bucket.
    """
    by = ("backend",)
    rate = gauge("alloy_sampler_rate_hertz", "Samples a second.", by)
    wanted = gauge("alloy_sampler_wanted_rate_hertz", "Samples a second that were asked for.", by)
    policy = info("alloy_sampler", "How the sampler is scheduled.", ("backend", "policy"))
    rows = (
        ("ticks", "Samples that were due and taken.", "ticks"),
        ("missed_ticks", "Samples that could not be held.", "missed_ticks"),
        ("errors", "Samples that the library refused.", "errors"),
        ("skipped", "Samples that found the device in another call.", "skipped"),
        ("takeovers", "Times a device that blocks was set apart.", "takeovers"),
    )
    counters = {name: counter(f"alloy_agent_{name}", text, by) for name, text, _ in rows}
    cpu = gauge("alloy_worker_cpu_ratio", "CPU of a worker, of one core.", by)
    late = Family("histogram", "alloy_agent_sample_lateness_seconds", "How late samples came.", by)
    for backend, (state, buckets) in samplers.items():
        rate.add((backend,), state.rate_hz)
        wanted.add((backend,), state.wanted_rate_hz)
        policy.add((backend, state.policy), 1)
        for name, _, field in rows:
            counters[name].add((backend,), getattr(state, field))
        cpu.add((backend,), state.cpu_ratio)
        _add_lateness(late, backend, buckets)
    yield from (rate, wanted, policy, *counters.values(), cpu, late)


LATENESS_EDGES_S: Final = (0.0001, 0.0002, 0.0004, 0.001, 0.002, 0.005, 0.02, 0.1, 1.0)


def _add_lateness(family: Family, backend: str, buckets: Sequence[tuple[float, int]]) -> None:
    """Add a histogram with few edges from one with many."""
    if not buckets:
        return
    total = sum(edge * count for edge, count in buckets)
    rows = [
        (edge, sum(count for ceiling, count in buckets if ceiling <= edge))
        for edge in LATENESS_EDGES_S
    ]
    rows.append((float("inf"), sum(count for _, count in buckets)))
    family.add_buckets((backend,), rows, total)


def agent_families(
    version: str, loops: Mapping[str, tuple[int, int]], degraded: str, not_kept: str
) -> Iterator[Family]:
    """Yield how the agent itself is doing.

    Args:
        version: Of the agent.
        loops: Overruns and failed ticks by loop.
        degraded: Why nothing is changed, "" when changes are made.
        not_kept: Why the layout is not kept, "" when it is.
    """
    import resource

    about = info("alloy_agent", "The agent.", ("version",))
    about.add((version,), 1)
    yield about
    yield single("gauge", "alloy_agent_degraded", "1 while it only observes.", bool(degraded))
    yield single("gauge", "alloy_layout_kept", "1 while the node is as wanted.", not not_kept)
    overruns = counter(
        "alloy_loop_overruns", "Ticks that took longer than their period.", ("loop",)
    )
    failures = counter("alloy_loop_failures", "Ticks that failed.", ("loop",))
    for name, (overrun, failed) in loops.items():
        overruns.add((name,), overrun)
        failures.add((name,), failed)
    yield from (overruns, failures)
    usage = resource.getrusage(resource.RUSAGE_SELF)
    cpu_s = usage.ru_utime + usage.ru_stime
    yield single("counter", "alloy_agent_cpu_seconds", "CPU time of the control process.", cpu_s)
    peak = usage.ru_maxrss * 1024  # getrusage(2): kibibytes
    yield single("gauge", "alloy_agent_memory_peak_bytes", "Peak resident memory.", peak)
