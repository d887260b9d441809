"""Drains through the brain: asked of it, done by the node, seen by the next decision."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.daemon.harness import WAIT_S, Site, daemon, wait_for

LAYOUT = "version: v1\nlayouts:\n  a:\n    - match: {vendor: nvidia}\n      mig: [3g.20gb]\n"


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """Give a node of two GPUs with one partition each, and the brain that is embedded in it."""
    here = Site(tmp_path, "2xA100-SXM4-40GB")
    layout = tmp_path / "layout.yaml"
    layout.write_text(LAYOUT)
    assert here.run("apply", str(layout), "--yes").returncode == 0
    with daemon(here, "--standalone", ALLOY_NODE_NAME="one"):
        wait_for("the node", lambda: nodes(here))
        yield here


def brain(site: Site, *words: str) -> subprocess.CompletedProcess[str]:
    """Run one command of the brain's to its end."""
    return subprocess.run(
        [sys.executable, "-m", "alloy_brain", words[0],
         "--brain", f"unix:{site.state}/brain.sock", *words[1:]],
        env=site.environment, capture_output=True, text=True, timeout=WAIT_S, check=False,
    )  # fmt: skip


def nodes(site: Site) -> list[dict[str, Any]]:
    """Return the nodes that the brain knows, once it serves."""
    done = brain(site, "nodes", "--json")
    if done.returncode != 0:
        return []
    found: list[dict[str, Any]] = json.loads(done.stdout)["nodes"]
    return [node for node in found if node.get("connected")]


def place(site: Site, request: str) -> subprocess.CompletedProcess[str]:
    """Ask for one partition."""
    return brain(site, "place", "--tenant", "t", "--request", request, "--profile", "3g*")


def test_a_drain_of_the_brain_reaches_the_node_and_the_next_decision(site: Site) -> None:
    """A drained device takes nothing new; a drained node nothing at all; undrained, both do."""
    devices = [d["id"] for d in site.document("devices", "--json")["devices"]]
    drained = brain(site, "drain", "one", devices[0], "--reason", "a fan is loud")
    assert drained.returncode == 0, drained.stderr
    assert f"one/{devices[0]} is drained (device)" in drained.stdout
    assert f"{devices[0]}/3g.20gb" in drained.stdout
    first = wait_for("a place", lambda: ok(place(site, "r-1")))
    assert devices[1] in first.stdout
    whole = json.loads(brain(site, "drain", "one", "--session", "all", "--json").stdout)
    assert (whole["schema"], whole["node"], whole["drain"]["scope"]) == (
        "alloy.drain/v1", "one", "node",
    )  # fmt: skip
    none = place(site, "r-2")
    assert none.returncode == 1
    stale = brain(site, "undrain", "one", "--session", "not-mine")
    assert stale.returncode == 1
    assert "session" in stale.stderr
    assert brain(site, "undrain", "one", "--session", "all").returncode == 0
    back = brain(site, "undrain", "one", devices[0])
    assert back.stdout.strip() == f"one/{devices[0]} takes new work again"
    second = wait_for("a place", lambda: ok(place(site, "r-3")))
    assert devices[0] in second.stdout


def ok(done: subprocess.CompletedProcess[str]) -> subprocess.CompletedProcess[str] | None:
    """Return a command that was done; None: not yet."""
    return done if done.returncode == 0 else None


def test_what_cannot_be_drained_is_one_line(site: Site) -> None:
    """An unknown node, and a subject that the node does not have, are refused with the reason."""
    unknown = brain(site, "drain", "two")
    assert unknown.returncode == 1
    assert "NOT_FOUND: node two: known are one" in unknown.stderr
    nothing = brain(site, "drain", "one", "GPU-nowhere")
    assert nothing.returncode == 1
    assert "no device, partition or hive of that name" in nothing.stderr
    assert nothing.stderr.count("\n") == 1
    back = brain(site, "undrain", "one", "GPU-nowhere")
    assert back.returncode == 1
    assert "no device, partition or hive of that name" in back.stderr
    assert brain(site, "nodes", "one").returncode == 0
    none = brain(site, "nodes", "two")
    assert none.returncode == 1
    assert none.stderr.strip() == "alloy-brain: NOT_FOUND: node two: known are one"
