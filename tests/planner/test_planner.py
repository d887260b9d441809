"""What a plan keeps, in which order it works, what it interrupts, and what it refuses."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from alloy_agent.errors import PlanImpossibleError
from alloy_agent.model import (
    Condition,
    Configure,
    Create,
    Destroy,
    Device,
    DeviceId,
    DeviceLayout,
    Mode,
    ModeChange,
    ModeKind,
    Partition,
    PartitionId,
    PartitionSpec,
    Placement,
    Plan,
    Scope,
    SetMode,
    Share,
    SourceRef,
    Step,
    TenantId,
)
from alloy_agent.planner import describe, difference, disruptive, expected, fits, plan, undo_of
from alloy_agent.planner.packing import STATES_MAX, Have, Kind, pack
from tests.planner.world import (
    cpu,
    gpu,
    layout,
    mi300x,
    piece,
    pieces,
    replay,
    runs,
    snapshot,
    trainium,
    wanted,
)

GIB = 1 << 30


def steps(made: Plan) -> list[str]:
    return [describe(planned.step) for planned in made.steps]


def modes(device: Device, **values: str) -> DeviceLayout:
    return DeviceLayout(
        device=device.id,
        modes={ModeKind(kind): value for kind, value in values.items()},
        partitions=(),
        source=SourceRef(file="layout.yaml", line=9),
    )


def shares(device: Device, production: int, opportunistic: int) -> DeviceLayout:
    counts = {Share.PRODUCTION: production, Share.OPPORTUNISTIC: opportunistic}
    specs = tuple(
        PartitionSpec(
            device=device.id,
            profile=f"{share}-{ordinal}",
            size=device.slices,
            share=share,
            ordinal=ordinal,
        )
        for share, count in counts.items()
        for ordinal in range(count)
    )
    return DeviceLayout(device=device.id, partitions=specs, modes={ModeKind.MIG: "off"})


def test_pieces_of_both_sides_stay_and_the_rest_is_placed_around_them() -> None:
    """Only the piece that is not wanted goes; the new ones take its room."""
    device = gpu()
    seen = snapshot((device,), pieces(device, [("4g.40gb", 0), ("2g.20gb", 4), ("1g.10gb", 6)]))
    made = plan(layout(wanted(device, "4g.40gb", "1g.10gb", "1g.10gb", "1g.10gb")), seen)
    assert steps(made) == [
        "destroy 2g.20gb@4 on GPU-0",
        "create 1g.10gb@4 on GPU-0",
        "create 1g.10gb@5 on GPU-0",
    ]
    assert made.kept == ("GPU-0/4g.40gb@0", "GPU-0/1g.10gb@6")
    assert (made.boot_id, made.observed_sequence) == ("boot", 7)


def test_a_layout_that_holds_has_no_steps() -> None:
    """Planning what is there changes nothing, in any order of the wish."""
    device = gpu()
    seen = snapshot((device,), pieces(device, [("3g.40gb", 4), ("1g.10gb", 0), ("1g.10gb", 2)]))
    made = plan(layout(wanted(device, "1g.10gb", "3g.40gb", "1g.10gb")), seen)
    assert made.steps == ()
    assert made.cost.steps == 0
    assert len(made.kept) == 3


def test_new_pieces_leave_room_for_large_profiles() -> None:
    """A single seventh goes where a 3g and a 2g piece still fit beside it, not to the front."""
    device = gpu()
    made = plan(layout(wanted(device, "1g.10gb")), snapshot((device,)))
    created = made.steps[0].step
    assert isinstance(created, Create)
    place = created.spec.placement
    assert place is not None
    assert place.start >= 4
    assert fits(device, (*(wanted(device, "4g.40gb", "2g.20gb", "1g.10gb").partitions or ()),))


def test_small_pieces_gather_instead_of_spoiling_both_halves() -> None:
    """Four sevenths placed into an empty board leave a whole half free."""
    device = gpu()
    made = plan(layout(wanted(device, *("1g.10gb",) * 3)), snapshot((device,)))
    left = replay(made, snapshot((device,)))
    halves = {part.placement.start // 4 for part in left.partitions.values()}
    assert len(halves) == 1


def test_a_pinned_place_moves_a_piece_that_sits_elsewhere() -> None:
    """The same profile at another start than the pinned one is not the wanted piece."""
    device = gpu()
    seen = snapshot((device,), pieces(device, [("3g.40gb", 0)]))
    made = plan(layout(wanted(device, "3g.40gb@4")), seen)
    assert steps(made) == ["destroy 3g.40gb@0 on GPU-0", "create 3g.40gb@4 on GPU-0"]


def test_every_step_of_the_plan_can_be_taken_back() -> None:
    """Undoing all steps from the last to the first restores geometry, caps and modes."""
    device, node = gpu(), cpu()
    before = snapshot(
        (device, node),
        (*pieces(device, [("4g.40gb", 0), ("2g.20gb", 4)]), piece(node, "2c", 0, 2, 4 * GIB)),
    )
    goal = layout(wanted(device, "3g.40gb", "3g.40gb"), runs(node, 2, 4, memory=[GIB, GIB]))
    made = plan(goal, before)
    left = replay(made, before)
    middle = snapshot(before.devices, left.partitions.values())
    undo: list[Step] = []
    for planned in reversed(made.steps):
        assert planned.undo is not None
        undo.append(planned.undo)
    alive = {part.id: part for part in middle.partitions}
    for step in undo:
        if isinstance(step, Destroy):
            del alive[step.partition.id]
        elif isinstance(step, Configure):
            alive[step.partition.id] = replace(
                alive[step.partition.id], memory_bytes=step.memory_bytes
            )
        elif isinstance(step, Create):
            assert step.spec.placement is not None
            back = PartitionId(f"{step.device}/{step.spec.profile}@{step.spec.placement.start}")
            original = next(part for part in before.partitions if part.id == back)
            alive[back] = original
    assert {(p.id, p.memory_bytes) for p in alive.values()} == {
        (p.id, p.memory_bytes) for p in before.partitions
    }


def test_undo_of_a_creation_names_the_place_and_no_incarnation() -> None:
    """What is not made yet has no identity, so its undo carries none."""
    spec = PartitionSpec(
        device=DeviceId("d"), profile="2c", size=2, placement=Placement(start=3, size=2)
    )
    back = undo_of(Create(device=DeviceId("d"), spec=spec))
    assert isinstance(back, Destroy)
    assert (back.partition.id, back.partition.incarnation) == ("d/2c@3", "")


# --- modes ---------------------------------------------------------------------------------------


def test_mig_goes_on_before_the_first_piece_and_off_after_the_last() -> None:
    """The switch stands between what needs the old position and what needs the new one."""
    off, on = gpu(mig="off"), gpu()
    made = plan(layout(wanted(off, "3g.40gb")), snapshot((off,)))
    assert [type(planned.step) for planned in made.steps] == [SetMode, Create]
    full = snapshot((on,), pieces(on, [("3g.40gb", 0), ("1g.10gb", 4)]))
    made = plan(layout(wanted(on, mig="off")), full)
    assert [type(planned.step) for planned in made.steps] == [Destroy, Destroy, SetMode]
    assert made.cost.destroyed == 2
    assert made.cost.interrupted_devices == 1
    replay(made, full)


def test_a_switch_that_needs_a_reset_says_so() -> None:
    """The plan tells that no process may use the device while MIG changes on such a board."""
    device = gpu("A100-SXM4-40GB", mig="off")
    slow = replace(device.modes[0], change=ModeChange.DEVICE_RESET, pending="on")
    made = plan(layout(wanted(device)), snapshot((replace(device, modes=(slow,)),)))
    assert any("needs a reset" in note for note in made.notes)
    assert any("still pending" in note for note in made.notes)
    assert made.steps[0].interrupts[0].scope is Scope.DEVICE


def test_a_compute_mode_loses_every_piece_of_its_device_and_no_other() -> None:
    """One switch per device; its own pieces count as destroyed, the neighbour's stay."""
    first, second = mi300x(0), mi300x(1)
    alive = (piece(first, "SPX", 0, 8), piece(second, "SPX", 0, 8))
    made = plan(layout(modes(first, compute="CPX")), snapshot((first, second), alive))
    assert steps(made) == ["switch compute of amd-0 from SPX to CPX"]
    assert made.cost.destroyed == 1
    assert made.cost.interrupted_devices == 1
    assert {i.subject for i in made.steps[0].interrupts} == {"amd-0", "amd-0/SPX@0"}
    assert disruptive(made) == ()


