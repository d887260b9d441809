"""The kubelet's gRPC probes against a real server on a real port."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from alloy_agent.errors import ConfigError
from alloy_agent.kubernetes.dra import DraPlugin, PluginPaths
from alloy_agent.kubernetes.probes import LIVENESS, READINESS, ProbeServer
from tests.fakes.kubelet import FakeKubelet

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture
def reasons() -> dict[str, str]:
    return {LIVENESS: "", READINESS: ""}


@pytest.fixture
def probes(reasons: dict[str, str]) -> Iterator[ProbeServer]:
    checks = {name: lambda name=name: reasons[name] for name in reasons}
    made = ProbeServer("127.0.0.1:0", checks)
    made.start()
    yield made
    made.stop()


def probe(address: str, service: str) -> int:
    """Do what a kubelet does for one probe."""
    with grpc.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service=service)
        return int(stub.Check(request, timeout=30, wait_for_ready=True).status)


def test_each_name_answers_for_itself(probes: ProbeServer, reasons: dict[str, str]) -> None:
    """Red where it is red; the empty name is red when any is."""
    assert [probe(probes.address, s) for s in (LIVENESS, READINESS, "")] == [SERVING] * 3
    reasons[READINESS] = "not registered"
    assert probe(probes.address, LIVENESS) == SERVING
    assert probe(probes.address, READINESS) == NOT_SERVING
    assert probe(probes.address, "") == NOT_SERVING


def test_nothing_else_is_to_be_had(probes: ProbeServer) -> None:
    """Unknown names are not found, and no other method is there."""
    with pytest.raises(grpc.RpcError) as caught:
        probe(probes.address, "brain")
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    with grpc.insecure_channel(probes.address) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(
            health_pb2.HealthCheckRequest(), timeout=30
        )
        with pytest.raises(grpc.RpcError) as caught:
            next(watch)
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize("address", ["", "9465", "0.0.0.0:", "host:ssh", "0.0.0.0:70000"])
def test_an_address_that_is_none_is_refused(address: str) -> None:
    """One line with the cure, before anything listens."""
    with pytest.raises(ConfigError, match=r"write it like 0\.0\.0\.0:9465"):
        ProbeServer(address, {}).start()


def test_a_port_that_is_taken_is_told(probes: ProbeServer) -> None:
    """A second agent on the port does not share it silently."""
    with pytest.raises(ConfigError, match="a port that nobody has"):
        ProbeServer(probes.address, {}).start()


def test_a_plugin_answers_on_its_own_socket(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Alive while it serves, ready once a kubelet took it, neither after its end."""
    root = Path(tmp_path_factory.mktemp("p"))
    taken = threading.Event()
    paths = PluginPaths(registry=f"{root}/plugins_registry", plugins=f"{root}/plugins")
    plugin = DraPlugin("gpu.alloy.dev", paths, on_registered=taken.set)
    assert "UNAVAILABLE" in plugin.answers()
    plugin.start()
    try:
        assert plugin.answers() == ""
        assert not plugin.registered.is_set()
        with FakeKubelet(root):
            assert taken.wait(30)
            assert plugin.registered.is_set()
    finally:
        plugin.stop()
    assert plugin.answers()
