"""What the books say of the pieces in a snapshot: which are the agent's own, and who is in them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from alloy_agent.host import clock
from alloy_agent.host.processes import start_ticks
from alloy_agent.model import Occupant

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from alloy_agent.kubernetes.pods import PodDevice
    from alloy_agent.model import Lease, Partition, PartitionId, TenantId
    from alloy_agent.store import Binding, Store


JOBS = "slurm/"  # how the hooks of Slurm name their tenants


class Tenancy:
    """The store's managed pieces, leases and bindings, read anew by `refresh` before a snapshot."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._boot_id = clock.boot_id()
        self._managed: dict[PartitionId, str] = {}
        self._leases: dict[PartitionId, list[Lease]] = {}
        self._bindings: dict[PartitionId, list[Binding]] = {}
        self._claimants: Mapping[PartitionId, tuple[Occupant, ...]] = {}
        self.driver = ""  # of claims; the daemon sets it where there is one
        self.containers: Sequence[PodDevice] = ()  # what the kubelet said last

    def refresh(self) -> None:
        """Read the books.

        Raises:
            StoreError: They cannot be read.
        """
        now_s = clock.boottime_s()
        leases: dict[PartitionId, list[Lease]] = {}
        for lease in self._store.leases():
            if is_living(lease, self._boot_id, now_s):
                for piece in lease.pieces:
                    leases.setdefault(piece.partition, []).append(lease)
        bindings: dict[PartitionId, list[Binding]] = {}
        for binding in self._store.bindings():
            if is_inside(binding, self._boot_id):
                bindings.setdefault(binding.partition, []).append(binding)
        self._managed = self._store.managed()
        self._leases, self._bindings = leases, bindings
        if self.driver:
            from alloy_agent.kubernetes.attribution import of_claims

            self._claimants = of_claims(self._store.claims(), self.containers, self.driver)

    def managed(self, partition: Partition) -> bool:
        """Whether the agent made this incarnation."""
        return self._managed.get(partition.id) == partition.incarnation

    def tenant_of(self, partition: Partition) -> TenantId | None:
        """Return who has a partition: by lease first, else by a binding with a living process."""
        for lease in self._leases.get(partition.id, ()):
            if any(
                piece.partition == partition.id and piece.generation == partition.generation
                for piece in lease.pieces
            ):
                return lease.tenant
        for binding in self._bindings.get(partition.id, ()):
            if binding.generation == partition.generation:
                return binding.tenant
        return None

    def occupants_of(self, partition: Partition) -> tuple[Occupant, ...]:
        """Return which pods, containers, jobs or units a partition's tenant is."""
        processes = (
            binding.occupant
            for binding in self._bindings.get(partition.id, ())
            if binding.generation == partition.generation and binding.occupant is not None
        )
        jobs = (
            Occupant(kind="slurm", job=binding.tenant.removeprefix(JOBS))
            for binding in self._bindings.get(partition.id, ())
            if binding.generation == partition.generation and binding.tenant.startswith(JOBS)
        )
        return tuple(dict.fromkeys((*self._claimants.get(partition.id, ()), *jobs, *processes)))

    def leases(self) -> tuple[Lease, ...]:
        """Return the living leases, once each."""
        every = (lease for leases in self._leases.values() for lease in leases)
        return tuple({lease.id: lease for lease in every}.values())

    def bindings(self) -> tuple[Binding, ...]:
        """Return the bindings of this boot whose processes, if they name any, live."""
        return tuple(binding for bindings in self._bindings.values() for binding in bindings)

    def leased(self, partitions: tuple[Partition, ...]) -> frozenset[PartitionId]:
        """Return the partitions that a living lease holds at the generation they have."""
        generations = {p.id: p.generation for p in partitions}
        return frozenset(
            piece.partition
            for leases in self._leases.values()
            for lease in leases
            for piece in lease.pieces
            if generations.get(piece.partition) == piece.generation
        )

    def claimed(self, partitions: tuple[Partition, ...]) -> frozenset[PartitionId]:
        """Return the partitions that a living claim of Kubernetes holds as they are."""
        from alloy_agent.store.claims import ClaimPhase

        held = {
            (piece.partition, piece.incarnation)
            for claim in self._store.claims()
            if claim.phase is not ClaimPhase.RELEASED
            for piece in claim.pieces
            if not piece.admin
        }
        return frozenset(p.id for p in partitions if (p.id, p.incarnation) in held)

    def dead(self) -> tuple[Binding, ...]:
        """Return the bindings whose process has ended or whose boot is over."""
        return tuple(b for b in self._store.bindings() if not is_inside(b, self._boot_id))


def is_living(lease: Lease, boot_id: str, now_s: float) -> bool:
    """Whether a lease is of this boot and has not run out."""
    return lease.boot_id == boot_id and (lease.expires_at_s is None or lease.expires_at_s > now_s)


def is_inside(binding: Binding, boot_id: str) -> bool:
    """Whether a binding is of this boot and, if it names a process, that process lives."""
    if binding.boot_id != boot_id:
        return False
    if binding.pid is None:
        return True
    # Without its start a pid names whoever has the number now.
    return binding.start_ticks is not None and start_ticks(binding.pid) == binding.start_ticks
