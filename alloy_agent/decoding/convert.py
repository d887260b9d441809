"""A located tree to typed values, each error with its line.

msgspec does the typing. Its messages carry a path in which mapping keys are left out
(`$.layouts[...][0]`); the key is found again by converting the mapping's entries one at a time,
which happens on the error path only.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Final, TypeVar

import msgspec

from alloy_agent.decoding.tree import Located, Path, located_error, path_text
from alloy_agent.decoding.units import duration_seconds, size_bytes
from alloy_agent.errors import ConfigError

T = TypeVar("T")

_AT: Final = re.compile(r"(?P<cause>.*?)(?: - at `(?:key` in `)?\$(?P<path>[^`]*)`)?", re.DOTALL)
_STEP: Final = re.compile(r"\.(?P<key>[^.\[]+)|\[(?P<index>[0-9]+)\]|(?P<any>\[\.\.\.\])")
_WORDS: Final = {
    "`object | null`": "a mapping",
    "`object`": "a mapping",
    "`array`": "a list",
    "`array | null`": "a list",
    "`str`": "a text",
    "`int`": "a whole number",
    "`float`": "a number",
    "`bool`": "true or false",
    "`null`": "nothing",
}


def convert(tree: Located, type_: type[T]) -> T:
    """Return the tree as a value of `type_`.

    Raises:
        ConfigError: A key is unknown or missing or a value is of the wrong type or out of its
            bounds; the message names file, line, path, cause and cure.
    """
    plain = _plain(tree, _type_info(type_), ())
    try:
        return msgspec.convert(plain, type_)
    except msgspec.ValidationError as exc:
        raise _explain(tree, plain, type_, str(exc)) from exc


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the known name that `name` was probably meant to be, or nothing."""
    import difflib

    close = difflib.get_close_matches(name[:60], list(known), n=1, cutoff=0.6)
    return close[0] if close else ""


def unknown_name(name: str, known: Iterable[str]) -> str:
    """Return the cure for an unknown name: the nearest known one, else all of them."""
    names = sorted(known)
    close = nearest(name, names)
    return f"did you mean '{close}'?" if close else f"known are {', '.join(names) or 'none'}"


def _type_info(type_: Any) -> Any:
    import msgspec.inspect as inspection

    return inspection.type_info(type_)


def _plain(node: Located, info: Any, path: Path) -> Any:
    """Return plain values for msgspec, with keys checked and units read where the types say so."""
    kind, inner = _unwrap(info)
    if isinstance(node.value, dict):
        return _plain_mapping(node, kind, path)
    if isinstance(node.value, list):
        item = getattr(kind, "item_type", None)
        fixed = getattr(kind, "item_types", ())
        return [
            _plain(part, fixed[n] if n < len(fixed) else item, (*path, n))
            for n, part in enumerate(node.value)
        ]
    if inner and isinstance(node.value, str):
        return _with_unit(node, inner, path)
    return node.value


def _plain_mapping(node: Located, kind: Any, path: Path) -> dict[str, Any]:
    fields = getattr(kind, "fields", None)
    if fields is None:
        value_type = getattr(kind, "value_type", None)
        return {str(key): _plain(part, value_type, (*path, key)) for key, part in node.children()}
    types = {field.encode_name: field.type for field in fields}
    for key, line in node.key_lines.items():
        if key not in types and key != getattr(kind, "tag_field", None):
            at = Located(None, node.file, line)
            raise located_error(at, path, f"unknown key '{key[:60]}'", unknown_name(key, types))
    for field in fields:
        if field.required and node.child(field.encode_name) is None:
            known = ", ".join(f.encode_name for f in fields)
            cause = f"key '{field.encode_name}' is missing"
            raise located_error(
                node, path, cause, f"add '{field.encode_name}:' (known keys: {known})"
            )
    return {
        str(key): _plain(part, types.get(str(key)), (*path, key)) for key, part in node.children()
    }


