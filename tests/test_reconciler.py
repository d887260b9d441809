"""Runs of plans: what is refused, verified and undone, and what an operator is told."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from alloy_agent.backends.fake import FakeBackend
from alloy_agent.errors import (
    ApplyError,
    BackendError,
    ConsentError,
    DeviceBusyError,
    DeviceLostError,
    DeviceStalledError,
    StalePlanError,
    StoreError,
)
from alloy_agent.model import (
    Create,
    Destroy,
    DeviceId,
    Interrupt,
    Lease,
    LeasedPiece,
    LeaseId,
    LeaseState,
    ModeKind,
    PartitionId,
    Plan,
    PlannedStep,
    Scope,
    SetMode,
    StepReport,
    TenantId,
)
from alloy_agent.planner.steps import undo_of
from alloy_agent.store import EntryState, RunStatus
from alloy_agent.worker.client import WorkerDownError
from tests.fakes.bench import BOOT, Machine
from tests.fakes.direct import Rooms
from tests.fakes.node import Node

FIRST = {"gpu-a": [(0, "4g"), (4, "2g"), (6, "1g")]}
SECOND = {"gpu-a": [(0, "4g"), (4, "1g"), (5, "1g"), (6, "1g")]}
FIRST_SHAPE = {"gpu-a": [(0, "4g", True), (4, "2g", True), (6, "1g", True)]}
SECOND_SHAPE = {"gpu-a": [(0, "4g", True), (4, "1g", True), (5, "1g", True), (6, "1g", True)]}


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    """An agent whose machine stands at FIRST."""
    with Node(Machine(), tmp_path) as opened:
        opened.reconciler.apply(opened.plan(FIRST, "first"))
        opened.machine.calls.clear()
        yield opened


def lease_on(node: Node, partition: str, generation: int = 1, boot_id: str = BOOT) -> None:
    piece = LeasedPiece(partition=PartitionId(partition), generation=generation)
    node.store.save_lease(
        Lease(
            id=LeaseId("lease-9"),
            tenant=TenantId("acme"),
            pieces=(piece,),
            token=1,
            state=LeaseState.COMMITTED,
            boot_id=boot_id,
            granted_at_s=0.0,
            expires_at_s=None,
        )
    )


def mode_plan(node: Node, wanted: str, *more: PlannedStep) -> Plan:
    """Return a plan that switches MIG and then does more."""
    plan = node.plan({})
    step = SetMode(device=DeviceId("gpu-a"), kind=ModeKind.MIG, current="on", wanted=wanted)
    first = PlannedStep(number=1, step=step, undo=undo_of(step))
    return msgspec.structs.replace(plan, steps=(first, *more))


# --- done ---


def test_a_change_touches_only_what_differs(node: Node) -> None:
    """The piece that both layouts have sees no call; what was made is the agent's own."""
    before = {p.id: p.incarnation for p in node.observer.observe().partitions}
    told: list[StepReport] = []
    report = node.reconciler.apply(node.plan(SECOND), on_progress=told.append)
    assert report.outcome == "applied"
    assert report.remaining == ()
    assert node.machine.shape() == SECOND_SHAPE
    assert [c.split()[0] for c in node.machine.calls] == [
        "destroy_compute",
        "destroy_instance",
        "create_instance",
        "create_compute",
        "create_instance",
        "create_compute",
    ]
    after = {p.id: p.incarnation for p in node.observer.observe().partitions}
    assert after["gpu-a/4g@0"] == before["gpu-a/4g@0"]  # type: ignore[index]
    assert node.store.managed() == after
    assert [t.state for t in told] == ["running", "done"] * 3
    assert node.worker.quiet == set(), "a device was not resumed"


def test_nothing_to_do_still_notes_the_wish(node: Node) -> None:
    """A plan without steps changes nothing but what is desired."""
    report = node.reconciler.apply(node.plan(FIRST, "same"))
    assert report.outcome == "unchanged"
    assert node.machine.calls == []
    desired = node.store.desired()
    assert desired is not None
    assert desired.name == "same"


