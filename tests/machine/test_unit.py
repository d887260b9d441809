"""The unit as a service manager runs it: a systemd that boots, the sandbox in force."""

from __future__ import annotations

import contextlib
import json
import signal
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.machine import container
from tests.machine.container import Container, NoContainerError, places, remove_groups
from tests.machine.wheels import ROOT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.host,
    pytest.mark.skipif(
        bool(container.missing()), reason=f"no systemd can be booted: {container.missing()}"
    ),
]

MIB = 1 << 20
RESERVE = """
import json, sys
from pathlib import Path
from alloy_agent.control import ControlClient
from alloy_agent.proto import agent_pb2 as pb
lease, piece, generation = sys.argv[1:]
refs = [pb.PartitionRef(id=piece, generation=int(generation))]
wish = pb.Reserve(lease=lease, tenant="acme", partitions=refs, ttl_ms=600_000)
client = ControlClient(Path("/run/alloy/agent.sock"))
for message in client.command(pb.BrainMessage(id=lease, reserve=wish)):
    if message.WhichOneof("body") == "reply":
        print(json.dumps({"status": message.reply.status, "token": message.reply.token}))
"""


class Host(Container):
    """A booted container with one core to lend, and control groups that are its own."""

    groups: str

    def layout(self, memory_mib: int) -> None:
        """Write the layout file: one core with so much memory."""
        piece = {"match": {"vendor": "cpu"}, "cores": [1], "memory": [f"{memory_mib}MiB"]}
        text = json.dumps({"version": "v1", "layouts": {"one": [piece]}})
        self.put("/etc/alloy/layout.yaml", text)

    def settings(self, **more: Any) -> None:
        """Write the settings file."""
        base = {
            "cpu": {"cgroup_root": self.groups},
            "layout": {"file": "/etc/alloy/layout.yaml", "name": "one"},
        }
        self.put("/etc/alloy/agent.yaml", json.dumps({**base, **more}))

    def limit(self) -> int | None:
        """Return the memory cap of the partition in the kernel, or None while there is none."""
        for top in self.tops():
            for name in ("memory.limit_in_bytes", "memory.max"):
                for file in top.glob(f"*/*/{name}"):
                    text = file.read_text().strip()
                    return int(text) if text.isdigit() else None
        return None

    def tops(self) -> list[Path]:
        """Return the control groups below which the agent has all of its own."""
        inside = [one / "payload" / self.groups for one in places(self.groups)]
        return [one for one in (*places(self.groups), *inside) if one.is_dir()]

    def piece(self) -> dict[str, Any]:
        """Return the partition as the agent shows it."""
        document = self.json("alloy-agent", "devices", "--json")
        (found,) = [p for d in document["devices"] for p in d["partitions"]]
        return dict(found)

    def reserve(self, lease: str) -> dict[str, Any]:
        """Ask the daemon's socket for a lease."""
        piece = self.piece()
        python = "/opt/pipx/venvs/alloy-agent/bin/python"
        where = (lease, piece["id"], str(piece["generation"]))
        return dict(self.json(python, "-c", RESERVE, *where))

    def main_pid(self) -> int:
        """Return the daemon's pid, as its manager counts."""
        return int(self.show("MainPID"))

    def restarts(self) -> str:
        """Return what `doctor` says of restarts."""
        document = json.loads(self.run("alloy-agent", "doctor", "--json").out)
        (found,) = [d["found"] for d in document["diagnoses"] if d["subject"] == "restarts"]
        return str(found)

    def active(self) -> bool:
        """Whether the unit is up, which is when it has said that it is ready."""
        return self.show("ActiveState") == "active"

    def kill(self, sign: signal.Signals) -> int:
        """Send the daemon a signal; return its pid."""
        pid = self.main_pid()
        self.ok("kill", f"-{sign.value}", str(pid))
        return pid

    def back_after(self, pid: int) -> None:
        """Wait until another process than `pid` is ready."""
        self.wait("another run is ready", lambda: self.main_pid() not in (0, pid) and self.active())


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    """Return a container with the agent installed, its unit enabled and not yet started."""
    name = f"alloy{uuid.uuid4().hex[:10]}"
    host = Host(tmp_path_factory.mktemp("machine"), name)
    host.groups = name
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(host)
        except NoContainerError as exc:
            pytest.skip(f"no systemd can be booted: {exc}")
        host.settings()
        host.layout(64)
        host.ok("systemctl", "enable", "alloy-agent")
        link = host.root / f"etc/systemd/system/{container.TARGET}.wants/alloy-agent.service"
        link.symlink_to("../alloy-agent.service")
        yield host
        host.run("systemctl", "stop", "alloy-agent")
        for top in host.tops():
            remove_groups(top)


@pytest.fixture
def started(host: Host) -> Host:
    """Return the container with the agent up, settings and history as at the beginning."""
    host.settings()
    host.layout(64)
    host.run("systemctl", "reset-failed", "alloy-agent")
    host.ok("systemctl", "restart", "alloy-agent")
    host.wait("the partition is there", lambda: host.limit() == 64 * MIB)
    return host


