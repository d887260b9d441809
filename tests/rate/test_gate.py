"""Every launch entry point by every way of finding it, and how completions are learned of."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from alloy_agent.conformance.gate.build import SOURCE
from alloy_agent.conformance.gate.entries import BELLS, CUDA, EMULATED, HIP
from alloy_agent.conformance.gate.pages import Completions, Slot, StatePage
from tests.rate.conftest import Bench, eventually, launched

LAUNCHES = re.findall(r"X\((\w+), (CUDA|HIP|EMU), \d, (\w+), [01]\)", SOURCE.read_text("utf-8"))
ENTRIES = tuple(name for name, _, _ in LAUNCHES)
IN_CONFIG = tuple(name for name, _, where in LAUNCHES if where == "IN_CONFIG")
OF_VENDOR = {vendor: tuple(n for n, v, _ in LAUNCHES if v == vendor) for _, vendor, _ in LAUNCHES}

WAYS = """
import ctypes, os, sys
way, configs = sys.argv[2], sys.argv[3].split(",")
flags = {"deepbind": os.RTLD_DEEPBIND | os.RTLD_NOW}.get(way, os.RTLD_NOW)
emu = ctypes.CDLL(os.environ["ALLOY_EMU_LIBRARY"], mode=flags)
out, config = ctypes.c_void_p(), (ctypes.c_uint32 * 16)(100)
call = ctypes.CFUNCTYPE(ctypes.c_long, *[ctypes.c_size_t] * 14)
resolver = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int,
                            ctypes.c_uint64, ctypes.c_void_p)

def find(get, name, version):
    assert get(name.encode(), ctypes.addressof(out), version, 0, None) == 0
    return out.value

for name in sys.argv[4:]:
    if way in ("dlsym", "deepbind"):
        at = ctypes.cast(getattr(emu, name), ctypes.c_void_p).value
    else:
        entry, version = {"v1": ("cuGetProcAddress", 11030), "v2": ("cuGetProcAddress_v2", 12000),
                          "hip": ("hipGetProcAddress", 6000),
                          "runtime": ("cuGetProcAddress_v2", 12000)}[way]
        get = resolver(ctypes.cast(getattr(emu, entry), ctypes.c_void_p).value)
        if way == "runtime":  # as the CUDA runtime does: the resolver is asked for itself first
            get = resolver(find(get, "cuGetProcAddress", 12000))
        at = find(get, name, version)
    if name in configs:
        assert call(at)(ctypes.addressof(config), 7, *[0] * 12) == 0
    else:
        assert call(at)(7, 100, *[0] * 12) == 0
