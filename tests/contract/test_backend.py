"""What every backend keeps, whatever its vendor."""

from __future__ import annotations

import pytest

from alloy_agent.backends.base import Backend, SignalSink
from alloy_agent.errors import BackendError, DeviceBusyError, DeviceLostError
from alloy_agent.model import (
    Create,
    Destroy,
    Device,
    DeviceId,
    ModeKind,
    Partition,
    PartitionSpec,
    Placement,
    Quality,
    Scheme,
    SetMode,
    Share,
    Step,
    Tier,
)
from tests.contract.conftest import Subject


class Sink(SignalSink):
    """Keeps the last value of each slot."""

    def __init__(self) -> None:
        self.slots: dict[int, tuple[float, Quality, float | None]] = {}

    def put(
        self,
        slot: int,
        value: float,
        quality: Quality = Quality.VALUE,
        source_time_s: float | None = None,
    ) -> None:
        """Keep one value."""
        self.slots[slot] = (value, quality, source_time_s)


def first(backend: Backend) -> DeviceId:
    """Return the first device."""
    return backend.discover()[0]


def ready(backend: Backend) -> Device:
    """Return the first device, able to take exclusive pieces."""
    device = backend.observe(first(backend)).device
    mig = next((mode for mode in device.modes if mode.kind is ModeKind.MIG), None)
    if mig is not None and mig.current == "off":
        step = SetMode(device=device.id, kind=mig.kind, current="off", wanted="on")
        backend.apply(step)
        device = backend.observe(device.id).device
    return device


def specs(device: Device) -> list[PartitionSpec]:
    """Return two pieces that fit beside each other; none if a mode alone makes pieces."""
    if device.scheme is Scheme.INSTANCES:
        profile = min(device.profiles, key=lambda p: (p.size, p.attributes))
        places = [(profile.name, start) for start in profile.starts[:2]]
    elif device.scheme is Scheme.CORES:
        places = [("1c", 0), ("1c", 1)]
    else:
        return []
    return [
        PartitionSpec(
            device=device.id, profile=name, size=1, placement=Placement(start=start, size=1)
        )
        for name, start in places
    ]


def made(subject: Subject) -> tuple[Device, Partition]:
    """Return the first device and one exclusive piece of it, made by a step or a mode."""
    backend = subject.backend
    device = ready(backend)
    wanted = specs(device)
    if wanted:
        backend.apply(Create(device=device.id, spec=wanted[0]))
    else:
        mode = next(m for m in device.modes if m.kind is ModeKind.COMPUTE)
        other = next(name for name in reversed(mode.available) if name != mode.current)
        backend.apply(SetMode(device=device.id, kind=mode.kind, current=mode.current, wanted=other))
    seen = backend.observe(device.id)
    return seen.device, seen.partitions[0]


def unmake(backend: Backend, device: Device, partition: Partition) -> None:
    """Remove a piece the way its device does it."""
    if device.scheme is not Scheme.MODES:
        backend.apply(Destroy(device=device.id, partition=partition))
        return
    mode = next(m for m in device.modes if m.kind is ModeKind.COMPUTE)
    other = next(name for name in mode.available if name != mode.current)
    backend.apply(SetMode(device=device.id, kind=mode.kind, current=mode.current, wanted=other))


def test_discovery_is_stable_and_names_no_index(subject: Subject) -> None:
    """Two discoveries give the same ids in the same order, and a new process gives them again."""
    ids = subject.backend.discover()
    assert ids
    assert len(set(ids)) == len(ids)
    assert ids == subject.backend.discover()
    again = subject.reopen()
    assert again.discover() == ids
    again.close()


def test_a_device_describes_itself(subject: Subject) -> None:
    """Vendor, model, sizes, legal placements and tier limits are there and agree."""
    for ident in subject.backend.discover():
        device = subject.backend.observe(ident).device
        assert device.id == ident
        assert device.model
        assert device.vendor in subject.backend.capabilities().vendors
        assert device.slices > 0
        assert device.tier_limits
        assert all(limit.reason for limit in device.tier_limits)
        for profile in device.profiles:
            assert all(start + profile.size <= device.slices for start in profile.starts)
            assert profile.max_count >= 1
        for mode in device.modes:
            assert mode.current in mode.available
            assert mode.pending != mode.current


def test_links_are_mutual(subject: Subject) -> None:
    """Who is linked to a peer is named by that peer, and no device is its own peer."""
    backend = subject.backend
    links = {
        ident: {link.peer for link in backend.observe(ident).device.links}
        for ident in backend.discover()
    }
    for ident, peers in links.items():
        assert ident not in peers
        for peer in peers & set(links):
            assert ident in links[DeviceId(peer)]


def test_create_observe_destroy(subject: Subject) -> None:
    """What was made is read back where it was put, with what a tenant needs; then it is gone."""
    device, partition = made(subject)
    assert partition.device == device.id
    assert partition.id == f"{device.id}/{partition.profile}@{partition.placement.start}"
    assert partition.incarnation
    assert partition.access != type(partition.access)()
    unmake(subject.backend, device, partition)
    left = subject.backend.observe(device.id).partitions
    assert partition.incarnation not in {other.incarnation for other in left}


