"""The backends that the contract suite runs over.

A backend joins by one entry in `SUBJECTS`: a name and a factory that opens it on a node of its own,
fresh for each test. What a backend cannot be made to do on purpose (lose a device, run a process)
stays None in its `Subject`; the tests that need it skip and say so.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from alloy_agent.backends.base import Backend
from alloy_agent.backends.cpu import CpuBackend
from alloy_agent.backends.fake import FakeBackend
from alloy_agent.backends.nvidia import NvidiaBackend
from alloy_agent.backends.nvidia import open_backend as open_nvidia
from alloy_agent.model import Destroy, DeviceId, Partition
from alloy_agent.silicon.state import Client
from tests.fakes.amd_tree import Oddities, tree_of
from tests.fakes.neuron import FakeNeuronHost
from tests.fakes.nvml import FakeNvml, write_root
from tests.host.fake_kernel import FakeHost


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


def _cpu(kind: str) -> Callable[[Path], Subject]:
    """Return a factory of the CPU backend on a generated host with one kind of cgroup trees."""

    def factory(directory: Path) -> Subject:
        host = FakeHost(directory, kind)
        lent: dict[str, Any] = {"reserved_cores": (), **host.options()}
        backend = CpuBackend(**lent)

        def occupy(partition: Partition) -> Callable[[], None]:
            pid = 4242
            host.process(pid, cgroup=f"/{partition.locator['cgroup']}")
            for file in partition.access.cgroup_procs:
                host.kernel.write(file, str(pid))
            return lambda: host.kernel.end(pid)

        def lose(device: DeviceId) -> None:
            cpus = host.sys / f"devices/system/node/{device.removeprefix('cpu-')}/cpulist"
            cpus.write_text("\n")

        return Subject(
            backend=backend,
            reopen=lambda: CpuBackend(**lent),
            lose=lose,
            occupy=occupy,
            handles=backend.open_count,
        )

    return factory


def _nvidia(spec: str, **traits: Any) -> Callable[[Path], Subject]:
    """Return a factory of the NVIDIA backend over a stand-in of its library."""

    def factory(directory: Path) -> Subject:
        options: dict[str, Any] = {"specs": [spec], "state_dir": str(directory), **traits}

        def opened() -> NvidiaBackend:
            return open_nvidia(
                {
                    "library": "tests.fakes.nvml:open_library",
                    "library_options": options,
                    "root": str(directory / "root"),
                }
            )

        backend = opened()
        library: FakeNvml = backend.nvml.module.nvmlLib
        machine = library.machine
        write_root(machine, directory / "root")

        def occupy(partition: Partition) -> Callable[[], None]:
            instance = partition.locator.get("gi")
            machine.start_process(
                Client(
                    pid=4242,
                    device=partition.device,
                    instance=None if instance is None else int(instance),
                )
            )
            return lambda: machine.stop_process(4242)

        return Subject(
            backend=backend,
            reopen=opened,
            lose=lambda device: machine.inject_event(device, "xid:79"),
            occupy=occupy,
            handles=lambda device: machine.open_handles(device) + backend.open_count(device),
        )

    return factory


def _amd(spec: str, **odd: Any) -> Callable[[Path], Subject]:
    """Return a factory of the AMD backend on a generated sysfs and KFD tree."""

    def factory(directory: Path) -> Subject:
        tree = tree_of(spec, directory, Oddities(**odd))
        backend, machine = tree.backend(), tree.machine

        def bus(device: DeviceId) -> str:
            return next(d.id for d in machine.state.devices if tree.id_of(d) == device)

        def occupy(partition: Partition) -> Callable[[], None]:
            number = partition.locator.get("xcp")
            instance = None if number is None else int(number)
            machine.start_process(Client(pid=4242, device=bus(partition.device), instance=instance))
            return lambda: machine.stop_process(4242)

        return Subject(
            backend=backend,
            reopen=tree.backend,
            lose=lambda device: machine.inject_event(bus(device), "xid:79"),
            occupy=occupy,
            handles=backend.open_count,
        )

    return factory


def _neuron(instance: str) -> Callable[[Path], Subject]:
    """Return a factory of the Neuron backend on a generated host of one instance type."""

    def factory(directory: Path) -> Subject:
        host = FakeNeuronHost(directory, instance)
        backend = host.open()

        def occupy(partition: Partition) -> Callable[[], None]:
            host.enter(partition, pid=4242)
            return lambda: host.end(4242)

        return Subject(
            backend=backend,
            reopen=host.open,
            lose=host.lose,
            occupy=occupy,
            handles=backend.open_count,
        )

    return factory


class _TidyCpu(CpuBackend):
    """The CPU backend on this very host; removes all that the test made when it is closed."""

    def close(self) -> None:
        for device in self.discover():
            for partition in self.observe(device).partitions:
                self.apply(Destroy(device=device, partition=partition))
        super().close()


def _this_host(_directory: Path) -> Subject:
    root = f"alloytest-{os.getpid()}-{time.monotonic_ns()}"
    backend = _TidyCpu(reserved_cores=(), cgroup_root=root)
    return Subject(
        backend=backend,
        reopen=lambda: CpuBackend(reserved_cores=(), cgroup_root=root),
        handles=backend.open_count,
    )


THIS_HOST = "cpu-this-host"
SUBJECTS: dict[str, Callable[[Path], Subject]] = {
    **{
        f"fake-{spec}": _fake(spec)
        for spec in (
            "2xA100-SXM4-40GB",
            "2xH100",
            "1xA30",
            "2xMI300X",
            "inf2.24xlarge",
            "trn2.3xlarge",
        )
    },
    **{f"nvidia-{spec}": _nvidia(spec) for spec in ("2xA100-SXM4-40GB", "2xH100", "1xA30")},
    "nvidia-vanishing": _nvidia("2xH200", vanish=True),
    "nvidia-old-driver": _nvidia(
        "2xA100-SXM4-40GB",
        missing=("*InfoV", "nvmlGpm*", "*Fabric*", "*Margin*", "nvmlDeviceGetMemoryInfo_v2"),
    ),
    "amd-2xMI300X": _amd("2xMI300X"),
    "amd-2xMI300A-odd": _amd("2xMI300A", function_partition=True, domain=3, metrics=5),
    "amd-2xMI308X": _amd("2xMI308X", separator=".", same_unique_id=True, metrics=8),
    **{f"cpu-{kind}": _cpu(kind) for kind in ("v1", "v2", "hybrid")},
    **{
        f"neuron-{instance}": _neuron(instance)
        for instance in ("inf2.24xlarge", "trn1.32xlarge", "trn1n.32xlarge", "trn2.48xlarge")
    },
    THIS_HOST: _this_host,
}


@pytest.fixture(
    params=[
        pytest.param(name, marks=pytest.mark.host) if name == THIS_HOST else name
        for name in sorted(SUBJECTS)
    ]
)
def subject(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Subject]:
    """Each backend in turn, closed after the test."""
    found = SUBJECTS[request.param](tmp_path)
    yield found
    found.backend.close()
