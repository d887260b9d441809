"""The accounts of a node: opened, advanced, closed and kept, from snapshots and samples.

    snapshot: who has what -> open and close accounts
    samples, energy        -> advance them
    every 10 s, each change, each hour -> rows and checkpoint on disk

A crash loses at most what came since the last checkpoint; an account that goes on after it has
that time as unobserved, one that does not ends at its checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import msgspec

from alloy_agent.model import Device, Partition, Share, Snapshot
from alloy_agent.telemetry import metering
from alloy_agent.telemetry.journal import Checkpoint, UsageJournal
from alloy_agent.telemetry.metering import Account, UsageRow

CHECKPOINT_S: Final = 8.0  # looked at every 3 s, so at most 9 s are lost
PERIOD_S: Final = 1.0  # of a source that has not shown its own yet

Key = tuple[str, int, str]


class Ledger:
    """All open accounts of one node. One thread at a time.

    Args:
        journal: Where they are kept; None: nowhere (a command that only looks).
        on_row: Told of each closed row, after it is on disk.
    """

    def __init__(
        self, journal: UsageJournal | None, on_row: Callable[[UsageRow], object] | None = None
    ) -> None:
        self._journal = journal
        self._on_row = on_row
        self._kept = Checkpoint() if journal is None else journal.recover()
        self._serial = self._kept.next_serial
        self._boot_id = ""
        self._recovered = {account.key: account for account in self._kept.accounts}
        self._first = True
        self._saved_s = 0.0
        self.accounts: dict[Key, Account] = {}
        self._periods: dict[Key, float] = {}
        self._places: dict[tuple[str, int], Key] = {}
        self.totals: dict[Key, list[int]] = {}  # active, idle, unobserved of closed rows
        self._unwritten: list[UsageRow] = []

    # --- who has what ---

    def saw(
        self, snapshot: Snapshot, leases: Mapping[str, str], now_s: float, wall_s: float
    ) -> None:
        """Open and close accounts as allocations come and go.

        Args:
            snapshot: Partitions with their tenants.
            leases: Lease by partition id.
            now_s: The boot clock.
            wall_s: For labels.
        """
        self._boot_id = snapshot.boot_id
        devices = {device.id: device for device in snapshot.devices}
        wanted = {
            (str(p.id), p.generation, str(p.tenant)): p
            for p in snapshot.partitions
            if p.tenant is not None
        }
        closed = [
            self._closed(key, now_s)
            for key, account in tuple(self.accounts.items())
            if key[0] and (key not in wanted or _changed(account, wanted[key]))
        ]
        if self._first:
            closed += self._take_up(set(wanted), snapshot.boot_id)
        opened = False
        for key, partition in wanted.items():
            account = self.accounts.get(key)
            if account is not None and partition.occupants not in ((), account.occupants):
                self.accounts[key] = msgspec.structs.replace(account, occupants=partition.occupants)
            if account is None:
                opened = True
                lease = leases.get(key[0], "")
                self.accounts[key] = self._opened(
                    partition, devices.get(partition.device), lease, now_s, wall_s
                )
        self._places = {(key[0], key[1]): key for key in self.accounts if key[0]}
        self._energy_lines(snapshot, now_s, wall_s)
        if closed or opened or self._first:
            self._first = False
            self._write(closed, snapshot.boot_id, now_s, wall_s)

    def _take_up(self, wanted: set[Key], boot_id: str) -> list[UsageRow]:
        """Go on with what an earlier process had open; return the rows of what has ended."""
        closed = []
        for key, account in self._recovered.items():
            if account.boot_id == boot_id and (key in wanted or not key[0]):
                self.accounts[key] = msgspec.structs.replace(account, last_ns=None)
            else:
                closed.append(metering.row_of(account, note="ended while nobody looked"))
        self._recovered.clear()
        return closed

    def _opened(
        self, partition: Partition, device: Device | None, lease: str, now_s: float, wall_s: float
    ) -> Account:
        now_ns = metering.ns(now_s)
        return Account(
            serial=self._next(),
            partition=partition.id,
            generation=partition.generation,
            tenant=str(partition.tenant),
            device=partition.device,
            boot_id=self._boot_id,
            start_wall_s=wall_s,
            start_ns=now_ns,
            at_ns=now_ns,
            end_ns=metering.hour_end_ns(now_s, wall_s),
            lease=lease,
            profile=partition.profile,
            size=partition.placement.size,
            slices=0 if device is None else device.slices,
            compute_share=_share(
                partition.compute_units, None if device is None else device.compute_units
            ),
            memory_share=_share(
                partition.memory_bytes, None if device is None else device.memory_bytes
            ),
            soft=partition.share is not Share.EXCLUSIVE,
            occupants=partition.occupants,
        )

    def _energy_lines(self, snapshot: Snapshot, now_s: float, wall_s: float) -> None:
        """Have one line for each device that holds what no partition is charged."""
        now_ns = metering.ns(now_s)
        for device in snapshot.devices:
            key = ("", 0, str(device.id))
            if key not in self.accounts:
                self.accounts[key] = Account(
                    serial=self._next(),
                    partition="",
                    generation=0,
                    tenant=str(device.id),
                    device=device.id,
                    boot_id=snapshot.boot_id,
                    start_wall_s=wall_s,
                    start_ns=now_ns,
                    at_ns=now_ns,
                    end_ns=metering.hour_end_ns(now_s, wall_s),
                    slices=device.slices,
                )

    def _next(self) -> int:
        serial, self._serial = self._serial, self._serial + 1
        return serial

    # --- what is used ---

    def used(
        self,
        partition: str,
        generation: int,
        samples: Sequence[tuple[float, float]],
        period_s: float,
        method: str,
    ) -> None:
        """Advance the account of a partition, if anybody has it."""
        key = self._places.get((partition, generation))
        account = None if key is None else self.accounts.get(key)
        if key is not None and account is not None:
            self._periods[key] = period_s
            self.accounts[key] = metering.advance(account, samples, period_s, method)

    def spent(self, device: str, joules: float, active: Mapping[str, float]) -> None:
        """Split energy of a device over the partitions that were active.

        Args:
            device: Whose counter grew.
            joules: By how much.
            active: Active share of the whole device by partition id.
        """
        holders = {
            key[0]: key for key, account in self.accounts.items() if account.device == device
        }
        shares = {holders[p]: share for p, share in active.items() if p in holders}
        split, rest = metering.split_energy(joules, {str(k): s for k, s in shares.items()})
        for key in shares:
            self.accounts[key] = metering.add_energy(self.accounts[key], split[str(key)])
        line = ("", 0, device)
        if line in self.accounts:
            self.accounts[line] = metering.add_energy(self.accounts[line], rest)

    # --- closing and keeping ---

    def tick(self, boot_id: str, now_s: float, wall_s: float) -> None:
        """Close full hours, and checkpoint when it is time."""
        now_ns = metering.ns(now_s)
        closed = []
        for key, account in tuple(self.accounts.items()):
            if now_ns >= account.end_ns:
                done = metering.settle(account, now_ns, self._period(key))
                closed.append(self._noted(done))
                self.accounts[key] = metering.next_hour(done, self._next(), wall_s)
        if closed or now_s - self._saved_s >= CHECKPOINT_S:
            self._write(closed, boot_id, now_s, wall_s)

    def _period(self, key: Key) -> float:
        return self._periods.get(key, PERIOD_S)

    def _closed(self, key: Key, now_s: float) -> UsageRow:
        account = self.accounts.pop(key)
        done = metering.settle(account, metering.ns(now_s), self._period(key))
        self._periods.pop(key, None)
        row = self._noted(done)
        self.totals.pop(key, None)
        return row

    def _noted(self, account: Account) -> UsageRow:
        total = self.totals.setdefault(account.key, [0, 0, 0])
        total[0] += account.active_ns
        total[1] += account.idle_ns
        total[2] += account.unobserved_ns
        return metering.row_of(account)

    def close(self, boot_id: str, now_s: float, wall_s: float) -> None:
        """Keep everything as it stands; the next process goes on from it."""
        self._write([], boot_id, now_s, wall_s)

    def _write(self, closed: list[UsageRow], boot_id: str, now_s: float, wall_s: float) -> None:
        self._saved_s = now_s
        now_ns = metering.ns(now_s)
        for key, account in self.accounts.items():
            if key[0]:
                self.accounts[key] = metering.settle(account, now_ns, self._period(key))
        self._unwritten += [row for row in closed if row.kind == "interval" or row.energy_j]
        if self._journal is not None:
            if self._unwritten:
                self._journal.append(tuple(self._unwritten))
            self._journal.checkpoint(
                Checkpoint(
                    boot_id=boot_id,
                    at_s=now_s,
                    wall_s=wall_s,
                    next_serial=self._serial,
                    accounts=tuple(self.accounts.values()),
                )
            )
        done, self._unwritten = self._unwritten, []
        if self._on_row is not None:
            for row in done:
                self._on_row(row)

    def seconds(self) -> dict[Key, tuple[float, float, float]]:
        """Return active, idle and unobserved seconds of each present allocation, from its start."""
        found = {}
        for key, account in self.accounts.items():
            if key[0]:
                before = self.totals.get(key, (0, 0, 0))
                found[key] = (
                    (before[0] + account.active_ns) / metering.NS,
                    (before[1] + account.idle_ns) / metering.NS,
                    (before[2] + account.unobserved_ns) / metering.NS,
                )
        return found

    def users(self) -> dict[Key, tuple[str, str]]:
        """Return the UIDs of claims and of pods of each present allocation that has any."""
        found = {}
        for key, account in self.accounts.items():
            claims = sorted({one.claim_uid for one in account.occupants if one.claim_uid})
            pods = sorted({one.pod_uid for one in account.occupants if one.pod_uid})
            if claims or pods:
                found[key] = (",".join(claims), ",".join(pods))
        return found


def _changed(account: Account, partition: Partition) -> bool:
    """Whether a partition has other users than an account, though they go by the same name."""
    return metering.others(account.occupants, partition.occupants)


def _share(part: int | None, whole: int | None) -> float | None:
    return None if not part or not whole else min(1.0, part / whole)
