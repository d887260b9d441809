"""Slices in an API server that conflicts, throttles, forgets, and drops what it does not know."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from alloy_agent.backends.fake import FakeBackend
from alloy_agent.errors import ConfigError
from alloy_agent.kubernetes import slices
from alloy_agent.kubernetes.api import SLICES, ApiAccess, ApiClient, ApiError, in_cluster
from alloy_agent.kubernetes.claims import ClaimRef
from alloy_agent.kubernetes.offers import Pool, pool_of
from alloy_agent.kubernetes.publishing import Publisher, Specs
from alloy_agent.kubernetes.slices import Document, SliceOptions, Taint
from tests.fakes.apiserver import FakeApiServer

OPTIONS = SliceOptions(driver="gpu.alloy.dev", node="node-a", node_uid="uid-1")


@pytest.fixture
def server() -> Iterator[FakeApiServer]:
    with FakeApiServer() as made:
        yield made


@pytest.fixture
def publisher(server: FakeApiServer) -> Iterator[Publisher]:
    made = Publisher(ApiClient(ApiAccess(server=server.url)), OPTIONS)
    made.start()
    yield made
    made.stop()


def pools() -> list[Pool]:
    backend = FakeBackend.from_specs(("2xH100-SXM5-80GB",))
    return [
        pool_of(one.device, one.partitions)
        for one in (backend.observe(device) for device in backend.discover())
    ]


POOLS = pools()


def specs(*taints: Taint, pools: list[Pool] = POOLS) -> Specs:
    """Return what to publish; the taints are on the first pool only."""

    def made(options: SliceOptions) -> dict[str, tuple[Document, ...]]:
        return {
            slices.pool_name(options.node, pool.device.id): slices.specs_of(
                pool, options, taints if number == 0 else ()
            )
            for number, pool in enumerate(pools)
        }

    return made


def until(done: Callable[[], bool], seconds: float = 20.0) -> None:
    """Wait for something, at most so long."""
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end
        time.sleep(0.01)


def valid(server: FakeApiServer) -> bool:
    """Whether each pool in the server is whole, of one generation, and passes the check."""
    by_pool: dict[str, list[Any]] = {}
    for one in server.under(SLICES).values():
        by_pool.setdefault(one["spec"]["pool"]["name"], []).append(one)
    return len(by_pool) == len(POOLS) and all(
        slices.problems(found) == () for found in by_pool.values()
    )


def test_slices_are_published_and_left_alone(server: FakeApiServer, publisher: Publisher) -> None:
    """Two slices a device, owned by the node; the same wish again writes nothing."""
    publisher.want(specs())
    assert publisher.converged.wait(20)
    assert valid(server)
    found = server.under(SLICES)
    assert len(found) == 4
    assert all(one["metadata"]["ownerReferences"][0]["name"] == "node-a" for one in found.values())
    written = publisher.written
    publisher.want(specs())
    assert publisher.converged.wait(20)
    assert publisher.written == written == 4


def test_a_taint_writes_one_slice(server: FakeApiServer, publisher: Publisher) -> None:
    """Health of one device rewrites one object; taking the taint back, one again."""
    publisher.want(specs())
    assert publisher.converged.wait(20)
    publisher.want(specs(Taint(key="gpu.alloy.dev/unhealthy", value="xid-79")))
    assert publisher.converged.wait(20)
    assert publisher.written == 5
    tainted = [
        one
        for one in server.under(SLICES).values()
        if any(d.get("taints") for d in one["spec"].get("devices", ()))
    ]
    assert len(tainted) == 1
    publisher.want(specs())
    assert publisher.converged.wait(20)
    assert publisher.written == 6
    assert valid(server)


def test_slices_that_a_kubelet_deletes_come_back(
    server: FakeApiServer, publisher: Publisher
) -> None:
    """All gone at once, twice, the second time after they came back: they are there again."""
    publisher.want(specs())
    assert publisher.converged.wait(20)
    for _ in range(2):
        for path in server.under(SLICES):
            server.delete(path)
        until(lambda: valid(server))


def test_foreign_changes_are_put_right_and_strangers_stay(
    server: FakeApiServer, publisher: Publisher
) -> None:
    """A pool that should not be goes, a changed one is repaired; other drivers' slices stay."""
    other = {"spec": {"driver": "gpu.nvidia.com", "nodeName": "node-a", "pool": {"name": "x"}}}
    server.put(f"{SLICES}/theirs", other)
    ghost = {
        "spec": {
            "driver": OPTIONS.driver,
            "nodeName": "node-a",
            "pool": {"name": "node-a/ghost", "generation": 1, "resourceSliceCount": 1},
            "devices": [],
        }
    }
    server.put(f"{SLICES}/ghost", ghost)
    publisher.want(specs())
    assert publisher.converged.wait(20)
    ours = [p for p in server.under(SLICES) if not p.endswith("/theirs")]
    assert len(ours) == 4
    broken = server.under(SLICES)[sorted(ours)[-1]]
    broken["spec"]["devices"] = broken["spec"].get("devices", [])[:1]
    broken["spec"].pop("sharedCounters", None)
    server.put(sorted(ours)[-1], broken)
    until(
        lambda: all(
            len(one["spec"].get("devices", ())) != 1
            for path, one in server.under(SLICES).items()
            if not path.endswith("/theirs")
        )
    )
    assert f"{SLICES}/theirs" in server.objects


