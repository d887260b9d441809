"""Reading and writing of what callers pass by pointer."""

from __future__ import annotations

import ctypes
from typing import Any


def target(argument: Any) -> Any:
    """Return the object behind `byref(x)`, or the argument itself."""
    return getattr(argument, "_obj", argument)


def put(argument: Any, value: int) -> None:
    """Store a number where the argument points."""
    target(argument).value = value


def put_text(buffer: Any, length: Any, text: str) -> int:
    """Store a C string; returns the code: 7 INSUFFICIENT_SIZE if it does not fit."""
    raw = text.encode()
    if len(raw) + 1 > number(length):
        return 7
    buffer.value = raw
    return 0


def put_pointer(argument: Any, value: int) -> None:
    """Store a handle in a pointer variable."""
    ctypes.c_void_p.from_address(ctypes.addressof(target(argument))).value = value


def put_field_pointer(struct: Any, field: str, value: int) -> None:
    """Store a handle in a pointer field of a struct."""
    place = ctypes.addressof(struct) + getattr(type(struct), field).offset
    ctypes.c_void_p.from_address(place).value = value


def put_slot(array: Any, index: int, value: int) -> None:
    """Store a handle in an array of pointers."""
    size = ctypes.sizeof(ctypes.c_void_p)
    place = ctypes.addressof(target(array)) + index * size
    ctypes.c_void_p.from_address(place).value = value


def pointer(argument: Any) -> int:
    """Return the handle in a pointer variable."""
    return ctypes.c_void_p.from_address(ctypes.addressof(target(argument))).value or 0


def number(argument: Any) -> int:
    """Return a plain number, given as such or as a ctypes value."""
    return int(getattr(argument, "value", argument))
