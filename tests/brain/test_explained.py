"""What a brain answered can be explained, whatever happens to it right after the answer."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from alloy_brain import decision
from alloy_brain.ledger import Ledger

ROOT = Path(__file__).resolve().parents[2]

PLACED = """
import asyncio, os, signal, sys
from alloy_brain.broker import Broker, Order, RefusedError, digest_of
from alloy_brain.facts import Demand, Policy, Wish
from alloy_brain.ledger import Ledger
from benchmarks.brain import _Yes, known_fleet

folder, memory = sys.argv[1:]
ledger = Ledger(f"{folder}/brain.db", "boot")
ledger.begin_term()
fleet = known_fleet(40)
broker = Broker(fleet, ledger, Policy(), "brain")
broker.links = {name: _Yes() for name in fleet.nodes}
broker._write_all = broker._write
seen = []


def short_only(record):
    # What follows the answer never comes: the process is gone.
    if record.omitted:
        broker._write_all(record)


broker._write = short_only


async def place():
    wish = Wish(request="r-1", tenant="t", demands=(Demand(count=3, memory_bytes=int(memory)),))
    order = Order(
        wish=wish, digest=digest_of(wish), reserve_ttl_ms=10_000, lease_ttl_ms=0,
        reserve_only=False, dry_run=False, attempts=3,
    )
    try:
        reply = await broker.place(order)
        print(reply.lease, reply.decision, flush=True)
    except RefusedError as exc:
        print("refused", exc.refusal.decision, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


asyncio.run(place())
"""


@pytest.mark.parametrize(("memory", "placed"), [(8 << 30, True), (8 << 50, False)])
def test_an_answer_is_explained_after_a_kill_right_behind_it(
    tmp_path: Path, memory: int, placed: bool
) -> None:
    """Killed -9 as soon as the client was told, the decision is on disk: what, why and on what.

    A choice can be made again from it; the nodes that were not chosen are counted, not told.
    """
    done = subprocess.run(
        [sys.executable, "-c", PLACED, str(tmp_path), str(memory)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    lease, ident = done.stdout.split()
    ledger = Ledger(f"{tmp_path}/brain.db", "boot")
    body = ledger.decision(id_=ident)
    assert body is not None
    record = decision.unpack(body)
    assert record.placed is placed
    told = decision.document(record)
    assert told["omitted_nodes"] == record.omitted > 0
    if placed:
        assert lease == record.lease == told["lease"]
        assert ledger.decision(lease=lease) == body
        assert told["replayed"] is True
        chosen = [c for c in told["candidates"] if c["chosen"]]
        assert sum(len(c["chosen"]) for c in chosen) == 3
        assert all(c["open"] and c["gates"] for c in chosen)
    else:
        assert record.choice.refusal
        assert told["replayed"] is None
    ledger.close()


def test_the_whole_record_takes_the_place_of_the_short_one(tmp_path: Path) -> None:
    """Of one decision there is one record: the later, fuller one, with what became of it."""
    ledger = Ledger(f"{tmp_path}/brain.db", "boot")
    ledger.record("d-1", "r-1", "l-1", placed=True, body=b"short")
    ledger.record("d-1", "r-1", "", placed=False, body=b"whole")
    assert ledger.decision(id_="d-1") == b"whole"
    assert ledger.decision(lease="l-1") is None
    ledger.close()
