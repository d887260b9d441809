"""One running machine, and the commands that it is asked to do."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.machine.image import Image

BOOT_S = 240.0
MEMORY = "1536M"
# Emulation runs everywhere; where the host can start foreign guests (`-accel kvm`), say so there.
ACCELERATION = tuple(os.environ.get("ALLOY_TEST_QEMU", "-accel tcg,thread=multi -cpu max").split())
CPUS = 4


@dataclass(frozen=True)
class Done:
    """What became of a command."""

    rc: int
    out: str
    err: str

    def json(self) -> Any:
        """Return the document that it printed."""
        return json.loads(self.out)


class Machine:
    """A guest: started on entry, thrown away on exit. The image's disk is never written."""

    def __init__(self, image: Image, folder: Path, cpus: int = CPUS) -> None:
        self.console = folder / "console"
        self._image = image
        self._path = folder / "port"
        self._cpus = cpus
        self._buffer = b""
        self._count = 0
        self.boot_id = ""

    def __enter__(self) -> Self:
        image = self._image
        self._process = subprocess.Popen(
            [
                *("qemu-system-x86_64", *ACCELERATION, "-smp", str(self._cpus)),
                *("-m", MEMORY, "-nodefaults", "-no-user-config", "-display", "none"),
                *("-kernel", str(image.kernel), "-initrd", str(image.initrd)),
                *("-append", "console=ttyS0 panic=-1 systemd.unified_cgroup_hierarchy=1"),
                *("-drive", f"file={image.disk},format=raw,if=virtio,snapshot=on"),
                *("-device", "virtio-serial", "-device", "virtio-rng-pci"),
                *("-chardev", f"socket,id=port,path={self._path},server=on,wait=off"),
                *("-device", "virtserialport,chardev=port,name=alloy.test"),
                *("-serial", f"file:{self.console}"),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        try:
            self._connect()
            self._hello()
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

    def _end(self) -> None:
        self._process.kill()
        self._process.wait(timeout=30)

    def _connect(self) -> None:
        end_s = time.monotonic() + 30
        self._socket = socket.socket(socket.AF_UNIX)
        while True:
            try:
                self._socket.connect(str(self._path))
            except OSError:
                if self._process.poll() is not None or time.monotonic() > end_s:
                    raise AssertionError(f"no machine: {self._words()}") from None
                time.sleep(0.05)
            else:
                return

    def _words(self) -> str:
        if self._process.poll() is not None and self._process.stderr is not None:
            return self._process.stderr.read().decode(errors="replace")
        return self.tail()

    def tail(self) -> str:
        """Return the console's last lines."""
        text = self.console.read_text(errors="replace") if self.console.exists() else ""
        return text[-3000:]

    def _line(self, timeout_s: float) -> dict[str, Any]:
        end_s = time.monotonic() + timeout_s
        while b"\n" not in self._buffer:
            self._socket.settimeout(max(0.01, end_s - time.monotonic()))
            try:
                part = self._socket.recv(1 << 16)
            except TimeoutError:
                raise AssertionError(f"no word from the machine: {self.tail()}") from None
            if not part:
                raise AssertionError(f"the machine is gone: {self._words()}")
            self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\n")
        found: dict[str, Any] = json.loads(line)
        return found

    def _hello(self) -> None:
        while True:
            line = self._line(BOOT_S)
            if "boot_id" in line:
                self.boot_id = line["boot_id"]
                return

    def run(self, *argv: str, stdin: str = "", timeout_s: float = 120.0) -> Done:
        """Do a command and return what became of it."""
        self._count += 1
        what = {"id": self._count, "argv": argv, "stdin": stdin, "timeout_s": timeout_s}
        self._socket.settimeout(timeout_s)
        self._socket.sendall(json.dumps(what).encode() + b"\n")
        while True:
            line = self._line(timeout_s + 60)
            if line.get("id") == self._count:
                return Done(rc=line["rc"], out=line["out"], err=line["err"])

    def ok(self, *argv: str, stdin: str = "", timeout_s: float = 120.0) -> str:
        """Do a command that must succeed; return what it printed."""
        done = self.run(*argv, stdin=stdin, timeout_s=timeout_s)
        assert done.rc == 0, f"{' '.join(argv)}: exit {done.rc}\n{done.out}\n{done.err}"
        return done.out

    def sh(self, script: str, timeout_s: float = 120.0) -> str:
        """Do a shell script that must succeed; return what it printed."""
        return self.ok("sh", "-ec", script, timeout_s=timeout_s)

    def write(self, path: str, text: str) -> None:
        """Put a file in place."""
        self.ok("sh", "-ec", f'mkdir -p "$(dirname {path})" && cat > {path}', stdin=text)

    def wait(self, what: str, holds: Callable[[], bool], timeout_s: float = 90.0) -> None:
        """Wait until a condition holds.

        Raises:
            AssertionError: It does not in time.
        """
        end_s = time.monotonic() + timeout_s
        while not holds():
            assert time.monotonic() < end_s, f"not in {timeout_s} s: {what}"
            time.sleep(0.2)

    def reboot(self) -> None:
        """Boot again, orderly, and wait for the new boot."""
        before = self.boot_id
        self.ok("systemd-run", "--quiet", "--on-active=1", "systemctl", "reboot")
        while self.boot_id == before:
            self._hello()
