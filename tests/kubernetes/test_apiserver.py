"""What a real kube-apiserver makes of manifests, policies, rights and slices."""

from __future__ import annotations

import copy
import importlib.util
import json
import shutil
import subprocess
import uuid
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest

from alloy_agent.kubernetes import conditions, slices
from alloy_agent.kubernetes.api import ApiClient, ApiError
from alloy_agent.kubernetes.claims import ClaimRef
from alloy_agent.kubernetes.offers import Pool
from alloy_agent.kubernetes.publishing import Publisher, Specs
from alloy_agent.kubernetes.slices import Document, SliceOptions, Taint
from alloy_agent.kubernetes.statuses import entries_of
from tests.kubernetes.cluster import Cluster, missing, path_of, program, refused
from tests.kubernetes.installed import (
    ACCOUNT,
    DRIVER,
    NAMESPACE,
    PARAMETERS,
    ROOT,
    Installed,
    claim_of,
    claims_path,
    documents,
    made,
    pool,
    slices_path,
)
from tests.kubernetes.test_slices import BROKEN, SPECS, valid
from tests.kubernetes.test_statuses import PIECE, RECORD

OVERLAYS = ROOT / "deploy" / "daemonset" / "overlays"


# --- manifests -----------------------------------------------------------------------------------


def chart() -> ModuleType:
    spec = importlib.util.spec_from_file_location("chart", ROOT / "scripts" / "render_chart.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rendered(name: str) -> list[dict[str, Any]]:
    """Return the objects of one packaging: an overlay by kubectl, or the chart."""
    if name == "chart":
        module = chart()
        texts = module.templates().values()
        return [one for t in texts for one in documents(module.render(t, module.values()))]
    kubectl = program("kubectl")
    assert kubectl is not None
    folder = ROOT / "deploy" / "daemonset" / "base" if name == "base" else OVERLAYS / name
    done = subprocess.run(
        [str(kubectl), "kustomize", str(folder)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return documents(done.stdout)


@pytest.mark.parametrize("name", ["base", *(p.name for p in sorted(OVERLAYS.iterdir())), "chart"])
def test_every_packaging_is_taken_as_it_is(name: str, installed: Installed) -> None:
    """Strictly, first for show and then for real; a second time nothing changes."""
    if name != "chart" and missing("kubectl"):
        pytest.skip(missing("kubectl"))
    cluster, found = installed.cluster, rendered(name)
    assert len(found) > 10
    for one in found:
        cluster.apply(one, dry_run=True)
    first = [cluster.apply(one) for one in found]
    again = [cluster.apply(one) for one in found]
    for one, other in zip(first, again, strict=True):
        assert one["metadata"]["resourceVersion"] == other["metadata"]["resourceVersion"]
        assert one["metadata"].get("generation") == other["metadata"].get("generation")
    (daemonset,) = [one for one in found if one["kind"] == "DaemonSet"]
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "shown", "namespace": NAMESPACE},
        "spec": {**daemonset["spec"]["template"]["spec"], "nodeName": "node-a"},
    }
    taken = cluster.admin.request("POST", f"/api/v1/namespaces/{NAMESPACE}/pods?dryRun=All", pod)
    assert taken["spec"]["priority"] > 2_000_000_000


@pytest.mark.parametrize("path", sorted((ROOT / "examples" / "kubernetes").glob("*.yaml")))
def test_every_example_is_taken(path: Path, installed: Installed) -> None:
    """Templates pass the admission policy as claims do, and pods can name them."""
    for one in documents(path.read_text()):
        if one["kind"] == "Pod":
            one["spec"]["serviceAccountName"] = "user"
            user = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "user"}}
            installed.cluster.apply(user)
        installed.cluster.apply(one, dry_run=True)
        if one["kind"] == "ResourceClaimTemplate":
            claim = {**one, "kind": "ResourceClaim", "spec": one["spec"]["spec"]}
            installed.cluster.apply(claim, dry_run=True)


# --- policies ------------------------------------------------------------------------------------


