"""Names as Kubernetes takes them. Pure.

Source: validation of `resource.k8s.io/v1` (KEP-4381) as measured on Kubernetes 1.36.2: device,
counter and counter set names are DNS labels; attribute names are C identifiers; pool names are DNS
sub-domains joined by slashes; a version is strict semver 2.0.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from typing import Final

LABEL: Final = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", re.ASCII)
SUBDOMAIN: Final = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*")
IDENTIFIER: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,31}", re.ASCII)
SEMVER: Final = re.compile(
    r"(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)"
    r"(-(0|[1-9]\d*|\d*[A-Za-z-][0-9A-Za-z-]*)(\.(0|[1-9]\d*|\d*[A-Za-z-][0-9A-Za-z-]*))*)?"
    r"(\+[0-9A-Za-z-]+(\.[0-9A-Za-z-]+)*)?",
    re.ASCII,
)
LABEL_BYTES: Final = 63
STRING_BYTES: Final = 64


def label(text: str) -> str:
    """Return a DNS label that names `text`: as it is where that works, else with a hash behind."""
    plain = re.sub(r"[^a-z0-9-]+", "-", text.lower().replace(".", "")).strip("-")
    faithful = plain.replace("-", "") == re.sub(r"[^a-z0-9]", "", text.lower())
    if plain and faithful and len(plain) <= LABEL_BYTES:
        return plain
    return _hashed(plain, text)


def _hashed(plain: str, text: str) -> str:
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:12]
    return f"{plain[: LABEL_BYTES - 13]}-{digest}".strip("-")


def distinct(names: Iterable[str]) -> dict[str, str]:
    """Return a label for each name, no two alike: where two would be, both carry a hash."""
    wanted = list(dict.fromkeys(names))
    plain = [label(name) for name in wanted]
    return {
        name: short if plain.count(short) == 1 else _hashed(short, name)
        for name, short in zip(wanted, plain, strict=True)
    }


def subdomain(text: str) -> str:
    """Return one DNS sub-domain that names `text`, for use as a part of a pool name."""
    lowered = text.lower().replace(":", "-")
    if SUBDOMAIN.fullmatch(lowered) and len(lowered) <= LABEL_BYTES:
        return lowered
    return label(text)


def semver(text: str) -> str | None:
    """Return a driver's version as strict semver, or None where it has no number in front."""
    match = re.match(r"\D*(\d+)(?:\.(\d+))?(?:\.(\d+))?", text)
    if match is None:
        return None
    return ".".join(str(int(part or 0)) for part in match.groups())


def short(text: str, limit: int = STRING_BYTES) -> str:
    """Return text cut to `limit` bytes of UTF-8, never within a character."""
    return text.encode("utf-8", "replace")[:limit].decode("utf-8", "ignore")


def label_value(text: str) -> str:
    """Return text as the value of a label or taint: at most 63 of the characters allowed there."""
    plain = re.sub(r"[^A-Za-z0-9_.-]+", "-", text)[:LABEL_BYTES]
    return plain.strip("-_.")
