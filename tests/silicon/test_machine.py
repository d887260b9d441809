"""The machine: faults on demand, crash points, one state for all processes, restarts, events."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from alloy_agent.errors import ConfigError
from alloy_agent.silicon import refusals
from alloy_agent.silicon.build import open_machine
from alloy_agent.silicon.machine import Machine
from alloy_agent.silicon.spec import parse_specs
from alloy_agent.silicon.state import Client, Fault, SignalScript
from tests.silicon.conftest import SEVENTH, THREE, first, machine_of, mig_gpu

WAIT_S = 30.0  # only bounds a test that hangs


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        ("insufficient_resources", refusals.InsufficientResourcesError),
        ("in_use", refusals.InUseError),
        ("reset_required", refusals.ResetRequiredError),
        ("invalid_argument", refusals.InvalidArgumentError),
        ("not_supported", refusals.NotSupportedError),
        ("not_permitted", refusals.NotPermittedError),
        ("not_found", refusals.NotFoundError),
        ("lost", refusals.LostError),
        ("unknown", refusals.UnknownFailureError),
    ],
)
def test_a_scripted_error_strikes_as_often_as_asked(
    error: str, kind: type[refusals.RefusalError]
) -> None:
    """From the n-th matching call on, so many times, with the vendor's code; then never again."""
    machine, gpu = mig_gpu()
    fault = Fault(call="gpu.create_*", nth=2, times=1, code=999)
    machine.add_fault(msgspec.structs.replace(fault, error=error))
    gpu.create_gpu_instance(SEVENTH, 0)
    with pytest.raises(kind) as raised:
        gpu.create_gpu_instance(SEVENTH, 1)
    assert raised.value.code == 999
    gpu.create_gpu_instance(SEVENTH, 1)


def test_a_fault_names_its_device() -> None:
    """A fault of one device leaves the others alone, by index or by id."""
    machine = machine_of("3xH100")
    one, two, three = (machine.nvidia(device.id) for device in machine.state.devices)
    machine.add_fault(Fault(call="gpu.query", device="#1", error="lost"))
    machine.add_fault(Fault(call="gpu.query", device=three.id, error="unknown"))
    one.mig_mode()
    with pytest.raises(refusals.LostError):
        two.mig_mode()
    with pytest.raises(refusals.UnknownFailureError):
        three.mig_mode()
    machine.clear_faults()
    two.mig_mode()


def test_a_change_can_fail_after_it_was_done() -> None:
    """With `when: after` the device has it, and the caller is told otherwise."""
    machine, gpu = mig_gpu()
    machine.add_fault(Fault(call="gpu.create_gpu_instance", when="after", times=1))
    with pytest.raises(refusals.UnknownFailureError):
        gpu.create_gpu_instance(THREE, 0)
    assert [entry.start for entry in gpu.instances()] == [0]


def test_half_done_leaves_an_instance_without_compute() -> None:
    """The GPU instance is made, its compute instance fails: both facts stay visible."""
    machine, gpu = mig_gpu()
    machine.add_fault(Fault(call="gpu.create_compute_instance", times=1))
    instance = gpu.create_gpu_instance(THREE, 0)
    with pytest.raises(refusals.UnknownFailureError):
        gpu.create_compute_instance(instance.id)
    assert gpu.instance(instance.id).compute == []


def test_a_hang_holds_only_its_own_caller_and_ends_on_release() -> None:
    """While one call hangs, other devices answer; removing the fault lets it go on."""
    machine = machine_of("2xH100")
    stuck, well = (machine.nvidia(device.id) for device in machine.state.devices)
    key = machine.add_fault(Fault(call="gpu.query", device=stuck.id, action="hang"))
    done = threading.Event()

    def ask() -> None:
        stuck.mig_mode()
        done.set()

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    for _ in range(20):
        well.mig_mode()
    assert not done.is_set()
    machine.remove_fault(key)
    assert done.wait(WAIT_S)
    thread.join(WAIT_S)


