"""Pages that tell of what cannot be: the keeper's memory and its loop stay as they are."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alloy_agent.conformance.gate.device import SharedDevice, TenantStatus, merged
from alloy_agent.conformance.gate.pages import STATE_BYTES, OrderPage, StatePage
from alloy_agent.conformance.rate import RateState
from alloy_agent.conformance.sequential import AuditState
from alloy_agent.errors import BackendError
from tests.rate.conftest import PRODUCTION, Bench, controlled, eventually

# all rings of the page told anew in each look: of work far ahead, or of more than there can be
LIAR = """
import mmap, os, struct, sys, time
HEAD, SLOT, RING = 4096, 256 + 256 * 48, 256
ahead = int(sys.argv[1])
with open(os.environ["ALLOY_GATE_STATE"], "r+b") as file:
    page = mmap.mmap(file.fileno(), 0)
born = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
told = 0
while True:
    told += 248
    now = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    ring = b"".join(
        struct.pack("<6Q", now + 2 * n, now + 2 * n + 1 + ahead, now + 2 * n, 1, 1, 0)
        for n in range(RING)
    )
    for slot in range(64):
        at = HEAD + slot * SLOT
        page[at + 256 : at + SLOT] = ring
        head = [born, told, told, now, now, told, 1, 0, now, 0, 0, 0]
        page[at : at + 104] = struct.pack("<2I12Q", os.getpid(), 1, *head)
    print(told, flush=True)
    time.sleep(0.05)
"""


def neighbour(shared: SharedDevice) -> TenantStatus:
    return next(t for t in shared.status().tenants if t.name == "n")


@pytest.mark.parametrize(
    ("ahead_ns", "word"), [(10**15, "at another time"), (0, "more busy periods")]
)
def test_invented_work_is_found_out_and_no_longer_read(
    bench: Bench, ahead_ns: int, word: str
) -> None:
    """Rings full of inventions cost the neighbour its lease, and the keeper remembers little."""
    shared = bench.share()
    theirs = shared.add("n", "opportunistic")
    liar = bench.start([sys.executable, "-c", LIAR, str(ahead_ns)], theirs)
    with controlled(shared):
        assert eventually(lambda: word in neighbour(shared).trouble)
        assert eventually(lambda: not neighbour(shared).leased)
        ticks = shared.status().ticks
        assert eventually(lambda: shared.status().ticks > ticks + 20)
    assert liar.poll() is None


@given(
    st.lists(
        st.tuples(st.floats(0, 100), st.floats(0, 1)).map(lambda s: (s[0], s[0] + s[1])),
        max_size=200,
    ),
    st.integers(1, 50),
)
@settings(max_examples=200, deadline=None)
def test_merged_spans_are_few_and_cover_what_there_was(
    spans: list[tuple[float, float]], most: int
) -> None:
    """No more than asked for, in order, apart from one another; no span is lost."""
    found = merged(spans, most)
    assert len(found) <= most
    assert all(one[1] < two[0] for one, two in pairwise(found))
    assert all(any(b <= begin and end <= e for b, e in found) for begin, end in spans)


def test_a_verdict_ends_with_its_production_tenant(bench: Bench) -> None:
    """The next production tenant begins with no verdict, no baseline and no evidence."""
    bench.device()
    shared = bench.share()
    ours = shared.add("p", "production")
    bench.tenant(PRODUCTION, ours)
    assert eventually(lambda: shared.tick().baseline != RateState().baseline)
    shared.audit = AuditState(log_e=35.0, highest_log_e=35.0, windows=40, alarms=1, alarmed=True)
    assert shared.status().e_value > 1e6
    shared.remove("p")
    shared.add("q", "production")
    assert shared.state.baseline == RateState().baseline
    found = shared.status()
    assert (found.answer, found.windows) == ("undecided", 0)
    assert found.e_value <= 1.0


@pytest.fixture
def small() -> Iterator[Path]:
    """A tmpfs of two megabytes, which ends with the test."""
    if os.geteuid():
        pytest.skip("needs root for a file system of its own")
    with tempfile.TemporaryDirectory() as folder:
        mount = ["/usr/bin/mount", "-t", "tmpfs", "-o", "size=2m", "alloy-test", folder]
        subprocess.run(mount, check=True)
        try:
            yield Path(folder)
        finally:
            subprocess.run(["/usr/bin/umount", "--lazy", folder], check=True)


@pytest.mark.host
def test_a_full_file_system_is_an_error_in_one_line(small: Path) -> None:
    """Where a page has no room it is not made; with room again, all goes on."""
    shared = SharedDevice("emulated", small / "share")
    theirs = shared.add("n", "opportunistic")
    state = Path(theirs["ALLOY_GATE_STATE"])
    with state.open("r+b") as page, pytest.raises(OSError, match="No space"):
        os.posix_fallocate(page.fileno(), 0, 4 << 20)
    os.truncate(state, 4 << 20)
    with (small / "rest").open("wb", buffering=0) as rest, contextlib.suppress(OSError):
        while rest.write(bytes(1 << 12)):
            pass
    with pytest.raises(BackendError, match="No space") as told:
        shared.add("m", "opportunistic")
    assert str(small) in (told.value.cure or "")
    assert not (small / "share" / "m.state").exists()
    shared.tick()
    assert neighbour(shared).trouble == "its page was made longer"
    assert not neighbour(shared).leased
    found = StatePage(state)
    assert found.mend() == "its page was made longer"
    assert state.stat().st_size == STATE_BYTES
    assert found.mend() == ""
    found.close()
    shared.remove("n")
    (small / "rest").unlink()
    shared.add("m", "opportunistic")
    shared.tick()
    assert neighbours_leased(shared) == {"m"}
    shared.close()


def neighbours_leased(shared: SharedDevice) -> set[str]:
    return {t.name for t in shared.status().tenants if t.leased}


def test_a_page_of_another_length_is_not_mapped(tmp_path: Path) -> None:
    """An order page that was cut short is refused, not mapped: reading it would end the process."""
    path = tmp_path / "n.order"
    OrderPage(path, "opportunistic").close()
    os.truncate(path, 16)
    with pytest.raises(BackendError, match="is no page"):
        OrderPage(path, "opportunistic", adopt=True)


def test_production_that_makes_its_page_longer_is_cut_back(bench: Bench) -> None:
    """Production's page gets its length back at the next look, and goes on."""
    shared = bench.share()
    ours = shared.add("p", "production")
    state = Path(ours["ALLOY_GATE_STATE"])
    os.truncate(state, 2 * STATE_BYTES)
    shared.tick()
    assert state.stat().st_size == STATE_BYTES
