"""What `alloy-agent top` costs at 10 Hz: a real daemon of 8 devices with 7 partitions each.

The command runs in a terminal of its own, once as wide as it must work at least (80 columns, 24
lines) and once large enough for every row. Its CPU time is read from the kernel over a span in
which it draws ten times a second; so is what the daemon pays for answering it. Starting up (reading
the interpreter's modules, the first picture) is not part of the span.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from benchmarks.report import Result

DEVICES: Final = 8
PIECES: Final = 7
PROMISE_PERCENT: Final = 3.0
SPAN_S: Final = 30.0
SPAN_QUICK_S: Final = 8.0
START_S: Final = 60.0
SETTLE_S: Final = 3.0  # until there is a history to draw
FIRST_BYTES: Final = 500  # more than the terminal is greeted with
SIZES: Final = ((80, 24), (160, 70))
LAYOUT: Final = f"""version: v1
layouts:
  full:
    - match: {{vendor: nvidia}}
      mig: [{", ".join(["1g.10gb"] * PIECES)}]
"""


class Node:
    """A daemon on simulated silicon, in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith("ALLOY_")},
            "ALLOY_METRICS_ENABLED": "false",
            "ALLOY_BACKENDS_CPU": "off",
            "ALLOY_STATE_DIR": str(folder / "state"),
            "ALLOY_SOCKET_PATH": str(folder / "agent.sock"),
            "ALLOY_FAKE": f"{DEVICES}xH100-SXM5-80GB",
        }

    def command(self, *words: str) -> list[str]:
        """Return the command line of one command."""
        return [sys.executable, "-m", "alloy_agent", *words]

    def ask(self, *words: str) -> str:
        """Return what a command prints."""
        done = subprocess.run(
            self.command(*words),
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=START_S,
            check=True,
        )
        return done.stdout


@contextlib.contextmanager
def node(folder: Path) -> Iterator[tuple[Node, int]]:
    """Give a node that is cut and sampled, and the daemon's pid."""
    made = Node(folder)
    layout = folder / "layout.yaml"
    layout.write_text(LAYOUT)
    made.environment["ALLOY_LAYOUT_FILE"] = str(layout)
    with (folder / "log").open("wb") as log:
        daemon = subprocess.Popen(made.command("run"), env=made.environment, stdout=log, stderr=log)
    try:
        _settle(made, daemon)
        yield made, daemon.pid
    finally:
        daemon.terminate()
        daemon.wait(30)


def _settle(made: Node, daemon: subprocess.Popen[bytes]) -> None:
    """Wait until every partition is there and measured."""
    until_s = time.monotonic() + START_S
    while time.monotonic() < until_s and daemon.poll() is None:
        with contextlib.suppress(subprocess.CalledProcessError, json.JSONDecodeError):
            pieces = json.loads(made.ask("top", "--json"))["partitions"]
            if len(pieces) == DEVICES * PIECES and all(
                piece["active_ratio"] is not None for piece in pieces
            ):
                return
        time.sleep(0.5)
    raise RuntimeError(f"the node did not come up: {(made.folder / 'log').read_text()[-2000:]}")


def cpu_s(pid: int) -> float:
    """Return the CPU time of a process, all its threads together."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Terminal:
    """A terminal that reads all that is drawn, and counts it."""

    def __init__(self, command: list[str], environment: dict[str, str], size: tuple[int, int]):
        self.drawn = 0
        self.pictures = 0
        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", size[1], size[0], 0, 0))
        self.process = subprocess.Popen(
            command, env=environment, stdin=slave, stdout=slave, stderr=slave, close_fds=True
        )
        os.close(slave)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # EIO: the other side is gone
            while chunk := os.read(self.master, 65536):
                self.drawn += len(chunk)
                self.pictures += 1  # one write each; some may come together on a busy machine

    def wait_drawn(self) -> None:
        """Return once there is a picture."""
        until_s = time.monotonic() + START_S
        while self.drawn < FIRST_BYTES:
            if self.process.poll() is not None or time.monotonic() > until_s:
                raise RuntimeError("top ended, or drew nothing")
            time.sleep(0.1)

    def close(self) -> None:
        """End the program."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(30)
        self._reader.join(5)
        os.close(self.master)


def watch(made: Node, daemon: int, size: tuple[int, int], span_s: float) -> tuple[float, ...]:
    """Return percent of a core for `top` and for the daemon, and bytes and pictures a second."""
    environment = {**made.environment, "TERM": "xterm-256color"}
    terminal = Terminal(made.command("top", "--interval", "0.1"), environment, size)
    try:
        terminal.wait_drawn()
        time.sleep(SETTLE_S)
        begun_s, own_s, daemon_s = time.monotonic(), cpu_s(terminal.process.pid), cpu_s(daemon)
        drawn, pictures = terminal.drawn, terminal.pictures
        time.sleep(span_s)
        took_s = time.monotonic() - begun_s
        own = 100 * (cpu_s(terminal.process.pid) - own_s) / took_s
        answering = 100 * (cpu_s(daemon) - daemon_s) / took_s
        rate_hz = (terminal.pictures - pictures) / took_s
        return own, answering, (terminal.drawn - drawn) / took_s, rate_hz
    finally:
        terminal.close()


def measure(quick: bool) -> list[Result]:
    """Return the CPU of the command in each size of terminal."""
    from benchmarks.report import Result

    span_s = SPAN_QUICK_S if quick else SPAN_S
    results = []
    with tempfile.TemporaryDirectory(prefix="alloy-top-") as folder, node(Path(folder)) as at:
        made, daemon = at
        idle_s, begun_s = cpu_s(daemon), time.monotonic()
        time.sleep(span_s / 2)
        alone = 100 * (cpu_s(daemon) - idle_s) / (time.monotonic() - begun_s)
        for size in SIZES:
            own, answering, drawn, rate_hz = watch(made, daemon, size, span_s)
            results.append(
                Result(
                    what=f"alloy-agent top at 10 Hz, {DEVICES * PIECES} partitions, "
                    f"{size[0]}x{size[1]}: CPU of one core",
                    figure=own,
                    unit="%",
                    sense="<=",
                    promise=PROMISE_PERCENT,
                    samples=round(span_s * 10),
                    note=f"{rate_hz:.1f} pictures and {drawn:.0f} bytes a second; "
                    f"the daemon: {answering:.1f} % while it is watched, {alone:.1f} % alone",
                )
            )
    return results


if __name__ == "__main__":
    from benchmarks.report import main

    sys.exit(main("top", measure))
