"""What the metrics page and the live view show of telemetry."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from alloy_agent.host import clock

if TYPE_CHECKING:
    from alloy_agent.daemon.telemetry.joined import Telemetry
    from alloy_agent.telemetry.exposition import Family
    from alloy_agent.worker import Worker

Collect = Callable[[], Iterable["Family"]]


def collectors(telemetry: Telemetry) -> tuple[tuple[str, Collect], ...]:
    """Return what the metrics page shows of telemetry, by name."""
    from alloy_agent.telemetry import metrics

    def locked(make: Collect) -> Collect:
        def collect() -> list[Family]:
            with telemetry.lock:
                return list(make())

        return collect

    def health() -> Iterable[Family]:
        book = telemetry.book
        return metrics.health_families(
            book.devices, book.catalogue.version, book.kernel_unattributed, clock.boottime_s()
        )

    return (
        ("counters", locked(lambda: metrics.counter_families(telemetry.counters))),
        (
            "windows",
            locked(
                lambda: metrics.window_families(telemetry.load.coverages(), telemetry.headrooms)
            ),
        ),
        ("gates", locked(lambda: metrics.gate_families(telemetry.gates))),
        ("health", locked(health)),
        (
            "metering",
            locked(
                lambda: metrics.usage_families(telemetry.ledger.seconds(), telemetry.ledger.users())
            ),
        ),
        ("samplers", lambda: metrics.sampler_families(samplers(telemetry.workers))),
    )


def samplers(workers: Sequence[Worker]) -> dict[str, tuple[Any, list[tuple[float, int]]]]:
    """Return how each worker samples, with its lateness as upper edge and count."""
    from alloy_agent.worker.board import bucket_ceiling_s

    found = {}
    for worker in workers:
        buckets = [
            (bucket_ceiling_s(number), count)
            for number, count in enumerate(worker.lateness())
            if count
        ]
        found[worker.name] = (worker.sampler(), buckets)
    return found


def sampler_words(workers: Sequence[Worker]) -> dict[str, str]:
    """Return in few words how each worker samples."""
    found = {}
    for worker in workers:
        state = worker.sampler()
        late = state.lateness_p99_s
        p99 = "" if late is None else f", p99 {late * 1e3:.1f} ms late"
        found[worker.name] = f"{state.rate_hz:.3g} Hz {state.policy}{p99}"
    return found