def test_a_slow_call_takes_its_time() -> None:
    """A slow fault delays the call by what was asked for, and then it succeeds."""
    machine, gpu = mig_gpu()
    machine.add_fault(Fault(call="gpu.query", action="slow", delay_s=0.05))
    before = time.monotonic()
    gpu.mig_mode()
    assert time.monotonic() - before >= 0.05


@pytest.mark.parametrize(
    ("action", "expected"), [("sigkill", signal.SIGKILL), ("sigsegv", signal.SIGSEGV)]
)
def test_a_call_can_end_the_process(action: str, expected: signal.Signals) -> None:
    """A death on demand is a real one: the process ends by the signal."""
    code = (
        "from alloy_agent.silicon.build import open_machine\n"
        "from alloy_agent.silicon.spec import parse_specs\n"
        "from alloy_agent.silicon.state import Fault\n"
        "machine = open_machine(parse_specs(['1xH100']))\n"
        f"machine.add_fault(Fault(call='gpu.query', action='{action}'))\n"
        "machine.nvidia(machine.state.devices[0].id).mig_mode()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, timeout=WAIT_S)
    assert done.returncode == -expected


def test_crash_points_are_before_every_call_and_after_every_change() -> None:
    """A creation of instance and compute instance can be cut at each of its four points."""
    outcomes = []
    for point in range(1, 6):
        machine, gpu = mig_gpu()
        machine.crash_at(point)
        try:
            instance = gpu.create_gpu_instance(THREE, 0)
            gpu.create_compute_instance(instance.id)
        except refusals.SimulatedCrash:
            machine.process_died()
        machine.clear_faults()
        outcomes.append([len(entry.compute) for entry in gpu.instances()])
    assert outcomes == [[], [0], [0], [1], [1]]


def test_a_crash_happens_once() -> None:
    """After the simulated death the same machine answers again."""
    machine, gpu = mig_gpu()
    machine.crash_at(1)
    with pytest.raises(refusals.SimulatedCrash):
        gpu.mig_mode()
    gpu.mig_mode()


def test_a_lost_device_refuses_every_call_and_others_do_not() -> None:
    """After XID 79 every call says lost, until the node is restarted."""
    machine = machine_of("2xH100")
    lost, well = (machine.nvidia(device.id) for device in machine.state.devices)
    machine.inject_event(lost.id, "xid:79")
    for call in (lost.mig_mode, lambda: lost.set_mig_mode(True), lost.reset):
        with pytest.raises(refusals.LostError):
            call()
    well.mig_mode()
    machine.reboot()
    lost.mig_mode()


def test_faults_leave_their_traces() -> None:
    """Error counters, rows to remap and the recovery action follow from the events."""
    machine = machine_of("1xH100")
    device = first(machine)
    machine.inject_event(device, "xid:48")
    machine.inject_event(device, "xid:63")
    machine.inject_event(device, "xid:64")
    machine.inject_event(device, "xid:154", detail="4")
    state = machine.device(device)
    assert (state.ecc_uncorrected, state.recovery_action) == (1, 4)
    assert state.row_remap_pending
    assert state.row_remap_failed


def test_events_come_once_in_order_and_repeat_when_repeated() -> None:
    """Two equal faults are two events; a reader that is behind gets all, in order."""
    machine = machine_of("1xH100")
    seen = machine.state.event_number
    assert machine.wait_events(seen, 0.0) == ()
    for code in ("xid:62", "xid:45", "xid:31", "xid:31"):
        machine.inject_event(first(machine), code)
    events = machine.wait_events(seen, 1.0)
    assert [event.code for event in events] == ["xid:62", "xid:45", "xid:31", "xid:31"]
    assert machine.wait_events(events[-1].number, 0.0) == ()


def test_a_waiting_reader_wakes_for_an_event() -> None:
    """Who waits for events gets one that happens meanwhile."""
    machine = machine_of("1xH100")
    found: list[str] = []
    reader = threading.Thread(
        target=lambda: found.extend(e.code for e in machine.wait_events(0, WAIT_S))
    )
    reader.start()
    machine.inject_event(first(machine), "xid:13")
    reader.join(WAIT_S)
    assert found == ["xid:13"]


def test_two_processes_share_one_machine(tmp_path: Path) -> None:
    """What one process changes, another sees at its next call, and events cross too."""
    recipe = parse_specs(["2xH100"])
    ours, theirs = open_machine(recipe, tmp_path), open_machine(recipe, tmp_path)
    gpu, view = ours.nvidia(first(ours)), theirs.nvidia(first(theirs))
    assert not list(tmp_path.iterdir())  # nothing is written before the first change
    gpu.set_mig_mode(True)
    gpu.create_gpu_instance(THREE, 4)
    assert [entry.start for entry in view.instances()] == [4]
    view.create_gpu_instance(THREE, 0)
    assert [entry.start for entry in gpu.instances()] == [0, 4]
    assert [event.code for event in ours.wait_events(0, 1.0)] == ["gi2+", "gi1+"]
    again = open_machine(recipe, tmp_path)
    assert len(again.nvidia(first(again)).instances()) == 2


def test_another_specification_is_another_machine(tmp_path: Path) -> None:
    """A changed specification neither inherits nor destroys the first machine's state."""
    one = open_machine(parse_specs(["1xH100"]), tmp_path)
    one.nvidia(first(one)).set_mig_mode(True)
    other = open_machine(parse_specs(["2xH100"]), tmp_path)
    assert not other.device(first(other)).mig
    back = open_machine(parse_specs(["1xH100"]), tmp_path)
    assert back.device(first(back)).mig


def _hammer(directory: str, number: int) -> None:
    machine = open_machine(parse_specs(["8xH100"]), Path(directory))
    for turn in range(40):
        machine.start_process(
            Client(pid=1000 * number + turn + 1, device=machine.state.devices[number].id)
        )


def test_concurrent_changes_of_two_processes_are_all_kept(tmp_path: Path) -> None:
    """Writers wait for each other: no change is lost."""
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=_hammer, args=(str(tmp_path), n)) for n in range(2)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(WAIT_S)
        assert writer.exitcode == 0
    machine = open_machine(parse_specs(["8xH100"]), tmp_path)
    assert len(machine.state.clients) == 80


