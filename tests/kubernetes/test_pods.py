"""From a control group's path to pod and container, in every spelling there is."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from alloy_agent.errors import AlloyError
from alloy_agent.kubernetes.pods import PodResources, Workload, workload_at, workload_of
from alloy_agent.proto import pod_resources_pb2 as pb
from alloy_agent.proto import pod_resources_pb2_grpc

POD = "0a1b2c3d-4e5f-6071-8293-a4b5c6d7e8f9"
SYSTEMD = POD.replace("-", "_")
C = "f" * 64
STATIC = "0123456789abcdef0123456789abcdef"

PATHS: list[tuple[str, dict[str, Any]]] = [
    (
        f"/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{SYSTEMD}.slice"
        f"/cri-containerd-{C}.scope",
        {"qos": "burstable", "runtime": "containerd"},
    ),
    (
        f"/kubepods.slice/kubepods-pod{SYSTEMD}.slice/cri-containerd-{C}.scope",
        {"qos": "guaranteed", "runtime": "containerd"},
    ),
    (
        f"/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod{SYSTEMD}.slice"
        f"/crio-{C}.scope/container",
        {"qos": "besteffort", "runtime": "cri-o"},
    ),
    (
        f"/kubepods.slice/kubepods-pod{SYSTEMD}.slice/docker-{C}.scope",
        {"qos": "guaranteed", "runtime": "docker"},
    ),
    (f"/kubepods/burstable/pod{POD}/{C}", {"qos": "burstable", "runtime": ""}),
    (f"/kubepods/pod{POD}/{C}", {"qos": "guaranteed", "runtime": ""}),
    (
        f"/system.slice/containerd.service/kubepods-besteffort-pod{SYSTEMD}.slice"
        f":cri-containerd:{C}",
        {"qos": "besteffort", "runtime": "containerd"},
    ),
    (
        f"/docker/{'a' * 64}/kubelet/kubepods/burstable/pod{POD}/{C}",
        {"qos": "burstable", "runtime": ""},
    ),
    (
        f"/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-pod{SYSTEMD}.slice"
        f"/cri-containerd-{C}.scope/init.scope/system.slice/sshd.service",
        {"qos": "guaranteed", "runtime": "containerd"},
    ),
    (f"/../../../kubepods/burstable/pod{POD}/{C}", {"qos": "burstable", "runtime": ""}),
]


@pytest.mark.parametrize(("path", "more"), PATHS)
def test_a_pods_process_is_found(path: str, more: dict[str, Any]) -> None:
    """Both cgroup drivers, all runtimes, nested clusters, groups that the workload made."""
    assert workload_at(path) == Workload(kind="pod", pod_uid=POD, container=C, **more)


def test_a_pod_in_a_pod_is_the_inner_one() -> None:
    """A cluster in a container: the last pod of the path is whose process it is."""
    inner = "11111111-2222-3333-4444-555555555555"
    found = workload_at(f"/kubepods/pod{POD}/{'a' * 64}/kubepods/burstable/pod{inner}/{C}")
    assert (found.pod_uid, found.container) == (inner, C)


def test_static_pods_conmon_and_sandboxes() -> None:
    """A static pod has its file's hash; conmon's group is in the pod and no container."""
    found = workload_at(f"/kubepods/burstable/pod{STATIC}/{C}")
    assert (found.pod_uid, found.static) == (STATIC, True)
    conmon = workload_at(f"/kubepods.slice/kubepods-pod{SYSTEMD}.slice/crio-conmon-{C}.scope")
    assert (conmon.pod_uid, conmon.container) == (POD, "")


def test_others_are_named_for_what_they_are() -> None:
    """Podman, docker, Slurm jobs and units are no pods and still have a name."""
    assert workload_at(f"/machine.slice/libpod-{C}.scope/container") == Workload(
        kind="container", container=C, runtime="podman"
    )
    assert workload_at(f"/docker/{C}").runtime == "docker"
    job = workload_at("/system.slice/slurmstepd.scope/job_4711/step_0/user/task_0")
    assert (job.kind, job.job, job.step) == ("slurm", "4711", "0")
    assert workload_at("/slurm/uid_1000/job_12/step_batch").step == "batch"
    assert workload_at("/system.slice/train@7.service").unit == "train@7.service"
    assert workload_at("/").kind == "host"


def test_the_hierarchy_that_says_most_counts() -> None:
    """On v1 the named hierarchy may say less than the controllers; on v2 there is one path."""
    both = {"name=systemd": "/system.slice/kubelet.service", "memory": f"/kubepods/pod{POD}/{C}"}
    assert workload_of(both).pod_uid == POD
    assert workload_of({"": f"/kubepods/pod{POD}/{C}"}).pod_uid == POD
    assert workload_of({"memory": "/", "": "/system.slice/a.service"}).unit == "a.service"
    assert workload_of({}).kind == "host"


@given(st.text(max_size=300))
def test_any_path_has_an_answer(path: str) -> None:
    """Paths are chosen by tenants: whatever is in them, there is an answer."""
    found = workload_at(path)
    assert found.kind in {"pod", "container", "slurm", "unit", "host"}
    assert found.kind != "pod" or "pod" in path


class _Lister(pod_resources_pb2_grpc.PodResourcesListerServicer):
    def List(self, request: Any, context: Any) -> pb.ListPodResourcesResponse:  # noqa: N802
        return pb.ListPodResourcesResponse(
            pod_resources=[
                pb.PodResources(
                    name="train",
                    namespace="team",
                    containers=[
                        pb.ContainerResources(
                            name="main",
                            devices=[
                                pb.ContainerDevices(
                                    resource_name="nvidia.com/gpu", device_ids=["GPU-1"]
                                )
                            ],
                            dynamic_resources=[
                                pb.DynamicResource(
                                    claim_name="c",
                                    claim_namespace="team",
                                    claim_resources=[
                                        pb.ClaimResource(
                                            driver_name="gpu.alloy.dev",
                                            pool_name="node-a/gpu-0",
                                            device_name="1g10gb-6-1",
                                        )
                                    ],
                                )
                            ],
                        )
                    ],
                )
            ]
        )


@pytest.fixture
def socket() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="alloy-p-") as folder:
        yield str(Path(folder) / "kubelet.sock")


def test_the_kubelet_says_who_has_what(socket: str) -> None:
    """Devices of plug-ins and of claims, each with pod, namespace and container."""
    server = grpc.server(futures.ThreadPoolExecutor(2))
    pod_resources_pb2_grpc.add_PodResourcesListerServicer_to_server(_Lister(), server)
    server.add_insecure_port(f"unix:{socket}")
    server.start()
    try:
        plugin, claim = PodResources(socket).devices()
    finally:
        server.stop(None)
    assert (plugin.resource, plugin.device_ids) == ("nvidia.com/gpu", ("GPU-1",))
    assert (claim.pool, claim.device, claim.claim) == ("node-a/gpu-0", "1g10gb-6-1", "c")
    assert {plugin.namespace, claim.namespace} == {"team"}


def test_a_silent_kubelet_is_one_line(socket: str) -> None:
    """Nobody on the socket: thing, cause and cure."""
    with pytest.raises(AlloyError, match=r"pod resources at .*: mount /var/lib/kubelet"):
        PodResources(socket).devices(timeout_s=0.5)


@pytest.mark.host
def test_a_real_process_in_a_real_group_is_found() -> None:
    """A process in a group made as the kubelet's cgroupfs driver makes it, read from /proc."""
    from alloy_agent.host.cgroups import detect
    from alloy_agent.host.processes import read_process

    memory = detect().of("memory")
    if memory is None:
        pytest.skip("this host has no memory controller")
    top = Path(memory.mount) / f"alloy-test-{os.getpid()}"
    group = top / "kubepods" / "burstable" / f"pod{POD}" / C
    group.mkdir(parents=True)
    child = subprocess.Popen(["/bin/sleep", "60"])
    try:
        (group / "cgroup.procs").write_text(str(child.pid))
        process = read_process(child.pid)
        assert process is not None
        found = workload_of(process.cgroups)
        assert (found.pod_uid, found.container, found.qos) == (POD, C, "burstable")
    finally:
        child.kill()
        child.wait()
        for folder in [group, *list(group.parents)[:4]]:
            if str(folder).startswith(str(top)):
                folder.rmdir()
