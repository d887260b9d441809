"""The decision: gates multiply, headroom by its minimum, fragmentation and cost break ties."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from alloy_agent.proto import agent_pb2 as pb
from alloy_brain import decision, gates
from alloy_brain.facts import Demand, Inputs, Policy, Wish
from alloy_brain.fleet import Fleet
from alloy_brain.placement import ONE_DEVICE, ONE_NODE, choose, survey
from tests.brain.world import GIB, device, piece

NOW_S = 1000.0


def fleet_of(*nodes: tuple[str, list[pb.Device], list[pb.Partition]]) -> Fleet:
    fleet = Fleet()
    for name, devices, partitions in nodes:
        node = fleet.node(name)
        node.hello(pb.Hello(node=name, boot_id="b", epoch=1), NOW_S)
        node.inventory(pb.Inventory(revision=1, devices=devices))
        node.partition_state(pb.PartitionState(revision=1, partitions=partitions))
        node.fast(sample(partitions), NOW_S)
    return fleet


def sample(partitions: list[pb.Partition], **columns: list[int]) -> pb.Fast:
    fast = pb.Fast(partitions_revision=1, inventory_revision=1, sample=1)
    fast.partitions.age_ms.extend([5] * len(partitions))
    for name, values in ({"compute_active_e4": [0] * len(partitions)} | columns).items():
        getattr(fast.partitions, name).extend(values)
    return fast


def inputs_of(fleet: Fleet, *demands: Demand, **wish: Any) -> Inputs:
    now_s = wish.pop("now_s", NOW_S + 0.1)
    mix = wish.pop("mix", ())
    policy = wish.pop("policy", Policy())
    return Inputs(
        wish=Wish(request="r", tenant="t", demands=demands, **wish),
        policy=policy,
        mix=mix,
        nodes=fleet.facts(now_s),
    )


def two_nodes() -> Fleet:
    return fleet_of(
        ("a", [device("A")], [piece("A", "1g.10gb", 0), piece("A", "3g.40gb", 4)]),
        ("b", [device("B")], [piece("B", "1g.10gb", 0)]),
    )


def test_a_request_gets_a_piece_that_fits() -> None:
    """What is chosen fits the demand, at the generation that was seen."""
    choice = choose(inputs_of(two_nodes(), Demand(count=1, memory_bytes=20 * GIB)))
    assert [(p.node, p.partition, p.generation) for p in choice.picked] == [("a", "A/3g.40gb@4", 1)]


def close_stream(fleet: Fleet) -> None:
    fleet.node("b").connected = False


def close_silent(fleet: Fleet) -> None:
    fleet.node("b").heard_s = NOW_S - 60


def close_stale(fleet: Fleet) -> None:
    fleet.node("b").fast_s = NOW_S - 6


def close_unheard(fleet: Fleet) -> None:
    fleet.node("b").fast_s = None


def close_ill(fleet: Fleet) -> None:
    fleet.node("b").health(pb.Health(device="B", state=pb.HEALTH_STATE_FAILED, cause="xid 79"))


def close_lost(fleet: Fleet) -> None:
    lost = device("B", condition=pb.CONDITION_LOST, condition_reason="off the bus")
    fleet.node("b").inventory(pb.Inventory(revision=1, devices=[lost]))


def close_stalled(fleet: Fleet) -> None:
    late = device("B", condition=pb.CONDITION_STALLED)
    fleet.node("b").inventory(pb.Inventory(revision=1, devices=[late]))


def close_drained(fleet: Fleet) -> None:
    fleet.node("b").drain("B", True)


def close_drained_node(fleet: Fleet) -> None:
    fleet.node("b").drain("", True)


def close_held(fleet: Fleet) -> None:
    fleet.hold([("b", "B/1g.10gb@0")], "l-1")


def close_leased(fleet: Fleet) -> None:
    lease = pb.Lease(
        id="l-2", state=pb.LEASE_STATE_COMMITTED, partitions=[pb.PartitionRef(id="B/1g.10gb@0")]
    )
    fleet.node("b").lease_change(pb.LeaseChange(lease=lease))


def close_gate(fleet: Fleet) -> None:
    fast = sample([piece("B", "1g.10gb", 0)])
    fast.devices.gate.append(pb.GATE_CLOSED)
    fast.reasons.add(device=True, row=0, gate="thermal", reason="too hot")
    fleet.node("b").fast(fast, NOW_S)


@pytest.mark.parametrize(
    "close",
    [
        close_stream,
        close_silent,
        close_stale,
        close_unheard,
        close_ill,
        close_lost,
        close_stalled,
        close_drained,
        close_drained_node,
        close_held,
        close_leased,
        close_gate,
    ],
)
def test_one_gate_that_is_not_open_is_enough(close: Any) -> None:
    """A candidate with one closed or unknown gate is out, and the record names that gate."""
    fleet = fleet_of(("b", [device("B")], [piece("B", "1g.10gb", 0)]))
    assert choose(inputs_of(fleet, Demand(count=1))).picked
    close(fleet)
    inputs = inputs_of(fleet, Demand(count=1))
    choice = choose(inputs)
    assert not choice.picked
    assert choice.refusal == "exhausted"
    document = decision.document(record_of(inputs))
    shut = [g for g in document["candidates"][0]["gates"] if g["state"] != "open"]
    assert len(shut) == 1
    assert shut[0]["reason"]


def record_of(inputs: Inputs) -> decision.Record:
    return decision.Record(
        id="d-1",
        request="r",
        lease="",
        placed=False,
        wall_s=0.0,
        brain="b",
        term=1,
        attempt=1,
        inputs=inputs,
        choice=choose(inputs),
    )


def test_fast_gates_say_what_the_gates_with_words_say() -> None:
    """The short form of a node's gates is open exactly when each of the long form is."""
    for connected, heard, age, draining in itertools.product(
        (True, False), (0, 15_000, 15_001), (None, 0, 5_000, 5_001), (True, False)
    ):
        node = msgspec.structs.replace(
            two_nodes().facts(NOW_S)[0],
            connected=connected,
            heard_age_ms=heard,
            telemetry_age_ms=age,
            draining=draining,
        )
        for labels in ({}, {"zone": "z"}):
            wish = Wish(request="r", tenant="t", demands=(), labels=labels)
            long = all(g.state == "open" for g in gates.node_gates(wish, Policy(), node))
            assert gates.node_open(wish, Policy(), node) == long


