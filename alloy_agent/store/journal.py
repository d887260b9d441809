"""What is wanted, and what was begun to get there.

Rules that stay true in here:

* `begin` puts the plan and the layout it leads to on disk in one transaction; `finish` of a run
  that did not get there puts back the layout that was wanted before.
* `intent` is on disk before the hardware is touched. `outcome` and the pieces that the step made or
  removed are one transaction, so a piece is managed exactly when the journal says that a step made
  it.
* At most one run is unfinished.
"""

from __future__ import annotations

import time

import msgspec

from alloy_agent.errors import InvariantError
from alloy_agent.model import Layout, Plan, Step
from alloy_agent.store.database import Row
from alloy_agent.store.identity import IdentityTables
from alloy_agent.store.records import (
    UNFINISHED,
    Before,
    Entry,
    EntryState,
    PieceRef,
    Run,
    RunStatus,
)

RUNS_KEPT = 200


class JournalTables(IdentityTables):
    """The desired layout, runs and their steps."""

    def desired(self) -> Layout | None:
        """Return the layout the node is kept at, if one was ever applied."""
        row = self._row("desired", "WHERE one = 1", ())
        return None if row is None else self._decode(row[1], Layout, "desired layout")

    def set_desired(self, layout: Layout | None) -> None:
        """Want another layout, durably."""
        with self._write() as con:
            if layout is None:
                con.execute("DELETE FROM desired")
            else:
                self._put(con, "desired", 1, msgspec.json.encode(layout))

    # --- runs ---

    def begin(self, plan: Plan) -> int:
        """Put a plan on disk as begun and its layout as desired; return the run's number."""
        with self._write() as con:
            if self.unfinished() is not None:
                raise InvariantError("a run was begun while another is unfinished")
            (last,) = con.execute("SELECT coalesce(max(id), 0) FROM runs").fetchone()
            run, previous = int(last) + 1, self.desired()
            self._put(
                con,
                "runs",
                run,
                plan.boot_id,
                RunStatus.RUNNING.value,
                msgspec.json.encode(plan),
                None if previous is None else msgspec.json.encode(previous),
                time.time(),
                "",
            )
            self.set_desired(plan.layout)
            con.execute("DELETE FROM entries WHERE run <= ?", (run - RUNS_KEPT,))
            con.execute("DELETE FROM runs WHERE id <= ?", (run - RUNS_KEPT,))
        return run

    def intent(
        self, run: int, number: int, step: Step, *, before: Before | None = None, undo: bool = False
    ) -> int:
        """Put on disk that a step is about to be done; return its position in the run."""
        with self._write() as con:
            (last,) = con.execute(
                "SELECT coalesce(max(position), 0) FROM entries WHERE run = ?", (run,)
            ).fetchone()
            position = int(last) + 1
            entry = Entry(
                run=run,
                position=position,
                number=number,
                undo=undo,
                step=step,
                before=before or Before(),
                state=EntryState.INTENT,
            )
            self._put(con, "entries", run, position, msgspec.json.encode(entry))
        return position

    def outcome(  # noqa: PLR0913
        self,
        run: int,
        position: int,
        error: str | None,
        *,
        state: EntryState | None = None,
        made: tuple[PieceRef, ...] = (),
        gone: tuple[PieceRef, ...] = (),
    ) -> None:
        """Put on disk what became of a step, and the pieces that it made and removed."""
        final = state or (EntryState.DONE if error is None else EntryState.FAILED)
        with self._write() as con:
            row = self._row("entries", "WHERE run = ? AND position = ?", (run, position))
            if row is None:
                raise InvariantError(f"outcome of step {position} of run {run} without an intent")
            entry = self._decode(row[2], Entry, f"step {position} of run {run}")
            entry = msgspec.structs.replace(
                entry, state=final, error=error or "", made=made, gone=gone
            )
            self._put(con, "entries", run, position, msgspec.json.encode(entry))
            self._note_pieces(made, gone, run)

    def set_run_status(self, run: int, status: RunStatus, detail: str = "") -> None:
        """Move an unfinished run to another unfinished status."""
        with self._write() as con:
            row = self._row("runs", "WHERE id = ?", (run,))
            if row is None:
                raise InvariantError(f"run {run} was never begun")
            self._put(con, "runs", *row[:2], status.value, *row[3:6], detail)

    def finish(self, run: int, status: RunStatus, detail: str = "") -> None:
        """End a run. One that was rolled back or got stuck also ends the wish that it served."""
        with self._write():
            self.set_run_status(run, status, detail)
            if status in (RunStatus.ROLLED_BACK, RunStatus.STUCK):
                record = self.run(run)
                self.set_desired(None if record is None else record.previous)

    def run(self, run: int) -> Run | None:
        """Return one run with its steps."""
        row = self._row("runs", "WHERE id = ?", (run,))
        return None if row is None else self._run_of(row)

    def unfinished(self) -> Run | None:
        """Return the run that was begun and neither finished nor rolled back."""
        states = tuple(status.value for status in UNFINISHED)
        row = self._row("runs", "WHERE status IN (?, ?, ?) ORDER BY id DESC LIMIT 1", states)
        return None if row is None else self._run_of(row)

    def runs(self, limit: int = 20) -> tuple[Run, ...]:
        """Return the newest runs, newest first."""
        rows = self._rows("runs", "ORDER BY id DESC LIMIT ?", (limit,))
        return tuple(self._run_of(row) for row in rows)

    def _run_of(self, row: Row) -> Run:
        number, boot_id, status, plan, previous, started_wall_s, detail = row
        entries = self._rows("entries", "WHERE run = ? ORDER BY position", (number,))
        return Run(
            id=int(number),
            boot_id=boot_id,
            status=RunStatus(status),
            plan=self._decode(plan, Plan, f"plan of run {number}"),
            previous=None
            if previous is None
            else self._decode(previous, Layout, f"layout before run {number}"),
            started_wall_s=started_wall_s,
            detail=detail,
            entries=tuple(
                self._decode(entry[2], Entry, f"step {entry[1]} of run {number}")
                for entry in entries
            ),
        )
