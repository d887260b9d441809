"""Device programs of cgroup v2: real ones on real cgroups, asked about from outside."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from alloy_agent.backends.amd import fence
from alloy_agent.backends.amd.files import Files, Roots
from alloy_agent.backends.neuron.holders import Fence, device_fence
from alloy_agent.backends.nvidia import processes
from alloy_agent.host.cgroupfs import CgroupTopology, detect
from alloy_agent.host.deviceprograms import KEPT_S, DevicePrograms, DeviceRules, ask, programs
from tests.host import devicebpf

OWN, OTHER = (1, 7), (1, 9)  # /dev/full and /dev/urandom, harmless, under names of their own
PATIENT_S = 60.0
SLEEP = "import sys; print('up', flush=True); sys.stdin.read()"


def patient() -> DevicePrograms:
    """Return one that waits for its children however busy the machine is."""
    return DevicePrograms(probe_s=PATIENT_S)


@pytest.fixture(scope="module", autouse=True)
def _able() -> None:
    """Skip where the kernel lets no program be attached."""
    reason = devicebpf.why_not()
    if reason:
        pytest.skip(reason)


@pytest.fixture
def nodes(tmp_path: Path) -> tuple[str, str]:
    """Return two device nodes: a tenant's and its neighbour's."""
    made = []
    for name, (major, minor) in (("own", OWN), ("other", OTHER)):
        path = tmp_path / name
        os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(major, minor))
        made.append(str(path))
    try:
        os.close(os.open(made[0], os.O_RDONLY))
    except OSError as error:
        pytest.skip(f"device nodes cannot be opened here: {error.strerror}")
    return made[0], made[1]


@pytest.fixture
def fenced() -> Iterator[str]:
    """Give a cgroup whose program allows the tenant's node alone."""
    with devicebpf.group(devicebpf.allowing([OWN])) as folder:
        yield folder


@pytest.mark.host
def test_the_kernel_names_the_programs_in_effect(fenced: str) -> None:
    """The attached program is found by its id, in the cgroup and in one below it."""
    found = programs(fenced)
    assert found is not None
    assert len(found) >= 1
    below = Path(fenced) / "below"
    below.mkdir()
    try:
        assert programs(str(below)) == found
    finally:
        below.rmdir()
    assert programs("/proc") is None
    assert programs(f"{fenced}/not-there") is None


@pytest.mark.host
def test_what_a_program_allows_is_told_without_opening(fenced: str, nodes: tuple[str, str]) -> None:
    """The own node is allowed, the neighbour's is not, and nobody stays in the cgroup."""
    rules = patient().rules_of(fenced, nodes)
    assert isinstance(rules, DeviceRules)
    assert rules.allowed == (nodes[0],)
    assert str((programs(fenced) or (0,))[0]) in rules.by
    assert (Path(fenced) / "cgroup.procs").read_text() == ""


@pytest.mark.host
def test_a_program_that_lets_everything_pass_is_no_fence(nodes: tuple[str, str]) -> None:
    """That a program is attached says nothing: one that allows all is no fence."""
    with devicebpf.group(devicebpf.allowing_all()) as folder:
        assert patient().rules_of(folder, nodes) == DeviceRules(by="", allowed=("*",))


@pytest.mark.host
def test_a_witness_tells_the_fence_of_an_only_device(fenced: str, nodes: tuple[str, str]) -> None:
    """With one device on the node its tenant may open every node asked for, and is fenced."""
    rules = patient().rules_of(fenced, nodes[:1], witness=nodes[1])
    assert isinstance(rules, DeviceRules)
    assert rules.by
    assert rules.allowed == nodes[:1]


@pytest.mark.host
def test_answers_are_kept_until_the_programs_change(nodes: tuple[str, str]) -> None:
    """A second look starts no child; another program, or time, makes it ask again."""
    now = [0.0]
    asking = DevicePrograms(clock=lambda: now[0], probe_s=PATIENT_S)
    with devicebpf.group(devicebpf.allowing([OWN, OTHER])) as folder:
        first = asking.rules_of(folder, nodes)
        assert asking.rules_of(folder, nodes) is first
        devicebpf.attach(folder, devicebpf.allowing([OWN]))
        narrowed = asking.rules_of(folder, nodes)
        assert isinstance(narrowed, DeviceRules)
        assert narrowed.allowed == (nodes[0],)
        now[0] = KEPT_S + 1
        assert asking.rules_of(folder, nodes) is not narrowed


@pytest.mark.host
def test_a_cgroup_that_nobody_can_join_is_unknown(nodes: tuple[str, str], tmp_path: Path) -> None:
    """No child inside, no answer: a reason, never a pass."""
    assert ask(f"{tmp_path}/no/cgroup.procs", nodes) is None
    assert isinstance(patient().rules_of(str(tmp_path / "gone"), nodes), str)


@pytest.fixture
def tenant(fenced: str) -> Iterator[int]:
    """Run a process behind the program; return its pid."""
    run = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", SLEEP],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert run.stdout is not None
    assert run.stdin is not None
    assert run.stdout.readline() == "up\n"
    (Path(fenced) / "cgroup.procs").write_text(str(run.pid))
    try:
        yield run.pid
    finally:
        run.stdin.close()
        run.wait(60)
        run.stdout.close()


def _v2_alone() -> CgroupTopology:
    """Return this host as if it had the v2 tree alone."""
    whole = detect()
    assert whole.unified is not None
    return CgroupTopology(mode="v2", hierarchies=(whole.unified,))


@pytest.mark.host
def test_three_backends_see_the_same_program(
    tenant: int, fenced: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MIG-03, CPX-03 and NRN-02 rest on one reading: the program by id, and no node allowed.

    The fence lets none of these vendors' nodes be opened, so none is in what it allows.
    """
    ids = str((programs(fenced) or (0,))[0])
    monkeypatch.setattr(processes, "detect", lambda *_: _v2_alone())
    monkeypatch.setattr(processes, "_v1_rules", lambda *_: None)
    nvidia = processes.fence_of(Path("/proc"), tenant, patient())
    assert (ids in nvidia.by, nvidia.allowed, nvidia.unknown) == (True, (), "")
    monkeypatch.setattr(fence, "v1_path", lambda *_: None)
    dev = tmp_path / "dev"
    (dev / "dri").mkdir(parents=True)
    for number, (major, minor) in ((128, OWN), (129, OTHER)):
        node = dev / f"dri/renderD{number}"
        os.mknod(node, 0o666 | stat.S_IFCHR, os.makedev(major, minor))
    amd = fence.Fences(Files(), Roots(dev=str(dev)), patient()).of(tenant)
    assert amd is not None
    assert (ids in amd.by, amd.allowed) == (True, ("/dev/dri/renderD128",))
    place = fenced.removeprefix(detect().unified.mount)  # type: ignore[union-attr]
    neuron = device_fence({"": place}, _v2_alone(), {os.makedev(245, 0): 0}, patient())
    assert isinstance(neuron, Fence)
    assert (ids in neuron.by, neuron.allowed, neuron.everything) == (True, (), False)
