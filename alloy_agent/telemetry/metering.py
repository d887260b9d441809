"""What each tenant had and used: allocated = active + idle + unobserved, exactly. Pure.

An account is one tenant in one incarnation of a partition. Time is counted in whole nanoseconds of
the boot clock, so the law holds to the last one. Between two samples that are close enough the
active ratio is taken as a straight line; all other time is unobserved, never idle and never
guessed. A wall-clock step moves labels only; a suspend, a restart or a stalled source is a gap.

Energy of a partition is an estimate: the device's counter, split by active share, with the
remainder as a line of its own. No vendor measures it for a piece of a device.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, Literal

import msgspec

from alloy_agent.model import Occupant, Value

NS: Final = 1_000_000_000
GAP_PERIODS: Final = 2.0
HOUR_S: Final = 3600.0
SPLIT_METHOD: Final = "active_share"  # AllocatedMethodId of the energy split

RowKind = Literal["interval", "unattributed", "correction"]


class Account(Value, frozen=True, kw_only=True):
    """One allocation interval, or the part of it within one hour. Amounts so far.

    `at_ns` is the boot time up to which everything is accounted for. `last_ns`, `last_ratio` are
    the newest sample. `partition` is empty for a device's unattributed energy.
    """

    serial: int
    partition: str
    generation: int
    tenant: str
    device: str
    boot_id: str
    start_wall_s: float
    start_ns: int
    at_ns: int
    end_ns: int  # when the hour is over
    lease: str = ""
    profile: str = ""
    size: int = 0
    slices: int = 0
    compute_share: float | None = None
    memory_share: float | None = None
    soft: bool = False
    method: str = ""
    occupants: tuple[Occupant, ...] = ()
    active_ns: int = 0
    idle_ns: int = 0
    unobserved_ns: int = 0
    energy_j: float | None = None
    resets: int = 0
    last_ns: int | None = None
    last_ratio: float = 0.0

    @property
    def key(self) -> tuple[str, int, str]:
        """Who has what."""
        return self.partition, self.generation, self.tenant

    @property
    def allocated_ns(self) -> int:
        """Time accounted for."""
        return self.at_ns - self.start_ns


class UsageRow(Value, frozen=True, kw_only=True):
    """A closed account: one line of the usage journal. Corrections are new rows."""

    serial: int
    kind: RowKind
    partition: str
    generation: int
    tenant: str
    device: str
    boot_id: str
    start_wall_s: float
    allocated_ns: int
    active_ns: int
    idle_ns: int
    unobserved_ns: int
    lease: str = ""
    profile: str = ""
    size: int = 0
    slices: int = 0
    compute_share: float | None = None
    memory_share: float | None = None
    soft: bool = False
    method: str = ""
    occupants: tuple[Occupant, ...] = ()
    energy_j: float | None = None
    energy_method: str = ""
    resets: int = 0
    final: bool = True
    note: str = ""


def others(before: Iterable[Occupant], now: Iterable[Occupant]) -> bool:
    """Return whether users are others than before, though they go by the same name.

    UIDs of claims and pods, and batch jobs, tell them apart; one that joins others is none of them.
    """
    was, are = tuple(before), tuple(now)
    for name in ("claim_uid", "pod_uid", "job"):
        old = {getattr(one, name) for one in was} - {""}
        new = {getattr(one, name) for one in are} - {""}
        if old and new and not old & new:
            return True
    return False


def ns(time_s: float) -> int:
    """Return a time of the boot clock in whole nanoseconds."""
    return round(time_s * NS)


def hour_end_ns(now_s: float, wall_s: float) -> int:
    """Return the boot time at which the present hour of the wall clock ends."""
    return ns(now_s + HOUR_S - wall_s % HOUR_S)


def advance(
    account: Account, samples: Iterable[tuple[float, float]], period_s: float, method: str = ""
) -> Account:
    """Return an account after samples of the active ratio, in order of their source time.

    Samples that are not newer than the last one are repetitions. Time after the last sample stays
    open until the next one, or until `settle`.
    """
    gap_ns = ns(GAP_PERIODS * period_s)
    at, last, before = account.at_ns, account.last_ns, account.last_ratio
    active, idle, unobserved = account.active_ns, account.idle_ns, account.unobserved_ns
    rest = [
        (round(time_s * NS), value if 0.0 <= value <= 1.0 else min(1.0, max(0.0, value)))
        for time_s, value in samples
    ]
    while rest:
        time, ratio = rest[0]
        if last is not None and time <= last:
            del rest[0]
            continue
        if time > at:
            span = time - at
            if last is not None and time - last <= gap_ns:
                busy = round(span * (before + ratio) / 2)
                active, idle = active + busy, idle + span - busy
            else:
                unobserved += span
            at = time
        if at == time:
            at, last, before, busy = _along(rest, gap_ns)
            active, idle = active + busy, idle + (at - time) - busy
        else:
            last, before = time, ratio
            del rest[0]
    return msgspec.structs.replace(
        account,
        at_ns=at,
        active_ns=active,
        idle_ns=idle,
        unobserved_ns=unobserved,
        last_ns=last,
        last_ratio=before,
        method=method or account.method,
    )


def _along(rest: list[tuple[int, float]], gap_ns: int) -> tuple[int, int, float, int]:
    """Take the samples from the first on that follow one another closely off a list.

    Returns the time accounted for, which is that of the last of them, twice; its ratio; and the
    active nanoseconds between the first and the last, by straight lines.
    """
    doubled, count = 0.0, 1
    time, ratio = rest[0]
    for later, after in rest[1:]:
        span = later - time
        if not 0 < span <= gap_ns:
            break
        doubled += span * (ratio + after)
        time, ratio, count = later, after, count + 1
    del rest[:count]
    return time, time, ratio, round(doubled / 2)


def settle(account: Account, until_ns: int, period_s: float) -> Account:
    """Return an account for all time until now; what the last sample cannot speak for is a gap."""
    span = until_ns - account.at_ns
    if span <= 0:
        return account
    last = account.last_ns
    if last is not None and until_ns - last <= ns(GAP_PERIODS * period_s):
        busy = round(span * account.last_ratio)
        return msgspec.structs.replace(
            account,
            at_ns=until_ns,
            active_ns=account.active_ns + busy,
            idle_ns=account.idle_ns + span - busy,
        )
    return msgspec.structs.replace(
        account, at_ns=until_ns, unobserved_ns=account.unobserved_ns + span
    )


def row_of(account: Account, *, note: str = "", final: bool = True) -> UsageRow:
    """Return an account as a row."""
    return UsageRow(
        serial=account.serial,
        kind="interval" if account.partition else "unattributed",
        partition=account.partition,
        generation=account.generation,
        tenant=account.tenant,
        device=account.device,
        boot_id=account.boot_id,
        start_wall_s=account.start_wall_s,
        allocated_ns=account.allocated_ns if account.partition else 0,
        active_ns=account.active_ns,
        idle_ns=account.idle_ns,
        unobserved_ns=account.unobserved_ns,
        lease=account.lease,
        profile=account.profile,
        size=account.size,
        slices=account.slices,
        compute_share=account.compute_share,
        memory_share=account.memory_share,
        soft=account.soft,
        method=account.method or "none",
        occupants=account.occupants,
        energy_j=account.energy_j,
        energy_method=SPLIT_METHOD if account.energy_j is not None else "",
        resets=account.resets,
        final=final,
        note=note,
    )


def next_hour(account: Account, serial: int, now_wall_s: float) -> Account:
    """Return the account that goes on where a full one ends, with its last sample."""
    return msgspec.structs.replace(
        account,
        serial=serial,
        start_wall_s=now_wall_s,
        start_ns=account.at_ns,
        end_ns=account.at_ns + ns(HOUR_S - now_wall_s % HOUR_S),
        active_ns=0,
        idle_ns=0,
        unobserved_ns=0,
        energy_j=None,
        resets=0,
    )


def split_energy(joules: float, shares: Mapping[str, float]) -> tuple[dict[str, float], float]:
    """Return the joules of each key by its active share of the whole device, and the remainder.

    Shares are 0 to 1 and together at most 1: what nobody was active in is nobody's.
    """
    total = sum(shares.values())
    scale = joules / total if total > 1.0 else joules
    split = {key: scale * share for key, share in shares.items()}
    return split, joules - sum(split.values())


def add_energy(account: Account, joules: float) -> Account:
    """Return an account with some energy more."""
    return msgspec.structs.replace(account, energy_j=(account.energy_j or 0.0) + joules)
