"""The page: identities, absence, caps, isolation, both forms, DCGM's names, dashboards, alerts."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import threading
from collections.abc import Iterable
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as parse_openmetrics,
)
from prometheus_client.parser import text_string_to_metric_families as parse

from alloy_agent.daemon import shareviews
from alloy_agent.model import Quality, Scope, Signal, Snapshot
from alloy_agent.telemetry import catalogue, dcgm, exposition, gates, health, metrics
from alloy_agent.telemetry.exposition import Family
from alloy_agent.telemetry.metrics import MetricsPage
from alloy_agent.worker.board import SamplerState
from tests.telemetry.world import at, device, piece, signal, snapshot

DEPLOY = Path(__file__).parents[2] / "deploy"
PIECE = "GPU-0/1g@0"


def active(value: float | None, quality: Quality = Quality.VALUE, read_s: float = 9.9) -> Signal:
    """Return the activity of the one partition."""
    one = signal("alloy_partition_compute_active_ratio", value, subject=PIECE, read_s=read_s)
    spec = msgspec.structs.replace(one.spec, scope=Scope.PARTITION)
    return msgspec.structs.replace(one, spec=spec, quality=quality)


def text(families: Iterable[Family]) -> str:
    """Return families as the page shows them."""
    return exposition.render(families, 10_000, openmetrics=False)[0]


def full_page(node: Snapshot, series_max: int = metrics.SERIES_MAX) -> MetricsPage:
    """Return a page with every collector of the daemon."""
    table = catalogue.load()
    state = health.fold(
        health.DeviceHealth(device=device().id),
        health.Event(code="xid:109", time_s=1.0),
        table,
        at(1.0),
    )
    stalled = health.probe(state, (("probe:stalled", "no answer"),), table, at(2.0))
    judged = gates.judge({}, {"health": gates.health("xid:109")}, 0.0)
    sampler = (SamplerState(policy="fifo"), [(0.0001, 5), (0.5, 1)])
    page = MetricsPage(series_max)
    page.add("agent", lambda: metrics.agent_families("1", {"observe": (0, 0)}, "", ""))
    page.add("node", lambda: metrics.snapshot_families(node, 10.0))
    page.add(
        "signals",
        lambda: metrics.signal_families(
            [
                active(0.5),
                signal("alloy_device_power_watts", 70.0, read_s=9.9),
                signal("alloy_device_temperature_headroom_celsius", 50.0, read_s=9.9),
            ],
            10.0,
            {PIECE: 1},
        ),
    )
    page.add("gates", lambda: metrics.gate_families({"GPU-0": judged}))
    page.add("health", lambda: metrics.health_families({"GPU-0": stalled}, "1", 0, 10.0))
    page.add("metering", lambda: metrics.usage_families({(PIECE, 1, "acme"): (1.0, 2.0, 3.0)}))
    page.add("samplers", lambda: metrics.sampler_families({"fake": sampler}))
    return page


def test_an_absent_value_has_no_sample() -> None:
    """No zero stands where there is no value; what is missing is counted by why."""
    page = text(
        metrics.signal_families(
            [active(None, Quality.NOT_SUPPORTED), active(0.4, read_s=1.0)], 10.0, {PIECE: 1}
        )
    )
    assert "alloy_partition_compute_active_ratio{" not in page
    assert 'alloy_signal_absent{quality="not_supported"} 1.0' in page
    assert 'alloy_signal_absent{quality="stale"} 1.0' in page
    age = 'signal="alloy_partition_compute_active_ratio",subject="GPU-0/1g@0"} 9\n'
    assert age in page


def test_a_partition_that_is_gone_or_made_anew_is_another_series() -> None:
    """Not on the next page once it is gone; under its new generation when it is made anew."""
    before = text(metrics.signal_families([active(0.5)], 10.0, {PIECE: 1}))
    again = text(metrics.signal_families([active(0.5)], 10.0, {PIECE: 2}))
    gone = text(metrics.signal_families([active(0.5)], 10.0, {}))
    assert 'partition="GPU-0/1g@0",generation="1"} 0.5' in before
    assert 'partition="GPU-0/1g@0",generation="2"} 0.5' in again
    assert "GPU-0/1g@0" not in gone


def test_both_forms_parse_and_mean_the_same() -> None:
    """Text and OpenMetrics have the same samples, and the parsers of Prometheus take them."""
    page = full_page(snapshot(piece()))
    plain = {
        (s.name, tuple(sorted(s.labels.items()))) for f in parse(page.render().decode())
        for s in f.samples
    }  # fmt: skip
    opened = {
        (s.name, tuple(sorted(s.labels.items())))
        for f in parse_openmetrics(page.render(openmetrics=True).decode())  # type: ignore[no-untyped-call]
        for s in f.samples
    }
    assert plain == opened
    assert any(name == "alloy_device_fault_events_total" for name, _ in plain)


@given(st.text(max_size=40), st.floats())
def test_any_label_and_number_can_be_read_back(label: str, value: float) -> None:
    """Quotes, line ends and odd characters in a name neither break the page nor get lost."""
    family = exposition.gauge("alloy_test", "Test.", ("name",))
    family.add((label,), value)
    (found,) = parse(text([family]))
    (sample,) = found.samples
    assert sample.labels["name"] == label
    assert sample.value == value or (math.isnan(sample.value) and math.isnan(value))


def test_the_cap_cuts_loudly() -> None:
    """Over the cap series are left out, counted, and the page's own words are always there."""
    pieces = tuple(piece(f"GPU-0/1g@{n}") for n in range(200))
    page = full_page(snapshot(*pieces), series_max=100)
    body = page.render().decode()
    dropped = re.search(r"alloy_scrape_series_dropped_total (\d+)", body)
    assert dropped is not None
    assert int(dropped[1]) > 100
    assert "alloy_scrape_series 100.0" in body
    assert 'alloy_collector_up{collector="signals"} 1.0' in body


