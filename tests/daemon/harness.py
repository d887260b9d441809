"""A real daemon in a process of its own, and the command line beside it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from alloy_agent.host.cgroupfs import detect

WAIT_S = 60.0  # generous: the machines that run this are shared


def wait_for(what: str, look: Callable[[], Any], within_s: float = WAIT_S) -> Any:
    """Return the first true answer of `look`, or fail saying what did not come."""
    until_s = time.monotonic() + within_s
    while True:
        found = look()
        if found:
            return found
        if time.monotonic() > until_s:
            raise AssertionError(f"{what} did not come within {within_s:g} s")
        time.sleep(0.02)


class Site:
    """One state directory with the variables that keep it apart from other agents."""

    def __init__(self, folder: Path, *fakes: str, cpu: bool = False) -> None:
        self.folder = folder
        self.state = folder / "state"
        self.root = f"alloy-test-{uuid.uuid4().hex[:10]}"
        self.globals = ["--state-dir", str(self.state)]
        for fake in fakes:
            self.globals += ["--fake", fake]
        self.environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith("ALLOY_")},
            "ALLOY_METRICS_ADDRESS": "127.0.0.1:0",
            "ALLOY_CPU_CGROUP_ROOT": self.root,
            "ALLOY_BACKENDS_CPU": "on" if cpu else "off",
            "ALLOY_SAMPLER_RAISE_PRIORITY": "false",
        }

    def command(self, *arguments: str) -> list[str]:
        """Return the command line of one command."""
        return [sys.executable, "-m", "alloy_agent", *self.globals, *arguments]

    def run(
        self, *arguments: str, stdin: str | None = None, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """Run one command to its end."""
        return subprocess.run(
            self.command(*arguments),
            env={**self.environment, **environment},
            input=stdin,
            capture_output=True,
            text=True,
            timeout=WAIT_S,
            check=False,
        )

    def document(self, *arguments: str) -> dict[str, Any]:
        """Return the document that a command prints."""
        done = self.run(*arguments)
        assert done.stdout, done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def partitions(self) -> list[dict[str, Any]]:
        """Return all partitions that the node shows now."""
        return [p for d in self.document("devices", "--json")["devices"] for p in d["partitions"]]

    def cgroups(self) -> list[Path]:
        """Return every cgroup below this site's root, in every hierarchy."""
        found = []
        for hierarchy in detect().hierarchies:
            top = Path(hierarchy.folder(self.root))
            if top.is_dir():
                found += [p for p in sorted(top.rglob("*")) if p.is_dir()]
        return found

    def clean(self) -> None:
        """Remove what is left of this site's cgroups."""
        for path in sorted(self.cgroups(), key=lambda p: -len(p.parts)):
            with contextlib.suppress(OSError):
                path.rmdir()
        for hierarchy in detect().hierarchies:
            with contextlib.suppress(OSError):
                Path(hierarchy.folder(self.root)).rmdir()


class DaemonProcess:
    """`alloy-agent run` with its log."""

    def __init__(self, site: Site, *arguments: str, **environment: str) -> None:
        self.site = site
        self.log_path = site.folder / f"log-{uuid.uuid4().hex[:6]}"
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                site.command("--log-format", "json", "run", *arguments),
                env={**site.environment, **environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def log(self) -> list[dict[str, Any]]:
        """Return the events logged so far."""
        lines = self.log_path.read_text(encoding="utf-8", errors="replace").splitlines()
        return [json.loads(line) for line in lines if line.startswith("{")]

    def events(self, name: str) -> list[dict[str, Any]]:
        """Return the events of one name."""
        return [event for event in self.log() if event.get("event") == name]

    def wait_event(self, name: str, count: int = 1) -> dict[str, Any]:
        """Return the `count`th event of a name once it is there."""

        def look() -> list[dict[str, Any]]:
            assert self.process.poll() is None or self.events(name), self.log_path.read_text()
            found = self.events(name)
            return found if len(found) >= count else []

        events: list[dict[str, Any]] = wait_for(f"event {name}", look)
        return events[count - 1]

    def ready(self) -> DaemonProcess:
        """Return when the daemon says that it is ready."""
        self.wait_event("ready")
        return self

    def url(self, page: str) -> str:
        """Return the address of a page."""
        found = re.search(r"http://[^/]+", str(self.wait_event("serving")["addresses"]))
        assert found is not None
        return f"{found[0]}/{page}"

    def get(self, page: str) -> tuple[int, str]:
        """Return status and text of a page."""
        try:
            with urllib.request.urlopen(self.url(page), timeout=20) as answer:  # noqa: S310
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as exc:
            return exc.code, exc.read().decode()

    def workers(self) -> list[int]:
        """Return the pids of the worker processes."""
        path = Path(f"/proc/{self.process.pid}/task")
        found: list[int] = []
        with contextlib.suppress(OSError):
            for task in path.iterdir():
                found += [int(pid) for pid in (task / "children").read_text().split()]
        return found

    def signal(self, number: signal.Signals) -> None:
        """Send a signal."""
        self.process.send_signal(number)

    def stop(self) -> int:
        """Stop it as a service manager does and return its exit code."""
        if self.process.poll() is None:
            self.process.terminate()
        return self.process.wait(WAIT_S)

    def kill(self) -> None:
        """Kill it where it stands."""
        self.process.kill()
        self.process.wait(WAIT_S)


@contextlib.contextmanager
def daemon(site: Site, *arguments: str, **environment: str) -> Iterator[DaemonProcess]:
    """Give a ready daemon and end it whatever happens."""
    running = DaemonProcess(site, *arguments, **environment)
    try:
        yield running.ready()
    finally:
        if running.process.poll() is None:
            running.kill()


def gone(pid: int) -> bool:
    """Whether a process has ended (a zombie counts: it runs no more)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return True
    return stat.rpartition(")")[2].split()[0] == "Z"
