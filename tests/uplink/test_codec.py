"""The codec: nouns arrive as they were, telemetry is small, nothing missing looks like zero."""

from __future__ import annotations

import random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from alloy_agent import errors, leases
from alloy_agent.errors import AlloyError, ConfigError, InvariantError
from alloy_agent.model import (
    Condition,
    Device,
    DeviceId,
    Finding,
    Lease,
    LeasedPiece,
    LeaseId,
    LeaseState,
    Link,
    Mode,
    ModeChange,
    ModeKind,
    Owner,
    Partition,
    PartitionId,
    Placement,
    Profile,
    Quality,
    Scheme,
    Scope,
    Share,
    Signal,
    SignalSpec,
    Snapshot,
    TenantId,
    Tier,
    TierLimit,
    Vendor,
    Verdict,
)
from alloy_agent.proto import agent_pb2 as pb
from alloy_agent.proto.failures import failure_reply, raise_failure
from alloy_agent.uplink import codec

DEVICE = Device(
    id=DeviceId("gpu0"),
    vendor=Vendor.NVIDIA,
    model="H100",
    backend="nvidia",
    scheme=Scheme.INSTANCES,
    slices=8,
    slice_name="memory slice",
    bus="0000:1a:00.0",
    memory_bytes=80 << 30,
    profiles=(
        Profile(name="1g.10gb", size=1, starts=(0, 1, 2), max_count=7, memory_bytes=10 << 30),
    ),
    modes=(
        Mode(
            kind=ModeKind.MIG,
            current="on",
            available=("on", "off"),
            change=ModeChange.DEVICE_RESET,
        ),
    ),
    links=(Link(peer="gpu1", kind="nvlink", bandwidth_bytes_per_s=450_000_000_000),),
    tier_limits=(TierLimit(way="mig", tier=Tier.HARD, reason=""),),
    legal_sizes=(1, 2, 4),
    units=(4, 5),
)
PARTITION = Partition(
    id=PartitionId("gpu0/1g.10gb@0"),
    device=DeviceId("gpu0"),
    profile="1g.10gb",
    placement=Placement(start=0, size=1),
    incarnation="MIG-1",
    generation=3,
    share=Share.PRODUCTION,
    tenant=TenantId("blue"),
)


def test_every_enum_has_its_number() -> None:
    """Each value of each enum of the model exists on the wire under its own name."""
    for kind, enum in (
        ("Vendor", Vendor),
        ("Tier", Tier),
        ("Scope", Scope),
        ("Scheme", Scheme),
        ("Share", Share),
        ("Condition", Condition),
        ("ModeKind", ModeKind),
        ("ModeChange", ModeChange),
        ("Verdict", Verdict),
        ("LeaseState", LeaseState),
        ("Refusal", leases.Refusal),
        ("Quality", Quality),
    ):
        numbers = {codec.enum_number(kind, value) for value in enum}
        assert len(numbers) == len(enum)
        assert kind == "Quality" or 0 not in numbers