def test_start_means_ready_and_stop_leaves_partitions(started: Host) -> None:
    """When start returns, the socket answers; a stop ends the agent and nothing else."""
    host = started
    assert host.show("StatusText").startswith("1 device")
    assert host.show("Result") == "success"
    before = host.piece()
    assert before["tier"] == "enforced"
    doctor = json.loads(host.run("alloy-agent", "doctor", "--json").out)
    assert [d["subject"] for d in doctor["diagnoses"] if d["required"] and not d["ok"]] == []
    inside = host.ok(
        *("alloy-agent", "exec", "--tenant", "acme", before["id"], "--"),
        *("grep", "-E", "cpuset|0::", "/proc/self/cgroup"),
    )
    assert f"/{host.groups}/" in inside
    assert host.run("alloy-agent", "audit").rc == 0, host.journal()

    host.ok("systemctl", "stop", "alloy-agent")
    assert host.limit() == 64 * MIB
    host.ok("systemctl", "start", "alloy-agent")
    after = host.piece()
    assert (after["id"], after["generation"]) == (before["id"], before["generation"])


def test_a_reload_takes_up_what_is_right_and_refuses_what_is_wrong(started: Host) -> None:
    """`systemctl reload` reads settings and layout again, in the process that runs."""
    host = started
    pid = host.main_pid()
    host.layout(96)
    host.ok("systemctl", "reload", "alloy-agent")
    host.wait("the new cap", lambda: host.limit() == 96 * MIB)
    host.put(
        "/etc/alloy/layout.yaml", "version: v1\nlayouts: {one: [{match: {vendor: cpu}, cor: 1}]}"
    )
    host.ok("systemctl", "reload", "alloy-agent")
    host.wait("the refusal is told", lambda: "reload_refused" in host.journal())
    assert host.main_pid() == pid
    assert host.active()
    assert host.limit() == 96 * MIB


def test_a_hung_daemon_is_killed_and_the_next_one_knows(started: Host) -> None:
    """Stopped, it misses its watchdog: its manager kills and restarts it, and why is told."""
    host = started
    before = host.piece()
    pid = host.kill(signal.SIGSTOP)
    host.back_after(pid)
    assert "watchdog: killed by SIGABRT" in host.restarts()
    assert "watchdog" in host.show("StatusText")
    assert host.piece()["generation"] == before["generation"]
    assert host.limit() == 64 * MIB


def test_a_killed_daemon_comes_back_and_the_reason_is_kept(started: Host) -> None:
    """After SIGKILL it is up again by itself; what was asked for is no unasked restart."""
    host = started
    pid = host.kill(signal.SIGKILL)
    host.back_after(pid)
    assert "signal: killed by SIGKILL" in host.restarts()
    starts = json.loads((host.root / "var/lib/alloy/starts.json").read_text())["starts"]
    assert starts[-2]["ended"] == "signal: killed by SIGKILL"
    assert not starts[-2]["asked"]
    assert starts[-3]["ended"] == "stopped by SIGTERM"
    assert starts[-3]["asked"]
    assert host.limit() == 64 * MIB


def test_settings_that_are_wrong_are_not_tried_again(started: Host) -> None:
    """Exit code 2 stays down, with the reason in the journal."""
    host = started
    host.settings(cpu={"cgroup_root": "../outside"})
    assert host.run("systemctl", "restart", "alloy-agent").rc != 0
    assert host.show("ActiveState") == "failed"
    assert host.show("ExecMainStatus") == "2"
    assert host.show("NRestarts") == "0"
    assert "cgroup_root" in host.journal()


def test_keys_come_as_credentials(started: Host) -> None:
    """The drop-in hands keys over in files that are the service's alone; one missing is told."""
    host = started
    folder = "/etc/systemd/system/alloy-agent.service.d"
    example = ROOT / "systemd/alloy-agent.service.d/tls.conf.example"
    host.put(f"{folder}/tls.conf", example.read_text())
    try:
        host.ok("systemctl", "daemon-reload")
        assert host.run("systemctl", "restart", "alloy-agent").rc != 0
        assert "CREDENTIALS" in host.journal().upper()
        for name in ("ca.pem", "agent.pem", "agent.key"):
            host.put(f"/etc/alloy/tls/{name}", f"{name} of a test\n")
        host.run("systemctl", "reset-failed", "alloy-agent")
        host.ok("systemctl", "restart", "alloy-agent")
        pid = str(host.main_pid())
        environment = host.ok("cat", f"/proc/{pid}/environ").split("\0")
        paths = dict(one.split("=", 1) for one in environment if "=" in one)
        key = paths["ALLOY_BRAIN_KEY_FILE"]
        assert key == f"{paths['CREDENTIALS_DIRECTORY']}/agent.key"
        inside = ("nsenter", "--target", pid, "--mount", "--")
        assert host.ok(*inside, "cat", key) == "agent.key of a test\n"
        assert host.ok(*inside, "stat", "-c", "%a", key).strip() == "400"
        assert "of a test" not in " ".join(environment)
    finally:
        host.run("rm", "-r", folder, "/etc/alloy/tls")
        host.ok("systemctl", "daemon-reload")


def test_after_a_boot_the_layout_is_there_again(started: Host) -> None:
    """Power off, control groups gone, boot: the same partitions, and numbers that only grow."""
    host = started
    boot = host.ok("cat", "/proc/sys/kernel/random/boot_id")
    before, granted = host.piece(), host.reserve("l1")
    assert granted["token"] > 0
    host.power_off()
    for top in host.tops():
        remove_groups(top)
    assert host.limit() is None
    host.boot()
    host.wait("the agent is up by itself", host.active)
    host.wait("the layout is there again", lambda: host.limit() == 64 * MIB)
    assert host.ok("cat", "/proc/sys/kernel/random/boot_id") != boot
    after = host.piece()
    assert after["id"] == before["id"]
    assert after["generation"] > before["generation"]
    again = host.reserve("l2")
    assert again["token"] > granted["token"], "a lease of an earlier boot is over, its token is not"
    assert host.restarts() == "none that nobody asked for"