def test_the_scarcest_resource_decides() -> None:
    """Much compute does not make up for little memory bandwidth."""
    fleet = fleet_of(
        ("a", [device("A")], [piece("A", "1g.10gb", 0)]),
        ("b", [device("B")], [piece("B", "1g.10gb", 0)]),
    )
    parts = [piece("A", "1g.10gb", 0)]
    fleet.node("a").fast(
        sample(parts, compute_active_e4=[0], memory_bandwidth_active_e4=[9500]), NOW_S
    )
    fleet.node("b").fast(
        sample(parts, compute_active_e4=[4000], memory_bandwidth_active_e4=[4000]), NOW_S
    )
    inputs = inputs_of(fleet, Demand(count=1))
    assert choose(inputs).picked[0].node == "b"
    load = inputs.nodes[0].loads[0]
    assert load.headroom_ratio == pytest.approx(0.05)
    assert load.resource == "memory bandwidth"


def test_what_was_not_measured_is_no_headroom() -> None:
    """A column whose quality says that there is no value does not count as zero or as all."""
    fleet = fleet_of(("a", [device("A")], [piece("A", "1g.10gb", 0)]))
    fast = sample([piece("A", "1g.10gb", 0)])
    fast.partitions.quality.append(0b01)
    fleet.node("a").fast(fast, NOW_S)
    assert fleet.facts(NOW_S)[0].loads[0].headroom_ratio is None


