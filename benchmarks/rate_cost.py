"""What rate control costs: a launch through the open gate, and the agent for each shared device.

The driver library is a stand-in that does nothing, so that what is measured is the gate alone. The
agent's part is the processor time of its loop (a look every 100 ms, leases every 20 ms) beside
a production tenant with a burst every 25 ms and a neighbour that fills the pauses.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Final

from alloy_agent.conformance.gate.build import library
from alloy_agent.conformance.gate.device import SharedDevice
from benchmarks.report import Result, main, result

DRIVER: Final = r"""
#include <stdint.h>
#include <stdlib.h>
#include <time.h>
typedef long (*launch_fn)(uintptr_t, ...);
long cuLaunchKernel(uintptr_t f, ...) { return f == 0; }
long cuEventCreate(void **e, unsigned f) { (void)f; *e = malloc(8); return 0; }
long cuEventRecord(void *e, void *s) { (void)e; (void)s; return 0; }
long cuEventQuery(void *e) { (void)e; return 0; }
static int ascending(const void *a, const void *b) {
  double d = *(const double *)a - *(const double *)b;
  return d < 0 ? -1 : d > 0;
}
/* The median over `rounds` of nanoseconds for each of a few launches in a row, by the entry that a
   resolver found; between rounds all of them complete, so that nothing waits for room. */
double spin(launch_fn launch, long rounds) {
  double *took = malloc(sizeof(double) * rounds), middle;
  for (long n = 0; n < rounds; n++) {
    struct timespec a, b, pause = {0, 300000};
    clock_gettime(CLOCK_MONOTONIC, &a);
    for (int i = 0; i < 8; i++) launch(7, 1l, 1l, 1l, 1l, 1l, 1l, 0l, 0l, 0l, 0l);
    clock_gettime(CLOCK_MONOTONIC, &b);
    took[n] = ((b.tv_sec - a.tv_sec) * 1e9 + (b.tv_nsec - a.tv_nsec)) / 8;
    nanosleep(&pause, 0);
  }
  qsort(took, rounds, sizeof *took, ascending);
  middle = took[rounds / 2];
  free(took);
  return middle;
}
"""
SPIN: Final = """
import ctypes, json, sys
driver = ctypes.CDLL(sys.argv[1])
driver.spin.restype = ctypes.c_double
launch = ctypes.cast(driver.cuLaunchKernel, ctypes.c_void_p)
driver.spin(launch, 50)
print(json.dumps([driver.spin(launch, ctypes.c_long(int(sys.argv[2]))) for _ in range(20)]))
"""
ROUNDS: Final = 200
PRODUCTION: Final = """
import ctypes, os, time
emu = ctypes.CDLL(os.environ["ALLOY_EMU_LIBRARY"])
while True:
    for _ in range(20):
        emu.emuLaunchKernel(7, 1000)
    emu.emuSynchronize()
    time.sleep(0.005)
"""
NEIGHBOUR: Final = """
import ctypes, os
emu = ctypes.CDLL(os.environ["ALLOY_EMU_LIBRARY"])
while True:
    emu.emuLaunchKernel(9, 1000)
"""
DIES_WITH_US: Final = ("/usr/bin/setpriv", "--pdeathsig", "KILL", "--")


def stand_in(folder: Path) -> Path:
    """Return a driver library that completes everything at once."""
    source, made = folder / "driver.c", folder / "driver.so"
    source.write_text(DRIVER, encoding="ascii")
    command = ["cc", "-O2", "-shared", "-fPIC", str(source), "-o", str(made)]
    subprocess.run(command, check=True)
    return made


def nanoseconds(driver: Path, environment: dict[str, str]) -> list[float]:
    """Return what one launch takes in a process of its own, measured twenty times."""
    command = [*DIES_WITH_US, sys.executable, "-c", SPIN, str(driver), str(ROUNDS)]
    done = subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, check=True
    )
    return [float(value) for value in json.loads(done.stdout)]


def gate_cost(folder: Path) -> list[Result]:
    """Return what the open gate adds to a launch, for both roles."""
    driver, preload = stand_in(folder), {"LD_PRELOAD": str(library(folder))}
    bare_ns = sorted(nanoseconds(driver, {}))[10]
    rows = []
    for role in ("production", "opportunistic"):
        shared = SharedDevice("none", folder / role)
        environment = shared.add("tenant", role)
        stop = threading.Event()
        loop = threading.Thread(target=shared.run, args=(stop,))
        loop.start()
        took = nanoseconds(driver, {**environment, **preload})
        stop.set()
        loop.join()
        added_us = [(value - bare_ns) / 1000.0 for value in took]
        what = f"launch through the open gate, {role}"
        rows.append(result(what, added_us, "us", "<=", 1.0))
    return rows


def agent_cost(folder: Path, seconds: float) -> Result:
    """Return the share of a core that the loop of one shared device takes."""
    device = folder / "device"
    module = "alloy_agent.silicon.accelerator.server"
    paths = {
        "ALLOY_EMU_LIBRARY": str(library(folder, emulated=True)),
        "ALLOY_EMU_SOCKET": str(device),
        "LD_PRELOAD": str(library(folder)),
    }
    shared = SharedDevice("emulated", folder / "share")
    ours, theirs = shared.add("p", "production"), shared.add("n", "opportunistic")
    started = [_start([sys.executable, "-m", module, str(device)], {})]
    if started[0].stdout is not None:
        started[0].stdout.readline()
    for program, mine in ((PRODUCTION, ours), (NEIGHBOUR, theirs)):
        started.append(_start([sys.executable, "-c", program], {**mine, **paths}))
    stop, samples = threading.Event(), []
    loop = threading.Thread(target=shared.run, args=(stop,))
    loop.start()
    time.sleep(2.0)  # until the controller has learned and opened
    for _ in range(5):
        before_s, begun_s = time.process_time(), time.monotonic()
        time.sleep(seconds / 5)
        samples.append((time.process_time() - before_s) / (time.monotonic() - begun_s))
    stop.set()
    loop.join()
    for process in started:
        process.kill()
        process.communicate()
    return result("agent, one shared device at 100 ms", samples, "cores", "<=", 0.02)


def _start(argv: list[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [*DIES_WITH_US, *argv], env={**os.environ, **environment}, stdout=subprocess.PIPE
    )


def measure(quick: bool) -> list[Result]:
    """Return all results."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        return [*gate_cost(folder), agent_cost(folder, 5.0 if quick else 20.0)]


if __name__ == "__main__":
    sys.exit(main("rate_cost", measure))
