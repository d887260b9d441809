"""Who may come in where something is drained: what reservations and new tenants are told."""

from __future__ import annotations

import pytest

from alloy_agent.config import Settings
from alloy_agent.daemon import admission
from alloy_agent.errors import ConfigError
from alloy_agent.leases import Ledger, Refusal, Reserve, View, decide
from alloy_agent.model import LeasedPiece, LeaseId, PartitionId, TenantId
from alloy_agent.telemetry import drains
from tests.telemetry.world import device, piece, snapshot

NODE = snapshot(piece("GPU-0/1g@0"), piece("GPU-1/1g@0"), devices=(device(), device("GPU-1")))


@pytest.mark.parametrize(
    ("subject", "refused"),
    [("GPU-0", ("GPU-0",)), ("GPU-0/1g@0", ("GPU-0",)), ("", ("GPU-0", "GPU-1"))],
)
def test_what_is_drained_is_not_reserved(subject: str, refused: tuple[str, ...]) -> None:
    """A drained partition, device or node refuses a reservation and says whose drain it is."""
    held, _ = drains.drained((), subject, "s1", "fan", NODE, 5.0)
    view = View(
        now_s=6.0,
        boot_id="b",
        generations={p.id: p.generation for p in NODE.partitions},
        blocked=admission.blocked(held, NODE),
    )
    for name in ("GPU-0", "GPU-1"):
        partition = PartitionId(f"{name}/1g@0")
        command = Reserve(
            lease=LeaseId("l-1"),
            tenant=TenantId("new"),
            pieces=(LeasedPiece(partition=partition, generation=view.generations[partition]),),
            ttl_s=10.0,
            epoch=1,
        )
        reply = decide(Ledger(), command, view).reply
        assert reply.refusal == (Refusal.DRAINING if name in refused else None)
        if name in refused:
            assert "is drained by session s1: fan" in reply.reason


def test_a_refusal_says_whose_drain_it_is_and_what_ends_it() -> None:
    """Its session, reason and end, and the command with the state directory in use."""
    _, made = drains.drained((), "GPU-0", "night", "fan", NODE, 5.0, 60.0)
    refused = admission.refusal("GPU-0/1g@0", made, Settings(node_name="n", state_dir="/srv/a b"))
    assert isinstance(refused, ConfigError)
    assert "its device GPU-0 is drained by session night, until " in str(refused)
    assert str(refused).endswith(
        ": fan: take it back with 'alloy-agent --state-dir '/srv/a b' undrain GPU-0 "
        "--session night' or wait until then"
    )
