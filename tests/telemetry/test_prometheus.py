"""What Prometheus makes of a real agent: every board's live page, every rule, every query."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from alloy_agent.silicon.boards import BOARDS
from tests.daemon.harness import Site, daemon, wait_for

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
RULES = DEPLOY / "prometheus/alloy.rules.yaml"
PROMTOOL = shutil.which("promtool") or ""
needs_promtool = pytest.mark.skipif(
    not PROMTOOL, reason="no promtool here: apt-get install prometheus"
)
LAYOUT = """version: v1
layouts:
  some:
    - match: {model: "H100-SXM5-80GB"}
      mig: [3g.40gb, 2g.20gb, 1g.10gb]
"""
# Families that are on a page only once something happened, or somebody shares a device.
LATER = {
    "alloy_device_fault_events",
    "alloy_device_open_fault",
    "alloy_probe_stalled_seconds",
    "alloy_source_resets",
    "alloy_share_loss_ratio",
    "alloy_share_budget_ratio",
    "alloy_share_lent_ratio",
    "alloy_share_verdict",
    "alloy_share_bypasses",
    "alloy_share_tenant_launches",
}


def asked() -> set[str]:
    """Return every metric name that the dashboard and the rules ask for."""
    board = json.loads((DEPLOY / "grafana/alloy-agent.json").read_text())
    texts = [t["expr"] for p in board["panels"] for t in p.get("targets", ())]
    texts += [str(v.get("query", "")) + str(v.get("definition", "")) for v in _variables(board)]
    texts += re.findall(r"expr: (?:\|\n)?((?:.|\n)*?)(?=\n +(?:for|labels):)", RULES.read_text())
    return {name for text in texts for name in re.findall(r"\balloy_[a-z0-9_]+", text)}


def _variables(board: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = board["templating"]["list"]
    return found


def families(page: str) -> dict[str, str]:
    """Return the type of every family of a page, by its name without `_total`."""
    found = re.findall(r"^# TYPE (\S+) (\S+)$", page, re.MULTILINE)
    return {name.removesuffix("_total").removesuffix("_info"): kind for name, kind in found}


def bare(name: str) -> str:
    """Return a name as its family is called."""
    return re.sub(r"_(total|info|bucket|sum|count)$", "", name)


GPUS = tuple(f"1x{name}" for name in BOARDS if "." not in name)
INSTANCES = tuple(name for name in BOARDS if "." in name)  # a node is one of them


def clean(text: str) -> None:
    """Fail where promtool has anything to say of a page."""
    done = subprocess.run(
        [PROMTOOL, "check", "metrics"], input=text.encode(), capture_output=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, b""), done.stderr.decode()


@needs_promtool
def test_the_live_page_of_every_gpu_is_clean_and_has_what_is_asked_for(tmp_path: Path) -> None:
    """One agent with one of each: no complaint, and every name in queries and rules is there."""
    site = Site(tmp_path, *GPUS, "trn2.3xlarge")
    layout = tmp_path / "layout.yaml"
    layout.write_text(LAYOUT)
    environment = {"ALLOY_LAYOUT_FILE": str(layout), "ALLOY_METRICS_SERIES_MAX": "50000"}
    with daemon(site, **environment) as running:
        piece = wait_for(
            "the partition",
            lambda: next((p["id"] for p in site.partitions() if p["profile"] == "3g.40gb"), ""),
        )
        tenant = subprocess.Popen(
            site.command("exec", piece, "--", "sleep", "3600"), env=site.environment
        )

        def page() -> str:
            status, text = running.get("metrics")
            assert status == 200
            whole = 'profile="3g.40gb"' in text and "alloy_check_verdict{" in text
            sampled = "alloy_partition_headroom_p95_ratio{" in text
            sampled = sampled and "alloy_metering_unobserved_seconds_total{" in text
            return text if whole and sampled else ""

        try:
            text: str = wait_for("a full page", page, 240)
        finally:
            tenant.kill()
            tenant.wait(60)
        assert len(set(re.findall(r'model="([^"]+)"', text))) == len(GPUS) + 1
        clean(text)
        request = urllib.request.Request(  # noqa: S310 - our own page
            running.url("metrics"), headers={"Accept": "application/openmetrics-text"}
        )
        with urllib.request.urlopen(request, timeout=20) as answer:  # noqa: S310
            assert answer.read().endswith(b"# EOF\n")
    missing = {bare(name) for name in asked()} - set(families(text)) - LATER
    assert missing == set()


@needs_promtool
@pytest.mark.slow
@pytest.mark.parametrize("instance", INSTANCES)
def test_the_live_page_of_every_neuron_instance_is_clean(instance: str, tmp_path: Path) -> None:
    """Each by itself, since a node is one instance."""
    with daemon(Site(tmp_path, instance)) as running:
        clean(
            wait_for(
                "the page",
                lambda: t if "alloy_check_verdict{" in (t := running.get("metrics")[1]) else "",
                240,
            )
        )


def test_what_comes_later_is_made_by_the_exporter() -> None:
    """A family that is listed as coming later stands in the source that makes it."""
    root = DEPLOY.parent / "alloy_agent"
    sources = (root / "telemetry/metrics.py", root / "daemon/shareviews.py")
    text = "".join(path.read_text() for path in sources)
    assert not {name for name in LATER if f'"{name}"' not in text}


@needs_promtool
def test_every_alert_is_tested_to_fire_and_not_to() -> None:
    """No rule without a unit test; promtool runs them all."""
    alerts = set(re.findall(r"- alert: (\w+)", RULES.read_text()))
    tests = (DEPLOY / "prometheus/alloy.tests.yaml").read_text()
    cases = re.split(r"- eval_time:", tests)[1:]
    fires = {re.search(r"alertname: (\w+)", case)[1] for case in cases if "exp_alerts" in case}  # type: ignore[index]
    assert fires == alerts
    for words in (("check", "rules", RULES.name), ("test", "rules", "alloy.tests.yaml")):
        done = subprocess.run(
            [PROMTOOL, *words], cwd=RULES.parent, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_every_query_of_the_dashboard_is_one(tmp_path: Path) -> None:
    """Each expression, with Grafana's variables filled in, is PromQL that promtool accepts."""
    board = json.loads((DEPLOY / "grafana/alloy-agent.json").read_text())
    queries = [t["expr"] for p in board["panels"] for t in p.get("targets", ())]
    assert len(queries) > 30
    filled = [q.replace("$__rate_interval", "5m").replace("$", "") for q in queries]
    rules = "".join(
        f"      - record: r{n}\n        expr: {json.dumps(q)}\n" for n, q in enumerate(filled)
    )
    path = tmp_path / "queries.yaml"
    path.write_text(f"groups:\n  - name: q\n    rules:\n{rules}")
    done = subprocess.run(
        [PROMTOOL, "check", "rules", str(path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
