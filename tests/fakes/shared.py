"""Facts of a share that the host and the control loop tell, where a test has neither."""

from __future__ import annotations

from pathlib import Path

from alloy_agent.model import Fact, Json, Partition, Share


def host_facts(piece: Partition) -> tuple[Fact, ...]:
    """Return what the host's collector and a control loop that keeps its promise say of a share."""
    if piece.share is Share.EXCLUSIVE:
        return ()
    status: Json = {"stage": "controlling", "answer": "conform"}
    bypass: Json = {"launched": 100, "witnessed": 100}
    told = {(piece.device, "share.status"): status, (piece.id, "share.bypass"): bypass}
    facts = [
        Fact(subject=subject, name=name, value=value, method="this test")
        for (subject, name), value in told.items()
    ]
    for file in map(Path, piece.access.cgroup_procs):
        place: Json = {"label": "", "version": 2, "path": str(file.parent), "present": True}
        pids = [int(word) for word in file.read_text().split()]
        members: list[Json] = [{"pid": pid, "comm": "train", "cpus": [0]} for pid in pids]
        facts += [
            Fact(subject=piece.id, name="cgroup.hierarchies", value=[place], method="this test"),
            Fact(subject=piece.id, name="cgroup.members", value=members, method="this test"),
        ]
    return tuple(facts)
