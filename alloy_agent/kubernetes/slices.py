"""ResourceSlices of one node: made, checked more strictly than the server does, compared.

Rules that stay true in here:

* One pool for each physical accelerator, so that a change or a fault rewrites that one alone.
* The same generator makes every slice, whatever the reason for writing it.
* Only slices that differ are written. One write keeps the generation; more than one raises it, so
  that a reader never mixes old and new (consumers use the highest generation, and only when all its
  slices are there).
* What does not pass `problems` is never written: the server takes slices that name counters which
  do not exist, and the scheduler then skips the whole pool without a word.

Source: `resource.k8s.io/v1` types and validation, limits as measured on Kubernetes 1.36.2.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from alloy_agent.kubernetes import names
from alloy_agent.kubernetes.offers import WHOLE, Offer, Pool
from alloy_agent.model import Device, Scheme, Share, Tier, Value, Vendor

API_VERSION: Final = "resource.k8s.io/v1"
DEVICES_MAX: Final = 64  # with taints or counters; 128 without
PLAIN_DEVICES_MAX: Final = 128
SETS_MAX: Final = 8
COUNTERS_MAX: Final = 32
CONSUMED_SETS_MAX: Final = 2
PROPERTIES_MAX: Final = 32
TAINTS_MAX: Final = 16
EFFECTS: Final = ("None", "NoSchedule", "NoExecute")
QUANTITY: Final = re.compile(r"[0-9]+(\.[0-9]+)?([KMGTPE]i|[numkMGTPE]|[eE][+-]?[0-9]+)?", re.ASCII)

Document = dict[str, Any]


class Taint(Value, frozen=True, kw_only=True):
    """Why a device should not be used, and how strongly."""

    key: str
    value: str
    effect: str = "NoSchedule"


class SliceOptions(Value, frozen=True, kw_only=True):
    """Of whom and of what the slices speak.

    `node_uid` makes the node the owner, so that the slices go with it. `counters` is False on a
    server that drops counters: then only pieces that exist already are published. `pcie_roots` are
    known by device id.
    """

    driver: str
    node: str
    node_uid: str | None = None
    counters: bool = True
    taints: bool = True
    pcie_roots: dict[str, str] = msgspec.field(default_factory=dict)


class Writes(Value, frozen=True, kw_only=True):
    """What brings the server's slices of one pool to the wanted ones, in this order."""

    delete: tuple[Document, ...] = ()
    update: tuple[Document, ...] = ()
    create: tuple[Document, ...] = ()

    def __bool__(self) -> bool:
        """Whether there is anything to do."""
        return bool(self.delete or self.update or self.create)


def pool_name(node: str, device: str) -> str:
    """Return the name of a device's pool."""
    return f"{node}/{names.subdomain(device)}"


# --- making --------------------------------------------------------------------------------------


def specs_of(
    pool: Pool,
    options: SliceOptions,
    taints: Sequence[Taint] = (),
    own_taints: Mapping[str, Sequence[Taint]] | None = None,
) -> tuple[Document, ...]:
    """Return the `spec` of each slice of a pool, without generation.

    Args:
        pool: What the device offers.
        options: Of whom the slices speak.
        taints: On all devices of the pool.
        own_taints: On single devices, by name.
    """
    own = own_taints or {}
    devices = [
        _device(pool, offer, options, (*taints, *own.get(offer.name, ()))) for offer in pool.offers
    ]
    head = {
        "driver": options.driver,
        "nodeName": options.node,
        "pool": {"name": pool_name(options.node, pool.device.id)},
    }
    parts: list[Document] = []
    if pool.counters and devices and options.counters:
        sets = [
            {"name": name, "counters": {key: {"value": str(n)} for key, n in counters.items()}}
            for name, counters in pool.counters.items()
        ]
        parts.append({**head, "sharedCounters": sets})
    chunks = [devices[at : at + DEVICES_MAX] for at in range(0, len(devices), DEVICES_MAX)]
    parts += [{**head, "devices": chunk} for chunk in chunks or [[]]]
    for part in parts:
        part["pool"] = {**part["pool"], "resourceSliceCount": len(parts)}
    return tuple(parts)


