"""Turns of instances within the calls that a tick may make, on a clock that the test moves."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from alloy_agent.backends.nvidia.signals import CALLS_MAX, CHECK_S, Sampler, specs_of
from alloy_agent.config import Settings
from alloy_agent.model import Quality
from tests.backends.nvidia.test_backend import ACTIVE, hosted
from tests.fakes.nvml.host import NvidiaHost, Sink

USED = "alloy_partition_memory_used_bytes"
TICK_S = 0.1


class Watch:
    """A full GPU sampled at ten ticks a second, and when each slot got a new value."""

    def __init__(self, directory: Path, calls_max: int, instances: int) -> None:
        self.host, ident = hosted(directory)
        self.host.mig(ident)
        self.host.make(ident, *(f"1g.10gb@{start}" for start in range(instances)))
        self.now_s = 1000.0
        self.host.library._now = lambda: self.now_s  # type: ignore[method-assign]
        partitions = self.host.backend.observe(ident).partitions
        gpu = self.host.backend._gpu(ident)
        self.sampler = Sampler(gpu, partitions, calls_max, clock=lambda: self.now_s)
        self.most = 0
        self.renewed: dict[tuple[str, str], list[float]] = {}

    def run(self, ticks: int) -> None:
        """Sample so often, and note what was renewed."""
        sink = Sink()
        for number in range(ticks):
            before = calls(self.host)
            self.sampler.fill(sink)
            if number:  # the first reads everything once
                self.most = max(self.most, calls(self.host) - before)
            for slot, spec in enumerate(self.sampler.specs):
                at_s = sink.slots[slot][2]
                times = self.renewed.setdefault((spec.name, spec.subject), [])
                if at_s is not None and (not times or times[-1] != at_s):
                    times.append(at_s)
            self.now_s += TICK_S

    def gaps(self, name: str) -> list[list[float]]:
        """Return the times between renewals of each subject's signal."""
        return [
            [b - a for a, b in itertools.pairwise(times)]
            for (found, _), times in self.renewed.items()
            if found == name
        ]


def calls(host: NvidiaHost) -> int:
    """Return how many calls the library has had."""
    return sum(host.library.counts.values())


@pytest.mark.parametrize("instances", [1, 2, 4, 7])
@pytest.mark.parametrize("calls_max", [CALLS_MAX, 16, 32])
def test_instances_take_turns_fairly_within_the_calls(
    calls_max: int, instances: int, tmp_path: Path
) -> None:
    """No tick makes more calls, no instance has a turn twice before each had one, none waits."""
    watch = Watch(tmp_path, calls_max, instances)
    watch.run(80)
    assert watch.most <= calls_max
    gaps = watch.gaps(ACTIVE)
    assert len(gaps) == instances
    announced = {s.refresh_period_s for s in watch.sampler.specs if s.name == ACTIVE}
    (period_s,) = announced
    assert period_s is not None
    for row in gaps:
        assert max(row) <= period_s + 2 * TICK_S
        assert sum(row) / len(row) <= period_s + TICK_S / 2
    turns = [len(row) for row in gaps]
    assert max(turns) - min(turns) <= 1
    assert all(max(row) <= 1.5 for row in watch.gaps(USED))


def test_more_calls_buy_the_rate_of_the_hardware(tmp_path: Path) -> None:
    """With 32 calls a tick each of seven instances is renewed every 100 ms, as GPM allows."""
    watch = Watch(tmp_path, 32, 7)
    watch.run(40)
    assert all(max(row) <= TICK_S * 1.01 for row in watch.gaps(ACTIVE))
    assert CHECK_S <= TICK_S


def test_the_period_announced_is_what_the_calls_allow(tmp_path: Path) -> None:
    """A full GPU announces 0.4 s with eight calls, and 0.1 s with what its owner allows."""
    host, ident = hosted(tmp_path)
    host.mig(ident)
    pieces = host.make(ident, *(f"1g.10gb@{start}" for start in range(7)))
    gpu = host.backend._gpu(ident)
    periods = []
    for calls_max in (8, 32):
        found = {s.refresh_period_s for s in specs_of(gpu, pieces, calls_max) if s.name == ACTIVE}
        periods += sorted(period or 0.0 for period in found)
    assert periods == pytest.approx([0.4, 0.1])


def test_the_setting_reaches_the_backend(tmp_path: Path) -> None:
    """`nvidia.calls_per_tick` is 8 unless set, and the backend opened with it keeps to it."""
    assert Settings().nvidia.calls_per_tick == CALLS_MAX
    host = NvidiaHost(tmp_path, "1xH100-SXM5-80GB")
    host.options["calls_per_tick"] = 24
    assert host.open().calls_max == 24


def test_links_are_counted_in_bytes_and_a_gpu_without_has_none(tmp_path: Path) -> None:
    """Sent and received data of all links in bytes, errors of all kinds in one; else absent."""
    host, ident = hosted(tmp_path)
    found = host.sampled(ident)
    sent, received, errors = (
        found[f"alloy_device_nvlink_{name}_total", ident]
        for name in ("sent_bytes", "received_bytes", "errors")
    )
    assert (sent[1], received[1], errors[:2]) == (
        Quality.VALUE,
        Quality.VALUE,
        (8.0, Quality.VALUE),
    )
    assert sent[0] == pytest.approx(2 * received[0], rel=0.01)
    plain, ident = hosted(tmp_path / "plain", "1xA30-24GB")
    qualities = {value[1] for (name, _), value in plain.sampled(ident).items() if "nvlink" in name}
    assert qualities == {Quality.NOT_SUPPORTED}
