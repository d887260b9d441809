"""The driver's `gpu_metrics` table, read strictly: one layout for each revision, exact lengths.

A table whose header, revision or length does not agree is refused whole, since the vendor's own
library fills what is missing with zeros. A field that the firmware does not give has all bits set,
in its own width or as 0xFFFF in a wider one; both read as None.

The layouts are fields and offsets of `struct gpu_metrics_v1_*` in the kernel's
`kgd_pp_interface.h` (`curr_socket_power` is called `current_socket_power` here, as the library
does); a test derives every offset from the order and widths of the fields. Revision 1.9 and later
describe themselves and are not read here.
"""

from __future__ import annotations

import struct
from typing import Final

from alloy_agent.errors import BackendError
from alloy_agent.model import Value

HEADER: Final = struct.Struct("<HBB")
FORMAT: Final = 1
READ_MAX: Final = 8192
# Source: kgd_pp_interface.h, comment at `energy_accumulator`: 15.259 uJ, 2^-16 J.
JOULES_PER_TICK: Final = 2.0**-16
XCPS, XCCS = 8, 8

# Plausible readings; what is beyond was not measured. Source: fact sheet of the parts.
TEMPERATURE_C: Final = (-20.0, 150.0)
PERCENT_MAX: Final = 100.0


class Layout(Value, frozen=True, kw_only=True):
    """Where fields are in one revision; `xcp_size` 0: it tells nothing of single partitions."""

    sizes: tuple[int, ...]
    fields: dict[str, tuple[str, int]]
    xcp_at: int = 0
    xcp_sizes: tuple[int, ...] = ()
    busy_acc_at: int = 104


_HEAD: Final = {
    "temperature_hotspot": ("H", 4),
    "temperature_mem": ("H", 6),
    "current_socket_power": ("H", 10),
    "average_gfx_activity": ("H", 12),
    "average_umc_activity": ("H", 14),
}


def _residencies(at: int) -> dict[str, tuple[str, int]]:
    names = ("accumulation_counter", "prochot", "ppt", "socket_thm", "vr_thm", "hbm_thm")
    return {
        name if name == "accumulation_counter" else f"{name}_residency_acc": ("I", at + 4 * number)
        for number, name in enumerate(names)
    }


_LATE: Final = {
    **_HEAD,
    "energy_accumulator": ("Q", 24),
    "system_clock_counter": ("Q", 32),
    **_residencies(40),
    "gfx_activity_acc": ("I", 76),
    "mem_activity_acc": ("I", 80),
    "firmware_timestamp": ("Q", 288),
    "num_partition": ("H", 338),
}

LAYOUTS: Final[dict[int, Layout]] = {
    3: Layout(
        sizes=(120,),
        fields={
            "temperature_hotspot": ("H", 6),
            "temperature_mem": ("H", 8),
            "average_gfx_activity": ("H", 16),
            "average_umc_activity": ("H", 18),
            "average_socket_power": ("H", 22),
            "energy_accumulator": ("Q", 24),
            "system_clock_counter": ("Q", 32),
            "gfx_activity_acc": ("I", 80),
            "mem_activity_acc": ("I", 84),
            "firmware_timestamp": ("Q", 96),
        },
    ),
    4: Layout(
        sizes=(288,),
        fields={
            **_HEAD,
            "energy_accumulator": ("Q", 24),
            "system_clock_counter": ("Q", 32),
            "gfx_activity_acc": ("I", 56),
            "mem_activity_acc": ("I", 60),
            "firmware_timestamp": ("Q", 232),
        },
    ),
    5: Layout(
        sizes=(360,),
        fields={
            **_HEAD,
            "energy_accumulator": ("Q", 88),
            "system_clock_counter": ("Q", 96),
            "gfx_activity_acc": ("I", 120),
            "mem_activity_acc": ("I", 124),
            "firmware_timestamp": ("Q", 304),
        },
    ),
    6: Layout(
        sizes=(1664,),
        fields={
            **_HEAD,
            "energy_accumulator": ("Q", 16),
            "system_clock_counter": ("Q", 24),
            **_residencies(32),
            "gfx_activity_acc": ("I", 68),
            "mem_activity_acc": ("I", 72),
            "firmware_timestamp": ("Q", 256),
            "num_partition": ("H", 306),
        },
        xcp_at=312,
        xcp_sizes=(168,),
    ),
    7: Layout(sizes=(2208,), fields=_LATE, xcp_at=344, xcp_sizes=(232,)),
    # The element of 1.8 has three or four counters behind the busy ones, by kernel version.
    8: Layout(sizes=(3360, 3872), fields=_LATE, xcp_at=344, xcp_sizes=(376, 440), busy_acc_at=120),
}


class Metrics(Value, frozen=True, kw_only=True):
    """One reading. `busy_inst` and `busy_acc` are lists of XCCs for each partition, or empty."""

    revision: int
    values: dict[str, int]
    busy_inst: tuple[tuple[int | None, ...], ...] = ()
    busy_acc: tuple[tuple[int | None, ...], ...] = ()

    def get(self, name: str) -> int | None:
        """Return a field, or None if this revision or the firmware does not have it."""
        return self.values.get(name)


