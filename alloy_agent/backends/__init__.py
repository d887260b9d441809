"""The list of backends: which run with given settings, and how each is opened in its worker.

Nothing of a backend is imported before `open_backend`, so that the control process never loads a
vendor's library. A vendor's module offers `open_backend(options) -> Backend`; options are plain
JSON, since they travel to the worker process.
"""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Final, Protocol

import msgspec

from alloy_agent.backends.base import Backend
from alloy_agent.errors import ConfigError
from alloy_agent.model import Json, Value

# What each driver puts there when it is loaded.
DRIVERS: Final[dict[str, str]] = {
    "nvidia": "/proc/driver/nvidia/version",
    "amd": "/sys/class/kfd/kfd/topology",
    "neuron": "/sys/module/neuron/version",
}
# Further signs: a driver that was unloaded, or is there in part, still deserves its doctor lines.
ALSO: Final[dict[str, tuple[str, ...]]] = {
    "nvidia": ("/dev/nvidiactl", "/proc/driver/nvidia"),
    "amd": ("/sys/class/kfd", "/sys/module/amdgpu"),
    "neuron": ("/sys/module/neuron", "/sys/devices/virtual/neuron_device"),
}
# Drivers that come up after the agent does: switched on, the backend waits for them.
LATE: Final = frozenset({"neuron"})
# Options that put a driver elsewhere: then it is looked for there, by the backend itself.
ELSEWHERE: Final = ("library", "sys_root")
# Vendors whose devices remember less than the agent must: they keep notes in the state directory.
NOTING: Final = frozenset({"amd", "neuron"})
NAMES: Final = ("cpu", "fake", *DRIVERS)


class BackendSpec(Value, frozen=True, kw_only=True):
    """One backend to run, and with what."""

    name: str
    options: dict[str, Json] = msgspec.field(default_factory=dict)


class CpuOptions(Protocol):
    """The settings of the CPU backend."""

    @property
    def reserved_cores(self) -> tuple[int, ...]:
        """Logical CPU numbers that stay with the system."""
        ...

    @property
    def cgroup_root(self) -> str:
        """Name of the group below which partitions live."""
        ...

    @property
    def memory_reserve_bytes(self) -> int:
        """What is never lent of each node's memory."""
        ...

    @property
    def confine_system(self) -> bool:
        """Whether everyone else is kept off the lent cores."""
        ...


class EnabledBackends(Protocol):
    """Which vendors' devices are looked for: "auto", "on" or "off" each."""

    @property
    def cpu(self) -> str:
        """The host's own cores."""
        ...

    @property
    def nvidia(self) -> str:
        """NVIDIA GPUs."""
        ...

    @property
    def amd(self) -> str:
        """AMD Instinct accelerators."""
        ...

    @property
    def neuron(self) -> str:
        """AWS Neuron devices."""
        ...


class BackendSettings(Protocol):
    """What of the settings decides over backends; `config.Settings` is one."""

    @property
    def state_dir(self) -> str:
        """Where state is kept."""
        ...

    @property
    def fake(self) -> tuple[str, ...]:
        """Simulated devices asked for."""
        ...

    @property
    def cpu(self) -> CpuOptions:
        """Settings of the CPU backend."""
        ...

    @property
    def backends(self) -> EnabledBackends:
        """What is enabled."""
        ...


def backend_specs(settings: BackendSettings, root: str = "/") -> tuple[BackendSpec, ...]:
    """Return the backends to run, in order: the host, simulated devices, then the vendors.

    Args:
        settings: The agent's settings.
        root: Where `/proc` and `/sys` are, for tests.

    Raises:
        ConfigError: A backend is switched on that cannot run here.
    """
    specs = []
    if settings.backends.cpu != "off":
        specs.append(BackendSpec(name="cpu", options=_cpu_options(settings.cpu)))
    if settings.fake:
        fakes: Json = list(settings.fake)
        options: dict[str, Json] = {"specs": fakes, "state_dir": settings.state_dir}
        specs.append(BackendSpec(name="fake", options=options))
    for name, sign in DRIVERS.items():
        wanted = getattr(settings.backends, name)
        if wanted == "off":
            continue
        options = _vendor_options(name, settings)
        elsewhere = any(options.get(key) not in {None, "off"} for key in ELSEWHERE)
        awaited = wanted == "on" and name in LATE
        cause = "" if elsewhere or awaited else _why_not(name, root, sign)
        if not cause:
            specs.append(BackendSpec(name=name, options=options))
        elif wanted == "on":
            raise ConfigError(
                f"backends.{name} is on, but {cause}", cure=f"set backends.{name} to auto or off"
            )
    return tuple(specs)


def _vendor_options(name: str, settings: BackendSettings) -> dict[str, Json]:
    """Return what a vendor's section of the settings says, without what is at its default."""
    noted: dict[str, Json] = {"state_dir": settings.state_dir} if name in NOTING else {}
    section = getattr(settings, name, None)
    if section is None:
        return noted
    default = type(section)()
    return noted | {
        field: getattr(section, field)
        for field in section.__struct_fields__
        if getattr(section, field) != getattr(default, field)
    }


def _why_not(name: str, root: str, sign: str) -> str:
    """Return why a vendor's backend cannot run here; empty when it can."""
    signs = (sign, *ALSO.get(name, ()))
    if not any((Path(root) / other.lstrip("/")).exists() for other in signs):
        return f"its driver is not loaded (no {sign})"
    if importlib.util.find_spec(f"{__name__}.{name}") is None:
        return "this version of the agent has no such backend"
    return ""


def _cpu_options(cpu: CpuOptions) -> dict[str, Json]:
    cores: Json = list(cpu.reserved_cores)
    return {
        "reserved_cores": cores,
        "cgroup_root": cpu.cgroup_root,
        "memory_reserve_bytes": cpu.memory_reserve_bytes,
        "confine_system": cpu.confine_system,
    }


def open_backend(spec: BackendSpec) -> Backend:
    """Return the backend of a specification, loading its module and library.

    Raises:
        ConfigError: There is no such backend, or its options are not usable.
        BackendError: The backend cannot work here.
    """
    if spec.name not in NAMES:
        raise ConfigError(f"no backend {spec.name!r}", cure=f"use one of {', '.join(NAMES)}")
    try:
        module = importlib.import_module(f"{__name__}.{spec.name}")
    except ModuleNotFoundError as error:
        if error.name != f"{__name__}.{spec.name}":
            raise
        raise ConfigError(
            f"this version of the agent has no backend {spec.name!r}",
            cure=f"set backends.{spec.name} to off",
        ) from error
    backend: Backend
    if spec.name == "cpu":
        backend = module.CpuBackend(**spec.options)
    else:
        backend = module.open_backend(spec.options)
    return backend
