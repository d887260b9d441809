"""A simulated MIG-capable GPU refuses what a real one refuses."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alloy_agent.silicon import refusals
from alloy_agent.silicon.nvidia import (
    ACTIVE,
    STATUS_IN_USE,
    STATUS_RESET_REQUIRED,
    caps_minor,
)
from alloy_agent.silicon.state import Client
from tests.silicon.conftest import (
    DOUBLE,
    FOUR,
    SEVENTH,
    SEVENTH_ME,
    THREE,
    TWO,
    WHOLE,
    first,
    machine_of,
    mig_gpu,
)


def test_instances_need_mig_mode() -> None:
    """Without MIG there is nothing to create and no capacity to ask for."""
    machine = machine_of("1xH100")
    gpu = machine.nvidia(first(machine))
    assert gpu.mig_mode() == (False, False)
    with pytest.raises(refusals.NotSupportedError):
        gpu.create_gpu_instance(SEVENTH, 0)
    with pytest.raises(refusals.NotSupportedError):
        gpu.remaining_capacity(SEVENTH)


def test_overlap_and_exhaustion_are_refused_alike() -> None:
    """What overlaps, and what is used up, is 'insufficient resources'; nothing changes by it."""
    _, gpu = mig_gpu()
    gpu.create_gpu_instance(FOUR, 0)
    for profile, start in ((THREE, 0), (SEVENTH, 3), (WHOLE, 0), (FOUR, 0)):
        with pytest.raises(refusals.InsufficientResourcesError):
            gpu.create_gpu_instance(profile, start)
    gpu.create_gpu_instance(SEVENTH_ME, 4)
    with pytest.raises(refusals.InsufficientResourcesError):
        gpu.create_gpu_instance(SEVENTH_ME, 5)
    assert [(entry.profile, entry.start) for entry in gpu.instances()] == [
        (FOUR, 0),
        (SEVENTH_ME, 4),
    ]


@pytest.mark.parametrize(
    ("profile", "start"), [(SEVENTH, 7), (THREE, 2), (TWO, 6), (FOUR, 4), (99, 0), (DOUBLE, 1)]
)
def test_illegal_placements_are_invalid(profile: int, start: int) -> None:
    """A profile or start that the table does not have is an invalid argument."""
    _, gpu = mig_gpu()
    with pytest.raises(refusals.InvalidArgumentError):
        gpu.create_gpu_instance(profile, start)


def test_ids_are_reused_and_uuids_are_not() -> None:
    """The same place gets the same instance ids again, and a MIG UUID never seen before."""
    _, gpu = mig_gpu()
    seen = set()
    for _ in range(3):
        instance = gpu.create_gpu_instance(THREE, 4)
        compute = gpu.create_compute_instance(instance.id)
        assert (instance.id, compute.id) == (2, 0)
        assert compute.uuid.startswith("MIG-")
        assert compute.uuid not in seen
        seen.add(compute.uuid)
        gpu.destroy_compute_instance(instance.id, compute.id)
        gpu.destroy_gpu_instance(instance.id)


def test_instance_ids_are_those_of_the_driver() -> None:
    """7g is 0; halves 1 and 2; quarters 3 to 5; single slices 7 on."""
    _, gpu = mig_gpu()
    assert gpu.create_gpu_instance(WHOLE, 0).id == 0
    gpu.destroy_gpu_instance(0)
    assert gpu.create_gpu_instance(TWO, 2).id == 4
    assert gpu.create_gpu_instance(THREE, 4).id == 2
    assert gpu.create_gpu_instance(SEVENTH, 1).id == 8


def test_ids_of_one_gpu_are_unique_at_any_moment() -> None:
    """No two instances of different profiles get one id."""
    _, gpu = mig_gpu("1xA100-40GB")
    for start in range(7):
        gpu.create_gpu_instance(SEVENTH, start)
    assert sorted(entry.id for entry in gpu.instances()) == [7, 8, 9, 10, 11, 12, 13]


def test_teardown_goes_from_the_inside() -> None:
    """A GPU instance with a compute instance, and one with a process, is in use."""
    machine, gpu = mig_gpu()
    instance = gpu.create_gpu_instance(TWO, 0)
    compute = gpu.create_compute_instance(instance.id)
    with pytest.raises(refusals.InUseError):
        gpu.destroy_gpu_instance(instance.id)
    machine.start_process(
        Client(pid=42, device=gpu.id, instance=instance.id, compute_instance=compute.id)
    )
    with pytest.raises(refusals.InUseError) as raised:
        gpu.destroy_compute_instance(instance.id, compute.id)
    assert raised.value.holders == (42,)
    machine.stop_process(42)
    gpu.destroy_compute_instance(instance.id, compute.id)
    gpu.destroy_gpu_instance(instance.id)
    with pytest.raises(refusals.NotFoundError):
        gpu.destroy_gpu_instance(instance.id)


def test_an_open_handle_keeps_an_instance() -> None:
    """A handle of a monitor on an instance nobody uses blocks its removal until it is let go."""
    machine, gpu = mig_gpu()
    instance = gpu.create_gpu_instance(SEVENTH, 0)
    machine.open_handle(gpu.id, instance.id)
    with pytest.raises(refusals.InUseError):
        gpu.destroy_gpu_instance(instance.id)
    machine.close_handle(gpu.id, instance.id)
    gpu.destroy_gpu_instance(instance.id)
    assert machine.open_handles() == 0


def test_compute_instances_share_the_slices_of_their_instance() -> None:
    """Compute instances are separate from the GPU instance and cannot exceed it."""
    _, gpu = mig_gpu()
    instance = gpu.create_gpu_instance(THREE, 0)
    assert gpu.instance(instance.id).compute == []
    one = gpu.create_compute_instance(instance.id, 1)
    two = gpu.create_compute_instance(instance.id, 2)
    assert (one.id, one.start, two.id, two.start) == (0, 0, 1, 1)
    with pytest.raises(refusals.InsufficientResourcesError):
        gpu.create_compute_instance(instance.id, 1)
    with pytest.raises(refusals.InvalidArgumentError):
        gpu.create_compute_instance(instance.id, 4)
    with pytest.raises(refusals.NotFoundError):
        gpu.create_compute_instance(12)


@pytest.mark.parametrize("spec", ["1xA100-40GB", "1xH100", "1xB200"])
def test_a_mode_change_with_a_client_stays_pending(spec: str) -> None:
    """The activation status says in use, current and pending differ, and a reset applies it."""
    machine = machine_of(spec)
    gpu = machine.nvidia(first(machine))
    machine.start_process(Client(pid=7, device=gpu.id))
    assert gpu.set_mig_mode(True) == STATUS_IN_USE
    assert gpu.mig_mode() == (False, True)
    with pytest.raises(refusals.InUseError):
        gpu.reset()
    machine.stop_process(7)
    gpu.reset()
    assert gpu.mig_mode() == (True, True)


def test_turning_mig_off_needs_all_instances_gone() -> None:
    """With an instance alive the mode stays on."""
    _, gpu = mig_gpu()
    instance = gpu.create_gpu_instance(SEVENTH, 0)
    assert gpu.set_mig_mode(False) == STATUS_IN_USE
    assert gpu.mig_mode() == (True, False)
    gpu.destroy_gpu_instance(instance.id)
    assert gpu.set_mig_mode(False) == ACTIVE


def test_a_passed_through_a100_needs_a_reset_that_it_does_not_get() -> None:
    """In a guest the mode of an Ampere GPU stays pending and the reset is refused."""
    machine = machine_of("1xA100-40GB")
    gpu = machine.nvidia(first(machine))
    machine.edit(lambda state: setattr(state.devices[0], "passthrough", True))
    assert gpu.set_mig_mode(True) == STATUS_RESET_REQUIRED
    assert gpu.mig_mode() == (False, True)
    with pytest.raises(refusals.NotSupportedError):
        gpu.reset()
    machine.reboot()
    assert gpu.mig_mode() == (True, True)


def test_reboot_keeps_the_mode_on_ampere_only() -> None:
    """Instances never survive a reboot; the mode does on Ampere, and not on Hopper."""
    for spec, kept in (("1xA100-40GB", True), ("1xH100", False)):
        machine, gpu = mig_gpu(spec)
        gpu.create_gpu_instance(SEVENTH, 0)
        machine.reboot()
        assert gpu.mig_mode() == (kept, kept)
        assert gpu.instances() == ()


def test_capability_minors_are_unique() -> None:
    """Each instance and compute instance of eight GPUs has a capability node of its own."""
    minors = [
        caps_minor(gpu, instance, compute)
        for gpu in range(8)
        for instance in range(15)
        for compute in (None, *range(8))
    ]
    assert len(set(minors)) == len(minors)
    assert min(minors) == 3  # behind mig/config and mig/monitor


@given(st.lists(st.tuples(st.sampled_from([19, 20, 15, 14, 9, 5, 0]), st.integers(0, 7))))
def test_any_sequence_of_creates_leaves_a_legal_geometry(wanted: list[tuple[int, int]]) -> None:
    """Whatever is asked for, living instances never overlap, and counts keep their limits."""
    _, gpu = mig_gpu()
    for profile, start in wanted:
        room = gpu.remaining_capacity(profile)
        try:
            gpu.create_gpu_instance(profile, start)
        except refusals.RefusalError:
            continue
        assert room > 0
    instances = gpu.instances()
    taken = [piece for e in instances for piece in range(e.start, e.start + e.size)]
    assert len(taken) == len(set(taken))
    assert len({entry.id for entry in instances}) == len(instances)
    shapes = {shape.vendor_id: shape for shape in gpu.board.profiles}
    assert sum(shapes[entry.profile].compute_slices for entry in instances) <= 7
    for shape in gpu.board.profiles:
        assert sum(e.profile == shape.vendor_id for e in instances) <= shape.max_count