def test_the_intent_is_on_disk_before_the_device_is_touched(node: Node, tmp_path: Path) -> None:
    """At the moment of each vendor call a second reader finds the intent of that step."""
    seen: list[str] = []
    original = node.worker.apply

    def spy(step: Create | Destroy) -> None:
        with Node.reader(tmp_path) as reader:
            run = reader.unfinished()
            assert run is not None
            assert run.entries[-1].state is EntryState.INTENT
            assert run.entries[-1].step == step
            seen.append(run.entries[-1].step.device)
        original(step)

    node.worker.apply = spy  # type: ignore[method-assign,assignment]
    node.reconciler.apply(node.plan(SECOND))
    assert len(seen) == 3


# --- refused before anything is touched ---


def test_a_plan_for_another_state_is_refused(node: Node) -> None:
    """A piece made anew, gone, newly in the way, or newly there makes the plan stale."""
    plan = node.plan(SECOND)
    machine = node.machine
    machine.foreign("gpu-a", 4, "2g", 2)
    with pytest.raises(StalePlanError, match="2g@4 was made anew"):
        node.reconciler.apply(plan)
    del machine.state.devices["gpu-a"].pieces["4"]
    with pytest.raises(StalePlanError, match="2g@4 is gone"):
        node.reconciler.apply(plan)
    plan = node.plan(SECOND)
    machine.foreign("gpu-a", 5, "1g", 1)
    with pytest.raises(StalePlanError, match="1g@5 sits where 1g"):
        node.reconciler.apply(plan)
    plan = node.plan({"gpu-a": [(0, "4g"), (6, "1g")]})
    machine.foreign("gpu-a", 7, "1g", 1)
    with pytest.raises(StalePlanError, match="1g@7 has appeared"):
        node.reconciler.apply(plan)
    assert machine.calls == []
    assert node.store.unfinished() is None


def test_a_plan_of_another_boot_is_refused(node: Node) -> None:
    """After a restart of the node nothing of the plan can be trusted."""
    plan = node.plan(SECOND)
    node.machine.state.boot_id = "boot-2"
    with pytest.raises(StalePlanError, match="restarted"):
        node.reconciler.apply(plan)


def test_a_leased_piece_is_never_destroyed(node: Node) -> None:
    """A lease granted between plan and apply stops the run; an old lease does not."""
    plan = node.plan(SECOND)
    lease_on(node, "gpu-a/2g@4")
    with pytest.raises(StalePlanError, match=r"2g@4 would be destroyed.*acme.*lease-9"):
        node.reconciler.apply(plan)
    with pytest.raises(StalePlanError, match=r"lost to a change of mig.*acme"):
        node.reconciler.apply(mode_plan(node, "off"))
    assert node.machine.calls == []
    lease_on(node, "gpu-a/2g@4", generation=7)
    lease_on(node, "gpu-a/2g@4", boot_id="another")
    assert node.reconciler.apply(plan).outcome == "applied"


def test_disruption_beyond_the_devices_needs_consent(node: Node) -> None:
    """A step that interrupts the node is refused until somebody agrees."""
    plan = node.plan(SECOND)
    disturb = Interrupt(scope=Scope.NODE, subject="node", why="driver reload")
    steps = tuple(msgspec.structs.replace(s, interrupts=(disturb,)) for s in plan.steps)
    plan = msgspec.structs.replace(plan, steps=steps)
    with pytest.raises(ConsentError, match=r"driver reload.*--yes"):
        node.reconciler.apply(plan)
    assert node.machine.calls == []
    assert node.reconciler.apply(plan, frozenset({Scope.NODE})).outcome == "applied"


