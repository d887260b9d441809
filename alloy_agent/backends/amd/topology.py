"""The KFD topology: which partitions are live, where, and of which device.

Discovery starts from KFD's nodes and their `drm_render_minor`, never from names of platform
devices, which differ between builds (`amdgpu_xcp_1`, `amdgpu_xcp.1`).

Rules that stay true in here:

* A device is (domain, bus, device): the unique id is the same for all partitions on some drivers
  and distinct on others, and the location repeats over domains.
* The tree is re-created on every switch of any device. A reading counts only if `generation_id` is
  the same before and after; a node that vanishes meanwhile is read again, a few times.

Source: kernel kfd_topology.c; recorded topologies of ROCm/k8s-device-plugin `testdata/`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Final

from alloy_agent.backends.amd.files import Files, Roots, flat
from alloy_agent.errors import BackendError
from alloy_agent.model import Value

READS_MAX: Final = 5
HEAPS_OF_DEVICE: Final = frozenset({1, 2})  # HSA_MEM_HEAP_TYPE_FB_PUBLIC, _FB_PRIVATE
LINK_KINDS: Final = {2: "pcie", 11: "xgmi"}  # Source: kernel kfd_crat.h, CRAT_IOLINK_TYPE_*
_MBYTE: Final = 1_000_000  # of `max_bandwidth`, MB/s

# Instinct generations: MI100, MI200, and all of MI300 and MI350.
GFX_PLAIN: Final = frozenset({90008, 90010})
GFX_CUT_FIRST, GFX_CUT_LAST = 90400, 99999


class IoLink(Value, frozen=True, kw_only=True):
    """One link of a node."""

    to: int
    kind: int
    weight: int
    max_bandwidth_bytes_per_s: int | None


class KfdNode(Value, frozen=True, kw_only=True):
    """One node: a CPU (`gpu_id` 0) or a partition of a GPU."""

    number: int
    gpu_id: int
    gfx: int = 0
    device_id: int = 0
    domain: int = 0
    location: int = 0
    xccs: int = 1
    cus: int = 0
    memory_bytes: int | None = None
    render_minor: int | None = None
    unique_id: int = 0
    hive: int = 0
    array_count: int = 0
    links: tuple[IoLink, ...] = ()

    @property
    def cuttable(self) -> bool:
        """Whether the generation knows compute partitions."""
        return GFX_CUT_FIRST <= self.gfx <= GFX_CUT_LAST

    @property
    def bus(self) -> str:
        """PCI address of the physical device; bits that number the partition do not count."""
        function = 0 if self.cuttable else self.location & 7
        return (
            f"{self.domain:04x}:{self.location >> 8 & 0xFF:02x}:"
            f"{self.location >> 3 & 0x1F:02x}.{function}"
        )

    @property
    def partition(self) -> int:
        """Number of the partition, from either of the two places where drivers put it."""
        if not self.cuttable:
            return 0
        return (self.location >> 28 & 0xF) or self.location & 7


class Topology(Value, frozen=True, kw_only=True):
    """One consistent reading."""

    generation: int
    nodes: tuple[KfdNode, ...] = ()

    def devices(self) -> dict[str, tuple[KfdNode, ...]]:
        """Return the partitions of each device by PCI address, both in order."""
        found: dict[str, list[KfdNode]] = {}
        for node in self.nodes:
            if node.gpu_id and (node.cuttable or node.gfx in GFX_PLAIN):
                found.setdefault(node.bus, []).append(node)
        return {
            bus: tuple(sorted(found[bus], key=lambda node: (node.partition, node.number)))
            for bus in sorted(found)
        }

    def numa_nodes(self) -> frozenset[int]:
        """Return the numbers of the nodes that are CPUs."""
        return frozenset(node.number for node in self.nodes if not node.gpu_id)


def generation(files: Files, roots: Roots) -> int | None:
    """Return the counter that changes with the topology; None: there is no KFD."""
    return files.number(f"{roots.kfd}/topology/generation_id")


class TopologyReader:
    """Reads the topology again only when it has changed: it is thousands of files on a large node.

    The counter alone does not tell: it starts anew with the driver. The directory's inode does.
    """

    def __init__(self, files: Files, roots: Roots) -> None:
        self._files, self._roots = files, roots
        self._last: tuple[int, int, Topology] | None = None

    def read(self) -> Topology:
        """Return the topology of this moment.

        Raises:
            BackendError: There is none, or it changes faster than it can be read.
        """
        last = self._last
        if last is not None and last[:2] == self._stamp():
            return last[2]
        before = self._stamp()
        topology = read_topology(self._files, self._roots)
        after = self._stamp()
        if before is not None and before == after and after[0] == topology.generation:
            self._last = (*after, topology)
        return topology

    def _stamp(self) -> tuple[int, int] | None:
        number = generation(self._files, self._roots)
        try:
            mark = self._files.mark(f"{self._roots.kfd}/topology/nodes")
        except OSError:
            return None
        return None if number is None else (number, mark)


def read_topology(files: Files, roots: Roots) -> Topology:
    """Return the topology.

    Raises:
        BackendError: There is none, or it changes faster than it can be read.
    """
    base = f"{roots.kfd}/topology"
    for _ in range(READS_MAX):
        before = generation(files, roots)
        if before is None:
            raise BackendError(
                f"{base} cannot be read", cure="load the amdgpu driver with compute support"
            )
        with contextlib.suppress(OSError):
            nodes = tuple(_nodes(files, f"{base}/nodes"))
            if generation(files, roots) == before:
                return Topology(generation=before, nodes=nodes)
    raise BackendError(
        f"{base} changed {READS_MAX} times while it was read", cure="try again in a moment"
    )


def _nodes(files: Files, base: str) -> Iterable[KfdNode]:
    for number in sorted(int(name) for name in files.names(base) if name.isdecimal()):
        yield _node(files, f"{base}/{number}", number)


def _node(files: Files, base: str, number: int) -> KfdNode:
    properties = flat(files.data(f"{base}/properties").decode("ascii", "replace"))
    simds = properties.get("simd_count", 0)
    gpu_id = files.number(f"{base}/gpu_id")
    if gpu_id is None:
        # Recorded trees lack the file; a node with SIMDs is a GPU all the same.
        gpu_id = number + 1 if simds else 0
    minor = properties.get("drm_render_minor", -1)
    return KfdNode(
        number=number,
        gpu_id=gpu_id,
        gfx=properties.get("gfx_target_version", 0),
        device_id=properties.get("device_id", 0),
        domain=properties.get("domain", 0) & 0xFFFFFFFF,
        location=properties.get("location_id", 0) & 0xFFFFFFFF,
        xccs=max(1, properties.get("num_xcc", 1)),
        cus=simds // max(1, properties.get("simd_per_cu", 4)),
        memory_bytes=_memory(files, f"{base}/mem_banks"),
        render_minor=minor if minor > 0 else None,
        unique_id=properties.get("unique_id", 0),
        hive=properties.get("hive_id", 0),
        array_count=properties.get("array_count", 0),
        links=tuple(_links(files, f"{base}/io_links")),
    )


def _memory(files: Files, base: str) -> int | None:
    sizes = []
    for bank in files.numbered(base):
        properties = flat(files.text(f"{base}/{bank}/properties"))
        if properties.get("heap_type") in HEAPS_OF_DEVICE:
            sizes.append(properties.get("size_in_bytes", 0))
    return sum(sizes) or None


def _links(files: Files, base: str) -> Iterable[IoLink]:
    for entry in files.numbered(base):
        link = flat(files.text(f"{base}/{entry}/properties"))
        if "node_to" in link:
            bandwidth = link.get("max_bandwidth", 0)
            yield IoLink(
                to=link["node_to"],
                kind=link.get("type", 0),
                weight=link.get("weight", 0),
                max_bandwidth_bytes_per_s=bandwidth * _MBYTE if bandwidth else None,
            )
