"""`HSA_CU_MASK`: one canonical form, made and read back; and which tenant gets which CUs.

A mask is soft, always: the environment is in the tenant's hands. ROCr stops reading at the first
mistake without a word and runs the rest unmasked, and a mask that leaves an XCC without a CU hangs
the queue. So a mask is encoded one way only, parsed back before it is handed out, and refused when
an XCC would get nothing, or not the same as the others.

Bits of a node count XCC first: bit b is on XCC `b mod n`. A run of k CUs on every XCC is the run of
bits `[first * n, (first + k) * n)`.

Source: ROCr `HSA_CU_MASK` parser; kernel kfd_mqd_manager.c, `mqd_symmetrically_map_cu_mask`.
"""

from __future__ import annotations

import re
from typing import Final

from alloy_agent.backends.amd.topology import KfdNode
from alloy_agent.errors import ConfigError
from alloy_agent.model import Share, Value

_SET: Final = re.compile(r"(?P<gpus>[0-9]+(?:-[0-9]+)?(?:,[0-9]+(?:-[0-9]+)?)*):(?P<cus>\S+)")
_RUNS: Final = re.compile(r"[0-9]+(?:-[0-9]+)?(?:,[0-9]+(?:-[0-9]+)?)*")
_HEX: Final = re.compile(r"0[xX][0-9a-fA-F]+")
BITS_MAX: Final = 1024  # the kernel clips longer masks
PAIRED_FROM: Final = 100000  # gfx10: CUs work in pairs, and the kernel refuses half of one


class Mask(Value, frozen=True, kw_only=True):
    """The CUs of one tenant: the same bits on each node it sees."""

    text: str
    bits: frozenset[int]
    cus: int


def encode(bits_by_gpu: dict[int, frozenset[int]], xccs: int, cus: int, gfx: int = 90402) -> str:
    """Return the value of `HSA_CU_MASK` for GPUs as the tenant numbers them.

    Args:
        bits_by_gpu: Bits for each GPU; GPU numbers count after `ROCR_VISIBLE_DEVICES`.
        xccs: XCCs of each node.
        cus: CUs of each node.
        gfx: Target version of the nodes, as KFD prints it.

    Raises:
        ConfigError: A mask that could hang a queue or would not be taken.
    """
    if not bits_by_gpu:
        raise ConfigError("a CU mask without a GPU", cure="name at least one")
    for bits in bits_by_gpu.values():
        check(bits, xccs, cus, gfx)
    text = ";".join(f"{gpu}:{_runs(bits_by_gpu[gpu])}" for gpu in sorted(bits_by_gpu))
    if parse(text) != bits_by_gpu:
        raise ConfigError(f"CU mask {text!r} does not read back as it was meant", cure="report it")
    return text


def check(bits: frozenset[int], xccs: int, cus: int, gfx: int = 90402) -> None:
    """Refuse a mask that leaves an XCC empty or unequal, or names CUs that there are not.

    Raises:
        ConfigError: Saying which rule is broken.
    """
    each = [sum(bit % xccs == xcc for bit in bits) for xcc in range(xccs)]
    cause = ""
    if not bits or min(bits) < 0 or max(bits) >= min(cus, BITS_MAX):
        cause = f"names CUs outside 0 to {min(cus, BITS_MAX) - 1}"
    elif min(each) == 0:
        cause = f"leaves an XCC of {xccs} without a CU, which hangs the queue"
    elif min(each) != max(each):
        cause = f"has {min(each)} to {max(each)} CUs on {xccs} XCCs; the slowest would hold all"
    elif gfx >= PAIRED_FROM and any((bit ^ 1) not in bits for bit in bits):
        cause = "splits a pair of CUs, which this architecture refuses"
    if cause:
        raise ConfigError(f"a CU mask of {len(bits)} CUs {cause}", cure="ask for another number")