def test_an_agent_writes_slices_of_its_own_node_alone(installed: Installed) -> None:
    """Creating, changing and deleting: its own pass; another node's and another driver's do not."""
    ours, theirs = installed.agent_a, installed.agent_b
    one, other = made(pool("1xMI300X"), "node-a")
    mine = ours.create_slice(one)
    assert refused(lambda: theirs.create_slice(other)).find("a slice of another node") > 0
    changed = copy.deepcopy(mine)
    changed["spec"]["pool"]["generation"] = 2
    assert "a slice of another node" in refused(lambda: theirs.update_slice(changed))
    assert "a slice of another node" in refused(lambda: theirs.delete_slice(mine))
    stranger = made(pool("1xMI300X"), "node-a", driver="gpu.example.com")[0]
    assert "a slice of another driver" in refused(lambda: ours.create_slice(stranger))
    moved = copy.deepcopy(mine)
    moved["spec"]["nodeName"] = "node-b"
    assert refused(lambda: ours.update_slice(moved))
    nowhere = copy.deepcopy(one)
    del nowhere["spec"]["nodeName"]
    nowhere["spec"]["allNodes"] = True
    assert "a slice of another node" in refused(lambda: ours.create_slice(nowhere))
    assert ours.update_slice(changed)["spec"]["pool"]["generation"] == 2
    ours.delete_slice(mine)
    left = installed.cluster.get("ResourceSlice", mine["metadata"]["name"], slices.API_VERSION)
    assert left is None


def test_a_token_that_is_bound_to_no_node_writes_nothing(installed: Installed) -> None:
    """The same account, with a token that names no pod: refused with the reason."""
    loose = installed.cluster.client(installed.cluster.token(ACCOUNT, NAMESPACE))
    one = made(pool("1xMI300X"), "node-a")[0]
    assert "the token is bound to no node" in refused(lambda: loose.create_slice(one))


def test_others_are_not_touched_by_the_policies(installed: Installed) -> None:
    """Other drivers' accounts, administrators, claims with no or others' parameters pass."""
    admin = installed.cluster.admin
    one = made(pool("1xMI300X"), "node-c", driver="gpu.example.com")[0]
    admin.delete_slice(admin.create_slice(one))
    foreign = {"opaque": {"driver": "gpu.example.com", "parameters": {"kind": "Anything"}}}
    for config in ([], [foreign]):
        body = claim_of("shown", config=config)
        admin.request("POST", f"{claims_path()}?dryRun=All", body)


@pytest.mark.parametrize("what", PARAMETERS)
@pytest.mark.parametrize("kind", ["ResourceClaim", "ResourceClaimTemplate", "DeviceClass"])
def test_parameters_are_judged_as_prepare_does(kind: str, what: str, installed: Installed) -> None:
    """Whatever prepare would refuse is refused when it is written, with a line that says why."""
    from alloy_agent.kubernetes.claims import ClaimError, config_of

    parameters, expected = PARAMETERS[what]
    config = [{"opaque": {"driver": DRIVER, "parameters": parameters}}]
    body = claim_of(f"shown-{uuid.uuid4().hex[:8]}", config=config)
    body["kind"] = kind
    if kind == "ResourceClaimTemplate":
        body["spec"] = {"spec": body["spec"]}
    if kind == "DeviceClass":
        body["spec"] = {"config": config}
        del body["metadata"]["namespace"]
    path = path_of(body).rsplit("/", 1)[0]
    answer = refused(lambda: installed.cluster.admin.request("POST", f"{path}?dryRun=All", body))
    assert (expected in answer) if expected else (answer == "")
    try:
        config_of(parameters, "it")
    except ClaimError:
        assert expected
    else:
        assert not expected


# --- rights --------------------------------------------------------------------------------------


