"""The plug-in against a kubelet that registers, calls, restarts and forgets."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from alloy_agent.backends.fake import FakeBackend
from alloy_agent.errors import ConfigError
from alloy_agent.kubernetes.claims import ClaimRef
from alloy_agent.kubernetes.dra import DeviceHealth, DraPlugin, PluginPaths
from tests.fakes.kubelet import FakeKubelet
from tests.kubernetes.world import DRIVER, World

MIG = "1g10gb-6-1"


@pytest.fixture
def root() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="alloy-k-") as folder:  # short: socket paths are
        yield Path(folder)


@pytest.fixture
def kubelet(root: Path) -> Iterator[FakeKubelet]:
    with FakeKubelet(root) as made:
        yield made


@pytest.fixture
def world(root: Path) -> Iterator[World]:
    with World(root, FakeBackend.from_specs(("1xH100-SXM5-80GB",))) as made:
        yield made


def plugin_of(kubelet: FakeKubelet, instance: str = "", **more: Any) -> DraPlugin:
    paths = PluginPaths(
        registry=str(kubelet.registry), plugins=str(kubelet.plugins), instance=instance
    )
    return DraPlugin(DRIVER, paths, **more)


@pytest.fixture
def plugin(kubelet: FakeKubelet, world: World) -> Iterator[DraPlugin]:
    made = plugin_of(kubelet)
    made.start()
    made.attach(world.preparer)
    yield made
    made.stop()


@pytest.mark.parametrize("version", ["v1.DRAPlugin", "v1beta1.DRAPlugin"])
def test_a_claim_goes_through_the_sockets(version: str, root: Path, world: World) -> None:
    """Registered, prepared, answered, unprepared, in the first version the kubelet knows."""
    with FakeKubelet(root, (version,)) as kubelet:
        plugin = plugin_of(kubelet)
        plugin.start()
        plugin.attach(world.preparer)
        assert kubelet.wait().version == version
        pool, _ = world.offers()
        claim = world.claims.add("a", (pool, MIG))
        answer = kubelet.prepare(claim)["a"]
        assert answer.error == ""
        (device,) = answer.devices
        assert (device.pool_name, device.device_name) == (pool, MIG)
        assert list(device.cdi_device_ids) == [f"{DRIVER}/claim=a-{MIG}"]
        assert list(device.request_names) == ["req-0"]
        assert kubelet.unprepare(claim)["a"].error == ""
        assert world.pieces() == []
        plugin.stop()
        kubelet.wait(0)
    assert list(kubelet.registry.iterdir()) == []
    assert list((kubelet.plugins / DRIVER).iterdir()) == []


def test_an_error_of_one_claim_is_its_own(
    plugin: DraPlugin, kubelet: FakeKubelet, world: World
) -> None:
    """One good and one bad claim in a call, and a defect: each has its answer, in one line."""
    pool, _ = world.offers()
    good = world.claims.add("a", (pool, MIG))
    bad = ("b", "default", "b")
    answers = kubelet.prepare(good, bad)
    assert answers["a"].error == ""
    assert "is not in the API server" in answers["b"].error
    assert not answers["b"].devices

    class Defective:
        def prepare(self, ref: ClaimRef, deadline_s: float) -> Any:
            raise KeyError("x")

        def unprepare(self, ref: ClaimRef, deadline_s: float) -> None:
            raise KeyError("x")

    plugin.attach(Defective())
    assert "a defect in the agent: KeyError" in kubelet.prepare(good)["a"].error
    assert "a defect in the agent: KeyError" in kubelet.unprepare(good)["a"].error


def test_calls_wait_for_an_agent_that_is_still_starting(kubelet: FakeKubelet, world: World) -> None:
    """Registered before the devices are open; a call waits, is answered once, or says why not."""
    plugin = plugin_of(kubelet)
    plugin.start()
    pool, _ = world.offers()
    claim = world.claims.add("a", (pool, MIG))
    answers: list[Any] = []
    waiting = threading.Thread(target=lambda: answers.append(kubelet.prepare(claim)), daemon=True)
    waiting.start()
    assert "has not started yet" in kubelet.prepare(claim, timeout_s=1.0)["a"].error
    assert not answers
    plugin.attach(world.preparer)
    waiting.join(30)
    assert answers[0]["a"].error == ""
    plugin.stop()


def test_the_deadline_of_the_kubelet_is_kept(
    plugin: DraPlugin, kubelet: FakeKubelet, world: World
) -> None:
    """A claim in the way is waited for, and the error still reaches the kubelet within its call."""
    pool, _ = world.offers()
    kubelet.prepare(world.claims.add("a", (pool, MIG)))
    blocked = world.claims.add("b", (pool, MIG))
    begun = time.monotonic()
    answer = kubelet.prepare(blocked, timeout_s=3.0)["b"]
    assert "held by claim default/a" in answer.error
    assert time.monotonic() - begun > 1.0


def test_a_kubelet_that_restarts_finds_the_agent_again(
    plugin: DraPlugin, root: Path, kubelet: FakeKubelet, world: World
) -> None:
    """A new kubelet registers the same sockets and gets the same answer for a prepared claim."""
    kubelet.wait()
    pool, _ = world.offers()
    claim = world.claims.add("a", (pool, MIG))
    first = kubelet.prepare(claim)["a"]
    kubelet.stop()
    with FakeKubelet(root) as again:
        assert again.prepare(claim)["a"] == first
        assert again.unprepare(claim)["a"].error == ""


def test_a_killed_agents_sockets_are_taken_over(root: Path, kubelet: FakeKubelet) -> None:
    """Socket files of an agent that was killed do not keep the next one from serving."""
    import socket

    for path in (kubelet.registry / f"{DRIVER}-reg.sock", kubelet.plugins / DRIVER / "dra.sock"):
        path.parent.mkdir(parents=True, exist_ok=True)
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(path))
    plugin = plugin_of(kubelet)
    plugin.start()
    assert kubelet.wait().info.name == DRIVER
    assert plugin.registered.wait(10)
    plugin.stop()


def test_two_agents_stand_beside_each_other_during_an_update(
    kubelet: FakeKubelet, world: World
) -> None:
    """The new one is called once it is there; what the old one prepared it unprepares."""
    old, new = plugin_of(kubelet, "uid-old"), plugin_of(kubelet, "uid-new")
    old.start()
    old.attach(world.preparer)
    kubelet.wait(1)
    pool, _ = world.offers()
    claim = world.claims.add("a", (pool, MIG))
    assert kubelet.prepare(claim)["a"].error == ""
    new.start()
    newest = kubelet.wait(2)
    assert newest.info.endpoint.endswith("dra-uid-new.sock")
    old.stop()
    new.attach(world.preparer)
    kubelet.wait(1)
    assert kubelet.unprepare(claim)["a"].error == ""
    assert world.pieces() == []
    new.stop()


def test_a_kubelet_that_knows_nothing_of_ours_refuses(root: Path) -> None:
    """Of an older kubelet the refusal is logged and nothing is taken for registered."""
    with FakeKubelet(root, ("v1alpha3.Node",)) as kubelet:
        plugin = plugin_of(kubelet)
        plugin.start()
        until = time.monotonic() + 10
        while not kubelet.refused and time.monotonic() < until:
            time.sleep(0.01)
        assert kubelet.refused
        assert not plugin.registered.is_set()
        plugin.stop()


def test_failures_are_told(kubelet: FakeKubelet, world: World) -> None:
    """What the kubelet is refused is told with the reason, for an event on the claim."""
    told: list[tuple[str, str]] = []
    plugin = plugin_of(kubelet, on_failure=lambda ref, reason: told.append((ref.uid, reason)))
    plugin.start()
    plugin.attach(world.preparer)
    kubelet.wait()
    kubelet.prepare(("x", "default", "x"))
    assert [uid for uid, _ in told] == ["x"]
    plugin.stop()


def test_health_is_streamed_whole_and_on_change(plugin: DraPlugin, kubelet: FakeKubelet) -> None:
    """The first message is at once; a change brings the full list again."""
    well = DeviceHealth(pool="node-a/gpu-0", device=MIG, healthy=True)
    other = DeviceHealth(pool="node-a/gpu-1", device=MIG, healthy=None)
    plugin.tell_health((well, other))
    stream = kubelet.health()
    first = next(stream)
    assert [(d.device.device_name, d.health) for d in first.devices] == [(MIG, 1), (MIG, 0)]
    sick = DeviceHealth(pool="node-a/gpu-0", device=MIG, healthy=False, message="XID 79" * 500)
    plugin.tell_health((sick, other))
    second = next(stream)
    assert [d.health for d in second.devices] == [2, 0]
    assert len(second.devices[0].message) == 1024
    stream.close()  # type: ignore[attr-defined]


def test_a_path_that_is_too_long_is_one_line(tmp_path: Path) -> None:
    """A socket path over 107 bytes is refused before anything is served."""
    paths = PluginPaths(registry=str(tmp_path / ("a" * 90)), plugins=str(tmp_path / ("b" * 90)))
    with pytest.raises(ConfigError, match="longer than 107 bytes"):
        DraPlugin(DRIVER, paths).start()


def test_stopping_ends_the_registration_first(plugin: DraPlugin, kubelet: FakeKubelet) -> None:
    """After a stop nobody answers on either socket, and a second stop is harmless."""
    endpoint = kubelet.wait().info.endpoint
    plugin.stop()
    kubelet.wait(0)
    assert not Path(endpoint).exists()
    plugin.stop()
    with (
        grpc.insecure_channel(f"unix:{endpoint}") as channel,
        pytest.raises(grpc.FutureTimeoutError),
    ):
        grpc.channel_ready_future(channel).result(timeout=0.2)
