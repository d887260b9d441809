"""The lease desk: the pure ledger of `leases`, kept on disk, for the brain and the local socket.

Rules that stay true in here:

* Disk first, then memory, then the answer. When the disk refuses, nothing has changed.
* One command at a time; the view of the node is taken inside of that.
* A change of a lease and its event in the outbox are one transaction: both are on disk, or neither.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Protocol

import msgspec

from alloy_agent import leases
from alloy_agent.errors import StaleTokenError, StoreCorruptError
from alloy_agent.model import Lease, LeaseId, PartitionId, TenantId, Value
from alloy_agent.proto import agent_pb2 as pb
from alloy_agent.uplink import codec

LOG = logging.getLogger(__name__)
META = "lease_desk"


class LeaseStore(Protocol):
    """What the desk asks of the store."""

    def leases(self) -> tuple[Lease, ...]:
        """Return all leases on disk."""
        ...

    def transaction(self) -> AbstractContextManager[None]:
        """Put all that is written inside on disk at once, or none of it."""
        ...

    def save_ledger(self, leases: Iterable[Lease], highest_token: int) -> None:
        """Replace all leases, durably."""
        ...

    def highest_token(self) -> int:
        """Return the highest token ever."""
        ...

    def meta(self, key: str) -> str | None:
        """Return a small text."""
        ...

    def set_meta(self, key: str, value: str) -> None:
        """Keep a small text, durably."""
        ...


class _Memory(Value, frozen=True, kw_only=True):
    """What the store has no table for."""

    brain_epoch: int = 0
    ended: tuple[leases.Ended, ...] = ()


class LeaseDesk:
    """Decides lease commands one at a time, for any thread.

    Args:
        store: Where the ledger lives.
        view: Takes the present view of the node.
        on_change: Told of every change inside of the transaction that puts it on disk, before the
            command is answered; with the id of the command, and the time of the view. What it
            writes to the store is on disk with the change. It must not call the desk.
    """

    def __init__(
        self,
        store: LeaseStore,
        view: Callable[[], leases.View],
        on_change: Callable[[leases.Change, str, float], object] | None = None,
    ) -> None:
        self._store = store
        self._view = view
        self._on_change = on_change
        self._mutex = threading.Lock()
        self._ledger = _load(store)

    @property
    def ledger(self) -> leases.Ledger:
        """Return the present ledger."""
        return self._ledger

    def handle(self, message: pb.BrainMessage) -> pb.Reply:
        """Return the answer to a lease command of the brain or the socket.

        Raises:
            ConfigError: It is no lease command, or a field is out of range.
            StoreError: The disk refused; nothing has changed.
        """
        command = codec.lease_command(message)
        reply, now_s = self._decide(command, message.id)
        lease_id = getattr(command, "lease", "")
        return codec.lease_reply(message.id, lease_id, reply, now_s)

    def enter(self, lease: LeaseId, tenant: TenantId, partition: PartitionId) -> leases.Reply:
        """Return the lease under which a tenant may start in a partition, or the refusal."""
        command = leases.Enter(lease=lease, tenant=tenant, partition=partition)
        return self._decide(command)[0]

    def release(self, lease: LeaseId, tenant: TenantId) -> leases.Reply:
        """Return what became of giving back a lease by its tenant."""
        command = leases.Release(lease=lease, token=None, tenant=tenant, epoch=0)
        return self._decide(command)[0]

    def cleared(self, lease: LeaseId) -> leases.Reply:
        """Note that nobody of a releasing lease is inside any more."""
        return self._decide(leases.Cleared(lease=lease))[0]

    def see_brain(self, epoch: int) -> None:
        """Note, durably, the term of a brain that the node is about to obey.

        Raises:
            StaleTokenError: A brain of a later term has been seen.
        """
        reply, _ = self._decide(leases.Tick(epoch=epoch))
        if reply.refusal is not None:
            raise StaleTokenError(reply.reason, cure=reply.cure)

    def tick(self) -> None:
        """End what has run out; to be called every second or so."""
        self._decide(leases.Tick())

    def _decide(self, command: leases.Command, command_id: str = "") -> tuple[leases.Reply, float]:
        with self._mutex:
            view = self._view()
            outcome = leases.decide(self._ledger, command, view)
            if outcome.ledger != self._ledger:
                with self._store.transaction():
                    _save(self._store, self._ledger, outcome.ledger)
                    for change in outcome.changes:
                        if self._on_change is not None:
                            self._on_change(change, command_id, view.now_s)
                self._ledger = outcome.ledger
            for change in outcome.changes:
                _log(change)
            if outcome.reply.refusal is not None:
                LOG.info(
                    "lease_refused",
                    extra={
                        "lease": getattr(command, "lease", ""),
                        "refusal": outcome.reply.refusal.value,
                        "reason": outcome.reply.reason,
                    },
                )
            return outcome.reply, view.now_s


def _load(store: LeaseStore) -> leases.Ledger:
    """Return the ledger on disk; a lease that is noted as ended has no row, whatever there is."""
    text = store.meta(META)
    try:
        memory = msgspec.json.decode(text, type=_Memory) if text else _Memory()
    except msgspec.MsgspecError as exc:
        raise StoreCorruptError(
            f"state: the memory of the lease desk cannot be read: {exc}",
            cure="restore the state directory, or start with an empty one",
        ) from exc
    over = {note.lease for note in memory.ended}
    return leases.Ledger(
        leases=tuple(lease for lease in store.leases() if lease.id not in over),
        highest_token=store.highest_token(),
        brain_epoch=memory.brain_epoch,
        ended=memory.ended,
    )


def _save(store: LeaseStore, before: leases.Ledger, after: leases.Ledger) -> None:
    """Put a ledger on disk. What ended goes first: half of it done would still be the truth."""
    if (before.ended, before.brain_epoch) != (after.ended, after.brain_epoch):
        memory = _Memory(brain_epoch=after.brain_epoch, ended=after.ended)
        store.set_meta(META, msgspec.json.encode(memory).decode())
    if (before.leases, before.highest_token) != (after.leases, after.highest_token):
        store.save_ledger(after.leases, after.highest_token)


def _log(change: leases.Change) -> None:
    LOG.info(
        "lease_changed",
        extra={
            "lease": change.lease.id,
            "tenant": change.lease.tenant,
            "token": change.lease.token,
            "before": change.before.value if change.before else "free",
            "after": change.after.value if change.after else "free",
            "cause": change.cause,
        },
    )
