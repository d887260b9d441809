"""One node of simulated silicon with the rooms of the agent and a source of claims."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any, Self

from alloy_agent.backends.fake import FakeBackend
from alloy_agent.errors import AlloyError
from alloy_agent.kubernetes.cdi import CdiDirectory
from alloy_agent.kubernetes.hardware import Hardware
from alloy_agent.kubernetes.offers import Offer, pool_of
from alloy_agent.kubernetes.preparing import Preparer
from alloy_agent.kubernetes.slices import pool_name
from alloy_agent.model import ApplyReport, Layout, Partition, PartitionId, Plan, Scope, Snapshot
from tests.fakes.bench import Mortal
from tests.fakes.direct import Rooms

DRIVER = "gpu.alloy.dev"
NODE = "node-a"


class Claims:
    """The claims that the API server has; `down` makes it silent."""

    def __init__(self) -> None:
        self.documents: dict[tuple[str, str], dict[str, Any]] = {}
        self.down = ""

    def resource_claim(self, namespace: str, name: str) -> dict[str, Any] | None:
        if self.down:
            raise AlloyError(f"API server: {self.down}")
        return self.documents.get((namespace, name))

    def add(self, uid: str, *devices: tuple[str, str], version: str = "1", **more: Any) -> Any:
        """Allocate (pool, device) pairs to a claim named after its uid; return the reference."""
        results = [
            {"request": f"req-{n}", "driver": DRIVER, "pool": pool, "device": device}
            for n, (pool, device) in enumerate(devices)
        ]
        self.documents["default", uid] = {
            "metadata": {
                "name": uid,
                "namespace": "default",
                "uid": uid,
                "resourceVersion": version,
            },
            "status": {
                "allocation": {"devices": {"results": results, **more}},
                "reservedFor": [{"resource": "pods", "name": "pod", "uid": f"pod-{uid}"}],
            },
        }
        return (uid, "default", uid)


class Joined:
    """The rooms as claims change them."""

    def __init__(self, rooms: Rooms) -> None:
        self._rooms = rooms
        self._changing = threading.RLock()

    def observe(self) -> Snapshot:
        return self._rooms.observer.observe()

    def leased(self, snapshot: Snapshot) -> frozenset[PartitionId]:
        del snapshot
        return frozenset()

    def desired(self) -> Layout | None:
        return self._rooms.store.desired()

    def carry_out(self, plan: Plan, consent: frozenset[Scope]) -> ApplyReport:
        with self._changing:
            return self._rooms.reconciler.apply(plan, consent)


class World:
    """One life of an agent over a backend that outlives it."""

    def __init__(
        self,
        root: Path,
        backend: FakeBackend,
        claims: Claims | None = None,
        mortal: Mortal | None = None,
        shares: int = 0,
    ) -> None:
        self.claims = claims or Claims()
        self.rooms = Rooms(backend, root / "state", mortal)
        self.cdi = CdiDirectory(root / "cdi", DRIVER)
        self.shares = shares
        self.hardware = Hardware(Joined(self.rooms), NODE, shares)
        self.draining = ""
        self.preparer = Preparer(
            DRIVER,
            self.rooms.store,
            self.hardware,
            self.cdi,
            self.claims,
            lambda _subject: self.draining,
        )

    def __enter__(self) -> Self:
        self.rooms.__enter__()
        return self

    def __exit__(self, *args: object) -> None:
        self.rooms.__exit__(*args)

    def offers(self, device: int = 0) -> tuple[str, dict[str, Offer]]:
        """Return a device's pool and its offers by name."""
        snapshot = self.hardware.observe()
        found = snapshot.devices[device]
        here = [p for p in snapshot.partitions if p.device == found.id]
        offers = pool_of(found, here, shares=self.shares).offers
        return pool_name(NODE, found.id), {offer.name: offer for offer in offers}

    def pieces(self) -> list[Partition]:
        """Return what lives on the devices."""
        return list(self.hardware.observe().partitions)

    def files(self) -> list[str]:
        """Return the names of all CDI files."""
        return sorted(p.name for p in self.cdi.path.iterdir()) if self.cdi.path.exists() else []