def _device(pool: Pool, offer: Offer, options: SliceOptions, taints: Sequence[Taint]) -> Document:
    made: Document = {"name": offer.name, "attributes": _attributes(pool.device, offer, options)}
    capacity = {}
    if offer.memory_bytes is not None:
        capacity["memory"] = {"value": str(offer.memory_bytes)}
    if offer.compute_units is not None:
        capacity["computeUnits"] = {"value": str(offer.compute_units)}
    if capacity:
        made["capacity"] = capacity
    if offer.consumes and options.counters:
        made["consumesCounters"] = [
            {"counterSet": name, "counters": {key: {"value": str(n)} for key, n in taken.items()}}
            for name, taken in offer.consumes.items()
        ]
    if taints and options.taints:
        unique = {(taint.key, taint.effect): taint for taint in taints}
        made["taints"] = [
            {"key": taint.key, "value": names.label_value(taint.value), "effect": taint.effect}
            for taint in list(unique.values())[:TAINTS_MAX]
        ]
    return made


def _attributes(device: Device, offer: Offer, options: SliceOptions) -> Document:
    """Return what a claim can ask for: nothing in here changes while the device stays the same."""
    texts: dict[str, str | None] = {
        "type": kind_of(device, offer),
        "vendor": device.vendor,
        "model": device.model,
        "parentUUID": device.id,
        "profile": offer.profile,
        "share": offer.share,
        "hive": device.hive,
        "driverVersionRaw": device.driver,
        "tier": tier_of(device, offer),
    }
    found: Document = {
        key: {"string": names.short(text)} for key, text in texts.items() if text is not None
    }
    found["placementStart"] = {"int": offer.placement.start}
    found["placementSize"] = {"int": offer.placement.size}
    found["simulated"] = {"bool": device.simulated}
    if device.numa_node is not None:
        found["numaNode"] = {"int": device.numa_node}
    version = None if device.driver is None else names.semver(device.driver)
    if version is not None:
        found["driverVersion"] = {"version": version}
    for mode in device.modes:
        if device.scheme is Scheme.MODES:
            found[f"{mode.kind}Mode"] = {"string": names.short(mode.current)}
    if device.bus is not None:
        found["resource.kubernetes.io/pciBusID"] = {"string": device.bus}
    root = options.pcie_roots.get(device.id)
    if root is not None:
        found["resource.kubernetes.io/pcieRoot"] = {"string": root}
    return found


def kind_of(device: Device, offer: Offer) -> str:
    """Return what kind of piece an offer is, as a claim asks for it."""
    if offer.share is not Share.EXCLUSIVE:
        return "share"
    if offer.profile == WHOLE:
        return "device"
    if device.scheme is Scheme.MODES and offer.placement.size == device.slices:
        return "device"
    return {Scheme.INSTANCES: "mig", Scheme.MODES: "xcd", Scheme.CORES: "cores"}.get(
        device.scheme, "device"
    )


def tier_of(device: Device, offer: Offer) -> str | None:
    """Return the best tier that this way of cutting the device can reach, if it says so.

    Cores of the host are advisory: a container's cpuset is the kubelet's, and a device spec cannot
    put the container into the partition.
    """
    if device.vendor is Vendor.CPU:
        return Tier.ADVISORY
    modes = "/".join(mode.current.lower() for mode in device.modes)
    wanted = {
        "share": ("shared",),
        "mig": ("mig",),
        "cores": ("cores",),
        "xcd": (modes, modes.split("/", 1)[0]),
        "device": ("whole", "cores", modes),
    }[kind_of(device, offer)]
    limits = {limit.way.lower(): limit.tier for limit in device.tier_limits}
    return next((limits[way] for way in wanted if way in limits), None)


# --- comparing -----------------------------------------------------------------------------------