def test_one_run_at_a_time(node: Node) -> None:
    """A second run is refused while one is on its way, and while one is interrupted."""
    refused: list[str] = []

    def second(_: StepReport) -> None:
        try:
            node.reconciler.apply(node.plan(FIRST))
        except ApplyError as exc:
            refused.append(str(exc))

    node.reconciler.apply(node.plan(SECOND), on_progress=second)
    assert refused
    assert "another change" in refused[0]
    node.store.begin(node.plan(FIRST))
    with pytest.raises(ApplyError, match="was interrupted: let the agent recover"):
        node.reconciler.apply(node.plan(FIRST))


# --- failures ---


@pytest.mark.parametrize(
    ("call", "nth"),
    [
        ("create_instance", 0),
        ("create_instance", 1),
        ("create_compute", 0),
        ("create_compute", 1),
        ("destroy_compute", 0),
        ("destroy_instance", 0),
    ],
)
def test_a_failure_is_rolled_back(node: Node, call: str, nth: int) -> None:
    """Whatever call fails, what was there before is there again, and nothing half-made is left."""
    plan = node.plan(SECOND)
    node.machine.fail(call, *[None] * nth, BackendError("insufficient resources"))
    report = node.reconciler.apply(plan)
    assert report.outcome == "rolled_back"
    assert "insufficient resources" in report.error
    assert node.machine.shape() == FIRST_SHAPE
    assert node.store.managed() == {p.id: p.incarnation for p in node.observer.observe().partitions}
    desired = node.store.desired()
    assert desired is not None
    assert desired.name == "first"
    assert report.remaining, "what the wanted layout still lacks is told"
    assert node.worker.quiet == set()
    assert node.reconciler.apply(node.plan(SECOND)).outcome == "applied", "the next try is free"


def test_a_failed_roll_back_stops_with_the_difference(node: Node) -> None:
    """When undoing fails too, the run stops and tells what exactly is left."""
    plan = node.plan(SECOND)
    node.machine.fail("create_compute", None, BackendError("first"))
    node.machine.fail("destroy_instance", None, BackendError("second"))
    report = node.reconciler.apply(plan)
    assert report.outcome == "stuck"
    assert "first" in report.error
    assert "second" in report.error
    assert any("1g@5" in line or "1g" in line for line in report.remaining)
    assert node.store.unfinished() is None
    assert node.store.runs()[0].status is RunStatus.STUCK


def test_success_is_believed_only_when_it_is_seen(node: Node) -> None:
    """A call that returns well and does nothing is a failure."""
    plan = node.plan(SECOND)
    node.worker.apply = lambda step: None  # type: ignore[method-assign]
    report = node.reconciler.apply(plan)
    assert report.outcome == "rolled_back"
    assert "2g@4 is still there" in report.error
    assert node.machine.shape() == FIRST_SHAPE


def test_a_busy_device_is_tried_again(node: Node) -> None:
    """A device that is busy for a moment is waited for; the report says how often."""
    plan = node.plan(SECOND)
    node.machine.fail("destroy_compute", DeviceBusyError("in use"), DeviceBusyError("in use"))
    report = node.reconciler.apply(plan)
    assert report.outcome == "applied"
    assert report.steps[0].attempts == 3


def test_a_device_that_stays_busy_names_its_holders(node: Node) -> None:
    """After the deadline the refusal in the device's words is the error; nothing was changed."""
    plan = node.plan(SECOND)
    busy = DeviceBusyError("in use (19) by process 4711 train.py", cure="stop it")
    node.machine.fail("destroy_compute", *[busy] * 1000)
    report = node.reconciler.apply(plan)
    assert report.outcome == "rolled_back"
    assert "process 4711 train.py" in report.error
    assert node.machine.shape() == FIRST_SHAPE


def test_a_foreign_piece_is_never_touched(node: Node) -> None:
    """Rolling back leaves alone what somebody else made meanwhile, even in that place."""
    plan = node.plan(SECOND)
    original, machine = node.worker.apply, node.machine

    def intrude(step: Create | Destroy) -> None:
        if isinstance(step, Create) and "5" not in machine.state.devices["gpu-a"].pieces:
            machine.foreign("gpu-a", 4, "2g", 2)
        original(step)

    node.worker.apply = intrude  # type: ignore[method-assign,assignment]
    report = node.reconciler.apply(plan)
    assert report.outcome == "rolled_back"
    piece = machine.state.devices["gpu-a"].pieces["4"]
    assert (piece.profile, piece.whole) == ("2g", True)
    assert node.store.managed().get(PartitionId("gpu-a/2g@4")) != f"MIG-{piece.serial}"


