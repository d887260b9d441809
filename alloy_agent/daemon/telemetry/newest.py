"""The newest reading of every signal of the node, in columns over all pages.

Whoever looks at all signals at once (gates, the brain's samples) reads these columns, and makes no
object of a signal. A column's place is fixed for as long as the pages are: `revision` tells when
places have moved.

Rules that stay true in here:

* A number that cannot be a reading (`telemetry.signals`) is none, as one that was never read.
* The age of a value is that of its source, and of its reading only where the source has no clock.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import le
from typing import TYPE_CHECKING, Final

from alloy_agent.telemetry import signals
from alloy_agent.worker.ring import NEVER

if TYPE_CHECKING:
    from alloy_agent.model import SignalSpec
    from alloy_agent.worker import Worker
    from alloy_agent.worker.ring import PageReader

NAN: Final = math.nan
# Codes of quality are those of `ring.QUALITIES`, by their order, and one more.
DOUBTED: Final = 254
VALUE, NOT_SUPPORTED, NOT_PERMITTED, STALE = range(4)
STALE_FLOOR_S: Final = 0.25
STALE_PERIODS: Final = 3.0


Columns = tuple[list[float], list[float], list[float], bytes]


class _Page:
    """One device's page, and what its signals can be."""

    def __init__(self, reader: PageReader, worker: Worker) -> None:
        self.reader = reader
        self.worker = worker
        self.can = [signals.possible(spec) for spec in reader.specs]
        self.lows = [can.low for can in self.can]
        self.highs = [can.high for can in self.can]
        self.never = frozenset().union(*(can.never for can in self.can))
        count = len(reader.specs)
        self.nothing: Columns = (
            [NAN] * count,
            [0.0] * count,
            [NAN] * count,
            bytes([NEVER]) * count,
        )


class Newest:
    """The columns of now; one thread at a time.

    Args:
        workers: Whose pages are read.
    """

    def __init__(self, workers: Sequence[Worker]) -> None:
        self._workers = workers
        self._pages: tuple[_Page, ...] = ()
        self._readers: list[PageReader] = []
        self.revision = 0
        self.specs: tuple[SignalSpec, ...] = ()
        self.places: dict[tuple[str, str], int] = {}  # by subject and name
        self.values: list[float] = []  # NaN: none
        self.times_s: list[float] = []  # of the source, else of the reading; 0: none
        self.refresh_s: list[float] = []  # measured; NaN: not yet
        self.codes = b""

    def take(self, now_s: float) -> None:
        """Read the newest frame of every page."""
        found = [(reader, worker) for worker in self._workers for reader in worker.pages().values()]
        readers = [reader for reader, _ in found]
        if readers != self._readers:
            self._turn_to(found)
            self._readers = readers
        values: list[float] = []
        times_s: list[float] = []
        refresh_s: list[float] = []
        codes: list[bytes] = []
        for page in self._pages:
            one = _columns(page, now_s)
            values += one[0]
            times_s += one[1]
            refresh_s += one[2]
            codes.append(one[3])
        self.values, self.times_s, self.refresh_s = values, times_s, refresh_s
        self.codes = b"".join(codes)

    def _turn_to(self, found: Sequence[tuple[PageReader, Worker]]) -> None:
        """Lay out the columns anew."""
        self._pages = tuple(_Page(reader, worker) for reader, worker in found)
        self.specs = tuple(spec for reader, _ in found for spec in reader.specs)
        self.places = {(spec.subject, spec.name): n for n, spec in enumerate(self.specs)}
        self.revision += 1

    def limit_s(self, place: int) -> float:
        """Return the age from which a value is stale for a decision."""
        refresh_s = self.refresh_s[place]
        if math.isnan(refresh_s):
            return signals.limit_s(self.specs[place])
        return max(signals.AGE_PERIODS * refresh_s, signals.AGE_FLOOR_S)


def _columns(page: _Page, now_s: float) -> Columns:
    """Return one page's values, times, refresh periods and codes."""
    block = page.reader.newest()
    if block is None or not block.slots:
        return page.nothing
    values, sources_s, reads_s, refresh_s, codes = block.columns()
    times_s = reads_s
    if not all(map(math.isnan, sources_s)):
        times_s = [
            read_s if math.isnan(source_s) else source_s
            for source_s, read_s in zip(sources_s, reads_s, strict=True)
        ]
    oldest_s = now_s - max(STALE_PERIODS * page.worker.period_s(), STALE_FLOOR_S)
    if (
        reads_s[0] >= oldest_s
        and reads_s.count(reads_s[0]) == len(reads_s)
        and not any(codes)
        and all(map(le, page.lows, values))
        and all(map(le, values, page.highs))
        and page.never.isdisjoint(values)
    ):
        return values, times_s, refresh_s, codes
    codes = _judged(page, values, reads_s, codes, oldest_s)
    return values, [0.0 if math.isnan(one) else one for one in times_s], refresh_s, codes


def _judged(
    page: _Page, values: list[float], reads_s: list[float], codes: bytes, oldest_s: float
) -> bytes:
    """Return the codes of a page where not all is well; takes numbers away that cannot be."""
    judged = bytearray(codes)
    for slot, (code, value, can) in enumerate(zip(codes, tuple(values), page.can, strict=True)):
        if code not in {VALUE, STALE}:
            values[slot] = NAN
        elif not math.isfinite(value):
            values[slot] = NAN
            judged[slot] = NOT_SUPPORTED if code == VALUE else code
        elif not can.low <= value <= can.high or value in can.never:
            values[slot] = NAN
            judged[slot] = DOUBTED
        elif code == VALUE and reads_s[slot] < oldest_s:
            judged[slot] = STALE
    return bytes(judged)
