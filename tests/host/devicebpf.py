"""Device programs for real: loads and attaches them to a cgroup, as a container runtime does."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from uuid import uuid4

from alloy_agent.host.cgroupfs import detect
from alloy_agent.host.deviceprograms import CGROUP_DEVICE, SYSCALLS

PROG_LOAD, PROG_ATTACH, CGROUP_DEVICE_TYPE, ALLOW_MULTI = 5, 8, 15, 2
CHARACTER = 2  # BPF_DEVCG_DEV_CHAR
MOVE, LOAD, EXIT, JUMP_UNEQUAL = 0xB7, 0x61, 0x95, 0x55


def _bpf(command: int, attributes: bytes) -> int:
    buffer = ctypes.create_string_buffer(attributes.ljust(128, b"\0"), 128)
    number = SYSCALLS[platform.machine()]
    result = ctypes.CDLL(None, use_errno=True).syscall(number, command, buffer, 128)
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return int(result)


def _instruction(
    code: int, target: int = 0, source: int = 0, skip: int = 0, value: int = 0
) -> bytes:
    return struct.pack("<BBhi", code, source << 4 | target, skip, value)


def allowing(numbers: Sequence[tuple[int, int]]) -> bytes:
    """Return a program that lets these character devices be opened and nothing else.

    `struct bpf_cgroup_dev_ctx` has access type (kind in its low half), major, minor.
    """
    code = _instruction(LOAD, 2, 1, 4) + _instruction(LOAD, 3, 1, 8)
    for major, minor in numbers:
        code += _instruction(JUMP_UNEQUAL, 2, 0, 3, major)
        code += _instruction(JUMP_UNEQUAL, 3, 0, 2, minor)
        code += _instruction(MOVE, 0, 0, 0, 1) + _instruction(EXIT)
    return code + _instruction(MOVE, 0, 0, 0, 0) + _instruction(EXIT)


def allowing_all() -> bytes:
    """Return a program that lets everything be opened."""
    return _instruction(MOVE, 0, 0, 0, 1) + _instruction(EXIT)


def attach(folder: str, code: bytes) -> None:
    """Attach a program to a cgroup; it goes with the cgroup."""
    instructions = ctypes.create_string_buffer(code, len(code))
    license_text = ctypes.create_string_buffer(b"GPL")
    count, place = len(code) // 8, ctypes.addressof(instructions)
    head = struct.pack("<IIQQ", CGROUP_DEVICE_TYPE, count, place, ctypes.addressof(license_text))
    program = _bpf(PROG_LOAD, head)
    target = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        _bpf(PROG_ATTACH, struct.pack("<IIII", target, program, CGROUP_DEVICE, ALLOW_MULTI))
    finally:
        os.close(target)
        os.close(program)


def why_not() -> str:
    """Return why this host lets no device program be attached; "" if it does."""
    tree = detect().unified
    if os.geteuid() != 0 or tree is None:
        return "needs root and a cgroup v2 tree"
    if platform.machine() not in SYSCALLS:
        return f"the number of bpf(2) on {platform.machine()} is not known here"
    try:
        with group():
            return ""
    except OSError as error:
        return f"bpf(2) or the v2 tree refuses: {error.strerror}"


@contextlib.contextmanager
def group(code: bytes | None = None) -> Iterator[str]:
    """Give a cgroup of its own in the v2 tree, with a program attached; it is removed after."""
    tree = detect().unified
    assert tree is not None
    folder = Path(tree.folder(f"alloytest-bpf-{os.getpid()}-{uuid4().hex[:8]}"))
    folder.mkdir()
    try:
        attach(str(folder), allowing_all() if code is None else code)
        yield str(folder)
    finally:
        folder.rmdir()
