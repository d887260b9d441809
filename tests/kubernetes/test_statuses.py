"""What a claim's status says, and that it is written, tried again and given up as promised."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from alloy_agent.kubernetes.api import ApiAccess, ApiClient, ApiError
from alloy_agent.kubernetes.claims import ClaimRef
from alloy_agent.kubernetes.statuses import TRIES, WAITING_MAX, ClaimTeller, entries_of
from alloy_agent.model import DeviceId, PartitionId, Placement, Share
from alloy_agent.store.claims import ClaimPhase, ClaimPiece, ClaimRecord
from tests.fakes.apiserver import FakeApiServer

DRIVER = "gpu.alloy.dev"
PATH = "/apis/resource.k8s.io/v1/namespaces/team/resourceclaims/claim"
PIECE = ClaimPiece(
    request="piece",
    pool="node-a/gpu-0",
    name="3g40gb-4-4",
    device=DeviceId("GPU-0"),
    profile="3g.40gb",
    placement=Placement(start=4, size=4),
    partition=PartitionId("MIG-0"),
)
RECORD = ClaimRecord(
    uid="uid-1",
    namespace="team",
    name="claim",
    phase=ClaimPhase.PREPARED,
    pieces=(PIECE,),
    changed_wall_s=1_790_000_000.5,
)
RELEASED = ClaimRecord(uid="uid-1", namespace="team", name="claim", phase=ClaimPhase.RELEASED)


@pytest.fixture
def server() -> Iterator[FakeApiServer]:
    with FakeApiServer() as made:
        result = {"request": "piece", "driver": DRIVER, "pool": PIECE.pool, "device": PIECE.name}
        other = {**result, "driver": "nic.example.com"}
        made.put(
            PATH,
            {
                "metadata": {"name": "claim", "namespace": "team", "uid": "uid-1"},
                "status": {
                    "allocation": {"devices": {"results": [result, other]}},
                    "devices": [{"driver": "nic.example.com", "pool": "p", "device": "d"}],
                },
            },
        )
        yield made


def teller(server: FakeApiServer) -> ClaimTeller:
    return ClaimTeller(ApiClient(ApiAccess(server=server.url)), DRIVER, "node-a")


def devices(server: FakeApiServer) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = server.objects[PATH]["status"]["devices"]
    return found


def test_an_entry_names_the_piece_and_that_it_is_ready() -> None:
    """One for each piece, always the same from the same record, small enough for the server."""
    (entry,) = entries_of(RECORD, DRIVER, "node-a")
    assert (entry["driver"], entry["pool"], entry["device"]) == (DRIVER, PIECE.pool, PIECE.name)
    (condition,) = entry["conditions"]
    assert (condition["type"], condition["status"]) == ("Ready", "True")
    assert condition["lastTransitionTime"] == "2026-09-21T14:13:20Z"
    assert entry["data"]["partition"] == "MIG-0"
    assert entry["data"]["parentUUID"] == "GPU-0"
    assert "shareID" not in entry
    assert len(msgspec.json.encode(entry["data"])) < 10240
    assert entries_of(RECORD, DRIVER, "node-a") == [entry]


def test_a_share_carries_its_id() -> None:
    """What several claims have of one device is told apart by the share's id."""
    share = msgspec.structs.replace(PIECE, share_id="s-1", share=Share.OPPORTUNISTIC)
    (entry,) = entries_of(msgspec.structs.replace(RECORD, pieces=(share,)), DRIVER, "node-a")
    assert entry["shareID"] == "s-1"
    assert entry["data"]["share"] == "opportunistic"


@pytest.mark.parametrize("phase", [p for p in ClaimPhase if p is not ClaimPhase.PREPARED])
def test_only_a_prepared_claim_has_entries(phase: ClaimPhase) -> None:
    """Begun, on the way out, or gone: nothing is claimed to be ready."""
    assert entries_of(msgspec.structs.replace(RECORD, phase=phase), DRIVER, "node-a") == []


def test_entries_come_and_go_beside_those_of_others(server: FakeApiServer) -> None:
    """Written after prepare, taken back after unprepare; the other driver's stays."""
    told = teller(server)
    told.tell(RECORD)
    told.write()
    assert [one["driver"] for one in devices(server)] == ["nic.example.com", DRIVER]
    version = server.version
    told.tell(RECORD)
    told.write()
    assert server.version == version, "the same again changes nothing"
    told.tell(RECORD)
    told.tell(RELEASED)
    told.write()
    assert [one["driver"] for one in devices(server)] == ["nic.example.com"]


def test_a_replaced_or_lost_claim_is_left_alone(server: FakeApiServer) -> None:
    """Another claim of that name is not written to, and one that is gone is no error."""
    client = ApiClient(ApiAccess(server=server.url))
    entries = entries_of(RECORD, DRIVER, "node-a")
    other = ClaimRef(uid="uid-2", namespace="team", name="claim")
    assert client.claim_devices(other, DRIVER, entries) is False
    assert len(devices(server)) == 1
    gone = ClaimRef(uid="uid-1", namespace="team", name="gone")
    assert client.claim_devices(gone, DRIVER, entries) is False


class Deaf:
    """An API server that refuses, and what happens meanwhile."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.meanwhile: Any = lambda: None

    def claim_devices(self, ref: ClaimRef, driver: str, entries: list[dict[str, Any]]) -> bool:
        del driver, entries
        self.calls.append(ref.uid)
        self.meanwhile()
        raise ApiError("no", status=500)


def test_what_fails_is_tried_again_and_then_given_up() -> None:
    """A few times, then no more; nothing is raised at whoever keeps the house."""
    deaf = Deaf()
    told = ClaimTeller(deaf, DRIVER, "node-a")
    told.tell(RECORD)
    for _ in range(TRIES + 3):
        told.write()
    assert len(deaf.calls) == TRIES


def test_the_newest_word_is_not_lost() -> None:
    """A claim that changes while its status is being written is written again."""
    deaf = Deaf()
    told = ClaimTeller(deaf, DRIVER, "node-a")
    told.tell(RECORD)
    deaf.meanwhile = lambda: told.tell(RELEASED)
    told.write()
    deaf.meanwhile = lambda: None
    for _ in range(TRIES + 3):
        told.write()
    assert len(deaf.calls) == 1 + TRIES


def test_what_waits_is_bounded() -> None:
    """More claims than a node ever has: the oldest give way, and memory stays."""
    deaf = Deaf()
    told = ClaimTeller(deaf, DRIVER, "node-a")
    for number in range(WAITING_MAX + 10):
        told.tell(msgspec.structs.replace(RECORD, uid=f"uid-{number}"))
    told.write()
    assert deaf.calls[0] == "uid-10"
    assert len(deaf.calls) == WAITING_MAX
