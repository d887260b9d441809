"""What the keepers of shared devices tell, as facts for the checks and as reports for people.

The facts are `share.status` of each device that is cut into shares and `share.bypass` of each
opportunistic share. A device without a living keeper has them too: they say that nobody keeps it,
which is no fault while nobody is there, and unknown once a tenant is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from alloy_agent.conformance.checks.sharing import UNKEPT, BypassFact, ShareFact
from alloy_agent.host.clock import boottime_s
from alloy_agent.model import Device, Fact, Partition, Quality, Share, ShareReport, Snapshot

if TYPE_CHECKING:
    from alloy_agent.conformance.keeper.messages import ShareView, TenantView

METHOD: Final = "the keeper's status: pages of the tenants, windows of one second"
WATCH: Final = "cgroup.procs, /proc/PID/maps and fd, uprobe counters per cgroup"
RESOLUTION: Final = "1 s"


class SharesOnHost:
    """The shared devices of this host, as their keepers tell: `auditor.Shared`."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def views(self) -> tuple[ShareView, ...]:
        """Return how every shared device stands; loads nothing where there is none."""
        return self.look()[0]

    def look(self) -> tuple[tuple[ShareView, ...], str]:
        """Return how every shared device stands, and what this user is not permitted to read."""
        with contextlib.suppress(PermissionError):  # below a folder that is closed to this user
            if not self._root.is_dir():
                return (), ""
        from alloy_agent.conformance.keeper.client import look

        return look(self._root)

    def facts(self, snapshot: Snapshot) -> tuple[Fact, ...]:
        """Return the facts of the devices that are cut into shares."""
        if all(piece.share is Share.EXCLUSIVE for piece in snapshot.partitions):
            return ()
        return share_facts(snapshot, *self.look())

    def reports(self) -> tuple[ShareReport, ...]:
        """Return what an audit shows of each shared device."""
        return tuple(report_of(view) for view in self.views())


def share_facts(
    snapshot: Snapshot, views: Iterable[ShareView], closed: str = ""
) -> tuple[Fact, ...]:
    """Return the facts of every device of a snapshot that is cut into shares.

    Where something is `closed` to this user, of a device without a view nothing can be said.
    """
    known = {view.device: view for view in views}
    facts: list[Fact] = []
    for device in snapshot.devices:
        pieces = [
            p
            for p in snapshot.partitions
            if p.device == device.id and p.share is not Share.EXCLUSIVE
        ]
        if pieces:
            view = known.get(str(device.id))
            found = _of_device(device, pieces, view)
            facts += found if view is not None or not closed else _unread(found, closed)
    return tuple(facts)


def _unread(facts: Iterable[Fact], closed: str) -> Iterator[Fact]:
    for fact in facts:
        yield msgspec.structs.replace(
            fact, quality=Quality.NOT_PERMITTED, value=None, reason=closed
        )


def _of_device(
    device: Device, pieces: Sequence[Partition], view: ShareView | None
) -> Iterable[Fact]:
    yield _fact(device.id, "share.status", _status(view), METHOD, view)
    for piece in pieces:
        if piece.share is Share.OPPORTUNISTIC:
            yield _fact(piece.id, "share.bypass", _bypass(piece, view), WATCH, view)


def _status(view: ShareView | None) -> ShareFact:
    if view is None:
        return ShareFact(stage=UNKEPT, answer="undecided", reason="no control loop runs")
    return ShareFact(
        stage=view.stage,
        answer=view.answer,
        reason=view.reason,
        loss_ratio=view.loss_ratio,
        lower_ratio=view.lower_ratio,
        upper_ratio=view.upper_ratio,
        lent_ratio=view.lent_ratio,
        neighbours=sum(t.role == "opportunistic" for t in view.tenants),
        budget_ratio=view.budget_ratio,
        bypasses=view.bypass,
    )


def _bypass(piece: Partition, view: ShareView | None) -> BypassFact:
    """Return what shows of the tenants of one share; those of no share count for all of them."""
    if view is None:
        return BypassFact(watched=False)
    tenants = [
        t for t in view.tenants if t.role == "opportunistic" and t.partition in ("", str(piece.id))
    ]
    if not tenants or not all(t.watched.looked for t in tenants):
        return BypassFact(watched=False, looking=bool(tenants))
    counts = [t.watched.witnessed for t in tenants]
    known = [count for count in counts if count is not None]
    why = next((t.watched.witness for t in tenants if t.watched.witnessed is None), "")
    return BypassFact(
        page_trouble="; ".join(filter(None, map(_trouble, tenants))),
        launched=sum(t.watched.launched for t in tenants if t.watched.witnessed is not None),
        witnessed=sum(known) if len(known) == len(counts) else None,
        witness=why or tenants[0].watched.witness,
        unmapped_pids=tuple(p for t in tenants for p in t.watched.unmapped_pids),
        foreign_pids=tuple(p for t in tenants for p in t.watched.foreign_pids),
        static_pids=tuple(p for t in tenants for p in t.watched.static_pids),
        frozen=any(t.frozen for t in tenants),
    )


def _trouble(tenant: TenantView) -> str:
    return tenant.trouble or tenant.watched.page_trouble


def _fact(
    subject: str, name: str, value: msgspec.Struct, method: str, view: ShareView | None
) -> Fact:
    return Fact(
        subject=subject,
        name=name,
        value=msgspec.to_builtins(value),
        method=method,
        resolution=RESOLUTION,
        read_at_s=boottime_s() if view is None else view.taken_at_s,
    )


def report_of(view: ShareView) -> ShareReport:
    """Return what an audit shows of one shared device."""
    return ShareReport(
        device=view.device,
        production=tuple(t.name for t in view.tenants if t.role == "production"),
        opportunistic=tuple(t.name for t in view.tenants if t.role == "opportunistic"),
        stage=view.stage,
        answer=view.answer,
        reason=view.reason,
        budget_ratio=view.budget_ratio,
        lower_ratio=view.lower_ratio,
        upper_ratio=view.upper_ratio,
        e_value=view.e_value,
        windows=view.windows,
        skipped=view.skipped,
        bypasses=view.bypass,
        history_age_s=view.history.age_s,
        production_ratio=view.history.production_ratio,
        lent_ratio=view.history.lent_ratio,
    )
