"""The whole way for real: a kubelet, a container runtime, a scheduler, and the agent as a daemon.

Only the accelerators are simulated. A pod names a claim template; the claim is made, allocated,
prepared by the agent, and the container sees its piece and no other.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from alloy_agent.kubernetes import slices
from alloy_agent.kubernetes.pods import PodResources, workload_of
from tests.kubernetes.cluster import NEEDED, Cluster, _ports, missing
from tests.kubernetes.installed import DRIVER, Installed
from tests.kubernetes.machine import IMAGE, Machine, lacking

pytestmark = [pytest.mark.slow, pytest.mark.host]

API = slices.API_VERSION
SERVING = health_pb2.HealthCheckResponse.SERVING


class Agent:
    """The daemon on a machine, with the token of its own service account."""

    def __init__(
        self, machine: Machine, token_file: str, instance: str = "", fake: str = "2xH100-SXM5-80GB"
    ) -> None:
        cluster, folder = machine.cluster, machine.folder
        (port,) = _ports(1)
        self.probes = f"127.0.0.1:{port}"
        self.config = folder / f"agent{instance}.json"
        settings = {
            "node_name": machine.name,
            "state_dir": f"{folder}/state",
            "socket_path": f"{folder}/a{instance}.sock",
            "fake": [fake],
            "backends": dict.fromkeys(("nvidia", "amd", "neuron", "cpu"), "off"),
            "metrics": {"enabled": False},
            "kubernetes": {
                "enabled": True,
                "kubelet_dir": str(machine.kubelet_dir),
                "cdi_dir": str(machine.cdi),
                "api_server": cluster.url,
                "ca_file": f"{cluster.authority.folder}/ca.crt",
                "token_file": token_file,
                "instance": instance,
                "probe_address": self.probes,
            },
        }
        self.config.write_text(json.dumps(settings))
        self.log = folder / f"agent{instance}.log"
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "alloy_agent", "--config", str(self.config), "run"],
                stdout=log,
                stderr=log,
            )

    def partitions(self) -> list[dict[str, Any]]:
        """Return the partitions that the agent sees."""
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "alloy_agent",
                "--config",
                str(self.config),
                "devices",
                "--json",
            ],
            capture_output=True,
            text=True,
            check=True,
        )
        return [
            one for device in json.loads(done.stdout)["devices"] for one in device["partitions"]
        ]

    def probe(self, service: str) -> bool:
        """Do what the kubelet's probe does."""
        with grpc.insecure_channel(self.probes) as channel:
            request = health_pb2.HealthCheckRequest(service=service)
            try:
                answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=10)
            except grpc.RpcError:
                return False
            return bool(answer.status == SERVING)

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send a signal and wait for the end."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, number)
        return self.process.wait(60)


@pytest.fixture
def machine(scheduled: Installed) -> Iterator[Machine]:
    reason = missing(*NEEDED) or lacking()
    if reason:
        pytest.skip(reason)
    name = f"node-{uuid.uuid4().hex[:8]}"
    with (
        tempfile.TemporaryDirectory(prefix="ak-") as folder,
        Machine(scheduled.cluster, name, Path(folder)) as made,
    ):
        yield made
        scheduled.cluster.delete("Node", name)


@contextlib.contextmanager
def agent_on(machine: Machine, token_file: str, instance: str = "", **more: str) -> Iterator[Agent]:
    made = Agent(machine, token_file, instance, **more)
    try:
        yield made
    finally:
        if made.process.poll() is None:
            made.stop(signal.SIGKILL)


def token_on(machine: Machine, installed: Installed) -> str:
    """Return the file of a token bound to a pod of the agent's account on the machine."""
    cluster = machine.cluster
    cluster.node(machine.name)
    pod = cluster.create(
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": f"agent-{machine.name}", "namespace": "alloy-system"},
            "spec": {
                "nodeName": machine.name,
                "hostNetwork": True,
                "serviceAccountName": "alloy-agent",
                "automountServiceAccountToken": False,
                "containers": [{"name": "stand-in", "image": IMAGE, "imagePullPolicy": "Never",
                                "command": ["/bin/sleep", "2147483647"]}],
            },
        }
    )  # fmt: skip
    path = installed.cluster.access(cluster.token("alloy-agent", "alloy-system", pod)).token_file
    assert path is not None
    return path


def template(name: str, profile: str, kind: str = "mig") -> dict[str, Any]:
    selector = {"cel": {"expression": f'device.attributes["{DRIVER}"].profile == "{profile}"'}}
    exactly = {"deviceClassName": f"{kind}.alloy.dev", "selectors": [selector]}
    return {
        "apiVersion": API,
        "kind": "ResourceClaimTemplate",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {"spec": {"devices": {"requests": [{"name": "piece", "exactly": exactly}]}}},
    }