def test_a_memory_mode_reaches_the_hive_and_needs_consent() -> None:
    """One switch for all members, after the compute mode that works on both sides of it."""
    first, second = mi300x(0), mi300x(1)
    alive = (piece(first, "SPX", 0, 8), piece(second, "SPX", 0, 8))
    wish = layout(
        modes(first, compute="CPX", memory="NPS4"), modes(second, compute="CPX", memory="NPS4")
    )
    made = plan(wish, snapshot((first, second), alive))
    assert steps(made) == [
        "switch compute of amd-0 from SPX to CPX",
        "switch memory of amd-0 from NPS1 to NPS4",
        "switch compute of amd-1 from SPX to CPX",
    ]
    assert made.cost.destroyed == 2
    assert made.cost.interrupted_devices == 2
    scopes = {(i.scope, i.subject) for i in made.steps[1].interrupts}
    assert (Scope.HIVE, "hive-1") in scopes
    assert (Scope.NODE, "node") in scopes
    assert len(disruptive(made)) == 1
    assert any("driver is loaded again" in note for note in made.notes)


def test_the_memory_mode_changes_first_where_the_new_compute_mode_needs_it() -> None:
    """From CPX in NPS4 to SPX in NPS1 the memory comes first: SPX does not work in NPS4."""
    device = mi300x(0, compute="CPX", memory="NPS4")
    made = plan(layout(modes(device, compute="SPX", memory="NPS1")), snapshot((device,)))
    kinds = [planned.step.kind for planned in made.steps if isinstance(planned.step, SetMode)]
    assert kinds == [ModeKind.MEMORY, ModeKind.COMPUTE]