def test_inventory_and_partitions_carry_every_field() -> None:
    """What the brain places by arrives whole; what is unknown is absent, not zero."""
    snapshot = Snapshot(
        boot_id="boot-a",
        sequence=9,
        taken_at_s=100.0,
        taken_wall_s=0.0,
        devices=(DEVICE,),
        partitions=(PARTITION,),
        owners=(Owner(name="slurmd", evidence="process 812", vendors=(Vendor.AMD,)),),
    )
    inventory = codec.inventory(snapshot, 4, draining=frozenset({"gpu0"}))
    (device,) = inventory.devices
    assert (device.id, device.vendor, device.scheme) == (
        "gpu0",
        pb.VENDOR_NVIDIA,
        pb.SCHEME_INSTANCES,
    )
    assert device.draining
    assert device.profiles[0].starts == [0, 1, 2]
    assert not device.profiles[0].HasField("compute_units")
    assert device.modes[0].change == pb.MODE_CHANGE_DEVICE_RESET
    assert not device.modes[0].HasField("pending")
    assert device.links[0].bandwidth_bytes_per_s == 450_000_000_000
    assert device.tier_limits[0].tier == pb.TIER_HARD
    assert (list(device.legal_sizes), list(device.units)) == ([1, 2, 4], [4, 5])
    assert not device.HasField("serial")
    assert inventory.owners[0].vendors == [pb.VENDOR_AMD]
    standing = codec.Standing(tier=Tier.ENFORCED, lease=LeaseId("l1"), evidence_sequence=7)
    state = codec.partition_state(snapshot, 5, 100.25, {PARTITION.id: standing})
    assert (state.revision, state.snapshot_sequence, state.age_ms) == (5, 9, 250)
    (partition,) = state.partitions
    assert (partition.generation, partition.tenant, partition.lease) == (3, "blue", "l1")
    assert partition.tier == pb.TIER_ENFORCED
    assert partition.share == pb.SHARE_PRODUCTION
    unjudged = codec.partition_state(snapshot, 5, 100.0, {}).partitions[0]
    assert unjudged.tier == pb.TIER_UNSPECIFIED
    assert not unjudged.HasField("lease")


def signal(name: str, subject: str, value: float | None, **other: object) -> Signal:
    spec = SignalSpec(name=name, subject=subject, scope=Scope.PARTITION, unit="")
    quality = other.pop("quality", Quality.VALUE)
    return Signal(spec=spec, quality=quality, value=value, read_time_s=99.9, **other)  # type: ignore[arg-type]


def full_node(count: int = 64) -> tuple[list[Signal], list[PartitionId], list[str]]:
    """Return every fast signal of eight devices with eight partitions each."""
    rng = random.Random(7)  # noqa: S311
    partitions = [PartitionId(f"gpu{n // 8}/1g.10gb@{n % 8}") for n in range(count)]
    devices = [f"gpu{n}" for n in range(8)]
    signals = []
    for subject in partitions:
        for name in codec.PARTITION_COLUMNS:
            value = rng.random()
            if name.endswith("_bytes"):
                value *= 10 << 30
            if name.endswith(("_bits", "_errors")):
                value = 0.0
            signals.append(signal(name, subject, value))
    signals += [
        signal(name, gpu, rng.random() * 60) for gpu in devices for name in codec.DEVICE_COLUMNS
    ]
    return signals, partitions, devices


def test_sixty_four_partitions_fit_in_a_packet() -> None:
    """One sample of 8 devices with 8 partitions each takes about 1.3 KB."""
    signals, partitions, devices = full_node()
    gates = {subject: codec.GateRow(open=True) for subject in (*partitions, *devices)}
    fast = codec.fast(signals, partitions, devices, gates, 100.0, (12, 3), 123_456)
    size = pb.AgentMessage(fast=fast).ByteSize()
    assert 900 < size <= 1_400
    assert len(fast.partitions.compute_active_e4) == 64
    assert not fast.others