def test_fragmentation_breaks_ties() -> None:
    """Among equals the piece goes from where the fewest slices become useless to others."""
    fleet = fleet_of(
        ("a", [device("A")], [piece("A", "3g.40gb", 0), piece("A", "1g.10gb", 4)]),
        ("b", [device("B")], [piece("B", "3g.40gb", 0), piece("B", "3g.40gb", 4)]),
    )
    mix = ((Demand(count=1, memory_bytes=30 * GIB), 1.0),)
    assert choose(inputs_of(fleet, Demand(count=1), mix=mix)).picked[0].partition == "A/1g.10gb@4"


def test_cost_breaks_what_is_left() -> None:
    """Among equals the cheaper device is chosen, and prices never beat headroom."""
    fleet = fleet_of(
        ("a", [device("A", model="H100")], [piece("A", "1g.10gb", 0)]),
        ("b", [device("B", model="A100")], [piece("B", "1g.10gb", 0)]),
    )
    policy = Policy(prices_per_h={"H100": 4.0, "A100": 2.0})
    assert choose(inputs_of(fleet, Demand(count=1), policy=policy)).picked[0].node == "b"
    busy = sample([piece("B", "1g.10gb", 0)], compute_active_e4=[9000])
    fleet.node("b").fast(busy, NOW_S)
    assert choose(inputs_of(fleet, Demand(count=1), policy=policy)).picked[0].node == "a"


def test_a_gang_is_kept_together() -> None:
    """Locality holds: the pieces of a gang are on one node, or on one device."""
    fleet = fleet_of(
        ("a", [device("A")], [piece("A", "1g.10gb", n) for n in range(2)]),
        (
            "b",
            [device("B0"), device("B1")],
            [piece("B0", "1g.10gb", n) for n in range(2)]
            + [piece("B1", "1g.10gb", n) for n in range(2)],
        ),
    )
    three = Demand(count=3)
    assert len(choose(inputs_of(fleet, three)).picked) == 3
    assert {p.node for p in choose(inputs_of(fleet, three, locality=ONE_NODE)).picked} == {"b"}
    assert choose(inputs_of(fleet, three, locality=ONE_DEVICE)).refusal == "exhausted"


def test_a_gang_that_fits_is_found() -> None:
    """Demands that compete give way to one another: None means that there is no way."""
    fleet = fleet_of(
        ("a", [device("A")], [piece("A", "1g.10gb", 0), piece("A", "3g.40gb", 4)]),
    )
    picked = choose(
        inputs_of(fleet, Demand(count=1), Demand(count=1, memory_bytes=20 * GIB))
    ).picked
    assert [(p.demand, p.partition) for p in picked] == [(0, "A/1g.10gb@0"), (1, "A/3g.40gb@4")]


MEMORIES = st.sampled_from([0, 10 * GIB, 20 * GIB, 30 * GIB])


@given(
    shape=st.lists(st.sampled_from(["1g.10gb", "2g.20gb", "3g.40gb"]), min_size=1, max_size=6),
    wanted=st.lists(MEMORIES, min_size=1, max_size=4),
)
def test_a_gang_is_placed_exactly_when_it_can_be(shape: list[str], wanted: list[int]) -> None:
    """The search finds a gang wherever trying every arrangement does, and gives no piece twice."""
    parts = [piece("A", profile, n) for n, profile in enumerate(shape)]
    fleet = fleet_of(("a", [device("A")], parts))
    choice = choose(inputs_of(fleet, *(Demand(count=1, memory_bytes=m) for m in wanted)))
    possible = any(
        all(parts[n].memory_bytes >= m for n, m in zip(order, wanted, strict=True))
        for order in itertools.permutations(range(len(parts)), len(wanted))
    )
    assert bool(choice.picked) == possible
    ids = [p.partition for p in choice.picked]
    assert len(ids) == len(set(ids)) == (len(wanted) if possible else 0)