def test_the_agents_account_has_these_rights_and_no_others(installed: Installed) -> None:
    """By the server's own word, less what every account has."""

    def rules(client: ApiClient) -> set[tuple[str, str, str, str]]:
        body = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectRulesReview",
            "spec": {"namespace": NAMESPACE},
        }
        path = "/apis/authorization.k8s.io/v1/selfsubjectrulesreviews"
        status = client.request("POST", path, body)["status"]
        assert not status["incomplete"]
        return {
            (group, resource, verb, ",".join(rule.get("resourceNames", ())))
            for rule in status["resourceRules"]
            for group in rule["apiGroups"]
            for resource in rule["resources"]
            for verb in rule["verbs"]
        }

    cluster = installed.cluster
    nobody = {"kind": "ServiceAccount", "apiVersion": "v1", "metadata": {"name": "nobody"}}
    nobody["metadata"] = {"name": "nobody", "namespace": NAMESPACE}
    cluster.apply(nobody)
    everyone = rules(cluster.client(cluster.token("nobody", NAMESPACE)))
    dra = "resource.k8s.io"
    assert rules(installed.agent_a) - everyone == {
        (dra, "resourceclaims", "get", ""),
        (dra, "resourceclaims/status", "patch", ""),
        (dra, "resourceclaims/driver", "associated-node:patch", DRIVER),
        (dra, "resourceslices", "list", ""),
        (dra, "resourceslices", "watch", ""),
        (dra, "resourceslices", "create", ""),
        (dra, "resourceslices", "update", ""),
        (dra, "resourceslices", "delete", ""),
        ("", "nodes", "get", ""),
        ("", "events", "create", ""),
    }


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/api/v1/secrets"),
        ("GET", "/api/v1/pods"),
        ("GET", "/api/v1/nodes"),
        ("GET", f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts"),
        ("GET", claims_path()),
        ("PATCH", "/api/v1/nodes/node-a"),
        ("PATCH", "/api/v1/nodes/node-a/status"),
        ("DELETE", "/api/v1/nodes/node-b"),
        ("DELETE", claims_path(name="any")),
        ("PATCH", claims_path(name="any")),
        ("DELETE", slices_path()),
        ("POST", f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts/{ACCOUNT}/token"),
        ("POST", f"/api/v1/namespaces/{NAMESPACE}/pods"),
    ],
)
def test_what_the_agent_does_not_need_is_forbidden(
    method: str, path: str, installed: Installed
) -> None:
    """Secrets, pods, other nodes, claims beyond reading one by name, slices as a heap: 403."""
    kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
    with pytest.raises(ApiError, match="see the RBAC rules") as caught:
        installed.agent_a.request(method, path, {} if method != "GET" else None, kind=kind)
    assert caught.value.status == 403


def test_the_agents_client_does_all_that_the_agent_does(installed: Installed) -> None:
    """With the token of its account: node, claim, event, slices from birth to end, and a watch."""
    cluster, client = installed.cluster, installed.agent_a
    node = client.node("node-a")
    assert node is not None
    assert node["metadata"]["uid"]
    assert client.resource_claim("default", "there-is-none") is None
    claim = cluster.create(claim_of("read-me"))
    read = client.resource_claim("default", "read-me")
    assert read is not None
    ref = ClaimRef(uid=claim["metadata"]["uid"], namespace="default", name="read-me")
    assert read["metadata"]["uid"] == ref.uid
    client.claim_event(ref, "PrepareFailed", "node-a: nothing is there", reporter=DRIVER)
    events = cluster.admin.request("GET", "/api/v1/namespaces/default/events")["items"]
    assert any(e["involvedObject"].get("uid") == ref.uid for e in events)
    one = made(pool("1xMI300X"), "node-a", node_uid=node["metadata"]["uid"])[0]
    _, version = client.slices(DRIVER, "node-a")
    stored = client.create_slice(one)
    watch = client.watch_slices(DRIVER, "node-a", version, 30.0)
    seen = next(event for event in watch if event["type"] == "ADDED")
    assert seen["object"]["metadata"]["name"] == stored["metadata"]["name"]
    client.delete_slice(stored)
    assert next(event for event in watch if event["type"] == "DELETED")
    watch.close()  # type: ignore[attr-defined]
    client.delete_slice(stored)  # that is gone is fine
    cluster.delete("ResourceClaim", "read-me", slices.API_VERSION)