def test_columns_carry_values_ages_and_reasons() -> None:
    """A row has its values, the age of its oldest one, and why anything is missing."""
    first, second = PartitionId("p0"), PartitionId("p1")
    busy, memory = "alloy_partition_compute_active_ratio", "alloy_partition_memory_used_bytes"
    signals = [
        signal(busy, "p0", 0.1234, source_time_s=99.0),
        signal(memory, "p0", (5 << 20) + 1.0),
        signal(busy, "p1", None, quality=Quality.NOT_PERMITTED),
        signal(memory, "p1", 7.0 * (1 << 20), quality=Quality.STALE),
        signal("alloy_device_fan_ratio", "gpu0", 0.5),
        signal("alloy_device_temperature_headroom_celsius", "gpu0", -3.21),
    ]
    gates = {"p0": codec.GateRow(open=False, gate="memory", reason="95 % used")}
    fast = codec.fast(signals, [first, second], ["gpu0"], gates, 100.0, (1, 1), 1)
    block = fast.partitions
    assert list(block.compute_active_e4) == [1234, 0]
    assert list(block.memory_used_mib) == [6, 7]
    assert list(block.age_ms) == [1000, 100]
    assert block.quality[1] & 0b11 == pb.QUALITY_NOT_PERMITTED
    assert (block.quality[1] >> 2) & 0b11 == pb.QUALITY_STALE
    assert list(block.gate) == [pb.GATE_CLOSED, pb.GATE_UNKNOWN]
    assert [(one.row, one.gate, one.reason) for one in fast.reasons] == [
        (0, "memory", "95 % used"),
        (1, "", "not judged yet"),
    ]
    assert list(fast.devices.temperature_headroom_dk) == [-32]
    assert fast.others[0].signal == "alloy_device_fan_ratio"
    assert not block.headroom_p95_e4


@example(value=1e308, quality=Quality.VALUE, name="alloy_partition_rate_ratio", read_s=0.0)
@given(
    value=st.none() | st.floats(),
    quality=st.sampled_from(Quality),
    name=st.sampled_from([*codec.PARTITION_COLUMNS, *codec.DEVICE_COLUMNS, "alloy_other"]),
    read_s=st.floats(-1e9, 1e9),
)
def test_any_reading_can_be_sent(
    value: float | None, quality: Quality, name: str, read_s: float
) -> None:
    """No number, however absurd, breaks a sample; what is no number arrives as missing."""
    spec = SignalSpec(name=name, subject="x", scope=Scope.PARTITION, unit="")
    one = Signal(spec=spec, quality=quality, value=value, read_time_s=read_s)
    fast = codec.fast([one], [PartitionId("x")], ["x"], {}, 0.0, (1, 1), 1)
    again = pb.Fast.FromString(fast.SerializeToString())
    if value is None and name in codec.PARTITION_COLUMNS:
        bit = list(codec.PARTITION_COLUMNS).index(name)
        state = (again.partitions.quality[0] >> (2 * bit)) & 0b11
        assert state in {pb.QUALITY_NOT_SUPPORTED, pb.QUALITY_NOT_PERMITTED}


@given(data=st.binary(max_size=200), epoch=st.integers(0, 2**64 - 1))
def test_any_lease_command_is_decided_or_refused(data: bytes, epoch: int) -> None:
    """Whatever bytes make up a command, it is a decision of the ledger or a typed refusal."""
    try:
        message = pb.BrainMessage.FromString(data)
    except Exception:  # noqa: BLE001
        return
    message.epoch = epoch
    view = leases.View(now_s=1.0, boot_id="b", generations={PartitionId("p"): 1})
    try:
        command = codec.lease_command(message)
    except ConfigError:
        return
    outcome = leases.decide(leases.Ledger(), command, view)
    codec.lease_reply(message.id, "l", outcome.reply, 1.0)


@given(
    lease=st.text(max_size=300),
    tenant=st.text(max_size=300),
    ids=st.lists(st.tuples(st.text(max_size=8), st.integers(0, 2**64 - 1)), max_size=4),
    ttl_ms=st.integers(0, 2**32 - 1),
    token=st.integers(0, 2**64 - 1),
)
def test_any_fields_make_a_decision(
    lease: str, tenant: str, ids: list[tuple[str, int]], ttl_ms: int, token: int
) -> None:
    """Well-formed commands with any contents are decided without an exception."""
    refs = [pb.PartitionRef(id=name, generation=number) for name, number in ids]
    view = leases.View(now_s=1.0, boot_id="b", generations={PartitionId("p"): 1})
    for message in (
        pb.BrainMessage(
            reserve=pb.Reserve(lease=lease, tenant=tenant, partitions=refs, ttl_ms=ttl_ms)
        ),
        pb.BrainMessage(commit=pb.Commit(lease=lease, token=token, ttl_ms=token)),
        pb.BrainMessage(renew=pb.Renew(lease=lease, token=token, ttl_ms=token)),
        pb.BrainMessage(release=pb.Release(lease=lease, token=token, tenant=tenant)),
    ):
        outcome = leases.decide(leases.Ledger(), codec.lease_command(message), view)
        reply = codec.lease_reply("c", lease, outcome.reply, 1.0)
        assert reply.status in {pb.STATUS_OK, pb.STATUS_REFUSED}


