"""An MPS control daemon on a real socket, and a control program that talks to it.

The program is what the agent runs: it takes one command on its standard input, hands it to the
daemon through the pipe directory of its environment, and prints the answer, as the vendor's does.
What the vendor's program and daemon say to each other is not documented, and is made up here.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

PROGRAM = """#!{python} -IS
import os, socket, sys
command = sys.stdin.readline()
with socket.socket(socket.AF_UNIX) as link:
    try:
        link.connect(os.environ["CUDA_MPS_PIPE_DIRECTORY"] + "/control")
        link.sendall(command.encode())
        while part := link.recv(65536):
            os.write(1, part)
    except BrokenPipeError:
        pass
    except OSError:
        print("Cannot find MPS control daemon process")
        sys.exit(1)
"""


class MpsDaemon:
    """A daemon with servers and their clients. `answers` replaces the answer of a command."""

    def __init__(self, root: Path, pipes: Path) -> None:
        self.default = "100.0"
        self.servers: dict[int, tuple[str, tuple[int, ...]]] = {}
        self.answers: dict[str, bytes | Callable[[], bytes]] = {}
        self.commands: list[str] = []
        self._pipes = pipes
        pipes.mkdir(parents=True, exist_ok=True)
        self.program = root / "usr/bin/nvidia-cuda-mps-control"
        self.program.parent.mkdir(parents=True, exist_ok=True)
        self.program.write_text(PROGRAM.format(python=sys.executable))
        self.program.chmod(0o755)
        self._listener = socket.socket(socket.AF_UNIX)
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def __enter__(self) -> Self:
        self._listener.bind(str(self._pipes / "control"))
        self._listener.listen()
        self._thread.start()
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(30)

    def _serve(self) -> None:
        while True:
            try:
                link, _ = self._listener.accept()
            except OSError:
                return
            with link, contextlib.suppress(OSError):
                command = link.recv(4096).decode().strip()
                self.commands.append(command)
                link.sendall(self._answer(command))

    def _answer(self, command: str) -> bytes:
        name, _, argument = command.partition(" ")
        scripted = self.answers.get(name)
        if scripted is not None:
            return scripted() if callable(scripted) else scripted
        if name == "get_default_active_thread_percentage":
            return f"{self.default}\n".encode()
        if name == "get_server_list":
            return "".join(f"{pid}\n" for pid in self.servers).encode()
        percentage, clients = self.servers.get(int(argument or 0), ("", ()))
        if name == "get_active_thread_percentage":
            return f"{percentage}\n".encode()
        return "".join(f"{pid}\n" for pid in clients).encode()


def endless() -> bytes:
    """Return more than anybody reads."""
    return b"1\n" * (1 << 20)


def never() -> bytes:
    """Answer too late for one who waits half a second."""
    time.sleep(2)
    return b""