def writes(
    specs: Sequence[Document], existing: Iterable[Document], options: SliceOptions
) -> Writes:
    """Return what has to be written so that the server holds exactly these specs.

    Args:
        specs: Of one pool, as `specs_of` returns them.
        existing: The server's slices of that pool, as read.
        options: Of whom the slices speak.
    """
    present = sorted(existing, key=lambda one: str(one.get("metadata", {}).get("name", "")))
    newest = max((_generation(one) for one in present), default=0)
    current = [one for one in present if _generation(one) == newest]
    stale = [one for one in present if _generation(one) != newest]
    matched, free = _match(specs, current)
    missing = [spec for spec, one in matched if one is None]
    changed = [
        (spec, one) for spec, one in matched if one is not None and not _same(spec, one["spec"])
    ]
    if not (missing or changed or stale or free):
        return Writes()
    lone = len(missing) + len(changed) + len(free) == 1 and not missing and not free
    if lone:
        generation, rewritten = newest, changed
    elif not (missing or changed or free):
        return Writes(delete=tuple(stale))
    else:
        generation = newest + 1
        rewritten = [(spec, one) for spec, one in matched if one is not None]
    return Writes(
        delete=(*stale, *free),
        update=tuple(_updated(spec, one, generation, options) for spec, one in rewritten),
        create=tuple(
            _created(spec, index, generation, options)
            for index, (spec, one) in enumerate(matched)
            if one is None
        ),
    )


def _match(
    specs: Sequence[Document], current: list[Document]
) -> tuple[list[tuple[Document, Document | None]], list[Document]]:
    """Pair each spec with a slice of its kind: an equal one first, else the next in order."""
    free = list(current)
    pairs: list[tuple[Document, Document | None]] = []
    for spec in specs:
        fitting = [one for one in free if ("devices" in spec) == ("devices" in one["spec"])]
        best = next((one for one in fitting if _same(spec, one["spec"])), None)
        best = best or (fitting[0] if fitting else None)
        if best is not None:
            free.remove(best)
        pairs.append((spec, best))
    return pairs, free


def _generation(document: Document) -> int:
    value = document.get("spec", {}).get("pool", {}).get("generation", 0)
    return value if isinstance(value, int) else 0


def _same(spec: Document, other: Document) -> bool:
    """Whether two specs say the same, apart from generation and when a taint was added."""
    return _plain(spec) == _plain(other)


def _plain(spec: Document) -> Document:
    pool = {key: value for key, value in spec["pool"].items() if key != "generation"}
    devices = [
        {
            **device,
            "taints": [
                {key: value for key, value in taint.items() if key != "timeAdded"}
                for taint in device.get("taints") or ()
            ],
        }
        for device in spec.get("devices") or ()
    ]
    return {
        **{key: value for key, value in spec.items() if value not in (None, [], {})},
        "pool": pool,
        "devices": devices,
    }


def _updated(spec: Document, one: Document, generation: int, options: SliceOptions) -> Document:
    return {
        **one,
        "metadata": {**one["metadata"], **_owner(options)},
        "spec": _with_times(_numbered(spec, generation), one["spec"]),
    }


def _created(spec: Document, index: int, generation: int, options: SliceOptions) -> Document:
    pool = spec["pool"]["name"].rsplit("/", 1)[-1]
    prefix = f"{index:05x}-{options.driver}-{pool}"[:240].strip("-.")
    return {
        "apiVersion": API_VERSION,
        "kind": "ResourceSlice",
        "metadata": {"generateName": f"{prefix}-", **_owner(options)},
        "spec": _numbered(spec, generation),
    }


def _owner(options: SliceOptions) -> Document:
    if options.node_uid is None:
        return {}
    owner = {"apiVersion": "v1", "kind": "Node", "name": options.node, "uid": options.node_uid}
    return {"ownerReferences": [owner]}


def _numbered(spec: Document, generation: int) -> Document:
    return {**spec, "pool": {**spec["pool"], "generation": generation}}


def _with_times(spec: Document, old: Document) -> Document:
    """Return a spec whose taints keep the time at which they were added."""
    times = {
        (device["name"], taint["key"], taint.get("value"), taint["effect"]): taint["timeAdded"]
        for device in old.get("devices") or ()
        for taint in device.get("taints") or ()
        if "timeAdded" in taint
    }
    if not times or "devices" not in spec:
        return spec
    devices = []
    for device in spec["devices"]:
        taints = []
        for taint in device.get("taints", ()):
            added = times.get((device["name"], taint["key"], taint.get("value"), taint["effect"]))
            taints.append(taint if added is None else {**taint, "timeAdded": added})
        devices.append({**device, "taints": taints} if taints else device)
    return {**spec, "devices": devices}


