"""What is published: the counters against simulated silicon, the limits, the generation rules."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from alloy_agent.backends.fake import FakeBackend
from alloy_agent.errors import BackendError
from alloy_agent.kubernetes import names, slices
from alloy_agent.kubernetes.offers import Offer, Pool, granule, mode_for, permitted, pool_of
from alloy_agent.kubernetes.slices import SliceOptions, Taint
from alloy_agent.model import (
    Create,
    Destroy,
    Device,
    DeviceId,
    ModeKind,
    Partition,
    PartitionSpec,
    Placement,
    Scheme,
    SetMode,
    Share,
    Tier,
    TierLimit,
    Vendor,
)
from alloy_agent.silicon.boards import BOARDS, AmdBoard, NeuronInstance, NvidiaBoard

OPTIONS = SliceOptions(driver="gpu.alloy.dev", node="node-a", node_uid="uid-1")
SPECS = [
    name if isinstance(board, NeuronInstance) else f"1x{name}" for name, board in BOARDS.items()
]


def seen(backend: FakeBackend) -> tuple[Device, tuple[Partition, ...]]:
    one = backend.observe(backend.discover()[0])
    return one.device, one.partitions


class Silicon:
    """One simulated device that takes an allocation as prepare would make it, or refuses."""

    def __init__(self, spec: str) -> None:
        self.backend = FakeBackend.from_specs((spec,))
        self.device, self.pieces = seen(self.backend)

    def _apply(self, step: Any) -> None:
        self.backend.quiesce(step.device)
        self.backend.apply(step)

    def clear(self) -> None:
        """Take every piece away that a claim made."""
        for piece in seen(self.backend)[1]:
            made = self.device.scheme in (Scheme.INSTANCES, Scheme.CORES) or (
                piece.share is not Share.EXCLUSIVE
            )
            if made and piece.profile != "whole":
                self._apply(Destroy(device=piece.device, partition=piece))

    def make(self, offer: Offer) -> bool:
        """Make one piece beside those that are there; return whether the device took it."""
        device, here = seen(self.backend)
        wanted = mode_for(device, offer)
        mig = next((m.current for m in device.modes if m.kind is ModeKind.MIG), None)
        try:
            if wanted is not None and mig != wanted:
                if any(p.share is not Share.EXCLUSIVE for p in here):
                    return False  # a share is in use on the whole device
                self._apply(
                    SetMode(device=device.id, kind=ModeKind.MIG, current=mig or "", wanted=wanted)
                )
                here = seen(self.backend)[1]
            exists = [
                p for p in here if (p.profile, p.placement) == (offer.profile, offer.placement)
            ]
            given = offer.profile == "whole" or device.scheme is Scheme.MODES
            if given and offer.share is Share.EXCLUSIVE:
                return bool(exists)
            if device.scheme is Scheme.CORES and exists:
                return False
            self._apply(Create(device=device.id, spec=spec_of(device, offer)))
        except BackendError:
            return False
        return True


def spec_of(device: Device, offer: Offer) -> PartitionSpec:
    return PartitionSpec(
        device=device.id,
        profile=offer.profile,
        size=offer.placement.size,
        placement=offer.placement,
        share=offer.share,
        ordinal=offer.ordinal,
    )


@pytest.mark.parametrize("spec", SPECS)
def test_what_the_counters_permit_can_be_made_and_nothing_else(spec: str) -> None:
    """Random allocations on every board: the scheduler's sum and the silicon always agree."""
    silicon = Silicon(spec)
    pool = pool_of(silicon.device, silicon.pieces)
    dice = random.Random(spec)  # noqa: S311
    whole_taken = permits = refusals = 0
    for _ in range(12):
        silicon.clear()
        taken: list[Offer] = []
        for _ in range(24):
            offer = dice.choice(pool.offers)
            if offer in taken or any(
                "whole" in (offer.profile, other.profile) or silicon.device.scheme is Scheme.MODES
                for other in taken
            ):
                # The device itself knows no claim on the whole of it, or on a piece of a mode:
                # overlap is then a matter of places alone.
                clash = offer in taken or any(offer.placement.overlaps(o.placement) for o in taken)
                assert permitted(pool, [*taken, offer]) == (not clash)
                whole_taken += 1
                if clash:
                    continue
            may = permitted(pool, [*taken, offer])
            assert silicon.make(offer) == may, (spec, offer.name, [o.name for o in taken])
            permits, refusals = permits + may, refusals + (not may)
            if may:
                taken.append(offer)
    assert permits
    if len(pool.offers) > 3 and silicon.device.scheme is not Scheme.MODES:
        assert refusals


