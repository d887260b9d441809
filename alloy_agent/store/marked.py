"""The numbers that never go down, over restarts, reboots and the loss of the state file."""

from __future__ import annotations

from alloy_agent.store import files
from alloy_agent.store.database import Database
from alloy_agent.store.files import MARK_BLOCK, Marks


class MarkedDatabase(Database):
    """Epoch, highest fencing token and the ceilings that guard them."""

    _marks: Marks = Marks()

    def _raise_marks(self, *, token: int = 0, generation: int = 0, epoch: int = 0) -> None:
        """Put ceilings above these numbers on disk, before anyone is told one of them."""
        marks = self._marks
        wanted = Marks(
            token_ceiling=_ceiling(marks.token_ceiling, token),
            generation_ceiling=_ceiling(marks.generation_ceiling, generation),
            epoch=max(marks.epoch, epoch),
        )
        if wanted != marks:
            self._write_marks(wanted)

    def _write_marks(self, marks: Marks) -> None:
        files.write_marks(self.path.parent, marks)
        self._marks = marks

    def _settle_marks(self, *, lost: bool, unclean: bool) -> None:
        """Join the marks on disk with the database at open.

        `lost`: the database is a rebuilt one, so all counting goes on above the marks. `unclean`:
        its log may have lost its tail to damage, so the fencing numbers do.
        """
        found = files.read_marks(self.path.parent)
        if found is None:
            files.put_marks_aside(self.path.parent)
        marks = found or (files.last_resort_marks() if lost else Marks())
        self._marks = marks
        with self._write():
            if lost:
                self.set_meta("generation_floor", str(marks.generation_ceiling))
            if lost or (unclean and found is not None):
                self.set_meta("highest_token", str(max(self.highest_token(), marks.token_ceiling)))
            self.set_meta("epoch", str(max(self.epoch(), marks.epoch)))
        self._raise_marks(
            token=self.highest_token(), generation=self._highest_generation(), epoch=self.epoch()
        )
        if found is None:
            self._write_marks(self._marks)

    def _highest_generation(self) -> int:
        rows = self._rows("generations")
        return max((int(row[2]) for row in rows), default=0)

    def highest_token(self) -> int:
        """Return the highest fencing token that this node has ever given out or seen."""
        return int(self.meta("highest_token") or 0)

    def raise_token(self, token: int) -> int:
        """Note a token, durably, before it is told to anyone, and return the highest one."""
        if token <= self.highest_token():
            return self.highest_token()
        with self._write():
            highest = max(token, self.highest_token())
            self._raise_marks(token=highest)
            self.set_meta("highest_token", str(highest))
        return highest

    def epoch(self) -> int:
        """Return the epoch of the agent's present run."""
        return int(self.meta("epoch") or 0)

    def next_epoch(self) -> int:
        """Begin a new epoch, durably, and return it; once at each start of the daemon."""
        with self._write():
            epoch = self.epoch() + 1
            self._raise_marks(epoch=epoch)
            self.set_meta("epoch", str(epoch))
        return epoch


def _ceiling(ceiling: int, number: int) -> int:
    if number < ceiling:
        return ceiling
    return (number // MARK_BLOCK + 1) * MARK_BLOCK
