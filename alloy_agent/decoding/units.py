"""Durations and sizes as people write them, and the field types that accept them.

A field that is declared with `duration` or `size` takes a plain number (seconds, bytes) or a text
with its unit, and has a floor and a ceiling that hold for both. The unit stands last in the field's
name as everywhere, since the value is always seconds or bytes once read.
"""

from __future__ import annotations

import re
from typing import Final

from msgspec import Meta

MIB: Final = 1 << 20
GIB: Final = 1 << 30
TIB: Final = 1 << 40

_SECONDS: Final = {
    "us": 1e-6,
    "ms": 1e-3,
    "s": 1.0,
    "m": 60.0,
    "min": 60.0,
    "h": 3600.0,
    "d": 86400.0,
}
_BYTES: Final = {
    "B": 1,
    "kB": 1000,
    "KB": 1000,
    "MB": 1000**2,
    "GB": 1000**3,
    "TB": 1000**4,
    "KiB": 1 << 10,
    "MiB": MIB,
    "GiB": GIB,
    "TiB": TIB,
    "Ki": 1 << 10,
    "Mi": MIB,
    "Gi": GIB,
    "Ti": TIB,
}
_NUMBER_AND_UNIT: Final = re.compile(r"([0-9]{1,15})(?:\.([0-9]{1,9}))? ?([A-Za-z]+)", re.ASCII)


def duration(floor: str, ceiling: str) -> Meta:
    """Return the mark of a `float` field in seconds that also takes texts like "100ms"."""
    return Meta(
        ge=duration_seconds(floor), le=duration_seconds(ceiling), extra={"unit": "duration"}
    )


def size(floor: str, ceiling: str) -> Meta:
    """Return the mark of an `int` field in bytes that also takes texts like "8GiB"."""
    return Meta(ge=size_bytes(floor), le=size_bytes(ceiling), extra={"unit": "size"})


def duration_seconds(text: str) -> float:
    """Return the seconds that a text like "100ms", "2s", "1.5m", "6h" means.

    Raises:
        ValueError: The text is no number with one of the known units; the message names them.
    """
    whole, fraction, unit = _split(text, _SECONDS, "a duration", "100ms, 2s, 5m or 6h")
    return float(f"{whole}.{fraction or '0'}") * _SECONDS[unit]


def size_bytes(text: str) -> int:
    """Return the bytes that a text like "8GiB", "512MiB" or "1.5GB" means, rounded down.

    Raises:
        ValueError: The text is no number with one of the known units; the message names them.
    """
    whole, fraction, unit = _split(text, _BYTES, "a size", "512MiB, 8GiB or 64000MB")
    scale = 10 ** len(fraction)
    total: int = (int(whole) * scale + int(fraction or "0")) * _BYTES[unit] // scale
    return total


def _split(
    text: str, units: dict[str, float] | dict[str, int], what: str, examples: str
) -> tuple[str, str, str]:
    match = _NUMBER_AND_UNIT.fullmatch(text)
    if match is None or match[3] not in units:
        raise ValueError(f"{text[:40]!r} is not {what}; write it like {examples}")
    return match[1], match[2] or "", match[3]
