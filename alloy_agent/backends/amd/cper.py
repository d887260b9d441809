"""CPER records, as the vendor's library hands them over: severity and where one ends. Pure.

A record is a header and sections behind it, one record after the other in one buffer. The header
is not aligned: signature `CPER`, revision, end of signature, number of sections, severity, valid
bits, length of the whole record. What does not hold together is refused from there on, since the
next record begins where the length says.

Source: UEFI specification, appendix N; `amdsmi_cper_hdr_t` of the wrapper 7.0.2 (`_pack_` 1).
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

HEADER: Final = struct.Struct("<4sHIHIII8s16s16s16s16s8sIQ12s")
SIGNATURE: Final = b"CPER"
SIGNATURE_END: Final = 0xFFFFFFFF
RECORD_MAX: Final = 1 << 20
SEVERITIES: Final = {0: "uncorrected", 1: "fatal", 2: "corrected"}  # amdsmi_cper_sev_t


class Record(NamedTuple):
    """One record."""

    severity: str
    sections: int
    ident: str
    when: str  # as its writer says, "2026-11-30 11:52:07"; "" for no date


def parse(raw: bytes, count: int) -> tuple[Record, ...]:
    """Return up to `count` records of a buffer; those behind a broken one are left out."""
    found: list[Record] = []
    at = 0
    while len(found) < count and at + HEADER.size <= len(raw):
        fields = HEADER.unpack_from(raw, at)
        signed = fields[0] == SIGNATURE and fields[2] == SIGNATURE_END
        sections, severity, length = fields[3], fields[4], fields[6]
        whole = HEADER.size <= length <= RECORD_MAX and at + length <= len(raw)
        if not signed or severity not in SEVERITIES or not whole:
            break
        found.append(Record(SEVERITIES[severity], sections, _text(fields[12]), _when(fields[7])))
        at += length
    return tuple(found)


def _text(raw: bytes) -> str:
    return raw.rstrip(b"\0").decode("ascii", "backslashreplace")


def _when(raw: bytes) -> str:
    seconds, minutes, hours, _, day, month, year, century = raw
    if not (1 <= month <= 12 and 1 <= day <= 31 and hours < 24 and minutes < 60 and seconds < 61):
        return ""
    date = f"{century or 20:02d}{year:02d}-{month:02d}-{day:02d}"
    return f"{date} {hours:02d}:{minutes:02d}:{seconds:02d}"
