"""How a keeper is asked, started and read, by the daemon and by commands."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from alloy_agent.conformance.gate.build import library
from alloy_agent.conformance.keeper.messages import (
    REQUEST_BYTES,
    STALE_S,
    Answer,
    Join,
    Request,
    ShareView,
)
from alloy_agent.conformance.keeper.names import device_name
from alloy_agent.errors import BackendError, ConfigError
from alloy_agent.host import interpreter
from alloy_agent.host.clock import boottime_s

START_S: Final = 60.0  # a busy host takes its time to start an interpreter
ANSWER_S: Final = 5.0
LOOK_AGAIN_S: Final = 0.05
SOCKET_PATH_BYTES: Final = 107  # Source: unix(7), sun_path
START_AGAIN_S: Final = 5.0
REFUSED: Final = "policy.refused"  # beside `status.json`: the keeper cannot tell it
REFUSED_BYTES: Final = 1024


def folder_of(root: Path, device: str) -> Path:
    """Return the folder of a shared device.

    Raises:
        ConfigError: The name cannot be one of a device, or the folder is too deep for sockets.
    """
    folder = root / device_name(device)
    if len(os.fsencode(folder / "keeper.sock")) > SOCKET_PATH_BYTES:
        raise ConfigError(f"{folder}: too long for a socket", cure="set a shorter socket_path")
    return folder


def ask(folder: Path, request: Request) -> Answer:
    """Return a keeper's answer.

    Raises:
        OSError: No keeper is there, or it does not answer.
        ConfigError: It refuses.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
        peer.settimeout(ANSWER_S)
        peer.connect(str(folder / "keeper.sock"))
        peer.sendall(msgspec.json.encode(request))
        raw = peer.recv(REQUEST_BYTES)
    try:
        answer = msgspec.json.decode(raw, type=Answer)
    except msgspec.MsgspecError as exc:
        raise OSError(f"no answer that makes sense: {exc}") from exc
    if answer.error:
        raise ConfigError(answer.error, cure=answer.cure)
    return answer


def join(device: str, root: Path, libraries: Path, request: Join) -> dict[str, str]:
    """Return the environment of a new tenant; start a keeper of our own if there is none.

    The gate is in `libraries`, or is built there.

    Raises:
        BackendError: No keeper came up, or it does not answer.
        ConfigError: The keeper refuses.
        UnsupportedError: There is no gate on this host, and no compiler to build it.
    """
    folder = folder_of(root, device)
    library(libraries)  # a host that cannot build it is told so at once
    folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    end_s = time.monotonic() + START_S
    again_s = 0.0
    while (now_s := time.monotonic()) < end_s:
        try:
            return ask(folder, request).environment
        except OSError:
            if now_s >= again_s:  # another one may have taken its place, and left meanwhile
                again_s = now_s + START_AGAIN_S
                _start(device, folder, libraries)
            time.sleep(LOOK_AGAIN_S)
    raise BackendError(
        f"the keeper of {device} does not come up", cure=f"read {folder / 'keeper.log'}"
    )


class Look(NamedTuple):
    """How the shared devices stand that could be read; `closed` says what this user may not."""

    views: tuple[ShareView, ...] = ()
    closed: str = ""


def look(root: Path) -> Look:
    """Return how every shared device stands that has a living keeper."""
    found, closed, now_s = [], "", boottime_s()
    try:
        folders = sorted(root.iterdir())
    except OSError as exc:
        return Look(closed=_closed(root) if isinstance(exc, PermissionError) else "")
    for folder in folders:
        try:
            body = (folder / "status.json").read_bytes()
            view = msgspec.json.decode(body, type=ShareView)
        except PermissionError:
            closed = _closed(folder)
            continue
        except (OSError, msgspec.MsgspecError):
            continue
        if 0.0 <= now_s - view.taken_at_s < STALE_S:
            why = refused(folder) if view.keeper == "agent" else ""
            found.append(msgspec.structs.replace(view, not_in_force=why))
    return Look(tuple(found), closed)


def views(root: Path) -> tuple[ShareView, ...]:
    """Return how every shared device stands that has a living keeper and may be read."""
    return look(root).views


def refused(folder: Path) -> str:
    """Return why the keeper of a device does not go by the agent's policy; empty: it does."""
    try:
        with (folder / REFUSED).open("rb") as stream:
            raw = stream.read(REFUSED_BYTES)
    except OSError:
        return ""
    return raw.decode("utf-8", "replace")


def tell_refused(folder: Path, reason: str) -> None:
    """Leave word that a keeper does not go by the agent's policy, or take it back."""
    path = folder / REFUSED
    if not reason:
        path.unlink(missing_ok=True)
        return
    fresh = path.with_suffix(".fresh")
    fresh.write_bytes(reason.encode("utf-8", "replace")[:REFUSED_BYTES])
    fresh.replace(path)


def _closed(path: Path) -> str:
    return f"{path}: not permitted for uid {os.geteuid()}"


def command(device: str, folder: Path, libraries: Path, *, emulate: bool, agent: bool) -> list[str]:
    """Return the command line of a keeper."""
    options = [*(["--emulate"] if emulate else []), *(["--agent"] if agent else [])]
    places = (str(folder.absolute()), str(libraries.absolute()))  # it stands in another folder
    return interpreter.module("alloy_agent.conformance.keeper", *options, device, *places)


def environment() -> dict[str, str]:
    """Return the environment of a keeper: it finds this package, and no gate is loaded into it."""
    return interpreter.environment(without={"LD_PRELOAD"})


def _start(device: str, folder: Path, libraries: Path) -> None:
    """Start a keeper that is nobody's child."""
    with (folder / "keeper.log").open("ab") as log:
        subprocess.run(
            command(device, folder, libraries, emulate=device == "emulated", agent=False),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=log,
            start_new_session=True,
            env=environment(),
            cwd=interpreter.FOLDER,
            check=False,
        )
