"""The contract with the kubelet: idempotent, exclusive, concurrent, crash-safe."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from alloy_agent.backends.fake import FakeBackend
from alloy_agent.errors import AlloyError, DeviceBusyError, DeviceLostError, PlanImpossibleError
from alloy_agent.kubernetes.claims import ClaimError, ClaimRef
from alloy_agent.silicon.refusals import SimulatedCrash
from alloy_agent.store.claims import ClaimPhase
from tests.fakes.bench import Mortal, SimulatedDeath
from tests.kubernetes.world import DRIVER, Claims, World

H100 = ("1xH100-SXM5-80GB",)
MIG = "1g10gb-6-1"


def ref(claim: tuple[str, str, str]) -> ClaimRef:
    return ClaimRef(uid=claim[0], namespace=claim[1], name=claim[2])


def soon(seconds: float = 5.0) -> float:
    return time.monotonic() + seconds


@pytest.fixture
def world(tmp_path: Path) -> Any:
    with World(tmp_path, FakeBackend.from_specs(H100)) as made:
        yield made


def test_a_claim_gets_its_piece_and_gives_it_back(world: World) -> None:
    """Prepare makes the partition and the file at the allocated place; unprepare leaves neither."""
    pool, offers = world.offers()
    claim = world.claims.add("a", (pool, MIG))
    (answer,) = world.preparer.prepare(ref(claim), soon())
    assert (answer.request, answer.pool, answer.device) == ("req-0", pool, MIG)
    assert answer.cdi_ids == (f"{DRIVER}/claim=a-{MIG}",)
    (piece,) = world.pieces()
    assert (piece.profile, piece.placement) == (offers[MIG].profile, offers[MIG].placement)
    spec = world.cdi.read("a")
    assert spec is not None
    edits = spec["devices"][0]["containerEdits"]
    assert [node["path"] for node in edits["deviceNodes"]] == list(piece.access.device_nodes)
    assert f"NVIDIA_VISIBLE_DEVICES={piece.uuid}" in edits["env"]
    assert str(world.rooms.store.bindings()[0].tenant) == "k8s/default/a"
    world.preparer.unprepare(ref(claim), soon())
    assert (world.pieces(), world.files(), world.rooms.store.bindings()) == ([], [], ())


def test_the_whole_device_and_pieces_of_modes_are_had_as_they_are(tmp_path: Path) -> None:
    """A whole GPU after MIG was on, and an XCD piece: present, granted, not removed at the end."""
    with World(tmp_path, FakeBackend.from_specs(H100)) as world:
        pool, _ = world.offers()
        first = world.claims.add("a", (pool, MIG))
        world.preparer.prepare(ref(first), soon())
        world.preparer.unprepare(ref(first), soon())
        whole = world.claims.add("b", (pool, "whole"))
        world.preparer.prepare(ref(whole), soon())
        assert [p.profile for p in world.pieces()] == ["whole"]
        world.preparer.unprepare(ref(whole), soon())
        assert [p.profile for p in world.pieces()] == ["whole"]
    with World(tmp_path / "amd", FakeBackend.from_specs(("1xMI300X",))) as world:
        pool, offers = world.offers()
        (name,) = offers
        claim = world.claims.add("a", (pool, name))
        world.preparer.prepare(ref(claim), soon())
        world.preparer.unprepare(ref(claim), soon())
        assert len(world.pieces()) == 1


def test_again_is_the_same_answer(world: World) -> None:
    """A repeated call answers the same and changes nothing, even with the API server silent."""
    pool, _ = world.offers()
    claim = world.claims.add("a", (pool, MIG))
    first = world.preparer.prepare(ref(claim), soon())
    before = world.pieces()
    assert world.preparer.prepare(ref(claim), soon()) == first
    world.claims.down = "does not answer"
    assert world.preparer.prepare(ref(claim), soon()) == first
    assert world.pieces() == before


@pytest.mark.parametrize("lost", ["file", "piece", "both", "reboot"])
def test_what_was_lost_is_made_again_in_one_call(lost: str, tmp_path: Path) -> None:
    """After a restart or reboot the same ids come back with the file and the piece behind them."""
    backend, claims = FakeBackend.from_specs(H100), Claims()
    with World(tmp_path, backend, claims) as world:
        pool, _ = world.offers()
        claim = claims.add("a", (pool, MIG))
        first = world.preparer.prepare(ref(claim), soon())
        piece = world.pieces()[0]
        if lost == "reboot":
            record = world.rooms.store.claim("a")
            assert record is not None
            world.rooms.store.save_claim(msgspec.structs.replace(record, boot_id="earlier"))
    if lost in ("file", "both", "reboot"):
        shutil.rmtree(tmp_path / "cdi")
    if lost in ("piece", "both", "reboot"):
        gpu = backend.machine.nvidia(str(piece.device))
        (instance,) = gpu.instances()
        gpu.destroy_compute_instance(instance.id, instance.compute[0].id)
        gpu.destroy_gpu_instance(instance.id)
    with World(tmp_path, backend, claims) as world:
        world.preparer.recover(soon())
        assert world.preparer.prepare(ref(claim), soon()) == first
        (again,) = world.pieces()
        assert again.placement == piece.placement
        spec = world.cdi.read("a")
        assert spec is not None
        assert f"NVIDIA_VISIBLE_DEVICES={again.uuid}" in spec["devices"][0]["containerEdits"]["env"]
        world.preparer.unprepare(ref(claim), soon())
        assert world.pieces() == []


def test_a_place_that_is_taken_meanwhile_is_an_error_not_a_success(tmp_path: Path) -> None:
    """The claim's place was given to someone else meanwhile: the claim is refused."""
    backend, claims = FakeBackend.from_specs(H100), Claims()
    with World(tmp_path, backend, claims) as world:
        pool, _ = world.offers()
        claim = claims.add("a", (pool, "3g40gb-4-4"))
        world.preparer.prepare(ref(claim), soon())
        piece = world.pieces()[0]
    gpu = backend.machine.nvidia(str(piece.device))
    (instance,) = gpu.instances()
    gpu.destroy_compute_instance(instance.id, instance.compute[0].id)
    gpu.destroy_gpu_instance(instance.id)
    small = next(s for s in gpu.board.profiles if s.name == "1g.10gb")
    gpu.create_compute_instance(gpu.create_gpu_instance(small.vendor_id, 4).id)
    with World(tmp_path, backend, claims) as world:
        with pytest.raises(AlloyError):
            world.preparer.prepare(ref(claim), soon(1))
        assert [p.profile for p in world.pieces()] == ["1g.10gb"], "the other's piece must stay"


