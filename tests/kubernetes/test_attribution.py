"""Who is in a partition: pods by UID, containers by the kubelet's word, jobs by their group."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import msgspec
import pytest

from alloy_agent.control import ControlClient
from alloy_agent.kubernetes.attribution import of_claims, of_workload
from alloy_agent.kubernetes.pods import PodDevice, workload_at
from alloy_agent.model import Occupant, PartitionId
from alloy_agent.proto import pod_resources_pb2 as pb
from alloy_agent.proto import pod_resources_pb2_grpc
from alloy_agent.store.claims import ClaimPhase, ClaimPiece, ClaimRecord
from alloy_agent.telemetry import metering
from tests.fakes.apiserver import FakeApiServer
from tests.fakes.kubelet import FakeKubelet
from tests.kubernetes.test_daemon import DRIVER, agent_of, allocate, root, server, until, whole

__all__ = ["root", "server"]

POOL = "node-a/gpu-0"
PIECE = PartitionId("GPU-1/3g.40gb@4")


def claim(
    uid: str, name: str = "c", pods: dict[str, str] | None = None, **more: Any
) -> ClaimRecord:
    from alloy_agent.model import DeviceId, Placement

    users = {"train": "pod-1"} if pods is None else pods
    piece = ClaimPiece(
        request="r",
        pool=POOL,
        name=more.pop("device", "3g40gb-4-4"),
        device=DeviceId("GPU-1"),
        profile="3g.40gb",
        placement=Placement(start=4, size=4),
        partition=more.pop("partition", PIECE),
        share_id=more.pop("share_id", None),
    )
    return ClaimRecord(
        uid=uid,
        namespace="team",
        name=name,
        phase=more.pop("phase", ClaimPhase.PREPARED),
        pieces=(piece,),
        pods=tuple(users.values()),
        pod_names=tuple(users),
        **more,
    )


def has(pod: str, container: str, **more: Any) -> PodDevice:
    base = {"driver": DRIVER, "pool": POOL, "device": "3g40gb-4-4", "claim": "c"}
    return PodDevice(namespace="team", pod=pod, container=container, **{**base, **more})


def names(found: tuple[Occupant, ...]) -> set[tuple[str, str, str]]:
    return {(one.pod, one.pod_uid, one.container) for one in found}


@pytest.mark.parametrize("order", [("main", "other"), ("other", "main")])
def test_a_second_container_of_the_pod_has_nothing(order: tuple[str, str]) -> None:
    """The claim is of the container that asked for it, in whatever order the pod lists them."""
    told = [has("train", "main")]
    told += [has("train", name, claim="another", device="1g10gb-0-1") for name in order]
    found = of_claims([claim("u1")], told, DRIVER)
    assert names(found[PIECE]) == {("train", "pod-1", "main")}


def test_pods_of_one_name_are_two(root: Path) -> None:
    """A pod that was made again has the UID of its own reservation, though its name is the same."""
    del root
    before = of_claims([claim("u1", pods={"train": "pod-1"})], [has("train", "main")], DRIVER)
    after = of_claims([claim("u1", pods={"train": "pod-2"})], [has("train", "main")], DRIVER)
    assert names(before[PIECE]) == {("train", "pod-1", "main")}
    assert names(after[PIECE]) == {("train", "pod-2", "main")}
    assert metering.others(before[PIECE], after[PIECE])


def test_a_pod_that_the_claim_is_not_reserved_for_is_not_named() -> None:
    """What the kubelet still says of the pod before is not the pod of now."""
    found = of_claims([claim("u1", pods={"new": "pod-2"})], [has("old", "main")], DRIVER)
    assert names(found[PIECE]) == {("new", "pod-2", "")}


def test_a_claim_shared_by_two_pods_names_both() -> None:
    """Both are in the partition; one that joins does not end the account of the other."""
    two = claim("u1", pods={"a": "pod-1", "b": "pod-2"})
    found = of_claims([two], [has("a", "main"), has("b", "main")], DRIVER)[PIECE]
    assert names(found) == {("a", "pod-1", "main"), ("b", "pod-2", "main")}
    alone = of_claims([claim("u1", pods={"a": "pod-1"})], [], DRIVER)[PIECE]
    assert not metering.others(alone, found)


def test_a_claim_with_two_containers_names_both() -> None:
    """Each container that lists the claim is one user."""
    told = [has("train", "main"), has("train", "side")]
    found = of_claims([claim("u1")], told, DRIVER)[PIECE]
    assert names(found) == {("train", "pod-1", "main"), ("train", "pod-1", "side")}


def test_shares_of_one_device_are_apart() -> None:
    """Two claims of one device name are told apart by their share."""
    first, second = PartitionId("GPU-1/a"), PartitionId("GPU-1/b")
    claims = [
        claim("u1", "c", {"p1": "pod-1"}, partition=first, share_id="s1"),
        claim("u2", "d", {"p2": "pod-2"}, partition=second, share_id="s2"),
    ]
    told = [
        has("p1", "main", share_id="s1"),
        has("p2", "main", claim="d", share_id="s2"),
        has("p1", "wrong", share_id="s2"),
    ]
    found = of_claims(claims, told, DRIVER)
    assert names(found[first]) == {("p1", "pod-1", "main")}
    assert names(found[second]) == {("p2", "pod-2", "main")}


@pytest.mark.parametrize("phase", [p for p in ClaimPhase if p is not ClaimPhase.PREPARED])
def test_only_what_is_prepared_has_users(phase: ClaimPhase) -> None:
    """A claim on its way in or out names nobody."""
    assert of_claims([claim("u1", phase=phase)], [has("train", "main")], DRIVER) == {}


def test_processes_of_jobs_and_units_are_occupants_too() -> None:
    """A Slurm step and a unit are named by their control groups."""
    job = of_workload(workload_at("/system.slice/slurmstepd.scope/job_71/step_0/user/task_0"))
    assert (job.kind, job.job, job.step, str(job)) == ("slurm", "71", "0", "job 71 step 0")
    unit = of_workload(workload_at("/system.slice/train.service"))
    assert str(unit) == "unit train.service"


class _Kubelet(pod_resources_pb2_grpc.PodResourcesListerServicer):
    """Says that one container of each pod has the claim, and another has nothing."""

    def __init__(self) -> None:
        self.pods: dict[str, tuple[str, str, str]] = {}  # pod: claim, pool, device

    def List(self, request: Any, context: Any) -> pb.ListPodResourcesResponse:  # noqa: N802
        return pb.ListPodResourcesResponse(
            pod_resources=[
                pb.PodResources(
                    name=pod,
                    namespace="default",
                    containers=[
                        pb.ContainerResources(name="sidecar"),
                        pb.ContainerResources(
                            name="main",
                            dynamic_resources=[
                                pb.DynamicResource(
                                    claim_name=name,
                                    claim_namespace="default",
                                    claim_resources=[
                                        pb.ClaimResource(
                                            driver_name=DRIVER, pool_name=pool, device_name=device
                                        )
                                    ],
                                )
                            ],
                        ),
                    ],
                )
                for pod, (name, pool, device) in dict(self.pods).items()
            ]
        )


@pytest.fixture
def listing(root: Path) -> Iterator[_Kubelet]:
    """Return what answers on the kubelet's pod-resources socket."""
    made, folder = _Kubelet(), root / "pod-resources"
    folder.mkdir()
    grpc_server = grpc.server(futures.ThreadPoolExecutor(2))
    pod_resources_pb2_grpc.add_PodResourcesListerServicer_to_server(made, grpc_server)
    grpc_server.add_insecure_port(f"unix:{folder}/kubelet.sock")
    grpc_server.start()
    yield made
    grpc_server.stop(None)