@pytest.mark.parametrize("spec", ["1xH100-SXM5-80GB", "1xA30-24GB"])
def test_every_full_set_of_pieces_is_permitted(spec: str) -> None:
    """Everything the device can hold at once, by exhaustion, is permitted, and nothing more."""
    device = Silicon(spec).device
    pool = pool_of(device)
    pieces = [o for o in pool.offers if o.profile != "whole"]
    limits = {p.name: p.max_count for p in device.profiles}
    compute = max(int(p.name[0]) for p in device.profiles)

    def legal(chosen: list[Offer]) -> bool:
        apart = all(
            not a.placement.overlaps(b.placement) for i, a in enumerate(chosen) for b in chosen[:i]
        )
        counts = all(
            sum(o.profile == name for o in chosen) <= most for name, most in limits.items()
        )
        return apart and counts and sum(int(o.profile[0]) for o in chosen) <= compute

    def grow(chosen: list[Offer], start: int) -> Iterator[list[Offer]]:
        yield chosen
        for index in range(start, len(pieces)):
            more = [*chosen, pieces[index]]
            assert permitted(pool, more) == legal(more)
            if legal(more):
                yield from grow(more, index + 1)

    assert sum(1 for _ in grow([], 0)) > 50


@pytest.mark.parametrize("spec", ["1xH100-SXM5-80GB", "1xMI300X"])
def test_shares_and_pieces_exclude_each_other(spec: str) -> None:
    """A production and two opportunistic shares live together; none lives beside a piece."""
    silicon = Silicon(spec)
    pool = pool_of(silicon.device, silicon.pieces, shares=2)
    shares = [o for o in pool.offers if o.share is not Share.EXCLUSIVE]
    alone = [o for o in pool.offers if o.share is Share.EXCLUSIVE]
    assert len(shares) == 3
    assert permitted(pool, shares)
    for share in shares:
        assert silicon.make(share)
        for piece in alone:
            assert not permitted(pool, [share, piece])
    assert slices.problems(numbered(pool)) == ()


def numbered(pool: Pool, taints: tuple[Taint, ...] = ()) -> list[dict[str, Any]]:
    return list(slices.writes(slices.specs_of(pool, OPTIONS, taints), (), OPTIONS).create)


@pytest.mark.parametrize("spec", SPECS)
def test_the_slices_of_every_board_are_valid(spec: str) -> None:
    """With and without a taint, each board's pool passes the check."""
    device, pieces = seen(FakeBackend.from_specs((spec,)))
    pool = pool_of(device, pieces)
    assert slices.problems(numbered(pool)) == ()
    taint = Taint(key="gpu.alloy.dev/unhealthy", value="row remap failed: replace")
    assert slices.problems(numbered(pool, (taint,))) == ()
    assert pool.offers
    if device.scheme is Scheme.INSTANCES:
        assert any(o.profile == "whole" for o in pool.offers)


def cores(count: int) -> Device:
    return Device(
        id=DeviceId("cpu-0"),
        vendor=Vendor.CPU,
        model="Some CPU",
        backend="cpu",
        scheme=Scheme.CORES,
        slices=count,
        slice_name="core",
        memory_bytes=count << 30,
    )


@given(st.integers(min_value=1, max_value=512), st.data())
def test_any_number_of_cores_fits_into_the_limits(count: int, data: st.DataObject) -> None:
    """Rows of any length give valid slices; runs that touch one core are never both permitted."""
    pool = pool_of(cores(count))
    assert slices.problems(numbered(pool)) == ()
    chosen = data.draw(
        st.lists(st.sampled_from(pool.offers), max_size=5, unique_by=lambda o: o.name)
    )
    apart = all(
        not a.placement.overlaps(b.placement) for i, a in enumerate(chosen) for b in chosen[:i]
    )
    assert permitted(pool, chosen) == apart
    assert granule(pool.device) * 48 >= count


def test_cores_of_the_host_promise_nothing() -> None:
    """No container is held to them: whatever the backend could reach, a claim is told advisory."""
    limit = TierLimit(way="cores", tier=Tier.ENFORCED, reason="a cpuset")
    device = msgspec.structs.replace(cores(8), tier_limits=(limit,))
    objects = numbered(pool_of(device))
    tiers = {
        offer["attributes"]["tier"]["string"]
        for one in objects
        for offer in one["spec"].get("devices", ())
    }
    assert tiers == {"advisory"}