def dropped(sent: Document, answered: Document) -> tuple[str, ...]:
    """Return the fields that the server took away: features that are switched off there."""
    gone = []
    one, other = sent["spec"], answered.get("spec", {})
    if one.get("sharedCounters") and not other.get("sharedCounters"):
        gone.append("sharedCounters")
    theirs = {device["name"]: device for device in other.get("devices") or ()}
    gone += [
        field
        for field in ("consumesCounters", "taints")
        if any(
            device.get(field) and not theirs.get(device["name"], {}).get(field)
            for device in one.get("devices") or ()
        )
    ]
    return tuple(gone)


# --- checking ------------------------------------------------------------------------------------


def problems(slices: Sequence[Document]) -> tuple[str, ...]:
    """Return what is wrong with the slices of one pool, one line each; empty: they may be written.

    Args:
        slices: Whole objects, or specs.
    """
    specs = [one.get("spec", one) for one in slices]
    found = [line for spec in specs for line in _spec_problems(spec)]
    if found:
        return tuple(found)
    return tuple(_pool_problems(specs))


def _spec_problems(spec: Document) -> Iterator[str]:
    yield from _head_problems(spec)
    devices, sets = spec.get("devices") or [], spec.get("sharedCounters") or []
    if devices and sets:
        yield "a slice holds counters or devices, not both"
    if len(sets) > SETS_MAX:
        yield f"{len(sets)} counter sets, at most {SETS_MAX} in a slice"
    for one in sets:
        yield from _set_problems(one)
    heavy = any(device.get("taints") or device.get("consumesCounters") for device in devices)
    most = DEVICES_MAX if heavy else PLAIN_DEVICES_MAX
    if len(devices) > most:
        yield f"{len(devices)} devices, at most {most} in this slice"
    for device in devices:
        yield from _device_problems(device)


def _head_problems(spec: Document) -> Iterator[str]:
    driver, pool = spec.get("driver", ""), spec.get("pool") or {}
    if len(driver) > names.LABEL_BYTES or not names.SUBDOMAIN.fullmatch(driver):
        yield f"driver {driver!r} is no DNS sub-domain of at most 63 bytes"
    name = pool.get("name", "")
    if len(name) > 253 or not all(names.SUBDOMAIN.fullmatch(part) for part in name.split("/")):
        yield f"pool {name!r} is no row of DNS sub-domains of at most 253 bytes"
    if pool.get("generation", 0) < 0:
        yield f"pool {name}: generation {pool['generation']} is below zero"
    if pool.get("resourceSliceCount", 0) < 1:
        yield f"pool {name}: resourceSliceCount must be above zero"
    chosen = [
        key for key in ("nodeName", "nodeSelector", "allNodes", "perDeviceNodeSelection")
        if spec.get(key)
    ]  # fmt: skip
    if len(chosen) != 1:
        yield f"pool {name}: {len(chosen)} ways of naming nodes, exactly one is needed"


def _set_problems(one: Document) -> Iterator[str]:
    name, counters = one.get("name", ""), one.get("counters") or {}
    if not names.LABEL.fullmatch(name):
        yield f"counter set {name!r} is no DNS label"
    if not counters:
        yield f"counter set {name}: no counters"
    yield from _counter_problems(f"counter set {name}", counters)


def _counter_problems(where: str, counters: Document) -> Iterator[str]:
    if len(counters) > COUNTERS_MAX:
        yield f"{where}: {len(counters)} counters, at most {COUNTERS_MAX}"
    for key, value in counters.items():
        if not names.LABEL.fullmatch(key):
            yield f"{where}: counter {key!r} is no DNS label"
        if not QUANTITY.fullmatch(str(value.get("value"))):
            yield f"{where}: counter {key} has no quantity"