def test_the_daemon_names_pods_and_their_containers(
    root: Path, server: FakeApiServer, listing: _Kubelet
) -> None:
    """In `top`, `devices`, metrics; devices without a pod stay listed; a second pod is another."""
    with FakeKubelet(root) as kubelet, agent_of(root, server) as agent:
        kubelet.wait(timeout_s=40)
        pool = sorted(until(lambda: whole(server)))[0]
        ref = allocate(server, "claim-1", pool, "3g40gb-4-4")
        listing.pods["pod"] = ("claim-1", pool, "3g40gb-4-4")
        assert kubelet.prepare(ref)["claim-1"].error == ""
        client = ControlClient(root / "agent.sock")

        def users(uid: str) -> dict[str, str] | None:
            pieces = json.loads(client.query("top"))["partitions"]
            who = [
                one
                for piece in pieces
                for one in piece["occupants"]
                if one.get("pod_uid") == uid and one.get("container")
            ]
            return dict(who[0]) if who else None

        first = until(lambda: users("pod-1"), 60)
        assert (first["namespace"], first["pod"], first["container"]) == ("default", "pod", "main")
        assert (first["claim"], first["claim_uid"]) == ("claim-1", "claim-1")
        page = json.loads(client.query("metrics"))["text"]
        assert page.count("alloy_device_info{") == 2, "a device without a pod is a device"
        assert 'pod_uid="pod-1"' in page
        devices = json.loads(client.devices())["devices"]
        assert [
            o["container"] for d in devices for p in d["partitions"] for o in p["occupants"]
        ] == ["main"]

        assert kubelet.unprepare(ref)["claim-1"].error == ""
        path = "/apis/resource.k8s.io/v1/namespaces/default/resourceclaims/claim-1"
        document = json.loads(json.dumps(server.under(path)[path]))
        document["status"]["reservedFor"] = [{"resource": "pods", "name": "pod", "uid": "pod-2"}]
        server.delete(path)
        server.put(path, document)
        assert kubelet.prepare(ref)["claim-1"].error == ""
        second = until(lambda: users("pod-2"), 60)
        assert second["pod"] == first["pod"]
        assert users("pod-1") is None
        assert agent.stop() == 0


def test_values_of_before_are_read(root: Path) -> None:
    """A record that was written before pods had names is read, and its pods are known by UID."""
    del root
    data = json.loads(msgspec.json.encode(claim("u1")))
    del data["pod_names"]
    old = msgspec.json.decode(json.dumps(data), type=ClaimRecord)
    assert names(of_claims([old], [], DRIVER)[PIECE]) == {("", "pod-1", "")}
