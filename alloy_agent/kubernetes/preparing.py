"""The contract with the kubelet: prepare and unprepare claims, whatever happens in between.

    prepare:   allocation -> record `started` -> hardware -> CDI file -> record `prepared` -> answer
    unprepare: record `releasing` -> hardware -> CDI file -> record `released` (a tombstone)

Rules that stay true in here:

* A record is on disk before hardware is touched, and is believed only together with what it
  records: a claim that is prepared already is looked at again, and what is missing is made again.
* One place, one claim: pieces are compared by where they lie. A claim that is in the way is waited
  for as long as the call lasts, since a failed call costs the pod more than a minute.
* Calls for one claim come after each other; before each change of hardware the claim is looked at.
* A failed prepare takes everything back that it made. What cannot be taken back stays on record.
* Only pieces that a claim's own record says it made are removed.
* A claim that was unprepared stays so for the same version of it, however late a retry comes.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import msgspec

from alloy_agent.errors import AlloyError, DeviceBusyError
from alloy_agent.host import clock
from alloy_agent.kubernetes import cdi
from alloy_agent.kubernetes.cdi import CdiDevice, CdiDirectory
from alloy_agent.kubernetes.claims import Allocation, ClaimError, ClaimRef, allocation_of
from alloy_agent.kubernetes.containers import claim_variable
from alloy_agent.kubernetes.hardware import Hardware
from alloy_agent.model import Partition, PartitionId, Share, Snapshot, TenantId, Value
from alloy_agent.store.claims import ClaimPhase, ClaimPiece, ClaimRecord
from alloy_agent.store.records import Binding

LOG = logging.getLogger(__name__)

TOMBSTONE_S = 900.0
CLAIM_VARIABLE = "ALLOY_CLAIM"  # namespace and name, for whoever has the file alone
LIVING = (
    ClaimPhase.STARTED,
    ClaimPhase.PREPARED,
    ClaimPhase.TAKING_BACK,
    ClaimPhase.RELEASING,
)


class ClaimBooks(Protocol):
    """What is asked of the store."""

    def claims(self) -> tuple[ClaimRecord, ...]:
        """Return all claims on disk."""
        ...

    def claim(self, uid: str) -> ClaimRecord | None:
        """Return one claim."""
        ...

    def save_claim(self, claim: ClaimRecord) -> None:
        """Put a claim on disk."""
        ...

    def drop_claim(self, uid: str) -> None:
        """Forget a claim."""
        ...

    def bind(self, binding: Binding) -> None:
        """Note a tenant in a partition."""
        ...

    def unbind(
        self, partition: PartitionId, *, tenant: TenantId | None = None, pid: int | None = None
    ) -> int:
        """Forget a tenant in a partition."""
        ...

    def epoch(self) -> int:
        """Return the epoch of this run of the agent."""
        ...


class ClaimSource(Protocol):
    """Where claims are read."""

    def resource_claim(self, namespace: str, name: str) -> dict[str, Any] | None:
        """Return a claim, or None where there is none.

        Raises:
            AlloyError: The API server does not answer.
        """
        ...


class Answer(Value, frozen=True, kw_only=True):
    """One prepared device, as the kubelet is told."""

    request: str
    pool: str
    device: str
    cdi_ids: tuple[str, ...]
    share_id: str | None = None


def tenant_of(record: ClaimRecord) -> TenantId:
    """Return the tenant that a claim stands for."""
    return TenantId(f"k8s/{record.namespace}/{record.name}")


class Preparer:
    """Prepares and unprepares claims, from any thread.

    Args:
        driver: Our name, which is also the vendor of the CDI names.
        books: The store.
        hardware: Makes and removes pieces.
        folder: Where CDI files go.
        source: Where claims are read.
        refuse: Says why no claim is taken now on a device, or on the node (""), or nothing.
        tell: Takes the record of each claim that was prepared or released.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - the rooms that meet here
        self,
        driver: str,
        books: ClaimBooks,
        hardware: Hardware,
        folder: CdiDirectory,
        source: ClaimSource,
        refuse: Callable[[str], str] = lambda _subject: "",
        tell: Callable[[ClaimRecord], None] = lambda _record: None,
    ) -> None:
        self._driver = driver
        self._books = books
        self._hardware = hardware
        self._folder = folder
        self._source = source
        self._refuse = refuse
        self._tell = tell
        self._changed = threading.Condition()
        self._busy: set[str] = set()
        self._unwanted: set[str] = set()  # claims whose unprepare waits for their prepare

    # --- prepare ---

    def prepare(self, ref: ClaimRef, deadline_s: float) -> tuple[Answer, ...]:
        """Make a claim's pieces and return how a container gets at them.

        Args:
            ref: The claim.
            deadline_s: On the monotonic clock.

        Raises:
            AlloyError: Why not; nothing is half-prepared.
        """
        with self._alone(ref, deadline_s):
            record = self._books.claim(ref.uid)
            if record is None or record.phase is ClaimPhase.RELEASED:
                record = self._begin(ref, record, deadline_s)
            elif record.phase is not ClaimPhase.PREPARED:
                self._settle(record, deadline_s)
                record = self._begin(ref, self._books.claim(ref.uid), deadline_s)
            else:
                record = self._compare(ref, record)
            return self._complete(record, deadline_s)

    def _begin(
        self, ref: ClaimRef, tombstone: ClaimRecord | None, deadline_s: float
    ) -> ClaimRecord:
        """Put a new claim on disk as started, once nobody is in its place."""
        reason = self._refuse("")
        if reason:
            raise DeviceBusyError(f"{ref}: no claim is taken: {reason}")
        allocation = self._allocation(ref)
        if tombstone is not None and allocation.resource_version == tombstone.resource_version:
            raise ClaimError(f"{ref}: was unprepared; this version of it is not prepared again")
        record = self._record(allocation)
        with self._changed:
            while (other := self._in_the_way(record)) is not None:
                left_s = deadline_s - time.monotonic()
                if ref.uid in self._unwanted:
                    raise ClaimError(f"{ref}: is being unprepared")
                if left_s <= 0:
                    raise DeviceBusyError(
                        f"{ref}: {other[1].pool}/{other[1].name} is still held by claim "
                        f"{other[0].namespace}/{other[0].name} ({other[0].phase})",
                        cure="wait until its pod has ended; the kubelet tries again",
                    )
                self._changed.wait(min(left_s, 1.0))
            self._books.save_claim(record)
        return record

    def _allocation(self, ref: ClaimRef) -> Allocation:
        document = self._source.resource_claim(ref.namespace, ref.name)
        if document is None:
            raise ClaimError(f"{ref}: is not in the API server", cure="delete the pod")
        return allocation_of(document, ref, self._driver)

    def _record(self, allocation: Allocation) -> ClaimRecord:
        snapshot = self._hardware.observe()
        pieces = []
        for one in allocation.results:
            device, offer = self._hardware.offer_of(snapshot, one.pool, one.device)
            reason = self._refuse(str(device.id))
            if reason:
                raise DeviceBusyError(f"{allocation.ref}: no claim is taken: {reason}")
            if offer.share is Share.EXCLUSIVE and (one.memory_bytes or one.loss_budget_ratio):
                raise ClaimError(
                    f"{allocation.ref}: {one.pool}/{one.device} is no share: "
                    "memoryBytes and lossBudgetRatio are for shares",
                    cure="take the parameters out, or claim a share",
                )
            name = cdi.device_name(allocation.ref.uid, _cdi_part(one.device, one.share_id))
            piece = ClaimPiece(
                request=one.request,
                pool=one.pool,
                name=one.device,
                device=device.id,
                profile=offer.profile,
                placement=offer.placement,
                share=offer.share,
                ordinal=offer.ordinal,
                share_id=one.share_id,
                admin=one.admin,
                memory_bytes=one.memory_bytes,
                loss_budget_ratio=one.loss_budget_ratio,
                cdi_ids=(cdi.qualified(self._driver, name),),
            )
            there = Hardware.find(snapshot, piece)
            if there is not None:
                piece = msgspec.structs.replace(piece, incarnation=there.incarnation)
            pieces.append(piece)
        self._refuse_held(allocation.ref, pieces, snapshot)
        return ClaimRecord(
            uid=allocation.ref.uid,
            namespace=allocation.ref.namespace,
            name=allocation.ref.name,
            phase=ClaimPhase.STARTED,
            pieces=tuple(pieces),
            pods=allocation.pods,
            pod_names=allocation.pod_names,
            resource_version=allocation.resource_version,
            boot_id=snapshot.boot_id,
            epoch=self._books.epoch(),
            changed_wall_s=clock.wall_s(),
        )

    def _refuse_held(self, ref: ClaimRef, pieces: Sequence[ClaimPiece], snapshot: Snapshot) -> None:
        """Raise where a lease of the brain, or a tenant started by hand, is in a place."""
        claimed = {str(tenant_of(one)) for one in self._books.claims()}
        leased = self._hardware.leased(snapshot)
        for piece in pieces:
            for one in snapshot.partitions:
                if piece.admin or one.device != piece.device or not _clash(piece, one):
                    continue
                tenant = str(one.tenant or "")
                if (tenant and tenant not in claimed) or (one.id in leased and not tenant):
                    raise DeviceBusyError(
                        f"{ref}: {one.id} is held by tenant {tenant or 'of a lease'}",
                        cure="release it first",
                    )

    def _in_the_way(self, record: ClaimRecord) -> tuple[ClaimRecord, ClaimPiece] | None:
        """Return the claim, and its piece, that holds a place which a record needs."""
        for other in self._books.claims():
            if other.uid == record.uid or other.phase not in LIVING:
                continue
            for theirs in other.pieces:
                if any(_excludes(ours, theirs) for ours in record.pieces):
                    return other, theirs
        return None

    def _compare(self, ref: ClaimRef, record: ClaimRecord) -> ClaimRecord:
        """Return a claim on record with the pods that it has now; no answer is no objection.

        Raises:
            ClaimError: It comes with another allocation.
        """
        if (ref.namespace, ref.name) != (record.namespace, record.name):
            raise ClaimError(
                f"{ref}: UID {ref.uid} is known as {record.namespace}/{record.name}",
                cure="delete the pod",
            )
        try:
            allocation = self._allocation(ref)
        except ClaimError:
            raise
        except AlloyError as exc:
            LOG.info("claim_not_compared", extra={"claim": ref.uid, "reason": str(exc)})
            return record
        was = [(p.request, p.pool, p.name, p.share_id) for p in record.pieces]
        now = [(a.request, a.pool, a.device, a.share_id) for a in allocation.results]
        if was != now:
            raise ClaimError(
                f"{ref}: is prepared with {_listed(was)} and now allocates {_listed(now)}",
                cure="delete the pod, so that the claim is unprepared first",
            )
        return self._with_pods(record, allocation)

    def _with_pods(self, record: ClaimRecord, allocation: Allocation) -> ClaimRecord:
        """Put on record for which pods a claim is reserved now: it may have come to have more."""
        if record.pods == allocation.pods and record.pod_names == allocation.pod_names:
            return record
        now = msgspec.structs.replace(record, pods=allocation.pods, pod_names=allocation.pod_names)
        self._books.save_claim(now)
        return now

    def meet(self, uid: str, deadline_s: float) -> None:
        """Look again for which pods a prepared claim is reserved; the kubelet does not say it.

        Raises:
            AlloyError: The API server or the store does not answer.
        """
        record = self._books.claim(uid)
        if record is None or record.phase is not ClaimPhase.PREPARED:
            return
        ref = ClaimRef(uid=record.uid, namespace=record.namespace, name=record.name)
        with self._alone(ref, deadline_s):
            record = self._books.claim(uid)
            if record is not None and record.phase is ClaimPhase.PREPARED:
                self._with_pods(record, self._allocation(ref))

    def _complete(self, record: ClaimRecord, deadline_s: float) -> tuple[Answer, ...]:
        """Bring a claim on record to its end, or everything back."""
        try:
            done = self._ensure(record, deadline_s)
        except AlloyError as exc:
            LOG.warning("prepare_failed", extra={"claim": record.uid, "reason": str(exc)})
            self._take_back(record, deadline_s)
            raise
        return tuple(
            Answer(
                request=piece.request,
                pool=piece.pool,
                device=piece.name,
                cdi_ids=piece.cdi_ids,
                share_id=piece.share_id,
            )
            for piece in done.pieces
        )

    def _ensure(self, record: ClaimRecord, deadline_s: float) -> ClaimRecord:
        """Make pieces and file of a claim where they are not there; return its record."""
        before = self._hardware.observe()
        missing = {
            index
            for index, piece in enumerate(record.pieces)
            if Hardware.find(before, piece) is None
        }

        def still_wanted() -> None:
            if record.uid in self._unwanted:
                raise ClaimError(f"claim {record.namespace}/{record.name}: is being unprepared")

        wanted = [piece for piece in record.pieces if not piece.admin]
        snapshot = self._hardware.make(wanted, still_wanted, deadline_s) if missing else before
        pieces, living = [], []
        for index, piece in enumerate(record.pieces):
            found = Hardware.find(snapshot, piece)
            if found is None:
                raise ClaimError(f"{piece.pool}/{piece.name} does not exist, though it was made")
            living.append(found)
            pieces.append(
                msgspec.structs.replace(
                    piece,
                    partition=found.id,
                    incarnation=found.incarnation,
                    made=found.managed and (piece.made or index in missing),
                )
            )
        self._folder.write(record.uid, self._spec(record, living))
        done = msgspec.structs.replace(
            record, pieces=tuple(pieces), phase=ClaimPhase.PREPARED, boot_id=snapshot.boot_id
        )
        if done != record:
            done = msgspec.structs.replace(done, changed_wall_s=clock.wall_s())
            self._books.save_claim(done)
        self._bind(done, living, snapshot)
        self._tell(done)
        LOG.info("claim_prepared", extra={"claim": record.uid, "pieces": len(pieces)})
        return done

    def _spec(self, record: ClaimRecord, living: Sequence[Partition]) -> dict[str, Any]:
        devices = cdi.joined(
            [
                CdiDevice(name=piece.cdi_ids[0].rsplit("=", 1)[1], access=found.access)
                for piece, found in zip(record.pieces, living, strict=True)
            ]
        )
        environment = {
            "ALLOY_CLAIM_UID": record.uid,
            CLAIM_VARIABLE: f"{record.namespace}/{record.name}",
            claim_variable(record.uid): "1",  # stays when a container has several claims
            "ALLOY_PARTITIONS": ",".join(str(found.id) for found in living),
        }
        return cdi.spec_of(self._driver, devices, environment)

    def _bind(self, record: ClaimRecord, living: Sequence[Partition], snapshot: Snapshot) -> None:
        for piece, found in zip(record.pieces, living, strict=True):
            if not piece.admin:
                self._books.bind(
                    Binding(
                        partition=found.id,
                        generation=found.generation,
                        tenant=tenant_of(record),
                        since_s=clock.boottime_s(),
                        boot_id=snapshot.boot_id,
                    )
                )

    # --- unprepare ---

    def unprepare(self, ref: ClaimRef, deadline_s: float) -> None:
        """Take a claim's pieces back; one that is not known is fine.

        Raises:
            AlloyError: Something could not be taken back; it is on record, and the next call goes
                on.
        """
        with self._changed:
            self._unwanted.add(ref.uid)
            self._changed.notify_all()
        try:
            with self._alone(ref, deadline_s):
                record = self._books.claim(ref.uid)
                if record is None:
                    self._folder.remove(ref.uid)
                elif record.phase is not ClaimPhase.RELEASED:
                    self._release(record, deadline_s)
        finally:
            with self._changed:
                self._unwanted.discard(ref.uid)

    def _release(self, record: ClaimRecord, deadline_s: float) -> None:
        """Take everything back and leave a tombstone."""
        self._take_apart(record, ClaimPhase.RELEASING, deadline_s)
        tombstone = ClaimRecord(
            uid=record.uid,
            namespace=record.namespace,
            name=record.name,
            phase=ClaimPhase.RELEASED,
            resource_version=record.resource_version,
            boot_id=record.boot_id,
            epoch=record.epoch,
            changed_wall_s=clock.wall_s(),
        )
        self._books.save_claim(tombstone)
        LOG.info("claim_released", extra={"claim": record.uid})
        self._tell(tombstone)
        with self._changed:
            self._changed.notify_all()

    def _settle(self, record: ClaimRecord, deadline_s: float) -> None:
        """Bring a claim that is on its way out to its end."""
        if record.phase is ClaimPhase.RELEASING:
            self._release(record, deadline_s)
        else:
            self._undo(record, deadline_s)

    def _undo(self, record: ClaimRecord, deadline_s: float) -> None:
        """Take everything back and forget the claim: it never was prepared."""
        self._take_apart(record, ClaimPhase.TAKING_BACK, deadline_s)
        self._books.drop_claim(record.uid)
        with self._changed:
            self._changed.notify_all()

    def _take_apart(self, record: ClaimRecord, phase: ClaimPhase, deadline_s: float) -> None:
        leaving = msgspec.structs.replace(record, phase=phase)
        if leaving != record:
            self._books.save_claim(leaving)
        snapshot = self._hardware.observe()
        doomed = []
        for piece in record.pieces:
            found = Hardware.find(snapshot, piece)
            if found is None or piece.admin:
                continue
            self._books.unbind(found.id, tenant=tenant_of(record))
            if self._own(record, piece, found):
                doomed.append(found)
        self._hardware.remove(doomed, deadline_s)
        self._folder.remove(record.uid)

    @staticmethod
    def _own(record: ClaimRecord, piece: ClaimPiece, found: Partition) -> bool:
        """Whether a living partition was made for this claim.

        A piece whose making was cut off has no incarnation on record, or an earlier one: what lies
        exactly there, was made by this agent and has no other tenant came from this claim, since
        nobody else may have the place meanwhile.
        """
        if not found.managed or not (piece.made or not piece.incarnation):
            return False
        return found.incarnation == piece.incarnation or found.tenant in (
            None,
            tenant_of(record),
        )

    def _take_back(self, record: ClaimRecord, deadline_s: float) -> None:
        """Undo a prepare that failed; what cannot be undone stays on record, and is tried again."""
        try:
            self._undo(record, max(deadline_s, time.monotonic() + 2.0))
        except AlloyError as exc:
            LOG.warning("not_taken_back", extra={"claim": record.uid, "reason": str(exc)})
        with self._changed:
            self._changed.notify_all()

    # --- after a start, and every minute ---

    def recover(self, deadline_s: float) -> None:
        """Bring everything on record to a clear state, and sweep files that belong to nobody."""
        for record in self._books.claims():
            ref = ClaimRef(uid=record.uid, namespace=record.namespace, name=record.name)
            try:
                with self._alone(ref, deadline_s):
                    self._recover_one(record, deadline_s)
            except AlloyError as exc:
                LOG.warning("claim_not_recovered", extra={"claim": ref.uid, "reason": str(exc)})
        kept = self._adopt()
        living = [one.uid for one in self._books.claims() if one.phase in LIVING]
        for name in self._folder.sweep([*living, *kept]):
            LOG.info("cdi_file_swept", extra={"file": name})

    def _adopt(self) -> list[str]:
        """Put claims on record that have a file and no record: the state was lost, not the pods.

        The API server says what they allocate; the pieces are those that lie there. Whether this
        agent made them is not known any more, so they are never removed by it.

        Returns:
            Claims of which nobody could say anything: their files stay.
        """
        unsure = []
        known = {record.uid for record in self._books.claims()}
        for uid in self._folder.claims():
            namespace, _, name = self._folder.variable(uid, CLAIM_VARIABLE).partition("/")
            if uid in known or not name:
                continue
            ref = ClaimRef(uid=uid, namespace=namespace, name=name)
            try:
                record = self._record(self._allocation(ref))
            except ClaimError as exc:  # the API server does not have it (any more)
                LOG.info("claim_not_adopted", extra={"claim": uid, "reason": str(exc)})
                continue
            except AlloyError as exc:
                LOG.warning("claim_not_adopted", extra={"claim": uid, "reason": str(exc)})
                unsure.append(uid)
                continue
            snapshot = self._hardware.observe()
            found = [Hardware.find(snapshot, piece) for piece in record.pieces]
            pieces = tuple(
                piece
                if there is None
                else msgspec.structs.replace(
                    piece, partition=there.id, incarnation=there.incarnation
                )
                for piece, there in zip(record.pieces, found, strict=True)
            )
            self._books.save_claim(
                msgspec.structs.replace(record, pieces=pieces, phase=ClaimPhase.PREPARED)
            )
            self._bind(record, [one for one in found if one is not None], snapshot)
            LOG.warning("claim_adopted", extra={"claim": uid, "what": str(ref)})
        return unsure

    def _recover_one(self, record: ClaimRecord, deadline_s: float) -> None:
        if record.phase is ClaimPhase.RELEASED:
            return
        if record.phase is not ClaimPhase.PREPARED:
            self._settle(record, deadline_s)
        elif record.boot_id == clock.boot_id():  # after a reboot the kubelet asks for it anew
            self._ensure(record, deadline_s)

    def reconcile(self, deadline_s: float) -> None:
        """Release claims that the API server no longer has, and forget old tombstones."""
        now_s = clock.wall_s()
        for record in self._books.claims():
            if record.phase is ClaimPhase.RELEASED:
                if now_s - record.changed_wall_s > TOMBSTONE_S:
                    self._books.drop_claim(record.uid)
                continue
            document = self._source.resource_claim(record.namespace, record.name)
            if document is not None and _still_ours(document, record):
                continue
            ref = ClaimRef(uid=record.uid, namespace=record.namespace, name=record.name)
            LOG.warning("claim_gone", extra={"claim": ref.uid, "what": str(ref)})
            self.unprepare(ref, deadline_s)

    def living(self) -> tuple[ClaimRecord, ...]:
        """Return the claims that hold something."""
        return tuple(one for one in self._books.claims() if one.phase in LIVING)

    # --- one at a time ---

    @contextlib.contextmanager
    def _alone(self, ref: ClaimRef, deadline_s: float) -> Iterator[None]:
        """Hold one claim; others go on."""
        with self._changed:
            while ref.uid in self._busy:
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    raise DeviceBusyError(f"{ref}: an earlier call for it has not ended")
                self._changed.wait(left_s)
            self._busy.add(ref.uid)
        try:
            yield
        finally:
            with self._changed:
                self._busy.discard(ref.uid)
                self._changed.notify_all()