def test_a_lost_device_ends_the_run(node: Node) -> None:
    """With the device gone there is no way back: stuck, told, and free for the next run."""
    plan = node.plan(SECOND)
    node.machine.fail("create_instance", DeviceLostError("GPU is lost"))
    node.machine.fail("observe", *[None] * 4, *[DeviceLostError("GPU is lost")] * 2)
    report = node.reconciler.apply(plan)
    assert report.outcome == "stuck"
    assert "GPU is lost" in report.error
    assert node.store.unfinished() is None


def test_a_call_that_does_not_return_is_left_alone(node: Node) -> None:
    """A stalled call is not entered again; what came of it is noted once the device answers."""
    plan = node.plan(SECOND)
    original = node.worker.apply

    def stall(step: Create | Destroy) -> None:
        original(step)
        raise DeviceStalledError("no answer within 30 s")

    node.worker.apply = stall  # type: ignore[method-assign,assignment]
    report = node.reconciler.apply(plan)
    assert report.outcome == "stuck"
    assert len(node.machine.calls) == 2, "only the one step was called"
    assert node.store.runs()[0].entries[0].state is EntryState.UNKNOWN
    assert node.reconciler.recover() is None
    assert node.store.runs()[0].entries[0].state is EntryState.DONE
    assert PartitionId("gpu-a/2g@4") not in node.store.managed()


@pytest.mark.parametrize("half", [False, True])
def test_a_worker_that_dies_in_a_step_is_waited_for(node: Node, half: bool) -> None:
    """The device is read when the worker is back; the step counts as done, or is done again."""
    plan = node.plan(SECOND)
    if half:
        node.machine.fail("create_compute", WorkerDownError("worker died"))
    else:
        node.machine.fail("observe", *[None] * 5, WorkerDownError("worker is starting"))
    report = node.reconciler.apply(plan)
    assert report.outcome == "applied"
    assert node.machine.shape() == SECOND_SHAPE


def test_a_journal_that_cannot_be_written_stops_before_the_device(node: Node) -> None:
    """With no intent on disk there is no call; the run goes on when the disk does."""
    plan = node.plan(SECOND)
    original = node.store.intent

    def full(*args: object, **kwargs: object) -> int:
        raise StoreError("no space is left on the disk")

    node.store.intent = full  # type: ignore[method-assign]
    with pytest.raises(StoreError):
        node.reconciler.apply(plan)
    assert node.machine.calls == []
    assert node.worker.quiet == set()
    node.store.intent = original  # type: ignore[method-assign]
    report = node.reconciler.recover()
    assert report is not None
    assert report.outcome == "applied"
    assert node.machine.shape() == SECOND_SHAPE


# --- modes that wait ---


def test_a_pending_mode_is_pending_and_nothing_else(node: Node) -> None:
    """A mode that needs a reset is told as pending; what depends on it waits; it is asked once."""
    node.reconciler.apply(node.plan({"gpu-a": []}))
    node.machine.calls.clear()
    node.machine.mode_needs_reset = True
    create = node.plan(FIRST).steps[0]
    plan = mode_plan(node, "off", msgspec.structs.replace(create, number=2))
    report = node.reconciler.apply(plan)
    assert report.outcome == "pending"
    assert "mig is on until" in report.pending[0]
    assert "waits for the pending mode" in report.pending[1]
    assert [s.state for s in report.steps] == ["pending", "waiting"]
    assert node.machine.calls == ["set_mode gpu-a"]
    assert node.store.unfinished() is None
    assert node.reconciler.recover() is None
    assert node.machine.calls == ["set_mode gpu-a"], "asked again without a command"


