"""The whole way: a real daemon, a kubelet and an API server stand-in, simulated silicon."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from alloy_agent.kubernetes import slices
from alloy_agent.kubernetes.api import SLICES
from tests.fakes.apiserver import FakeApiServer
from tests.fakes.kubelet import FakeKubelet

DRIVER = "gpu.alloy.dev"


@pytest.fixture
def root() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="alloy-d-") as folder:
        yield Path(folder)


@pytest.fixture
def server() -> Iterator[FakeApiServer]:
    with FakeApiServer() as made:
        made.put("/api/v1/nodes/node-a", {"metadata": {"name": "node-a", "uid": "node-uid"}})
        yield made


class Agent:
    """One daemon process."""

    def __init__(self, root: Path, server: FakeApiServer, instance: str = "") -> None:
        config = root / f"agent{instance}.yaml"
        config.write_text(
            f"""
node_name: node-a
state_dir: {root}/state
socket_path: {root}/agent{instance}.sock
fake: [2xH100-SXM5-80GB]
backends: {{nvidia: "off", amd: "off", neuron: "off", cpu: "off"}}
metrics: {{enabled: false}}
kubernetes:
  enabled: true
  kubelet_dir: {root}
  cdi_dir: {root}/cdi
  api_server: {server.url}
  instance: "{instance}"
"""
        )
        self.log = (root / f"log{instance}").open("ab")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "alloy_agent", "--config", str(config), "run"],
            stdout=self.log,
            stderr=self.log,
        )

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send a signal and wait for the end."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, number)
        code = self.process.wait(30)
        self.log.close()
        return code


@contextlib.contextmanager
def agent_of(root: Path, server: FakeApiServer, instance: str = "") -> Iterator[Agent]:
    made = Agent(root, server, instance)
    try:
        yield made
    finally:
        if made.process.poll() is None:
            made.stop(signal.SIGKILL)


def until(done: Callable[[], Any], seconds: float = 40.0) -> Any:
    end = time.monotonic() + seconds
    while not (found := done()):
        assert time.monotonic() < end
        time.sleep(0.05)
    return found


def pools(server: FakeApiServer) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for one in server.under(SLICES).values():
        found.setdefault(one["spec"]["pool"]["name"], []).append(one)
    return found


def whole(server: FakeApiServer) -> dict[str, list[Any]] | None:
    found = pools(server)
    good = len(found) == 2 and all(slices.problems(one) == () for one in found.values())
    return found if good else None


def allocate(server: FakeApiServer, uid: str, pool: str, device: str) -> tuple[str, str, str]:
    """Do the scheduler's part."""
    server.put(
        f"/apis/resource.k8s.io/v1/namespaces/default/resourceclaims/{uid}",
        {
            "metadata": {"name": uid, "namespace": "default", "uid": uid},
            "status": {
                "allocation": {
                    "devices": {
                        "results": [
                            {"request": "r", "driver": DRIVER, "pool": pool, "device": device}
                        ]
                    }
                },
                "reservedFor": [{"resource": "pods", "name": "pod", "uid": "pod-1"}],
            },
        },
    )
    return uid, "default", uid


def devices_of(server: FakeApiServer, name: str) -> list[Any]:
    """Return what the driver wrote into a claim's status."""
    (claim,) = server.under(
        f"/apis/resource.k8s.io/v1/namespaces/default/resourceclaims/{name}"
    ).values()
    return list(claim["status"].get("devices", ()))


def test_from_slice_to_container_and_back(root: Path, server: FakeApiServer) -> None:
    """Published, allocated, prepared, killed, wiped, restarted, unprepared, stopped."""
    with FakeKubelet(root) as kubelet:
        with agent_of(root, server) as agent:
            kubelet.wait(timeout_s=40)
            pool = sorted(until(lambda: whole(server)))[0]
            claim = allocate(server, "claim-1", pool, "3g40gb-4-4")
            answer = kubelet.prepare(claim)["claim-1"]
            assert answer.error == ""
            (file,) = (root / "cdi").iterdir()
            spec = json.loads(file.read_text())
            assert spec["kind"] == f"{DRIVER}/claim"
            ids = [f"{spec['kind']}={device['name']}" for device in spec["devices"]]
            assert ids == list(answer.devices[0].cdi_device_ids)
            (told,) = until(lambda: devices_of(server, "claim-1"))
            assert (told["driver"], told["pool"], told["device"]) == (DRIVER, pool, "3g40gb-4-4")
            bad = kubelet.prepare(allocate(server, "claim-2", pool, "9g90gb-0-9"))["claim-2"]
            assert "has no piece" in bad.error
            until(lambda: server.events)
            assert server.events[0]["involvedObject"]["uid"] == "claim-2"
            agent.stop(signal.SIGKILL)
        for path in server.under(SLICES):
            server.delete(path)
        with agent_of(root, server) as agent:
            until(lambda: whole(server))
            until(lambda: len(kubelet.endpoints) == 1)
            assert kubelet.prepare(claim)["claim-1"] == answer
            owners = [one["metadata"] for one in server.under(SLICES).values()]
            assert all(o["ownerReferences"][0]["uid"] == "node-uid" for o in owners)
            assert kubelet.unprepare(claim)["claim-1"].error == ""
            assert list((root / "cdi").iterdir()) == []
            until(lambda: not devices_of(server, "claim-1"))
            assert agent.stop() == 0
        assert not list((root / "plugins_registry").iterdir())
        assert whole(server), "an agent that stops leaves its slices to the one that comes next"


def test_an_update_with_two_agents_beside_each_other(root: Path, server: FakeApiServer) -> None:
    """The new one registers at once, waits for the state, and unprepares what the old prepared."""
    with FakeKubelet(root) as kubelet, agent_of(root, server, "old") as old:
        kubelet.wait(timeout_s=40)
        pool = sorted(until(lambda: whole(server)))[0]
        claim = allocate(server, "claim-1", pool, "1g10gb-6-1")
        assert kubelet.prepare(claim)["claim-1"].error == ""
        with agent_of(root, server, "new") as new:
            kubelet.wait(2, timeout_s=40)
            assert old.stop() == 0
            assert kubelet.unprepare(claim)["claim-1"].error == ""
            assert new.stop() == 0


def test_outside_of_a_cluster_it_says_what_is_missing(root: Path, server: FakeApiServer) -> None:
    """Enabled without an API server: one line with the cure, and exit code 1 or 2."""
    with agent_of(root, server) as agent:
        agent.stop(signal.SIGKILL)
    config = root / "agent.yaml"
    config.write_text(config.read_text().replace(f"api_server: {server.url}", "api_server: null"))
    environment = {k: v for k, v in os.environ.items() if not k.startswith("KUBERNETES_")}
    done = subprocess.run(
        [sys.executable, "-m", "alloy_agent", "--config", str(config), "run"],
        capture_output=True,
        text=True,
        env=environment,
        timeout=60,
        check=False,
    )
    assert done.returncode in (1, 2)
    assert "no API server is known here: set kubernetes.api_server" in done.stderr