def _device_problems(device: Document) -> Iterator[str]:
    name = device.get("name", "")
    if not names.LABEL.fullmatch(name):
        yield f"device {name!r} is no DNS label"
    attributes, capacity = device.get("attributes") or {}, device.get("capacity") or {}
    if len(attributes) + len(capacity) > PROPERTIES_MAX:
        yield f"device {name}: {len(attributes) + len(capacity)} properties, at most 32"
    for key, value in attributes.items():
        yield from _name_problems(name, key)
        yield from _attribute_problems(name, key, value)
    for key, value in capacity.items():
        yield from _name_problems(name, key)
        if not QUANTITY.fullmatch(str(value.get("value"))):
            yield f"device {name}: capacity {key} has no quantity"
    consumed = device.get("consumesCounters") or []
    if len(consumed) > CONSUMED_SETS_MAX:
        yield f"device {name}: consumes from {len(consumed)} sets, at most {CONSUMED_SETS_MAX}"
    for one in consumed:
        yield from _counter_problems(f"device {name}", one.get("counters") or {})
    yield from _taint_problems(name, device.get("taints") or [])


def _name_problems(device: str, key: str) -> Iterator[str]:
    domain, _, bare = key.rpartition("/")
    if not names.IDENTIFIER.fullmatch(bare):
        yield f"device {device}: {key!r} is no identifier of at most 32 characters"
    if domain and (len(domain) > 63 or not names.SUBDOMAIN.fullmatch(domain)):
        yield f"device {device}: the domain of {key!r} is no DNS sub-domain"


def _attribute_problems(device: str, key: str, value: Document) -> Iterator[str]:
    if len(value) != 1 or not {"bool", "int", "string", "version"}.intersection(value):
        yield f"device {device}: attribute {key} needs exactly one of bool, int, string, version"
        return
    ((kind, content),) = value.items()
    if kind in ("string", "version") and len(str(content).encode()) > names.STRING_BYTES:
        yield f"device {device}: attribute {key} is longer than 64 bytes"
    if kind == "version" and not names.SEMVER.fullmatch(str(content)):
        yield f"device {device}: attribute {key}: {content!r} is no semantic version"


def _taint_problems(device: str, taints: list[Document]) -> Iterator[str]:
    if len(taints) > TAINTS_MAX:
        yield f"device {device}: {len(taints)} taints, at most {TAINTS_MAX}"
    for taint in taints:
        if taint.get("effect") not in EFFECTS:
            yield f"device {device}: taint {taint.get('key')} has effect {taint.get('effect')!r}"
        domain, _, bare = str(taint.get("key", "")).rpartition("/")
        if not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?", bare) or (
            domain and not names.SUBDOMAIN.fullmatch(domain)
        ):
            yield f"device {device}: taint key {taint.get('key')!r} is no qualified name"
    if len({(taint.get("key"), taint.get("effect")) for taint in taints}) != len(taints):
        yield f"device {device}: two taints of one key and effect"


def _pool_problems(specs: Sequence[Document]) -> Iterator[str]:
    """Yield what only shows over all slices of a pool; the server does not look for these."""
    heads = {
        (spec["driver"], spec["pool"]["name"], spec["pool"].get("generation")) for spec in specs
    }
    if len(heads) > 1:
        yield "slices of several pools or generations"
    counts = {spec["pool"]["resourceSliceCount"] for spec in specs}
    if counts != {len(specs)}:
        yield f"resourceSliceCount says {sorted(counts)}, there are {len(specs)} slices"
    supply: dict[tuple[str, str], int] = {}
    sets = [one["name"] for spec in specs for one in spec.get("sharedCounters") or ()]
    if len(set(sets)) != len(sets):
        yield "two counter sets of one name"
    for spec in specs:
        for one in spec.get("sharedCounters") or ():
            for key, value in one["counters"].items():
                supply[one["name"], key] = int(value["value"])
    devices = [device for spec in specs for device in spec.get("devices") or ()]
    if len({device["name"] for device in devices}) != len(devices):
        yield "two devices of one name"
    for device in devices:
        yield from _supply_problems(device, supply)


def _supply_problems(device: Document, supply: dict[tuple[str, str], int]) -> Iterator[str]:
    for one in device.get("consumesCounters") or ():
        for key, value in one["counters"].items():
            there = supply.get((one["counterSet"], key))
            if there is None:
                yield f"device {device['name']}: there is no counter {one['counterSet']}/{key}"
            elif int(value["value"]) > there:
                yield (
                    f"device {device['name']}: consumes {value['value']} of {key}, "
                    f"there are {there}"
                )