def test_a_mode_is_switched_and_switched_back(node: Node) -> None:
    """A mode that holds at once is verified, and undone when a later step fails."""
    node.reconciler.apply(node.plan({"gpu-a": []}))
    create = node.plan(FIRST).steps[0]
    node.machine.fail("create_instance", BackendError("no"))
    plan = mode_plan(node, "off", msgspec.structs.replace(create, number=2))
    report = node.reconciler.apply(plan)
    assert report.outcome == "rolled_back"
    assert node.machine.state.devices["gpu-a"].mig == "on"


# --- stopping and starting ---


def test_stop_ends_between_two_steps_and_recovery_goes_on(node: Node, tmp_path: Path) -> None:
    """The step in hand is finished, no other begins; the next start does the rest."""
    told: list[StepReport] = []

    def stop(report: StepReport) -> None:
        told.append(report)
        node.reconciler.stop()

    report = node.reconciler.apply(node.plan(SECOND), on_progress=stop)
    assert report.outcome == "stopped"
    assert [t.state for t in told] == ["running", "done"]
    run = node.store.unfinished()
    assert run is not None
    assert run.status is RunStatus.INTERRUPTED
    machine = node.machine
    node.store.close()
    with Node(machine, tmp_path) as later:
        report2 = later.reconciler.recover()
        assert report2 is not None
        assert report2.outcome == "applied"
        assert machine.shape() == SECOND_SHAPE


def test_a_stop_while_waiting_for_a_busy_device_does_not_roll_back(node: Node) -> None:
    """Stopping ends the wait at once and leaves the run for the next start."""
    node.machine.fail("destroy_compute", *[DeviceBusyError("in use")] * 1000)
    timer = threading.Timer(0.05, node.reconciler.stop)
    timer.start()
    report = node.reconciler.apply(node.plan(SECOND))
    timer.join()
    assert report.outcome == "stopped"
    assert node.store.unfinished() is not None
    assert node.machine.shape() == FIRST_SHAPE


def test_a_start_touches_no_foreign_piece(tmp_path: Path) -> None:
    """With an empty journal, recovery makes no vendor call at all, whatever is there."""
    machine = Machine()
    machine.foreign("gpu-a", 0, "4g", 4)
    with Node(machine, tmp_path) as node:
        assert node.reconciler.recover() is None
        assert machine.calls == []
        assert not any(piece.managed for piece in node.observer.observe().partitions)


def test_an_interrupted_plan_that_no_longer_fits_is_given_up(node: Node) -> None:
    """If the node changed meanwhile, the rest of the plan is dropped and the hook plans anew."""
    node.store.begin(node.plan(SECOND))
    node.machine.foreign("gpu-a", 5, "1g", 1)
    del node.machine.state.devices["gpu-a"].pieces["4"]
    report = node.reconciler.recover()
    assert report is not None
    assert report.outcome == "abandoned"
    assert node.machine.calls == []
    assert report.remaining
    node.store.begin(node.plan(SECOND))
    node.machine.foreign("gpu-a", 4, "1g", 1)
    report = node.reconciler.recover(lambda: node.plan(SECOND))
    assert report is not None
    assert report.outcome == "unchanged"


def test_pieces_that_a_restart_took_are_no_longer_ours(node: Node) -> None:
    """After a restart of the node, a piece that is gone is forgotten as the agent's own."""
    assert node.reconciler.recover() is None
    assert len(node.store.managed()) == 3
    node.machine.reboot()
    assert node.reconciler.recover() is None
    assert node.store.managed() == {}


# --- faults of the field, on simulated silicon ---

PASSTHROUGH = """
boards:
  - board: A100-SXM4-40GB
    passthrough: true
    mig: true
    instances: [3g.20gb@0, 2g.10gb@4]
"""
OFF = "version: v1\nlayouts:\n  only:\n    - match: {vendor: nvidia}\n      mig: none\n"


