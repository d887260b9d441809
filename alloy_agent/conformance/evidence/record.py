"""The format of one evidence record: plain text, canonical, hashed, chained.

A line of an evidence file is `{"body":{...},"hash":"<sha256 of the body>"}`, and a signed head
has one field more, `"sig"`. The line is canonical JSON (RFC 8785): keys sorted, no white space,
and only strings, integers within +-(2^53-1), booleans, null, lists of strings and one level of
objects, a subset in which the canonical form is exact. Times are therefore microseconds:
nanoseconds since 1970 do not fit into a JSON number of RFC 8785.

Rules that stay true in here:

* `body.prev` is the hash of the record before; the first record of a chain has sequence 1 and
  `ZERO_HASH`.
* The hash is taken over the bytes of the body as they stand in the file, and nothing else.
* What is written always reads back (`encode_line` refuses what `decode_line` would refuse).
"""

from __future__ import annotations

import re
from hashlib import sha256

import msgspec

from alloy_agent.errors import StoreError
from alloy_agent.model import Value

FILE_GLOB = "evidence-*.jsonl"  # in the order of their names, which hold the first sequence
FORMAT_VERSION = 1
ZERO_HASH = "0" * 64
MAX_INT = 2**53 - 1  # RFC 8785 section 3.2.2.3: numbers are IEEE 754 doubles
MAX_TEXT = (
    4096  # characters of one string; a hostile process name must not grow the chain without bound
)
MAX_LINE = 1 << 20
HEAD_EVERY = 256  # records between two signed heads, at most
SIGNATURE_CONTEXT = (
    b"alloy.evidence/v1\n"  # a signature over a record is no signature over anything else
)

RETENTION = "old files removed"  # reason of the gap record that accounts for a missing front

_HEAD = b'{"body":'
_KEY = re.compile(r"[a-z][a-z0-9_.]*\Z")

Scalar = str | int | bool | None


class Body(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a record says. Every field is always present, so that a missing one shows.

    `kind` is one of start, stop, gap, audit, judgement, tier, head. `lease` and `tenant` are
    empty where nobody holds the subject. `config` is the digest of the settings in force.
    """

    agent: str
    boot: str
    boottime_us: int
    check: str
    config: str
    data: dict[str, str | int | bool | tuple[str, ...] | None]
    expected: str
    kind: str
    lease: str
    method: str
    monotonic_us: int
    observed: str
    prev: str
    reason: str
    resolution: str
    seq: int
    subject: str
    tenant: str
    v: int
    verdict: str
    wall_us: int


class Line(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """A record as it stands in the file; `sig` is base64 and only on heads."""

    body: Body
    hash: str
    sig: str = ""


class Entry(Value, frozen=True, kw_only=True):
    """What a caller wants recorded; the log adds identity, times and the chain."""

    kind: str
    subject: str = ""
    check: str = ""
    verdict: str = ""
    expected: str = ""
    observed: str = ""
    method: str = ""
    resolution: str = ""
    reason: str = ""
    tenant: str = ""
    lease: str = ""
    data: dict[str, str | int | bool | tuple[str, ...] | None] = {}  # noqa: RUF012 - msgspec copies it


class ChainHead(Value, frozen=True, kw_only=True):
    """The last record of a chain: what an outside witness keeps to prove a truncation later."""

    sequence: int
    hash: str


_ENCODER = msgspec.json.Encoder(order="sorted")
_LINE_DECODER = msgspec.json.Decoder(Line)


def clean(text: str) -> str:
    """Return the text as it can stand in a record: valid UTF-8, bounded, cut with a mark."""
    if len(text) > MAX_TEXT:
        text = text[: MAX_TEXT - 1] + "…"
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def canonical(value: object) -> bytes:
    """Return the RFC 8785 form of a value of the restricted shape that this module documents."""
    return _ENCODER.encode(value)


def seal(body: Body) -> tuple[bytes, str]:
    """Return the canonical bytes of a body, and their hash.

    Raises:
        StoreError: A number or a key is outside of what canonical JSON can hold exactly.
    """
    numbers = [body.boottime_us, body.monotonic_us, body.wall_us, body.seq]
    numbers += [item for item in body.data.values() if isinstance(item, int)]
    if any(abs(number) > MAX_INT for number in numbers):
        raise StoreError(
            f"evidence record {body.seq} holds a number beyond 2^53-1",
            cure="record it as a string",
        )
    for key in body.data:
        if not _KEY.match(key):
            raise StoreError(
                f"evidence record {body.seq} has the field {key!r}",
                cure="name fields in lower-case ASCII",
            )
    raw = _ENCODER.encode(body)
    return raw, sha256(raw).hexdigest()


def encode_line(raw_body: bytes, digest: str, signature: str = "") -> bytes:
    """Return the line of a sealed body, with its line end."""
    tail = f',"hash":"{digest}"' + (f',"sig":"{signature}"' if signature else "") + "}\n"
    return _HEAD + raw_body + tail.encode("ascii")


class Record(msgspec.Struct, frozen=True):
    """A decoded record: what it says, what it claims as its hash, and what its hash is."""

    body: Body
    stated: str
    actual: str
    sig: str
    raw_body: bytes


def decode_line(raw: bytes) -> Record:
    """Return the record of one line without its line end.

    Raises:
        ValueError: The line is no record, or not in canonical form (`msgspec.DecodeError` is a
            ValueError).
    """
    line = _LINE_DECODER.decode(raw)
    if _ENCODER.encode(line) != raw:
        raise ValueError("not in canonical form")
    # canonical form is proved above, so the body lies between fixed bytes
    tail = len(line.hash) + (len(line.sig) + 9 if line.sig else 0) + 11
    raw_body = raw[len(_HEAD) : len(raw) - tail]
    return Record(line.body, line.hash, sha256(raw_body).hexdigest(), line.sig, raw_body)