def test_two_pieces_live_side_by_side(subject: Subject) -> None:
    """Ids, incarnations and environments of two pieces differ, and their slices are disjoint."""
    device = ready(subject.backend)
    wanted = specs(device)
    if wanted:
        for spec in wanted:
            subject.backend.apply(Create(device=device.id, spec=spec))
    else:
        made(subject)
    one, two = subject.backend.observe(device.id).partitions[:2]
    assert one.id != two.id
    assert one.incarnation != two.incarnation
    assert not one.placement.overlaps(two.placement)
    assert one.access != two.access


def test_another_process_reads_the_same_back(subject: Subject) -> None:
    """A restarted worker observes what is there, with the same identities."""
    device, _ = made(subject)
    before = subject.backend.observe(device.id).partitions
    again = subject.reopen()
    assert again.observe(device.id).partitions == before
    again.close()


def test_a_piece_made_again_is_another(subject: Subject) -> None:
    """At the same place the id is the same and the incarnation is not."""
    device, partition = made(subject)
    unmake(subject.backend, device, partition)
    again_device, again = made(subject)
    assert again_device.id == device.id
    assert again.id == partition.id
    assert again.incarnation != partition.incarnation


def test_destroying_the_predecessor_spares_the_successor(subject: Subject) -> None:
    """A step that names an earlier incarnation never removes its successor."""
    device, partition = made(subject)
    if device.scheme is Scheme.MODES:
        pytest.skip("pieces of this device are not removed one by one")
    unmake(subject.backend, device, partition)
    _, successor = made(subject)
    with pytest.raises(BackendError):
        unmake(subject.backend, device, partition)
    assert successor in subject.backend.observe(device.id).partitions


def test_overlap_is_refused_and_changes_nothing(subject: Subject) -> None:
    """A piece over a living one is refused by an error that names the device."""
    device, partition = made(subject)
    wanted = specs(device)
    if not wanted:
        pytest.skip("a mode cuts this device without overlap")
    before = subject.backend.observe(device.id)
    with pytest.raises(BackendError) as raised:
        subject.backend.apply(Create(device=device.id, spec=wanted[0]))
    assert device.id in str(raised.value)
    assert "\n" not in str(raised.value)
    assert subject.backend.observe(device.id) == before
    assert partition in before.partitions


def test_an_impossible_step_is_refused(subject: Subject) -> None:
    """A profile or mode that the device does not have is a `BackendError`."""
    device = ready(subject.backend)
    far = Placement(start=device.slices, size=device.slices)
    steps: list[Step] = [
        Create(
            device=device.id,
            spec=PartitionSpec(device=device.id, profile="13g.7gb", size=13, placement=far),
        ),
        SetMode(device=device.id, kind=ModeKind.COMPUTE, current="SPX", wanted="XPX"),
        SetMode(device=device.id, kind=ModeKind.LNC, current="1", wanted="9"),
        SetMode(device=device.id, kind=ModeKind.MIG, current="on", wanted="sideways"),
    ]
    before = subject.backend.observe(device.id)
    for step in steps:
        with pytest.raises(BackendError):
            subject.backend.apply(step)
    assert subject.backend.observe(device.id) == before


def test_a_piece_in_use_stays(subject: Subject) -> None:
    """With a process in it a piece is busy, its holder is named, and it goes once that is gone."""
    if subject.occupy is None:
        pytest.skip("this backend cannot be given a process on purpose")
    device, partition = made(subject)
    leave = subject.occupy(partition)
    with pytest.raises(DeviceBusyError, match="4242"):
        unmake(subject.backend, device, partition)
    assert partition in subject.backend.observe(device.id).partitions
    leave()
    unmake(subject.backend, device, partition)


def test_facts_show_who_is_inside(subject: Subject) -> None:
    """A process within a piece is attributed to it, and facts say how they were read."""
    if subject.occupy is None:
        pytest.skip("this backend cannot be given a process on purpose")
    device, partition = made(subject)
    leave = subject.occupy(partition)
    facts = {(fact.subject, fact.name): fact for fact in subject.backend.facts(device.id)}
    inside = facts[partition.id, "partition.processes"].value
    assert isinstance(inside, list)
    assert [client["pid"] for client in inside if isinstance(client, dict)] == [4242]
    for fact in facts.values():
        assert fact.method
        assert (fact.quality is Quality.VALUE) != bool(fact.reason)
    leave()