def pod(name: str, machine: Machine, claim_template: str) -> dict[str, Any]:
    script = "env; ls -1 /dev /dev/nvidia-caps /dev/dri; echo end; sleep 2147483647"
    claim = {"name": "gpu", "resourceClaimTemplateName": claim_template}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {
            "nodeSelector": {"kubernetes.io/hostname": machine.name},
            "hostNetwork": True,
            "automountServiceAccountToken": False,
            "terminationGracePeriodSeconds": 0,
            "restartPolicy": "Never",
            "resourceClaims": [claim],
            "containers": [
                {
                    "name": "main",
                    "image": IMAGE,
                    "imagePullPolicy": "Never",
                    "command": ["/bin/sh", "-c", script],
                    "resources": {"claims": [{"name": "gpu"}]},
                }
            ],
        },
    }


class Watched:
    """What goes on, for waiting with the reasons at hand."""

    def __init__(self, machine: Machine, agent: Agent) -> None:
        self.machine, self.agent, self.cluster = machine, agent, machine.cluster

    def until(self, done: Any) -> Any:
        try:
            return self.cluster.until(done)
        except AssertionError as exc:
            logs = [self.machine.tail(n) for n in ("kubelet", "containerd")]
            logs.append(self.agent.log.read_text(errors="replace")[-3000:])
            raise AssertionError("\n---\n".join(logs)) from exc

    def published(self, pools: int = 2) -> bool:
        """Whether the slices of so many devices are there, and in order."""
        found, _ = self.cluster.admin.slices(DRIVER, self.machine.name)
        by_pool: dict[str, list[Any]] = {}
        for one in found:
            by_pool.setdefault(one["spec"]["pool"]["name"], []).append(one)
        return len(by_pool) == pools and all(not slices.problems(s) for s in by_pool.values())

    def running(self, name: str) -> bool:
        found = self.cluster.get("Pod", name)
        return found is not None and found.get("status", {}).get("phase") == "Running"

    def said(self, name: str) -> list[str]:
        """Return what a pod's container wrote, once it wrote all."""
        folder = self.machine.folder / "logs"
        (path,) = folder.glob(f"default_{name}_*/main/0.log")
        self.until(lambda: " F end" in path.read_text())
        return [line.split(" ", 3)[3] for line in path.read_text().splitlines()]

    def claim(self, name: str) -> Any:
        """Return the claim that was made for a pod."""
        status = self.cluster.get("Pod", name)["status"]
        (claim,) = [one["resourceClaimName"] for one in status["resourceClaimStatuses"]]
        return self.cluster.get("ResourceClaim", claim, API)


def test_a_pod_gets_its_piece_and_gives_it_back(machine: Machine, scheduled: Installed) -> None:
    """From the template to the container's own words, to who it is, and back to nothing."""
    cluster, suffix = machine.cluster, uuid.uuid4().hex[:6]
    token_file = token_on(machine, scheduled)
    with agent_on(machine, token_file) as agent:
        watched = Watched(machine, agent)
        watched.until(lambda: agent.probe("liveness"))
        assert not agent.probe("readiness"), "there is no kubelet yet"
        machine.start_kubelet()
        watched.until(lambda: agent.probe("readiness"))
        watched.until(watched.published)
        cluster.create(template(f"slice-{suffix}", "3g.40gb"))
        first, second = f"one-{suffix}", f"two-{suffix}"
        for name in (first, second):
            cluster.create(pod(name, machine, f"slice-{suffix}"))
        for name in (first, second):
            watched.until(lambda name=name: watched.running(name))
        seen = {name: watched.said(name) for name in (first, second)}
        claims = {name: watched.claim(name) for name in (first, second)}
        pieces = set()
        for name, lines in seen.items():
            uid = claims[name]["metadata"]["uid"]
            assert f"ALLOY_CLAIM_UID={uid}" in lines
            (piece,) = [line for line in lines if line.startswith("CUDA_VISIBLE_DEVICES=")]
            pieces.add(piece)
            assert "nvidiactl" in lines
            assert len([line for line in lines if line.startswith("nvidia-cap") and
                        line != "nvidia-caps"]) == 2  # fmt: skip
            assert len({"nvidia0", "nvidia1"} & set(lines)) == 1

            def told(name: str = name) -> Any:
                return watched.claim(name)["status"].get("devices")

            (entry,) = watched.until(told)
            assert entry["conditions"][0]["type"] == "Ready"
            assert f"ALLOY_PARTITIONS={entry['data']['partition']}" in lines
        assert len(pieces) == 2
        profiles = [one["profile"] for one in agent.partitions()]
        assert profiles.count("3g.40gb") == 2
        _whose(machine, watched, first, claims[first]["metadata"]["name"])
        _healthy(watched, first)
        assert agent.stop() == 0
    with agent_on(machine, token_file) as agent:
        watched = Watched(machine, agent)
        watched.until(lambda: agent.probe("readiness"))
        assert watched.running(first)
        for name in (first, second):
            cluster.delete("Pod", name)
        watched.until(lambda: not list(machine.cdi.iterdir()))
        watched.until(lambda: all(one["profile"] != "3g.40gb" for one in agent.partitions()))
        watched.until(lambda: not machine_claims(cluster, suffix))
        assert agent.stop() == 0


