"""Which device nodes a tenant's cgroup lets it open.

A v1 `devices` hierarchy says so in files. In v2 the rules are programs that nobody can read back,
so a child joins the tenant's cgroup and asks the kernel (`access`) for each node, opening none.

Source: kernel security/device_cgroup.c (`devices.list`), Documentation/admin-guide/cgroup-v1.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Final

from alloy_agent.backends.amd.files import Files, Roots
from alloy_agent.model import Value

DRM_MAJOR: Final = 226
RENDER_MINOR: Final = 128
PROBE_S: Final = 5.0
_RULE: Final = re.compile(r"(?P<kind>[abc]) (?P<major>\*|[0-9]+):(?P<minor>\*|[0-9]+) (?P<how>\w+)")
# Character devices that every container may open. Source: OCI runtime specification.
_MEMORY_DEVICES: Final = {3: "/dev/null", 5: "/dev/zero", 7: "/dev/full", 8: "/dev/random"}


class Rules(Value, frozen=True, kw_only=True):
    """What a cgroup allows; `by` "" is no fence at all."""

    by: str
    allowed: tuple[str, ...]


class Fences:
    """Device rules by cgroup, each looked at once."""

    def __init__(self, files: Files, roots: Roots) -> None:
        self._files, self._roots = files, roots
        self._known: dict[str, Rules | None] = {}
        self.method = "devices.list (v1)"
        major, _, _ = (files.text(f"{roots.sys}/class/kfd/kfd/dev") or "").partition(":")
        self._kfd_major = int(major) if major.isdecimal() else -1

    def of(self, pid: int) -> Rules | None:
        """Return the rules of a process; None: they cannot be read."""
        v1 = v1_path(self._files, self._roots, pid)
        path = v1 or v2_path(self._files, self._roots, pid)
        if path is None:
            return None
        if path not in self._known:
            self._known[path] = self._listed(path) if v1 else self._asked(path)
        return self._known[path]

    def _listed(self, path: str) -> Rules | None:
        text = self._files.text(f"{path}/devices.list")
        if text is None:
            return None
        allowed: list[str] = []
        for line in text.splitlines():
            rule = _RULE.fullmatch(line.strip())
            if rule is None:
                return None
            if rule["kind"] != "b" and set("rw") & set(rule["how"]):
                allowed += self._paths(rule["kind"], rule["major"], rule["minor"])
        open_to_all = "*" in allowed
        name = "/".join(path.rsplit("/", 2)[-2:])
        return Rules(
            by="" if open_to_all else f"devices cgroup {name}",
            allowed=tuple(dict.fromkeys(allowed)),
        )

    def _paths(self, kind: str, major: str, minor: str) -> list[str]:
        if kind == "a" or major == "*":
            # "c *:* m" (mknod) is no access; whoever may read and write every device is unfenced.
            return ["*"]
        number = int(major)
        if number == self._kfd_major:
            return ["/dev/kfd"]
        if number == DRM_MAJOR:
            return self._render(minor)
        if number == 1 and minor.isdecimal():
            return [_MEMORY_DEVICES.get(int(minor), f"/dev/char/{major}:{minor}")]
        return []

    def _render(self, minor: str) -> list[str]:
        if minor == "*":
            return [f"/dev/dri/{name}" for name in self._files.listed(f"{self._roots.dev}/dri")]
        name = "renderD" if int(minor) >= RENDER_MINOR else "card"
        return [f"/dev/dri/{name}{minor}"]

    def _asked(self, path: str) -> Rules | None:
        self.method = "a child in the tenant's cgroup asked for each node (v2)"
        nodes = [f"{self._roots.dev}/kfd"]
        nodes += [
            f"{self._roots.dev}/dri/{name}"
            for name in self._files.listed(f"{self._roots.dev}/dri")
            if name.startswith("renderD")
        ]
        found = ask(f"{path}/cgroup.procs", nodes)
        if found is None:
            return None
        allowed = tuple(node.replace(self._roots.dev, "/dev", 1) for node in found)
        fenced = len(found) < len(nodes)
        return Rules(by=f"device program of {Path(path).name}" if fenced else "", allowed=allowed)


_CHILD: Final = """
import os, sys
with open(sys.argv[1], "w") as stream:
    stream.write(str(os.getpid()))
for node in sys.argv[2:]:
    if os.access(node, os.R_OK | os.W_OK):
        print(node)
print("asked")
"""


def ask(procs: str, nodes: list[str]) -> list[str] | None:
    """Return which nodes a process in a cgroup may open for reading and writing; None: unknown."""
    command = [sys.executable, "-I", "-S", "-c", _CHILD, procs, *nodes]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            timeout=PROBE_S,
            stdin=subprocess.DEVNULL,
            text=True,
            check=False,
        )
    except (subprocess.TimeoutExpired, OSError):
        return None
    lines = done.stdout.splitlines()
    return lines[:-1] if done.returncode == 0 and lines and lines[-1] == "asked" else None


def v1_path(files: Files, roots: Roots, pid: int) -> str | None:
    """Return the directory of a process in the v1 `devices` hierarchy; None: there is none."""
    mount = _mount(files, roots, "cgroup", "devices")
    path = _place(files, roots, pid, "devices")
    return None if mount is None or path is None else f"{mount}{path}".rstrip("/")


def v2_path(files: Files, roots: Roots, pid: int) -> str | None:
    """Return the directory of a process in the v2 tree; None: there is none."""
    mount = _mount(files, roots, "cgroup2", "")
    path = _place(files, roots, pid, "")
    return None if mount is None or path is None else f"{mount}{path}".rstrip("/")


def unified(files: Files, roots: Roots) -> str:
    """Return where the v2 tree is mounted; empty: nowhere."""
    return _mount(files, roots, "cgroup2", "") or ""


def _place(files: Files, roots: Roots, pid: int, controller: str) -> str | None:
    for line in (files.text(f"{roots.proc}/{pid}/cgroup") or "").splitlines():
        number, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        if (controller and controller in names.split(",")) or (
            not controller and number == "0" and not names
        ):
            return path
    return None


def _mount(files: Files, roots: Roots, kind: str, controller: str) -> str | None:
    for line in (files.text(f"{roots.proc}/self/mountinfo") or "").splitlines():
        before, _, after = line.partition(" - ")
        words, tail = before.split(), after.split()
        if len(words) < 5 or len(tail) < 3 or tail[0] != kind:
            continue
        if not controller or controller in tail[2].split(","):
            return words[4]
    return None
