"""The CEL in what is installed, evaluated without a cluster by the language's own C++ runtime.

It has what the expressions use (optional fields and macros) and not Kubernetes' own functions
(quantities); a real API server, where there is one, has the last word in `test_apiserver.py`.
"""

from __future__ import annotations

from typing import Any

import pytest

from alloy_agent.kubernetes import slices
from tests.kubernetes.installed import ACCOUNT, DRIVER, NAMESPACE, PARAMETERS, base, made, pool
from tests.kubernetes.test_slices import SPECS

REASON = "cel-expr-python (extra `test`) is not installed"
cel = pytest.importorskip("cel_expr_python.cel", reason=REASON)
optional = pytest.importorskip("cel_expr_python.ext.ext_optional", reason=REASON)
NODE = "authentication.kubernetes.io/node-name"


def evaluate(expression: str, **names: Any) -> Any:
    """Return the value of an expression over these names."""
    environment = cel.NewEnv(
        variables=dict.fromkeys(names, cel.Type.DYN), extensions=[optional.ExtOptional()]
    )
    return environment.compile(expression).eval(data=names).plain_value()


def policy(name: str) -> dict[str, Any]:
    """Return the spec of an admission policy."""
    (found,) = [
        one
        for one in base()
        if (one["kind"], one["metadata"]["name"]) == ("ValidatingAdmissionPolicy", name)
    ]
    return dict(found["spec"])


def judged(name: str, **names: Any) -> list[str]:
    """Return the messages of all validations of a policy that fail; it must match."""
    spec = policy(name)
    for condition in spec.get("matchConditions", ()):
        assert evaluate(condition["expression"], **names) is True
    variables: dict[str, Any] = {}
    for one in spec["variables"]:
        variables[one["name"]] = evaluate(one["expression"], variables=variables, **names)
    return [
        one["message"]
        for one in spec["validations"]
        if evaluate(one["expression"], variables=variables, **names) is not True
    ]


@pytest.mark.parametrize("spec", SPECS)
def test_each_device_is_of_exactly_one_class(spec: str) -> None:
    """Whatever a board publishes is selected by the class of its kind, and by no other."""
    classes = {one["metadata"]["name"]: one for one in base() if one["kind"] == "DeviceClass"}
    for found in {"alone": pool(spec), "shared": pool(spec, shares=1)}.values():
        devices = [d for one in made(found, "node-a") for d in one["spec"].get("devices") or ()]
        assert devices
        for device in devices:
            attributes = {
                key: next(iter(value.values())) for key, value in device["attributes"].items()
            }
            own = {key: value for key, value in attributes.items() if "/" not in key}
            shown = {"driver": DRIVER, "attributes": {DRIVER: own}}
            matching = [
                name
                for name, one in classes.items()
                if evaluate(one["spec"]["selectors"][0]["cel"]["expression"], device=shown)
            ]
            assert matching == [f"{own['type']}.alloy.dev"]
    other = {"driver": "gpu.example.com", "attributes": {DRIVER: {"type": "device"}}}
    for one in classes.values():
        assert not evaluate(one["spec"]["selectors"][0]["cel"]["expression"], device=other)


def request(operation: str, node: str | None = "node-a") -> dict[str, Any]:
    extra = {} if node is None else {NODE: [node]}
    user = {"username": f"system:serviceaccount:{NAMESPACE}:{ACCOUNT}", "extra": extra}
    return {"operation": operation, "userInfo": user}


@pytest.mark.parametrize("operation", ["CREATE", "UPDATE", "DELETE"])
def test_the_policy_of_slices(operation: str) -> None:
    """Own node and driver pass; another node, no node, all nodes, another driver do not."""
    (mine, *_) = made(pool("1xMI300X"), "node-a")

    def said(document: dict[str, Any], node: str | None = "node-a") -> list[str]:
        gone = operation == "DELETE"
        return judged(
            "alloy-agent-own-slices",
            request=request(operation, node),
            object=None if gone else document,
            oldObject=document if gone else None,
        )

    assert said(mine) == []
    assert said(mine, "node-b") == ["a slice of another node"]
    assert said(mine, None) == ["the token is bound to no node", "a slice of another node"]
    everywhere = {**mine["spec"], "allNodes": True}
    del everywhere["nodeName"]
    assert said({**mine, "spec": everywhere}) == ["a slice of another node"]
    foreign = {**mine, "spec": {**mine["spec"], "driver": "gpu.example.com"}}
    assert said(foreign) == ["a slice of another driver"]


def test_the_policy_of_slices_is_for_the_agent_alone() -> None:
    """Another account's request is not looked at."""
    (condition,) = policy("alloy-agent-own-slices")["matchConditions"]
    mine, other = request("CREATE"), request("CREATE")
    other["userInfo"] = {**other["userInfo"], "username": "system:serviceaccount:x:alloy-agent"}
    assert evaluate(condition["expression"], request=mine) is True
    assert evaluate(condition["expression"], request=other) is False


@pytest.mark.parametrize("resource", ["resourceclaims", "resourceclaimtemplates", "deviceclasses"])
@pytest.mark.parametrize("what", PARAMETERS)
def test_the_policy_of_parameters(what: str, resource: str) -> None:
    """Each object that carries parameters is judged, wherever they lie in it."""
    parameters, expected = PARAMETERS[what]
    config = [{"opaque": {"driver": DRIVER, "parameters": parameters}}]
    spec: dict[str, Any] = {"devices": {"config": config}}
    if resource == "resourceclaimtemplates":
        spec = {"spec": spec}
    if resource == "deviceclasses":
        spec = {"config": config}
    asked = {"resource": {"resource": resource}, "operation": "CREATE"}
    messages = judged("alloy-claim-parameters", request=asked, object={"spec": spec})
    if expected:
        assert any(expected in message for message in messages)
    else:
        assert messages == []


@pytest.mark.parametrize("resource", ["resourceclaims", "resourceclaimtemplates", "deviceclasses"])
def test_what_has_no_parameters_of_ours_passes(resource: str) -> None:
    """None at all, an empty claim, and another driver's."""
    asked = {"resource": {"resource": resource}, "operation": "CREATE"}
    foreign = [{"opaque": {"driver": "gpu.example.com", "parameters": {"kind": "Any"}}}]
    none: dict[str, Any] = {}
    theirs: dict[str, Any] = {"devices": {"config": foreign}, "config": foreign}
    for devices in (none, {"devices": none}, theirs):
        spec = {"spec": devices} if resource == "resourceclaimtemplates" else devices
        assert judged("alloy-claim-parameters", request=asked, object={"spec": spec}) == []


def test_the_rows_are_those_of_the_slices() -> None:
    """The kinds that slices publish are those that have a class."""
    kinds = {
        slices.kind_of(found.device, offer)
        for spec in SPECS
        for found in (pool(spec, shares=1),)
        for offer in found.offers
    }
    names = {one["metadata"]["name"] for one in base() if one["kind"] == "DeviceClass"}
    assert {f"{kind}.alloy.dev" for kind in kinds} <= names
