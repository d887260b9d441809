"""What the containers of a claim really have, compared with what the claim's CDI file grants.

Theory of operation. A runtime edits a container when it makes it; nobody tells us whether it did,
or what else it was told to add. So the container's first process is looked at from outside: the
device nodes of its own `/dev`, its mounts, its device rules, the variables it was started with. A
container has a claim if its pod is one for which the claim is reserved, which its control group
tells and nobody in it chooses, and if it has the claim's own variable, since not every container
of a pod has every claim. One that has a node of the claim without having the claim has it beside
the claim, and is found too, whatever its variables say. Privileged containers of others, which
have every device of the host, are administrators and not tenants: they are left out.

Rules that stay true in here:

* Nothing is opened in a container and nothing is run there; a symbolic link in it is not followed.
* Nodes are compared by number, since a path can be anything.
* What cannot be read is said to be so, and is never "nothing".

Source: OCI runtime specification, default devices; proc(5); Container Device Interface 1.1.0.
"""

from __future__ import annotations

import itertools
import os
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from alloy_agent.conformance.checks.shapes import ContainerFact
from alloy_agent.host import devicefence
from alloy_agent.host.cgroupfs import CgroupTopology
from alloy_agent.host.clock import boottime_s
from alloy_agent.host.processes import ProcessInfo, printable, read_bytes
from alloy_agent.kubernetes.cdi import CdiDirectory, Document
from alloy_agent.kubernetes.pods import workload_of
from alloy_agent.model import Fact, Partition, PartitionId, Quality, Snapshot, Value
from alloy_agent.store.claims import ClaimPhase, ClaimRecord

FACT: Final = "claim.containers"
METHOD: Final = "nodes, mounts, device rules and first variables of the container's first process"
ENTRIES_MAX: Final = 4096  # of a container's /dev, of any kind, that are looked at
BASE: Final = frozenset(devicefence.EVERYONE) | {"5:1", "10:229", "10:200"}  # console, fuse, tun
HOSTS: Final = frozenset({"c 1:1", "c 1:11"})  # mem, kmsg: only who is given all devices has them
_OTHERS: Final = frozenset({"/dev/pts", "/dev/mqueue", "/dev/shm"})  # noqa: S108 - no devices there
_PTS: Final = range(136, 144)  # Documentation/admin-guide/devices.txt: Unix98 PTY slaves


class Seen(Value, frozen=True, kw_only=True):
    """One container, by its first process."""

    pid: int
    container: str
    pod_uid: str
    env: dict[str, str]
    nodes: dict[str, str]  # path in the container -> "c major:minor" or "b major:minor"
    mounts: tuple[str, ...]
    unread: tuple[str, ...] = ()


def claim_variable(uid: str) -> str:
    """Return the name of the variable that every container of a claim has, and no other."""
    return f"ALLOY_CLAIM_{uid.upper().replace('-', '_')}"


# --- looking -------------------------------------------------------------------------------------


def containers_of(
    processes: Iterable[ProcessInfo],
) -> tuple[tuple[ProcessInfo, str, str], ...]:
    """Return the first process of each container, with the container's and the pod's identity."""
    first: dict[str, tuple[ProcessInfo, str, str]] = {}
    inside: dict[int, str] = {}
    every = sorted(processes, key=lambda one: one.start_ticks)
    for process in every:
        workload = workload_of(process.cgroups)
        if workload.container:
            inside[process.pid] = workload.container
    for process in every:
        container = inside.get(process.pid)
        if container is None or inside.get(process.ppid) == container or container in first:
            continue
        first[container] = (process, container, workload_of(process.cgroups).pod_uid)
    return tuple(first.values())


