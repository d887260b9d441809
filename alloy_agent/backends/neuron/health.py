"""Hardware errors: what the driver logs, and what its counters make of it. Pure.

Whoever holds a device node can print any text into the kernel log through the driver. So a line
is a claim: it counts once a counter of its class has moved, which no tenant can do, and until
then it is reported as unconfirmed and changes nothing.

Source: aws-neuron-driver 2.24.7, PRINTK ioctl 113 and NEURON_HW_ERR lines; AWS node problem
detector rules; NRT status codes 1200 to 1205; AWS guidance: SRAM, HBM and DMA errors and compute
hangs are replaced; a repairable HBM error wants a driver reload; for a hang of collectives look at
the other workers first.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Final

from alloy_agent.model import Scope, Value

MARK: Final = "NEURON_HW_ERR="
LINE_CHARACTERS: Final = 2048


class ErrorClass(StrEnum):
    """A class of hardware error; with "neuron:" in front, a code of the fault catalogue."""

    SRAM = "sram_ue"
    HBM = "hbm_ue"
    HBM_REPAIRABLE = "hbm_repairable"
    CORE = "nc_ue"
    DMA = "dma_error"
    COLLECTIVES_HANG = "hang_on_collectives"
    COMPUTE_HANG = "execution_timeout"


class Advice(Value, frozen=True, kw_only=True):
    """What to do about a confirmed error, and how far it reaches."""

    action: str  # "replace", "drain_at_idle", "observe"
    scope: Scope
    text: str


# Word in the kernel log to class.
WORDS: Final = {
    "SRAM_UNCORRECTABLE_ERROR": ErrorClass.SRAM,
    "NC_UNCORRECTABLE_ERROR": ErrorClass.CORE,
    "HBM_UNCORRECTABLE_ERROR": ErrorClass.HBM,
    "HBM_REPAIRABLE_ERROR": ErrorClass.HBM_REPAIRABLE,
    "DMA_ERROR": ErrorClass.DMA,
    "HANG_ON_COLLECTIVES": ErrorClass.COLLECTIVES_HANG,
}

# Class to the counters that move with it: of the device, and of its cores ("core:").
COUNTERS: Final[dict[ErrorClass, tuple[str, ...]]] = {
    ErrorClass.SRAM: ("sram_ecc_uncorrected",),
    ErrorClass.HBM: ("mem_ecc_uncorrected", "core:hw_hbm_ue_error"),
    ErrorClass.HBM_REPAIRABLE: (
        "mem_ecc_repairable_uncorrected",
        "core:hw_repairable_hbm_ue_error",
    ),
    ErrorClass.CORE: ("sram_ecc_uncorrected", "core:hw_nc_ue_error"),
    ErrorClass.DMA: ("core:hw_dma_abort_error",),
    ErrorClass.COLLECTIVES_HANG: ("core:hw_collectives_error",),
    ErrorClass.COMPUTE_HANG: ("core:timeout",),
}

_REPLACE_DEVICE: Final = "drain the device and replace the instance: it does not heal"
ADVICE: Final[dict[ErrorClass, Advice]] = {
    ErrorClass.SRAM: Advice(action="replace", scope=Scope.DEVICE, text=_REPLACE_DEVICE),
    ErrorClass.HBM: Advice(action="replace", scope=Scope.DEVICE, text=_REPLACE_DEVICE),
    ErrorClass.CORE: Advice(action="replace", scope=Scope.DEVICE, text=_REPLACE_DEVICE),
    ErrorClass.DMA: Advice(action="replace", scope=Scope.DEVICE, text=_REPLACE_DEVICE),
    ErrorClass.HBM_REPAIRABLE: Advice(
        action="drain_at_idle",
        scope=Scope.DEVICE,
        text="drain when idle, then reload the driver or reboot: the row is repaired, "
        "nothing is replaced",
    ),
    ErrorClass.COLLECTIVES_HANG: Advice(
        action="observe",
        scope=Scope.DEVICE,
        text="look at the other workers of the job first: a peer that stopped looks the same",
    ),
    ErrorClass.COMPUTE_HANG: Advice(
        action="observe", scope=Scope.DEVICE, text="workload or device; it counts when repeated"
    ),
}
HUNG: Final = "hw_collectives_error"  # the cores' counter of collectives that did not come back
LINK_CODE: Final = "neuron:link_suspect"
LINK_ADVICE: Final = Advice(
    action="replace",
    scope=Scope.NODE,
    text="hangs repeat under different jobs: suspect a link, replace the instance",
)


class Claim(Value, frozen=True, kw_only=True):
    """What one line of the kernel log says; nothing of it is proven."""

    error: ErrorClass
    device: int | None = None
    core: int | None = None
    serial: str = ""
    line: str = ""


_DEVICE: Final = re.compile(r"\bnd(\d{1,3})\b")
_FIELD: Final = re.compile(r"\b(nd-id|nc-id|serial-num)\s*[=:]\s*([0-9a-fA-Fx]{1,20})")


def parse_line(line: str) -> Claim | None:
    """Return what a message of the kernel log claims; None: it is no hardware error of Neuron."""
    line = line[:LINE_CHARACTERS]
    _, found, rest = line.partition(MARK)
    if not found:
        return None
    word = re.match(r"[A-Z_]+", rest)
    error = WORDS.get(word[0]) if word is not None else None
    if error is None:
        return None
    fields = dict(_FIELD.findall(rest))
    bare = _DEVICE.search(line)
    return Claim(
        error=error,
        device=_small(fields.get("nd-id") or (bare[1] if bare is not None else "")),
        core=_small(fields.get("nc-id", "")),
        serial=fields.get("serial-num", "").removeprefix("0x").lower(),
        line=line,
    )


def _small(text: str) -> int | None:
    return int(text) if text.isdigit() and len(text) < 5 else None


class Judged(Value, frozen=True, kw_only=True):
    """A claim beside the counters."""

    confirmed: bool
    code: str
    advice: Advice
    detail: str


def judge_claim(
    claim: Claim, before: Mapping[str, int | None], after: Mapping[str, int | None]
) -> Judged:
    """Return whether counters bear a claim out.

    Args:
        claim: What the log says.
        before: Counters of the device before the line, by name; absent: not read.
        after: Counters now.
    """
    for name in COUNTERS[claim.error]:
        old, new = before.get(name), after.get(name)
        if old is not None and new is not None and new > old:
            advice = ADVICE[claim.error]
            return Judged(
                confirmed=True,
                code=f"neuron:{claim.error}",
                advice=advice,
                detail=f"{name} went from {old} to {new}; {advice.text}",
            )
    seen = any(after.get(name) is not None for name in COUNTERS[claim.error])
    why = "no counter of its class moved" if seen else "no counter of its class can be read"
    return Judged(
        confirmed=False,
        code=f"neuron:{claim.error}",
        advice=Advice(action="observe", scope=Scope.DEVICE, text="nothing to do on a claim alone"),
        detail=f"{why}; any holder of the node can write this line",
    )


def moved(
    before: Mapping[str, int | None], after: Mapping[str, int | None]
) -> tuple[tuple[ErrorClass, str], ...]:
    """Return the error classes whose counters grew, with the counter, without any log line.

    A counter that fell was cleared or the driver reloaded: that is a new start, not an error.
    """
    found = []
    for error, names in COUNTERS.items():
        for name in names:
            old, new = before.get(name), after.get(name)
            if old is not None and new is not None and new > old:
                found.append((error, f"{name} went from {old} to {new}"))
                break
    return tuple(found)


def hung_cores(
    before: Mapping[str, int | None], after: Mapping[str, int | None]
) -> tuple[int, ...]:
    """Return the physical cores whose count of hung collectives grew."""
    found = []
    for name, new in after.items():
        core, _, counter = name.partition(":")
        old = before.get(name)
        if counter == HUNG and core != "core" and old is not None and new is not None and new > old:
            found.append(int(core.removeprefix("core")))
    return tuple(found)


class HangRule(Value, frozen=True, kw_only=True):
    """When hangs stop being the workload's: so many, in so long, of more than one tenant."""

    hangs: int = 3
    within_s: float = 86_400.0
    tenants: int = 2


class Hang(Value, frozen=True, kw_only=True):
    """One hang on a device."""

    time_s: float
    tenant: str


def judge_hangs(hangs: Sequence[Hang], now_s: float, rule: HangRule | None = None) -> Advice:
    """Return what a device's hangs add up to; without any, there is nothing to do."""
    rule = rule or HangRule()
    recent = [hang for hang in hangs if now_s - hang.time_s <= rule.within_s]
    tenants = {hang.tenant for hang in recent}
    if len(recent) >= rule.hangs and len(tenants) >= rule.tenants:
        return LINK_ADVICE
    if not recent:
        return Advice(action="observe", scope=Scope.DEVICE, text="no hang")
    return ADVICE[ErrorClass.COLLECTIVES_HANG]
