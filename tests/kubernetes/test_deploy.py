"""What is installed on a cluster: valid, least, explained, and one thing in both packagings.

Schemas are those of Kubernetes itself (offline). They see structure, not meaning; where a real API
server can be had, that is the better judge: `test_apiserver.py`.
"""

from __future__ import annotations

import copy
import importlib.util
import re
import subprocess
import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from alloy_agent.config import read_settings
from alloy_agent.kubernetes import slices
from alloy_agent.kubernetes.claims import config_of
from alloy_agent.kubernetes.offers import pool_of
from alloy_agent.kubernetes.probes import LIVENESS, READINESS
from alloy_agent.model import Vendor
from tests.kubernetes.test_slices import OPTIONS, numbered
from tests.kubernetes.world import DRIVER

ROOT = Path(__file__).resolve().parents[2]
BASE = ROOT / "deploy" / "daemonset" / "base"
OVERLAYS = ROOT / "deploy" / "daemonset" / "overlays"
COMPONENT = ROOT / "deploy" / "daemonset" / "components" / "node-condition"
EXAMPLES = ROOT / "examples" / "kubernetes"
# Kubernetes merges these lists by a key; so does a patch.
MERGED = {"containers": "name", "env": "name", "volumes": "name", "volumeMounts": "mountPath"}


def documents(path: Path) -> list[dict[str, Any]]:
    return [one for one in yaml.safe_load_all(path.read_text()) if one]


def base() -> list[dict[str, Any]]:
    names = yaml.safe_load((BASE / "kustomization.yaml").read_text())["resources"]
    return [one for name in names for one in documents(BASE / name)]


def of_kind(kind: str) -> list[dict[str, Any]]:
    return [one for one in base() if one["kind"] == kind]


def merge(one: Any, patch: Any, key: str = "") -> Any:
    if isinstance(one, dict) and isinstance(patch, dict):
        return {**one, **{k: merge(one[k], v, k) if k in one else v for k, v in patch.items()}}
    if isinstance(one, list) and isinstance(patch, list) and key in MERGED:
        by = MERGED[key]
        found = {entry[by]: entry for entry in one}
        for entry in patch:
            found[entry[by]] = merge(found[entry[by]], entry) if entry[by] in found else entry
        return list(found.values())
    return patch


def overlay(name: str) -> dict[str, Any]:
    kustomization = yaml.safe_load((OVERLAYS / name / "kustomization.yaml").read_text())
    made = of_kind("DaemonSet")[0]
    for patch in kustomization["patches"]:
        made = merge(made, documents(OVERLAYS / name / patch["path"])[0])
    return dict(made)


