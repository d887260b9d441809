"""The MPS control daemons of this host: what each gives its clients, asked of the daemon itself.

A client takes the lower of its server's and its own percentage, and fixes it when it makes its
context. The daemon answers the driver's own control program over its pipe directory; what that
pipe carries is not documented, the program's commands are. So the program is run, one command a
run, below bounds of time and size. Where it cannot be run the environment of the processes tells
what they were started with, and the fact says that nobody was asked.

Rules that stay true in here:

* Only this host's own program is run, and only while nobody but root or ourselves can change it:
  a process that calls itself a daemon never decides what runs.
* An answer that is not exactly of the form expected is no answer.
* A daemon is a process in the host's own namespaces of users, mounts and pids: root of a container
  is nobody here, whatever it calls itself.
* What a daemon of somebody else's claims is told with its user; it is never proof.

Source: NVIDIA Multi-Process Service, "nvidia-cuda-mps-control" commands, "Environment Variables";
namespaces(7).
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import selectors
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

from alloy_agent.backends.nvidia.processes import name_of, pids
from alloy_agent.host.clock import boottime_s

CONTROL: Final = "nvidia-cuda-mps-control"
SERVER: Final = "nvidia-cuda-mps-server"
PROGRAM: Final = "usr/bin/nvidia-cuda-mps-control"
NAMESPACES: Final = ("user", "mnt", "pid")
PIPES: Final = "/tmp/nvidia-mps"  # noqa: S108 - the vendor's default, not ours
_COMM_MAX: Final = 15  # the kernel cuts names there; control and server then read the same
PERCENTAGE: Final = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
PINNED: Final = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"
PIPE_NAME: Final = "CUDA_MPS_PIPE_DIRECTORY"
ASK_S: Final = 3.0  # for all questions to one daemon
KEPT_S: Final = 5.0
ANSWER_MAX: Final = 1 << 16
SERVERS_MAX: Final = 16
PIDS_MAX: Final = 4096
PID_TOP: Final = 1 << 22  # the kernel's PID_MAX_LIMIT
_NUMBER: Final = re.compile(r"[0-9]{1,3}(?:\.[0-9]{1,6})?", re.ASCII)


class Control(NamedTuple):
    """A control daemon as its process shows it; None where it was not told anything."""

    pid: int
    thread_percentage: float | None
    pinned_memory: str | None
    pipes: str
    uid: int | None


class Server(NamedTuple):
    """A server as its daemon tells of it; None: it does not answer for it."""

    pid: int
    thread_percentage: float | None
    clients: tuple[int, ...] | None


class Answer(NamedTuple):
    """What a daemon answered."""

    thread_percentage: float
    servers: tuple[Server, ...]


def daemons(proc: Path) -> tuple[Control | None, tuple[int, ...]]:
    """Return the control daemon, if any, and the pids of its servers; root's daemon first.

    Only the host's own processes count, as process 1 tells what the host is.
    """
    controls, servers = [], []
    for pid in pids(proc):
        if name_of(proc, pid) != CONTROL[:_COMM_MAX] or not of_host(proc, pid):
            continue
        command = _command(proc, pid)
        if SERVER in command:
            servers.append(pid)
        elif CONTROL in command:
            environment = _environment(proc, pid)
            controls.append(
                Control(
                    pid,
                    _percentage(environment),
                    environment.get(PINNED),
                    environment.get(PIPE_NAME, PIPES),
                    _uid(proc, pid),
                )
            )
    controls.sort(key=lambda control: (control.uid != 0, control.pid))
    return (controls[0] if controls else None), tuple(servers)


def of_host(proc: Path, pid: int) -> bool:
    """Whether a process is in the host's own namespaces; one that cannot be looked at is not."""
    try:
        return all(
            os.readlink(proc / str(pid) / "ns" / kind) == os.readlink(proc / "1/ns" / kind)  # noqa: PTH115 - no path, a name
            for kind in NAMESPACES
        )
    except OSError:
        return False


def thread_percentage(proc: Path, pid: int) -> float | None:
    """Return what a client limits itself to; None: it does not, or cannot be looked at."""
    return _percentage(_environment(proc, pid))


# --- asking ---


class Asker:
    """Asks daemons through the host's control program; answers are kept for some seconds."""

    def __init__(
        self, root: Path, clock: Callable[[], float] = boottime_s, ask_s: float = ASK_S
    ) -> None:
        """Ask nobody yet.

        Args:
            root: Where the host's `/usr` and `/proc` are.
            clock: Boot time in seconds, by which answers are kept.
            ask_s: For all questions to one daemon.
        """
        self._root, self._clock, self._ask_s = root, clock, ask_s
        self._kept: tuple[float, Control, Answer | str] | None = None

    def ask(self, control: Control) -> Answer | str:
        """Return what a daemon answers, or why it was not asked or gave no answer."""
        now_s = self._clock()
        kept = self._kept
        if kept is not None and kept[1] == control and now_s - kept[0] < KEPT_S:
            return kept[2]
        answer = self._asked(control)
        self._kept = (now_s, control, answer)
        return answer

    def _asked(self, control: Control) -> Answer | str:
        program = self._root / PROGRAM
        trouble = untrusted(program)
        if trouble:
            return trouble
        pipes = self._pipes(control)
        deadline_s = boottime_s() + self._ask_s

        def told(*words: str) -> str:
            left_s = deadline_s - boottime_s()
            return _run(str(program), " ".join(words), pipes, left_s)

        try:
            default = parse_percentage(told("get_default_active_thread_percentage"))
            servers = parse_pids(told("get_server_list"))[:SERVERS_MAX]
            return Answer(default, tuple(_server(told, pid) for pid in servers))
        except (OSError, ValueError) as error:
            return f"MPS control daemon {control.pid} gives no answer: {error}"

    def _pipes(self, control: Control) -> str:
        """Return the pipe directory as this process reaches it."""
        proc = self._root / "proc"
        try:
            same = os.readlink(proc / str(control.pid) / "ns/mnt") == os.readlink(  # noqa: PTH115
                proc / "self/ns/mnt"
            )
        except OSError:
            same = True
        return control.pipes if same else f"{proc}/{control.pid}/root{control.pipes}"


