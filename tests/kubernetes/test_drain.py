"""Draining a node whose pods have claims, from the command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.apiserver import FakeApiServer
from tests.fakes.kubelet import FakeKubelet
from tests.kubernetes.test_daemon import agent_of, allocate, until, whole


@pytest.fixture
def root() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="alloy-n-") as folder:
        yield Path(folder)


def command(root: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "alloy_agent", "--config", str(root / "agent.yaml"), *words],
        capture_output=True,
        text=True,
        timeout=60,
        env={k: v for k, v in os.environ.items() if not k.startswith("ALLOY_")},
        check=False,
    )


def taints(server: FakeApiServer) -> set[str]:
    found: Any = whole(server) or {}
    devices = [d for pool in found.values() for s in pool for d in s["spec"].get("devices", ())]
    return {taint["key"] for device in devices for taint in device.get("taints", ())}


def test_a_node_is_drained_over_a_restart_and_back(root: Path) -> None:
    """Tainted, new claims refused, the holder named, kept over a restart, and taken back whole."""
    with FakeApiServer() as server, FakeKubelet(root) as kubelet:
        with agent_of(root, server) as agent:
            kubelet.wait(timeout_s=40)
            pool = sorted(until(lambda: whole(server)))[0]
            old = allocate(server, "old", pool, "1g10gb-6-1")
            assert kubelet.prepare(old)["old"].error == ""
            done = command(root, "drain", "--reason", "driver update", "--wait", "0.1")
            assert done.returncode == 1, done.stderr
            assert "k8s/default/old" in done.stdout
            until(lambda: "gpu.alloy.dev/draining" in taints(server))
            new = allocate(server, "new", pool, "1g10gb-5-1")
            assert "drained" in kubelet.prepare(new)["new"].error
            agent.stop()
        with agent_of(root, server):
            until(lambda: len(kubelet.endpoints) == 1)
            until(lambda: "drained" in kubelet.prepare(new)["new"].error)
            assert kubelet.unprepare(old)["old"].error == ""
            done = command(root, "drain", "--json", "--wait", "20")
            assert done.returncode == 0, done.stderr
            assert json.loads(done.stdout)["inside"] == {}
            assert command(root, "undrain").stdout == "the node takes new work again\n"
            until(lambda: "gpu.alloy.dev/draining" not in taints(server))
            assert kubelet.prepare(new)["new"].error == ""
            assert command(root, "undrain").stdout == "the node was not drained\n"


def test_without_a_daemon_a_drain_is_refused(root: Path) -> None:
    """One line with the cure."""
    (root / "agent.yaml").write_text(f"state_dir: {root}/state\nsocket_path: {root}/agent.sock\n")
    done = command(root, "drain")
    assert done.returncode == 2
    assert f"start it: alloy-agent --state-dir {root}/state run" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_drain_says_why_and_till_when_in_taints_and_in_the_nodes_condition(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One device: its pool alone has the reason as taint, the node says whose and until when."""
    monkeypatch.setenv("ALLOY_KUBERNETES_NODE_CONDITION", "true")
    with FakeApiServer() as server, FakeKubelet(root) as kubelet:
        server.put("/api/v1/nodes/node-a", {"metadata": {"name": "node-a", "uid": "u"}})

        def condition() -> dict[str, Any]:
            node = server.objects["/api/v1/nodes/node-a"]
            found = node.get("status", {}).get("conditions", ())
            return next((c for c in found if c["type"] == "AlloyAcceleratorDrained"), {})

        def reasons() -> dict[str, str]:
            return {
                pool: taint["value"]
                for pool, parts in (whole(server) or {}).items()
                for part in parts
                for device in part["spec"].get("devices", ())
                for taint in device.get("taints", ())
                if taint["key"] == "gpu.alloy.dev/draining"
            }

        with agent_of(root, server):
            kubelet.wait(timeout_s=40)
            until(lambda: whole(server))
            until(lambda: condition().get("status") == "False")
            listed = json.loads(command(root, "devices", "--json").stdout)["devices"]
            gpu = listed[0]["id"]
            done = command(root, "drain", gpu, "--reason", "fan 2: replace!", "--for", "3h")
            assert done.returncode == 0, done.stderr
            found = until(reasons)
            assert set(found.values()) == {"fan-2-replace"}
            assert all(gpu.lower() in pool for pool in found)
            until(lambda: condition().get("status") == "True")
            assert condition()["reason"] == "Drained"
            assert f"device {gpu}: session operator, until 20" in condition()["message"]
            assert condition()["message"].endswith(": fan 2: replace!")
            assert command(root, "undrain", gpu).returncode == 0
            until(lambda: not reasons())
            until(lambda: condition().get("status") == "False")
