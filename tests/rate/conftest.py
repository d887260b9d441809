"""The emulated device, its library and the interposer, for tests with real processes."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from alloy_agent.conformance.gate.build import library
from alloy_agent.conformance.gate.device import SharedDevice
from alloy_agent.conformance.gate.pages import StatePage
from alloy_agent.errors import UnsupportedError

# the kernel ends it when the thread that started it ends, be it by kill -9
DIES_WITH_US = ("/usr/bin/setpriv", "--pdeathsig", "KILL", "--")
LOAD = """
import ctypes, os, sys, time
emu = ctypes.CDLL(os.environ["ALLOY_EMU_LIBRARY"])
end = time.monotonic() + float(sys.argv[1])
"""
PRODUCTION = (
    LOAD
    + """
while time.monotonic() < end:
    for _ in range(20):
        emu.emuLaunchKernel(7, 1000)
    emu.emuSynchronize()
    print("burst", flush=True)
    time.sleep(0.005)
"""
)
NEIGHBOUR = (
    LOAD
    + """
while time.monotonic() < end:
    emu.emuLaunchKernel(9, 500)
"""
)


@dataclass
class Bench:
    """One emulated device with its tenants; everything that it starts ends with the test."""

    folder: Path
    gate: Path
    driver: Path
    started: list[subprocess.Popen[str]] = field(default_factory=list)
    devices: list[SharedDevice] = field(default_factory=list)

    @property
    def socket(self) -> Path:
        return self.folder / "device"

    def device(self) -> subprocess.Popen[str]:
        module = "alloy_agent.silicon.accelerator.server"
        process = self.start([sys.executable, "-m", module, str(self.socket)])
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process

    def start(
        self, argv: list[str], env: dict[str, str] | None = None, stdin: int | None = None
    ) -> subprocess.Popen[str]:
        """Start a process that ends with this one, however this one ends."""
        process = subprocess.Popen(
            [*DIES_WITH_US, *argv],
            env={**os.environ, **(env or {})},
            stdin=stdin,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.started.append(process)
        return process

    def tenant(
        self, program: str, env: dict[str, str], *, seconds: float = 600.0, gated: bool = True
    ) -> subprocess.Popen[str]:
        mine = {
            "ALLOY_EMU_LIBRARY": str(self.driver),
            "ALLOY_EMU_SOCKET": str(self.socket),
            **({"LD_PRELOAD": str(self.gate)} if gated else {}),
            **env,
        }
        return self.start([sys.executable, "-c", program, str(seconds)], mine)

    def share(self) -> SharedDevice:
        shared = SharedDevice("emulated", self.folder / "share")
        self.devices.append(shared)
        return shared


@contextmanager
def controlled(shared: SharedDevice) -> Iterator[None]:
    """Run the control loop beside the test."""
    stop = threading.Event()
    loop = threading.Thread(target=shared.run, args=(stop,))
    loop.start()
    try:
        yield
    finally:
        stop.set()
        loop.join()


def launched(page: StatePage) -> int:
    """Return the launches of all processes on a page."""
    return sum(slot.launched for slot in page.slots() or ())


def eventually(holds: Callable[[], bool], within_s: float = 60.0) -> bool:
    """Return whether something becomes true before a generous while has passed."""
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        if holds():
            return True
        time.sleep(0.02)
    return holds()


@pytest.fixture(scope="session")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("libraries")
    try:
        return library(folder), library(folder, emulated=True)
    except UnsupportedError as exc:
        pytest.skip(f"no interposer on this machine: {exc}")


@pytest.fixture
def bench(libraries: tuple[Path, Path]) -> Iterator[Bench]:
    with tempfile.TemporaryDirectory() as folder:
        made = Bench(Path(folder), *libraries)
        yield made
        for shared in made.devices:
            shared.close()
        for process in made.started:
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    stream.close()
