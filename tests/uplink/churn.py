"""An agent's uplink against a brain that is stopped and started all the time; prints its growth.

Run as `churn.py brain` it serves and restarts for ever and prints its port; as
`churn.py agent PORT FOLDER WARM STREAMS` it lives through so many streams, the first ones to warm
up, and prints one JSON object.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from pathlib import Path
from typing import Any

from alloy_agent.daemon import memory
from tests.uplink.brains import Brain, serve, until
from tests.uplink.conftest import Agent, settings


class Restarting(Brain):
    """Remembers which events it has, and nothing else."""

    def event(self, stream: Any, message: Any) -> None:
        super().event(stream, message)
        self.events.clear()
        self.order.clear()


def brain() -> None:
    """Serve one stream after another, each by a new server on the same port."""
    known = Restarting()
    server, port = serve(known)
    print(port, flush=True)
    while True:
        before = dict(known.high)
        until(lambda b=before: known.streams and known.high != b, "a stream with an event")  # type: ignore[misc]
        known.streams.clear()
        known.bodies.clear()
        server.stop(0).wait(10)
        server, _ = serve(known, f"127.0.0.1:{port}")


def resident_bytes() -> int:
    """Return how much memory this process has to itself."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Private_Dirty:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("no Private_Dirty")


def agent(port: int, folder: Path, warm: int, streams: int) -> dict[str, float]:
    """Return what living through a number of streams did to this process."""
    memory.one_arena()  # as the daemon does
    made = Agent(folder)
    uplink = made.dial(settings(port, reconnect_min_s=0.01, reconnect_max_s=0.05))
    began: tuple[int, int] = (0, 0)
    last = 0
    while uplink.state().streams < warm + streams:
        state = uplink.state()
        if state.streams != last and state.connected:
            last = state.streams
            made.finding(f"F{last}")
        if last >= warm and began == (0, 0):
            gc.collect()
            began = (last, resident_bytes())
        time.sleep(0.002)
    until(lambda: made.outbox.waiting == 0, "every event acknowledged")
    gc.collect()
    state = uplink.state()
    grown = resident_bytes() - began[1]
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    threads = len(list(Path("/proc/self/task").iterdir()))
    made.close()
    return {
        "streams": state.streams - began[0],
        "grown_bytes": grown,
        "descriptors": descriptors,
        "threads": threads,
        "waiting": state.events_waiting,
    }


if __name__ == "__main__":
    if sys.argv[1] == "brain":
        brain()
    else:
        warm_up, wanted = int(sys.argv[4]), int(sys.argv[5])
        print(json.dumps(agent(int(sys.argv[2]), Path(sys.argv[3]), warm_up, wanted)))
