"""What a real kube-scheduler and its controllers make of our slices, on nodes that nobody runs."""

from __future__ import annotations

import itertools
import random
import signal
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from alloy_agent.backends.fake import FakeBackend
from alloy_agent.kubernetes import slices
from alloy_agent.kubernetes.api import ApiError
from alloy_agent.kubernetes.offers import Offer, Pool, permitted, pool_of
from alloy_agent.kubernetes.publishing import Publisher, Specs
from alloy_agent.kubernetes.slices import Document, SliceOptions, Taint
from tests.kubernetes.cluster import CONTROLLERS, NEEDED, Cluster, missing
from tests.kubernetes.installed import DRIVER, ROOT, Installed, base, documents

pytestmark = pytest.mark.slow

API = slices.API_VERSION
BOARDS = (
    "1xA100-SXM4-40GB",
    "1xA100-SXM4-80GB",
    "1xA30-24GB",
    "1xH100-SXM5-80GB",
    "1xH200-SXM-141GB",
    "1xB200-180GB",
    "1xMI300X",
    "1xMI325X",
    "trn2.48xlarge",
    "inf2.48xlarge",
)


class Site:
    """One node with slices, and pods that ask for pieces of it. Everything goes at the end.

    Args:
        installed: Where.
        pools: Of the node.
        taints: On the first pool, from its beginning: a scheduler learns of changes later.
        options: Of the slices.
    """

    def __init__(
        self,
        installed: Installed,
        pools: Sequence[Pool],
        taints: tuple[Taint, ...] = (),
        **options: Any,
    ) -> None:
        self._numbers = itertools.count()
        self._taints = taints
        self.cluster = installed.cluster
        self.node = f"node-{uuid.uuid4().hex[:8]}"
        self.pools = {slices.pool_name(self.node, pool.device.id): pool for pool in pools}
        _, self.agent = installed.agent(self.node)
        self.said = SliceOptions(driver=DRIVER, node=self.node, **options)
        self.pods: dict[str, str] = {}  # by name, what it asks for

    def publish(self, taints: dict[str, tuple[Taint, ...]] | None = None) -> None:
        """Bring the server's slices to what the pools say."""
        present, _ = self.agent.slices(DRIVER, self.node)
        for name, pool in self.pools.items():
            wanted = slices.specs_of(pool, self.said, (taints or {}).get(name, ()))
            here = [one for one in present if one["spec"]["pool"]["name"] == name]
            change = slices.writes(wanted, here, self.said)
            for one in change.delete:
                self.agent.delete_slice(one)
            for one in change.update:
                self.agent.update_slice(one)
            for one in change.create:
                self.agent.create_slice(one)

    def ask(self, what: str, *requests: Document, **devices: Any) -> str:
        """Create a claim and a pod that wants it here; return the name of both."""
        name = f"{self.node}-{next(self._numbers)}"
        self.cluster.create(
            {
                "apiVersion": API,
                "kind": "ResourceClaim",
                "metadata": {"name": name, "namespace": "default"},
                "spec": {"devices": {"requests": list(requests), **devices}},
            }
        )
        self.cluster.create(pod_of(name, self.node, resourceClaimName=name))
        self.pods[name] = what
        return name

    def end(self, name: str) -> None:
        """Delete a pod and its claim."""
        self.cluster.delete("Pod", name)
        self.cluster.delete("ResourceClaim", name, API)
        self.cluster.until(lambda: self.cluster.get("ResourceClaim", name, API) is None)
        del self.pods[name]

    def given(self, name: str) -> list[tuple[str, str]]:
        """Return the pools and devices that a pod's claim got; empty while it has none."""
        claim = self.cluster.get("ResourceClaim", name, API)
        allocation = (claim or {}).get("status", {}).get("allocation") or {}
        return [(r["pool"], r["device"]) for r in allocation.get("devices", {}).get("results", ())]

    def offers(self, name: str) -> list[tuple[Pool, Offer]]:
        """Return the offers behind what a pod's claim got."""
        found = []
        for pool, device in self.given(name):
            (offer,) = [one for one in self.pools[pool].offers if one.name == device]
            found.append((self.pools[pool], offer))
        return found

    def scheduled(self, name: str) -> bool:
        """Whether a pod was put on the node."""
        pod = self.cluster.get("Pod", name)
        return bool(pod["spec"].get("nodeName"))

    def refused(self, name: str) -> str:
        """Return why a pod cannot be scheduled, or nothing while that is open."""
        conditions = self.cluster.get("Pod", name).get("status", {}).get("conditions") or ()
        return next((c["message"] for c in conditions if c.get("reason") == "Unschedulable"), "")

    def evicted(self, name: str) -> bool:
        """Whether a pod was ended, or is being."""
        pod = self.cluster.get("Pod", name)
        return pod is None or bool(pod["metadata"].get("deletionTimestamp"))

    def decided(self, name: str) -> bool:
        """Wait for the scheduler's first word on a pod; return whether it was put on the node."""
        self.cluster.until(lambda: self.scheduled(name) or self.refused(name))
        return self.scheduled(name)

    def wait(self, name: str) -> None:
        """Wait until a pod was put on the node, also when it was refused before."""
        self.cluster.until(lambda: self.scheduled(name))

    def __enter__(self) -> Site:
        self.publish({next(iter(self.pools)): self._taints})
        return self

    def __exit__(self, *_: object) -> None:
        for name in list(self.pods):
            self.cluster.delete("Pod", name)
            self.cluster.delete("ResourceClaim", name, API)
        for one in self.agent.slices(DRIVER, self.node)[0]:
            self.agent.delete_slice(one)
        self.cluster.delete("Node", self.node)