def test_a_collector_that_fails_every_second_time_costs_itself_only() -> None:
    """The rest is served each time, and each failure is counted."""
    page = full_page(snapshot(piece()))
    calls = []

    def flaky() -> list[Family]:
        calls.append(1)
        if len(calls) % 2:
            raise RuntimeError("no answer")
        return [exposition.single("gauge", "alloy_flaky", "Test.", 1.0)]

    page.add("flaky", flaky)
    bodies = [page.render().decode() for _ in range(4)]
    ups = [1 if 'alloy_collector_up{collector="flaky"} 1.0' in body else 0 for body in bodies]
    assert ups == [0, 1, 0, 1]
    assert all("alloy_device_info" in body for body in bodies)
    assert 'alloy_collector_failures_total{collector="flaky"} 2.0' in bodies[-1]


def test_a_storm_of_scrapes_costs_one_page_at_a_time() -> None:
    """Twenty scrapers at once share pages instead of making one each."""
    page = full_page(snapshot(piece()))
    page._reuse_s = 60.0
    threads = [threading.Thread(target=page.render) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert page.scrapes == 1


def test_descriptions_stand_in_info_alone() -> None:
    """No series but `_info` carries a model, a profile, a driver or a UUID."""
    for family in parse(full_page(snapshot(piece())).render().decode()):
        for sample in family.samples:
            if not sample.name.endswith("_info"):
                assert not {"model", "profile", "driver", "uuid"} & sample.labels.keys(), sample


def test_the_histogram_of_lateness_is_cumulative() -> None:
    """Buckets grow, the last holds all, and the sum is there."""
    page = text(metrics.sampler_families({"fake": (SamplerState(), [(0.0001, 5), (0.5, 1)])}))
    assert 'lateness_seconds_bucket{backend="fake",le="0.0001"} 5\n' in page
    assert 'lateness_seconds_bucket{backend="fake",le="+Inf"} 6\n' in page
    assert 'lateness_seconds_count{backend="fake"} 6\n' in page


def test_dcgms_names_have_its_units() -> None:
    """MiB, mJ and ratios under DCGM's names; a device's power is not copied onto instances."""
    node = snapshot(piece())
    values = [
        active(0.5),
        signal("alloy_device_power_watts", 70.0, read_s=9.9),
        signal("alloy_device_memory_used_bytes", 600.0 * 1048576, read_s=9.9),
    ]
    page = text(dcgm.families(node, values, {}, "n1", 10.0))
    assert re.search(r'DCGM_FI_DEV_FB_USED\{.*GPU_I_PROFILE="".*\} 600.0', page)
    assert re.search(r'DCGM_FI_PROF_GR_ENGINE_ACTIVE\{.*GPU_I_PROFILE="1g".*\} 0.5', page)
    assert page.count("DCGM_FI_DEV_POWER_USAGE{") == 1
    assert "alloy_" not in page


def _known_names() -> set[str]:
    """Return every name that a page can have, from the sources that make them."""
    made = "".join(Path(str(m.__file__)).read_text() for m in (metrics, exposition, shareviews))
    names = set(re.findall(r'"(alloy_[a-z0-9_]+)"', made))
    names |= {f"alloy_agent_{n}" for n in re.findall(r'\("([a-z_]+)", "[A-Z][^"]+", "', made)}
    from alloy_agent.backends.fake import sampling

    names |= set(re.findall(r'"(alloy_[a-z0-9_]+)"', Path(sampling.__file__).read_text()))
    suffixes = ("", "_total", "_info", "_bucket", "_sum", "_count")
    return {name + suffix for name in names for suffix in suffixes}


def _expressions() -> list[str]:
    board = json.loads((DEPLOY / "grafana/alloy-agent.json").read_text())
    found = [t["expr"] for p in board["panels"] for t in p.get("targets", ())]
    rules = (DEPLOY / "prometheus/alloy.rules.yaml").read_text()
    return found + re.findall(r"expr: (.*)", rules) + [rules]


def test_dashboard_and_alerts_ask_only_for_what_is_served() -> None:
    """Every metric name in the dashboard and in the rules is one that the agent can have."""
    known = _known_names()
    asked = {name for e in _expressions() for name in re.findall(r"\balloy_[a-z0-9_]+", e)}
    assert asked
    assert not asked - known


def test_the_dashboard_is_whole() -> None:
    """Unique ids, no overlap, a data source to choose, a unit and an expression on each panel."""
    board = json.loads((DEPLOY / "grafana/alloy-agent.json").read_text())
    panels = board["panels"]
    assert len({p["id"] for p in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24
        taken |= cells
        if panel["type"] != "row":
            assert panel["fieldConfig"]["defaults"]["unit"]
            assert all(target["expr"] for target in panel["targets"])
    assert {v["name"] for v in board["templating"]["list"]} == {"datasource", "instance", "tenant"}


def test_prometheus_own_tool_finds_nothing_wrong() -> None:
    """`promtool check metrics`, `check rules` and `test rules` are clean."""
    tool = shutil.which("promtool")
    if tool is None:
        pytest.skip("promtool is not installed (Debian: apt-get install prometheus)")
    page = full_page(snapshot(piece())).render()
    lint = subprocess.run([tool, "check", "metrics"], input=page, capture_output=True, check=False)
    assert lint.returncode == 0, lint.stderr.decode()
    for arguments in (
        ("check", "rules", "alloy.rules.yaml"),
        ("test", "rules", "alloy.tests.yaml"),
    ):
        done = subprocess.run(
            [tool, *arguments], cwd=DEPLOY / "prometheus", capture_output=True, check=False
        )
        assert done.returncode == 0, done.stdout.decode() + done.stderr.decode()
