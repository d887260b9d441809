"""How GPUs are linked: NVLink and PCIe between them, their CPU node, and the NVLink fabric.

A fabric answer has many shades; only one of them names a domain: registration completed, without
error, with a cluster UUID, not unhealthy. Every other one is kept as a reason, never as a domain
and never as a failure of the GPU.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final, NamedTuple

from alloy_agent.backends.nvidia.library import ABSENT, INVALID_ARGUMENT, LOST, NvmlCallError
from alloy_agent.model import Link

if TYPE_CHECKING:
    from alloy_agent.backends.nvidia.gpu import Gpu

LINKS_EVERY_S: Final = 30.0
FABRIC_EVERY_S: Final = 1.0
NVLINK_MAX: Final = 18  # nvml.h: NVML_NVLINK_MAX_LINKS
P2P_NVLINK: Final = 2  # nvml.h: NVML_P2P_CAPS_INDEX_NVLINK
P2P_OK: Final = 0
# Common ancestors of two devices. Source: nvml.h, nvmlGpuTopologyLevel_t.
LEVELS: Final[dict[int, str]] = {
    0: "board",
    10: "switch",
    20: "switches",
    30: "bridge",
    40: "node",
    50: "system",
}
# Source: nvml.h, NVML_GPU_FABRIC_STATE_*.
_STATES: Final = ("not supported", "not started", "in progress", "completed")
_COMPLETED: Final = 3
_UNHEALTHY: Final = 2  # NVML_GPU_FABRIC_HEALTH_SUMMARY_UNHEALTHY
_HIDDEN: Final = frozenset({*ABSENT, INVALID_ARGUMENT})


class Fabric(NamedTuple):
    """The NVLink fabric as one GPU sees it: its domain, else how it stands and why."""

    state: str  # "ready", "not-ready", "unhealthy", "none"
    domain: str | None = None
    reason: str = ""


class Topology:
    """The links of one GPU, read again when its mode changes or after some seconds."""

    def __init__(self) -> None:
        self._links: tuple[Link, ...] = ()
        self._fabric = Fabric("none")
        self._key: object = None
        self._links_at_s = self._fabric_at_s = float("-inf")

    def links(self, gpu: Gpu, others: tuple[Gpu, ...], *, mig: bool) -> tuple[Link, ...]:
        """Return the links of a GPU to the others and to its CPU node."""
        now_s, key = time.monotonic(), (mig, tuple(other.id for other in others))
        if key != self._key or now_s - self._links_at_s > LINKS_EVERY_S:
            self._links = links_of(gpu, others, mig=mig)
            self._key, self._links_at_s = key, now_s
        return self._links

    def fabric(self, gpu: Gpu) -> Fabric:
        """Return how the GPU stands with its NVLink fabric."""
        now_s = time.monotonic()
        if now_s - self._fabric_at_s > FABRIC_EVERY_S:
            self._fabric, self._fabric_at_s = fabric_of(gpu), now_s
        return self._fabric


def fabric_of(gpu: Gpu) -> Fabric:
    """Return the fabric's state; never an error that would hide the GPU itself."""
    module = gpu.nvml.module
    for kind in ("c_nvmlGpuFabricInfo_v3_t", "c_nvmlGpuFabricInfo_v2_t"):
        if not hasattr(module, kind):
            continue
        import ctypes

        info = getattr(module, kind)()
        try:
            gpu.call("nvmlDeviceGetGpuFabricInfoV", ctypes.byref(info))
        except NvmlCallError as failure:
            if failure.code in LOST:
                raise
            if failure.code in ABSENT:
                return Fabric("none", reason="this GPU has no fabric, or its driver does not tell")
            continue
        state, status = int(info.state), int(info.status)
        uuid = bytes(info.clusterUuid)
        health = int(getattr(info, "healthSummary", 0))
        return judged(state, status, uuid, int(info.cliqueId), health)
    return Fabric("none", reason="the driver's fabric information has an unknown version")


def judged(state: int, status: int, uuid: bytes, clique: int, health: int) -> Fabric:
    """Return what a fabric answer amounts to."""
    if state == 0:
        return Fabric("none", reason="not supported")
    if state != _COMPLETED:
        name = _STATES[state] if state < len(_STATES) else f"state {state}"
        return Fabric("not-ready", reason=f"registration {name}")
    if status != 0:
        return Fabric("unhealthy", reason=f"registration ended with status {status}")
    if health == _UNHEALTHY:
        return Fabric("unhealthy", reason="the driver calls it unhealthy")
    if not any(uuid):
        return Fabric("not-ready", reason="registration completed without a cluster")
    return Fabric("ready", domain=f"{uuid.hex()}.{clique}")


def links_of(gpu: Gpu, others: Iterable[Gpu], *, mig: bool) -> tuple[Link, ...]:
    """Return the links of a GPU; in MIG mode it is no NVLink peer."""
    numa = gpu.identity().numa
    links = [Link(peer=f"numa:{numa}", kind="numa")] if numa is not None else []
    count = 0 if mig else _active_nvlinks(gpu)
    for other in others:
        if other.id == gpu.id:
            continue
        link = _between(gpu, other, count)
        if link is not None:
            links.append(link)
    return tuple(links)


def _between(gpu: Gpu, other: Gpu, nvlinks: int) -> Link | None:
    try:
        peer = other.handle()
        if nvlinks and gpu.maybe("nvmlDeviceGetP2PStatus", peer, P2P_NVLINK) == P2P_OK:
            return Link(peer=str(other.id), kind="nvlink", hops=1)
        level = gpu.maybe("nvmlDeviceGetTopologyCommonAncestor", peer)
    except NvmlCallError:
        return None  # one of the two does not answer: nothing is known between them
    if level is None:
        return None
    return Link(peer=str(other.id), kind=f"pcie-{LEVELS.get(int(level), 'unknown')}")


def _active_nvlinks(gpu: Gpu) -> int:
    active = 0
    for number in range(NVLINK_MAX):
        try:
            active += int(gpu.call("nvmlDeviceGetNvLinkState", number) == 1)
        except NvmlCallError as failure:
            if failure.code in _HIDDEN:
                break
            raise
    return active