def test_what_touches_a_blocked_place_is_left_out() -> None:
    """A piece that somebody else made takes its neighbours with it and nothing more."""
    device = Silicon("1xH100-SXM5-80GB").device
    blocked = Placement(start=4, size=4)
    pool = pool_of(device, blocked=(blocked,))
    assert all(not o.placement.overlaps(blocked) for o in pool.offers)
    assert {o.placement.start for o in pool.offers if o.profile == "1g.10gb"} == {0, 1, 2, 3}
    assert slices.problems(numbered(pool)) == ()


def test_first_fit_in_the_published_order_wastes_no_more_than_by_index() -> None:
    """Seeded lives of small and large pieces: at least as many large ones find a place."""
    published = by_index = 0
    for board in ("H100-SXM5-80GB", "A100-SXM4-40GB", "B200-180GB"):
        device = Silicon(f"1x{board}").device
        pool = pool_of(device)
        index = sorted(pool.offers, key=lambda o: (o.placement.start, o.name))
        for seed in range(20):
            published += accepted(pool, pool.offers, seed)
            by_index += accepted(pool, index, seed)
    assert published >= by_index
    assert published > 0


def accepted(pool: Pool, order: Sequence[Offer], seed: int) -> int:
    """Return how many requests for half a device or more first fit served."""
    dice = random.Random(seed)  # noqa: S311
    half = pool.device.slices / 2
    sizes = {o.profile: o.placement.size for o in pool.offers if o.profile != "whole"}
    small = sorted(name for name, size in sizes.items() if size < half and "+" not in name)
    large = sorted(name for name, size in sizes.items() if half <= size < pool.device.slices)
    living: list[Offer] = []
    served = 0
    for _ in range(200):
        if living and dice.random() < 0.5:
            living.pop(dice.randrange(len(living)))
        want = dice.choice(small if dice.random() < 0.6 else large)
        fits = (o for o in order if o.profile == want and permitted(pool, [*living, o]))
        fit = next(fits, None)
        if fit is not None:
            living.append(fit)
            served += want in large
    return served


# --- limits ------------------------------------------------------------------------------------


def valid() -> list[dict[str, Any]]:
    device, pieces = seen(FakeBackend.from_specs(("1xH100-SXM5-80GB",)))
    return copy.deepcopy(numbered(pool_of(device, pieces)))


def _set(path: str, value: Any) -> Any:
    """Return a change of one place: keys and indices joined by dots."""

    def change(objects: list[dict[str, Any]]) -> None:
        node: Any = objects
        *way, last = path.split("|")
        for key in way:
            node = node[int(key)] if key.isdigit() and isinstance(node, list) else node[key]
        node[int(last) if last.isdigit() and isinstance(node, list) else last] = value

    return change


