"""The emulated accelerator as a process: `python -m alloy_agent.silicon.accelerator.server SOCKET`.

Each connection is a context. A message is a launch (kernel number, microseconds); an answer is the
number of launches completed so far. The one-byte message `?` asks who has a context, as a driver's
list of processes tells it; the answer is JSON. Time is slept, then spun for the last bit, so that
completions are as punctual as the host allows.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import selectors
import socket
import struct
import sys
import time
from pathlib import Path
from typing import Final

from alloy_agent.silicon.accelerator.engine import Engine, Mode, Work

LAUNCH: Final = struct.Struct("<2I")
DONE: Final = struct.Struct("<Q")
PEER: Final = struct.Struct("3i")  # pid, uid, gid. Source: unix(7), struct ucred
QUESTION: Final = b"?"
ANSWER_MOST: Final = 512  # contexts in one answer
SPIN_S: Final = 150e-6
LONGEST_US: Final = 10_000_000
FETCH: Final = 256
OWED_S: Final = 0.002


class Server:
    """One device, its listening socket and its contexts."""

    def __init__(
        self, path: Path, mode: Mode = Mode.ROUND_ROBIN, alone_s: float = math.inf
    ) -> None:
        """Listen.

        Args:
            path: Of the socket.
            mode: How contexts share it.
            alone_s: The process ends once nobody has had a context for so long.
        """
        path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(path))
        path.chmod(0o666)
        self._listener.listen(128)
        self._listener.setblocking(False)
        self.engine = Engine(mode, now_s=time.monotonic())
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        self._contexts: dict[str, socket.socket] = {}
        self._done: dict[str, int] = {}
        self._pids: dict[str, int] = {}
        self._owed: set[str] = set()  # contexts that could not be told their count
        self._made = 0
        self._alone_s, self._used_s = alone_s, time.monotonic()

    def run(self) -> None:
        """Serve until nobody has been there for a while."""
        while self._contexts or time.monotonic() - self._used_s < self._alone_s:
            self.turn()

    def turn(self) -> None:
        """Wait for the next launch or completion, and handle it."""
        due_s = self.engine.next_s()
        wait_s = None if due_s == math.inf else max(0.0, due_s - time.monotonic() - SPIN_S)
        if self._owed:
            wait_s = OWED_S if wait_s is None else min(wait_s, OWED_S)
        if not self._contexts and self._alone_s < math.inf:
            wait_s = 0.5
        for key, _ in self._selector.select(wait_s):
            if key.data is None:
                self._accept()
            else:
                self._receive(key.data)
        self._complete(time.monotonic())

    def _complete(self, now_s: float) -> None:
        changed, self._owed = self._owed, set()
        for work in self.engine.advance(now_s):
            self._done[work.context] = self._done.get(work.context, 0) + 1
            changed.add(work.context)
        for context in changed:
            peer = self._contexts.get(context)
            if peer is None:
                continue
            try:
                peer.send(DONE.pack(self._done[context]))
            except BlockingIOError:
                self._owed.add(context)  # it has not read for long: the last count must reach it
            except OSError:
                continue  # it has gone; its end of file comes by itself

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError):
            peer, _ = self._listener.accept()
            peer.setblocking(False)
            self._made += 1
            context = f"context-{self._made}"
            self._contexts[context] = peer
            raw = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER.size)
            self._pids[context] = PEER.unpack(raw)[0]
            self._selector.register(peer, selectors.EVENT_READ, context)

    def _receive(self, context: str) -> None:
        peer = self._contexts[context]
        for _ in range(FETCH):
            try:
                message = peer.recv(64)
            except BlockingIOError:
                return
            except OSError:
                message = b""
            if message == QUESTION:
                self._tell(peer)
                continue
            if len(message) != LAUNCH.size:
                self._leave(context)
                return
            ident, duration_us = LAUNCH.unpack(message)
            now_s = time.monotonic()
            self._complete(now_s)
            duration_s = max(1, min(duration_us, LONGEST_US)) * 1e-6
            self.engine.submit(Work(context, duration_s, 1, ident), now_s)

    def _tell(self, peer: socket.socket) -> None:
        """Say which processes have contexts, and how many launches of each have completed."""
        known = list(self._contexts)[-ANSWER_MOST:]
        contexts = [{"pid": self._pids[c], "completed": self._done.get(c, 0)} for c in known]
        with contextlib.suppress(OSError):
            peer.send(json.dumps({"contexts": contexts}).encode())

    def _leave(self, context: str) -> None:
        self._used_s = time.monotonic()
        self._pids.pop(context, None)
        peer = self._contexts.pop(context)
        self._selector.unregister(peer)
        peer.close()
        self._done.pop(context, None)
        self._owed.discard(context)
        self.engine.drop(context)


def main(arguments: list[str]) -> int:
    """Run the device until it is killed, or alone: `SOCKET [MODE [SECONDS]]`."""
    server = Server(
        Path(arguments[0]),
        Mode(arguments[1]) if len(arguments) > 1 else Mode.ROUND_ROBIN,
        float(arguments[2]) if len(arguments) > 2 else math.inf,
    )
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    with contextlib.suppress(KeyboardInterrupt):
        server.run()
    return os.EX_OK


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