def validate(document: dict[str, Any], version: str) -> None:
    kubernetes_validate = pytest.importorskip(
        "kubernetes_validate", reason="kubernetes-validate (extra `test`) is not installed"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kubernetes_validate.validate(copy.deepcopy(document), version, strict=True)


@pytest.mark.parametrize("version", ["1.34", "1.36"])
def test_everything_keeps_the_schemas(version: str) -> None:
    """Base, overlays, examples and the slices that the agent writes, strictly."""
    found = [*base(), *(overlay(path.name) for path in OVERLAYS.iterdir())]
    found += [one for name in ("rbac", "policy") for one in documents(COMPONENT / f"{name}.yaml")]
    found += [one for path in EXAMPLES.glob("*.yaml") for one in documents(path)]
    assert len(found) > 15
    for document in found:
        validate(document, version)
    from alloy_agent.backends.fake import FakeBackend

    for spec in ("1xH100-SXM5-80GB", "1xMI300X", "trn2.48xlarge"):
        backend = FakeBackend.from_specs((spec,))
        seen = backend.observe(backend.discover()[0])
        for one in numbered(pool_of(seen.device, seen.partitions)):
            validate({**one, "metadata": {"name": "slice"}}, version)
    assert slices.problems(numbered(pool_of(seen.device))) == ()


@pytest.fixture(scope="module")
def chart() -> ModuleType:
    path = ROOT / "scripts" / "render_chart.py"
    spec = importlib.util.spec_from_file_location("render_chart", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_chart_is_the_base_with_values(chart: ModuleType) -> None:
    """Current, and with its defaults the same objects, but for settings it names itself."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "render_chart.py"), "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    rendered = [
        one
        for text in chart.templates().values()
        for one in yaml.safe_load_all(chart.render(text, chart.values()))
        if one
    ]
    for one in rendered:
        validate(one, "1.36")
    plain = {(o["kind"], o["metadata"]["name"]): o for o in base() if o["kind"] != "Namespace"}
    assert {(o["kind"], o["metadata"]["name"]) for o in rendered} == set(plain)
    for one in rendered:
        want = plain[one["kind"], one["metadata"]["name"]]
        if one["kind"] == "DaemonSet":
            env = one["spec"]["template"]["spec"]["containers"][0]["env"]
            mine = {"DRIVER", "KUBELET_DIR", "VENDORS"}
            env[:] = [e for e in env if e["name"].removeprefix("ALLOY_KUBERNETES_") not in mine]
        assert one == want
    other = {**chart.values(), "driver": "gpu.example.com", "namespace": "elsewhere"}
    text = "".join(chart.render(text, other) for text in chart.templates().values())
    assert "gpu.alloy.dev" not in text
    assert "alloy-system" not in text


@pytest.mark.parametrize("name", ["nvidia", "amd", "neuron"])
def test_the_variables_of_the_pod_are_settings(name: str) -> None:
    """What the pod sets is understood, and makes the agent the driver of this node."""
    container = overlay(name)["spec"]["template"]["spec"]["containers"][0]
    environ = {
        one["name"]: one.get("value", "6f1c0e1a-0000-4000-8000-000000000001")
        for one in container["env"]
    }
    settings = read_settings(None, environ)
    assert settings.kubernetes.enabled
    assert settings.kubernetes.vendors == (Vendor(name),)
    assert settings.kubernetes.driver == DRIVER
    assert settings.kubernetes.instance
    known = {key for key in environ if key.startswith("ALLOY_")}
    assert len(known) == 7


def test_rights_are_the_ones_that_are_used() -> None:
    """No wildcard, no secret, nothing on nodes but reading; each rule has its reason above it."""
    (role,) = of_kind("ClusterRole")
    rules = {(r["apiGroups"][0], r["resources"][0]): set(r["verbs"]) for r in role["rules"]}
    assert rules == {
        ("resource.k8s.io", "resourceclaims"): {"get"},
        ("resource.k8s.io", "resourceclaims/status"): {"patch"},
        ("resource.k8s.io", "resourceclaims/driver"): {"associated-node:patch"},
        ("resource.k8s.io", "resourceslices"): {"list", "watch", "create", "update", "delete"},
        ("", "nodes"): {"get"},
        ("", "events"): {"create"},
    }
    lines = (BASE / "rbac.yaml").read_text().splitlines()
    for number, line in enumerate(lines):
        if line.startswith("  - apiGroups"):
            assert lines[number - 1].startswith("  # ")


def test_the_kubelet_probes_what_answers() -> None:
    """All three probes ask the health protocol, on the port that is opened, names that it knows."""
    (daemonset,) = of_kind("DaemonSet")
    (container,) = daemonset["spec"]["template"]["spec"]["containers"]
    environ = {one["name"]: one.get("value", "") for one in container["env"]}
    port = int(environ["ALLOY_KUBERNETES_PROBE_ADDRESS"].rsplit(":", 1)[1])
    assert {one["name"]: one["containerPort"] for one in container["ports"]}["probes"] == port
    asked = {
        kind: container[f"{kind}Probe"]["grpc"] for kind in ("startup", "readiness", "liveness")
    }
    assert {one["port"] for one in asked.values()} == {port}
    assert [one["service"] for one in asked.values()] == [READINESS, READINESS, LIVENESS]
    (network,) = of_kind("NetworkPolicy")
    assert port in [p["port"] for rule in network["spec"]["ingress"] for p in rule["ports"]]


def test_every_host_path_has_its_reason() -> None:
    """Each hostPath is mounted, and a comment says what it is for."""
    lines = (BASE / "daemonset.yaml").read_text().splitlines()
    (daemonset,) = of_kind("DaemonSet")
    pod = daemonset["spec"]["template"]["spec"]
    mounted = {mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
    for volume in pod["volumes"]:
        assert volume["name"] in mounted
        if "hostPath" in volume and volume["name"] not in ("sys", "dev"):
            at = lines.index(f"        - name: {volume['name']}")
            assert lines[at - 1].strip().startswith("#"), volume["name"]
    assert pod["priorityClassName"] == "system-node-critical"
    assert pod["terminationGracePeriodSeconds"] > 45
    assert pod["containers"][0]["securityContext"]["readOnlyRootFilesystem"]


def test_the_policy_keeps_an_agent_to_its_own_slices() -> None:
    """It matches our account, and looks at node and driver of creates, updates and deletes."""
    (policy,) = [p for p in of_kind("ValidatingAdmissionPolicy") if "own" in p["metadata"]["name"]]
    (account,) = of_kind("ServiceAccount")
    namespace = account["metadata"]["namespace"]
    text = yaml.safe_dump(policy)
    assert f"system:serviceaccount:{namespace}:{account['metadata']['name']}" in text
    rule = policy["spec"]["matchConstraints"]["resourceRules"][0]
    assert set(rule["operations"]) == {"CREATE", "UPDATE", "DELETE"}
    assert f'"{OPTIONS.driver}"' in text
    bound = {b["spec"]["policyName"] for b in of_kind("ValidatingAdmissionPolicyBinding")}
    assert bound == {p["metadata"]["name"] for p in of_kind("ValidatingAdmissionPolicy")}


def test_classes_ask_for_kinds_that_are_published() -> None:
    """Each device class names our driver and a type that a slice carries."""
    kinds = set()
    for one in of_kind("DeviceClass"):
        expression = one["spec"]["selectors"][0]["cel"]["expression"]
        assert f'device.driver == "{DRIVER}"' in expression
        match = re.search(r'\.type == "(\w+)"', expression)
        assert match is not None
        kinds.add(match[1])
    assert kinds == {"device", "mig", "xcd", "cores", "share"}


def test_the_parameters_of_the_example_are_taken() -> None:
    """The example's opaque configuration is one that prepare accepts."""
    (template,) = [
        one
        for one in documents(EXAMPLES / "share-pod.yaml")
        if one["kind"] == "ResourceClaimTemplate"
    ]
    (entry,) = template["spec"]["spec"]["devices"]["config"]
    assert entry["opaque"]["driver"] == DRIVER
    assert config_of(entry["opaque"]["parameters"], "the example").loss_budget_ratio == 0.02


def test_the_image_is_built_from_a_pinned_base_and_hashed_wheels() -> None:
    """The base has no default tag, each wheel is one of known hash, and nothing is fetched."""
    text = (ROOT / "Dockerfile").read_text()
    assert re.search(r"^ARG BASE$", text, re.MULTILINE)
    assert "--require-hashes --no-deps" in text
    assert "--no-index" in text
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert ignored[0] == "*"
    for line in re.findall(r"^COPY (?!--from)(.*) \S+$", text, re.MULTILINE):
        for name in line.split():
            assert f"!{name}" in ignored, name
