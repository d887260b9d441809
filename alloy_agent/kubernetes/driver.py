"""The room's front: what the daemon starts, ticks and stops.

Start order: sockets first, so that the kubelet knows us while devices are still being opened (calls
wait); then the node is attached, records are brought to a clear state, and slices are published.

Rules that stay true in here:

* A device that another driver or device plug-in hands out is not published at all.
* What was published stays published with a taint while a device is sick; its shape is kept, since a
  sick device cannot be asked.
* Pieces that somebody else made, and those of the operator's layout, are never in a claim's way.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from alloy_agent.errors import AlloyError, ConfigError
from alloy_agent.host.pci import pcie_root
from alloy_agent.kubernetes import conditions, slices
from alloy_agent.kubernetes.api import ApiAccess, ApiClient, in_cluster
from alloy_agent.kubernetes.cdi import CdiDirectory
from alloy_agent.kubernetes.claims import ClaimRef
from alloy_agent.kubernetes.dra import DeviceHealth, DraPlugin, PluginPaths
from alloy_agent.kubernetes.hardware import Hardware, NodeLike
from alloy_agent.kubernetes.offers import Offer, Pool, pool_of
from alloy_agent.kubernetes.pods import PodDevice, PodResources
from alloy_agent.kubernetes.preparing import ClaimBooks, Preparer
from alloy_agent.kubernetes.probes import LIVENESS, READINESS, ProbeServer
from alloy_agent.kubernetes.publishing import Publisher
from alloy_agent.kubernetes.slices import Document, SliceOptions, Taint
from alloy_agent.kubernetes.statuses import ClaimTeller
from alloy_agent.model import (
    Condition,
    Device,
    DeviceId,
    Partition,
    Placement,
    Share,
    Snapshot,
    Value,
    Vendor,
)
from alloy_agent.planner.geometry import made_by_mode
from alloy_agent.store.claims import ClaimRecord

if TYPE_CHECKING:
    from alloy_agent.config import KubernetesSettings

LOG = logging.getLogger(__name__)

OWNERS_PERIOD_S: Final = 30.0
RECONCILE_PERIOD_S: Final = 60.0
HOUSE_PERIOD_S: Final = 2.0
CALL_S: Final = 40.0
CONTAINERS_PERIOD_S: Final = 10.0  # the kubelet's limit on questions is for the whole node
POD_RESOURCES: Final = "pod-resources/kubelet.sock"


class Now(Value, frozen=True, kw_only=True):
    """The node as the driver publishes it. Subjects are devices, partitions, or "" for the node."""

    snapshot: Snapshot
    leased: frozenset[str] = frozenset()
    sick: dict[str, str] = msgspec.field(default_factory=dict)  # by device, the reason
    draining: frozenset[str] = frozenset()
    drains: dict[str, str] = msgspec.field(default_factory=dict)  # why, of what is drained
    drained: dict[str, str] = msgspec.field(default_factory=dict)  # by drain: whose, till when, why
    failing: frozenset[str] = frozenset()  # partitions whose audit fails
    static: frozenset[DeviceId] = frozenset()  # cut by the operator's layout


class KubernetesDriver:
    """One driver on one node.

    Args:
        settings: Of this room.
        node: Name of the node in Kubernetes.
        environ: Variables of this process.
        find_owners: Returns the vendors whose devices others hand out.
        unwell: Says why the agent itself is not well, or nothing.
    """

    def __init__(
        self,
        settings: KubernetesSettings,
        node: str,
        environ: Mapping[str, str],
        find_owners: Callable[[], frozenset[Vendor]],
        unwell: Callable[[], str] = lambda: "",
    ) -> None:
        self.settings = settings
        self.node = node
        self.owned: frozenset[Vendor] = frozenset()
        self.api = ApiClient(access_of(settings, environ))
        self.plugin = DraPlugin(
            settings.driver,
            PluginPaths(
                registry=f"{settings.kubelet_dir}/plugins_registry",
                plugins=f"{settings.kubelet_dir}/plugins",
                instance=settings.instance,
            ),
            self._failed,
            self._registered,
        )
        self.publisher = Publisher(self.api, SliceOptions(driver=settings.driver, node=node))
        self.preparer: Preparer | None = None
        self._find_owners = find_owners
        self._owners_s = -OWNERS_PERIOD_S
        self._known: dict[DeviceId, tuple[Device, tuple[Partition, ...]]] = {}
        self._published: object = None
        self._draining: frozenset[str] = frozenset()
        self._sick: dict[str, str] | None = None  # None: the node was not seen yet
        self._drains: dict[str, str] = {}  # whose, till when, why
        self._told: conditions.Told | None = None
        self._told_drained: conditions.Told | None = None
        self._stop = threading.Event()
        self.containers: tuple[PodDevice, ...] = ()  # who has our devices, in the kubelet's words
        self._teller = ClaimTeller(self.api, settings.driver, node)
        self._roots: dict[str, str | None] = {}  # by bus address
        self._house = threading.Event()  # there is something to do
        self._probes = self._probe_server(unwell)

    def _probe_server(self, unwell: Callable[[], str]) -> ProbeServer | None:
        if self.settings.probe_address is None:
            return None

        def registered() -> str:
            return "" if self.plugin.registered.is_set() else "the kubelet has not registered it"

        checks = {LIVENESS: lambda: self.plugin.answers() or unwell(), READINESS: registered}
        return ProbeServer(self.settings.probe_address, checks)

    # --- life ---

    def start(self) -> None:
        """Let the kubelet find us; calls wait until `attach`.

        Raises:
            ConfigError: The sockets cannot be made.
        """
        self.plugin.start()
        if self._probes is not None:
            self._probes.start()

    def attach(
        self, node: NodeLike, books: ClaimBooks, refuse: Callable[[str], str] = lambda _subject: ""
    ) -> None:
        """Take the node over: bring records to a clear state, answer calls, publish.

        Args:
            node: The node.
            books: The store.
            refuse: Says why no new claim is taken, also before the first tick.
        """
        settings = self.settings
        preparer = Preparer(
            settings.driver,
            books,
            Hardware(node, self.node, settings.shares),
            CdiDirectory(Path(settings.cdi_dir), settings.driver),
            self.api,
            lambda subject: self._drained(subject) or refuse(subject),
            self._changed,
        )
        self.preparer = preparer

        def recover() -> None:
            try:
                preparer.recover(time.monotonic() + CALL_S)
            except AlloyError as exc:
                LOG.warning("claims_not_recovered", extra={"reason": str(exc)})
            self.plugin.attach(preparer)
            self._own_slices()

        threading.Thread(target=recover, name="dra-recover", daemon=True).start()
        threading.Thread(target=self._keep_house, name="dra-house", daemon=True).start()
        self.publisher.start()

    def _own_slices(self) -> None:
        """Make the node the slices' owner, so that they go when it goes."""
        try:
            found = self.api.node(self.node)
        except AlloyError as exc:
            LOG.warning("node_not_read", extra={"reason": str(exc)})
            return
        if found is not None:
            uid = str((found.get("metadata") or {}).get("uid", "")) or None
            self.publisher.options = msgspec.structs.replace(self.publisher.options, node_uid=uid)
            self.publisher.wake()

    def stop(self) -> None:
        """Unregister, let calls end. Slices stay: the kubelet removes them if nobody comes back."""
        self._stop.set()
        self._house.set()
        self.plugin.stop()
        if self._probes is not None:
            self._probes.stop()
        self.publisher.stop()  # harmless when it never began

    def _drained(self, subject: str) -> str:
        if subject not in self._draining:
            return ""
        return f"{subject or 'the node'} is drained"

    # --- what happens ---

    def _changed(self, record: ClaimRecord) -> None:
        """Have a claim's status written soon; the kubelet does not wait for it."""
        if self.settings.claim_status:
            self._teller.tell(record)
            self._house.set()

    def _registered(self) -> None:
        self.publisher.wake()  # a kubelet that starts has just deleted all slices

    def _failed(self, ref: ClaimRef, reason: str) -> None:
        """Put the reason on the claim; never on the kubelet's time."""

        def tell() -> None:
            try:
                self.api.claim_event(
                    ref, "PrepareFailed", f"{self.node}: {reason}", reporter=self.settings.driver
                )
            except AlloyError as exc:
                LOG.warning("event_not_told", extra={"claim": ref.uid, "reason": str(exc)})

        threading.Thread(target=tell, name="dra-event", daemon=True).start()

    # --- the tick ---

    def tick(self, now: Now) -> None:
        """Publish what there is, tell the kubelet of health; the API server is not waited for."""
        self._draining, self._drains = now.draining, now.drained
        moment_s = time.monotonic()
        if moment_s - self._owners_s >= OWNERS_PERIOD_S:
            self._owners_s = moment_s
            self._look_for_owners()
        pools = self._pools(now)
        self._publish(pools)
        self.plugin.tell_health(
            tuple(
                DeviceHealth(
                    pool=slices.pool_name(self.node, pool.device.id),
                    device=offer.name,
                    healthy=not sick,
                    message=sick,
                )
                for pool, _, _, sick in pools
                for offer in pool.offers
            )
        )
        self._sick = {str(pool.device.id): sick for pool, _, _, sick in pools if sick}

    def _keep_house(self) -> None:
        """Write statuses, release what nobody has, tell of the node; all of these may wait."""
        due_s = time.monotonic() + RECONCILE_PERIOD_S
        look_s = 0.0
        while not self._stop.is_set():
            self._house.wait(HOUSE_PERIOD_S)
            self._house.clear()
            if self._stop.is_set():
                return
            try:
                self._teller.write()
                if self.preparer is not None and time.monotonic() >= due_s:
                    due_s = time.monotonic() + RECONCILE_PERIOD_S
                    self.preparer.reconcile(time.monotonic() + CALL_S)
                if time.monotonic() >= look_s:
                    look_s = time.monotonic() + CONTAINERS_PERIOD_S
                    self.look_at_containers()
                if self.settings.node_condition:
                    self.tell_condition()
            except AlloyError as exc:
                LOG.warning("house_not_kept", extra={"reason": str(exc)})
            except Exception:
                LOG.exception("house_defect")

    def look_at_containers(self) -> None:
        """Ask the kubelet which containers have which claims, and the API server for new pods.

        Raises:
            AlloyError: One of the two does not answer; what was known stays.
        """
        claims = () if self.preparer is None else self.preparer.living()
        socket = Path(self.settings.kubelet_dir) / POD_RESOURCES
        if not claims or self.preparer is None or not socket.exists():
            self.containers = ()
            return
        self.containers = tuple(
            one for one in PodResources(str(socket)).devices() if one.driver == self.settings.driver
        )
        known = {(one.namespace, one.name): one for one in claims}
        for key in {(one.namespace, one.claim, one.pod) for one in self.containers}:
            claim = known.get(key[:2])
            if claim is not None and key[2] not in claim.pod_names:
                self.preparer.meet(claim.uid, time.monotonic() + CALL_S)

    def tell_condition(self) -> None:
        """Write the node's conditions where they are due.

        Raises:
            AlloyError: The API server refused; it is tried again.
        """
        if self._sick is None:
            return
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        due = conditions.condition_of(self._sick, self._told, time.monotonic(), now)
        if due is not None:
            self.api.node_condition(self.node, due[0])
            self._told = due[1]
        due = conditions.condition_of(
            self._drains, self._told_drained, time.monotonic(), now, conditions.DRAINED
        )
        if due is not None:
            self.api.node_condition(self.node, due[0])
            self._told_drained = due[1]

    def _look_for_owners(self) -> None:
        owned = self._find_owners()
        for vendor in owned - self.owned:
            LOG.error(
                "device_owned_by_others",
                extra={"vendor": vendor, "check": "OWN-01", "cure": "remove the other driver"},
            )
        self.owned = owned

    def _pools(self, now: Now) -> list[tuple[Pool, list[Taint], dict[str, list[Taint]], str]]:
        """Return each device's pool with its taints and why it is sick, if it is."""
        found = []
        for device in now.snapshot.devices:
            if device.vendor not in self.settings.vendors or device.vendor in self.owned:
                continue
            here = tuple(p for p in now.snapshot.partitions if p.device == device.id)
            sick = _sickness(device, now)
            if device.condition is Condition.OK:
                self._known[device.id] = (device, here)
            shape, pieces = self._known.get(device.id, (device, here))
            pool = self._pool(shape, pieces, now)
            found.append(
                (pool, self._taints(device, now, sick), self._own(pool, pieces, now), sick)
            )
        return found

    def _pool(self, device: Device, here: tuple[Partition, ...], now: Now) -> Pool:
        claimed = self._claimed()
        standing = [
            p
            for p in here
            if not made_by_mode(p, device)
            and p.share is Share.EXCLUSIVE
            and (p.device, p.placement) not in claimed
        ]
        foreign = [p.placement for p in standing if not p.managed and device.id not in now.static]
        pool = pool_of(device, here, foreign, self.settings.shares)
        fixed = [p for p in standing if p.placement not in foreign]
        there = {(p.profile, p.placement) for p in here}

        def offered(offer: Offer) -> bool:
            exists = (offer.profile, offer.placement) in there
            if device.id in now.static:
                return exists
            return exists or not any(offer.placement.overlaps(p.placement) for p in fixed)

        return msgspec.structs.replace(pool, offers=tuple(o for o in pool.offers if offered(o)))

    def _claimed(self) -> frozenset[tuple[DeviceId, Placement]]:
        if self.preparer is None:
            return frozenset()
        return frozenset(
            (piece.device, piece.placement)
            for record in self.preparer.living()
            for piece in record.pieces
        )

    def _taints(self, device: Device, now: Now, sick: str) -> list[Taint]:
        driver = self.settings.driver
        found = []
        if sick:
            fatal = device.condition is Condition.LOST and self.settings.evict_on_loss
            effect = "NoExecute" if fatal else "NoSchedule"
            found.append(Taint(key=f"{driver}/unhealthy", value=sick, effect=effect))
        here = now.draining & {"", str(device.id), str(device.hive or device.id)}
        if here:
            found.append(self._draining_taint(now, here))
        return found

    def _draining_taint(self, now: Now, subjects: Iterable[str]) -> Taint:
        """Return the taint of what is drained, with why where that is known."""
        why = next((now.drains[s] for s in sorted(subjects) if now.drains.get(s)), "drained")
        return Taint(key=f"{self.settings.driver}/draining", value=why)

    def _own(self, pool: Pool, here: Iterable[Partition], now: Now) -> dict[str, list[Taint]]:
        """Return the taints of single offers: held by others, drained, failing their audit."""
        driver = self.settings.driver
        pieces = tuple(here)
        found: dict[str, list[Taint]] = {}
        for offer in pool.offers:
            taints = []
            for piece in pieces:
                if not offer.placement.overlaps(piece.placement):
                    continue
                tenant = str(piece.tenant or "")
                held = bool(tenant) and not tenant.startswith("k8s/")
                if held or str(piece.id) in now.leased:
                    taints.append(Taint(key=f"{driver}/held", value=tenant or "leased"))
                if str(piece.id) in now.draining:
                    taints.append(self._draining_taint(now, (str(piece.id),)))
                same = (piece.profile, piece.placement) == (offer.profile, offer.placement)
                if same and str(piece.id) in now.failing:
                    taints.append(Taint(key=f"{driver}/audit", value="fail", effect="None"))
            if taints:
                found[offer.name] = taints
        return found

    def _pcie_roots(self, devices: Iterable[Device]) -> dict[str, str]:
        """Return the root complex of each device that has one; the kernel is asked once."""
        found = {}
        for device in devices:
            if device.bus is None or device.simulated:
                continue  # an address that was made up may be that of something else on this host
            if device.bus not in self._roots:
                self._roots[device.bus] = pcie_root(device.bus)
            root = self._roots[device.bus]
            if root is not None:
                found[str(device.id)] = root
        return found

    def _publish(self, pools: list[tuple[Pool, list[Taint], dict[str, list[Taint]], str]]) -> None:
        wanted = tuple((pool, tuple(taints), own) for pool, taints, own, _ in pools)
        if wanted == self._published:
            return
        self._published = wanted
        existing = {
            device: frozenset((p.profile, p.placement) for p in here)
            for device, (_, here) in self._known.items()
        }

        roots = self._pcie_roots(pool.device for pool, *_ in wanted)

        def specs(options: SliceOptions) -> dict[str, tuple[Document, ...]]:
            made = {}
            options = msgspec.structs.replace(options, pcie_roots=roots)
            for pool, taints, own in wanted:
                there = existing.get(pool.device.id, frozenset())
                shown = pool if options.counters else _static(pool, there)
                name = slices.pool_name(options.node, pool.device.id)
                made[name] = slices.specs_of(shown, options, taints, own)
            return made

        self.publisher.want(specs)


def _static(pool: Pool, there: frozenset[tuple[str, Placement]]) -> Pool:
    """Return a pool of what exists only: without counters nothing else can be offered honestly."""
    offers = tuple(o for o in pool.offers if (o.profile, o.placement) in there)
    return msgspec.structs.replace(pool, counters={}, offers=offers)


def _sickness(device: Device, now: Now) -> str:
    if device.condition is not Condition.OK:
        return f"{device.condition} {device.condition_reason}".strip()
    return now.sick.get(str(device.id), "")


def access_of(settings: KubernetesSettings, environ: Mapping[str, str]) -> ApiAccess:
    """Return how the API server is reached: as set, else as a pod does.

    Raises:
        ConfigError: Neither says it.
    """
    if settings.api_server is not None:
        return ApiAccess(
            server=settings.api_server,
            ca_file=settings.ca_file,
            token_file=settings.token_file,
            certificate_file=settings.certificate_file,
            key_file=settings.key_file,
        )
    found = in_cluster(environ)
    if found is None:
        raise ConfigError(
            "kubernetes.enabled: no API server is known here",
            cure="set kubernetes.api_server, or run the agent as a pod",
        )
    return found
