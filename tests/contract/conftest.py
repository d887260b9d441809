"""The backends that the contract suite runs over.

A backend joins by one entry in `SUBJECTS`: a name and a factory that opens it on a node of its own,
fresh for each test. What a backend cannot be made to do on purpose (lose a device, run a process)
stays None in its `Subject`; the tests that need it skip and say so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from alloy_agent.backends.base import Backend
from alloy_agent.backends.fake import FakeBackend
from alloy_agent.model import DeviceId, Partition
from alloy_agent.silicon.state import Client


@dataclass(frozen=True)
class Subject:
    """One backend under test.

    Attributes:
        backend: Open, with at least one device.
        reopen: Opens the same node again, as after a restart of the worker.
        lose: Makes a device vanish.
        occupy: Runs a process in a partition until the returned function is called.
        handles: Counts what this process holds open on a device.
    """

    backend: Backend
    reopen: Callable[[], Backend]
    lose: Callable[[DeviceId], None] | None = None
    occupy: Callable[[Partition], Callable[[], None]] | None = None
    handles: Callable[[DeviceId], int] | None = None


def _fake(spec: str) -> Callable[[Path], Subject]:
    def factory(directory: Path) -> Subject:
        backend = FakeBackend.from_specs([spec], str(directory))
        machine = backend.machine

        def occupy(partition: Partition) -> Callable[[], None]:
            locator, place = partition.locator, partition.placement
            instance = locator.get("gi") or locator.get("xcp")
            cores = () if instance is not None else tuple(range(place.start, place.stop))
            pid = 4242
            machine.start_process(
                Client(
                    pid=pid,
                    device=partition.device,
                    instance=None if instance is None else int(instance),
                    cores=cores,
                )
            )
            return lambda: machine.stop_process(pid)

        return Subject(
            backend=backend,
            reopen=lambda: FakeBackend.from_specs([spec], str(directory)),
            lose=lambda device: machine.inject_event(device, "xid:79"),
            occupy=occupy,
            handles=machine.open_handles,
        )

    return factory


SUBJECTS: dict[str, Callable[[Path], Subject]] = {
    f"fake-{spec}": _fake(spec)
    for spec in ("2xA100-SXM4-40GB", "2xH100", "1xA30", "2xMI300X", "inf2.24xlarge", "trn2.3xlarge")
}


@pytest.fixture(params=sorted(SUBJECTS))
def subject(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Subject]:
    """Each backend in turn, closed after the test."""
    found = SUBJECTS[request.param](tmp_path)
    yield found
    found.backend.close()
