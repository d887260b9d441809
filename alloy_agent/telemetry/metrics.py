"""The Prometheus page: collectors that make metric families, each isolated from the others.

A collector that raises costs its own families and shows as `alloy_collector_up{collector="..."} 0`;
the rest of the page is served. Collectors read values that are already in memory, never a device,
so that a scrape neither waits for the sampler nor makes it wait.

Rules that stay true in here:

* A number that could not be read has no sample; there is never a zero in its place.
* Identities that re-appear carry their generation, so that two incarnations are two series.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from alloy_agent.model import (
    AuditResult,
    Condition,
    Quality,
    Signal,
    Snapshot,
    Tier,
    Verdict,
)

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

LOG = logging.getLogger(__name__)

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Collect = Callable[[], Iterable["Metric"]]


class MetricsPage:
    """A page of named collectors, rendered on demand."""

    def __init__(self) -> None:
        self._collectors: dict[str, Collect] = {}

    def add(self, name: str, collect: Collect) -> None:
        """Add a collector; its name is the label of `alloy_collector_up`."""
        self._collectors[name] = collect

    def render(self) -> bytes:
        """Return the page in the text format of Prometheus. Never raises."""
        from prometheus_client.metrics_core import GaugeMetricFamily

        parts: list[bytes] = []
        up = GaugeMetricFamily(
            "alloy_collector_up", "Whether a collector answered this scrape.", labels=["collector"]
        )
        for name, collect in self._collectors.items():
            part = _render_one(name, collect)
            up.add_metric([name], 0.0 if part is None else 1.0)
            parts.append(part or b"")
        parts.append(_text([up]))
        return b"".join(parts)


class _Families:
    """A registry of the families of one collector, as `generate_latest` takes it."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = list(families)

    def collect(self) -> Iterable[Metric]:
        """Return the families."""
        return self._families


def _text(families: Iterable[Metric]) -> bytes:
    from prometheus_client import generate_latest

    return generate_latest(_Families(families))  # only collect() is asked


def _render_one(name: str, collect: Collect) -> bytes | None:
    """Return one collector's part of the page, or None if it failed."""
    try:
        return _text(collect())
    except Exception:
        LOG.exception("collector_failed", extra={"collector": name})
        return None


def snapshot_families(snapshot: Snapshot | None, now_s: float) -> Iterator[Metric]:
    """Yield what the node looks like: devices, conditions, partitions, workers, faults."""
    from prometheus_client.metrics_core import GaugeMetricFamily

    if snapshot is None:
        return
    yield GaugeMetricFamily(
        "alloy_snapshot_age_seconds",
        "Age of the newest observation of the node.",
        value=max(0.0, now_s - snapshot.taken_at_s),
    )
    yield GaugeMetricFamily(
        "alloy_snapshot_sequence", "Number of the newest observation.", value=snapshot.sequence
    )
    yield from _device_families(snapshot)
    yield from _partition_families(snapshot)
    yield from _worker_families(snapshot)


def _device_families(snapshot: Snapshot) -> Iterator[Metric]:
    from prometheus_client.metrics_core import GaugeMetricFamily, InfoMetricFamily

    info = InfoMetricFamily(
        "alloy_device", "One device.", labels=["device", "vendor", "model", "simulated", "driver"]
    )
    condition = GaugeMetricFamily(
        "alloy_device_condition",
        "1 for the condition that a device is in.",
        labels=["device", "condition"],
    )
    fault = GaugeMetricFamily(
        "alloy_device_fault", "1 for each fault of a device.", labels=["device", "kind"]
    )
    for device in snapshot.devices:
        simulated = str(device.simulated).lower()
        labels = [device.id, device.vendor, device.model, simulated, device.driver or ""]
        info.add_metric(labels, {})
        for state in Condition:
            condition.add_metric([device.id, state], float(device.condition is state))
    for key in dict.fromkeys((f.device, f.kind) for f in snapshot.faults):
        fault.add_metric(list(key), 1.0)
    yield from (info, condition, fault)


def _partition_families(snapshot: Snapshot) -> Iterator[Metric]:
    from prometheus_client.metrics_core import GaugeMetricFamily, InfoMetricFamily

    labels = ["partition", "generation"]
    info = InfoMetricFamily(
        "alloy_partition",
        "One partition.",
        labels=[*labels, "device", "profile", "tenant", "managed"],
    )
    memory = GaugeMetricFamily(
        "alloy_partition_memory_bytes", "Memory that a partition has.", labels=labels
    )
    for p in snapshot.partitions:
        key = [p.id, str(p.generation)]
        managed = str(p.managed).lower()
        info.add_metric([*key, p.device, p.profile, p.tenant or "", managed], {})
        if p.memory_bytes is not None:
            memory.add_metric(key, float(p.memory_bytes))
    yield from (info, memory)


