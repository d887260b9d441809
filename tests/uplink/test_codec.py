"""The codec: nouns arrive as they were, nothing missing looks like zero."""

from __future__ import annotations

import pytest
from hypothesis import given
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
