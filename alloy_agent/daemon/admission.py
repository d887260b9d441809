"""Who may come in: what is drained takes no new tenant, and who is inside may start more.

Asked by everything that lets a tenant in: `exec` and Slurm's hooks (`Node.access`), shares, the
lease desk, claims of Kubernetes. A daemon knows the drains; without one, the store keeps them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from alloy_agent.daemon.addresses import command_line, share_root
from alloy_agent.errors import ConfigError
from alloy_agent.host import clock
from alloy_agent.model import PartitionId, Scope
from alloy_agent.telemetry import drains

if TYPE_CHECKING:
    from alloy_agent.config import Settings
    from alloy_agent.daemon.node import Node
    from alloy_agent.leases import Block
    from alloy_agent.model import Partition, Snapshot
    from alloy_agent.store import Store
    from alloy_agent.telemetry.drains import Drained, Drains

OPERATOR: Final = "operator"  # the session of a drain that names none


def kept(store: Store) -> Drains:
    """Return the drains that hold by what the store keeps."""
    text = store.meta(drains.META)
    return drains.kept(text, clock.boot_id(), clock.boottime_s(), clock.wall_s()) if text else ()


def admit(node: Node, members: Iterable[Partition], tenant: str, snapshot: Snapshot) -> None:
    """Refuse a tenant who is not in these partitions yet, where one of them is drained.

    Raises:
        ConfigError: With whose drain it is, why, and what ends it.
    """
    held = node.drained()
    if not held:
        return
    for member in members:
        drain = drains.over(held, member.id, snapshot)
        if drain is not None and member.tenant != tenant:
            raise refusal(member.id, drain, node.settings)


def admit_to(node: Node, device: str, tenant: str, inside: Iterable[str]) -> None:
    """Refuse a tenant of a device that has no partitions, unless it is among those inside.

    Raises:
        ConfigError: The device or the node is drained.
    """
    held = node.drained()
    if held and tenant not in inside:
        drain = drains.over(held, device, node.observe())
        if drain is not None:
            raise refusal(device, drain, node.settings)


def admit_alone(settings: Settings, device: str, tenant: str) -> None:
    """Refuse a new tenant of a drained device where no daemon runs.

    Raises:
        ConfigError: The device or the node is drained.
    """
    from pathlib import Path

    from alloy_agent.conformance.shares import SharesOnHost
    from alloy_agent.errors import StoreError
    from alloy_agent.store import Store

    try:
        store = Store.open(Path(settings.state_dir), read_only=True)
    except StoreError:
        return  # there is no state to be read: nothing was ever drained in it
    try:
        held = kept(store)
    finally:
        store.close()
    if not held:
        return
    from alloy_agent.daemon.node import Node

    views = SharesOnHost(share_root(settings)).views()
    inside = [one.name for view in views if view.device == device for one in view.tenants]
    with Node(settings) as node:
        admit_to(node, device, tenant, inside)


def blocked(held: Drains, snapshot: Snapshot) -> dict[PartitionId, Block]:
    """Return the partitions that take no new lease, each with why."""
    if not held:
        return {}
    from alloy_agent.leases import Block, Refusal

    found = {p.id: drains.over(held, p.id, snapshot) for p in snapshot.partitions}
    return {
        partition: Block(refusal=Refusal.DRAINING, reason=_words(partition, drain))
        for partition, drain in found.items()
        if drain is not None
    }


def refusal(subject: str, drain: Drained, settings: Settings) -> ConfigError:
    """Return why a new tenant is not let in: whose drain it is, its reason, and what ends it."""
    whose = () if drain.session == OPERATOR else ("--session", drain.session)
    words = ("undrain", *((drain.subject,) if drain.subject else ()), *whose)
    wait = " or wait until then" if drain.until_wall_s else ""
    cure = f"take it back with '{command_line(settings, *words)}'{wait}"
    return ConfigError(f"{subject}: no new tenant is let in: {_words(subject, drain)}", cure=cure)


def _words(subject: str, drain: Drained) -> str:
    """Return what is drained, by whom, until when and why."""
    from alloy_agent.daemon.draining import in_words

    if drain.scope is Scope.NODE:
        what = "the node"
    else:
        what = "it" if drain.subject == subject else f"its {drain.scope} {drain.subject}"
    return f"{what} is drained by {in_words(drain)}"
