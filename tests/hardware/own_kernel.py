"""The agent on a kernel without cgroup v1: a virtual machine is made, booted and put to the test.

    python -m tests.hardware.own_kernel FOLDER [--boot-only]

Needs root, mmdebstrap, qemu-system-x86, busybox-static, e2fsprogs and kmod. It prints one line for
each claim and exits 0 when all hold. Under emulation it takes about half an hour, which is why it
is no test of every run: `ALLOY_TEST_QEMU="-accel kvm -cpu host"` makes it minutes where that works.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.machine import image
from tests.machine.guest import Machine

LAYOUT = {
    "version": "v1",
    "layouts": {
        "two": [{"match": {"vendor": "cpu"}, "cores": [1, 2], "memory": ["64MiB", "128MiB"]}]
    },
}
TOP = "/sys/fs/cgroup"
LONG_S = 3600.0
PYTEST = (
    "cd /opt/src && /opt/tests/bin/python -m pytest -q -p no:cacheprovider -rsf"
    " tests/contract tests/backends/cpu tests/crash/test_host_cpu.py tests/host"
    " -m 'host or not host' -k 'cpu or host' 2>&1"
)

Claim = tuple[str, bool, str]


def service(machine: Machine) -> Iterator[Claim]:
    """Yield what holds of the unit on a pure version 2 tree."""
    mounts = machine.ok("cat", "/proc/mounts")
    pure = "cgroup2 /sys/fs/cgroup " in mounts and " cgroup rw" not in mounts
    yield "the tree is version 2 alone", pure, ""
    machine.ok("systemctl", "start", "alloy-agent", timeout_s=LONG_S)
    yield "the unit is ready when start returns", True, ""
    doctor = json.loads(machine.run("alloy-agent", "doctor", "--json", timeout_s=LONG_S).out)
    bad = [d["subject"] for d in doctor["diagnoses"] if d["required"] and not d["ok"]]
    yield "doctor finds nothing missing", not bad, ", ".join(bad)
    machine.write("/root/layout.yaml", json.dumps(LAYOUT))
    machine.ok(
        *("alloy-agent", "apply", "/root/layout.yaml", "--layout", "two", "--yes"),
        timeout_s=LONG_S,
    )
    caps = machine.sh(f"cd {TOP}/alloy/cpu-node0 && cat 1c@0/memory.max 2c@1/cpuset.cpus").split()
    yield "caps and cores are in force", caps == [str(64 << 20), "2-3"], " ".join(caps)
    where = machine.ok(
        *("alloy-agent", "exec", "cpu-node0/1c@0", "--", "grep", "-E", "0::|Cpus_allowed_list"),
        *("/proc/self/cgroup", "/proc/self/status"),
        timeout_s=LONG_S,
    )
    inside = "0::/alloy/cpu-node0/1c@0" in where and where.rstrip().endswith("\t1")
    yield "a tenant is inside", inside, " ".join(where.split())
    audit = machine.run("alloy-agent", "audit", timeout_s=LONG_S)
    yield "the audit passes", audit.rc == 0, audit.out[:200]


def after(machine: Machine) -> Iterator[Claim]:
    """Yield what holds when the unit is stopped, and after a boot."""
    machine.ok("systemctl", "stop", "alloy-agent", timeout_s=LONG_S)
    machine.ok("systemctl", "daemon-reload", timeout_s=LONG_S)
    held = machine.sh(f"cat {TOP}/cgroup.subtree_control {TOP}/alloy/cgroup.subtree_control")
    lines = held.splitlines()
    kept = all({"cpuset", "memory"} <= set(line.split()) for line in lines)
    yield "systemd takes no controller away", kept and len(lines) == 2, held.strip()
    machine.ok("systemctl", "enable", "alloy-agent", timeout_s=LONG_S)
    machine.reboot()
    machine.wait(
        "the unit after the boot",
        lambda: machine.run("systemctl", "is-active", "alloy-agent").rc == 0,
        LONG_S,
    )
    machine.wait(
        "the layout after the boot",
        lambda: machine.run("test", "-d", f"{TOP}/alloy/cpu-node0/2c@1").rc == 0,
        LONG_S,
    )
    yield "after a boot the layout is there again", True, ""


def suite(machine: Machine) -> Iterator[Claim]:
    """Yield how the tests of the host went in there."""
    machine.ok("systemctl", "stop", "alloy-agent", timeout_s=LONG_S)
    done = machine.run("sh", "-c", PYTEST, timeout_s=LONG_S)
    yield "the tests of the host pass", done.rc == 0, done.out[-3000:]


def main() -> int:
    """Make the machine and try every claim; return the exit code."""
    parser = argparse.ArgumentParser(description="the agent on a kernel without cgroup v1")
    parser.add_argument("folder", type=Path, help="new; the image is made in it")
    parser.add_argument("--boot-only", action="store_true", help="leave out the test suite")
    arguments = parser.parse_args()
    problem = image.missing()
    if problem:
        sys.stdout.write(f"not here: {problem}\n")
        return 1
    made = image.build(arguments.folder)
    good = True
    with Machine(made, arguments.folder) as machine:
        for part in (service, after) if arguments.boot_only else (service, after, suite):
            for what, holds, seen in part(machine):
                sys.stdout.write(f"{'pass' if holds else 'FAIL'}  {what}  {seen}\n")
                sys.stdout.flush()
                good = good and holds
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