def look(process: ProcessInfo, container: str, pod_uid: str, proc_root: str = "/proc") -> Seen:
    """Return what a container has, read from outside."""
    base = f"{proc_root}/{process.pid}"
    unread, looked_at = [], 0
    nodes: dict[str, str] = {}
    try:
        for path, info in itertools.islice(_entries(f"{base}/root"), ENTRIES_MAX + 1):
            looked_at += 1
            if stat.S_ISCHR(info.st_mode) or stat.S_ISBLK(info.st_mode):
                nodes[path] = _number(info)
    except OSError as exc:
        unread.append(f"/dev: {exc.strerror}")
    if looked_at > ENTRIES_MAX:
        unread.append(f"/dev beyond {ENTRIES_MAX} entries")
    raw = read_bytes(f"{base}/environ")
    if not raw:
        unread.append("variables")
    mounts = tuple(
        fields[4]
        for line in read_bytes(f"{base}/mountinfo").decode("utf-8", "replace").splitlines()
        if len(fields := line.split()) > 4
    )
    if not mounts:
        unread.append("mounts")
    return Seen(
        pid=process.pid,
        container=container,
        pod_uid=pod_uid,
        env=_variables(raw),
        nodes=nodes,
        mounts=mounts,
        unread=tuple(unread),
    )


def _entries(root: str) -> Iterator[tuple[str, os.stat_result]]:
    """Yield what is in a container's `/dev`, at any depth.

    A tenant fills it as it likes, so no folder is taken as a whole: whoever looks stops in time.
    """
    folders = ["/dev"]
    while folders:
        folder = folders.pop()
        with os.scandir(root + folder) as entries:
            for entry in entries:
                path = f"{folder}/{entry.name}"
                try:
                    info = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue  # gone meanwhile
                if stat.S_ISDIR(info.st_mode) and path not in _OTHERS:
                    folders.append(path)
                yield printable(path.encode("utf-8", "surrogateescape")), info


def _number(info: os.stat_result) -> str:
    kind = "c" if stat.S_ISCHR(info.st_mode) else "b"
    return f"{kind} {os.major(info.st_rdev)}:{os.minor(info.st_rdev)}"


def _variables(raw: bytes) -> dict[str, str]:
    found = {}
    for item in raw.split(b"\0"):
        name, equals, value = item.partition(b"=")
        if equals:
            found[name.decode("utf-8", "replace")] = value.decode("utf-8", "replace")
    return found


# --- comparing -----------------------------------------------------------------------------------


class Granted(Value, frozen=True, kw_only=True):
    """What the files of all claims in a container grant together."""

    nodes: dict[str, str]  # path in the container -> number
    env: dict[str, tuple[str, ...]]  # any of these values: of two claims, the last one sets it
    mounts: tuple[str, ...]
    absent: tuple[str, ...] = ()  # nodes that the host itself does not have


def granted_by(specs: Sequence[Document]) -> Granted:
    """Return what specs grant together."""
    nodes: dict[str, str] = {}
    env: dict[str, tuple[str, ...]] = {}
    mounts: list[str] = []
    absent = []
    for edits in (device["containerEdits"] for spec in specs for device in spec["devices"]):
        for variable in edits.get("env", ()):
            name, _, value = variable.partition("=")
            env[name] = (*env.get(name, ()), value)
        for node in edits.get("deviceNodes", ()):
            number = _host_number(node)
            if number is None:
                absent.append(node["path"])
            else:
                nodes[node["path"]] = number
        mounts += [mount["containerPath"] for mount in edits.get("mounts", ())]
    return Granted(nodes=nodes, env=env, mounts=tuple(mounts), absent=tuple(absent))


def _host_number(node: Mapping[str, Any]) -> str | None:
    try:
        info = os.stat(node.get("hostPath") or node["path"])  # noqa: PTH116 - nothing is opened
    except OSError:
        return None
    return _number(info)


def compare(
    seen: Seen, granted: Granted, ours: Iterable[str], allowed: frozenset[str] | None = None
) -> ContainerFact:
    """Return where a container has more or less than it was granted.

    Args:
        seen: The container.
        granted: By all of its claims.
        ours: Numbers of all nodes of this node's devices.
        allowed: Those of them that its device rules allow; None: nothing is known of rules.
    """
    numbers = set(granted.nodes.values())
    drivers = {_major(number) for number in (*numbers, *ours)}
    more: list[str] = []
    others: list[str] = []
    for path, number in sorted(seen.nodes.items()):
        if number in numbers or _everyones(number):
            continue
        (more if _major(number) in drivers else others).append(f"{path} ({number})")
    more += [f"device rules for {number}" for number in sorted((allowed or frozenset()) - numbers)]
    less = [
        f"{path} ({number})"
        for path, number in granted.nodes.items()
        if seen.nodes.get(path) != number
    ]
    less += [f"{path} (not on the host)" for path in granted.absent]
    if "variables" not in seen.unread:
        less += [
            f"variable {name}"
            for name, values in granted.env.items()
            if seen.env.get(name) not in values
        ]
    if "mounts" not in seen.unread:
        less += [f"mount {path}" for path in granted.mounts if path not in seen.mounts]
    return ContainerFact(
        pid=seen.pid,
        container=seen.container,
        more=tuple(more),
        less=tuple(less),
        others=tuple(others),
        unread=seen.unread,
    )


