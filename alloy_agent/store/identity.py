"""Which incarnation of a piece this is, which pieces are the agent's own, and who is in them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from alloy_agent.model import DeviceId, PartitionId, TenantId
from alloy_agent.store.files import MARK_BLOCK
from alloy_agent.store.marked import MarkedDatabase
from alloy_agent.store.records import Binding, PieceRef

if TYPE_CHECKING:
    from collections.abc import Iterable

_NO_PROCESS = -1


class IdentityTables(MarkedDatabase):
    """Generations, geometry counters, managed pieces and tenant bindings."""

    def generation_of(self, partition: PartitionId, incarnation: str) -> int:
        """Return the generation of what is at a location; a new incarnation counts as the next.

        A read-only store answers what the daemon would, and keeps nothing.
        """
        row = self._row("generations", "WHERE partition = ?", (partition,))
        if row is not None and row[1] == incarnation:
            return int(row[2])
        if self.read_only:
            return self._next_generation(None if row is None else int(row[2]))
        with self._write() as con:
            row = self._row("generations", "WHERE partition = ?", (partition,))
            if row is not None and row[1] == incarnation:
                return int(row[2])
            generation = self._next_generation(None if row is None else int(row[2]))
            self._raise_marks(generation=generation)
            self._put(con, "generations", partition, incarnation, generation)
            return generation

    def _next_generation(self, last: int | None) -> int:
        return max(last or 0, self._generation_floor()) + 1

    def _generation_floor(self) -> int:
        """Return what each new generation must pass: 0, or the marks of a lost state file."""
        return int(self.meta("generation_floor") or 0)

    def generations(self) -> dict[PartitionId, tuple[str, int]]:
        """Return the last seen incarnation and its generation for each location ever seen."""
        return {PartitionId(p): (i, int(g)) for p, i, g in self._rows("generations")}

    def geometry_of(self, device: DeviceId, digest: str) -> int:
        """Return the counter of a device's geometry, which grows whenever `digest` changes."""
        row = self._row("geometry", "WHERE device = ?", (device,))
        if row is not None and row[1] == digest:
            return int(row[2])
        counter = 1 if row is None else int(row[2]) + 1
        if not self.read_only:
            with self._write() as con:
                self._put(con, "geometry", device, digest, counter)
        return counter

    # --- the agent's own pieces ---

    def managed(self) -> dict[PartitionId, str]:
        """Return the incarnation of each piece that this agent made; anything else is foreign."""
        return {PartitionId(p): str(i) for p, i, _ in self._rows("managed")}

    def set_managed(self, partition: PartitionId, incarnation: str | None, *, run: int = 0) -> None:
        """Note that the agent made this incarnation; None: it is the agent's no longer."""
        if incarnation is None:
            self._note_pieces((), (PieceRef(partition=partition, incarnation=""),), run)
        else:
            self._note_pieces((PieceRef(partition=partition, incarnation=incarnation),), (), run)

    def _note_pieces(self, made: Iterable[PieceRef], gone: Iterable[PieceRef], run: int) -> None:
        with self._write() as con:
            for piece in gone:
                con.execute("DELETE FROM managed WHERE partition = ?", (piece.partition,))
                con.execute("DELETE FROM bindings WHERE partition = ?", (piece.partition,))
            for piece in made:
                self.generation_of(piece.partition, piece.incarnation)
                self._put(con, "managed", piece.partition, piece.incarnation, run)

    # --- tenants ---

    def bind(self, binding: Binding) -> None:
        """Note a tenant, or one process of it, in a partition."""
        with self._write(durable=binding.pid is None) as con:
            self._put(
                con,
                "bindings",
                binding.partition,
                binding.generation,
                binding.tenant,
                _NO_PROCESS if binding.pid is None else binding.pid,
                msgspec.json.encode(binding),
            )

    def unbind(
        self,
        partition: PartitionId,
        *,
        tenant: TenantId | None = None,
        pid: int | None = None,
    ) -> int:
        """Forget bindings of a partition (one tenant, one process); return how many there were."""
        where = "partition = ?"
        parameters: tuple[str | int, ...] = (partition,)
        if tenant is not None:
            where, parameters = where + " AND tenant = ?", (*parameters, tenant)
        if pid is not None:
            where, parameters = where + " AND pid = ?", (*parameters, pid)
        with self._write(durable=pid is None) as con:
            return con.execute(f"DELETE FROM bindings WHERE {where}", parameters).rowcount  # noqa: S608

    def bindings(self, partition: PartitionId | None = None) -> tuple[Binding, ...]:
        """Return who is bound, ordered by partition."""
        where, values = ("", ()) if partition is None else ("WHERE partition = ?", (partition,))
        return tuple(
            self._decode(row[4], Binding, f"binding of {row[0]}")
            for row in self._rows("bindings", where, values)
        )


__all__ = ["MARK_BLOCK", "IdentityTables"]