DEVICE = "1|spec|devices|0"
BROKEN = {
    "counters beside devices": _set("0|spec|devices", [{"name": "dev0"}]),
    "nine sets": _set(
        "0|spec|sharedCounters",
        [{"name": f"set-{n}", "counters": {"one": {"value": "1"}}} for n in range(9)],
    ),
    "33 counters": _set(
        "0|spec|sharedCounters|0|counters", {f"c-{n}": {"value": "1"} for n in range(33)}
    ),
    "no counters": _set("0|spec|sharedCounters|0|counters", {}),
    "a counter in camel case": _set("0|spec|sharedCounters|0|counters|coreOne", {"value": "1"}),
    "a dot in a device name": _set(f"{DEVICE}|name", "1g.10gb"),
    "a device name of 64 bytes": _set(f"{DEVICE}|name", "a" * 64),
    "a dash in an attribute": _set(f"{DEVICE}|attributes|pcie-root", {"string": "x"}),
    "an attribute of two kinds": _set(f"{DEVICE}|attributes|one", {"string": "x", "int": 1}),
    "a string of 65 bytes": _set(f"{DEVICE}|attributes|one", {"string": "x" * 65}),
    "a version of two numbers": _set(f"{DEVICE}|attributes|one", {"version": "570.86"}),
    "a version with leading zero": _set(f"{DEVICE}|attributes|one", {"version": "550.90.07"}),
    "33 properties": _set(f"{DEVICE}|attributes", {f"a{n}": {"int": n} for n in range(33)}),
    "17 taints": _set(
        f"{DEVICE}|taints",
        [{"key": f"k{n}", "value": "", "effect": "NoSchedule"} for n in range(17)],
    ),
    "PreferNoSchedule": _set(
        f"{DEVICE}|taints", [{"key": "k", "value": "", "effect": "PreferNoSchedule"}]
    ),
    "three sets consumed": _set(
        f"{DEVICE}|consumesCounters",
        [{"counterSet": f"set-{n}", "counters": {"one": {"value": "1"}}} for n in range(3)],
    ),
    "an unknown set": _set(f"{DEVICE}|consumesCounters|0|counterSet", "elsewhere"),
    "an unknown counter": _set(f"{DEVICE}|consumesCounters|0|counters|nothing", {"value": "1"}),
    "more than there is": _set(
        f"{DEVICE}|consumesCounters|0|counters|compute-slices", {"value": "8"}
    ),
    "a quantity that is none": _set(f"{DEVICE}|capacity|memory", {"value": "much"}),
    "a driver of 64 bytes": _set("0|spec|driver", "a" * 64),
    "a pool of 254 bytes": _set("0|spec|pool|name", "a" * 254),
    "a pool with an empty part": _set("0|spec|pool|name", "node-a//gpu"),
    "generation below zero": _set("0|spec|pool|generation", -1),
    "generations that differ": _set("0|spec|pool|generation", 7),
    "count of zero": _set("0|spec|pool|resourceSliceCount", 0),
    "a wrong count": _set("0|spec|pool|resourceSliceCount", 3),
    "two ways of naming nodes": _set("0|spec|allNodes", True),
    "no node": _set("0|spec|nodeName", ""),
}


@pytest.mark.parametrize("what", BROKEN)
def test_each_limit_is_looked_at(what: str) -> None:
    """One thing broken in a valid pool is found, before the server or the scheduler meets it."""
    objects = valid()
    assert slices.problems(objects) == ()
    BROKEN[what](objects)
    assert slices.problems(objects), what


def test_devices_of_one_name_and_too_many_are_found() -> None:
    """Sixty-five devices in a slice, or two of one name over the pool, are refused."""
    objects = valid()
    devices = objects[1]["spec"]["devices"]
    devices.append(copy.deepcopy(devices[0]))
    assert slices.problems(objects)
    objects = valid()
    one = objects[1]["spec"]["devices"][0]
    objects[1]["spec"]["devices"] = [{**one, "name": f"dev-{n}"} for n in range(65)]
    assert any("65 devices" in line for line in slices.problems(objects))


# --- writing -----------------------------------------------------------------------------------


def stored(objects: tuple[dict[str, Any], ...]) -> list[dict[str, Any]]:
    return [
        {**one, "metadata": {**one["metadata"], "name": f"slice-{n}", "resourceVersion": str(n)}}
        for n, one in enumerate(objects)
    ]


def test_nothing_is_written_where_nothing_changed() -> None:
    """The same pool again is no write, even when the server noted when a taint was added."""
    device, pieces = seen(FakeBackend.from_specs(("1xH100-SXM5-80GB",)))
    specs = slices.specs_of(pool_of(device, pieces), OPTIONS, (Taint(key="a.b/c", value="d"),))
    first = slices.writes(specs, (), OPTIONS)
    assert len(first.create) == 2
    there = stored(first.create)
    for one in there[1]["spec"]["devices"]:
        one["taints"][0]["timeAdded"] = "2026-01-01T00:00:00Z"
    assert not slices.writes(specs, there, OPTIONS)


def test_a_taint_rewrites_one_slice_and_keeps_the_generation() -> None:
    """One changed slice is updated in place, with its version and the times of old taints."""
    device, pieces = seen(FakeBackend.from_specs(("1xH100-SXM5-80GB",)))
    pool = pool_of(device, pieces)
    old, new = Taint(key="a.b/old", value=""), Taint(key="a.b/new", value="")
    there = stored(slices.writes(slices.specs_of(pool, OPTIONS, (old,)), (), OPTIONS).create)
    for one in there[1]["spec"]["devices"]:
        one["taints"][0]["timeAdded"] = "2026-01-01T00:00:00Z"
    change = slices.writes(slices.specs_of(pool, OPTIONS, (old, new)), there, OPTIONS)
    assert (len(change.update), change.create, change.delete) == (1, (), ())
    (update,) = change.update
    assert update["spec"]["pool"]["generation"] == 1
    assert update["metadata"]["resourceVersion"] == "1"
    taints = update["spec"]["devices"][0]["taints"]
    assert [t.get("timeAdded") for t in taints] == ["2026-01-01T00:00:00Z", None]