def test_a_claims_status_is_written_on_its_own_node_alone(installed: Installed) -> None:
    """Beside another driver's entry, by the agent of that node; the next node's is refused."""
    cluster, name = installed.cluster, f"told-{uuid.uuid4().hex[:8]}"
    claim = cluster.create(claim_of(name))
    ref = ClaimRef(uid=claim["metadata"]["uid"], namespace="default", name=name)
    piece = msgspec.structs.replace(PIECE, pool="node-a/gpu-0")
    result = {"request": "piece", "driver": DRIVER, "pool": piece.pool, "device": piece.name}
    other = {**result, "driver": "nic.example.com"}
    field = {"key": "metadata.name", "operator": "In", "values": ["node-a"]}
    claim["status"] = {
        "allocation": {
            "devices": {"results": [result, other]},
            "nodeSelector": {"nodeSelectorTerms": [{"matchFields": [field]}]},
        },
        "reservedFor": [{"resource": "pods", "name": "pod", "uid": "pod-1"}],
    }
    cluster.admin.request("PUT", f"{claims_path(name=name)}/status", claim)
    theirs = {"driver": "nic.example.com", "pool": piece.pool, "device": piece.name}
    assert cluster.admin.claim_devices(ref, "nic.example.com", [theirs])
    record = msgspec.structs.replace(
        RECORD, uid=ref.uid, namespace="default", name=name, pieces=(piece,)
    )
    entries = entries_of(record, DRIVER, "node-a")

    def there() -> dict[str, dict[str, Any]]:
        status = cluster.get("ResourceClaim", name, slices.API_VERSION)["status"]
        return {one["driver"]: one for one in status.get("devices", ())}

    with pytest.raises(ApiError, match="resourceclaims/driver"):
        installed.agent_b.claim_devices(ref, DRIVER, entries)
    assert set(there()) == {"nic.example.com"}
    assert installed.agent_a.claim_devices(ref, DRIVER, entries)
    assert there()[DRIVER]["conditions"][0]["status"] == "True"
    assert there()[DRIVER]["data"]["partition"] == piece.partition
    version = cluster.get("ResourceClaim", name, slices.API_VERSION)["metadata"]["resourceVersion"]
    assert installed.agent_a.claim_devices(ref, DRIVER, entries)
    again = cluster.get("ResourceClaim", name, slices.API_VERSION)["metadata"]["resourceVersion"]
    assert again == version
    replaced = ClaimRef(uid="00000000-0000-4000-8000-000000000000", namespace="default", name=name)
    assert installed.agent_a.claim_devices(replaced, DRIVER, entries) is False
    stranger = [{**entries[0], "device": "not-allocated"}]
    assert refused(lambda: installed.agent_a.claim_devices(ref, DRIVER, stranger))
    with pytest.raises(ApiError):
        installed.agent_a.claim_devices(ref, "nic.example.com", [theirs | {"data": {"a": 1}}])
    assert installed.agent_a.claim_devices(ref, DRIVER, [])
    assert set(there()) == {"nic.example.com"}
    assert "data" not in there()["nic.example.com"]


COMPONENT = ROOT / "deploy" / "daemonset" / "components" / "node-condition"


def test_a_node_tells_of_its_accelerators_beside_others(installed: Installed) -> None:
    """With the component: own conditions of the own node alone; those of others stay."""
    cluster = installed.cluster
    node, client = installed.agent(f"node-{uuid.uuid4().hex[:8]}")
    condition, _ = _due(conditions.UNHEALTHY, {"GPU-0": "lost"})
    with pytest.raises(ApiError, match="403"):
        client.node_condition(node, condition)
    role, binding = documents((COMPONENT / "rbac.yaml").read_text())
    policy, bound = documents((COMPONENT / "policy.yaml").read_text())
    for one in (policy, bound, role, binding):
        cluster.apply(one, dry_run=True)
        cluster.apply(one)
    try:
        # Others' nodes and conditions are kept by the policy, once it is in force.
        cluster.until(
            lambda: (
                "the status of another node"
                in refused(lambda: client.node_condition("node-b", condition))
            )
        )
        client.node_condition(node, condition)
        drained, _ = _due(conditions.DRAINED, {})
        client.node_condition(node, drained)
        ready = {"type": "Ready", "status": "False", "reason": "Lie", "message": "not ours"}
        said = refused(lambda: client.node_condition(node, ready))
        assert "a condition that is not the agent's" in said
        swollen = {"status": {"capacity": {"cpu": "1000"}}}
        path = f"/api/v1/nodes/{node}/status"
        kind = "application/strategic-merge-patch+json"
        said = refused(lambda: client.request("PATCH", path, swollen, kind=kind))
        assert "more of a node's status than conditions" in said
        found = cluster.get("Node", node)["status"]["conditions"]
        assert {one["type"]: one["status"] for one in found} == {
            "Ready": "True",
            conditions.UNHEALTHY.type: "True",
            conditions.DRAINED.type: "False",
        }
        well, _ = _due(conditions.UNHEALTHY, {})
        client.node_condition(node, well)
        found = cluster.get("Node", node)["status"]["conditions"]
        assert {one["type"]: one["status"] for one in found}[conditions.UNHEALTHY.type] == "False"
    finally:
        for one in (binding, role, bound, policy):
            cluster.admin.request("DELETE", path_of(one))
        cluster.until(lambda: "403" in refused(lambda: client.node_condition(node, condition)))