def test_members_of_a_hive_cannot_want_different_memory_modes() -> None:
    """The refusal names both devices and both entries."""
    first, second = mi300x(0), mi300x(1, compute="CPX")
    third = replace(mi300x(2), modes=first.modes)
    wish = layout(modes(first, memory="NPS4"), modes(third, memory="NPS2"))
    three = [
        replace(d, modes=tuple(replace(m, available=()) for m in d.modes))
        for d in (first, second, third)
    ]
    with pytest.raises(PlanImpossibleError, match=r"amd-2 wants memory NPS2.*amd-0.*NPS4"):
        plan(wish, snapshot(three))


def test_a_lease_anywhere_in_the_hive_stops_a_memory_mode() -> None:
    """A leased piece of a device that the layout does not even name is still in the way."""
    first, second = mi300x(0), mi300x(1)
    alive = (piece(first, "SPX", 0, 8), piece(second, "SPX", 0, 8))
    seen = snapshot((first, second), alive)
    with pytest.raises(PlanImpossibleError, match=r"layout.yaml:9.*amd-1/SPX@0.*held by a lease"):
        plan(layout(modes(first, memory="NPS4")), seen, frozenset({alive[1].id}))


def test_a_mode_for_the_next_process_interrupts_nobody() -> None:
    """The logical core size of a Neuron device changes without touching living pieces."""
    mode = Mode(
        kind=ModeKind.LNC, current="2", available=("1", "2"), change=ModeChange.PROCESS_START
    )
    device = replace(trainium(), modes=(mode,))
    made = plan(layout(replace(modes(device, lnc="1"), partitions=None)), snapshot((device,)))
    assert made.cost.interrupted_devices == 0
    assert made.steps[0].interrupts == ()
    assert any("processes that start after" in note for note in made.notes)


# --- memory caps and shares ----------------------------------------------------------------------


def test_an_altered_piece_is_put_right_before_another_takes_its_cores() -> None:
    """What somebody changed by hand is repaired in place, interrupts nobody and is no undoing."""
    node = cpu()
    how = "was granted CPUs 1-2 and holds 1-4"
    bent = replace(piece(node, "2c", 0, 2, GIB), altered=how)
    before = snapshot([node], [bent])
    goal = layout(runs(node, 2, 2, memory=[GIB, GIB]))
    made = plan(goal, before, frozenset({bent.id}))
    assert [describe(p.step) for p in made.steps] == [
        f"put cpu-0/2c@0 right, which {how}",
        "create 2c@2 on cpu-0 with 1GiB",
    ]
    assert made.steps[0].interrupts == ()
    assert made.kept == (bent.id,)
    undo = made.steps[0].undo
    assert isinstance(undo, Configure)
    assert (undo.memory_bytes, undo.partition.altered) == (GIB, "")
    assert f"cpu-0/2c@0: {how}" in difference(goal, before)


