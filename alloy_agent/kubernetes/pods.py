"""Whose process is this: pod and container, or batch job, or unit. Pure, but for the client below.

The control group of a process says it, in the spelling of whoever made the group. What the
workload makes below its own group (systemd in a container, delegation) comes after; what a nested
cluster has above comes before; so the whole path is searched and the last match counts.

Source: kubelet's cgroup drivers (systemd, cgroupfs); path shapes of containerd, CRI-O, dockerd,
podman, slurmstepd; kubelet pod-resources API v1.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from alloy_agent.errors import AlloyError
from alloy_agent.model import Value

CONTROLLERS: Final = ("memory", "pids", "devices", "cpuset", "cpu", "", "name=systemd")
_POD: Final = re.compile(
    r"pod([0-9a-f]{8}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{12}|[0-9a-f]{32})"
    r"(?=[./:]|$)"
)
_CONTAINER: Final = re.compile(
    r"(?:^|[/:-])(?:(cri-containerd|crio|docker|libpod)[-:])?([0-9a-f]{64})(?=\.scope|[/:]|$)"
)
_QOS: Final = re.compile(r"(?:^|[/-])(burstable|besteffort)(?=[-./:]|$)")
_SLURM: Final = re.compile(r"/job_(\d+)(?:/step_([A-Za-z0-9_]+))?")
_UNIT: Final = re.compile(r"/([A-Za-z0-9:_.@\\-]+\.(?:service|scope))(?=/|$)")
_RUNTIMES: Final = {
    "cri-containerd": "containerd",
    "crio": "cri-o",
    "docker": "docker",
    "libpod": "podman",
}
MESSAGE_BYTES: Final = 16 << 20


class Workload(Value, frozen=True, kw_only=True):
    """Whose process it is. `kind`: pod, container, slurm, unit, or host where nothing says more."""

    kind: str
    pod_uid: str = ""
    container: str = ""
    runtime: str = ""
    qos: str = ""
    job: str = ""
    step: str = ""
    unit: str = ""
    static: bool = False  # a static pod: the UID is the hash of its file


def workload_of(cgroups: Mapping[str, str]) -> Workload:
    """Return whose process has these control groups, as `host.processes` reads them."""
    host = Workload(kind="host")
    for controller in CONTROLLERS:
        path = cgroups.get(controller)
        if path is not None:
            found = workload_at(path)
            if found.kind in ("pod", "container", "slurm"):
                return found
            if found.kind == "unit" and host.kind == "host":
                host = found
    return host


def workload_at(path: str) -> Workload:
    """Return whose control group a path is."""
    clean = re.sub(r"^(/\.\.)+", "", path)  # as seen out of a container's own namespace
    container = _container(clean)
    pods = list(_POD.finditer(clean))
    if pods:
        uid = pods[-1][1].replace("_", "-")
        qos = _QOS.search(clean)
        inside = _container(clean[pods[-1].end() :]) or {}
        return Workload(
            kind="pod",
            pod_uid=uid,
            qos="guaranteed" if qos is None else qos[1],
            static="-" not in uid,
            container=inside.get("container", ""),
            runtime=inside.get("runtime", ""),
        )
    job = _SLURM.search(clean)
    if job is not None and "slurm" in clean:
        return Workload(kind="slurm", job=job[1], step=job[2] or "")
    if container is not None:
        return Workload(
            kind="container", container=container["container"], runtime=container["runtime"]
        )
    units = _UNIT.findall(clean)
    return Workload(kind="unit", unit=units[-1]) if units else Workload(kind="host")


def _container(path: str) -> dict[str, str] | None:
    """Return id and runtime of the last container in a path; conmon's own group is none."""
    found = None
    for match in _CONTAINER.finditer(path):
        if path[: match.start(2)].endswith("conmon-"):
            continue
        found = {"container": match[2], "runtime": _RUNTIMES.get(match[1] or "", "")}
        if not found["runtime"] and "/docker/" in path:
            found["runtime"] = "docker"
    return found


class PodDevice(Value, frozen=True, kw_only=True):
    """One device that a container has, as the kubelet says."""

    namespace: str
    pod: str
    container: str
    resource: str = ""  # of a device plug-in
    device_ids: tuple[str, ...] = ()
    driver: str = ""  # of DRA
    pool: str = ""
    device: str = ""
    claim: str = ""
    share_id: str = ""


class PodResources:
    """The kubelet's pod-resources socket. Poll at most once a second: its limit is for the node."""

    def __init__(self, socket: str) -> None:
        self._socket = socket

    def devices(self, timeout_s: float = 5.0) -> tuple[PodDevice, ...]:
        """Return every device that a container has, of any driver or plug-in.

        Raises:
            AlloyError: The kubelet does not answer.
        """
        import grpc

        from alloy_agent.proto import pod_resources_pb2, pod_resources_pb2_grpc

        options = [("grpc.max_receive_message_length", MESSAGE_BYTES)]
        with grpc.insecure_channel(f"unix:{self._socket}", options=options) as channel:
            stub = pod_resources_pb2_grpc.PodResourcesListerStub(channel)
            try:
                answer = stub.List(pod_resources_pb2.ListPodResourcesRequest(), timeout=timeout_s)
            except grpc.RpcError as exc:
                raise AlloyError(
                    f"kubelet's pod resources at {self._socket}: {exc.details()}",
                    cure="mount /var/lib/kubelet/pod-resources into the agent's pod",
                ) from exc
        return tuple(_devices(answer))


def _devices(answer: Any) -> Iterator[PodDevice]:
    for pod in answer.pod_resources:
        for container in pod.containers:
            where = (pod.namespace, pod.name, container.name)
            for one in container.devices:
                yield _device(where, resource=one.resource_name, device_ids=tuple(one.device_ids))
            for claim in container.dynamic_resources:
                for one in claim.claim_resources:
                    yield _device(
                        where,
                        driver=one.driver_name,
                        pool=one.pool_name,
                        device=one.device_name,
                        claim=claim.claim_name,
                        share_id=one.share_id,
                    )


def _device(where: tuple[str, str, str], **what: Any) -> PodDevice:
    return PodDevice(namespace=where[0], pod=where[1], container=where[2], **what)
