"""The emulated accelerator of those who have no other, as a keeper has it.

It is a process of its own that outlives its keeper while tenants use it, as a device would, and
ends by itself once nobody has had a context for a while. The keeper holds a context of its own.
"""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
from pathlib import Path
from typing import Final

from alloy_agent.conformance.gate.build import library
from alloy_agent.errors import BackendError
from alloy_agent.host import interpreter

ALONE_S: Final = 5.0
ANSWER_BYTES: Final = 64 << 10
ANSWER_S: Final = 1.0
MODULE: Final = "alloy_agent.silicon.accelerator.server"


class Emulator:
    """One emulated device and our connection to it."""

    def __init__(self, folder: Path, libraries: Path) -> None:
        """Take up the device that is there, or start one.

        Raises:
            BackendError: It does not come up.
        """
        self.path = folder / "device.sock"
        self.library = library(libraries, emulated=True)
        self._process: subprocess.Popen[bytes] | None = None
        peer = _connected(self.path)
        if peer is None:
            self._start()
            peer = _connected(self.path)
        if peer is None:
            self.close()
            raise BackendError("the emulated device does not come up", cure=f"look at {folder}")
        self._peer = peer

    def _start(self) -> None:
        where = str(self.path.absolute())
        self._process = subprocess.Popen(
            interpreter.module(MODULE, where, "round_robin", str(ALONE_S)),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            start_new_session=True,
            env=interpreter.environment(),
            cwd=interpreter.FOLDER,
        )
        if self._process.stdout is not None:
            self._process.stdout.readline()

    @property
    def environment(self) -> dict[str, str]:
        """What leads a tenant to the device."""
        return {"ALLOY_EMU_SOCKET": str(self.path), "ALLOY_EMU_LIBRARY": str(self.library)}

    def holders(self) -> frozenset[int] | None:
        """Return the processes that have a context, None where the device does not say."""
        try:
            self._peer.send(b"?")
            contexts = json.loads(self._peer.recv(ANSWER_BYTES))["contexts"]
            return frozenset(int(context["pid"]) for context in contexts)
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def close(self) -> None:
        """End a device that we started; leave another one to itself."""
        with contextlib.suppress(AttributeError, OSError):
            self._peer.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            if self._process.stdout is not None:
                self._process.stdout.close()

    def leave(self) -> None:
        """Let go of the device and leave it to its users."""
        self._peer.close()
        if self._process is not None and self._process.stdout is not None:
            self._process.stdout.close()


def _connected(path: Path) -> socket.socket | None:
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    peer.settimeout(ANSWER_S)
    try:
        peer.connect(str(path))
    except OSError:
        peer.close()
        return None
    return peer