def test_a_killed_writer_leaves_a_whole_state(tmp_path: Path) -> None:
    """SIGKILL at the first crash points leaves a state that opens, with or without the change."""
    for point in range(1, 5):
        directory = tmp_path / str(point)
        code = (
            "import sys; from pathlib import Path\n"
            "from alloy_agent.silicon.build import open_machine\n"
            "from alloy_agent.silicon.spec import parse_specs\n"
            f"m = open_machine(parse_specs(['1xH100']), Path({str(directory)!r}))\n"
            f"m.crash_at({point}, 'sigkill')\n"
            "g = m.nvidia(m.state.devices[0].id)\n"
            "g.set_mig_mode(True); g.create_gpu_instance(9, 0)\n"
        )
        done = subprocess.run([sys.executable, "-c", code], check=False, timeout=WAIT_S)
        assert done.returncode == -signal.SIGKILL
        machine = open_machine(parse_specs(["1xH100"]), directory)
        state = machine.device(first(machine))
        assert (state.mig, len(state.instances)) == ((point > 1), int(point == 4))


@given(st.binary(max_size=300))
@example(b"{}")
def test_a_damaged_state_is_one_line(tmp_path_factory: pytest.TempPathFactory, junk: bytes) -> None:
    """Whatever stands in the state file, it opens or says in one line what to do."""
    directory = tmp_path_factory.mktemp("state")
    recipe = parse_specs(["1xH100"])
    machine = open_machine(recipe, directory)
    machine.nvidia(first(machine)).set_mig_mode(True)
    (path,) = directory.glob("*.json")
    path.write_bytes(junk)
    with pytest.raises(ConfigError) as raised:
        open_machine(recipe, directory)
    assert "\n" not in str(raised.value)
    assert "remove the file" in str(raised.value)


