"""Device rules of cgroup v2: which programs are in effect, and what they let a process open.

In v2 the rules are BPF programs that nobody can read back as rules. Two things can be told:

* whether any is in effect (`BPF_PROG_QUERY` of the cgroup and its ancestors): none is no fence,
  proved, whatever runs inside;
* what they allow: a short-lived child joins the cgroup and asks the kernel (`access`) for each
  node, opening none. The kernel runs the programs for the question as it does for an open.

Beside the nodes in question the child asks for a witness that no container runtime lets a tenant
open; if that is allowed too, the programs fence nothing off.

Source: include/uapi/linux/bpf.h; kernel/bpf/cgroup.c (`BPF_PROG_QUERY`); security/device_cgroup.c
(`devcgroup_check_permission`); OCI runtime specification, default devices.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import subprocess
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

from alloy_agent.host import interpreter
from alloy_agent.host.clock import boottime_s
from alloy_agent.model import Value

PROG_QUERY: Final = 16  # enum bpf_cmd
CGROUP_DEVICE: Final = 6  # enum bpf_attach_type
EFFECTIVE: Final = 1  # BPF_F_QUERY_EFFECTIVE: those of the ancestors too
PROGRAMS_MAX: Final = 64  # kernel/bpf/cgroup.c, BPF_CGROUP_MAX_PROGS
SYSCALLS: Final = {"x86_64": 321, "aarch64": 280}
PROGRAM: Final = "device program"
PROBE_S: Final = 5.0
KEPT_S: Final = 30.0
KEPT_MOST: Final = 1024
WITNESS: Final = "/dev/kmsg"
METHOD: Final = "bpf(BPF_PROG_QUERY); a child in the tenant's cgroup asked for each node (v2)"

_ATTRIBUTES: Final = struct.Struct("<IIIIQI")  # query: target, type, flags, attached, ids, count
_CHILD: Final = """
import os, sys
with open(sys.argv[1], "w") as stream:
    stream.write(str(os.getpid()))
for node in sys.argv[2:]:
    if os.path.exists(node):
        print("1" if os.access(node, os.R_OK | os.W_OK) else "0", node)
print("asked")
"""


class DeviceRules(Value, frozen=True, kw_only=True):
    """What programs let a process open; `by` "" is no fence, `allowed` "*" everything."""

    by: str
    allowed: tuple[str, ...]


OPEN: Final = DeviceRules(by="", allowed=("*",))


def programs(folder: str) -> tuple[int, ...] | None:
    """Return the device programs in effect in a v2 cgroup, by id; None: they cannot be asked for.

    Args:
        folder: The cgroup's directory in the v2 tree.
    """
    number = SYSCALLS.get(platform.machine())
    if number is None:
        return None
    try:
        target = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        ids = (ctypes.c_uint32 * PROGRAMS_MAX)()
        query = (target, CGROUP_DEVICE, EFFECTIVE, 0, ctypes.addressof(ids), PROGRAMS_MAX)
        attributes = ctypes.create_string_buffer(_ATTRIBUTES.pack(*query), 64)
        call = ctypes.CDLL(None, use_errno=True).syscall
        if call(number, PROG_QUERY, attributes, _ATTRIBUTES.size):
            return None
        count = int(_ATTRIBUTES.unpack_from(attributes.raw)[5])
        return tuple(ids[: min(count, PROGRAMS_MAX)])
    finally:
        os.close(target)


def ask(procs: str, nodes: Iterable[str], probe_s: float = PROBE_S) -> dict[str, bool] | None:
    """Return, by node that exists, whether a process in a cgroup may open it; None: unknown.

    Args:
        procs: The cgroup's `cgroup.procs`.
        nodes: Paths of device nodes.
        probe_s: How long the child may take.
    """
    command = interpreter.isolated("-S", "-c", _CHILD, procs, *nodes)
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            timeout=probe_s,
            stdin=subprocess.DEVNULL,
            cwd=interpreter.FOLDER,
            text=True,
            check=False,
        )
    except (subprocess.TimeoutExpired, OSError):
        return None
    lines = done.stdout.splitlines()
    if done.returncode or not lines or lines[-1] != "asked":
        return None
    return {node: word == "1" for word, _, node in (line.partition(" ") for line in lines[:-1])}


class DevicePrograms:
    """Answers about device programs, kept while the same programs are in effect.

    A child for each tenant and look would cost more than the rest of an audit. Programs never
    change under their id, so an answer holds until others are attached; tables that a program
    reads may change, so it holds for `KEPT_S` at most.
    """

    def __init__(self, clock: Callable[[], float] = boottime_s, probe_s: float = PROBE_S) -> None:
        self._clock, self._probe_s = clock, probe_s
        self._kept: dict[tuple[str, tuple[int, ...] | None, tuple[str, ...]], _Answer] = {}

    def rules_of(
        self, folder: str, nodes: Iterable[str], witness: str = WITNESS
    ) -> DeviceRules | str:
        """Return what the device programs of a v2 cgroup allow, or why that cannot be told.

        Args:
            folder: The cgroup's directory in the v2 tree.
            nodes: The device nodes in question, the neighbours' among them.
            witness: A node that no tenant is given.
        """
        found = programs(folder)
        if found == ():
            return OPEN
        asked = (*dict.fromkeys(nodes), witness)
        key, now_s = (folder, found, asked), self._clock()
        kept = self._kept.get(key)
        if kept is not None and now_s - kept.at_s < KEPT_S:
            return kept.rules
        if len(self._kept) >= KEPT_MOST:
            self._kept.clear()
        answers = ask(f"{folder}/cgroup.procs", asked, self._probe_s)
        rules = _judged(folder, found, asked, answers)
        self._kept[key] = _Answer(now_s, rules)
        return rules


class _Answer(NamedTuple):
    at_s: float
    rules: DeviceRules | str


def _judged(
    folder: str,
    found: tuple[int, ...] | None,
    asked: tuple[str, ...],
    answers: dict[str, bool] | None,
) -> DeviceRules | str:
    name = folder.rstrip("/").rpartition("/")[2] or folder
    if answers is None:
        return f"no child could ask in cgroup {name} what its device programs allow"
    if all(answers.values()):
        return OPEN
    ids = "" if found is None else f" {', '.join(map(str, found))}"
    allowed = tuple(node for node in asked[:-1] if answers.get(node))
    return DeviceRules(by=f"{PROGRAM}{ids} of {name}", allowed=allowed)
