"""A TCP proxy that can become a black hole, break connections, or leave them half open."""

from __future__ import annotations

import contextlib
import socket
import threading
import time


class Proxy:
    """Forwards connections to a port while `open`; otherwise swallows everything silently."""

    def __init__(self, port: int) -> None:
        self.port_behind = port
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self.listener.getsockname()[1])
        self.open = threading.Event()
        self.open.set()
        self.stopping = False
        self.connections = 0
        self.pairs: list[tuple[socket.socket, socket.socket]] = []
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self) -> None:
        while not self.stopping:
            try:
                near, _ = self.listener.accept()
                far = socket.create_connection(("127.0.0.1", self.port_behind))
            except OSError:
                continue
            self.connections += 1
            self.pairs.append((near, far))
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=self.pump, args=(source, sink), daemon=True).start()

    def pump(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while chunk := source.recv(65536):
                while not self.open.is_set():  # what a black hole holds is lost with it
                    if self.stopping:
                        return
                    time.sleep(0.01)
                sink.sendall(chunk)
        if self.open.is_set():
            for one in (source, sink):
                with contextlib.suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)

    def cut(self) -> None:
        """Break all connections."""
        pairs, self.pairs = self.pairs, []
        for pair in pairs:
            for one in pair:
                with contextlib.suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)
                one.close()

    def stop(self) -> None:
        self.stopping = True
        self.open.set()
        self.cut()
        with contextlib.suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