def test_caps_shrink_before_they_grow() -> None:
    """A living run keeps its place; its cap changes in place, the smaller one first."""
    node = cpu()
    alive = [piece(node, "2c", 0, 2, 8 * GIB), piece(node, "4c", 2, 4, 4 * GIB)]
    goal = layout(runs(node, 2, 4, memory=[4 * GIB, 8 * GIB]))
    made = plan(goal, snapshot((node,), alive))
    assert steps(made) == [
        "change the memory cap of cpu-0/2c@0 from 8GiB to 4GiB",
        "change the memory cap of cpu-0/4c@2 from 4GiB to 8GiB",
    ]
    assert made.cost.destroyed == 0
    assert all(planned.interrupts == () for planned in made.steps)


def test_a_cap_that_the_kernel_rounded_is_the_cap() -> None:
    """Less than a page of difference is none; a cap of the whole node is no cap."""
    node = cpu()
    alive = [piece(node, "2c", 0, 2, 1_500_000_000 // 4096 * 4096)]
    same = layout(runs(node, 2, memory=[1_500_000_000]))
    assert plan(same, snapshot((node,), alive)).steps == ()
    assert difference(same, snapshot((node,), alive)) == ()
    open_ = [piece(node, "2c", 0, 2, None)]
    assert plan(layout(runs(node, 2)), snapshot((node,), open_)).steps == ()
    whole = [piece(node, "2c", 0, 2, 16 * GIB)]
    assert plan(layout(runs(node, 2)), snapshot((node,), whole)).steps == ()


def test_shares_lie_over_each_other_and_are_kept_by_their_number() -> None:
    """More opportunistic shares are added without touching those that are there."""
    device = gpu(mig="off")
    one = layout(shares(device, 1, 1))
    first = replay(plan(one, snapshot((device,))), snapshot((device,)))
    seen = snapshot((device,), first.partitions.values())
    more = plan(layout(shares(device, 1, 2)), seen)
    assert steps(more) == ["create opportunistic-1@0 on GPU-0"]
    assert len(more.kept) == 2
    less = plan(layout(shares(device, 1, 0)), seen)
    assert steps(less) == ["destroy opportunistic-0@0 on GPU-0"]


def test_shares_go_before_a_device_is_cut() -> None:
    """From shared to cut: all shares go, MIG comes on, pieces come."""
    device = gpu(mig="off")
    first = replay(plan(layout(shares(device, 1, 1)), snapshot((device,))), snapshot((device,)))
    seen = snapshot((device,), first.partitions.values())
    made = plan(layout(wanted(device, "3g.40gb")), seen)
    assert [type(planned.step) for planned in made.steps] == [Destroy, Destroy, SetMode, Create]


# --- refusals ------------------------------------------------------------------------------------


def leased_board() -> tuple[Device, tuple[Partition, ...]]:
    device = gpu()
    alive = pieces(device, [("1g.10gb", 0), ("1g.10gb", 4)])
    return device, tuple(replace(part, tenant=TenantId("acme")) for part in alive)


def test_a_lease_that_would_have_to_go_refuses_the_plan() -> None:
    """The refusal names the line of the layout, the piece and its tenant."""
    device, alive = leased_board()
    held = frozenset({alive[0].id})
    with pytest.raises(PlanImpossibleError) as unwanted:
        plan(layout(wanted(device, "3g.40gb", line=12)), snapshot((device,), alive), held)
    assert "layout.yaml:12" in str(unwanted.value)
    assert "1g.10gb@0 of tenant acme" in str(unwanted.value)
    with pytest.raises(PlanImpossibleError, match=r"do not fit beside 1g.10gb@0"):
        plan(
            layout(wanted(device, "4g.40gb", "1g.10gb")),
            snapshot((device,), alive),
            held,
        )


def test_pieces_are_placed_around_a_lease() -> None:
    """The piece without a lease gives way, the leased one stays where it is."""
    device, alive = leased_board()
    held = frozenset({alive[1].id})
    made = plan(layout(wanted(device, "3g.40gb", "1g.10gb")), snapshot((device,), alive), held)
    assert steps(made) == ["destroy 1g.10gb@0 on GPU-0 (tenant acme)", "create 3g.40gb@0 on GPU-0"]


@pytest.mark.parametrize(
    ("condition", "words"),
    [(Condition.LOST, "is lost"), (Condition.STALLED, "is stalled")],
)
def test_a_device_that_does_not_answer_is_not_planned(condition: Condition, words: str) -> None:
    """Nothing is known of its pieces, so nothing is promised."""
    device = replace(gpu(), condition=condition, condition_reason="XID 79")
    with pytest.raises(PlanImpossibleError, match=f"{words}, XID 79"):
        plan(layout(wanted(gpu(), "1g.10gb")), snapshot((device,)))


def test_a_device_that_vanished_is_named() -> None:
    """The refusal has the entry's line and the way to look."""
    with pytest.raises(PlanImpossibleError, match=r"layout.yaml:3: GPU-0 is not on this node"):
        plan(layout(wanted(gpu())), snapshot(()))


def test_two_entries_for_one_device_are_refused() -> None:
    """Both lines are named."""
    device = gpu()
    wish = layout(wanted(device, line=3), wanted(device, "1g.10gb", line=8))
    with pytest.raises(PlanImpossibleError, match=r"layout.yaml:8.*layout.yaml:3"):
        plan(wish, snapshot((device,)))


@pytest.mark.parametrize(
    ("profiles", "words"),
    [
        (("4g.40gb", "4g.40gb"), "has at most 1"),
        (("4g.40gb", "3g.40gb", "1g.10gb"), "do not fit together"),
        (("3g.40gb@0", "2g.20gb@2"), "do not fit together"),
    ],
)
def test_pieces_that_cannot_exist_together_are_refused(
    profiles: tuple[str, ...], words: str
) -> None:
    """Too many of a kind, too much in sum, or on one slice."""
    device = gpu()
    with pytest.raises(PlanImpossibleError, match=words):
        plan(layout(wanted(device, *profiles)), snapshot((device,)))


def test_unknown_profiles_modes_and_lengths_are_refused() -> None:
    """Each refusal lists what the device has."""
    device, node = gpu(), trainium()
    odd = PartitionSpec(device=device.id, profile="9g.1gb", size=1)
    wish = DeviceLayout(device=device.id, partitions=(odd,))
    with pytest.raises(PlanImpossibleError, match=r"1g.10gb, 1g.10gb\+me"):
        plan(layout(wish), snapshot((device,)))
    with pytest.raises(PlanImpossibleError, match="legal are 1, 2, 4, 8"):
        plan(layout(runs(node, 3)), snapshot((node,)))
    with pytest.raises(PlanImpossibleError, match="has no compute mode"):
        plan(layout(modes(device, compute="CPX")), snapshot((device,)))
    with pytest.raises(PlanImpossibleError, match="use one of off, on"):
        plan(layout(modes(device, mig="half")), snapshot((device,)))
    with pytest.raises(PlanImpossibleError, match="needs MIG, which stays off"):
        plan(layout(wanted(device, "1g.10gb", mig="off")), snapshot((gpu(mig="off"),)))


def test_a_share_and_a_piece_cannot_be_on_one_device() -> None:
    """The device is shared as a whole or cut, not both."""
    device = gpu()
    both = (*(wanted(device, "1g.10gb").partitions or ()), *(shares(device, 1, 0).partitions or ()))
    with pytest.raises(PlanImpossibleError, match="be shared as a whole"):
        plan(layout(DeviceLayout(device=device.id, partitions=both)), snapshot((device,)))


# --- comparing -----------------------------------------------------------------------------------


def test_the_difference_names_each_thing_that_is_not_yet_so() -> None:
    """Modes, missing and surplus pieces, caps; nothing once all is done."""
    device, node, amd = gpu(mig="off"), cpu(), mi300x()
    goal = layout(
        wanted(device, "3g.40gb@4"),
        runs(node, 2, memory=[GIB]),
        modes(amd, compute="CPX"),
    )
    here = snapshot(
        (device, node, amd),
        (piece(node, "2c", 0, 2, 2 * GIB), piece(node, "1c", 2, 1), piece(amd, "SPX", 0, 8)),
    )
    lines = difference(goal, here)
    assert "GPU-0: mig is off, wanted on" in lines
    assert "GPU-0: 3g.40gb@4 is missing" in lines
    assert "cpu-0/2c@0: memory cap is 2GiB, wanted 1GiB" in lines
    assert "cpu-0/1c@2: is there, not wanted" in lines
    assert "amd-0: compute is SPX, wanted CPX" in lines
    assert sum("CPX@" in line for line in lines) == 8
    assert difference(goal, snapshot(())) == (
        "GPU-0: not there",
        "cpu-0: not there",
        "amd-0: not there",
    )


def test_pieces_that_a_mode_makes_are_expected_by_the_profile_of_its_name() -> None:
    """After a switch to CPX eight pieces are wanted back, and DPX gives two."""
    amd = mi300x()
    for mode, count in (("CPX", 8), ("DPX", 2), ("SPX", 1)):
        (wish,) = expected(layout(modes(amd, compute=mode)), snapshot((amd,)))
        assert wish.partitions is not None
        assert len(wish.partitions) == count
    done = mi300x(compute="CPX")
    alive = [piece(done, "CPX", start, 1) for start in range(8)]
    assert difference(layout(modes(amd, compute="CPX")), snapshot((done,), alive)) == ()


def test_pieces_that_a_mode_made_are_never_destroyed_by_a_step() -> None:
    """The whole device that shows as a piece while MIG is off is nothing that can be removed."""
    device = gpu(mig="off")
    whole = piece(device, "whole", 0, 8)
    goal = layout(wanted(device, mig="off"))
    made = plan(goal, snapshot((device,), [whole]))
    assert made.steps == ()
    assert difference(goal, snapshot((device,), [whole])) == ()


def test_an_empty_piece_of_our_own_interrupts_nobody() -> None:
    """Whoever destroys it disturbs no tenant; a tenant, or whoever made it, is disturbed."""
    device = gpu()
    (own,) = pieces(device, [("1g.10gb", 0)])
    empty = replace(own, managed=True, tenant=None)
    others = (replace(empty, managed=False), replace(empty, tenant=TenantId("acme")))
    made = [plan(layout(wanted(device)), snapshot((device,), [p])) for p in (empty, *others)]
    assert [steps(one) for one in made[:2]] == [["destroy 1g.10gb@0 on GPU-0"]] * 2
    assert made[0].steps[0].interrupts == ()
    assert made[0].cost.destroyed == 1
    for one in made[1:]:
        assert [i.subject for i in one.steps[0].interrupts] == [own.id]


def test_a_piece_made_by_somebody_else_is_pointed_out() -> None:
    """What goes away and was not ours is said, before it goes."""
    device = gpu()
    foreign = replace(pieces(device, [("1g.10gb", 0)])[0], managed=False, generation=1)
    made = plan(layout(wanted(device)), snapshot((device,), [foreign]))
    assert made.notes == ("GPU-0/1g.10gb@0 was not made by this agent",)
    unknown = replace(foreign, generation=0)
    made = plan(layout(wanted(device)), snapshot((device,), [unknown]))
    assert made.notes == ("whether this agent made GPU-0/1g.10gb@0 is not known",)


# --- long rows -----------------------------------------------------------------------------------


def test_a_row_too_long_to_search_is_still_planned_and_keeps_what_it_can() -> None:
    """Hundreds of pieces on a large node: all wanted ones come, living ones stay."""
    kinds = tuple(Kind(size=size, number=12) for size in (1, 2, 3, 4, 5))
    haves = tuple(Have(start=start, size=3, kinds=(2,)) for start in range(0, 90, 9))
    packing = pack(256, kinds, haves)
    assert packing is not None
    assert packing.kept == len(haves)
    assert packing.proven
    used: set[int] = set()
    for put in packing.puts:
        cells = set(range(put.start, put.start + kinds[put.kind].size))
        assert not used & cells
        used |= cells
    assert len(packing.puts) == 60
    assert STATES_MAX > 0


def test_a_row_too_long_to_search_clears_what_is_in_the_way() -> None:
    """When the gaps are too small, living pieces give way, but never leased ones."""
    haves = tuple(
        Have(start=start, size=1, kinds=(0,), pinned=start == 0) for start in range(0, 250, 2)
    )
    packing = pack(250, (Kind(size=1, number=125), Kind(size=2, number=60)), haves)
    assert packing is not None
    assert not packing.proven
    assert any(put.have == 0 for put in packing.puts)
    assert pack(250, (Kind(size=1, number=251),), haves) is None
