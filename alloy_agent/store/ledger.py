"""Leases and last verdicts: what was promised to tenants, and what was found about them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from alloy_agent.model import Lease, LeaseId
from alloy_agent.store.marked import MarkedDatabase
from alloy_agent.store.records import LastVerdict

if TYPE_CHECKING:
    from collections.abc import Iterable


class LedgerTables(MarkedDatabase):
    """Leases by id, and the last verdict of each check on each subject."""

    def leases(self) -> tuple[Lease, ...]:
        """Return all leases on disk, of this boot or an earlier one."""
        return tuple(
            self._decode(row[1], Lease, f"lease {row[0]}")
            for row in self._rows("leases", "ORDER BY id")
        )

    def save_lease(self, lease: Lease) -> None:
        """Put a lease on disk with its token, so that no restart gives the token out again."""
        with self._write() as con:
            self.raise_token(lease.token)
            self._put(con, "leases", lease.id, msgspec.json.encode(lease))

    def drop_lease(self, lease: LeaseId) -> None:
        """Forget a lease; the highest token stays."""
        with self._write() as con:
            con.execute("DELETE FROM leases WHERE id = ?", (lease,))

    def save_ledger(self, leases: Iterable[Lease], highest_token: int) -> None:
        """Replace all leases in one transaction."""
        with self._write() as con:
            self.raise_token(highest_token)
            con.execute("DELETE FROM leases")
            for lease in leases:
                self.save_lease(lease)

    # --- verdicts ---

    def last_verdicts(self) -> dict[tuple[str, str], LastVerdict]:
        """Return the last verdict by (check, subject)."""
        return {
            (str(check), str(subject)): self._decode(
                body, LastVerdict, f"verdict {check} on {subject}"
            )
            for check, subject, body in self._rows("verdicts")
        }

    def set_last_verdicts(
        self, verdicts: Iterable[LastVerdict], forgotten: Iterable[tuple[str, str]] = ()
    ) -> None:
        """Keep verdicts, and forget those of subjects that no longer exist."""
        with self._write(durable=False) as con:
            for check, subject in forgotten:
                con.execute(
                    "DELETE FROM verdicts WHERE check_id = ? AND subject = ?", (check, subject)
                )
            for verdict in verdicts:
                self._put(
                    con, "verdicts", verdict.check, verdict.subject, msgspec.json.encode(verdict)
                )
