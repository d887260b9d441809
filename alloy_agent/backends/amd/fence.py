"""Which device nodes a tenant's cgroup lets it open.

A v1 `devices` hierarchy says so in files. In v2 the rules are programs that nobody can read back:
`host.deviceprograms` asks which are in effect, and a child in the tenant's cgroup what they allow.
On a host with both, v1 rules that let everything pass leave the word to the programs.

Source: kernel security/device_cgroup.c (`devices.list`), Documentation/admin-guide/cgroup-v1.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

from alloy_agent.backends.amd.files import Files, Roots
from alloy_agent.host.deviceprograms import METHOD, DevicePrograms
from alloy_agent.model import Value

DRM_MAJOR: Final = 226
RENDER_MINOR: Final = 128
_RULE: Final = re.compile(r"(?P<kind>[abc]) (?P<major>\*|[0-9]+):(?P<minor>\*|[0-9]+) (?P<how>\w+)")
# Character devices that every container may open. Source: OCI runtime specification.
_MEMORY_DEVICES: Final = {3: "/dev/null", 5: "/dev/zero", 7: "/dev/full", 8: "/dev/random"}


class Rules(Value, frozen=True, kw_only=True):
    """What a cgroup allows; `by` "" is no fence at all."""

    by: str
    allowed: tuple[str, ...]


class Fences:
    """Device rules by cgroup, each looked at once."""

    def __init__(self, files: Files, roots: Roots, programs: DevicePrograms | None = None) -> None:
        self._files, self._roots = files, roots
        self._programs = programs or DevicePrograms()
        self._known: dict[str, Rules | None] = {}
        self.method = "devices.list (v1)"
        self.reason = ""  # why the last rules asked for are unknown
        major, _, _ = (files.text(f"{roots.sys}/class/kfd/kfd/dev") or "").partition(":")
        self._kfd_major = int(major) if major.isdecimal() else -1

    def of(self, pid: int) -> Rules | None:
        """Return the rules of a process; None: they cannot be read, `reason` says why."""
        self.reason = ""
        v1 = v1_path(self._files, self._roots, pid)
        rules = None if v1 is None else self._once(v1, self._listed)
        v2 = v2_path(self._files, self._roots, pid)
        if v2 is None or (v1 is not None and (rules is None or rules.by)):
            return rules
        programs = self._once(v2, self._asked)
        return rules if v1 is not None and (programs is None or not programs.by) else programs

    def _once(self, path: str, read: Callable[[str], Rules | None]) -> Rules | None:
        if path not in self._known:
            self._known[path] = read(path)
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
        nodes = [f"{self._roots.dev}/kfd"]
        nodes += [
            f"{self._roots.dev}/dri/{name}"
            for name in self._files.listed(f"{self._roots.dev}/dri")
            if name.startswith("renderD")
        ]
        found = self._programs.rules_of(path, nodes)
        if isinstance(found, str):
            self.reason = found
            return None
        if found.by:
            self.method = METHOD
        allowed = tuple(node.replace(self._roots.dev, "/dev", 1) for node in found.allowed)
        return Rules(by=found.by, allowed=allowed)


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
