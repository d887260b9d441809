"""The process that keeps one shared device: `python -m alloy_agent.conformance.gate.keeper`.

It runs the control loop, answers on a socket who may join, lets go of tenants that have ended, and
leaves when nobody has been there for a while. What it knows stands in `status.json` beside the
pages, once a second, for `share status`, the audit and metrics.

Rules that stay true in here:

* Whatever an earlier keeper froze is thawed before anything else.
* One keeper a device: the second one finds the lock taken and leaves.
* The socket is root's alone; a request is one JSON line of bounded length.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import selectors
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

import msgspec

from alloy_agent.conformance.gate.build import library
from alloy_agent.conformance.gate.device import RENEW_S, TICK_S, SharedDevice
from alloy_agent.conformance.gate.freezer import Freezer
from alloy_agent.conformance.rate import RateLimits
from alloy_agent.errors import AlloyError, BackendError, ConfigError
from alloy_agent.host.cgroups import detect
from alloy_agent.host.clock import boottime_s
from alloy_agent.model import Value

EMULATED: Final = "emulated"
ALONE_S: Final = 5.0
START_S: Final = 20.0
REQUEST_BYTES: Final = 64 << 10
NAME_LENGTH: Final = 64


class Join(Value, frozen=True, kw_only=True):
    """A tenant asks to share the device."""

    name: str
    role: str
    pid: int
    weight: float = 1.0
    cgroup: str = ""
    uid: int | None = None
    budget_ratio: float | None = None


class Keeper:
    """One device's loop, its socket and the tenants' lifetimes."""

    def __init__(self, device: str, folder: Path) -> None:
        self._folder, self._device = folder, device
        self._lock = os.open(folder / "keeper.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        topology = detect()
        self._tree = topology.unified
        self._cgroups: dict[str, str] = {}
        freezer = Freezer(topology, folder / "frozen") if topology.hierarchies else None
        if freezer is not None:
            freezer.recover()
        self.shared = SharedDevice(device, folder, freezer=freezer)
        self._pids: dict[str, int] = {}
        self._environment = {"LD_PRELOAD": str(library(folder.parent / "lib"))}
        self._emulator: subprocess.Popen[bytes] | None = None
        if device == EMULATED:
            self._emulate()
        path = folder / "keeper.sock"
        path.unlink(missing_ok=True)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(str(path))
        path.chmod(0o600)
        self._socket.listen(16)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._socket, selectors.EVENT_READ)

    def _emulate(self) -> None:
        """Start the emulated accelerator, which goes when the keeper goes."""
        path = self._folder / "device.sock"
        module = "alloy_agent.silicon.accelerator.server"
        self._emulator = subprocess.Popen(
            [sys.executable, "-m", module, str(path)], stdout=subprocess.PIPE
        )
        if self._emulator.stdout is not None:
            self._emulator.stdout.readline()
        self._environment |= {
            "ALLOY_EMU_SOCKET": str(path),
            "ALLOY_EMU_LIBRARY": str(library(self._folder.parent / "lib", emulated=True)),
        }

    def run(self) -> None:
        """Keep the device until nobody is there any more."""
        due_s = told_s = busy_s = boottime_s()
        try:
            while True:
                now_s = boottime_s()
                if now_s >= due_s:
                    self.shared.tick()
                    self._let_go()
                    due_s = max(due_s + TICK_S, now_s)
                else:
                    self.shared.renew()
                if now_s - told_s >= 1.0:
                    self._tell()
                    told_s = now_s
                busy_s = now_s if self._pids else busy_s
                if now_s - busy_s > ALONE_S:
                    return
                if self._selector.select(RENEW_S):
                    self._answer()
        finally:
            self.close()

    def close(self) -> None:
        """Shut the gates, thaw, and take the traces away."""
        self.shared.close()
        self._socket.close()
        for name in ("keeper.sock", "status.json"):
            (self._folder / name).unlink(missing_ok=True)
        if self._emulator is not None:
            self._emulator.kill()
            self._emulator.wait()

    def join(self, request: Join) -> dict[str, str]:
        """Take a tenant in and return its environment."""
        fine = request.name.replace("-", "").replace("_", "").replace(".", "").isalnum()
        if not fine or len(request.name) > NAME_LENGTH or request.name.startswith("."):
            raise ConfigError(f"tenant {request.name!r} is no name", cure="use letters and digits")
        if request.name in self._pids:
            raise ConfigError(f"tenant {request.name} runs already", cure="give another --name")
        environment = self.shared.add(
            request.name,
            request.role,
            weight=request.weight,
            cgroup=request.cgroup,
            uid=request.uid,
        )
        if request.budget_ratio is not None and request.role == "production":
            self.shared.limits = RateLimits(budget_ratio=request.budget_ratio)
        self._pids[request.name] = request.pid
        self._cgroups[request.name] = request.cgroup
        return {**environment, **self._environment}

    def _let_go(self) -> None:
        for name, pid in list(self._pids.items()):
            if not Path(f"/proc/{pid}").exists():
                del self._pids[name]
                self.shared.remove(name)
                self._clear(self._cgroups.pop(name, ""))

    def _clear(self, path: str) -> None:
        """Remove the cgroup that a tenant had, and what stood above it for this device."""
        while path and self._tree is not None:
            with contextlib.suppress(OSError):
                Path(self._tree.folder(path)).rmdir()
            path = path.rpartition("/")[0]

    def _tell(self) -> None:
        path = self._folder / "status.json"
        fresh = path.with_suffix(".fresh")
        fresh.write_bytes(msgspec.json.encode(self.shared.status()))
        fresh.replace(path)

    def _answer(self) -> None:
        peer, _ = self._socket.accept()
        with peer, contextlib.suppress(OSError):
            peer.settimeout(0.02)  # a peer that dawdles must not cost the neighbours their lease
            peer.sendall(json.dumps(self._reply(peer.recv(REQUEST_BYTES))).encode())

    def _reply(self, raw: bytes) -> dict[str, Any]:
        try:
            return {"environment": self.join(msgspec.json.decode(raw, type=Join))}
        except (AlloyError, msgspec.DecodeError) as exc:
            cure = exc.cure if isinstance(exc, AlloyError) else ""
            return {"error": getattr(exc, "message", str(exc)), "cure": cure}


def join(device: str, root: Path, request: Join) -> dict[str, str]:
    """Return the environment of a new tenant; start the device's keeper if there is none.

    Raises:
        BackendError: No keeper came up, or it does not answer.
        ConfigError: The keeper refuses.
    """
    folder = root / device
    folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    end_s = time.monotonic() + START_S
    started: subprocess.Popen[bytes] | None = None
    while time.monotonic() < end_s:
        try:
            reply = _ask(folder / "keeper.sock", msgspec.json.encode(request))
        except OSError:
            if started is None or started.poll() is not None:
                started = _start(device, folder)
            time.sleep(0.05)
            continue
        if "error" in reply:
            raise ConfigError(str(reply["error"]), cure=str(reply.get("cure", "")))
        return {str(k): str(v) for k, v in reply["environment"].items()}
    raise BackendError(
        f"the keeper of {device} does not come up", cure=f"read {folder / 'keeper.log'}"
    )


def statuses(root: Path) -> tuple[dict[str, Any], ...]:
    """Return the status of every shared device that has a keeper."""
    found = []
    for path in sorted(root.glob("*/status.json")):
        with contextlib.suppress(OSError, ValueError):
            found.append(json.loads(path.read_bytes()))
    return tuple(found)


def _ask(path: Path, request: bytes) -> dict[str, Any]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
        peer.settimeout(5.0)
        peer.connect(str(path))
        peer.sendall(request)
        reply = json.loads(peer.recv(REQUEST_BYTES) or b'{"error": "no answer"}')
        return dict(reply)


def _start(device: str, folder: Path) -> subprocess.Popen[bytes]:
    with (folder / "keeper.log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", __name__, device, str(folder)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=log,
            start_new_session=True,
        )


def main(arguments: list[str]) -> int:
    """Keep one device; where another keeper does, leave it to that one."""
    try:
        keeper = Keeper(arguments[0], Path(arguments[1]))
    except BlockingIOError:
        return os.EX_TEMPFAIL
    keeper.run()
    return os.EX_OK


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
