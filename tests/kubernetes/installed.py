"""The agent installed on a control plane: manifests applied, policies in force, agents with tokens.

No pod runs; an agent is a pod object bound to a node, whose token is what the kubelet would mount.
"""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import yaml

from alloy_agent.backends.fake import FakeBackend
from alloy_agent.kubernetes import slices
from alloy_agent.kubernetes.api import ApiClient
from alloy_agent.kubernetes.offers import Pool, pool_of
from alloy_agent.kubernetes.slices import Document, SliceOptions
from tests.kubernetes.cluster import Cluster, refused

ROOT = Path(__file__).resolve().parents[2]
BASE = ROOT / "deploy" / "daemonset" / "base"
DRIVER = "gpu.alloy.dev"
NAMESPACE = "alloy-system"
ACCOUNT = "alloy-agent"
# Opaque parameters, and what the admission policy says of them; nothing: they are taken.
GOOD: dict[str, Any] = {"apiVersion": "alloy.dev/v1", "kind": "PartitionConfig"}
PARAMETERS: dict[str, tuple[dict[str, Any], str]] = {
    "plain": (GOOD, ""),
    "all there is": ({**GOOD, "memoryBytes": 1 << 34, "lossBudgetRatio": 0.02}, ""),
    "a whole number": ({**GOOD, "lossBudgetRatio": 0}, ""),
    "another kind": ({**GOOD, "kind": "GpuConfig"}, "are a PartitionConfig of alloy.dev/v1"),
    "another version": ({**GOOD, "apiVersion": "v9"}, "are a PartitionConfig of alloy.dev/v1"),
    "no kind": ({"apiVersion": "alloy.dev/v1"}, "are a PartitionConfig of alloy.dev/v1"),
    "too much loss": ({**GOOD, "lossBudgetRatio": 0.6}, "lossBudgetRatio is"),
    "a gain": ({**GOOD, "lossBudgetRatio": -0.1}, "lossBudgetRatio is"),
    "a whole loss": ({**GOOD, "lossBudgetRatio": 1}, "lossBudgetRatio is"),
    "loss in words": ({**GOOD, "lossBudgetRatio": "much"}, "lossBudgetRatio is"),
    "no memory": ({**GOOD, "memoryBytes": 0}, "memoryBytes is"),
    "memory in words": ({**GOOD, "memoryBytes": "16Gi"}, "memoryBytes is"),
    "half a byte": ({**GOOD, "memoryBytes": 1048576.5}, "memoryBytes is"),
    "an unknown key": ({**GOOD, "memory": 1}, "knows only"),
}


def documents(text: str) -> list[dict[str, Any]]:
    """Return the objects of a YAML text."""
    return [one for one in yaml.safe_load_all(text) if one]


def base() -> list[dict[str, Any]]:
    """Return the objects of the kustomize base, in its order."""
    names = yaml.safe_load((BASE / "kustomization.yaml").read_text())["resources"]
    return [one for name in names for one in documents((BASE / name).read_text())]


def pool(spec: str, shares: int = 0) -> Pool:
    """Return what the first device of a simulated board offers."""
    backend = FakeBackend.from_specs((spec,))
    one = backend.observe(backend.discover()[0])
    return pool_of(one.device, one.partitions, shares=shares)


def made(pool: Pool, node: str, driver: str = DRIVER, **options: Any) -> list[Document]:
    """Return the slices of a pool as the agent of a node creates them."""
    said = SliceOptions(driver=driver, node=node, **options)
    return list(slices.writes(slices.specs_of(pool, said), (), said).create)


class Installed:
    """One control plane with the agent's objects."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        for one in base():
            cluster.apply(one)
        self.node_a, self.agent_a = self.agent("node-a")
        self.node_b, self.agent_b = self.agent("node-b")
        self._wait_for_policies()

    def agent(self, name: str) -> tuple[str, ApiClient]:
        """Return a new node, and the client of the agent on it."""
        return name, self.cluster.client(self.token(name))

    def token(self, node: str) -> str:
        """Return the token of an agent on a node; the node is made where it is not there."""
        self.cluster.node(node)
        return self.cluster.token(ACCOUNT, NAMESPACE, self.pod(node))

    def pod(self, node: str) -> Document:
        """Return the pod of an agent: that of the DaemonSet, bound to a node."""
        (daemonset,) = [one for one in base() if one["kind"] == "DaemonSet"]
        spec = daemonset["spec"]["template"]["spec"]
        name = f"agent-{node}-{uuid.uuid4().hex[:6]}"
        return self.cluster.create(
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {"name": name, "namespace": NAMESPACE},
                "spec": {**spec, "nodeName": node},
            }
        )

    def _wait_for_policies(self) -> None:
        """Wait until what was applied is enforced: the server compiles policies on its own time."""
        (stranger,) = made(pool("1xMI300X"), "node-b")[:1]

        def kept() -> bool:
            path = f"{slices_path()}?dryRun=All"
            return "a slice of another node" in refused(
                lambda: self.agent_a.request("POST", path, stranger)
            )

        self.cluster.until(kept)
        self.cluster.until(lambda: "PartitionConfig" in refused(lambda: self.claim_with("x")))

    def claim_with(self, parameters: Any) -> Document:
        """Create, for show alone, a claim with opaque parameters for the driver."""
        opaque = {"driver": DRIVER, "parameters": {"apiVersion": parameters, "kind": "None"}}
        body = claim_of("shown", config=[{"opaque": opaque}])
        return self.cluster.admin.request("POST", f"{claims_path()}?dryRun=All", body)


def claim_of(name: str, namespace: str = "default", **devices: Any) -> Document:
    """Return a claim of one piece of any kind."""
    request = {"name": "piece", "exactly": {"deviceClassName": "device.alloy.dev"}}
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"devices": {"requests": [request], **devices}},
    }


def slices_path(name: str = "") -> str:
    """Return the address of all slices, or of one."""
    return "/apis/resource.k8s.io/v1/resourceslices" + (f"/{name}" if name else "")


def claims_path(namespace: str = "default", name: str = "") -> str:
    """Return the address of a namespace's claims, or of one."""
    path = f"/apis/resource.k8s.io/v1/namespaces/{namespace}/resourceclaims"
    return path + (f"/{name}" if name else "")
