"""One backend in a process of its own, with deadlines, restarts and a shared ring of signals.

`client.Worker` is the control side and the only name that other rooms need; it is looked up when
asked for, so that the worker process itself does not pay for importing it.

    client.py        control side: spawn, calls with deadlines, supervision
    supervision.py   pure: back-off, and which device a crash is blamed on
    wire.py          frames and messages between the two
    main.py          worker side: reads frames, hands them to lanes, never blocks on a device
    lanes.py         one thread for each device; the gate that keeps calls from overlapping
    sampler.py       the deadline thread
    pace.py          pure: rates, bursts, the self-budget
    ring.py          shared memory: one page of signals for each device
    board.py         shared memory: heartbeat, counters, and who is inside which call
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from alloy_agent.worker.client import Worker, WorkerDownError, WorkerSettings

__all__ = ["Worker", "WorkerDownError", "WorkerSettings"]


def __getattr__(name: str) -> object:
    """Return the control side's names, imported on first use."""
    if name in __all__:
        from alloy_agent.worker import client

        return getattr(client, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