def pod_of(name: str, node: str, **claim: str) -> Document:
    """Return a pod that asks for a claim on a node, by the node's name as a label."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {
            "nodeSelector": {"kubernetes.io/hostname": node},
            "resourceClaims": [{"name": "piece", **claim}],
            "terminationGracePeriodSeconds": 0,
            "containers": [
                {
                    "name": "main",
                    "image": "registry.example.com/any:1",
                    "resources": {"claims": [{"name": "piece"}]},
                }
            ],
        },
    }


def request(kind: str, *expressions: str, name: str = "piece", **more: Any) -> Document:
    """Return a request of a device class with selectors."""
    selectors = [{"cel": {"expression": text}} for text in expressions]
    exactly = {"deviceClassName": f"{kind}.alloy.dev", "selectors": selectors, **more}
    return {"name": name, "exactly": exactly}


def profile(name: str) -> str:
    """Return the selector of a profile."""
    return f'device.attributes["{DRIVER}"].profile == "{name}"'


def pools(spec: str, shares: int = 0) -> list[Pool]:
    """Return what every device of a simulated machine offers."""
    backend = FakeBackend.from_specs((spec,))
    seen = [backend.observe(device) for device in backend.discover()]
    return [pool_of(one.device, one.partitions, shares=shares) for one in seen]


def settled(site: Site) -> bool:
    """Whether all that is given fits together, and whoever got nothing could not have it."""
    taken: dict[str, list[Offer]] = {}
    for name in site.pods:
        for pool, offer in site.offers(name):
            taken.setdefault(str(pool.device.id), []).append(offer)
    for pool in site.pools.values():
        here = taken.get(str(pool.device.id), [])
        assert permitted(pool, here), [offer.name for offer in here]
        for number, one in enumerate(here):
            assert not any(one.placement.overlaps(other.placement) for other in here[:number])
    waiting = {what for name, what in site.pods.items() if not site.given(name)}
    return not any(
        offer.profile in waiting and permitted(pool, [*taken.get(str(pool.device.id), []), offer])
        for pool in site.pools.values()
        for offer in pool.offers
    )


@pytest.mark.parametrize("spec", BOARDS)
def test_the_scheduler_gives_what_fits_and_all_that_fits(spec: str, scheduled: Installed) -> None:
    """Pods come and go: no two pieces ever overlap, and nobody waits for what is free."""
    dice = random.Random(spec)  # noqa: S311
    found = pools(spec)[:2]
    kinds = sorted({(slices.kind_of(p.device, o), o.profile) for p in found for o in p.offers})
    with Site(scheduled, found) as site:
        for _ in range(2):
            for _ in range(7):
                kind, wanted = dice.choice(kinds)
                site.decided(site.ask(wanted, request(kind, profile(wanted))))
            site.cluster.until(lambda: settled(site))
            for name in dice.sample(sorted(site.pods), 4):
                site.end(name)
        site.cluster.until(lambda: settled(site))
        assert any(site.given(name) for name in site.pods)


def test_each_class_gives_its_kind(scheduled: Installed) -> None:
    """Whole devices, MIG instances, XCDs, cores and shares come from the classes of their names."""
    rows = {
        "device": pools("1xH100-SXM5-80GB")[0],
        "mig": pools("1xH100-SXM5-80GB")[0],
        "share": pools("1xH100-SXM5-80GB", shares=2)[0],
        "cores": pools("trn2.48xlarge")[0],
        "xcd": _cpx(),
    }
    for kind, pool in rows.items():
        with Site(scheduled, [pool]) as site:
            name = site.ask("any", request(kind))
            site.wait(name)
            ((_, offer),) = site.offers(name)
            assert slices.kind_of(pool.device, offer) == kind


def _cpx() -> Pool:
    """Return a card that is cut into XCDs."""
    from alloy_agent.model import ModeKind, SetMode

    backend = FakeBackend.from_specs(("1xMI300X",))
    device = backend.discover()[0]
    mode = SetMode(device=device, kind=ModeKind.COMPUTE, current="SPX", wanted="CPX")
    backend.quiesce(device)
    backend.apply(mode)
    seen = backend.observe(device)
    return pool_of(seen.device, seen.partitions)


def test_a_tainted_device_is_left_alone(scheduled: Installed) -> None:
    """New work goes to the other device, unless it tolerates the taint; None only shows."""
    found = pools("2xH100-SXM5-80GB")
    key = f"{DRIVER}/unhealthy"
    with Site(scheduled, found, (Taint(key=key, value="xid-79"),)) as site:
        first, second = site.pools
        name = site.ask("whole", request("device"))
        site.wait(name)
        assert [pool for pool, _ in site.given(name)] == [second]
        other = site.ask("whole", request("device"))
        assert not site.decided(other)
        willing: Document = {"tolerations": [{"key": key, "operator": "Exists"}]}
        brave = site.ask("whole", request("device", **willing))
        site.wait(brave)
        assert [pool for pool, _ in site.given(brave)] == [first]
        site.end(brave)
        site.publish({first: (Taint(key=f"{DRIVER}/audit", value="fail", effect="None"),)})
        site.wait(other)
        assert [pool for pool, _ in site.given(other)] == [first]


def test_a_lost_device_ends_its_pods_where_that_is_set(scheduled: Installed) -> None:
    """NoExecute on the device evicts the pod that is on it, and no other."""
    found = pools("2xH100-SXM5-80GB")
    with Site(scheduled, found) as site:
        names = [site.ask("whole", request("device")) for _ in range(2)]
        for name in names:
            site.wait(name)
        by_pool = {site.given(name)[0][0]: name for name in names}
        (lost, victim), (_, other) = sorted(by_pool.items())
        taint = Taint(key=f"{DRIVER}/unhealthy", value="lost", effect="NoExecute")
        site.publish({lost: (taint,)})
        site.cluster.until(lambda: site.evicted(victim))
        assert not site.evicted(other)


@pytest.mark.parametrize("attribute", ["resource.kubernetes.io/pcieRoot", f"{DRIVER}/numaNode"])
def test_devices_of_one_root_or_node_can_be_asked_for(attribute: str, scheduled: Installed) -> None:
    """Two devices that match lie under one root; where only unlike ones are left, the pod waits."""
    found = [
        msgspec.structs.replace(
            pool, device=msgspec.structs.replace(pool.device, numa_node=number % 2)
        )
        for number, pool in enumerate(pools("4xH100-SXM5-80GB"))
    ]
    roots = {str(p.device.id): f"pci0000:{n % 2:02x}" for n, p in enumerate(found)}
    with Site(scheduled, found, pcie_roots=roots) as site:
        match = {"constraints": [{"requests": ["one", "two"], "matchAttribute": attribute}]}
        pair = (request("device", name="one"), request("device", name="two"))
        name = site.ask("whole", *pair, **match)
        site.wait(name)
        first, second = (roots[str(pool.device.id)] for pool, _ in site.offers(name))
        assert first == second
        one = site.ask("whole", request("device"))
        site.wait(one)
        late = site.ask("whole", *pair, **match)
        assert not site.decided(late)


@pytest.mark.parametrize("example", ["mig-pod.yaml", "share-pod.yaml"])
def test_the_examples_are_scheduled(example: str, scheduled: Installed) -> None:
    """A pod of the examples gets its claim made from the template, and a piece as it asks."""
    found = pools("1xH100-SXM5-80GB", shares=1)
    with Site(scheduled, found) as site:
        template, pod = documents((ROOT / "examples" / "kubernetes" / example).read_text())
        suffix = uuid.uuid4().hex[:6]
        template["metadata"]["name"] += f"-{suffix}"
        pod["metadata"]["name"] += f"-{suffix}"
        pod["spec"]["nodeSelector"] = {"kubernetes.io/hostname": site.node}
        pod["spec"]["resourceClaims"][0]["resourceClaimTemplateName"] = template["metadata"]["name"]
        for one in (template, pod):
            one["metadata"]["namespace"] = "default"
            site.cluster.create(one)
        name = pod["metadata"]["name"]
        try:
            site.wait(name)
            status = site.cluster.get("Pod", name)["status"]
            (claim,) = [s["resourceClaimName"] for s in status["resourceClaimStatuses"]]
            ((_, offer),) = site.offers(claim)
            if example.startswith("mig"):
                assert (offer.memory_bytes or 0) >= 18 << 30
            else:
                assert offer.profile.startswith("opportunistic")
        finally:
            site.cluster.delete("Pod", name)
            site.cluster.delete("ResourceClaimTemplate", template["metadata"]["name"], API)


def test_slices_go_when_their_node_goes(scheduled: Installed) -> None:
    """A node that is taken out of the cluster takes its slices with it."""
    name, client = scheduled.agent(f"node-{uuid.uuid4().hex[:8]}")
    node = client.node(name)
    assert node is not None
    said = SliceOptions(driver=DRIVER, node=name, node_uid=node["metadata"]["uid"])
    for pool in pools("1xH100-SXM5-80GB"):
        for one in slices.writes(slices.specs_of(pool, said), (), said).create:
            client.create_slice(one)
    assert len(scheduled.cluster.admin.slices(DRIVER, name)[0]) == 2
    scheduled.cluster.delete("Node", name)
    scheduled.cluster.until(lambda: not scheduled.cluster.admin.slices(DRIVER, name)[0])


# --- clusters of another kind --------------------------------------------------------------------


@pytest.fixture
def folder() -> Iterator[Path]:
    if missing():
        pytest.skip(missing())
    with tempfile.TemporaryDirectory(prefix="alloy-kube-") as made:
        yield Path(made)


def everything(found: list[Pool]) -> Specs:
    def said(options: SliceOptions) -> dict[str, tuple[Document, ...]]:
        """Without counters, what exists alone is honest: here the whole device."""
        made = {}
        for pool in found:
            offers = pool.offers if options.counters else pool.offers[-1:]
            shown = msgspec.structs.replace(pool, offers=tuple(offers))
            name = slices.pool_name(options.node, pool.device.id)
            taint = Taint(key=f"{DRIVER}/draining", value="drained")
            made[name] = slices.specs_of(shown, options, (taint,))
        return made

    return said


def test_a_server_without_the_features_is_noticed(folder: Path) -> None:
    """Counters and taints switched off there are dropped; what is published then is whole."""
    gates = {"DRAPartitionableDevices": False, "DRADeviceTaints": False}
    with Cluster(folder / "old", gates=gates) as cluster:
        for one in base():
            cluster.apply(one)
        cluster.node("node-a")
        found = pools("1xH100-SXM5-80GB")
        publisher = Publisher(cluster.admin, SliceOptions(driver=DRIVER, node="node-a"))
        publisher.start()
        try:
            publisher.want(everything(found))
            cluster.until(
                lambda: (
                    publisher.converged.is_set()
                    and not publisher.options.counters
                    and not publisher.options.taints
                )
            )
            present, _ = cluster.admin.slices(DRIVER, "node-a")
            assert slices.problems(present) == ()
            assert [len(one["spec"].get("devices") or ()) for one in present] == [1]
        finally:
            publisher.stop()


def test_a_server_that_was_away_is_caught_up_with(folder: Path) -> None:
    """Killed and started again, with slices gone meanwhile: told of the gap, and all is back."""
    with Cluster(folder / "away") as cluster:
        installed = Installed(cluster)
        node, client = installed.agent("node-away")
        publisher = Publisher(client, SliceOptions(driver=DRIVER, node=node))
        _, old = cluster.admin.slices(DRIVER, node)
        publisher.start()
        try:
            publisher.want(everything(pools("2xH100-SXM5-80GB")))
            assert publisher.converged.wait(60)
            first, _ = cluster.admin.slices(DRIVER, node)
            cluster.end("kube-apiserver", signal.SIGKILL)
            publisher.want(everything(pools("1xH100-SXM5-80GB")))
            cluster.until(lambda: "see whether the node reaches" in publisher.problem)
            cluster.again("kube-apiserver")
            cluster.until_ready()
            with pytest.raises(ApiError) as caught:
                list(cluster.admin.watch_slices(DRIVER, node, old, 30.0))
            assert caught.value.status == 410
            cluster.until(lambda: len(cluster.admin.slices(DRIVER, node)[0]) == 2)
            left, _ = cluster.admin.slices(DRIVER, node)
            assert {one["metadata"]["uid"] for one in left} < {o["metadata"]["uid"] for o in first}
            cluster.until(publisher.converged.is_set)
            for one in left:
                cluster.admin.delete_slice(one)
            cluster.until(lambda: len(cluster.admin.slices(DRIVER, node)[0]) == 2)
        finally:
            publisher.stop()


def test_an_administrator_can_taint_by_a_rule(folder: Path) -> None:
    """A DeviceTaintRule on one of our pools ends the pod that is there, where clusters have them.

    The scheduler is ended first: that of 1.36.2 panics over any rule that names a slice, since it
    reads version v1beta2 as v1alpha3.
    """
    if missing(*NEEDED):
        pytest.skip(missing(*NEEDED))
    version = "resource.k8s.io/v1beta2"
    gates = {"DRADeviceTaintRules": True}
    with Cluster(folder / "rules", gates=gates, runtime=f"{version}=true") as cluster:
        installed = Installed(cluster)
        cluster.start_controllers(*CONTROLLERS)
        cluster.start_scheduler()
        cluster.until(lambda: cluster.get("ServiceAccount", "default"))
        with Site(installed, pools("2xH100-SXM5-80GB")) as site:
            names = [site.ask("whole", request("device")) for _ in range(2)]
            for name in names:
                site.wait(name)
            cluster.end("kube-scheduler")
            by_pool = {site.given(name)[0][0]: name for name in names}
            (first, victim), (_, other) = sorted(by_pool.items())
            cluster.apply(
                {
                    "apiVersion": version,
                    "kind": "DeviceTaintRule",
                    "metadata": {"name": "out-for-repair"},
                    "spec": {
                        "deviceSelector": {"driver": DRIVER, "pool": first},
                        "taint": {"key": "example.com/repair", "effect": "NoExecute"},
                    },
                }
            )
            cluster.until(lambda: site.evicted(victim))
            assert not site.evicted(other)
