"""Container device specs: one file for each claim, with exactly what its pieces need.

Theory of operation. The kubelet hands the qualified ids of a prepared claim to the runtime, which
looks them up in the files of its spec directories and edits the container accordingly. A file that
does not load takes all its devices with it, silently; so a spec is checked here before it is
written, more strictly than the readers do, and written so that no reader ever sees a part of it.

Rules that stay true in here:

* Names carry the claim's UID, so none is ever used twice: runtimes keep what they have read.
* Each device has edits (one without makes the whole file invalid), names have two characters or
  more (an old reader dies of one), the version is the lowest that covers what is used.
* Device nodes are granted `rw`, never `m`: a container makes no nodes.
* The temporary file does not end like a spec. Files that are not ours by name are never touched.

Source: Container Device Interface specification 1.1.0; the oddities as measured with podman 4.3.1.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from alloy_agent.errors import AlloyError
from alloy_agent.model import Access, Value

VERSION: Final = "0.5.0"
CLASS: Final = "claim"
MODE: Final = 0o644
_NAME: Final = re.compile(r"[A-Za-z]([A-Za-z0-9_.-]*[A-Za-z0-9])", re.ASCII)
_DEVICE: Final = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.:-]*[A-Za-z0-9])", re.ASCII)
_VARIABLE: Final = re.compile(r"[^=\0]+=[^\0]*")
_EDITS: Final = {"env", "deviceNodes", "mounts", "hooks"}
_NODE_KEYS: Final = {
    "path", "hostPath", "type", "major", "minor", "fileMode", "permissions", "uid", "gid"
}  # fmt: skip

Document = dict[str, Any]


class CdiError(AlloyError):
    """The spec directory refuses, or a spec would not load."""


class CdiDevice(Value, frozen=True, kw_only=True):
    """One device of a claim: its name in the file, and how to be inside of the piece."""

    name: str
    access: Access


def device_name(claim: str, device: str) -> str:
    """Return a device's name in a claim's file."""
    return f"{claim}-{device}"


def qualified(vendor: str, name: str) -> str:
    """Return the id that runtimes look up."""
    return f"{vendor}/{CLASS}={name}"


def spec_of(vendor: str, devices: Sequence[CdiDevice], extra_env: Mapping[str, str]) -> Document:
    """Return the spec of one claim.

    Args:
        vendor: Domain of the driver.
        devices: In the order of the allocation.
        extra_env: Set for the container whichever of the devices it gets.
    """
    return {
        "cdiVersion": VERSION,
        "kind": f"{vendor}/{CLASS}",
        "devices": [
            {"name": one.name, "containerEdits": _edits(one.access, extra_env)} for one in devices
        ],
    }


def joined(devices: Sequence[CdiDevice]) -> tuple[CdiDevice, ...]:
    """Return devices whose variables name all pieces that stand beside each other.

    Each device sets variables for its own piece, and of two settings of one variable a container
    sees the last. Where a claim gives several pieces, each therefore names them all, in order.
    """
    values: dict[str, list[str]] = {}
    for one in devices:
        for key, value in one.access.environment.items():
            values.setdefault(key, []).append(value)

    return tuple(
        msgspec.structs.replace(
            one,
            access=msgspec.structs.replace(
                one.access,
                environment={key: _join(key, values[key]) for key in one.access.environment},
            ),
        )
        for one in devices
    )


def _join(key: str, values: Sequence[str]) -> str:
    unique = list(dict.fromkeys(values))
    if key == "ROCR_VISIBLE_DEVICES" and len(values) > 1:
        # Inside of its fence a container sees as many devices as it was given, counted from 0.
        return ",".join(map(str, range(len(values))))
    return ",".join(unique) if "VISIBLE" in key or len(unique) == 1 else unique[-1]


def _edits(access: Access, extra_env: Mapping[str, str]) -> Document:
    edits: Document = {
        "env": [f"{key}={value}" for key, value in {**extra_env, **access.environment}.items()]
    }
    if access.device_nodes:
        edits["deviceNodes"] = [{"path": node, "permissions": "rw"} for node in access.device_nodes]
    return edits


# --- checking ------------------------------------------------------------------------------------


def problems(spec: object) -> tuple[str, ...]:
    """Return why readers would not load a spec, one line each; empty: all would."""
    if not isinstance(spec, dict):
        return ("a spec is an object",)
    return tuple(_problems(spec))


def _problems(spec: Document) -> Iterator[str]:
    unknown = set(spec) - {"cdiVersion", "kind", "devices", "containerEdits"}
    if unknown:
        yield f"unknown keys {', '.join(sorted(map(str, unknown)))}"
    if spec.get("cdiVersion") not in ("0.3.0", "0.4.0", "0.5.0"):
        yield f"cdiVersion {spec.get('cdiVersion')!r}: old readers know 0.3.0 to 0.5.0"
    vendor, _, kind = str(spec.get("kind", "")).partition("/")
    for what, name in (("vendor", vendor), ("class", kind)):
        if not _NAME.fullmatch(name):
            yield f"{what} {name!r} starts with a letter, ends in one or a digit, has two or more"
    if "." in kind:
        yield f"class {kind!r}: a dot needs a version that old readers reject"
    devices = spec.get("devices")
    if not isinstance(devices, list) or not devices:
        yield "there is no device"
        return
    names = [device.get("name") if isinstance(device, dict) else None for device in devices]
    for twice in {one for one in names if names.count(one) > 1}:
        yield f"two devices are named {twice!r}"
    for device in devices:
        yield from _device_problems(device)


def _device_problems(device: object) -> Iterator[str]:
    if not isinstance(device, dict) or set(device) - {"name", "containerEdits"}:
        yield "a device has a name and edits, nothing else"
        return
    name, edits = device.get("name"), device.get("containerEdits")
    if not isinstance(name, str) or not _DEVICE.fullmatch(name):
        yield f"device name {name!r} has other characters than it may, or only one"
    if not isinstance(edits, dict) or not any(edits.values()):
        yield f"device {name}: no edits"
        return
    if set(edits) - _EDITS:
        yield f"device {name}: unknown edits {', '.join(sorted(set(edits) - _EDITS))}"
    for variable in edits.get("env", ()):
        if not isinstance(variable, str) or not _VARIABLE.fullmatch(variable):
            yield f"device {name}: {variable!r} is no NAME=VALUE"
    for node in edits.get("deviceNodes", ()):
        yield from _node_problems(str(name), node)


def _node_problems(device: str, node: object) -> Iterator[str]:
    if not isinstance(node, dict) or set(node) - _NODE_KEYS:
        yield f"device {device}: a device node with unknown keys"
        return
    path = node.get("path")
    if not isinstance(path, str) or not path.startswith("/") or ".." in path.split("/"):
        yield f"device {device}: {path!r} is no absolute path"
    permissions = str(node.get("permissions", ""))
    if not set(permissions) <= set("rw"):
        yield f"device {device}: permissions {permissions!r} are more than rw"


# --- files ---------------------------------------------------------------------------------------


class CdiDirectory:
    """The claims' files in one spec directory.

    Args:
        path: The directory, made when the first file is written.
        vendor: Domain of the driver; files that begin with it are ours.
    """

    def __init__(self, path: Path, vendor: str) -> None:
        self.path = path
        self.vendor = vendor

    def file_of(self, claim: str) -> Path:
        """Return where a claim's file is.

        Raises:
            CdiError: The claim's UID is no name for a file.
        """
        if not re.fullmatch(r"[A-Za-z0-9-]{1,64}", claim):
            raise CdiError(f"claim {claim!r}: its UID is no name for a file")
        return self.path / f"{self.vendor}-{CLASS}_{claim}.json"

    def write(self, claim: str, spec: Document) -> bool:
        """Put a claim's file in place, whole and on disk; return whether it was not there so.

        Raises:
            CdiError: The directory cannot be written, or the spec would not load; nothing changed.
        """
        wrong = problems(spec)
        if wrong:
            raise CdiError(f"claim {claim}: its CDI spec would not load: {'; '.join(wrong)}")
        target = self.file_of(claim)
        data = json.dumps(spec, indent=1).encode()
        if self._content(target) == data:
            return False
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._replace(target, data)
        except OSError as exc:
            raise CdiError(
                f"CDI directory {self.path}: {exc.strerror or exc}",
                cure="mount it writable at the path that the container runtime reads",
            ) from exc
        return True

    def _replace(self, target: Path, data: bytes) -> None:
        descriptor, name = tempfile.mkstemp(prefix=f".{self.vendor}-", suffix=".tmp", dir=self.path)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
                file.flush()
                os.fchmod(file.fileno(), MODE)
                os.fsync(file.fileno())
            Path(name).replace(target)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
        folder = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    @staticmethod
    def _content(target: Path) -> bytes | None:
        try:
            return target.read_bytes()
        except OSError:
            return None

    def read(self, claim: str) -> Document | None:
        """Return a claim's spec, or None where there is none that loads."""
        try:
            spec = json.loads(self._content(self.file_of(claim)) or b"")
        except (ValueError, RecursionError):
            return None
        return spec if not problems(spec) else None

    def claims(self) -> tuple[str, ...]:
        """Return the claims that have a file of ours here."""
        start = f"{self.vendor}-{CLASS}_"
        try:
            names = sorted(entry.name for entry in self.path.iterdir())
        except OSError:
            return ()
        return tuple(
            name.removeprefix(start).removesuffix(".json")
            for name in names
            if name.startswith(start) and name.endswith(".json")
        )

    def variable(self, claim: str, name: str) -> str:
        """Return a variable that a claim's file sets, or nothing."""
        for device in (self.read(claim) or {}).get("devices", ()):
            for one in device["containerEdits"].get("env", ()):
                if one.startswith(f"{name}="):
                    return str(one.removeprefix(f"{name}="))
        return ""

    def remove(self, claim: str) -> None:
        """Remove a claim's file; one that is gone is fine.

        Raises:
            CdiError: It cannot be removed.
        """
        self._unlink(self.file_of(claim))

    def _unlink(self, path: Path) -> None:
        try:
            path.unlink(missing_ok=True)
        except OSError as exc:
            raise CdiError(
                f"CDI file {path}: {exc.strerror or exc}", cure="make its directory writable"
            ) from exc

    def sweep(self, living: Iterable[str]) -> tuple[str, ...]:
        """Remove our files of claims that do not live, and what a crash left half-written.

        Returns:
            The names of the removed files.
        """
        keep = {self.file_of(claim).name for claim in living}
        removed = []
        try:
            entries = sorted(self.path.iterdir())
        except OSError:
            return ()
        for entry in entries:
            ours = entry.name.startswith(f"{self.vendor}-{CLASS}_") and entry.suffix == ".json"
            part = entry.name.startswith(f".{self.vendor}-") and entry.suffix == ".tmp"
            if part or (ours and entry.name not in keep):
                self._unlink(entry)
                removed.append(entry.name)
        return tuple(removed)
