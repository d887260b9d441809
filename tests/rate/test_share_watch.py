"""The watcher on real processes and cgroups: foreign libraries in windows, pages that move."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from alloy_agent.conformance.gate.pages import STATE_BYTES, make_state
from alloy_agent.conformance.keeper.messages import Watched
from alloy_agent.conformance.keeper.watch import Subject, Watcher
from alloy_agent.host.cgroups import Cgroup, detect
from tests.rate.conftest import eventually
from tests.rate.test_share import WITHIN_S

pytestmark = [pytest.mark.host]

FOREIGN = "long cuLaunchKernel(long a, long b) { return a * 3 + b; }\n"
LAUNCHING = (
    "import ctypes, sys, time\n"
    "from pathlib import Path\n"
    "Path(sys.argv[2]).write_text('0')\n"
    "launch = ctypes.CDLL(sys.argv[1]).cuLaunchKernel\n"
    "while True:\n"
    "    for _ in range(100): launch(0, 0)\n"
    "    time.sleep(0.002)\n"
)


class Bench:
    """One tenant in a cgroup of its own, with a page, watched."""

    def __init__(self, folder: Path, gate: Path) -> None:
        topology = detect()
        assert topology.unified is not None
        self.folder = folder
        self.group = Cgroup(topology, f"alloy-test-{uuid4().hex[:12]}")
        self.place = Path(topology.unified.folder(self.group.path))
        self.place.mkdir()
        self.page = folder / "n.state"
        make_state(self.page, os.getuid(), -1)
        self.changed = threading.Event()
        tree = Path(topology.unified.mount)
        self.watcher = Watcher(gate, tree, lambda: None, self.changed.set)
        subject = Subject(
            name="n", pid=1, page=str(self.page), owner=os.getuid(), cgroup=self.group.path
        )
        self.watcher.watch((subject,))
        self.watcher.start()
        self.started: list[subprocess.Popen[bytes]] = []

    def seen(self) -> Watched:
        return self.watcher.seen.get("n", Watched())

    def launches(self, library: Path, below: str) -> None:
        place = self.place / below
        place.mkdir(parents=True, exist_ok=True)
        argv = [sys.executable, "-c", LAUNCHING, str(library), str(place / "cgroup.procs")]
        self.started.append(subprocess.Popen(argv))

    def close(self) -> None:
        for process in self.started:
            process.kill()
            process.wait()
        self.watcher.close()
        assert eventually(self._removed, WITHIN_S)

    def _removed(self) -> bool:
        for folder, _, _ in os.walk(self.place, topdown=False):
            try:
                Path(folder).rmdir()
            except OSError:
                return not self.place.exists()
        return True


@pytest.fixture
def watched(libraries: tuple[Path, Path]) -> Iterator[Bench]:
    if os.geteuid() != 0 or detect().unified is None:
        pytest.skip("needs root and a v2 cgroup tree")
    with tempfile.TemporaryDirectory(prefix="alloy-") as folder:
        made = Bench(Path(folder), libraries[0])
        yield made
        made.close()


@pytest.mark.parametrize("below", ["", "a/b"])
def test_a_foreign_library_is_probed_for_a_window(watched: Bench, below: str) -> None:
    """Launches of a library that is not ours are counted for a window, and the probes go again.

    So they are from a cgroup that the tenant made below its own.
    """
    source, library = watched.folder / "foreign.c", watched.folder / "libcuda.so.1"
    source.write_text(FOREIGN, encoding="ascii")
    options = ["-O2", "-fPIC", "-shared", "-fcf-protection=none"]
    subprocess.run(["/usr/bin/cc", *options, str(source), "-o", str(library)], check=True)
    watched.launches(library, below)
    assert eventually(lambda: bool(watched.seen().unmapped_pids), WITHIN_S)
    lacks = ("no uprobe events", "counting calls of")
    assert eventually(
        lambda: (
            watched.seen().witnessed is not None
            or any(word in watched.seen().witness for word in lacks)
        ),
        WITHIN_S,
    )
    if watched.seen().witnessed is None:
        pytest.skip(f"no witness on this machine: {watched.seen().witness}")
    # a busy machine may give it no turn within one window; what a window showed stays till the next
    assert eventually(lambda: (watched.seen().witnessed or 0) > 20, WITHIN_S)
    seen = watched.seen()
    assert seen.witness == "uprobe counters, 0.5 s in 30 s"
    assert seen.launched == 0
    assert any("the kernel" in text for text in seen.bypass)
    assert any("not beneath the gate" in text for text in seen.bypass)
    assert watched.changed.is_set()
    assert eventually(lambda: watched.watcher.cost.probes == 0, WITHIN_S)
    assert watched.watcher.cost.attached >= 1
    assert watched.watcher.cost.detaching_s > 0.0


def test_a_page_that_is_replaced_or_opened_is_trouble(watched: Bench) -> None:
    """The page's file is watched: another file in its place, a mode that lets others write."""
    assert eventually(lambda: watched.seen().looked, WITHIN_S)
    assert watched.seen().page_trouble == ""
    watched.page.chmod(0o666)
    assert eventually(lambda: "written by others" in watched.seen().page_trouble, WITHIN_S)
    watched.page.chmod(0o644)
    assert eventually(lambda: watched.seen().page_trouble == "", WITHIN_S)
    make_state(watched.page, os.getuid(), -1)
    assert eventually(lambda: "was replaced" in watched.seen().page_trouble, WITHIN_S)
    watched.page.unlink()
    assert eventually(lambda: "is gone" in watched.seen().page_trouble, WITHIN_S)


def test_a_page_that_grew_is_cut_back_and_remembered(watched: Bench) -> None:
    """A page that its tenant made longer gets its length back; what it did stays known."""
    assert eventually(lambda: watched.seen().looked, WITHIN_S)
    os.truncate(watched.page, 1 << 30)
    assert eventually(lambda: "made longer" in watched.seen().page_trouble, WITHIN_S)
    assert watched.page.stat().st_size == STATE_BYTES
    os.truncate(watched.page, 1 << 30)
    assert eventually(lambda: watched.page.stat().st_size == STATE_BYTES, WITHIN_S)
    assert "made longer" in watched.seen().page_trouble


def test_what_is_written_beside_the_loop_is_written_in_order(watched: Bench) -> None:
    """Tasks are done one after the other; one that fails costs only itself."""
    done: list[int] = []

    def fail() -> None:
        raise OSError("a full disk")

    for number in range(5):
        watched.watcher.later(lambda number=number: done.append(number))  # type: ignore[misc]
        watched.watcher.later(fail)
    assert eventually(lambda: done == [0, 1, 2, 3, 4], WITHIN_S)