def test_sampling_fills_every_slot_and_never_with_a_false_zero(subject: Subject) -> None:
    """One sample fills each announced slot; what the silicon does not tell is marked absent."""
    device, partition = made(subject)
    specs_ = subject.backend.signal_specs(device.id)
    subjects = {spec.subject for spec in specs_}
    assert {device.id, partition.id} <= subjects
    assert len({(spec.name, spec.subject) for spec in specs_}) == len(specs_)
    sink = Sink()
    subject.backend.sample(device.id, sink)
    assert sorted(sink.slots) == list(range(len(specs_)))
    for slot, (value, quality, _) in sink.slots.items():
        assert quality in set(Quality)
        if quality is Quality.VALUE and specs_[slot].unit == "ratio":
            assert 0.0 <= value <= 1.0
    subject.backend.quiesce(device.id)


def test_quiesce_leaves_no_handle(subject: Subject) -> None:
    """A change after sampling works once the device is quiesced; nothing stays open."""
    device, partition = made(subject)
    for _ in range(20):
        subject.backend.signal_specs(device.id)
        subject.backend.sample(device.id, Sink())
        subject.backend.quiesce(device.id)
        if subject.handles is not None:
            assert subject.handles(device.id) == 0
        subject.backend.sample(device.id, Sink())  # must not open anything while quiesced
        unmake(subject.backend, device, partition)
        subject.backend.resume(device.id)
        device, partition = made(subject)
    subject.backend.quiesce(device.id)
    if subject.handles is not None:
        assert subject.handles(device.id) == 0


def test_a_vanished_piece_goes_stale_in_the_sample(subject: Subject) -> None:
    """Slots of a piece that somebody else removed read stale, never zero; others have values."""
    device, partition = made(subject)
    specs_ = subject.backend.signal_specs(device.id)
    other = subject.reopen()
    unmake(other, device, partition)
    other.close()
    sink = Sink()
    subject.backend.sample(device.id, sink)
    gone = [slot for slot, spec in enumerate(specs_) if spec.subject == partition.id]
    assert gone
    assert {sink.slots[slot][1] for slot in gone} == {Quality.STALE}
    assert Quality.VALUE in {quality for _, quality, _ in sink.slots.values()}
    subject.backend.quiesce(device.id)


def test_a_lost_device_says_lost_and_its_siblings_do_not_mind(subject: Subject) -> None:
    """Every call on it raises `DeviceLostError`; it stays listed; the others answer."""
    if subject.lose is None:
        pytest.skip("this backend cannot lose a device on purpose")
    backend = subject.backend
    lost, *well = backend.discover()
    subject.lose(lost)
    assert backend.discover() == (lost, *well)
    for call in (backend.observe, backend.facts, backend.signal_specs):
        with pytest.raises(DeviceLostError):
            call(lost)
    with pytest.raises(DeviceLostError):
        backend.sample(lost, Sink())
    for device in well:
        backend.observe(device)


def test_shares_live_together_on_a_whole_device(subject: Subject) -> None:
    """A production and two opportunistic shares overlap each other and nothing else; tier soft."""
    backend = subject.backend
    device = backend.observe(first(backend)).device
    if not any(limit.way == "shared" for limit in device.tier_limits):
        pytest.skip("this backend offers no shares")
    shared = next(limit for limit in device.tier_limits if limit.way == "shared")
    assert shared.tier is Tier.SOFT
    whole = Placement(start=0, size=device.slices)
    for share, ordinal in (
        (Share.PRODUCTION, 0),
        (Share.OPPORTUNISTIC, 0),
        (Share.OPPORTUNISTIC, 1),
    ):
        spec = PartitionSpec(
            device=device.id,
            profile=f"{share}-{ordinal}",
            size=device.slices,
            placement=whole,
            share=share,
            ordinal=ordinal,
        )
        backend.apply(Create(device=device.id, spec=spec))
        with pytest.raises(BackendError):
            backend.apply(Create(device=device.id, spec=spec))
    pieces = [p for p in backend.observe(device.id).partitions if p.share is not Share.EXCLUSIVE]
    assert sorted((piece.share, piece.ordinal) for piece in pieces) == [
        ("opportunistic", 0),
        ("opportunistic", 1),
        ("production", 0),
    ]
    assert len({piece.id for piece in pieces}) == 3
    for piece in pieces:
        backend.apply(Destroy(device=device.id, partition=piece))
    after = backend.observe(device.id).partitions
    assert not [piece for piece in after if piece.share is not Share.EXCLUSIVE]


def test_a_device_is_never_touched_by_a_step_on_another(subject: Subject) -> None:
    """Making and removing a piece leaves every other device as it was."""
    backend = subject.backend
    others = backend.discover()[1:]
    ready(backend)
    before = [(o.partitions, o.device.modes) for o in map(backend.observe, others)]
    device, partition = made(subject)
    unmake(backend, device, partition)
    assert [(o.partitions, o.device.modes) for o in map(backend.observe, others)] == before


def test_waiting_for_events_times_out_quietly(subject: Subject) -> None:
    """Without an event the wait ends with nothing; a change of geometry ends it with something."""
    assert list(subject.backend.wait_events(0.0)) == []


def test_diagnosis_never_raises(subject: Subject) -> None:
    """`doctor` lines name their subject; a bad one has a cure."""
    for line in subject.backend.diagnose():
        assert line.subject
        assert line.ok or line.cure
