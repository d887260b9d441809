"""The emulated accelerator as a process: `python -m alloy_agent.silicon.accelerator.server SOCKET`.

Each connection is a context. A message is a launch (kernel number, microseconds); an answer is the
number of launches completed so far. Time is slept, then spun for the last bit, so that completions
are as punctual as the host allows.
"""

from __future__ import annotations

import contextlib
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
SPIN_S: Final = 150e-6
LONGEST_US: Final = 10_000_000
FETCH: Final = 256


class Server:
    """One device, its listening socket and its contexts."""

    def __init__(self, path: Path, mode: Mode = Mode.ROUND_ROBIN) -> None:
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
        self._made = 0

    def run(self) -> None:
        """Serve for ever."""
        while True:
            self.turn()

    def turn(self) -> None:
        """Wait for the next launch or completion, and handle it."""
        due_s = self.engine.next_s()
        wait_s = None if due_s == math.inf else max(0.0, due_s - time.monotonic() - SPIN_S)
        for key, _ in self._selector.select(wait_s):
            if key.data is None:
                self._accept()
            else:
                self._receive(key.data)
        self._complete(time.monotonic())

    def _complete(self, now_s: float) -> None:
        changed = set()
        for work in self.engine.advance(now_s):
            self._done[work.context] = self._done.get(work.context, 0) + 1
            changed.add(work.context)
        for context in changed:
            peer = self._contexts.get(context)
            if peer is not None:
                with contextlib.suppress(OSError):
                    peer.send(DONE.pack(self._done[context]))

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError):
            peer, _ = self._listener.accept()
            peer.setblocking(False)
            self._made += 1
            context = f"context-{self._made}"
            self._contexts[context] = peer
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
            if len(message) != LAUNCH.size:
                self._leave(context)
                return
            ident, duration_us = LAUNCH.unpack(message)
            now_s = time.monotonic()
            self._complete(now_s)
            duration_s = max(1, min(duration_us, LONGEST_US)) * 1e-6
            self.engine.submit(Work(context, duration_s, 1, ident), now_s)

    def _leave(self, context: str) -> None:
        peer = self._contexts.pop(context)
        self._selector.unregister(peer)
        peer.close()
        self._done.pop(context, None)
        self.engine.drop(context)


def main(arguments: list[str]) -> int:
    """Run the device until it is killed."""
    server = Server(
        Path(arguments[0]), Mode(arguments[1]) if len(arguments) > 1 else Mode.ROUND_ROBIN
    )
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    with contextlib.suppress(KeyboardInterrupt):
        server.run()
    return os.EX_OK


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
