"""Faults that users of such drivers met in the field; each must end well here."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from alloy_agent.backends.fake import FakeBackend
from alloy_agent.config import KubernetesSettings
from alloy_agent.errors import AlloyError
from alloy_agent.kubernetes.api import SLICES
from alloy_agent.kubernetes.driver import KubernetesDriver, Now
from alloy_agent.model import Condition, DeviceId, Vendor
from alloy_agent.silicon.refusals import SimulatedCrash
from alloy_agent.silicon.state import Fault
from tests.fakes.apiserver import FakeApiServer
from tests.fakes.kubelet import FakeKubelet
from tests.kubernetes.test_daemon import DRIVER, agent_of, allocate, until, whole
from tests.kubernetes.test_preparing import H100, MIG, lifetime, ref, soon, survive
from tests.kubernetes.world import Claims, Joined, World


@pytest.fixture
def root() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="alloy-f-") as folder:
        yield Path(folder)


@pytest.fixture
def server() -> Iterator[FakeApiServer]:
    with FakeApiServer() as made:
        made.put("/api/v1/nodes/node-a", {"metadata": {"name": "node-a", "uid": "node-uid"}})
        yield made


# --- an instance made, the compute instance failed -----------------------------------------------


@pytest.mark.parametrize(
    "call", ["gpu.create_gpu_instance", "gpu.create_compute_instance", "gpu.destroy_gpu_instance"]
)
def test_a_vendor_call_that_fails_once_leaves_no_slot_used(call: str, root: Path) -> None:
    """Whatever fails in the middle: the next prepare succeeds, and nothing is left."""
    backend, claims = FakeBackend.from_specs(H100), Claims()
    with World(root, backend, claims) as world:
        pool, _ = world.offers()
        claim = claims.add("a", (pool, MIG))
        backend.machine.add_fault(
            Fault(call=call, action="error", error="insufficient_resources", times=1)
        )
        for _ in range(3):
            with contextlib.suppress(AlloyError):
                world.preparer.prepare(ref(claim), soon())
                break
        assert world.preparer.prepare(ref(claim), soon())
        (piece,) = world.pieces()
        for _ in range(3):
            with contextlib.suppress(AlloyError):
                world.preparer.unprepare(ref(claim), soon())
                break
        assert world.pieces() == []
        assert backend.machine.nvidia(str(piece.device)).instances() == ()


@pytest.mark.slow
def test_a_death_in_every_single_vendor_call_recovers(root: Path) -> None:
    """The sweep of the fast test, with no call left out."""
    backend, claims = FakeBackend.from_specs(H100), Claims()
    with World(root / "count", backend, claims) as world:
        pool, _ = world.offers()
        start = backend.machine.calls
        lifetime(world, claims.add("a", (pool, MIG)))
        end = backend.machine.calls
    for number in range(start + 1, end + 1):
        backend, claims = FakeBackend.from_specs(H100), Claims()
        with World(root / str(number), backend, claims) as world:
            pool, _ = world.offers()
            backend.machine.crash_at(number)
            with contextlib.suppress(SimulatedCrash):
                lifetime(world, claims.add("a", (pool, MIG)))
            backend.machine.state.crash_at = None
        survive(root / str(number), backend, claims, pool, f"call {number}")


# --- one bad byte in the state -------------------------------------------------------------------


def test_damaged_state_is_no_crash_loop(root: Path, server: FakeApiServer) -> None:
    """With a torn state file the agent registers, refuses in one line, and touches nothing."""
    with FakeKubelet(root) as kubelet:
        with agent_of(root, server) as agent:
            kubelet.wait(timeout_s=40)
            pool = sorted(until(lambda: whole(server)))[0]
            claim = allocate(server, "claim-1", pool, "1g10gb-6-1")
            assert kubelet.prepare(claim)["claim-1"].error == ""
            agent.stop()
        state = root / "state" / "state.db"
        data = bytearray(state.read_bytes())
        data[4096:8192] = os.urandom(4096)
        state.write_bytes(bytes(data))
        for rest in (root / "state").glob("state.db-*"):
            rest.unlink()
        with agent_of(root, server) as agent:
            kubelet.wait(timeout_s=40)
            answer = kubelet.prepare(allocate(server, "claim-2", pool, "1g10gb-5-1"))["claim-2"]
            assert "no changes are made" in answer.error
            assert "\n" not in answer.error
            assert len(list((root / "cdi").iterdir())) == 1, "what is in use stays as it is"
            assert agent.process.poll() is None


# --- a driver that dies --------------------------------------------------------------------------


def test_a_killed_agent_is_back_before_the_kubelet_forgets_it(
    root: Path, server: FakeApiServer
) -> None:
    """From a cold start to the first answered prepare it takes far less than 30 seconds."""
    with FakeKubelet(root) as kubelet:
        with agent_of(root, server) as agent:
            kubelet.wait(timeout_s=40)
            pool = sorted(until(lambda: whole(server)))[0]
            agent.stop(signal.SIGKILL)
        claim = allocate(server, "claim-1", pool, "1g10gb-6-1")
        begun = time.monotonic()
        with agent_of(root, server) as agent:
            until(lambda: len(kubelet.endpoints) == 1)
            until(lambda: _answered(kubelet, claim))
            took = time.monotonic() - begun
            print(f"cold start to first prepare: {took:.2f} s")
            assert took < 29


def _answered(kubelet: FakeKubelet, claim: tuple[str, str, str]) -> bool:
    import grpc

    try:
        return not kubelet.prepare(claim)["claim-1"].error
    except grpc.RpcError:
        return False  # the channel to the dead one


def test_slices_come_back_within_seconds_of_a_kubelets_start(
    root: Path, server: FakeApiServer
) -> None:
    """A kubelet that starts deletes all slices; the pools are whole again soon."""
    with agent_of(root, server), FakeKubelet(root) as kubelet:
        kubelet.wait(timeout_s=40)
        until(lambda: whole(server))
        begun = time.monotonic()
        for path in server.under(SLICES):
            server.delete(path)
        until(lambda: whole(server), 20)
        print(f"slices back after {time.monotonic() - begun:.2f} s")


# --- the driver on its own: taints, drains, owners -----------------------------------------------


class Driven:
    """A driver over one node of simulated silicon, ticked by hand."""

    def __init__(self, root: Path, server: FakeApiServer, **settings: Any) -> None:
        self.world = World(root, FakeBackend.from_specs(("2xH100-SXM5-80GB",)))
        self.owned: frozenset[Vendor] = frozenset()
        self.server = server
        self.driver = KubernetesDriver(
            KubernetesSettings(
                enabled=True,
                kubelet_dir=str(root),
                cdi_dir=str(root / "cdi"),
                api_server=server.url,
                **settings,
            ),
            "node-a",
            {},
            lambda: self.owned,
        )

    def __enter__(self) -> Driven:
        self.world.__enter__()
        self.driver.start()
        self.driver.attach(Joined(self.world.rooms), self.world.rooms.store)
        until(self.driver.plugin._attached.is_set)
        return self

    def __exit__(self, *args: object) -> None:
        self.driver.stop()
        self.world.__exit__(*args)

    def tick(self, **now: Any) -> dict[str, dict[str, list[Any]]]:
        """Tick, wait until all is written; return the taints of each device of each pool."""
        snapshot = now.pop("snapshot", None) or self.world.hardware.observe()
        self.driver.tick(Now(snapshot=snapshot, **now))
        assert self.driver.publisher.converged.wait(20)
        return {
            one["spec"]["pool"]["name"]: {
                device["name"]: device.get("taints", []) for device in one["spec"]["devices"]
            }
            for one in self.server.under(SLICES).values()
            if "devices" in one["spec"]
        }


@pytest.fixture
def driven(root: Path, server: FakeApiServer) -> Iterator[Driven]:
    with Driven(root, server) as made:
        yield made


def test_a_sick_device_is_tainted_and_the_taint_goes_with_the_fault(driven: Driven) -> None:
    """One device's fault taints its pool alone, keeps its shape, and is taken back on recovery."""
    before = driven.tick()
    snapshot = driven.world.hardware.observe()
    first, other = snapshot.devices
    lost = msgspec.structs.replace(
        first, condition=Condition.LOST, condition_reason="off the bus", profiles=(), modes=()
    )
    sick = msgspec.structs.replace(snapshot, devices=(lost, other), partitions=())
    after = driven.tick(snapshot=sick)
    assert {pool: set(devices) for pool, devices in after.items()} == {
        pool: set(devices) for pool, devices in before.items()
    }
    tainted = [pool for pool, devices in after.items() if all(devices.values())]
    assert len(tainted) == 1
    (taint,) = after[tainted[0]]["1g10gb-6-1"]
    assert (taint["key"], taint["effect"]) == (f"{DRIVER}/unhealthy", "NoSchedule")
    assert driven.tick() == before
    by_fault = driven.tick(sick={str(first.id): "xid:63 rows are remapped at the next reset"})
    assert sum(all(devices.values()) for devices in by_fault.values()) == 1


