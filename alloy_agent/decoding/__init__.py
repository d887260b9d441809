"""Strict typed YAML and JSON: every error is one line with file, line, path, cause and cure.

The readers of settings, layouts and documents stand on this room; it knows none of their schemas.
Input is
untrusted: it is bounded before it is built, and nothing but a `ConfigError` ever leaves.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path as FilePath
from typing import Any, TypeVar

from alloy_agent.decoding.convert import convert, nearest, unknown_name
from alloy_agent.decoding.tree import (
    SIZE_MAX_BYTES,
    Located,
    check_text,
    located_error,
    parse_yaml,
    path_text,
    scalar_of,
)
from alloy_agent.decoding.units import (
    GIB,
    MIB,
    TIB,
    duration,
    duration_seconds,
    size,
    size_bytes,
)
from alloy_agent.errors import ConfigError

__all__ = [
    "GIB",
    "MIB",
    "SIZE_MAX_BYTES",
    "TIB",
    "Located",
    "convert",
    "decode_json",
    "decode_yaml",
    "duration",
    "duration_seconds",
    "located_error",
    "nearest",
    "parse_yaml",
    "path_text",
    "read_text",
    "scalar_of",
    "size",
    "size_bytes",
    "unknown_name",
]

T = TypeVar("T")


def decode_yaml(text: str, type_: type[T], file: str) -> T:
    """Return a YAML text as a value of `type_`.

    Raises:
        ConfigError: "file:line: path: cause" with the cure.
    """
    return convert(parse_yaml(text, file), type_)


def decode_json(text: str, type_: type[T], file: str) -> T:
    """Return a JSON text as a value of `type_`; a key that stands twice is refused.

    Raises:
        ConfigError: "file:line: path: cause" with the cure.
    """
    check_text(text, file)
    import json

    import msgspec

    try:
        plain = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
    except RecursionError as exc:
        raise ConfigError(f"{file}: nested too deeply", cure="flatten it") from exc
    except json.JSONDecodeError as exc:
        raise ConfigError(
            f"{file}:{exc.lineno}: not JSON, {exc.msg}", cure="correct it there"
        ) from exc
    except ValueError as exc:
        raise ConfigError(f"{file}: {exc}", cure="correct the value") from exc
    try:
        return msgspec.convert(plain, type_)
    except (msgspec.ValidationError, RecursionError) as exc:
        # JSON is nearly all YAML: read it again with lines, which raises the same complaint with
        # its place.
        convert(parse_yaml(text.expandtabs(1), file), type_)
        raise ConfigError(f"{file}: {exc}", cure="correct the value") from exc


OPEN_ALREADY = ("/dev/stdin", "/dev/fd/", "/proc/self/fd/")


def read_text(path: FilePath | str) -> str:
    """Return the text of a file ("/dev/stdin" and pipes that are open too), bounded and UTF-8.

    Raises:
        ConfigError: It is missing, unreadable, too large or no UTF-8; or no file at all: a named
            pipe may never have a writer, and opening a device may do something.
    """
    try:
        with os.fdopen(_open_file(os.fspath(path)), "rb") as stream:
            raw = stream.read(SIZE_MAX_BYTES + 1) or b""  # None: it has nothing to say now
    except OSError as exc:
        cures = {
            errno.ENOENT: "check the path",
            errno.EACCES: "run as root, or give this user read access",
            errno.EISDIR: "name a file in it",
        }
        cause = (exc.strerror or str(exc)).lower()
        cure = cures.get(exc.errno or 0, "check the path")
        raise ConfigError(f"{path}: cannot be read, {cause}", cure=cure) from exc
    except ValueError as exc:
        raise ConfigError(f"{str(path)!r}: not a path, {exc}", cure="check the path") from exc
    if len(raw) > SIZE_MAX_BYTES:
        raise ConfigError(f"{path}: larger than {SIZE_MAX_BYTES} bytes", cure="split the file")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as exc:
        line = raw.count(b"\n", 0, exc.start) + 1
        raise ConfigError(
            f"{path}:{line}: byte 0x{raw[exc.start]:02x} is no UTF-8", cure="save the file as UTF-8"
        ) from exc


KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


def _open_file(path: str) -> int:
    """Return a descriptor of a file, or of what is open already; nothing else is even opened.

    Raises:
        ConfigError: It is something else, or far too large.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC
    if path.startswith(OPEN_ALREADY):
        return os.open(path, flags)
    _refuse_odd(path, os.stat(path))  # noqa: PTH116 - before it is opened
    # It may have been replaced since: a pipe would then hold up the open, but for this.
    descriptor = os.open(path, flags | os.O_NONBLOCK)
    try:
        _refuse_odd(path, os.fstat(descriptor))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _refuse_odd(path: str, info: os.stat_result) -> None:
    kind = KINDS.get(stat.S_IFMT(info.st_mode))
    if kind is not None:
        raise ConfigError(f"{path}: is {kind}", cure="name a file")
    if info.st_size > SIZE_MAX_BYTES and stat.S_ISREG(info.st_mode):
        raise ConfigError(
            f"{path}: {info.st_size} bytes, and no such file is larger than {SIZE_MAX_BYTES}",
            cure="split the file",
        )


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"key '{key[:60]}' stands twice in one object")
            seen.add(key)
    return mapping


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no finite number")