def parse(text: str) -> dict[int, frozenset[int]]:
    """Return the bits for each GPU that a mask names; stricter than ROCr, which stops silently.

    Raises:
        ConfigError: Anything that ROCr would ignore, or take in another way.
    """
    found: dict[int, frozenset[int]] = {}
    for part in "".join(text.split()).split(";"):
        match = _SET.fullmatch(part)
        if match is None:
            raise _malformed(text, f"{part!r} is no <gpus>:<cus>")
        bits = _bits(text, match["cus"])
        for gpu in _numbers(text, match["gpus"]):
            if gpu in found:
                raise _malformed(text, f"GPU {gpu} is named twice")
            found[gpu] = bits
    return found


def _bits(text: str, cus: str) -> frozenset[int]:
    if _HEX.fullmatch(cus) and len(cus) <= 2 + BITS_MAX // 4:
        value = int(cus, 16)
        bits = frozenset(bit for bit in range(value.bit_length()) if value >> bit & 1)
    elif _RUNS.fullmatch(cus):
        bits = frozenset(_numbers(text, cus))
    else:
        raise _malformed(text, f"{cus[:40]!r} is no list of CUs")
    if not bits:
        raise _malformed(text, "a mask is empty")
    return bits


def _numbers(text: str, runs: str) -> list[int]:
    numbers: list[int] = []
    for run in runs.split(","):
        first, _, last = run.partition("-")
        low, high = int(first[:5]), int((last or first)[:5])
        if low > high or high >= BITS_MAX or len(first) > 4 or len(last) > 4:
            raise _malformed(text, f"{run[:40]!r} is no range below {BITS_MAX}")
        numbers += range(low, high + 1)
    return numbers


def _malformed(text: str, why: str) -> ConfigError:
    return ConfigError(
        f"HSA_CU_MASK {text[:80]!r}: {why}",
        cure="the runtime would ignore it and give the whole GPU; write it as 0:0-37",
    )


def _runs(bits: frozenset[int]) -> str:
    runs: list[list[int]] = []
    for bit in sorted(bits):
        if runs and bit == runs[-1][1] + 1:
            runs[-1][1] = bit
        else:
            runs.append([bit, bit])
    return ",".join(f"{a}" if a == b else f"{a}-{b}" for a, b in runs)


class MaskPlan(Value, frozen=True, kw_only=True):
    """Which CUs each share of a device gets; none at all where masks are not asked for.

    `each` CUs of every XCC go to each of `slots` opportunistic shares, from the top; production has
    the rest, so that no two masks have a CU in common whoever comes and goes.
    """

    gpus: int
    xccs: int  # of one node
    cus: int  # of one node
    gfx: int
    each: int = 0
    slots: int = 0

    @classmethod
    def of_nodes(cls, nodes: tuple[KfdNode, ...], each: int, slots: int) -> MaskPlan:
        """Return the plan for a device with these nodes, which are alike."""
        usable = [node for node in nodes if node.render_minor is not None]
        first = usable[0] if usable else KfdNode(number=0, gpu_id=0)
        smallest = min((node.cus for node in usable), default=0)
        return cls(
            gpus=len(usable),
            xccs=first.xccs,
            cus=smallest,
            gfx=first.gfx,
            each=each,
            slots=slots,
        )

    def of(self, share: Share, ordinal: int) -> Mask | None:
        """Return the mask of a share; None: it is not masked.

        Raises:
            ConfigError: There is no slot, or nothing is left for production.
        """
        if not self.each:
            return None
        per_xcc = self.cus // self.xccs
        rest = per_xcc - self.each * self.slots
        if rest < 1:
            raise ConfigError(
                f"{self.slots} opportunistic shares of {self.each} CUs leave production none of "
                f"{per_xcc} on an XCC",
                cure="lower amd.opportunistic_cus or amd.opportunistic_slots",
            )
        if share is Share.PRODUCTION:
            first, count = 0, rest
        elif ordinal < self.slots:
            first, count = rest + ordinal * self.each, self.each
        else:
            raise ConfigError(
                f"opportunistic share {ordinal} has no slot among {self.slots}",
                cure="raise amd.opportunistic_slots",
            )
        bits = frozenset(range(first * self.xccs, (first + count) * self.xccs))
        text = encode(dict.fromkeys(range(self.gpus), bits), self.xccs, self.cus, self.gfx)
        return Mask(text=text, bits=bits, cus=len(bits) * self.gpus)