def _unwrap(info: Any) -> tuple[Any, str]:
    """Return the type below marks and optionality, and the unit that its text has, if any."""
    unit = ""
    for _ in range(8):
        name = type(info).__name__
        if name == "Metadata":
            unit = (info.extra or {}).get("unit", unit)
            info = info.type
        elif name == "UnionType":
            rest = [part for part in info.types if type(part).__name__ != "NoneType"]
            structured = [part for part in rest if _is_structured(part)]
            choices = structured or rest
            if len(choices) != 1:
                return None, unit
            info = choices[0]
        else:
            break
    return info, unit


def _is_structured(info: Any) -> bool:
    return hasattr(info, "fields") or hasattr(info, "item_type") or hasattr(info, "value_type")


def _with_unit(node: Located, unit: str, path: Path) -> float | int:
    text = str(node.value)
    try:
        return duration_seconds(text) if unit == "duration" else size_bytes(text)
    except ValueError as exc:
        raise located_error(node, path, str(exc)) from exc


def _explain(tree: Located, plain: Any, type_: Any, message: str) -> ConfigError:
    match = _AT.fullmatch(message)
    cause = match["cause"] if match else message
    path = _resolve_path(plain, type_, message, (match["path"] if match else "") or "")
    node = tree.at(*path)
    for found, word in _WORDS.items():
        cause = cause.replace(found, word)
    cause = cause.replace(" matching regex '^/'", ": an absolute path")
    cause = cause.replace("Expected", "expected").replace("Invalid enum value", "unknown value")
    cure = _cure(type_, path, cause)
    if not isinstance(node.value, (dict, list)) and "got" not in cause and "unknown" not in cause:
        cause = f"{cause}, got {node.value!r}"[:200]
    return located_error(node, path, cause, cure)


def _cure(type_: Any, path: Path, cause: str) -> str:
    info = _type_info(type_)
    for step in path:
        kind, _ = _unwrap(info)
        fields = {f.encode_name: f.type for f in getattr(kind, "fields", ())}
        info = (
            fields.get(str(step))
            or getattr(kind, "item_type", None)
            or getattr(kind, "value_type", None)
        )
    kind, unit = _unwrap(info)
    values = getattr(kind, "values", None)
    if values is None and hasattr(kind, "cls") and hasattr(kind.cls, "__members__"):
        values = [member.value for member in kind.cls]
    if values:
        return f"use one of {', '.join(map(str, values))}"
    if unit:
        example = "100ms or 2s" if unit == "duration" else "512MiB or 8GiB"
        return f"write a value in these bounds, with its unit, like {example}"
    if "true or false" in cause:
        return "write true or false"
    return f"correct {path_text(path)}" if path else "see the annotated example in docs/"


def _resolve_path(plain: Any, type_: Any, message: str, text: str) -> Path:
    """Return msgspec's path with the mapping keys that it leaves out filled in."""
    path: list[str | int] = []
    for step in _STEP.finditer(text):
        if step["key"] is not None:
            path.append(step["key"])
        elif step["index"] is not None:
            path.append(int(step["index"]))
        else:
            path.append(_failing_key(plain, type_, message, path))
    return tuple(path)


def _failing_key(plain: Any, type_: Any, message: str, path: list[str | int]) -> str:
    mapping = _get(plain, path)
    for key in mapping:
        trial = _replaced(plain, path, {key: mapping[key]})
        try:
            msgspec.convert(trial, type_)
        except msgspec.ValidationError as exc:
            if str(exc) == message:
                return str(key)
    return str(next(iter(mapping), ""))


def _get(plain: Any, path: list[str | int]) -> Any:
    for step in path:
        plain = plain[step]
    return plain


def _replaced(plain: Any, path: list[str | int], new: Any) -> Any:
    if not path:
        return new
    copy = plain.copy()
    copy[path[0]] = _replaced(plain[path[0]], path[1:], new)
    return copy