def test_leases_and_findings_on_the_wire() -> None:
    """Leases travel with the time they have left, findings with both verdicts and tiers."""
    lease = Lease(
        id=LeaseId("l1"),
        tenant=TenantId("blue"),
        pieces=(LeasedPiece(partition=PARTITION.id, generation=3),),
        token=5,
        state=LeaseState.COMMITTED,
        boot_id="boot-a",
        granted_at_s=90.0,
        expires_at_s=101.5,
        epoch=2,
    )
    message = codec.lease(lease, 100.0)
    assert (message.expires_in_ms, message.has_end, message.age_ms) == (1500, True, 10_000)
    change = leases.Change(lease=lease, before=LeaseState.RESERVED, after=None, cause="expired")
    moved = codec.lease_change(change, 100.0, "c7")
    assert moved.lease.state == pb.LEASE_STATE_FREE
    assert (moved.before, moved.command_id) == (pb.LEASE_STATE_RESERVED, "c7")
    finding = Finding(
        check="CPU-01",
        subject="p",
        before=None,
        after=Verdict.FAIL,
        tier_before=Tier.HARD,
        tier_after=Tier.ADVISORY,
        expected="1-3",
        observed="0-3",
        time_s=99.0,
        time_wall_s=1.0,
    )
    sent = codec.finding(finding, 100.0, (17, "ab"))
    assert (sent.before, sent.after) == (pb.VERDICT_UNSPECIFIED, pb.VERDICT_FAIL)
    assert (sent.age_ms, sent.evidence_sequence) == (1000, 17)
    ill = codec.device_health(
        Device(
            id=DeviceId("gpu0"),
            vendor=Vendor.AMD,
            model="m",
            backend="amd",
            scheme=Scheme.MODES,
            slices=8,
            slice_name="XCD",
            condition=Condition.LOST,
            condition_reason="off the bus",
        ),
        Condition.OK,
        100.0,
        99.5,
    )
    assert (ill.state, ill.before, ill.age_ms) == (
        pb.HEALTH_STATE_FAILED,
        pb.HEALTH_STATE_OK,
        500,
    )


@pytest.mark.parametrize(
    "kind",
    [
        kind
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, AlloyError)
    ],
)
def test_every_error_arrives_as_itself(kind: type[AlloyError]) -> None:
    """Each class of the taxonomy is re-made from the wire with message and cure."""
    with pytest.raises(kind) as caught:
        raise_failure(failure_reply("c", kind("the thing broke", cure="mend it")))
    assert type(caught.value) is kind
    assert (caught.value.message, caught.value.cure) == ("the thing broke", "mend it")


def test_unknown_errors_and_defects_are_typed_all_the_same() -> None:
    """An error of a later version, or a defect, becomes the base class, never arbitrary code."""
    for name in ("NoSuchError", "annotations", "InvariantError", "__name__"):
        reply = pb.Reply(status=pb.STATUS_FAILED, error=pb.Error(kind=name, message="m"))
        with pytest.raises(AlloyError, match="m"):
            raise_failure(reply)
    defect = failure_reply("c", InvariantError("secret detail"))
    assert "secret" not in defect.error.message
    with pytest.raises(AlloyError, match="InvariantError"):
        raise_failure(defect)
    with pytest.raises(AlloyError, match="answered 99"):
        raise_failure(pb.Reply(status=99))  # type: ignore[arg-type]