def test_a_newer_state_is_refused(tmp_path: Path) -> None:
    """A state of a later version is not guessed at."""
    recipe = parse_specs(["1xH100"])
    machine = open_machine(recipe, tmp_path)
    machine.edit(lambda state: setattr(state, "version", 99))
    with pytest.raises(ConfigError, match="version 99"):
        open_machine(recipe, tmp_path)


def test_an_unwritable_directory_allows_reading(tmp_path: Path) -> None:
    """Reading needs no directory; a change that cannot be saved says so in one line."""
    blocked = tmp_path / "file"
    blocked.write_text("")
    machine = open_machine(parse_specs(["1xH100"]), blocked / "sub" if os.geteuid() else None)
    assert machine.nvidia(first(machine)).mig_mode() == (False, False)
    machine = Machine(machine.state, Path("/proc/nowhere/silicon.json"))
    with pytest.raises(ConfigError, match="cannot be saved"):
        machine.nvidia(first(machine)).set_mig_mode(True)


def test_power_energy_and_throttling_agree() -> None:
    """The energy counter is the integral of power, grows with load, and survives load changes."""
    clock = [100.0]
    machine = Machine(machine_of("1xH100").state, clock=lambda: clock[0])
    device = first(machine)
    machine.edit(lambda _: None)  # settles the counters at 100 s
    start = machine.power_model(machine.device(device)).energy_at(100.0)
    clock[0] = 110.0
    idle = machine.power_model(machine.device(device)).energy_at(110.0) - start
    assert idle == pytest.approx(700.0)
    machine.start_process(Client(pid=1, device=device, load_ratio=1.0))
    model = machine.power_model(machine.device(device))
    steps = 20_000
    total = sum(model.power_w(110.0 + 20.0 * (n + 0.5) / steps) for n in range(steps))
    clock[0] = 130.0
    assert model.energy_at(130.0) - model.energy_at(110.0) == pytest.approx(
        total * 20.0 / steps, rel=1e-6
    )
    assert model.throttle_at(130.0) > 0
    machine.stop_process(1)
    after = machine.power_model(machine.device(device))
    assert after.energy_at(130.0) == pytest.approx(model.energy_at(130.0))
    assert after.headroom_c(130.0) > model.headroom_c(130.0)


def test_a_script_replaces_a_signal() -> None:
    """Scripted values follow each other in time; None is absent; the last one stays."""
    from alloy_agent.silicon.signals import scripted

    script = SignalScript(values=(1.0, None, 3.0), step_s=2.0, started_s=10.0)
    assert [scripted(script, t) for t in (10.0, 12.5, 14.0, 99.0)] == [1.0, None, 3.0, 3.0]
    again = SignalScript(values=(1.0, 2.0), step_s=1.0, started_s=0.0, repeat=True)
    assert [scripted(again, t) for t in (0.0, 1.0, 2.0)] == [1.0, 2.0, 1.0]
    assert scripted(SignalScript(values=()), 0.0) is None


def test_processes_must_name_what_exists() -> None:
    """A process on an instance or partition that is not there is refused."""
    machine = machine_of("1xH100", "1xMI300X")
    nvidia, amd = machine.state.devices
    with pytest.raises(refusals.NotFoundError):
        machine.start_process(Client(pid=1, device=nvidia.id, instance=3))
    with pytest.raises(refusals.NotFoundError):
        machine.start_process(Client(pid=1, device=amd.id, instance=1))
    with pytest.raises(refusals.NotFoundError):
        machine.start_process(Client(pid=1, device="nothing"))
    with pytest.raises(refusals.NotSupportedError):
        machine.nvidia(amd.id)
