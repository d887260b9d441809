"""Shared devices as commands and documents: who may join, what is asked of them, what is shown.

The processes behind are those of `daemon.shares`. A tenant of a device that the node has is bound
to one of its shared partitions, so that `devices` shows it there and the audit judges it.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import os
from collections.abc import Container, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from alloy_agent.conformance.keeper import groups
from alloy_agent.conformance.keeper.client import folder_of
from alloy_agent.conformance.keeper.messages import (
    Join,
    JoinedDocument,
    Policy,
    ShareDocument,
    ShareView,
)
from alloy_agent.conformance.keeper.names import TenantName, device_name, tenant_name
from alloy_agent.conformance.keeper.terms import BUDGET_LEAST, check_budget, check_process
from alloy_agent.daemon import admission
from alloy_agent.errors import BackendError, ConfigError
from alloy_agent.host.cgroups import detect
from alloy_agent.model import (
    Access,
    Partition,
    PartitionId,
    Quality,
    Share,
    Signal,
    Snapshot,
    Value,
)
from alloy_agent.proto import agent_pb2 as pb

if TYPE_CHECKING:
    from alloy_agent.daemon.node import Node
    from alloy_agent.daemon.shares import Shares
    from alloy_agent.store.claims import ClaimRecord

EMULATED: Final = "emulated"
POLICIES: Final = "share.policies"  # key of the store
ROLES: Final = {pb.SHARE_PRODUCTION: Share.PRODUCTION, pb.SHARE_OPPORTUNISTIC: Share.OPPORTUNISTIC}
THROTTLE: Final = "alloy_device_throttle_seconds_total"
THROTTLED_RATIO: Final = 0.01  # of the time; less moves no window by what a budget is about


class PolicyDocument(Value, frozen=True, kw_only=True):
    """What a shared device goes by from now on."""

    schema: str = "alloy.rate-policy/v1"
    device: str
    loss_budget_ratio: float | None
    enabled: bool


# --- tenants ----------------------------------------------------------------------------------


def join_reply(node: Node, shares: Shares, command: pb.BrainMessage) -> pb.Reply:
    """Take a tenant in; return what its command needs.

    Raises:
        ConfigError: There is no such device or share, or the keeper refuses.
        BackendError: No keeper comes up, or the kernel refuses the fence.
    """
    wish = command.join
    role = ROLES.get(wish.share)
    if role is None:
        raise ConfigError("join: a tenant is production or opportunistic", cure="say which")
    if not wish.tenant or not wish.pid:
        raise ConfigError("join: a tenant has a name and a process", cure="give both")
    tenant_name(wish.tenant)  # before it is part of any path
    check_process(wish.tenant, wish.pid, {1, os.getpid()})
    check_budget(wish.loss_budget_ratio or None)
    document = _joined(node, shares, wish, role)
    return _document(command.id, document.schema, document)


def _joined(node: Node, shares: Shares, wish: pb.Join, role: Share) -> JoinedDocument:
    """Have the keeper take a tenant in, then bind it: it is governed before anyone judges it."""
    if wish.subject == EMULATED:
        views = (view for view in shares.views() if view.device == EMULATED)
        inside = [one.name for view in views for one in view.tenants]
        admission.admit_to(node, EMULATED, wish.tenant, inside)
        return _enter(shares, wish, role, EMULATED, "", Access())
    with shares.joining:  # two tenants must not choose one free share
        snapshot = node.observe()
        blocked = admission.blocked(node.drained(), snapshot)
        piece = piece_for(wish.subject, role, snapshot, blocked)
        admission.admit(node, (piece,), wish.tenant, snapshot)
        entered = _enter(shares, wish, role, piece.device, str(piece.id), piece.access)
        document = node.access(piece.id, wish.tenant, wish.pid)
    return msgspec.structs.replace(
        entered,
        environment={**document.access.environment, **entered.environment},
        unset=document.access.unset,
        cgroup_procs=tuple(dict.fromkeys((*document.access.cgroup_procs, *entered.cgroup_procs))),
        fence=document.fence,
        notes=(*document.notes, *entered.notes),
    )


def _enter(  # noqa: PLR0913, PLR0917 - what a tenant and its place are
    shares: Shares, wish: pb.Join, role: Share, device: str, partition: str, access: Access
) -> JoinedDocument:
    folder_of(shares.root, device)
    name = tenant_name(wish.tenant)
    group, procs = _group(shares.root, device, name, role, access)
    request = Join(
        name=name,
        role=role.value,
        pid=wish.pid,
        weight=wish.weight or 1.0,
        cgroup=group,
        budget_ratio=wish.loss_budget_ratio or None,
        partition=partition,
        nodes=access.device_nodes,
    )
    try:
        environment = shares.join(device, request)
    except BackendError:  # nobody answers; a keeper that refuses tidies up by itself
        _ungroup(group)
        raise
    lacks = role is Share.OPPORTUNISTIC and not group
    return JoinedDocument(
        device=device,
        partition=partition,
        tenant=wish.tenant,
        environment=environment,
        cgroup_procs=procs,
        notes=("no v2 cgroup: this tenant cannot be frozen or counted",) if lacks else (),
    )


def piece_for(
    subject: str, role: Share, snapshot: Snapshot, blocked: Container[PartitionId] = ()
) -> Partition:
    """Return the shared partition that a tenant means: that one, or a free one of a device.

    One of those that take nothing new is the last choice.

    Raises:
        ConfigError: There is none.
    """
    if not subject:
        raise ConfigError("'' is no device", cure="see `alloy-agent devices`")
    devices = [d for d in snapshot.devices if d.id == subject]
    devices = devices or [d for d in snapshot.devices if d.id.startswith(subject)]
    if len(devices) == 1:
        device = devices[0].id
        pieces = [p for p in snapshot.partitions if p.device == device and p.share is role]
        if not pieces:
            raise ConfigError(
                f"{device} has no {role.value} share",
                cure="apply a layout with `shared: {production: 1, opportunistic: 1}` for it",
            )
        free = [p for p in pieces if p.tenant is None]
        if not free:
            held = ", ".join(sorted({str(p.tenant) for p in pieces}))
            raise ConfigError(
                f"{device}: every {role.value} share is held by {held}",
                cure="end a tenant, or apply a layout with more shares",
            )
        return min(free, key=lambda piece: piece.id in blocked)
    piece = _partition(subject, snapshot)
    if piece.share is not role:
        raise ConfigError(
            f"{piece.id} is {piece.share.value}, not {role.value}", cure="name another partition"
        )
    return piece


def _partition(subject: str, snapshot: Snapshot) -> Partition:
    """Return the partition that is meant where no device is; else say what is close to it."""
    from alloy_agent.planner.names import find_partition

    known = [EMULATED, *(str(d.id) for d in snapshot.devices)]
    pieces = snapshot.partitions
    if "/" in subject or any(p.uuid and p.uuid.startswith(subject) for p in pieces):
        return find_partition(subject, pieces)
    begun = [device for device in known[1:] if device.startswith(subject)]
    if begun:
        raise ConfigError(
            f"{subject} begins the names of {', '.join(begun[:4])}", cure="write more of it"
        )
    close = difflib.get_close_matches(subject, known, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(close)}?" if close else "see `alloy-agent devices`"
    raise ConfigError(f"{subject}: no device or partition of this name", cure=hint)


def _group(
    root: Path, device: str, tenant: TenantName, role: Share, access: Access
) -> tuple[str, tuple[str, ...]]:
    """Return the v2 cgroup of a tenant and the files by which it is entered; made if need be."""
    tree = detect().unified
    if tree is None:
        return "", ()
    mount = f"{tree.mount}/"
    for path in access.cgroup_procs:
        if path.startswith(mount) and path.endswith("/cgroup.procs"):
            return path.removeprefix(mount).removesuffix("/cgroup.procs"), ()
    if role is Share.PRODUCTION:
        return "", ()
    return groups.own_group(root, device_name(device), tenant, Path(tree.folder("")))


def _ungroup(path: str) -> None:
    """Remove the cgroup that was made for a tenant who was refused; one with processes stays."""
    tree = detect().unified
    if tree is not None:
        groups.clear(path, Path(tree.folder("")))


# --- policies ---------------------------------------------------------------------------------


def policy_reply(node: Node, command: pb.BrainMessage) -> pb.Reply:
    """Put on disk what a shared device goes by from now on; whoever asked tells the keepers.

    Raises:
        ConfigError: There is no such device, it has no shares, or the budget makes no sense.
        StoreError: It cannot be kept; nothing has changed.
    """
    wish = command.set_rate_policy
    check_budget(wish.loss_budget_ratio or None)  # 0: the node's own
    name = wish.device
    if name != EMULATED:
        from alloy_agent.planner.names import find_device

        snapshot = node.observe()
        name = str(find_device(name, snapshot.devices).id)
        pieces = [p for p in snapshot.partitions if p.device == name]
        if all(piece.share is Share.EXCLUSIVE for piece in pieces):
            raise ConfigError(f"{name} is not shared", cure="apply a layout with shares")
    whose = f" by {wish.session}" if wish.session else ""
    policy = Policy(
        budget_ratio=wish.loss_budget_ratio or None,
        held="" if wish.enabled else f"a rate policy{whose} holds the neighbours",
    )
    policies = {**stated_policies(node), name: policy}
    if policy == Policy():
        del policies[name]
    text = json.dumps(msgspec.to_builtins(policies), sort_keys=True)
    node.store.set_meta(POLICIES, text)
    document = PolicyDocument(
        device=name, loss_budget_ratio=policy.budget_ratio, enabled=wish.enabled
    )
    return _document(command.id, document.schema, document)


def stated_policies(node: Node) -> dict[str, Policy]:
    """Return the policies on disk; what cannot be read is no policy."""
    with contextlib.suppress(ValueError, msgspec.MsgspecError):
        return msgspec.convert(json.loads(node.store.meta(POLICIES) or "{}"), dict[str, Policy])
    return {}


def policies(stated: Mapping[str, Policy], claims: Iterable[ClaimRecord]) -> dict[str, Policy]:
    """Return the policies with the budgets that living claims state: the smallest holds."""
    found = dict(stated)
    for claim in claims:
        for piece in claim.pieces:
            ratio = piece.loss_budget_ratio
            if ratio is None:
                continue
            known = found.get(str(piece.device), Policy())
            # a budget of nothing cannot be kept: it means that no neighbour runs
            held = known.held or (
                f"claim {claim.namespace}/{claim.name} allows no loss"
                if ratio < BUDGET_LEAST
                else ""
            )
            stated_now = [r for r in (known.budget_ratio, ratio) if r and r >= BUDGET_LEAST]
            found[str(piece.device)] = Policy(budget_ratio=min(stated_now, default=None), held=held)
    return found


class Throttles:
    """Which devices power, heat or clocks hold back, from their counters of throttled time."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[float, float]] = {}  # time and seconds of the last reading
        self._words: dict[str, str] = {}

    def look(self, signals: Iterable[Signal]) -> dict[str, str]:
        """Return the devices that are held back now, each with how much.

        A device stays as it was until its counter is read anew.
        """
        for signal in signals:
            if signal.spec.name != THROTTLE or signal.quality is not Quality.VALUE:
                continue
            device, total_s = str(signal.spec.subject), signal.value or 0.0
            at_s = signal.read_time_s if signal.source_time_s is None else signal.source_time_s
            then_s, before_s = self._last.get(device, (at_s, total_s))
            if at_s <= then_s:
                self._last.setdefault(device, (at_s, total_s))
                continue
            self._last[device] = (at_s, total_s)
            ratio = (total_s - before_s) / (at_s - then_s)
            if ratio > THROTTLED_RATIO:
                self._words[device] = f"throttled {100 * min(ratio, 1.0):.0f} % of the time"
            else:
                self._words.pop(device, None)
        return dict(self._words)


# --- what is shown ----------------------------------------------------------------------------


def share_document(views: Iterable[ShareView]) -> ShareDocument:
    """Return `share status --json`."""
    return ShareDocument(devices=tuple(sorted(views, key=lambda view: view.device)))


def _document(command_id: str, schema: str, document: msgspec.Struct) -> pb.Reply:
    return pb.Reply(
        command_id=command_id,
        status=pb.STATUS_OK,
        document=pb.Document(schema=schema, json=msgspec.json.encode(document)),
    )