@pytest.mark.parametrize("status", [409, 429, 500, 503, 0])
def test_a_server_in_trouble_is_tried_again(
    status: int, server: FakeApiServer, publisher: Publisher
) -> None:
    """Conflicts, throttling, failures and silence end in the wanted state."""
    server.fail.extend([("POST", status)] * 2)
    publisher.want(specs())
    assert publisher.converged.wait(30)
    assert valid(server)
    assert len(server.under(SLICES)) == 4


def test_a_server_without_counters_gets_a_static_layout(
    server: FakeApiServer, publisher: Publisher
) -> None:
    """Fields that come back dropped turn the feature off; nothing half is left published."""
    server.strip = {"sharedCounters", "consumesCounters"}
    publisher.want(specs())
    until(lambda: not publisher.options.counters)
    assert publisher.converged.wait(20)
    assert publisher.options.taints
    for one in server.under(SLICES).values():
        assert one["spec"].get("devices")
        assert one["spec"]["pool"]["resourceSliceCount"] == 1


def test_an_invalid_pool_is_not_written_and_the_others_are(
    server: FakeApiServer, publisher: Publisher
) -> None:
    """A pool with a defect stays out with the reason; its neighbours are published."""
    import msgspec

    bad = msgspec.structs.replace(POOLS[0], counters={"slices-0": {"other": 1}})
    publisher.want(specs(pools=[bad, POOLS[1]]))
    until(lambda: "is not published" in publisher.problem)
    assert {one["spec"]["pool"]["name"] for one in server.under(SLICES).values()} == {
        slices.pool_name("node-a", POOLS[1].device.id)
    }


def test_errors_of_the_server_are_one_line(server: FakeApiServer) -> None:
    """403, an answer that is no JSON, and nobody there: thing, cause and where to look."""
    client = ApiClient(ApiAccess(server=server.url, timeout_s=2.0))
    server.fail.append(("", 403))
    with pytest.raises(ApiError, match="403 scripted 403: see the RBAC") as caught:
        client.resource_claim("default", "a")
    assert caught.value.status == 403
    assert client.resource_claim("default", "a/../b") is None
    with pytest.raises(ApiError, match="see whether the node reaches"):
        ApiClient(ApiAccess(server="http://127.0.0.1:9", timeout_s=0.2))._once("GET", "/", None, "")
    for address in ("ftp://x", "http://10.0.0.1:6443", "nonsense"):
        with pytest.raises(ConfigError):
            ApiClient(ApiAccess(server=address))


def test_an_event_tells_on_the_claim(server: FakeApiServer) -> None:
    """A warning with the reason is put on the claim of the pod that waits."""
    client = ApiClient(ApiAccess(server=server.url))
    ref = ClaimRef(uid="u", namespace="team", name="claim")
    client.claim_event(ref, "PrepareFailed", "x" * 2000, reporter="gpu.alloy.dev")
    (event,) = server.events
    assert event["involvedObject"]["uid"] == "u"
    assert len(event["message"]) == 1024


def test_a_pod_finds_its_server() -> None:
    """From the variables that every pod has; outside of a pod there is none."""
    found = in_cluster({"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "443"})
    assert found is not None
    assert found.server == "https://[fd00::1]:443"
    assert in_cluster({}) is None


def test_what_was_overtaken_is_looked_at_again_at_once(
    server: FakeApiServer, publisher: Publisher, caplog: pytest.LogCaptureFixture
) -> None:
    """A few conflicts cost no delay and no warning; conflicts without end do."""
    server.fail.extend([("POST", 409)] * 4)
    publisher.want(specs())
    assert publisher.converged.wait(30)
    assert valid(server)
    assert "slices_not_published" not in caplog.text
    for path in server.under(SLICES):
        server.delete(path)
    server.fail.extend([("POST", 409)] * 30)
    until(lambda: "scripted 409" in publisher.problem, 60.0)
    assert publisher.converged.wait(60)
    assert valid(server)


def test_a_connection_is_used_again(server: FakeApiServer) -> None:
    """Many requests go over one connection; one that the server closed is replaced silently."""
    client = ApiClient(ApiAccess(server=server.url))
    made: list[float] = []
    connect = client._connect

    def counting(timeout_s: float) -> Any:
        made.append(timeout_s)
        return connect(timeout_s)

    client._connect = counting  # type: ignore[method-assign]
    for _ in range(5):
        assert client.resource_claim("default", "none") is None
    assert len(made) == 1
    ((_, idle),) = client._idle
    idle.sock.shutdown(socket.SHUT_RDWR)
    assert client.resource_claim("default", "none") is None
    assert len(made) == 2
    client.close()
    assert client.resource_claim("default", "none") is None
    assert len(made) == 3


def test_an_idle_connection_grows_old(
    server: FakeApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a while it is not trusted any more, and a new one is made."""
    from alloy_agent.kubernetes import api

    client = ApiClient(ApiAccess(server=server.url))
    assert client.resource_claim("default", "none") is None
    ((_, first),) = client._idle
    monkeypatch.setattr(api, "IDLE_S", 0.0)
    assert client.resource_claim("default", "none") is None
    ((_, second),) = client._idle
    assert second is not first
    assert first.sock is None
