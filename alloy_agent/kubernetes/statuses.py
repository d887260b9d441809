"""What a claim's status says of the pieces that were made for it, and the writing of it.

The scheduler says in a claim what was given; the driver adds what became of it: one entry for each
device with a condition `Ready` and, as data, which partition it is. Whoever looks at a claim sees
it, with no access to the node. Nothing waits for it: a claim is prepared whether or not its status
can be written.

Rules that stay true in here:

* Entries are written by server-side apply under the driver's name; those of other drivers stay.
* The same record always makes the same entries, so that a repeated prepare changes nothing.
* The claim's UID goes with the write: a claim that was replaced is not touched.
* What was not written is tried again a few times; a claim that is gone is forgotten.

Source: KEP-4817; limits of `resource.k8s.io/v1` AllocatedDeviceStatus (8 conditions, 10 KiB).
"""

from __future__ import annotations

import logging
import threading
import time
from typing import Any, Final, Protocol

from alloy_agent.errors import AlloyError
from alloy_agent.kubernetes.claims import ClaimRef
from alloy_agent.model import Share
from alloy_agent.store.claims import ClaimPhase, ClaimPiece, ClaimRecord

LOG = logging.getLogger(__name__)

READY: Final = "Ready"
DATA_KIND: Final = "PartitionStatus"
TRIES: Final = 5
WAITING_MAX: Final = 1024


def entries_of(record: ClaimRecord, driver: str, node: str) -> list[dict[str, Any]]:
    """Return the entries of a claim's `status.devices`; none for a claim that holds nothing."""
    if record.phase is not ClaimPhase.PREPARED:
        return []
    since = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(record.changed_wall_s))
    condition = {
        "type": READY,
        "status": "True",
        "reason": "Prepared",
        "message": f"prepared on {node}",
        "lastTransitionTime": since,
    }
    entries = []
    for piece in record.pieces:
        entry = {
            "driver": driver,
            "pool": piece.pool,
            "device": piece.name,
            "conditions": [condition],
            "data": _data(piece),
        }
        if piece.share_id is not None:
            entry["shareID"] = piece.share_id
        entries.append(entry)
    return entries


def _data(piece: ClaimPiece) -> dict[str, Any]:
    data = {
        "apiVersion": "alloy.dev/v1",
        "kind": DATA_KIND,
        "parentUUID": str(piece.device),
        "partition": str(piece.partition or ""),
        "profile": piece.profile,
        "placementStart": piece.placement.start,
        "placementSize": piece.placement.size,
    }
    if piece.share is not Share.EXCLUSIVE:
        data["share"] = str(piece.share)
    return data


class StatusApi(Protocol):
    """What is asked of the API server."""

    def claim_devices(self, ref: ClaimRef, driver: str, entries: list[dict[str, Any]]) -> bool:
        """Write a driver's entries of a claim; return False where the claim is not there."""
        ...


class ClaimTeller:
    """Writes what is waiting, when asked to; the newest word on a claim is the one that counts."""

    def __init__(self, api: StatusApi, driver: str, node: str) -> None:
        self._api = api
        self._driver = driver
        self._node = node
        self._lock = threading.Lock()
        self._waiting: dict[str, tuple[ClaimRecord, int]] = {}

    def tell(self, record: ClaimRecord) -> None:
        """Note that a claim changed; nothing is written here."""
        with self._lock:
            self._waiting.pop(record.uid, None)
            if len(self._waiting) >= WAITING_MAX:  # the oldest gives way: its status is a courtesy
                self._waiting.pop(next(iter(self._waiting)))
            self._waiting[record.uid] = (record, TRIES)

    def write(self) -> None:
        """Write everything that waits; what fails waits for the next call, a few times."""
        with self._lock:
            waiting = list(self._waiting.values())
        for record, tries in waiting:
            failed = self._one(record)
            with self._lock:
                if self._waiting.get(record.uid) != (record, tries):
                    continue  # something newer came meanwhile
                if failed and tries > 1:
                    self._waiting[record.uid] = (record, tries - 1)
                else:
                    del self._waiting[record.uid]

    def _one(self, record: ClaimRecord) -> bool:
        """Write one claim; return whether it failed."""
        ref = ClaimRef(uid=record.uid, namespace=record.namespace, name=record.name)
        try:
            self._api.claim_devices(ref, self._driver, entries_of(record, self._driver, self._node))
        except AlloyError as exc:
            LOG.warning("claim_status_not_told", extra={"claim": record.uid, "reason": str(exc)})
            return True
        return False