def _everyones(number: str) -> bool:
    kind, _, rest = number.partition(" ")
    return kind == "c" and (rest in BASE or int(rest.split(":", maxsplit=1)[0]) in _PTS)


def _major(number: str) -> str:
    return number.split(":", maxsplit=1)[0]


# --- facts ---------------------------------------------------------------------------------------


def facts_of(
    snapshot: Snapshot,
    claims: Sequence[ClaimRecord],
    folder: CdiDirectory,
    processes: Sequence[ProcessInfo],
    topology: CgroupTopology,
) -> list[Fact]:
    """Return, for each partition of a prepared claim, what its containers have."""
    prepared = [one for one in claims if one.phase is ClaimPhase.PREPARED]
    if not prepared:
        return []
    specs = {one.uid: folder.read(one.uid) for one in prepared}
    ours = _numbers_of(snapshot.partitions)
    seen = [(one[0], look(*one)) for one in containers_of(processes)]
    found: list[Fact] = []
    for claim in prepared:
        spec = specs[claim.uid]
        have, why = [], f"the CDI file of claim {claim.namespace}/{claim.name} is gone"
        if spec is not None:
            why = ""
            own = {n for n in granted_by([spec]).nodes.values() if not _everyones(n)}
            for process, one in seen:
                if _belongs(one, claim, own):
                    held = [c.uid for c in prepared if _has(one, c)]
                    granted = granted_by([s for uid in held if (s := specs[uid])])
                    have.append(compare(one, granted, ours, _rules(process, ours, topology)))
        found += [
            _fact(piece.partition, have, why)
            for piece in claim.pieces
            if piece.partition is not None and not piece.admin
        ]
    return found


def _has(seen: Seen, claim: ClaimRecord) -> bool:
    """Whether a container was given a claim: its variable alone says nothing, anyone can set it."""
    return seen.pod_uid in claim.pods and claim_variable(claim.uid) in seen.env


def _belongs(seen: Seen, claim: ClaimRecord, own: set[str]) -> bool:
    """Whether a container has a claim, or has a node of it without having the claim."""
    if _has(seen, claim):
        return True
    numbers = set(seen.nodes.values())
    administers = bool(numbers & HOSTS) and seen.pod_uid not in claim.pods
    return bool(own & numbers) and not administers


def _rules(
    process: ProcessInfo, ours: Iterable[str], topology: CgroupTopology
) -> frozenset[str] | None:
    """Return which of our nodes the v1 device rules of a process allow; None: no such rules.

    Programs of version 2 are judged with the fence of the partition.
    """
    hierarchy = topology.of("devices")
    path = process.cgroups.get("devices")
    if hierarchy is None or hierarchy.version != 1 or path is None:
        return None
    inside = path.removeprefix(hierarchy.root.rstrip("/")).strip("/")
    rules = devicefence.read_rules(hierarchy, inside)
    if rules is None:
        return None
    return frozenset(
        number
        for number in ours
        if rules.everything
        or number.removeprefix("c ") in rules.numbers
        or f"{_major(number).removeprefix('c ')}:*" in rules.numbers
    )


def _numbers_of(partitions: Iterable[Partition]) -> frozenset[str]:
    found = set()
    for partition in partitions:
        for node in partition.access.device_nodes:
            number = devicefence.number_of(node)
            if number is not None:
                found.add(f"c {number}")
    return frozenset(found)


def _fact(partition: PartitionId, have: Sequence[ContainerFact], broken: str) -> Fact:
    return Fact(
        subject=partition,
        name=FACT,
        value=msgspec.to_builtins(have),
        quality=Quality.NOT_SUPPORTED if broken else Quality.VALUE,
        reason=broken,
        method=METHOD,
        resolution="read at the time of the audit",
        read_at_s=boottime_s(),
    )
