"""CU masks as the kernel holds them: `debugfs kfd/mqds`, where its layout is known.

Text blocks: `Process <tgid> PASID ...:`, `  Compute queue on device <gpu_id hex>`, then one hex
dump of the queue descriptor for each XCC. The mask words of `v9_mqd` (gfx9) are at byte offsets
92, 96, 104 and 108 of it; all ones is unmasked.

Source: kernel v9_structs.h (offsets compiled), kfd_mqd_manager_v9.c.
"""

from __future__ import annotations

import re
from typing import Final

import msgspec

from alloy_agent.backends.amd.files import Files, Roots
from alloy_agent.backends.amd.topology import KfdNode
from alloy_agent.model import Value

READ_MAX: Final = 16 << 20
MQD_BYTES: Final = 2048
WORDS_AT: Final = (92, 96, 104, 108)  # compute_static_thread_mgmt_se0..3
GFX9: Final = (90000, 99999)
UNMASKED: Final = 0xFFFFFFFF
_PROCESS: Final = re.compile(r"Process (\d+) PASID")
_QUEUE: Final = re.compile(r"\s+Compute queue on device ([0-9a-f]+)")
_DUMP: Final = re.compile(r"\s*([0-9a-f]{8}):((?: [0-9a-f]{8}){1,8})\s*")

Row = tuple[int, int, int, int]


class Masks(Value, frozen=True, kw_only=True):
    """Mask words of each process's queues, one row for each XCC; `reason`: why there are none."""

    rows: dict[int, tuple[Row, ...]] = msgspec.field(default_factory=dict)
    reason: str = ""

    def of(self, pid: int) -> tuple[Row, ...] | None:
        """Return the rows of a process; None: they cannot be told."""
        return None if self.reason else self.rows.get(pid, ())


def read(files: Files, roots: Roots, nodes: tuple[KfdNode, ...]) -> Masks:
    """Return the masks in force on some nodes."""
    low, high = GFX9
    if not all(low <= node.gfx <= high for node in nodes):
        return Masks(reason="the layout of queue descriptors is known for gfx9 only")
    path = f"{roots.debug}/kfd/mqds"
    try:
        raw = files.data(path, READ_MAX)
    except OSError as error:
        return Masks(reason=f"{path}: {error.strerror}")
    if len(raw) == READ_MAX:
        return Masks(reason=f"{path} has more than {READ_MAX >> 20} MiB")
    try:
        return Masks(rows=parse(raw.decode("ascii", "replace"), {n.gpu_id for n in nodes}))
    except ValueError as error:
        return Masks(reason=f"{path}: {error}")


def parse(text: str, gpu_ids: set[int]) -> dict[int, tuple[Row, ...]]:
    """Return the mask words of each process on some nodes.

    Raises:
        ValueError: A descriptor has not the size that the known layout has.
    """
    found: dict[int, list[Row]] = {}
    pid, ours = 0, False
    dump: list[int] = []
    for line in text.splitlines():
        match = _DUMP.fullmatch(line)
        if match is not None and ours:
            if int(match[1], 16) == 0:
                _close(found, pid, dump)
            elif int(match[1], 16) != 4 * len(dump):
                raise ValueError("a queue descriptor is dumped with a gap")
            dump += [int(word, 16) for word in match[2].split()]
            continue
        _close(found, pid, dump)
        process, queue = _PROCESS.match(line), _QUEUE.match(line)
        if process is not None:
            pid, ours = int(process[1]), False
        elif queue is not None:
            ours = int(queue[1], 16) in gpu_ids
        elif line.strip() and match is None:
            ours = False
    _close(found, pid, dump)
    return {process: tuple(rows) for process, rows in found.items()}


def _close(found: dict[int, list[Row]], pid: int, dump: list[int]) -> None:
    if not dump:
        return
    if 4 * len(dump) != MQD_BYTES:
        raise ValueError(f"a queue descriptor has {4 * len(dump)} bytes, not {MQD_BYTES}")
    a, b, c, d = (dump[at // 4] for at in WORDS_AT)
    found.setdefault(pid, []).append((a, b, c, d))
    dump.clear()