emu.emuSynchronize()
print("done", flush=True)
sys.stdin.readline()
"""


def only_slot(page: StatePage) -> Slot:
    return next(slot for slot in page.slots() or () if slot.launched)


def run_to_the_end(bench: Bench, argv: list[str], env: dict[str, str]) -> subprocess.Popen[str]:
    """Start a program that says when it is done, and return it still alive."""
    process = bench.start(argv, env, stdin=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == "done\n"
    return process


def paths_of(bench: Bench) -> dict[str, str]:
    return {
        "ALLOY_EMU_LIBRARY": str(bench.driver),
        "ALLOY_EMU_SOCKET": str(bench.socket),
        "LD_PRELOAD": str(bench.gate),
    }


# --- coverage ------------------------------------------------------------------------------------


def test_the_table_of_entry_points_is_whole() -> None:
    """What the gate stands before is what the witness counts, vendor by vendor."""
    assert OF_VENDOR == {"CUDA": CUDA, "HIP": HIP, "EMU": EMULATED}
    assert len({*CUDA, *HIP, *EMULATED, *BELLS}) == 33


@pytest.mark.parametrize("way", ["dlsym", "deepbind", "v1", "v2", "hip", "runtime"])
def test_every_entry_point_is_counted_by_every_way(bench: Bench, way: str) -> None:
    """Each launch entry, found in each way, raises the counter by one, and its end is seen."""
    bench.device()
    env = bench.share().add("p", "production")
    page = StatePage(Path(env["ALLOY_GATE_STATE"]))
    argv = [sys.executable, "-c", WAYS, "0", way, ",".join(IN_CONFIG), *ENTRIES]
    run_to_the_end(bench, argv, {**env, **paths_of(bench)})
    assert launched(page) == len(ENTRIES)
    assert eventually(lambda: only_slot(page).completed == len(ENTRIES))
    page.close()


def test_directly_linked_programs_are_counted(bench: Bench, tmp_path: Path) -> None:
    """A program linked to the driver library, in an odd place, is counted as well."""
    bench.device()
    rest = ",".join(["0"] * 12)
    calls = "".join(
        f"bad |= {name}({'(long)config, 7' if name in IN_CONFIG else '7, 100'}, {rest}) != 0;"
        for name in ENTRIES
    )
    heads = "".join(f"long {name}();" for name in ENTRIES)
    source = tmp_path / "odd place.c"
    source.write_text(
        f"{heads} long emuSynchronize(); int main() {{ int config[16] = {{100}}, bad = 0; {calls}"
        " emuSynchronize(); return bad; }",
        encoding="ascii",
    )
    program = tmp_path / "program"
    command = ["/usr/bin/cc", "-w", str(source), str(bench.driver), "-o", str(program)]
    subprocess.run(command, check=True)
    env = bench.share().add("p", "production")
    page = StatePage(Path(env["ALLOY_GATE_STATE"]))
    assert bench.start([str(program)], {**env, **paths_of(bench)}).wait(60) == 0
    assert launched(page) == len(ENTRIES)
    page.close()


NEXT = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <unistd.h>
static int asked;
pid_t getppid(void) {
  pid_t (*next)(void) = (pid_t (*)(void))dlsym(RTLD_NEXT, "getppid");
  if (asked++ || next == getppid) _exit(77);
  return next();
}
"""


def test_another_interposer_finds_its_own_next(bench: Bench, tmp_path: Path) -> None:
    """A library preloaded after the gate that asks for "the next one" is not led to itself."""
    source, other = tmp_path / "other.c", tmp_path / "other.so"
    source.write_text(NEXT, encoding="ascii")
    command = ["/usr/bin/cc", "-O2", "-shared", "-fPIC", str(source), "-o", str(other), "-ldl"]
    subprocess.run(command, check=True)
    program = "import os, sys; sys.exit(0 if os.getppid() > 0 else 1)"
    env = {"LD_PRELOAD": f"{bench.gate} {other}", "ALLOY_GATE_ROLE": ""}
    assert bench.start([sys.executable, "-c", program], env).wait(60) == 0


# --- completions ---------------------------------------------------------------------------------