@pytest.mark.parametrize(
    ("fake", "pools", "kind", "profile", "nodes", "variable"),
    [
        ("2xMI300X", 2, "device", "SPX", {"kfd", "renderD"}, "ROCR_VISIBLE_DEVICES="),
        ("trn2.48xlarge", 16, "cores", "4c", {"neuron"}, "NEURON_RT_VISIBLE_CORES="),
    ],
)
def test_the_other_vendors_pieces_reach_their_containers(  # noqa: PLR0917
    fake: str,
    pools: int,
    kind: str,
    profile: str,
    nodes: set[str],
    variable: str,
    machine: Machine,
    scheduled: Installed,
) -> None:
    """A card of AMD, cores of a Neuron device: its nodes, one of a kind, and its variable."""
    cluster, suffix = machine.cluster, uuid.uuid4().hex[:6]
    token_file, name = token_on(machine, scheduled), f"one-{suffix}"
    with agent_on(machine, token_file, fake=fake) as agent:
        watched = Watched(machine, agent)
        machine.start_kubelet()
        watched.until(lambda: agent.probe("readiness"))
        watched.until(lambda: watched.published(pools))
        cluster.create(template(f"slice-{suffix}", profile, kind))
        cluster.create(pod(name, machine, f"slice-{suffix}"))
        watched.until(lambda: watched.running(name))
        lines = watched.said(name)
        assert any(line.startswith(variable) for line in lines)
        seen = [one for one in lines if one.startswith(("kfd", "renderD", "neuron", "nvidia"))]
        assert {one.rstrip("0123456789") for one in seen} == nodes
        assert len(seen) == len(nodes), "one of each, though the host has more"
        cluster.delete("Pod", name)
        watched.until(lambda: not list(machine.cdi.iterdir()))
        watched.until(lambda: not machine_claims(cluster, suffix))
        assert agent.stop() == 0


def test_restarts_and_updates_cost_no_pod(machine: Machine, scheduled: Installed) -> None:
    """A kubelet that starts wipes the slices: they come back. A new agent follows the old one."""
    cluster, suffix = machine.cluster, uuid.uuid4().hex[:6]
    token_file = token_on(machine, scheduled)
    name, late = f"one-{suffix}", f"two-{suffix}"
    with agent_on(machine, token_file, "old") as old:
        watched = Watched(machine, old)
        machine.start_kubelet()
        watched.until(lambda: old.probe("readiness"))
        watched.until(watched.published)
        cluster.create(template(f"slice-{suffix}", "1g.10gb"))
        cluster.create(pod(name, machine, f"slice-{suffix}"))
        watched.until(lambda: watched.running(name))
        before = {one["metadata"]["uid"] for one in cluster.admin.slices(DRIVER, machine.name)[0]}
        machine.end("kubelet")
        machine.start_kubelet()

        def republished() -> bool:
            found = {o["metadata"]["uid"] for o in cluster.admin.slices(DRIVER, machine.name)[0]}
            return not found & before and watched.published()

        watched.until(republished)
        with agent_on(machine, token_file, "new") as new:
            watched.until(lambda: new.probe("readiness"))
            assert new.probe("liveness"), "it waits for the old one, and is well"
            assert old.stop() == 0
            watched = Watched(machine, new)
            cluster.create(pod(late, machine, f"slice-{suffix}"))
            watched.until(lambda: watched.running(late))
            assert watched.running(name)
            for one in (name, late):
                cluster.delete("Pod", one)
            watched.until(lambda: not list(machine.cdi.iterdir()))
            watched.until(lambda: all(one["profile"] != "1g.10gb" for one in new.partitions()))
            watched.until(lambda: not machine_claims(cluster, suffix))
            assert new.stop() == 0


def machine_claims(cluster: Cluster, suffix: str) -> list[str]:
    """Return the claims of this test's pods that are left."""
    found = cluster.admin.request(
        "GET", "/apis/resource.k8s.io/v1/namespaces/default/resourceclaims"
    )
    names = [one["metadata"]["name"] for one in found["items"]]
    return [name for name in names if f"-{suffix}-" in name]


def _whose(machine: Machine, watched: Watched, name: str, claim: str) -> None:
    """The kubelet's own list names the claim, and a process is found to be in that pod."""
    found = PodResources(f"{machine.kubelet_dir}/pod-resources/kubelet.sock").devices()
    (one,) = [one for one in found if one.pod == name]
    assert (one.claim, one.driver, one.container) == (claim, DRIVER, "main")
    uid = watched.cluster.get("Pod", name)["metadata"]["uid"]
    pods = set()
    for pid in machine.pids():
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
            groups = {line.split(":", 2)[1]: line.split(":", 2)[2] for line in lines}
            pods.add(workload_of(groups).pod_uid)
    assert uid in pods


def _healthy(watched: Watched, name: str) -> None:
    """The pod's status says that its piece is healthy, in the agent's words."""

    def health() -> Any:
        status = watched.cluster.get("Pod", name)["status"]
        (container,) = status["containerStatuses"]
        return [
            resource
            for one in container.get("allocatedResourcesStatus", ())
            if one["name"].startswith("claim:gpu")
            for resource in one.get("resources", ())
            if resource.get("health") == "Healthy"
        ]

    assert watched.until(health)
