"""A container that boots: the host's own system below, a systemd of its own, nothing kept.

The root is an overlay over the host's, so nothing is downloaded for it; only one target of ours is
started in it, none of the host's services. It has a boot id, a network, processes and a journal
of its own. The control groups are the host's, as far as the host has version 1 of them: whoever
starts an agent in here gives it a `cgroup_root` of its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.machine.wheels import ROOT, StepError, collect, run

BOOT_S = 240.0
TOOLS = ("systemd-nspawn", "nsenter", "unshare", "mount")
TARGET = "alloy-test.target"
UNITS = {
    TARGET: "[Unit]\nRequires=sysinit.target\nAfter=sysinit.target\nAllowIsolate=yes\n",
    # The container's manager gets version 1 controllers read-only; a real host has them writable.
    "open-cgroups.service": "[Unit]\nBefore=alloy-agent.service\n"
    "[Service]\nType=oneshot\nRemainAfterExit=yes\n"
    "ExecStart=/bin/sh -c 'for d in /sys/fs/cgroup/*/; do mount -o remount,rw,bind $d; done'\n"
    f"[Install]\nWantedBy={TARGET}\n",
}
JOIN = 'while [ "$1" != -- ]; do echo $$ > "$1/cgroup.procs"; shift; done; shift; exec "$@"'


class NoContainerError(Exception):
    """This host mounts no overlay over its own root."""


@dataclass(frozen=True)
class Done:
    """What became of a command."""

    rc: int
    out: str
    err: str


def missing() -> str:
    """Return why no such container can be had here, or nothing."""
    if os.geteuid() != 0:
        return "not root"
    absent = [tool for tool in TOOLS if shutil.which(tool) is None]
    if not Path("/lib/systemd/systemd").exists():
        absent.append("systemd")
    return f"not installed: {', '.join(absent)}" if absent else ""


class Container:
    """One container, booted on entry and thrown away on exit.

    Args:
        folder: Where its layers are.
        name: Unique on this host.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self.root = folder / "root"
        self._folder = folder
        self._name = name
        self._process: subprocess.Popen[bytes] | None = None

    # --- life ---

    def __enter__(self) -> Self:
        for part in ("root", "upper", "work"):
            (self._folder / part).mkdir(parents=True)
        layers = f"lowerdir=/,upperdir={self._folder}/upper,workdir={self._folder}/work"
        try:
            run("mount", "-t", "overlay", "overlay", "-o", layers, str(self.root))
        except StepError as exc:
            raise NoContainerError(str(exc)) from exc
        try:
            self._furnish()
            self.boot()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end()

    def _furnish(self) -> None:
        """Install the agent by the documented lines, from a folder of wheels, with no network."""
        wheels = self._folder / "wheels"
        asked = ["/usr/bin/python3", "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
        version = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
        collect(wheels, version)
        shutil.rmtree(self.root / "opt/wheels", ignore_errors=True)
        shutil.copytree(wheels, self.root / "opt/wheels")
        offline = "--no-index --find-links /opt/wheels"
        run(
            *("unshare", "--net", "--mount", "chroot", str(self.root), "/bin/sh", "-ec"),
            "unset VIRTUAL_ENV PIP_CONFIG_FILE\n"
            "export PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root\n"
            "mount -t proc proc /proc; mount -t devtmpfs dev /dev\n"
            "rm -rf /usr/local/bin/alloy-* /opt/pipx /var/lib/alloy /etc/alloy /run/alloy\n"
            f"/usr/bin/python3 -m venv /opt/i && /opt/i/bin/pip -q install {offline} pipx\n"
            f"/opt/i/bin/pipx install --global --quiet --pip-args='{offline}' alloy-agent\n",
        )
        units = self.root / "etc/systemd/system"
        for name, text in UNITS.items():
            (units / name).write_text(text)
        shutil.copy(ROOT / "systemd/alloy-agent.service", units)
        wants = units / f"{TARGET}.wants"
        wants.mkdir()
        (wants / "open-cgroups.service").symlink_to("../open-cgroups.service")
        (self.root / "etc/machine-id").write_text("")
        (self.root / "etc/fstab").write_text("")
        shutil.rmtree(self.root / "var/log/journal", ignore_errors=True)

    def boot(self) -> None:
        """Start the container and wait until its target is reached."""
        with (self._folder / "console").open("ab") as console:
            self._process = subprocess.Popen(
                [
                    *("/bin/sh", "-ec", JOIN, "sh", *map(str, self._own_groups()), "--"),
                    *("systemd-nspawn", "--quiet", "--register=no", "--keep-unit", "--boot"),
                    *("--private-network", f"--machine={self._name}", f"--hostname={self._name}"),
                    *(
                        "--directory",
                        str(self.root),
                        "--capability=all",
                        "--kill-signal=SIGRTMIN+3",
                    ),
                    f"systemd.unit={TARGET}",
                ],
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=console,
            )
        self.wait("the target is reached", self.booted, BOOT_S)

    def _own_groups(self) -> list[Path]:
        """Return groups made for the container's manager, where it makes its own."""
        found = []
        for controllers, mount, path in _hierarchies():
            if controllers in ("", "name=systemd"):
                group = Path(f"{mount}{path}") / self._name
                group.mkdir(exist_ok=True)
                found.append(group)
        return found

    def booted(self) -> bool:
        """Whether the target is reached."""
        assert self._process is not None
        assert self._process.poll() is None, f"the container is gone: {self.tail()}"
        return self._leader() > 0 and self.run("systemctl", "is-active", TARGET).rc == 0

    def power_off(self) -> None:
        """Shut down orderly, as before a reboot; `boot` starts the same root again."""
        assert self._process is not None
        self._process.terminate()
        self._process.wait(timeout=BOOT_S)

    def _end(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=BOOT_S)
            self._process.kill()
            self._process.wait(timeout=30)
        subprocess.run(["/bin/umount", "--lazy", str(self.root)], check=False)
        for place in places(self._name):
            remove_groups(place)

    def tail(self) -> str:
        """Return the console's last lines."""
        return (self._folder / "console").read_text(errors="replace")[-3000:]

    # --- commands ---

    def _leader(self) -> int:
        """Return the pid of the container's first process, or 0."""
        assert self._process is not None
        pid = self._process.pid
        with contextlib.suppress(OSError, IndexError):
            return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])
        return 0

    def run(self, *argv: str, stdin: str = "", timeout_s: float = 120.0) -> Done:
        """Do a command inside and return what became of it."""
        inside = ("nsenter", "--target", str(self._leader()))
        spaces = ("--mount", "--uts", "--ipc", "--net", "--pid", "--cgroup")
        clean = ("/usr/bin/env", "-i", "PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")
        done = subprocess.run(
            [*inside, *spaces, "--", *clean, "HOME=/root", "LC_ALL=C.UTF-8", *argv],
            input=stdin,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
        return Done(rc=done.returncode, out=done.stdout, err=done.stderr)

    def ok(self, *argv: str, stdin: str = "", timeout_s: float = 120.0) -> str:
        """Do a command that must succeed; return what it printed."""
        done = self.run(*argv, stdin=stdin, timeout_s=timeout_s)
        assert done.rc == 0, (
            f"{' '.join(argv)}: exit {done.rc}\n{done.out}\n{done.err}\n{self.journal()}"
        )
        return done.out

    def json(self, *argv: str) -> Any:
        """Do a command that prints a document; return it."""
        return json.loads(self.ok(*argv))

    def journal(self) -> str:
        """Return what the agent's unit has said last."""
        return self.run("journalctl", "-u", "alloy-agent", "-n", "40", "--no-pager").out

    def show(self, name: str) -> str:
        """Return a property of the agent's unit."""
        return self.ok("systemctl", "show", "alloy-agent", "--value", "-p", name).strip()

    def put(self, path: str, text: str) -> None:
        """Put a file in place."""
        target = self.root / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)

    def wait(self, what: str, holds: Callable[[], bool], timeout_s: float = 240.0) -> None:
        """Wait until a condition holds.

        Raises:
            AssertionError: It does not in time.
        """
        end_s = time.monotonic() + timeout_s
        while not holds():
            assert time.monotonic() < end_s, f"not in {timeout_s} s: {what}\n{self.tail()}"
            time.sleep(0.1)


def places(name: str) -> list[Path]:
    """Return where a control group of this name may be, at the top or below this process's own."""
    found = {
        Path(f"{mount}{base}") / name
        for _, mount, path in _hierarchies()
        for base in ("", path.rstrip("/"))
    }
    return sorted(found)


def remove_groups(top: Path) -> None:
    """Remove a control group and those below it."""
    if top.is_dir():
        for folder, _, _ in sorted(os.walk(top), reverse=True):
            with contextlib.suppress(OSError):
                Path(folder).rmdir()


def _hierarchies() -> Iterator[tuple[str, str, str]]:
    """Yield controllers, mount point and this process's path of each mounted hierarchy."""
    mounts = {}
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields = line.split()
        kind = fields[fields.index("-") + 1]
        if kind == "cgroup2":
            mounts[""] = fields[4]
        elif kind == "cgroup":
            mounts.update(dict.fromkeys(fields[-1].split(","), fields[4]))
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        mount = mounts.get(controllers.split(",")[0])
        if mount is not None:
            yield controllers, mount, path