DRIVER = r"""
#include <stdint.h>
#include <stdlib.h>
#include <pthread.h>
#include <unistd.h>
static volatile uint64_t submitted, done;
static volatile int capturing;
long LAUNCH(uintptr_t f, uintptr_t us) { (void)f; (void)us; if (!capturing) submitted++; return 0; }
void finish(void) { done = submitted; }
void capture(int on) { capturing = on; }
int outstanding(void) { return (int)(submitted - done); }
#ifdef WITH_EVENTS
long EVENT_CREATE(void **e, unsigned f) { (void)f; *e = malloc(8); return 0; }
long EVENT_RECORD(uint64_t *e, void *s) { (void)s; *e = submitted; return RECORD_RESULT; }
long EVENT_QUERY(uint64_t *e) { return done >= *e ? 0 : 600; }
long IS_CAPTURING(void *s, int *out) { (void)s; *out = capturing; return 0; }
#endif
#ifdef WITH_CALLBACKS
static struct { void (*fn)(void *); void *arg; uint64_t at; } calls[64];
static volatile int made, called;
static void *later(void *none) {
  for (;;) {
    if (called == made || done < calls[called].at) { usleep(200); continue; }
    calls[called].fn(calls[called].arg);
    called++;
  }
  return none;
}
long HOST_FUNC(void *s, void (*fn)(void *), void *arg) {
  (void)s;
  calls[made].fn = fn; calls[made].arg = arg; calls[made].at = submitted;
  pthread_t thread;
  if (!made++) pthread_create(&thread, 0, later, 0);
  return 0;
}
#endif
"""
NAMES = {
    "CUDA": {
        "LAUNCH": "cuLaunchKernel",
        "EVENT_CREATE": "cuEventCreate",
        "EVENT_RECORD": "cuEventRecord",
        "EVENT_QUERY": "cuEventQuery",
        "IS_CAPTURING": "cuStreamIsCapturing",
        "HOST_FUNC": "cuLaunchHostFunc",
    },
    "HIP": {
        "LAUNCH": "hipModuleLaunchKernel",
        "EVENT_CREATE": "hipEventCreateWithFlags",
        "EVENT_RECORD": "hipEventRecord",
        "EVENT_QUERY": "hipEventQuery",
        "IS_CAPTURING": "hipStreamIsCapturing",
        "HOST_FUNC": "hipLaunchHostFunc",
    },
}
STEPS = """
import ctypes, sys
driver = ctypes.CDLL(sys.argv[1])
launch = getattr(driver, sys.argv[2])
for line in sys.stdin:
    word = line.strip()
    if word == "launch":
        assert launch(7, 100, *[0] * 12) == 0
    elif word == "finish":
        driver.finish()
    else:
        driver.capture(int(word))
    print(word, flush=True)
"""


def stand_in(folder: Path, vendor: str, *options: str, record: int = 0) -> Path:
    """Build a library with a vendor's real symbol names, and only those that are asked for."""
    source, made = folder / "driver.c", folder / f"{vendor}-{len(options)}-{record}.so"
    source.write_text(DRIVER, encoding="ascii")
    names = [f"-D{key}={value}" for key, value in NAMES[vendor].items()]
    flags = ["-O1", "-shared", "-fPIC", f"-DRECORD_RESULT={record}", *(f"-D{o}" for o in options)]
    command = ["/usr/bin/cc", *flags, *names, str(source), "-o", str(made), "-lpthread"]
    subprocess.run(command, check=True)
    return made


class Steps:
    """A tenant of a stand-in library that does one thing at a time."""

    def __init__(self, bench: Bench, library: Path, vendor: str) -> None:
        env = bench.share().add("p", "production")
        self.page = StatePage(Path(env["ALLOY_GATE_STATE"]))
        argv = [sys.executable, "-c", STEPS, str(library), NAMES[vendor]["LAUNCH"]]
        settings = {**env, "LD_PRELOAD": str(bench.gate)}
        self.process = bench.start(argv, settings, stdin=subprocess.PIPE)

    def do(self, word: str) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == word + "\n"

    def counts(self) -> tuple[int, int]:
        slot = only_slot(self.page)
        return slot.launched, slot.completed


@pytest.mark.parametrize("vendor", ["CUDA", "HIP"])
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("WITH_EVENTS", "WITH_CALLBACKS"), Completions.EVENTS),
        (("WITH_EVENTS",), Completions.EVENTS),
        (("WITH_CALLBACKS",), Completions.CALLBACKS),
    ],
)
def test_work_is_outstanding_until_the_device_is_done(
    bench: Bench, tmp_path: Path, vendor: str, options: tuple[str, ...], expected: Completions
) -> None:
    """By events or callbacks: launches stay outstanding until the device says their end."""
    steps = Steps(bench, stand_in(tmp_path, vendor, *options), vendor)
    for count in (1, 2, 3):
        steps.do("launch")
        assert steps.counts() == (count, 0)
    assert only_slot(steps.page).completions is expected
    steps.do("finish")
    assert eventually(lambda: steps.counts() == (3, 3) and only_slot(steps.page).bursts == 1)
    steps.do("launch")
    assert steps.counts() == (4, 3)
    steps.do("finish")
    assert eventually(lambda: steps.counts() == (4, 4))