def _server(told: Callable[..., str], pid: int) -> Server:
    percentage = clients = None
    with contextlib.suppress(ValueError):
        percentage = parse_percentage(told("get_active_thread_percentage", str(pid)))
    with contextlib.suppress(ValueError):
        clients = parse_pids(told("get_client_list", str(pid)))
    return Server(pid, percentage, clients)


def untrusted(program: Path) -> str:
    """Return why a program is not run as the host's own; "" if it may be."""
    try:
        info = program.stat()
    except OSError as error:
        return f"{program} cannot be run to ask the MPS daemon: {error.strerror}"
    if not stat.S_ISREG(info.st_mode) or not info.st_mode & 0o111:
        return f"{program} is no program"
    if info.st_uid not in {0, os.geteuid()} or info.st_mode & 0o022:
        return f"{program} can be changed by others than root, so it is not run"
    return ""


def _run(program: str, command: str, pipes: str, left_s: float) -> str:
    """Return what the control program prints for one command.

    Raises:
        ValueError: Too late, too long, no text, or it failed.
        OSError: It cannot be started.
    """
    if left_s <= 0:
        raise ValueError("it takes too long")
    with subprocess.Popen(
        [program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={PIPE_NAME: pipes},
        cwd="/",
    ) as run:
        try:
            if run.stdin is None or run.stdout is None:
                raise ValueError("it has no pipes")
            with contextlib.suppress(BrokenPipeError):
                run.stdin.write(f"{command}\n".encode())
                run.stdin.close()
            raw = _read(run.stdout.fileno(), left_s)
            if run.wait(timeout=max(0.1, left_s)):
                raise ValueError(f"{command} fails")
        except subprocess.TimeoutExpired as error:
            raise ValueError("it takes too long") from error
        finally:
            run.kill()
    return raw.decode("ascii")


def _read(handle: int, left_s: float) -> bytes:
    """Return all that is written to a pipe, within bounds of time and size."""
    end_s, found = boottime_s() + left_s, b""
    with selectors.DefaultSelector() as ready:
        ready.register(handle, selectors.EVENT_READ)
        while True:
            wait_s = end_s - boottime_s()
            if wait_s <= 0 or not ready.select(wait_s):
                raise ValueError("it takes too long")
            part = os.read(handle, ANSWER_MAX)
            if not part:
                return found
            found += part
            if len(found) > ANSWER_MAX:
                raise ValueError(f"its answer has more than {ANSWER_MAX} bytes")


def parse_percentage(text: str) -> float:
    """Return a percentage above 0 and up to 100.

    Raises:
        ValueError: It is none.
    """
    word = text.strip()
    value = float(word) if _NUMBER.fullmatch(word) else math.nan
    if not 0 < value <= 100:
        raise ValueError(f"{word[:40]!r} is no percentage")
    return value


def parse_pids(text: str) -> tuple[int, ...]:
    """Return the pids of an answer, one a line; none is an answer too.

    Raises:
        ValueError: A line is no pid, or there are too many.
    """
    words = text.split()
    if len(words) > PIDS_MAX:
        raise ValueError(f"it tells {len(words)} pids")
    for word in words:
        if not (word.isascii() and word.isdecimal() and len(word) <= 7 and 0 < int(word) < PID_TOP):
            raise ValueError(f"{word[:40]!r} is no pid")
    return tuple(int(word) for word in words)


# --- what processes show ---


def _percentage(environment: dict[str, str]) -> float | None:
    try:
        value = float(environment[PERCENTAGE])
    except (KeyError, ValueError):
        return None
    return value if 0 < value <= 100 else None


def _command(proc: Path, pid: int) -> str:
    try:
        return (proc / str(pid) / "cmdline").read_bytes().split(b"\0")[0].decode(errors="replace")
    except OSError:
        return ""


def _environment(proc: Path, pid: int) -> dict[str, str]:
    try:
        raw = (proc / str(pid) / "environ").read_bytes().decode(errors="replace")
    except OSError:
        return {}
    return dict(entry.split("=", 1) for entry in raw.split("\0") if "=" in entry)


def _uid(proc: Path, pid: int) -> int | None:
    try:
        for line in (proc / str(pid) / "status").read_text(errors="replace").splitlines():
            if line.startswith("Uid:"):
                return int(line.split()[2])  # effective
    except (OSError, ValueError, IndexError):
        return None
    return None