def _still_ours(document: dict[str, Any], record: ClaimRecord) -> bool:
    metadata, status = document.get("metadata") or {}, document.get("status") or {}
    return metadata.get("uid") == record.uid and bool(
        status.get("reservedFor") or status.get("allocation")
    )


def _excludes(ours: ClaimPiece, theirs: ClaimPiece) -> bool:
    """Whether two pieces of claims cannot both be had, by where they lie."""
    if ours.admin or theirs.admin or ours.device != theirs.device:
        return False
    if ours.share_id is not None and ours.share_id != theirs.share_id and ours.name == theirs.name:
        return False
    if Share.EXCLUSIVE in (ours.share, theirs.share):
        return ours.placement.overlaps(theirs.placement)
    return (ours.share, ours.ordinal) == (theirs.share, theirs.ordinal)


def _clash(piece: ClaimPiece, living: Partition) -> bool:
    """Whether a living partition is in the place of a piece."""
    if Share.EXCLUSIVE in (piece.share, living.share):
        return piece.placement.overlaps(living.placement)
    return (piece.share, piece.ordinal) == (living.share, living.ordinal)


def _cdi_part(device: str, share_id: str | None) -> str:
    return device if share_id is None else f"{device}-{share_id}"


def _listed(pieces: Sequence[tuple[str, str, str, str | None]]) -> str:
    return ", ".join(f"{pool}/{name}" for _, pool, name, _ in pieces)
