"""Pids that the driver tells and this host does not show: joined by their namespace, or told so."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from alloy_agent.backends.nvidia.sighting import sighted
from alloy_agent.conformance.auditor import pids_of
from alloy_agent.conformance.checks import judge
from alloy_agent.host.pidspace import initial_namespace
from alloy_agent.model import DeviceId, Fact, Judgement, Snapshot, Verdict
from tests.backends.nvidia.test_backend import fact_of, hosted, process
from tests.fakes.nvml.host import NvidiaHost

NODE = "/dev/nvidiactl"
UNSHARE = shutil.which("unshare") or ""


def proc_with(root: Path, pid: int, inner: tuple[int, ...] = (), node: str = NODE) -> Path:
    """Write a process that has a node open; return the `/proc` it is in."""
    place = root / "proc" / str(pid)
    (place / "fd").mkdir(parents=True)
    numbers = "\t".join(str(number) for number in (pid, *inner))
    (place / "status").write_text(f"Name:\tx\nNSpid:\t{numbers}\n")
    if node:
        (place / "fd/5").symlink_to(node)
    return root / "proc"


def test_a_process_with_a_node_open_is_the_one_meant(tmp_path: Path) -> None:
    """The plain case: the number is a process of this host that works with the driver."""
    proc = proc_with(tmp_path, 324)
    assert sighted(proc, [324]) == {324: (324, "")}


def test_a_container_pid_is_joined_by_its_namespace(tmp_path: Path) -> None:
    """One process with that number innermost, and with a node open, is meant; its host pid is told.

    A process of the host that has the number by chance and no node of the driver open is not it.
    """
    proc_with(tmp_path, 324, node="")
    proc = proc_with(tmp_path, 645400, inner=(324,))
    assert sighted(proc, [324])[324] == (645400, "")


def test_two_candidates_are_nobody(tmp_path: Path) -> None:
    """The same number in two containers is not attributed to either, and the reason names both."""
    proc_with(tmp_path, 1001, inner=(7,))
    proc = proc_with(tmp_path, 1002, inner=(7,))
    pid, note = sighted(proc, [7])[7]
    assert pid == 7
    assert "1001, 1002" in note


def test_what_is_not_there_is_told_so(tmp_path: Path) -> None:
    """A pid without process, and one whose process does not use the driver, each have a reason."""
    proc = proc_with(tmp_path, 50, node="/dev/null")
    found = sighted(proc, [50, 51])
    assert "no node of it open" in found[50].note
    assert "is not in" in found[51].note
    assert sighted(proc, [51], known=frozenset({51}))[51].note == ""


def judged(host: NvidiaHost, ident: DeviceId) -> dict[str, Judgement]:
    """Return what the audit says of the first partition."""
    seen = host.backend.observe(ident)
    snapshot = Snapshot(
        boot_id="b",
        sequence=1,
        taken_at_s=0.0,
        taken_wall_s=0.0,
        devices=(seen.device,),
        partitions=seen.partitions,
    )
    facts = host.backend.facts(ident)
    alone = Fact(subject="node", name="host.owners", value=[], method="this test")
    report = judge(snapshot, (*pids_of(facts), *facts, alone))[0][0]
    return {found.check: found for found in report.judgements}


def test_an_unseen_process_is_unknown_never_a_pass(tmp_path: Path) -> None:
    """In an instance, its fence is unknown with the reason; on the parent, so is who is on it."""
    host, ident = hosted(tmp_path)
    host.mig(ident)
    (piece,) = host.make(ident, "3g.40gb@0")
    host.run(piece, pid=77)
    (client,) = fact_of(host, ident, ident, "device.clients").value
    assert "is not in" in client["unseen"]
    assert client["partition"] == piece.id
    fence = judged(host, ident)["MIG-03"]
    assert fence.verdict is Verdict.UNKNOWN
    assert "pid 77" in fence.reason
    assert judged(host, ident)["MIG-04"].verdict is Verdict.PASS


def test_a_container_pid_in_an_instance_has_its_own_fence(tmp_path: Path) -> None:
    """Joined through its namespace, the tenant's process is named and its nodes are looked at."""
    host, ident = hosted(tmp_path)
    host.mig(ident)
    (piece,) = host.make(ident, "3g.40gb@0")
    host.run(piece, pid=9)
    process(host, 1, namespace=1)
    process(host, 4000, namespace=2, dev=piece.access.device_nodes, comm="train")
    status = host.root / "proc/4000/status"
    status.write_text(status.read_text() + "NSpid:\t4000\t9\n")
    (client,) = fact_of(host, ident, ident, "device.clients").value
    assert (client["pid"], client["comm"], client["unseen"]) == (4000, "train", "")
    assert judged(host, ident)["MIG-03"].verdict is Verdict.PASS


INSIDE = """
import json, os, sys
from pathlib import Path
from alloy_agent.backends.nvidia.sighting import sighted
from alloy_agent.backends.nvidia.doctor import _namespace
outer = int(sys.argv[1])
found = sighted(Path("/proc"), [outer])[outer]
line = _namespace(Path("/"))
print(json.dumps({"pid": os.getpid(), "note": found.note, "ok": line.ok, "cure": line.cure}))
"""


@pytest.mark.host
def test_in_a_real_pid_namespace_the_hosts_pids_are_told_as_unseen() -> None:
    """An agent behind `unshare --pid` says that it cannot see the driver's pid, and the cure."""
    if os.geteuid() != 0 or not UNSHARE or not initial_namespace("/proc"):
        pytest.skip("needs root in the host's pid namespace, and unshare")
    command = [UNSHARE, "--pid", "--fork", "--mount-proc", sys.executable, "-c", INSIDE]
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as tenant:
        try:
            done = subprocess.run(
                [*command, str(tenant.pid)],
                capture_output=True,
                text=True,
                timeout=120,
                check=False,
                cwd=Path(__file__).parents[3],
            )
        finally:
            tenant.kill()
    if done.returncode and "Operation not permitted" in done.stderr:
        pytest.skip(f"this host makes no pid namespace: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert "pid namespace of its own" in told["note"] or "no node of it open" in told["note"]
    assert told["ok"] is False
    assert "hostPID" in told["cure"]


HOLD = "import os, sys; print(os.getpid(), flush=True); sys.stdin.read()"


@pytest.mark.host
def test_a_process_in_a_real_pid_namespace_is_joined_by_its_inner_pid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel's own `NSpid` leads from the pid inside of a container to the one outside."""
    if os.geteuid() != 0 or not UNSHARE:
        pytest.skip("needs root and unshare to make a pid namespace")
    node = tmp_path / "node"
    node.touch()
    with (
        node.open() as held,
        subprocess.Popen(
            [UNSHARE, "--pid", "--fork", sys.executable, "-I", "-S", "-c", HOLD],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=(held.fileno(),),
        ) as run,
    ):
        assert run.stdout is not None
        assert run.stdin is not None
        line = run.stdout.readline()
        if not line:
            pytest.skip("this host makes no pid namespace")
        inner = int(line)
        monkeypatch.setattr("alloy_agent.backends.nvidia.processes._PREFIX", str(node))
        children = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
        found = sighted(Path("/proc"), [inner])[inner]
        run.stdin.close()
    assert inner == 1
    assert (found.note, str(found.pid)) == ("", children[0])