def test_overlapping_claims_exclude_each_other_until_the_first_is_gone(world: World) -> None:
    """The second waits within its call, and succeeds once the place is free."""
    pool, _ = world.offers()
    first = world.claims.add("a", (pool, MIG))
    second = world.claims.add("b", (pool, "3g40gb-4-4"))
    world.preparer.prepare(ref(first), soon())
    with pytest.raises(DeviceBusyError, match="held by claim default/a"):
        world.preparer.prepare(ref(second), soon(0.2))
    assert world.files() == [f"{DRIVER}-claim_a.json"]
    done: list[Any] = []
    waiting = threading.Thread(
        target=lambda: done.append(world.preparer.prepare(ref(second), soon(20))), daemon=True
    )
    waiting.start()
    time.sleep(0.1)
    assert not done
    world.preparer.unprepare(ref(first), soon())
    waiting.join(20)
    assert done
    assert [p.profile for p in world.pieces()] == ["3g.40gb"]


def test_claims_come_in_parallel(tmp_path: Path) -> None:
    """Twelve claims on two devices, each asked for three times at once: each is made once."""
    with World(tmp_path, FakeBackend.from_specs(("2xH100-SXM5-80GB",))) as world:
        claims = []
        for number in range(2):
            pool, _ = world.offers(number)
            claims += [
                world.claims.add(f"c-{number}-{start}", (pool, f"1g10gb-{start}-1"))
                for start in range(6)
            ]
        answers: dict[str, list[Any]] = {}
        failed: list[Exception] = []

        def ask(claim: tuple[str, str, str]) -> None:
            try:
                answers.setdefault(claim[0], []).append(
                    world.preparer.prepare(ref(claim), soon(60))
                )
            except AlloyError as exc:
                failed.append(exc)

        threads = [
            threading.Thread(target=ask, args=(c,), daemon=True) for c in claims for _ in range(3)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert failed == []
        assert all(len(a) == 3 and a[0] == a[1] == a[2] for a in answers.values())
        assert len(world.pieces()) == 12
        for claim in claims:
            world.preparer.unprepare(ref(claim), soon())
        assert world.pieces() == []


def test_admin_access_looks_and_takes_nothing(world: World) -> None:
    """An admin claim on a held piece is prepared beside it and leaves it where it is."""
    pool, _ = world.offers()
    first = world.claims.add("a", (pool, MIG))
    world.preparer.prepare(ref(first), soon())
    second = world.claims.add("b", (pool, MIG))
    result = world.claims.documents["default", "b"]["status"]["allocation"]["devices"]["results"]
    result[0]["adminAccess"] = True
    assert world.preparer.prepare(ref(second), soon())
    world.preparer.unprepare(ref(second), soon())
    assert len(world.pieces()) == 1


def test_shares_of_a_device_live_together(tmp_path: Path) -> None:
    """Production and opportunistic claims share a GPU; their parameters reach the piece."""
    with World(tmp_path, FakeBackend.from_specs(H100), shares=2) as world:
        pool, _ = world.offers()
        config = {
            "source": "FromClaim",
            "requests": ["req-0"],
            "opaque": {
                "driver": DRIVER,
                "parameters": {
                    "apiVersion": "alloy.dev/v1",
                    "kind": "PartitionConfig",
                    "memoryBytes": 8 << 30,
                    "lossBudgetRatio": 0.02,
                },
            },
        }
        claims = [
            world.claims.add("a", (pool, "production-0")),
            world.claims.add("b", (pool, "opportunistic-0"), config=[config]),
        ]
        for claim in claims:
            world.preparer.prepare(ref(claim), soon())
        assert sorted(p.share for p in world.pieces()) == ["opportunistic", "production"]
        record = world.rooms.store.claim("b")
        assert record is not None
        assert record.pieces[0].loss_budget_ratio == 0.02
        caps = {str(p.share): p.memory_bytes for p in world.pieces()}
        assert caps["opportunistic"] == 8 << 30
        for claim in claims:
            world.preparer.unprepare(ref(claim), soon())
        assert [p.profile for p in world.pieces()] == ["whole"]


# --- unprepare -----------------------------------------------------------------------------------


def test_an_unknown_claim_is_unprepared_already(world: World) -> None:
    """Unprepare of what was never prepared succeeds, and so does a second one."""
    world.preparer.unprepare(ClaimRef(uid="x", namespace="n", name="x"), soon())
    pool, _ = world.offers()
    claim = world.claims.add("a", (pool, MIG))
    world.preparer.prepare(ref(claim), soon())
    for _ in range(2):
        world.preparer.unprepare(ref(claim), soon())
    assert world.pieces() == []


def test_a_late_prepare_does_not_win_over_an_unprepare(world: World) -> None:
    """A retry of the same version after unprepare is refused; a new version is prepared."""
    pool, _ = world.offers()
    claim = world.claims.add("a", (pool, MIG))
    world.preparer.prepare(ref(claim), soon())
    world.preparer.unprepare(ref(claim), soon())
    with pytest.raises(ClaimError, match="was unprepared"):
        world.preparer.prepare(ref(claim), soon())
    assert (world.pieces(), world.files()) == ([], [])
    del world.claims.documents["default", "a"]
    with pytest.raises(ClaimError, match="not in the API server"):
        world.preparer.prepare(ref(claim), soon())
    world.claims.add("a", (pool, MIG), version="2")
    assert world.preparer.prepare(ref(claim), soon())


def test_an_unprepare_cancels_a_prepare_that_is_stuck(world: World) -> None:
    """Unprepare during a waiting prepare: the prepare fails and nothing is left."""
    pool, _ = world.offers()
    first = world.claims.add("a", (pool, MIG))
    second = world.claims.add("b", (pool, MIG))
    world.preparer.prepare(ref(first), soon())
    outcome: list[str] = []

    def ask() -> None:
        try:
            world.preparer.prepare(ref(second), soon(30))
        except AlloyError as exc:
            outcome.append(str(exc))

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    time.sleep(0.1)
    world.preparer.unprepare(ref(second), soon(30))
    thread.join(30)
    assert len(outcome) == 1
    assert "being unprepared" in outcome[0]
    assert world.files() == [f"{DRIVER}-claim_a.json"]
    assert world.rooms.store.claim("b") is None


def test_a_busy_piece_stays_on_record_and_goes_at_the_next_call(world: World) -> None:
    """A process is still inside: unprepare says so, keeps the record, and ends it later."""
    from alloy_agent.silicon.state import Client

    pool, _ = world.offers()
    claim = world.claims.add("a", (pool, MIG))
    world.preparer.prepare(ref(claim), soon())
    (piece,) = world.pieces()
    machine = world.rooms.worker.backend.machine  # type: ignore[attr-defined]
    machine.start_process(
        Client(
            pid=4711,
            name="tenant",
            device=str(piece.device),
            instance=int(piece.locator["gi"]),
        )
    )
    with pytest.raises(AlloyError, match="4711"):
        world.preparer.unprepare(ref(claim), soon(0.1))
    record = world.rooms.store.claim("a")
    assert record is not None
    assert record.phase is ClaimPhase.RELEASING
    machine.stop_process(4711)
    world.preparer.unprepare(ref(claim), soon())
    assert world.pieces() == []


# --- bad input -----------------------------------------------------------------------------------


def replaced(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(document: dict[str, Any]) -> None:
        node: Any = document
        *way, last = path.split(".")
        for key in way:
            node = node[int(key)] if key.isdigit() else node[key]
        node[last] = value

    return change


CONFIG = "status.allocation.devices"
BAD = {
    "replaced": (replaced("metadata.uid", "other"), ClaimError, "was replaced"),
    "not allocated": (replaced("status.allocation", None), ClaimError, "not allocated"),
    "not ours": (replaced(f"{CONFIG}.results", []), ClaimError, "allocates nothing"),
    "results of another kind": (replaced(f"{CONFIG}.results", [7]), ClaimError, "no ResourceClaim"),
    "a pool that is gone": (
        replaced(f"{CONFIG}.results.0.pool", "node-a/gone"),
        DeviceLostError,
        "no device on this node",
    ),
    "a piece that cannot be": (
        replaced(f"{CONFIG}.results.0.device", "9g90gb-0-9"),
        PlanImpossibleError,
        "has no piece",
    ),
    "a config of the wrong kind": (
        replaced(
            f"{CONFIG}.config",
            [
                {
                    "source": "FromClaim",
                    "opaque": {
                        "driver": DRIVER,
                        "parameters": {"apiVersion": "alloy.dev/v1", "kind": "GpuConfig"},
                    },
                }
            ],
        ),
        ClaimError,
        "no PartitionConfig",
    ),
    "a config out of place": (
        replaced(
            f"{CONFIG}.config",
            [
                {
                    "source": "FromClaim",
                    "opaque": {
                        "driver": DRIVER,
                        "parameters": {
                            "apiVersion": "alloy.dev/v1",
                            "kind": "PartitionConfig",
                            "lossBudgetRatio": 0.1,
                        },
                    },
                }
            ],
        ),
        ClaimError,
        "is no share",
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_a_claim_that_makes_no_sense_is_one_line_and_leaves_nothing(
    what: str, world: World
) -> None:
    """Each defect is named; no partition, no file, no record is left."""
    pool, _ = world.offers()
    claim = world.claims.add("a", (pool, MIG))
    change, kind, words = BAD[what]
    change(world.claims.documents["default", "a"])
    before = world.pieces()
    with pytest.raises(kind, match=words) as caught:
        world.preparer.prepare(ref(claim), soon())
    assert "\n" not in str(caught.value)
    assert (world.pieces(), world.files()) == (before, [])
    assert world.rooms.store.claims() == ()


def test_another_content_for_a_prepared_claim_is_refused(world: World) -> None:
    """The kubelet repeats a call, and the claim now allocates something else."""
    pool, _ = world.offers()
    claim = world.claims.add("a", (pool, MIG))
    world.preparer.prepare(ref(claim), soon())
    world.claims.add("a", (pool, "1g10gb-5-1"), version="2")
    with pytest.raises(ClaimError, match="is prepared with"):
        world.preparer.prepare(ref(claim), soon())
    with pytest.raises(ClaimError, match="is known as"):
        world.preparer.prepare(ClaimRef(uid="a", namespace="default", name="b"), soon())
    assert len(world.pieces()) == 1


def test_a_silent_server_and_a_closed_directory_leave_nothing(tmp_path: Path) -> None:
    """No answer, or no way to write the file: an error, and the partition is taken back."""
    with World(tmp_path, FakeBackend.from_specs(H100)) as world:
        pool, _ = world.offers()
        claim = world.claims.add("a", (pool, MIG))
        world.claims.down = "429 too many requests"
        with pytest.raises(AlloyError, match="429"):
            world.preparer.prepare(ref(claim), soon())
        world.claims.down = ""
        (tmp_path / "cdi").write_text("a file")
        with pytest.raises(AlloyError, match="CDI directory"):
            world.preparer.prepare(ref(claim), soon())
        assert world.pieces() == []
        assert world.rooms.store.bindings() == ()
        (tmp_path / "cdi").unlink()
        assert world.preparer.prepare(ref(claim), soon())


def test_no_new_claims_during_a_drain(world: World) -> None:
    """A drain refuses what is new and still answers what is prepared."""
    pool, _ = world.offers()
    first = world.claims.add("a", (pool, MIG))
    second = world.claims.add("b", (pool, "1g10gb-5-1"))
    world.preparer.prepare(ref(first), soon())
    world.draining = "the node is drained for a driver update"
    assert world.preparer.prepare(ref(first), soon())
    with pytest.raises(DeviceBusyError, match="driver update"):
        world.preparer.prepare(ref(second), soon())


def test_claims_that_the_server_no_longer_has_are_released(world: World) -> None:
    """A claim deleted behind our back, or replaced, gives its piece back at the next look."""
    pool, _ = world.offers()
    for uid, name in (("a", MIG), ("b", "1g10gb-5-1"), ("c", "1g10gb-4-1")):
        world.preparer.prepare(ref(world.claims.add(uid, (pool, name))), soon())
    del world.claims.documents["default", "a"]
    world.claims.documents["default", "b"]["metadata"]["uid"] = "other"
    world.preparer.reconcile(soon())
    assert [one.uid for one in world.preparer.living()] == ["c"]
    assert len(world.pieces()) == 1
    world.claims.down = "does not answer"
    with contextlib.suppress(AlloyError):
        world.preparer.reconcile(soon())
    assert len(world.pieces()) == 1


def test_pieces_of_others_are_never_removed(tmp_path: Path) -> None:
    """A piece that was there before the claim, made by somebody else, stays after it."""
    backend = FakeBackend.from_specs(H100)
    device = backend.discover()[0]
    gpu = backend.machine.nvidia(str(device))
    gpu.set_mig_mode(True)
    shape = next(s for s in gpu.board.profiles if s.name == "1g.10gb")
    gpu.create_compute_instance(gpu.create_gpu_instance(shape.vendor_id, 6).id)
    with World(tmp_path, backend) as world:
        pool, _ = world.offers()
        claim = world.claims.add("a", (pool, MIG))
        world.preparer.prepare(ref(claim), soon())
        world.preparer.unprepare(ref(claim), soon())
        world.preparer.recover(soon())
        assert len(world.pieces()) == 1


# --- crashes -------------------------------------------------------------------------------------


def lifetime(world: World, claim: Any) -> None:
    world.preparer.prepare(ref(claim), soon())
    world.preparer.unprepare(ref(claim), soon())


def sweep_writes(folder: Path, step: int) -> None:
    """Live a claim's life once for every `step`-th moment at which a write can be the last."""
    count = Mortal()
    with World(folder / "count", FakeBackend.from_specs(H100), mortal=count) as world:
        pool, _ = world.offers()
        start = count.count
        lifetime(world, world.claims.add("a", (pool, MIG)))
        end = count.count
    assert end - start > 20
    for dies_at in range(start + 1, end + 1, step):
        backend, claims = FakeBackend.from_specs(H100), Claims()
        root = folder / str(dies_at)
        with (
            World(root, backend, claims, Mortal(dies_at)) as world,
            contextlib.suppress(SimulatedDeath),
        ):
            pool, _ = world.offers()
            lifetime(world, claims.add("a", (pool, MIG)))
        survive(root, backend, claims, pool, f"write {dies_at}")


def test_a_death_at_a_write_recovers(tmp_path: Path) -> None:
    """Killed at every third write of prepare and unprepare: the next life prepares and releases."""
    sweep_writes(tmp_path, 3)


@pytest.mark.slow
def test_a_death_at_any_write_recovers(tmp_path: Path) -> None:
    """The same with no write left out."""
    sweep_writes(tmp_path, 1)


def survive(root: Path, backend: FakeBackend, claims: Claims, pool: str, where: str) -> None:
    backend.machine.process_died()
    with World(root, backend, claims) as world:
        world.rooms.reconciler.recover()
        world.preparer.recover(soon())
        claim = claims.add("a", (pool, MIG), version="2")
        assert world.preparer.prepare(ref(claim), soon()), where
        (piece,) = world.pieces()
        assert world.files() == [f"{DRIVER}-claim_a.json"], where
        other = claims.add("b", (pool, "1g10gb-5-1"))
        assert world.preparer.prepare(ref(other), soon()), where
        for one in (claim, other):
            world.preparer.unprepare(ref(one), soon())
        assert (world.pieces(), world.files()) == ([], []), where
        assert backend.machine.nvidia(str(piece.device)).instances() == (), where


def test_a_death_in_any_vendor_call_recovers(tmp_path: Path) -> None:
    """Killed in each vendor call of prepare and unprepare, between GI and CI too."""
    backend, claims = FakeBackend.from_specs(H100), Claims()
    with World(tmp_path / "count", backend, claims) as world:
        pool, _ = world.offers()
        start = backend.machine.calls
        lifetime(world, claims.add("a", (pool, MIG)))
        end = backend.machine.calls
    for number in range(start + 1, end + 1, 3):
        backend, claims = FakeBackend.from_specs(H100), Claims()
        root = tmp_path / str(number)
        with World(root, backend, claims) as world:
            pool, _ = world.offers()
            backend.machine.crash_at(number)
            with contextlib.suppress(SimulatedCrash):
                lifetime(world, claims.add("a", (pool, MIG)))
            backend.machine.state.crash_at = None
        survive(root, backend, claims, pool, f"call {number}")


def test_claims_outlive_the_loss_of_the_state(tmp_path: Path) -> None:
    """With a new state file: files stay, claims are on record again, and their places are held."""
    backend = FakeBackend.from_specs(H100)
    with World(tmp_path, backend) as world:
        pool, _ = world.offers()
        claim, gone = (
            world.claims.add("a", (pool, MIG)),
            world.claims.add("b", (pool, "1g10gb-0-1")),
        )
        answer = world.preparer.prepare(ref(claim), soon())
        world.preparer.prepare(ref(gone), soon())
        files, pieces, claims = world.files(), world.pieces(), world.claims
    for path in (tmp_path / "state").iterdir():
        path.unlink()
    del claims.documents["default", "b"]
    claims.down = "503 nobody there"
    with World(tmp_path, backend, claims) as world:
        world.preparer.recover(soon())
        assert world.files() == files, "nobody could say whose they are"
        claims.down = ""
        world.preparer.recover(soon())
        assert world.files() == [name for name in files if "_a.json" in name]
        (record,) = world.rooms.store.claims()
        assert (record.uid, record.phase, record.pods) == ("a", ClaimPhase.PREPARED, ("pod-a",))
        assert world.preparer.prepare(ref(claim), soon()) == answer
        other = world.claims.add("c", (pool, MIG))
        with pytest.raises(AlloyError, match="still held by claim default/a"):
            world.preparer.prepare(ref(other), time.monotonic())
        world.preparer.unprepare(ref(claim), soon())
        assert world.files() == []
        assert [p.incarnation for p in world.pieces()] == [p.incarnation for p in pieces]


@pytest.mark.host
def test_a_directory_that_is_read_only_leaves_nothing(tmp_path: Path) -> None:
    """On a file system mounted read-only prepare fails in one line, and no partition is left."""
    folder = tmp_path / "cdi"
    folder.mkdir()
    mount = ["/bin/mount", "-t", "tmpfs", "-o", "ro", "tmpfs", str(folder)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("no tmpfs can be mounted here")
    try:
        with World(tmp_path, FakeBackend.from_specs(H100)) as world:
            pool, _ = world.offers()
            claim = world.claims.add("a", (pool, MIG))
            with pytest.raises(AlloyError, match=r"CDI directory .*[Rr]ead-only"):
                world.preparer.prepare(ref(claim), soon())
            assert world.pieces() == []
            subprocess.run(["/bin/mount", "-o", "remount,rw", str(folder)], check=True)
            assert world.preparer.prepare(ref(claim), soon())
            subprocess.run(["/bin/mount", "-o", "remount,ro", str(folder)], check=True)
            with pytest.raises(AlloyError, match=r"CDI file .*[Rr]ead-only"):
                world.preparer.unprepare(ref(claim), soon())
            subprocess.run(["/bin/mount", "-o", "remount,rw", str(folder)], check=True)
            world.preparer.unprepare(ref(claim), soon())
            assert world.files() == []
    finally:
        subprocess.run(["/bin/umount", str(folder)], check=True)