def _worker_families(snapshot: Snapshot) -> Iterator[Metric]:
    from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily

    up = GaugeMetricFamily(
        "alloy_worker_up", "Whether the process of a backend runs.", labels=["backend"]
    )
    restarts = CounterMetricFamily(
        "alloy_worker_restarts",
        "Times that a backend's process was started again.",
        labels=["backend"],
    )
    for worker in snapshot.workers:
        up.add_metric([worker.backend], float(worker.alive))
        restarts.add_metric([worker.backend], float(worker.restarts))
    yield from (up, restarts)


def audit_families(audit: AuditResult | None, now_s: float) -> Iterator[Metric]:
    """Yield the verdicts and tiers of the newest audit."""
    from prometheus_client.metrics_core import GaugeMetricFamily

    if audit is None:
        return
    yield GaugeMetricFamily(
        "alloy_audit_age_seconds",
        "Age of the newest audit.",
        value=max(0.0, now_s - audit.taken_at_s),
    )
    verdict = GaugeMetricFamily(
        "alloy_audit_verdict", "1 for the verdict of the newest audit.", labels=["verdict"]
    )
    for value in Verdict:
        verdict.add_metric([value], float(audit.verdict is value))
    checks = GaugeMetricFamily(
        "alloy_check_verdict",
        "1 for the verdict of a check on a subject.",
        labels=["check", "subject", "verdict"],
    )
    tiers = GaugeMetricFamily(
        "alloy_partition_tier",
        "1 for the tier that evidence proves for a partition.",
        labels=["partition", "generation", "tier"],
    )
    judgements = list(audit.node_judgements)
    for report in audit.partitions:
        judgements.extend(report.judgements)
        for tier in Tier:
            labels = [report.partition.id, str(report.partition.generation), tier]
            tiers.add_metric(labels, float(report.tier is tier))
    for judgement in judgements:
        checks.add_metric([judgement.check, judgement.subject, judgement.verdict], 1.0)
    yield from (verdict, checks, tiers)


def signal_families(signals: Sequence[Signal], now_s: float) -> Iterator[Metric]:
    """Yield one family for each signal name, with a sample where there is a value."""
    from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily

    families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
    age = GaugeMetricFamily(
        "alloy_signal_age_seconds", "Age of the oldest value of a subject.", labels=["subject"]
    )
    ages: dict[str, float] = {}
    for signal in signals:
        if signal.quality is not Quality.VALUE or signal.value is None:
            continue
        spec = signal.spec
        family = families.get(spec.name)
        if family is None:
            kind = CounterMetricFamily if spec.counter else GaugeMetricFamily
            family = kind(
                spec.name, f"{spec.name} from {spec.source or 'its backend'}.", labels=["subject"]
            )
            families[spec.name] = family
        family.add_metric([spec.subject], signal.value)
        taken = signal.source_time_s if signal.source_time_s is not None else signal.read_time_s
        ages[spec.subject] = max(ages.get(spec.subject, 0.0), now_s - taken)
    for subject, value in ages.items():
        age.add_metric([subject], max(0.0, value))
    yield from families.values()
    yield age


def agent_families(
    version: str, loops: Mapping[str, tuple[int, int]], degraded: str, not_kept: str
) -> Iterator[Metric]:
    """Yield how the agent itself is doing.

    Args:
        version: Of the agent.
        loops: Overruns and failed ticks by loop.
        degraded: Why nothing is changed, "" when changes are made.
        not_kept: Why the layout is not kept, "" when it is.
    """
    import resource

    from prometheus_client.metrics_core import (
        CounterMetricFamily,
        GaugeMetricFamily,
        InfoMetricFamily,
    )

    info = InfoMetricFamily("alloy_agent", "The agent.", labels=["version"])
    info.add_metric([version], {})
    yield info
    yield GaugeMetricFamily(
        "alloy_agent_degraded", "1 while the agent observes only.", value=float(bool(degraded))
    )
    yield GaugeMetricFamily(
        "alloy_layout_kept",
        "1 while the node is as its layout wants it.",
        value=float(not not_kept),
    )
    overruns = CounterMetricFamily(
        "alloy_loop_overruns", "Ticks that took longer than their period.", labels=["loop"]
    )
    failures = CounterMetricFamily("alloy_loop_failures", "Ticks that failed.", labels=["loop"])
    for name, (overrun, failed) in loops.items():
        overruns.add_metric([name], float(overrun))
        failures.add_metric([name], float(failed))
    yield from (overruns, failures)
    usage = resource.getrusage(resource.RUSAGE_SELF)
    yield CounterMetricFamily(
        "alloy_agent_cpu_seconds",
        "CPU time of the control process.",
        value=usage.ru_utime + usage.ru_stime,
    )
    yield GaugeMetricFamily(
        "alloy_agent_memory_peak_bytes",
        "Peak resident memory of the control process.",
        value=float(usage.ru_maxrss * 1024),  # getrusage(2): kibibytes
    )