def test_more_than_one_change_raises_the_generation_of_all() -> None:
    """A pool whose shape changes is written whole under the next generation."""
    device, pieces = seen(FakeBackend.from_specs(("1xH100-SXM5-80GB",)))
    there = stored(numbered_tuple(pool_of(device, pieces)))
    change = slices.writes(
        slices.specs_of(pool_of(device, pieces, shares=1), OPTIONS), there, OPTIONS
    )
    assert {one["spec"]["pool"]["generation"] for one in change.update} == {2}
    assert len(change.update) == 2


def numbered_tuple(pool: Pool) -> tuple[dict[str, Any], ...]:
    return tuple(numbered(pool))


def test_leftovers_of_older_generations_are_deleted_first() -> None:
    """A slice of an older generation goes, and what is right is not rewritten for it."""
    device, pieces = seen(FakeBackend.from_specs(("1xH100-SXM5-80GB",)))
    pool = pool_of(device, pieces)
    there = stored(slices.writes(slices.specs_of(pool, OPTIONS), (), OPTIONS).create)
    for one in there:
        one["spec"]["pool"]["generation"] = 4
    old = copy.deepcopy(there[0])
    old["metadata"]["name"] = "old"
    old["spec"]["pool"]["generation"] = 3
    change = slices.writes(slices.specs_of(pool, OPTIONS), [old, *there], OPTIONS)
    assert [one["metadata"]["name"] for one in change.delete] == ["old"]
    assert (change.update, change.create) == ((), ())


def test_a_missing_slice_raises_the_generation() -> None:
    """A slice that somebody deleted comes back with the whole pool under the next generation."""
    device, pieces = seen(FakeBackend.from_specs(("1xH100-SXM5-80GB",)))
    pool = pool_of(device, pieces)
    there = stored(numbered_tuple(pool))
    change = slices.writes(slices.specs_of(pool, OPTIONS), there[:1], OPTIONS)
    every = [*change.update, *change.create]
    assert len(every) == 2
    assert {one["spec"]["pool"]["generation"] for one in every} == {2}
    assert slices.problems(every) == ()


def test_fields_that_the_server_drops_are_noticed() -> None:
    """A server without the features answers without the fields; each is named."""
    sent = valid()
    tainted = copy.deepcopy(sent[1])
    tainted["spec"]["devices"][0]["taints"] = [{"key": "k", "value": "", "effect": "None"}]
    answer = copy.deepcopy(tainted)
    for device in answer["spec"]["devices"]:
        device.pop("consumesCounters", None)
        device.pop("taints", None)
    assert slices.dropped(tainted, answer) == ("consumesCounters", "taints")
    assert slices.dropped(sent[0], {"spec": {}}) == ("sharedCounters",)
    assert slices.dropped(sent[1], sent[1]) == ()


# --- names -------------------------------------------------------------------------------------


@given(st.lists(st.text(min_size=1), max_size=8))
def test_names_are_labels_and_never_one_for_two(texts: list[str]) -> None:
    """Any texts, whatever is in them, get names that Kubernetes takes, each its own."""
    found = names.distinct(texts)
    assert len(set(found.values())) == len(set(texts))
    assert all(names.LABEL.fullmatch(name) for name in found.values())


@given(st.text(max_size=80))
def test_versions_are_semantic_or_absent(text: str) -> None:
    """Any driver version becomes strict semver, or none."""
    version = names.semver(text)
    assert version is None or names.SEMVER.fullmatch(version)


def test_versions_of_drivers() -> None:
    """Leading zeros and missing parts are put right."""
    assert names.semver("550.90.07") == "550.90.7"
    assert names.semver("570.86") == "570.86.0"
    assert names.semver("aws-neuronx 2.30.5") == "2.30.5"
    assert names.semver("unknown") is None


def test_boards_of_all_vendors_are_covered() -> None:
    """The property above speaks of NVIDIA, AMD and Neuron boards."""
    kinds = {type(board) for board in BOARDS.values()}
    assert kinds == {NvidiaBoard, AmdBoard, NeuronInstance}
