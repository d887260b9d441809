"""Claims of an orchestrator: what was promised to a pod, put on disk before hardware is touched."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from alloy_agent.model import DeviceId, PartitionId, Placement, Share, Value
from alloy_agent.store.database import Database


class ClaimPhase(StrEnum):
    """How far a claim is. A released one is a tombstone: late retries must not bring it back."""

    STARTED = "started"  # on disk before hardware is touched
    PREPARED = "prepared"
    TAKING_BACK = "taking_back"  # a prepare failed, and so far its undoing did
    RELEASING = "releasing"
    RELEASED = "released"


class ClaimPiece(Value, frozen=True, kw_only=True):
    """One allocated piece of a claim, by its place: names are for others."""

    request: str
    pool: str
    name: str  # in the pool
    device: DeviceId
    profile: str
    placement: Placement
    share: Share = Share.EXCLUSIVE
    ordinal: int = 0
    share_id: str | None = None
    admin: bool = False  # may look at what others have; takes nothing
    memory_bytes: int | None = None
    loss_budget_ratio: float | None = None
    cdi_ids: tuple[str, ...] = ()
    partition: PartitionId | None = None
    incarnation: str = ""
    made: bool = False  # by this claim: goes with it


class ClaimRecord(Value, frozen=True, kw_only=True):
    """One claim."""

    uid: str
    namespace: str
    name: str
    phase: ClaimPhase
    pieces: tuple[ClaimPiece, ...] = ()
    pods: tuple[str, ...] = ()  # uids for which it is reserved
    pod_names: tuple[str, ...] = ()  # of the same pods, in the same order
    resource_version: str = ""
    boot_id: str = ""
    epoch: int = 0
    changed_wall_s: float = 0.0


class ClaimTable(Database):
    """Claims by uid."""

    def claims(self) -> tuple[ClaimRecord, ...]:
        """Return all claims on disk, tombstones too."""
        return tuple(
            self._decode(row[1], ClaimRecord, f"claim {row[0]}")
            for row in self._rows("claims", "ORDER BY uid")
        )

    def claim(self, uid: str) -> ClaimRecord | None:
        """Return one claim."""
        row = self._row("claims", "WHERE uid = ?", (uid,))
        return None if row is None else self._decode(row[1], ClaimRecord, f"claim {uid}")

    def save_claim(self, claim: ClaimRecord) -> None:
        """Put a claim on disk."""
        with self._write() as con:
            self._put(con, "claims", claim.uid, msgspec.json.encode(claim))

    def drop_claim(self, uid: str) -> None:
        """Forget a claim."""
        with self._write() as con:
            con.execute("DELETE FROM claims WHERE uid = ?", (uid,))