@given(
    load=st.lists(st.integers(0, 10_000), min_size=4, max_size=4),
    count=st.integers(1, 5),
    memory=MEMORIES,
)
def test_a_record_replays_to_the_same_choice(load: list[int], count: int, memory: int) -> None:
    """From disk and back, the same inputs give the same choice."""
    parts = [piece("A", "1g.10gb", n) for n in range(2)] + [piece("A", "3g.40gb", 4)]
    other = [piece("B", "2g.20gb", 0)]
    fleet = fleet_of(("a", [device("A")], parts), ("b", [device("B")], other))
    fleet.node("a").fast(sample(parts, compute_active_e4=load[:3]), NOW_S)
    fleet.node("b").fast(sample(other, compute_active_e4=load[3:]), NOW_S)
    mix = ((Demand(count=1, memory_bytes=15 * GIB), 2.0), (Demand(count=1), 1.0))
    record = record_of(inputs_of(fleet, Demand(count=count, memory_bytes=memory), mix=mix))
    again = decision.unpack(decision.pack(record))
    assert again == record
    assert decision.replay(again) == record.choice
    assert decision.document(again)["replayed"] is True


@pytest.mark.parametrize(
    ("demand", "wish", "refusal", "said"),
    [
        (Demand(count=1, vendor=pb.VENDOR_AMD), {}, "invalid", "vendor nvidia, not amd"),
        (Demand(count=1, memory_bytes=1 << 45), {}, "invalid", "memory"),
        (Demand(count=99), {}, "invalid", "the whole fleet has 3"),
        (Demand(count=1, profile="9g*"), {}, "invalid", "profile"),
        (Demand(count=1, share=pb.SHARE_OPPORTUNISTIC), {}, "invalid", "share"),
    ],
)
def test_what_can_never_be_is_told_apart(
    demand: Demand, wish: dict[str, Any], refusal: str, said: str
) -> None:
    """Impossible and not-now differ, and the refusal says why and what exists."""
    choice = choose(inputs_of(two_nodes(), demand, **wish))
    assert choice.refusal == refusal
    assert said in choice.message
    assert choice.possible


def test_a_tier_no_node_can_prove_can_never_be() -> None:
    """A tier above every device's limit is refused for good; one that fell may come back."""
    limited = device("A", tier_limits=[pb.TierLimit(way="mig", tier=pb.TIER_SOFT)])
    parts = [piece("A", "1g.10gb", 0, tier=pb.TIER_ADVISORY)]
    fleet = fleet_of(("a", [limited], parts))
    never = choose(inputs_of(fleet, Demand(count=1), tier_floor=pb.TIER_HARD))
    assert (never.refusal, "no node can prove it" in never.message) == ("invalid", True)
    fallen = choose(inputs_of(fleet, Demand(count=1), tier_floor=pb.TIER_SOFT))
    assert fallen.refusal == "exhausted"
    assert "lower the tier floor" in fallen.possible


def test_a_sample_of_other_rows_is_dropped() -> None:
    """Readings whose revision is not the one that is known say nothing of these pieces."""
    fleet = two_nodes()
    old = sample([piece("A", "1g.10gb", 0)])
    old.partitions_revision = 7
    assert not fleet.node("a").fast(old, NOW_S)


@given(
    load=st.lists(st.integers(0, 10_000), min_size=6, max_size=6),
    count=st.integers(1, 6),
)
def test_leaving_rows_out_changes_no_choice(load: list[int], count: int) -> None:
    """What is not ranked to save time would not have been chosen."""
    nodes = []
    for name in ("a", "b", "c"):
        parts = [piece(name, "1g.10gb", 0), piece(name, "2g.20gb", 1)]
        nodes.append((name, [device(name)], parts))
    fleet = fleet_of(*nodes)
    for number, (name, _, parts) in enumerate(nodes):
        part = load[2 * number : 2 * number + 2]
        fleet.node(name).fast(sample(parts, compute_active_e4=part), NOW_S)
    mix = ((Demand(count=1, memory_bytes=15 * GIB), 1.0),)
    inputs = inputs_of(fleet, Demand(count=count), mix=mix)
    (everything,) = survey(inputs, None)
    best = [at for rank in sorted(everything) for at in everything[rank]][:count]
    wanted = {(inputs.nodes[i].node, inputs.nodes[i].rows[n].free[0].id) for i, n in best}
    assert {(p.node, p.partition) for p in choose(inputs).picked} == wanted
