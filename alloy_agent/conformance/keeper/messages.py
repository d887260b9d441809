"""What a keeper is asked over its socket, and what it tells in `status.json`.

A request is one JSON object with a `type`, its answer one JSON object. Times are on the node's
boot clock.
"""

from __future__ import annotations

from typing import Final

import msgspec

from alloy_agent.conformance.checks.sharing import WITNESS_FEWEST, WITNESS_RATIO
from alloy_agent.conformance.gate.device import ShareStatus, TenantStatus
from alloy_agent.model import Value

REQUEST_BYTES: Final = 64 << 10
STALE_S: Final = 5.0  # a status that is older is nobody's word any more
HISTORY_STEP_S: Final = 2.0
HISTORY_POINTS: Final = 300


class Join(Value, frozen=True, kw_only=True, tag="join"):
    """A tenant asks to share the device. `nodes` are the device nodes that it may open."""

    name: str
    role: str
    pid: int
    weight: float = 1.0
    cgroup: str = ""
    uid: int | None = None
    budget_ratio: float | None = None
    partition: str = ""
    nodes: tuple[str, ...] = ()


class Policy(Value, frozen=True, kw_only=True, tag="policy"):
    """What operators ask of the device: the smallest loss budget, and whether neighbours run.

    `held` says why no neighbour gets a lease; empty: they do.
    """

    budget_ratio: float | None = None
    held: str = ""


class Conditions(Value, frozen=True, kw_only=True, tag="conditions"):
    """How the device is: `throttled` says why its windows cannot be compared, empty: they can."""

    throttled: str = ""


class HandOver(Value, frozen=True, kw_only=True, tag="hand_over"):
    """Leave, and let another keeper adopt the tenants."""


Request = Join | Policy | Conditions | HandOver


class Answer(Value, frozen=True, kw_only=True):
    """What became of a request; `error` is empty where it was done."""

    environment: dict[str, str] = msgspec.field(default_factory=dict)
    error: str = ""
    cure: str = ""


class Watched(Value, frozen=True, kw_only=True):
    """What the host shows of one tenant, beside what its page says.

    `launched` and `witnessed` are counts of one window, by the page and by the kernel; `witnessed`
    None: nobody can tell, for the reason in `witness`. The pids are of processes that use the
    device: not beneath the gate, beneath another library than the agent's, without a library that
    can be watched.
    """

    looked: bool = False  # at least once
    launched: int = 0
    witnessed: int | None = None
    window_s: float = 0.0
    witness: str = "no witness yet"
    page_trouble: str = ""
    unmapped_pids: tuple[int, ...] = ()
    foreign_pids: tuple[int, ...] = ()
    static_pids: tuple[int, ...] = ()

    @property
    def bypass(self) -> tuple[str, ...]:
        """The ways around the gate that show, in words."""
        found = [self.page_trouble] if self.page_trouble else []
        if counts_differ(self.launched, self.witnessed):
            found.append(f"its page counts {self.launched} launches, the kernel {self.witnessed}")
        for pids, word in (
            (self.unmapped_pids, "not beneath the gate"),
            (self.foreign_pids, "beneath a gate that is not the agent's"),
            (self.static_pids, "without a library that can be watched"),
        ):
            if pids:
                found.append(f"pids {', '.join(map(str, pids[:8]))}: {word}")
        return tuple(found)


def counts_differ(launched: int, witnessed: int | None) -> bool:
    """Whether page and kernel tell different stories."""
    if witnessed is None:
        return False
    return abs(witnessed - launched) > max(WITNESS_FEWEST, WITNESS_RATIO * launched)


class TenantView(TenantStatus, frozen=True, kw_only=True):
    """One tenant, with what is watched of it."""

    pid: int = 0
    partition: str = ""
    cgroup: str = ""
    watched: Watched = Watched()
    bypass: tuple[str, ...] = ()


class WitnessCost(Value, frozen=True, kw_only=True):
    """What the witness has cost so far: probes that stand, time spent to attach and to detach."""

    probes: int = 0
    attached: int = 0
    attaching_s: float = 0.0
    detaching_s: float = 0.0


class History(Value, frozen=True, kw_only=True):
    """Columns of the last ten minutes, oldest first; production None: nothing was judged then."""

    step_s: float = HISTORY_STEP_S
    age_s: tuple[float, ...] = ()
    production_ratio: tuple[float | None, ...] = ()
    lent_ratio: tuple[float, ...] = ()


class ShareView(ShareStatus, frozen=True, kw_only=True):
    """How a shared device stands, as `share status`, the audit, metrics and `top` have it."""

    tenants: tuple[TenantView, ...]
    keeper: str = "own"  # "agent": a daemon's; "own": a command's
    keeper_pid: int = 0
    boot_id: str = ""
    taken_at_s: float = 0.0
    cpu_ratio: float = 0.0
    emulated: bool = False
    thawed: tuple[str, ...] = ()  # what an earlier keeper had left frozen
    adopted: tuple[str, ...] = ()
    witness: WitnessCost = WitnessCost()
    history: History = History()
    not_in_force: str = ""  # why its keeper does not go by a policy that the agent has

    @property
    def bypass(self) -> tuple[str, ...]:
        """The ways around the gate of all tenants, each with its tenant."""
        return tuple(f"{t.name}: {text}" for t in self.tenants for text in t.bypass)


class ShareDocument(Value, frozen=True, kw_only=True):
    """`share status --json`."""

    schema: str = "alloy.share/v1"
    devices: tuple[ShareView, ...] = ()


class JoinedDocument(Value, frozen=True, kw_only=True):
    """What a command needs to become a tenant of a shared device."""

    schema: str = "alloy.share-joined/v1"
    device: str
    partition: str
    tenant: str
    environment: dict[str, str]
    unset: tuple[str, ...] = ()
    cgroup_procs: tuple[str, ...] = ()
    fence: str = ""
    notes: tuple[str, ...] = ()