@pytest.mark.parametrize("vendor", ["CUDA", "HIP"])
def test_without_events_and_callbacks_the_page_says_so(
    bench: Bench, tmp_path: Path, vendor: str
) -> None:
    """A launch counts as done when it returns, and the tier of control names that."""
    steps = Steps(bench, stand_in(tmp_path, vendor), vendor)
    steps.do("launch")
    assert steps.counts() == (1, 1)
    assert only_slot(steps.page).completions is Completions.NONE


def test_an_event_that_cannot_be_recorded_holds_nobody_up(bench: Bench, tmp_path: Path) -> None:
    """Where the library refuses, the launch counts as done: production is never held."""
    steps = Steps(bench, stand_in(tmp_path, "CUDA", "WITH_EVENTS", record=400), "CUDA")
    for count in (1, 2):
        steps.do("launch")
        assert steps.counts() == (count, count)


def test_launches_into_a_graph_under_capture_are_no_work(bench: Bench, tmp_path: Path) -> None:
    """While a stream is being captured nothing runs: nothing is counted, nothing is recorded."""
    steps = Steps(bench, stand_in(tmp_path, "CUDA", "WITH_EVENTS"), "CUDA")
    steps.do("launch")
    steps.do("finish")
    assert eventually(lambda: steps.counts() == (1, 1))
    steps.do("1")
    steps.do("launch")
    assert (steps.counts(), only_slot(steps.page).captured) == ((1, 1), 1)
    steps.do("0")
    steps.do("launch")
    assert steps.counts() == (2, 1)


# --- HSA queues ----------------------------------------------------------------------------------

PACKETS = """
import ctypes, os, sys
emu = ctypes.CDLL(os.environ["ALLOY_EMU_LIBRARY"])
queue = ctypes.c_void_p()
create = emu.hsa_queue_create
create.argtypes = [ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint32, ctypes.c_void_p,
                   ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint32, ctypes.c_void_p]
assert create(1, 64, 0, None, None, 0, 0, ctypes.addressof(queue)) == 0
words = ctypes.cast(queue, ctypes.POINTER(ctypes.c_uint64))
base, doorbell = words[1], words[2]
if sys.argv[2] == "hip":
    emu.hipModuleLaunchKernel(7, 100, *[0] * 12)
number = 0
for name in sys.argv[3:]:
    bell = getattr(emu, name)
    bell.argtypes, bell.restype = [ctypes.c_uint64, ctypes.c_uint64], None
    bell(12345, 1)  # a signal that is no doorbell is nobody's launch
    for _ in range(4):
        ctypes.c_uint32.from_address(base + number % 64 * 64 + 12).value = 200
        bell(doorbell, number)
        number += 1
emu.emuSynchronize()
print("done", flush=True)
sys.stdin.readline()
emu.hsa_queue_destroy(queue)
"""


def packets(bench: Bench, how: str) -> StatePage:
    bench.device()
    env = bench.share().add("p", "production")
    page = StatePage(Path(env["ALLOY_GATE_STATE"]))
    argv = [sys.executable, "-c", PACKETS, "0", how, *BELLS]
    run_to_the_end(bench, argv, {**env, **paths_of(bench)})
    return page


def test_doorbells_of_hsa_queues_are_launches(bench: Bench) -> None:
    """Each ring of a queue's doorbell counts; what the queue has taken in counts as done."""
    page = packets(bench, "alone")
    assert launched(page) == 4 * len(BELLS)
    assert only_slot(page).completions is Completions.STARTED
    assert eventually(lambda: only_slot(page).completed == 4 * len(BELLS))
    page.close()


def test_doorbells_beneath_hip_pass(bench: Bench) -> None:
    """Where HIP's own launches are gated its helper threads ring freely: nothing counts twice."""
    page = packets(bench, "hip")
    assert launched(page) == 1
    page.close()
