"""Simulated AMD accelerators and Neuron devices refuse what real ones refuse."""

from __future__ import annotations

import itertools

import pytest

from alloy_agent.silicon import refusals
from alloy_agent.silicon.boards import BOARDS, AmdBoard, NeuronInstance
from alloy_agent.silicon.neuron import ATTACH_MAX, physical_cores
from alloy_agent.silicon.state import Client, Grant
from tests.silicon.conftest import first, machine_of


@pytest.mark.parametrize(
    ("mode", "count", "cus", "mib"),
    [("SPX", 1, 304, 196592), ("DPX", 2, 152, 98296), ("QPX", 4, 76, 49148), ("CPX", 8, 38, 24574)],
)
def test_a_compute_mode_cuts_the_device(mode: str, count: int, cus: int, mib: int) -> None:
    """Partitions of MI300X have the XCDs, CUs and memory that the driver gives them."""
    machine = machine_of("1xMI300X")
    gpu = machine.amd(first(machine))
    gpu.set_compute_mode(mode)
    pieces = gpu.partitions()
    assert len(pieces) == count
    assert {piece.cus for piece in pieces} == {cus}
    assert {piece.memory_bytes >> 20 for piece in pieces} == {mib}
    assert [piece.first_xcd for piece in pieces] == list(range(0, 8, 8 // count))


@pytest.mark.parametrize(
    ("spec", "refused"),
    [("1xMI300X", "TPX"), ("1xMI300A", "DPX"), ("1xMI308X", "QPX"), ("1xMI300X", "XPX")],
)
def test_a_mode_that_does_not_fit_the_xcds_is_invalid(spec: str, refused: str) -> None:
    """Modes that the number of XCCs does not allow are refused as invalid."""
    machine = machine_of(spec)
    with pytest.raises(refusals.InvalidArgumentError):
        machine.amd(first(machine)).set_compute_mode(refused)


def test_boards_without_modes_have_none() -> None:
    """MI210 has neither compute nor memory modes."""
    machine = machine_of("1xMI210")
    gpu = machine.amd(first(machine))
    with pytest.raises(refusals.NotSupportedError):
        gpu.set_compute_mode("SPX")
    with pytest.raises(refusals.NotSupportedError):
        gpu.request_memory_mode("NPS4")


@pytest.mark.parametrize(("scope", "busy"), [("device", False), ("node", True)])
def test_a_compute_client_keeps_the_mode(scope: str, busy: bool) -> None:
    """A client of the device makes a change EBUSY; one of another device only on old kernels."""
    machine = machine_of("2xMI300X")
    machine.edit(lambda state: setattr(state, "kfd_busy_scope", scope))
    one, other = (machine.amd(device.id) for device in machine.state.devices)
    machine.start_process(Client(pid=9, device=other.id, instance=0))
    with pytest.raises(refusals.InUseError) as raised:
        other.set_compute_mode("CPX")
    assert raised.value.holders == (9,)
    if busy:
        with pytest.raises(refusals.InUseError):
            one.set_compute_mode("CPX")
    else:
        one.set_compute_mode("CPX")


def test_a_memory_mode_holds_for_a_whole_hive_after_a_reload() -> None:
    """It is only requested, needs all members, changes the compute mode too, and needs idleness."""
    machine = machine_of("8xMI300X")
    gpus = [machine.amd(device.id) for device in machine.state.devices]
    assert len(machine.hive(gpus[0].id)) == 8
    gpus[0].request_memory_mode("NPS4")
    machine.driver_reload()
    assert gpus[0].modes() == ("SPX", "NPS1", "NPS4")
    for gpu in gpus:
        gpu.request_memory_mode("NPS4")
    assert {gpu.modes() for gpu in gpus} == {("SPX", "NPS1", "NPS4")}
    machine.start_process(Client(pid=3, device=gpus[5].id, instance=0))
    with pytest.raises(refusals.InUseError):
        machine.driver_reload()
    machine.stop_process(3)
    machine.driver_reload()
    assert {gpu.modes() for gpu in gpus} == {("CPX", "NPS4", None)}
    with pytest.raises(refusals.InvalidArgumentError):
        gpus[0].set_compute_mode("SPX")


def test_a_request_can_be_taken_back() -> None:
    """Asking for the present memory mode ends the pending request."""
    machine = machine_of("1xMI300X")
    gpu = machine.amd(first(machine))
    gpu.request_memory_mode("NPS4")
    gpu.request_memory_mode("NPS1")
    assert gpu.modes() == ("SPX", "NPS1", None)
    with pytest.raises(refusals.InvalidArgumentError):
        gpu.request_memory_mode("NPS8")


def test_a_switch_renumbers_partitions_and_loses_isolation() -> None:
    """After a switch away and back, minors and KFD ids differ; process isolation is off again."""
    machine = machine_of("1xMI300X")
    gpu = machine.amd(first(machine))
    gpu.set_compute_mode("CPX")
    before = gpu.partitions()
    gpu.set_isolation([1] * 8)
    with pytest.raises(refusals.InvalidArgumentError):
        gpu.set_isolation([1])
    gpu.set_compute_mode("SPX")
    gpu.set_compute_mode("CPX")
    after = gpu.partitions()
    assert [p.render_minor for p in before[1:]] != [p.render_minor for p in after[1:]]
    assert {p.kfd_gpu_id for p in before}.isdisjoint({p.kfd_gpu_id for p in after})
    assert machine.device(gpu.id).isolation == [0] * 8


def test_render_minors_run_out_on_a_full_node_with_a_display_card() -> None:
    """Of 64 partitions one gets no render node when another card has taken a minor."""
    machine = machine_of("8xMI300X")
    machine.edit(lambda state: setattr(state, "display_card", True))
    for device in machine.state.devices:
        machine.amd(device.id).set_compute_mode("CPX")
    minors = [
        piece.render_minor
        for device in machine.state.devices
        for piece in machine.amd(device.id).partitions()
    ]
    live = [minor for minor in minors if minor is not None]
    assert (len(minors), len(live), len(set(live))) == (64, 63, 63)


def test_every_pair_of_modes_is_reached_and_left() -> None:
    """From each valid mode of each board every other valid one is reached."""
    for board in BOARDS.values():
        if not isinstance(board, AmdBoard) or not board.compute_modes:
            continue
        machine = machine_of(f"1x{board.name}")
        gpu = machine.amd(first(machine))
        for start, end in itertools.permutations(gpu.available_compute_modes(), 2):
            gpu.set_compute_mode(start)
            gpu.set_compute_mode(end)
            assert gpu.modes()[0] == end


def test_core_order_is_the_drivers() -> None:
    """Logical core 0 of trn2's device 0 is cores 4 and 5 of sysfs; inf2 counts plainly."""
    machine = machine_of("trn2.48xlarge")
    board = BOARDS["trn2.48xlarge"]
    assert isinstance(board, NeuronInstance)
    devices = machine.state.devices
    assert physical_cores(board, devices[0], 0, 1) == (4, 5)
    assert physical_cores(board, devices[4], 2, 2) == (6, 7, 4, 5)
    other = machine_of("inf2.xlarge")
    plain = BOARDS["inf2.xlarge"]
    assert isinstance(plain, NeuronInstance)
    assert physical_cores(plain, other.state.devices[0], 1, 1) == (1,)


def test_core_configuration_needs_an_unused_device() -> None:
    """LNC changes only without holders and without grants that count in it."""
    machine = machine_of("trn2.3xlarge")
    neuron = machine.neuron(first(machine))
    assert neuron.lnc() == 2
    with pytest.raises(refusals.InvalidArgumentError):
        neuron.set_lnc(4)
    machine.start_process(Client(pid=5, device=neuron.id, cores=(0,)))
    with pytest.raises(refusals.InUseError):
        neuron.set_lnc(1)
    machine.stop_process(5)
    grant = machine.create_grant(
        neuron.id, Grant(kind="cores", profile="2c", start=0, size=2, serial=0)
    )
    with pytest.raises(refusals.InUseError):
        neuron.set_lnc(1)
    machine.destroy_grant(neuron.id, grant.serial)
    neuron.set_lnc(1)
    assert neuron.lnc() == 1


def test_core_reservation_binds_only_those_who_ask() -> None:
    """A process may sit on cores that were granted to another; only attach slots are limited."""
    machine = machine_of("inf2.xlarge")
    device = first(machine)
    machine.create_grant(device, Grant(kind="cores", profile="1c", start=0, size=1, serial=0))
    for pid in range(1, ATTACH_MAX + 1):
        machine.start_process(Client(pid=pid, device=device, cores=(0, 1)))
    with pytest.raises(refusals.InUseError):
        machine.start_process(Client(pid=99, device=device, cores=(1,)))


def test_grants_overlap_only_as_shares() -> None:
    """Runs of cores exclude each other and shares; shares of different ordinals live together."""
    machine = machine_of("trn2.3xlarge")
    device = first(machine)

    def grant(kind: str, start: int, size: int, ordinal: int = 0) -> Grant:
        entry = Grant(kind="cores", profile=kind, start=start, size=size, serial=0, ordinal=ordinal)
        entry.kind = kind  # type: ignore[assignment]
        return machine.create_grant(device, entry)

    run = grant("cores", 0, 2)
    with pytest.raises(refusals.InsufficientResourcesError):
        grant("cores", 1, 2)
    with pytest.raises(refusals.InsufficientResourcesError):
        grant("production", 0, 4)
    machine.destroy_grant(device, run.serial)
    with pytest.raises(refusals.NotFoundError):
        machine.destroy_grant(device, run.serial)
    grant("production", 0, 4)
    grant("opportunistic", 0, 4)
    grant("opportunistic", 0, 4, ordinal=1)
    with pytest.raises(refusals.InsufficientResourcesError):
        grant("opportunistic", 0, 4, ordinal=1)
    with pytest.raises(refusals.InsufficientResourcesError):
        grant("cores", 3, 1)


def test_a_reset_is_silently_ignored_while_somebody_holds_the_device() -> None:
    """Writing the reset file succeeds and does nothing as long as the device is open."""
    machine = machine_of("inf2.xlarge")
    device = first(machine)
    machine.edit(lambda state: setattr(state.devices[0], "needs_reset", True))
    machine.start_process(Client(pid=5, device=device, cores=(0,)))
    machine.neuron(device).reset()
    assert machine.device(device).needs_reset
    machine.stop_process(5)
    machine.neuron(device).reset()
    assert not machine.device(device).needs_reset