@pytest.fixture
def passthrough(tmp_path: Path) -> Iterator[Rooms]:
    """A GPU given to a virtual machine, in MIG mode, with two instances of somebody else."""
    (tmp_path / "node.yaml").write_text(PASSTHROUGH)
    backend = FakeBackend.from_specs([str(tmp_path / "node.yaml")])
    with Rooms(backend, tmp_path / "state") as rooms:
        yield rooms


def test_a_start_with_an_empty_ledger_makes_no_changing_call(passthrough: Rooms) -> None:
    """Nothing is destroyed and no mode is set; what is there shows as not managed."""
    before = passthrough.snapshot()
    assert passthrough.reconciler.recover() is None
    after = passthrough.snapshot()
    assert [(p.id, p.incarnation) for p in after.partitions] == [
        (p.id, p.incarnation) for p in before.partitions
    ]
    assert len(after.partitions) == 2
    assert not any(piece.managed for piece in after.partitions)
    assert after.devices[0].modes == before.devices[0].modes


def test_a_mode_that_needs_a_forbidden_reset_ends_as_pending(passthrough: Rooms) -> None:
    """Asked for by name, the change is told as pending; no later start asks for it again."""
    report = passthrough.reconciler.apply(passthrough.plan(OFF))
    assert report.outcome == "pending"
    assert report.pending
    mode = passthrough.snapshot().devices[0].modes[0]
    assert (mode.current, mode.pending) == ("on", "off")
    assert isinstance(passthrough.worker.backend, FakeBackend)
    calls = passthrough.worker.backend.machine.state.serial
    assert passthrough.reconciler.recover() is None
    assert passthrough.worker.backend.machine.state.serial == calls
    assert passthrough.store.runs()[0].status is RunStatus.PENDING


def test_a_busy_mode_change_is_refused_and_taken_back(tmp_path: Path) -> None:
    """With a client on the GPU the mode is told as in use (19), and no wish stays behind."""
    (tmp_path / "node.yaml").write_text(
        "boards: [{board: H100-SXM5-80GB}]\nprocesses: [{pid: 4711, device: '#0'}]\n"
    )
    backend = FakeBackend.from_specs([str(tmp_path / "node.yaml")])
    text = OFF.replace("none", "[3g.40gb, 3g.40gb]")
    with Rooms(backend, tmp_path / "state") as rooms:
        report = rooms.reconciler.apply(rooms.plan(text))
        assert report.outcome == "rolled_back"
        assert "in use (19)" in report.error
        assert "4711" in report.error
        assert report.remaining
        mode = rooms.snapshot().devices[0].modes[0]
        assert (mode.current, mode.pending) == ("off", None)
        backend.machine.stop_process(4711)
        assert rooms.reconciler.apply(rooms.plan(text)).outcome == "applied"
        assert [p.profile for p in rooms.snapshot().partitions] == ["3g.40gb", "3g.40gb"]


def test_a_compute_instance_that_fails_leaves_no_hidden_gpu_instance(tmp_path: Path) -> None:
    """A GPU instance without compute instance is found and removed; the next try succeeds."""
    (tmp_path / "node.yaml").write_text(
        "boards: [{board: H100-SXM5-80GB, mig: true}]\nfaults:\n"
        "  - {call: gpu.create_compute_instance, device: '#0', action: error, error: unknown,"
        " times: 1}\n"
        "  - {call: gpu.destroy_gpu_instance, device: '#0', action: error, error: unknown,"
        " times: 1}\n"
    )
    backend = FakeBackend.from_specs([str(tmp_path / "node.yaml")])
    text = OFF.replace("none", "[3g.40gb, 2g.20gb]")
    with Rooms(backend, tmp_path / "state") as rooms:
        report = rooms.reconciler.apply(rooms.plan(text))
        assert report.outcome == "rolled_back"
        assert rooms.snapshot().faults == ()
        assert rooms.snapshot().partitions == ()
        assert rooms.reconciler.apply(rooms.plan(text)).outcome == "applied"
        assert len(rooms.snapshot().partitions) == 2