def parse(raw: bytes) -> Metrics:
    """Return the fields of a table.

    Raises:
        BackendError: It is cut short, of another length than its revision, or of an unknown one.
    """
    if len(raw) < HEADER.size:
        raise BackendError(f"gpu_metrics has {len(raw)} bytes, less than its header")
    size, form, revision = HEADER.unpack_from(raw)
    layout = LAYOUTS.get(revision) if form == FORMAT else None
    if layout is None:
        raise BackendError(f"gpu_metrics has revision {form}.{revision}, which is not known")
    if size not in layout.sizes or len(raw) != size:
        wanted = " or ".join(str(number) for number in layout.sizes)
        raise BackendError(
            f"gpu_metrics {form}.{revision} says {size} bytes and has {len(raw)}, not {wanted}"
        )
    values = {}
    for name, (kind, at) in layout.fields.items():
        value = _present(kind, struct.unpack_from(f"<{kind}", raw, at)[0])
        if value is not None:
            values[name] = value
    if not layout.xcp_sizes:
        return Metrics(revision=revision, values=values)
    step = layout.xcp_sizes[layout.sizes.index(size)]
    starts = [layout.xcp_at + number * step for number in range(XCPS)]
    return Metrics(
        revision=revision,
        values=values,
        busy_inst=tuple(_row("I", raw, start) for start in starts),
        busy_acc=tuple(_row("Q", raw, start + layout.busy_acc_at) for start in starts),
    )


def _row(kind: str, raw: bytes, at: int) -> tuple[int | None, ...]:
    return tuple(_present(kind, value) for value in struct.unpack_from(f"<{XCCS}{kind}", raw, at))


def _present(kind: str, value: int) -> int | None:
    ones = (1 << 8 * struct.calcsize(kind)) - 1
    return None if value in {ones, 0xFFFF} else value


def busy_ratio(row: tuple[int | None, ...]) -> float | None:
    """Return the mean of a partition's XCCs, 0 to 1; None where none of them tells one."""
    told = [value for value in row if value is not None and value <= PERCENT_MAX]
    return sum(told) / len(told) / PERCENT_MAX if told else None


def power_w(metrics: Metrics, cap_w: float | None) -> float | None:
    """Return the power of the whole device in watts; None if absent or impossible.

    The first reading after a start may be 0, which no powered device draws.
    """
    value = metrics.get("current_socket_power")
    if value is None:
        value = metrics.get("average_socket_power")
    if value is None or value == 0 or (cap_w and value > 2 * cap_w):
        return None
    return float(value)


def temperature_c(metrics: Metrics) -> float | None:
    """Return the hottest spot in degrees Celsius; None if absent or impossible."""
    value = metrics.get("temperature_hotspot")
    low, high = TEMPERATURE_C
    return float(value) if value is not None and low <= value <= high and value else None


HELD: Final = {
    "prochot_residency_acc": "processor hot",
    "ppt_residency_acc": "package power limit",
    "socket_thm_residency_acc": "socket temperature",
    "vr_thm_residency_acc": "voltage regulator temperature",
    "hbm_thm_residency_acc": "memory temperature",
}


def held_back(before: Metrics, after: Metrics) -> tuple[str, ...] | None:
    """Return what held the clocks back between two readings; None: this revision does not tell.

    A counter that went back was reset or wrapped: then nothing is known of the time between.
    """
    cycles = before.get("accumulation_counter"), after.get("accumulation_counter")
    pairs = {name: (before.get(name), after.get(name)) for name in HELD}
    told = {name: pair for name, pair in pairs.items() if None not in pair}
    if None in cycles or not told or (after.get("accumulation_counter") or 0) <= (cycles[0] or 0):
        return None
    steps = {name: (last or 0) - (first or 0) for name, (first, last) in told.items()}
    return None if min(steps.values()) < 0 else tuple(HELD[n] for n, step in steps.items() if step)


class Accumulator:
    """A counter of the device as one that only grows here, whatever the device's one does.

    A wrap of its width is followed. A step back, or a step larger than `rate_max` allows, is no
    measurement: it is counted and the gap left out.
    """

    def __init__(self, scale: float, width: int = 64, rate_max: float | None = None) -> None:
        self._scale = scale
        self._span = 1 << width
        self._rate_max = rate_max
        self._last: int | None = None
        self._last_s = 0.0
        self.total = 0.0
        self.rejected = 0

    def add(self, raw: int, now_s: float) -> float:
        """Take a reading; return the sum."""
        last, elapsed_s = self._last, now_s - self._last_s
        self._last, self._last_s = raw, now_s
        if last is None:
            self.total = raw * self._scale if not self.total else self.total
            return self.total
        step = (raw - last) % self._span
        gained = step * self._scale
        wrapped = raw < last and step > self._span // 16
        too_fast = self._rate_max is not None and gained > self._rate_max * max(elapsed_s, 0.05)
        if wrapped or too_fast:
            self.rejected += 1
            return self.total
        self.total += gained
        return self.total