def _due(kind: conditions.Kind, sick: dict[str, str]) -> tuple[Document, conditions.Told]:
    """Return a condition as the agent writes it."""
    found = conditions.condition_of(sick, None, 0.0, "2026-11-30T12:00:00Z", kind)
    assert found is not None
    return found


def test_the_component_adds_to_an_overlay(installed: Installed, tmp_path: Path) -> None:
    """A site's own overlay takes the component in, and all of it is taken by the server."""
    if missing("kubectl"):
        pytest.skip(missing("kubectl"))
    shutil.copytree(ROOT / "deploy" / "daemonset", tmp_path / "daemonset")
    site = tmp_path / "daemonset" / "overlays" / "site"
    site.mkdir()
    (site / "kustomization.yaml").write_text(
        "apiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\n"
        "resources: [../amd]\ncomponents: [../../components/node-condition]\n"
    )
    done = subprocess.run(
        [str(program("kubectl")), "kustomize", str(site)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = documents(done.stdout)
    for one in found:
        installed.cluster.apply(one, dry_run=True)
    (daemonset,) = [one for one in found if one["kind"] == "DaemonSet"]
    env = daemonset["spec"]["template"]["spec"]["containers"][0]["env"]
    values = {one["name"]: one.get("value") for one in env}
    assert values["ALLOY_KUBERNETES_NODE_CONDITION"] == "true"
    assert values["ALLOY_KUBERNETES_VENDORS"] == "amd"


# --- slices --------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("tainted", [False, True])
def test_the_slices_of_every_board_are_taken_as_they_are(
    spec: str, tainted: bool, installed: Installed
) -> None:
    """Nothing is refused, dropped or changed on the way, counters and taints included."""
    taints = (Taint(key=f"{DRIVER}/unhealthy", value="lost", effect="NoExecute"),)
    said = SliceOptions(driver=DRIVER, node="node-a")
    wanted = slices.specs_of(pool(spec), said, taints if tainted else ())
    for one in slices.writes(wanted, (), said).create:
        stored = installed.agent_a.create_slice(one)
        try:
            assert slices.dropped(one, stored) == ()
            assert slices._same(one["spec"], stored["spec"])
        finally:
            installed.agent_a.delete_slice(stored)


# What the server takes although the scheduler then skips the pool without a word.
TAKEN = {
    "an unknown set",
    "an unknown counter",
    "more than there is",
    "generations that differ",
    "a wrong count",
}


@pytest.mark.parametrize("what", BROKEN)
def test_our_check_is_at_least_as_strict_as_the_servers(what: str, installed: Installed) -> None:
    """Of each broken pool the server refuses a slice, or it is one of those it cannot see."""
    objects = valid()
    BROKEN[what](objects)
    assert slices.problems(objects)
    path = f"{slices_path()}?dryRun=All"
    answers = [
        refused(lambda one=one: installed.cluster.admin.request("POST", path, one))  # type: ignore[misc]
        for one in objects
    ]
    assert any(answers) != (what in TAKEN), answers


def specs(pools: list[Pool], *taints: Taint) -> Specs:
    def said(options: SliceOptions) -> dict[str, tuple[Document, ...]]:
        return {
            slices.pool_name(options.node, one.device.id): slices.specs_of(
                one, options, taints if number == 0 else ()
            )
            for number, one in enumerate(pools)
        }

    return said


def test_the_publisher_keeps_a_nodes_slices(installed: Installed) -> None:
    """Written once, one write for a taint, back after a wipe, repaired, raised by a generation."""
    cluster = installed.cluster
    node, client = installed.agent("node-publisher")
    found = client.node(node)
    assert found is not None
    said = SliceOptions(driver=DRIVER, node=node, node_uid=found["metadata"]["uid"])
    publisher = Publisher(client, said)
    pools = [pool("1xH100-SXM5-80GB"), pool("1xMI300X")]

    def there() -> list[Document]:
        return cluster.admin.slices(DRIVER, node)[0]

    def generations() -> dict[str, set[int]]:
        every: dict[str, set[int]] = {}
        for one in there():
            head = one["spec"]["pool"]
            every.setdefault(head["name"], set()).add(head["generation"])
        return every

    def whole() -> bool:
        by_pool: dict[str, list[Document]] = {}
        for one in there():
            by_pool.setdefault(one["spec"]["pool"]["name"], []).append(one)
        return len(by_pool) == 2 and all(not slices.problems(s) for s in by_pool.values())

    publisher.start()
    try:
        publisher.want(specs(pools))
        assert publisher.converged.wait(60)
        assert whole()
        assert publisher.written == 4
        versions = {one["metadata"]["resourceVersion"] for one in there()}
        publisher.want(specs(pools, Taint(key=f"{DRIVER}/unhealthy", value="xid-79")))
        assert publisher.converged.wait(60)
        assert publisher.written == 5
        assert len(versions & {one["metadata"]["resourceVersion"] for one in there()}) == 3
        assert set().union(*generations().values()) == {1}
        times = _times(there())
        publisher.want(
            specs(
                pools,
                Taint(key=f"{DRIVER}/unhealthy", value="xid-79"),
                Taint(key=f"{DRIVER}/draining", value="drained"),
            )
        )
        assert publisher.converged.wait(60)
        assert times.items() <= _times(there()).items(), "an old taint keeps its time"
        path = f"{slices_path()}?fieldSelector=spec.nodeName%3D{node}"
        cluster.admin.request("DELETE", path)  # as a kubelet does that starts
        cluster.until(whole)
        assert publisher.converged.wait(60)
        publisher.want(specs([pool("1xH100-SXM5-80GB", shares=1), pools[1]]))
        assert publisher.converged.wait(60)
        assert whole()
        assert sorted(max(found) for found in generations().values()) == [1, 2]
        spoiled = there()[0]
        spoiled["spec"]["pool"]["resourceSliceCount"] = 9
        cluster.admin.update_slice(spoiled)
        cluster.until(whole)
    finally:
        publisher.stop()
    with pytest.raises(ApiError) as caught:
        client.update_slice(spoiled)  # at a version that is gone
    assert caught.value.status == 409


def _times(found: list[Document]) -> dict[tuple[str, str], str]:
    return {
        (device["name"], taint["key"]): taint["timeAdded"]
        for one in found
        for device in one["spec"].get("devices") or ()
        for taint in device.get("taints") or ()
    }


def test_slices_go_with_their_node_by_reference(installed: Installed) -> None:
    """The owner is the node, as the collector of garbage needs it: kind, name, and UID."""
    node = installed.agent_a.node("node-a")
    assert node is not None
    one = made(pool("1xMI300X"), "node-a", node_uid=node["metadata"]["uid"])[0]
    stored = installed.agent_a.create_slice(one)
    (owner,) = stored["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["name"], owner["uid"]) == (
        "Node",
        "node-a",
        node["metadata"]["uid"],
    )
    installed.agent_a.delete_slice(stored)


def test_the_server_is_named(control: Cluster) -> None:
    """The version that all of this was true for is in the run's output."""
    version = control.admin.request("GET", "/version")
    assert (int(version["major"]), int(version["minor"].rstrip("+"))) >= (1, 34)
    print(json.dumps({"kube-apiserver": version["gitVersion"]}))