def test_pods_are_ended_on_a_lost_device_only_by_policy(root: Path, server: FakeApiServer) -> None:
    """NoExecute where the operator asked for it, and only for what cannot come back."""
    with Driven(root, server, evict_on_loss=True) as driven:
        driven.tick()
        snapshot = driven.world.hardware.observe()
        first, other = snapshot.devices
        for condition, effect in ((Condition.LOST, "NoExecute"), (Condition.STALLED, "NoSchedule")):
            device = msgspec.structs.replace(first, condition=condition)
            found = driven.tick(snapshot=msgspec.structs.replace(snapshot, devices=(device, other)))
            effects = {t["effect"] for d in found.values() for ts in d.values() for t in ts}
            assert effects == {effect}


def test_the_nodes_condition_turns_and_others_stay(root: Path, server: FakeApiServer) -> None:
    """True with the reason while a device is sick, False after; other writers' types untouched."""
    node = server.objects["/api/v1/nodes/node-a"]
    node["status"] = {"conditions": [{"type": "KernelDeadlock", "status": "False"}]}
    with Driven(root, server, node_condition=True) as driven:
        driven.driver.tell_condition()

        def found() -> dict[str, tuple[str, str]]:
            conditions = server.objects["/api/v1/nodes/node-a"]["status"]["conditions"]
            return {c["type"]: (c["status"], c.get("message", "")) for c in conditions}

        assert list(found()) == ["KernelDeadlock"], "nothing is told before the node was seen"
        device = driven.world.hardware.observe().devices[0]
        for sick, status in (({str(device.id): "xid:79"}, "True"), ({}, "False")):
            driven.tick(sick=sick)
            driven.driver._told = None  # what the house-keeper may have told meanwhile
            driven.driver.tell_condition()
            assert found()["AlloyAcceleratorUnhealthy"][0] == status
        assert found()["KernelDeadlock"] == ("False", "")


def test_a_silent_server_does_not_hold_the_loops(root: Path, server: FakeApiServer) -> None:
    """With the API server gone a tick returns at once, and what is prepared is still answered."""
    with Driven(root, server) as driven:
        pool = sorted(driven.tick())[0]
        preparer = driven.driver.preparer
        assert preparer is not None
        claim = ref(allocate(server, "a", pool, MIG))
        answer = preparer.prepare(claim, soon())
        server.fail.extend([("", 0)] * 1000)
        begun = time.monotonic()
        driven.driver.tick(Now(snapshot=driven.world.hardware.observe(), sick={pool: "x"}))
        assert time.monotonic() - begun < 10
        assert preparer.prepare(claim, soon(20)) == answer
        server.fail.clear()


def test_a_drain_taints_refuses_waits_and_is_taken_back(driven: Driven) -> None:
    """Node drained: all tainted, new claims refused, old ones still answered and released."""
    before = driven.tick()
    preparer = driven.driver.preparer
    assert preparer is not None
    pool = sorted(before)[0]
    old = allocate(driven.server, "old", pool, MIG)
    new = allocate(driven.server, "new", pool, "1g10gb-5-1")
    preparer.prepare(ref(old), soon())
    drained = driven.tick(draining=frozenset({""}))
    assert all(taints for devices in drained.values() for taints in devices.values())
    with pytest.raises(AlloyError, match="drained"):
        preparer.prepare(ref(new), soon())
    assert preparer.prepare(ref(old), soon())
    assert [one.uid for one in preparer.living()] == ["old"]
    preparer.unprepare(ref(old), soon())
    assert preparer.living() == ()
    assert driven.tick() == before
    assert preparer.prepare(ref(new), soon())


def test_a_drained_device_takes_no_claim_and_its_neighbour_does(driven: Driven) -> None:
    """The drain of one device reaches its pool alone, in the slices and at prepare."""
    pools = sorted(driven.tick())
    first = driven.world.hardware.observe().devices[0]
    found = driven.tick(draining=frozenset({str(first.id)}))
    mine = next(pool for pool in pools if str(first.id).lower() in pool)
    (other,) = set(pools) - {mine}
    assert all(found[mine].values())
    assert not any(found[other].values())
    preparer = driven.driver.preparer
    assert preparer is not None
    with pytest.raises(AlloyError, match="is drained"):
        preparer.prepare(ref(allocate(driven.server, "a", mine, MIG)), soon())
    assert preparer.prepare(ref(allocate(driven.server, "b", other, MIG)), soon())


def test_a_device_that_others_hand_out_is_not_published(driven: Driven) -> None:
    """A device plug-in of the vendor on this node: the pools go; when it leaves, they come back."""
    assert len(driven.tick()) == 2
    driven.owned = frozenset({Vendor.NVIDIA})
    driven.driver._owners_s = -1e9
    assert driven.tick() == {}
    driven.owned = frozenset()
    driven.driver._owners_s = -1e9
    assert len(driven.tick()) == 2


def test_pieces_of_others_are_not_offered_and_not_in_the_way(driven: Driven) -> None:
    """Someone else's instance withholds what overlaps it; a layout offers its pieces."""
    device = driven.world.hardware.observe().devices[0]
    backend: Any = driven.world.rooms.worker.backend
    gpu = backend.machine.nvidia(str(device.id))
    gpu.set_mig_mode(True)
    shape = next(s for s in gpu.board.profiles if s.name == "3g.40gb")
    gpu.create_compute_instance(gpu.create_gpu_instance(shape.vendor_id, 4).id)
    found = driven.tick()
    mine = next(devices for pool, devices in found.items() if str(device.id).lower() in pool)
    assert "3g40gb-4-4" not in mine
    assert "1g10gb-6-1" not in mine
    assert "whole" not in mine
    assert "1g10gb-3-1" in mine
    fixed = driven.tick(static=frozenset({DeviceId(device.id)}))
    mine = next(devices for pool, devices in fixed.items() if str(device.id).lower() in pool)
    assert set(mine) == {"3g40gb-4-4"}


def test_a_leased_place_is_tainted(driven: Driven) -> None:
    """What the brain leased, the scheduler does not take; and prepare refuses it."""
    before = driven.tick()
    pool = sorted(before)[0]
    preparer = driven.driver.preparer
    assert preparer is not None
    preparer.prepare(ref(allocate(driven.server, "a", pool, MIG)), soon())
    (piece,) = [p for p in driven.world.pieces() if p.profile == "1g.10gb"]
    found = driven.tick(leased=frozenset({str(piece.id)}))
    held = {name for name, taints in found[pool].items() if taints}
    assert held == {
        "1g10gb-6-1",
        "1g10gb-me-6-1",
        "1g20gb-6-2",
        "3g40gb-4-4",
        "7g80gb-0-8",
        "whole",
    }


# --- a real container ----------------------------------------------------------------------------

PODMAN = shutil.which("podman")


# Where the host keeps its limits from us, the runtime has to leave them alone.
WRAPPER = """#!{python}
import json, os, sys
from pathlib import Path

if "--bundle" in sys.argv:
    path = Path(sys.argv[sys.argv.index("--bundle") + 1]) / "config.json"
    config = json.loads(path.read_text())
    config["process"].pop("rlimits", None)
    path.write_text(json.dumps(config))
os.execv("{runc}", ["runc", *sys.argv[1:]])
"""


def runtime(root: Path) -> str:
    """Return a runtime for podman: runc, without limits that this host does not let us set."""
    path = root / "runc-here"
    path.write_text(WRAPPER.format(python=sys.executable, runc=shutil.which("runc")))
    path.chmod(0o755)
    return str(path)


@pytest.mark.host
@pytest.mark.skipif(PODMAN is None, reason="no container runtime that reads CDI is on the PATH")
def test_a_container_runtime_resolves_what_was_prepared(root: Path) -> None:
    """Podman takes the claim's file: the container has the variables and the device node, alone."""
    rootfs = root / "rootfs"
    for name in ("bin", "dev", "proc", "sys", "tmp", "etc", "run"):
        (rootfs / name).mkdir(parents=True)
    busybox = shutil.which("busybox")
    if busybox is None:
        pytest.skip("no static busybox to put into a container")
    shutil.copy(busybox, rootfs / "bin" / "sh")
    from alloy_agent.kubernetes import cdi
    from alloy_agent.model import Access

    folder = cdi.CdiDirectory(Path("/var/run/cdi"), "test.alloy.dev")
    uid = f"test-{os.getpid()}"
    node = Path("/dev/alloy-piece")  # stands for an accelerator's: char device 1:7 is /dev/full
    if not node.exists():
        os.mknod(node, 0o600 | stat.S_IFCHR, os.makedev(1, 7))
    access = Access(device_nodes=(str(node),), environment={"ALLOY_PIECE": "one"})
    device = cdi.CdiDevice(name=cdi.device_name(uid, "piece"), access=access)
    folder.write(uid, cdi.spec_of("test.alloy.dev", [device], {"ALLOY_CLAIM_UID": uid}))
    try:
        done = subprocess.run(
            [
                str(PODMAN), "--root", str(root / "store"), "--runroot", str(root / "run"),
                "--storage-driver", "vfs", "--runtime", runtime(root),
                "--cgroup-manager", "cgroupfs", "run", "--rm",
                "--network", "none", "--device", cdi.qualified("test.alloy.dev", device.name),
                "--rootfs", str(rootfs), "/bin/sh", "-c",
                f"echo $ALLOY_PIECE $ALLOY_CLAIM_UID; test -c {node} && echo {node}",
            ],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )  # fmt: skip
    finally:
        folder.remove(uid)
        node.unlink()
    if done.returncode in (125, 126, 127) and "unresolvable" not in done.stderr:
        pytest.skip(f"podman cannot run a container here: {done.stderr.strip()[-200:]}")
    assert done.stdout.split() == ["one", uid, str(node)], done.stderr
