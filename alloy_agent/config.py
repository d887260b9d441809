"""The settings of the agent: frozen, read once from file, then environment, then command line.

Every setting has a default, so that no file is needed; `docs/config.example.yaml` shows them all. A
later source wins over an earlier one: built in, file, environment (`ALLOY_<SECTION>_<KEY>`, for
example `ALLOY_LOG_LEVEL`), command line. An error names where the value came from: file and line,
variable, or option.

Durations and sizes take a text with a unit ("500ms", "8GiB") or a plain number of seconds or bytes.
Kubernetes puts variables like `ALLOY_BRAIN_PORT` and `ALLOY_AGENT_SERVICE_HOST` into pods beside a
service of that name: variables that name no setting are ignored, and `unknown_variables` lists
those that look like a slip.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from msgspec import Meta
from msgspec.structs import fields, replace

from alloy_agent.decoding import (
    Located,
    convert,
    duration,
    nearest,
    parse_yaml,
    read_text,
    scalar_of,
    size,
    unknown_name,
)
from alloy_agent.errors import ConfigError
from alloy_agent.model import Value, Vendor

DEFAULT_CONFIG: Final = "/etc/alloy/agent.yaml"
ENVIRONMENT_PREFIX: Final = "ALLOY_"
LOOPBACK: Final = re.compile(r"(unix:.*|(127(\.[0-9]{1,3}){3}|localhost|\[::1\]):[0-9]+)", re.ASCII)

Rate = Annotated[float, Meta(ge=0.1, le=200)]
Count = Annotated[int, Meta(ge=1, le=1_000_000_000)]
FilePath = Annotated[str, Meta(pattern="^/", max_length=4096)]


class Enable(StrEnum):
    """Whether a backend runs: if its devices are there, always (else an error), or never."""

    AUTO = "auto"
    ON = "on"
    OFF = "off"


class BackendSettings(Value, frozen=True, kw_only=True):
    """Which vendors' devices are looked for."""

    nvidia: Enable = Enable.AUTO
    amd: Enable = Enable.AUTO
    neuron: Enable = Enable.AUTO
    cpu: Enable = Enable.AUTO


class LayoutSettings(Value, frozen=True, kw_only=True):
    """The layout that the daemon keeps; without a file it keeps what was applied last."""

    file: FilePath | None = None
    name: str | None = None


class CpuSettings(Value, frozen=True, kw_only=True):
    """How the host's own cores are lent.

    `reserved_cores` are logical CPU numbers that stay with the system (their SMT siblings too);
    core 0 always does. `cgroup_root` is the group, in every hierarchy used, below which all
    partitions live. `memory_reserve_bytes` of each NUMA node is never lent. `confine_system` keeps
    everyone else off the lent cores.
    """

    reserved_cores: tuple[Annotated[int, Meta(ge=0, le=65535)], ...] = (0,)
    cgroup_root: Annotated[str, Meta(pattern="^[A-Za-z0-9][A-Za-z0-9_.-]*$", max_length=64)] = (
        "alloy"
    )
    memory_reserve_bytes: Annotated[int, size("0B", "64TiB")] = 1 << 30
    confine_system: bool = False


class NvidiaSettings(Value, frozen=True, kw_only=True):
    """Where the NVIDIA driver is found.

    `library` is empty for the system's `libnvidia-ml.so.1`, else the absolute path of one (a driver
    container keeps it elsewhere). A name "module:factory" with `library_options` puts a stand-in
    in its place, for tests. `root` is where the driver's `/proc` and `/sys` are. One tick makes at
    most `calls_per_tick` calls on one GPU: with seven instances 8 renew activity every 0.4 s, 32
    every 0.1 s at ten ticks a second.
    """

    library: Annotated[
        str,
        Meta(pattern="^(/.*|[A-Za-z_][A-Za-z0-9_.]*:[A-Za-z_][A-Za-z0-9_]*)?$", max_length=4096),
    ] = ""
    library_options: dict[str, Any] = {}  # noqa: RUF012 - msgspec copies it
    root: FilePath = "/"
    calls_per_tick: Annotated[int, Meta(ge=8, le=64)] = 8


class AmdSettings(Value, frozen=True, kw_only=True):
    """How AMD Instinct accelerators are reached, and what is set on them.

    `library` is "auto", "off" or the path of `libamd_smi.so`; it is tried in a child process that
    is ended after `library_deadline_s`. A mode switch of a busy device is tried again for
    `busy_wait_s` before its holders are named, and its partitions are counted for `settle_wait_s`.
    `process_isolation` is set again after every switch; null leaves the driver's setting alone.
    With `opportunistic_cus` each of `opportunistic_slots` opportunistic shares is given that many
    CUs of every XCC by a mask of its own, and production the rest; 0 masks nobody.
    """

    library: Annotated[str, Meta(pattern="^(auto|off|/.*)$", max_length=4096)] = "auto"
    library_deadline_s: Annotated[float, duration("100ms", "5m")] = 10.0
    busy_wait_s: Annotated[float, duration("0s", "10s")] = 3.0
    settle_wait_s: Annotated[float, duration("0s", "1m")] = 5.0
    process_isolation: bool | None = None
    opportunistic_cus: Annotated[int, Meta(ge=0, le=128)] = 0
    opportunistic_slots: Annotated[int, Meta(ge=1, le=64)] = 2
    sys_root: FilePath = "/sys"
    proc_root: FilePath = "/proc"
    dev_root: FilePath = "/dev"
    debug_root: FilePath = "/sys/kernel/debug"


class NeuronSettings(Value, frozen=True, kw_only=True):
    """How AWS Neuron devices are reached, and what tenants are told of them.

    `tools_dir` is where `neuron-ls` and `neuron-monitor` are; with `monitor` the latter runs as a
    child. `core_numbers` says how NEURON_RT_VISIBLE_CORES counts: over all cores of the host, or
    from the first granted device on. With `share_hbm_bank` one of two cores on a common memory bank
    may be granted alone. `ports_from` belongs to the collectives of the first core.
    """

    tools_dir: FilePath = "/opt/aws/neuron/bin"
    monitor: bool = True
    monitor_period_s: Annotated[float, duration("1s", "1m")] = 1.0
    core_numbers: Literal["host", "container"] = "host"
    share_hbm_bank: bool = False
    ports_from: Annotated[int, Meta(ge=1024, le=64000)] = 61000
    default_lnc_file: FilePath = "/opt/aws/neuron/logical_nc_config"
    product_name_file: FilePath = "/sys/devices/virtual/dmi/id/product_name"
    sys_root: FilePath = "/sys"
    proc_root: FilePath = "/proc"


class SamplerSettings(Value, frozen=True, kw_only=True):
    """How often devices are sampled, and what that may cost.

    `burst_rate_hz` holds for `burst_s` after a change of geometry or a fault. Above
    `cpu_budget_ratio` of one core the sampler lowers its rate and says so.
    """

    rate_hz: Rate = 10.0
    burst_rate_hz: Rate = 100.0
    burst_s: Annotated[float, duration("0s", "5m")] = 10.0
    cpu_budget_ratio: Annotated[float, Meta(gt=0, le=1)] = 0.03
    raise_priority: bool = True


class ObserveSettings(Value, frozen=True, kw_only=True):
    """How often devices are read back, and how long a vendor's call may take.

    A call past `call_deadline_s` makes its device late, past three deadlines `stalled`. A worker
    process that dies is started again after `restart_min_s`, doubling up to `restart_max_s`.
    """

    period_s: Annotated[float, duration("50ms", "1h")] = 0.5
    call_deadline_s: Annotated[float, duration("50ms", "5m")] = 2.0
    start_deadline_s: Annotated[float, duration("1s", "10m")] = 30.0
    change_deadline_s: Annotated[float, duration("1s", "1h")] = 120.0
    restart_min_s: Annotated[float, duration("10ms", "1m")] = 0.2
    restart_max_s: Annotated[float, duration("100ms", "1h")] = 30.0


class AuditSettings(Value, frozen=True, kw_only=True):
    """How the continuous audit looks.

    Every check runs each `period_s`; `events` also judges at once when a process or the geometry
    changes. Heads of the evidence chain are signed every `sign_period_s`; a file of the chain is
    closed at `rotate_bytes`, and the oldest closed ones are removed beyond `keep_files` (0 keeps
    all).
    """

    enabled: bool = True
    period_s: Annotated[float, duration("100ms", "24h")] = 10.0
    events: bool = True
    poll_period_s: Annotated[float, duration("50ms", "1m")] = 0.5
    sign_period_s: Annotated[float, duration("1s", "24h")] = 60.0
    rotate_bytes: Annotated[int, size("64KiB", "16GiB")] = 64 << 20
    keep_files: Annotated[int, Meta(ge=0, le=1_000_000)] = 0


class MetricsSettings(Value, frozen=True, kw_only=True):
    """Where `/metrics`, `/healthz` and `/readyz` are served.

    `token_file` holds the bearer token that `/metrics` then asks for; with `client_ca_file` clients
    must show a certificate of that authority. `dcgm` also serves `/metrics/dcgm`, the names that
    dashboards for NVIDIA's exporter ask for. What is over `series_max` is left out and counted.
    """

    enabled: bool = True
    address: Annotated[str, Meta(min_length=1, max_length=255)] = "127.0.0.1:9464"
    tls_certificate_file: FilePath | None = None
    tls_key_file: FilePath | None = None
    client_ca_file: FilePath | None = None
    token_file: FilePath | None = None
    dcgm: bool = False
    series_max: Annotated[int, Meta(ge=100, le=1_000_000)] = 6000


class TelemetrySettings(Value, frozen=True, kw_only=True):
    """How samples become gates, health and usage.

    `kernel_log` is read as a second witness of faults. With `shadow`, health is judged and told
    but closes no gate.
    """

    period_s: Annotated[float, duration("100ms", "10s")] = 1.0
    kernel_log: bool = True
    shadow: bool = False


class DrainSettings(Value, frozen=True, kw_only=True):
    """Who else is told when something is drained here, beside the brain and Kubernetes.

    With `slurm` this node is drained there while anything on it is, through `scontrol`, as
    `slurm_node` (empty: the node's name up to its first dot); what others drained is left alone.
    `hook` is a command, word by word, that is run for each drain and each end of one. A call may
    take `deadline_s`; a hook that fails is run up to `hook_attempts` times.
    """

    slurm: bool = False
    slurm_node: Annotated[str, Meta(pattern="^[A-Za-z0-9._-]*$", max_length=253)] = ""
    scontrol: FilePath = "/usr/bin/scontrol"
    hook: tuple[Annotated[str, Meta(max_length=4096)], ...] = ()
    deadline_s: Annotated[float, duration("1s", "10m")] = 30.0
    hook_attempts: Annotated[int, Meta(ge=1, le=100)] = 5


class BrainSettings(Value, frozen=True, kw_only=True):
    """The placement brain that the agent dials, if any.

    Mutual TLS by default: `ca_file`, `certificate_file` and `key_file` are needed unless the
    address is on loopback or `insecure` is true. `spiffe_id` is the identity the brain's
    certificate must carry; `server_name` replaces the host name in its check. At most
    `outbox_records` unacknowledged events are kept on disk.
    """

    address: Annotated[str, Meta(min_length=1, max_length=255)] | None = None
    insecure: bool = False
    ca_file: FilePath | None = None
    certificate_file: FilePath | None = None
    key_file: FilePath | None = None
    server_name: str | None = None
    spiffe_id: Annotated[str, Meta(pattern="^spiffe://[^/]+(/.*)?$", max_length=2048)] | None = None
    rate_hz: Rate = 1.0
    reconnect_min_s: Annotated[float, duration("10ms", "1m")] = 0.2
    reconnect_max_s: Annotated[float, duration("100ms", "1h")] = 30.0
    outbox_records: Count = 100_000


class KubernetesSettings(Value, frozen=True, kw_only=True):
    """The agent as a DRA driver of this node's kubelet; `node_name` is the node's name there.

    Without `api_server` it is found as a pod finds it. `instance` is the UID of the agent's pod,
    for updates with two agents beside each other. `shares` opportunistic shares are offered on each
    device beside a production one. `evict_on_loss` ends the pods on a device that was lost.
    `node_condition` also tells of unhealthy devices on the node, which needs a right more.
    `claim_status` writes into claims what became of them. `probe_address` answers gRPC probes.
    """

    enabled: bool = False
    driver: Annotated[
        str,
        Meta(
            pattern=r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)+$",
            max_length=63,
        ),
    ] = "gpu.alloy.dev"
    kubelet_dir: FilePath = "/var/lib/kubelet"
    cdi_dir: FilePath = "/var/run/cdi"
    instance: Annotated[str, Meta(pattern="^[a-z0-9-]*$", max_length=36)] = ""
    vendors: tuple[Vendor, ...] = (Vendor.NVIDIA, Vendor.AMD, Vendor.NEURON)
    shares: Annotated[int, Meta(ge=0, le=8)] = 0
    evict_on_loss: bool = False
    node_condition: bool = False
    claim_status: bool = True
    probe_address: str | None = None
    api_server: str | None = None
    ca_file: FilePath | None = None
    token_file: FilePath | None = None
    certificate_file: FilePath | None = None
    key_file: FilePath | None = None


class LogSettings(Value, frozen=True, kw_only=True):
    """What is logged, and how: `auto` is `console` on a terminal and `json` elsewhere."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["auto", "json", "console"] = "auto"


class Settings(Value, frozen=True, kw_only=True):
    """All settings of one agent."""

    node_name: Annotated[str, Meta(max_length=253)] = (
        ""  # empty: the host's name, filled in by `read_settings`
    )
    state_dir: FilePath = "/var/lib/alloy"
    socket_path: Annotated[str, Meta(pattern="^/", max_length=107)] = "/run/alloy/agent.sock"
    fake: tuple[str, ...] = ()
    backends: BackendSettings = BackendSettings()
    layout: LayoutSettings = LayoutSettings()
    cpu: CpuSettings = CpuSettings()
    nvidia: NvidiaSettings = NvidiaSettings()
    amd: AmdSettings = AmdSettings()
    neuron: NeuronSettings = NeuronSettings()
    sampler: SamplerSettings = SamplerSettings()
    observe: ObserveSettings = ObserveSettings()
    audit: AuditSettings = AuditSettings()
    metrics: MetricsSettings = MetricsSettings()
    telemetry: TelemetrySettings = TelemetrySettings()
    drain: DrainSettings = DrainSettings()
    brain: BrainSettings = BrainSettings()
    kubernetes: KubernetesSettings = KubernetesSettings()
    log: LogSettings = LogSettings()


def find_config(path: str | None, environ: Mapping[str, str]) -> Path | None:
    """Return the file to read: the given one, else `ALLOY_CONFIG`, else the default if there."""
    chosen = path or environ.get("ALLOY_CONFIG")
    if chosen:
        return Path(chosen)
    default = Path(DEFAULT_CONFIG)
    return default if default.is_file() else None


def read_settings(
    path: Path | None,
    environ: Mapping[str, str] | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> Settings:
    """Return the settings from a file, then variables, then overrides.

    Args:
        path: The YAML file, or None for none.
        environ: Variables; those named `ALLOY_<SECTION>_<KEY>` after a setting are taken.
        overrides: Values of the command line by dotted name: `{"log.level": "debug"}`. Texts are
            read like
            variables; other values are taken as they are.

    Raises:
        ConfigError: With file and line, variable or option, the cause and the cure.
    """
    tree = (
        parse_yaml(read_text(path), str(path)) if path is not None else Located({}, "built in", 0)
    )
    if tree.value is None:
        tree = Located({}, tree.file, tree.line)
    if isinstance(tree.value, dict):
        # A heading whose keys are all commented out means the defaults of its section.
        sections = {field.name for field in fields(Settings) if isinstance(field.default, Value)}
        for section in sections & tree.value.keys():
            if tree.value[section].value is None:
                del tree.value[section]
        for name, value, source in _overlays(environ or {}, overrides or {}):
            _put(tree, name, value, source)
    settings = convert(tree, Settings)
    _check_together(settings, tree)
    if not settings.node_name:
        settings = replace(settings, node_name=os.uname().nodename)
    return settings


def setting_names() -> dict[str, Any]:
    """Return every setting's dotted name with its type, in order of declaration."""
    from typing import get_type_hints

    names: dict[str, Any] = {}
    for section, type_ in get_type_hints(Settings, include_extras=True).items():
        if isinstance(type_, type) and issubclass(type_, Value):
            hints = get_type_hints(type_, include_extras=True)
            names.update({f"{section}.{key}": hint for key, hint in hints.items()})
        else:
            names[section] = type_
    return names


def variable_of(name: str) -> str:
    """Return the environment variable of a setting: `log.level` is `ALLOY_LOG_LEVEL`."""
    return ENVIRONMENT_PREFIX + re.sub(r"[^A-Z0-9]", "_", name.upper())


def unknown_variables(environ: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Return variables that look like a mistyped setting, each with the nearest known one."""
    known = {variable_of(name) for name in setting_names()} | {"ALLOY_CONFIG"}
    slips = []
    for variable in sorted(environ):
        if not variable.upper().startswith(ENVIRONMENT_PREFIX) or variable in known:
            continue
        if _SERVICE_LINK.search(variable) or variable.startswith(_TENANTS):
            continue
        close = nearest(variable.upper(), known)
        if close:
            slips.append((variable, close))
    return tuple(slips)


# Variables that the agent hands to tenants, which may run commands of the agent themselves.
_TENANTS: Final = ("ALLOY_GATE_", "ALLOY_EMU", "ALLOY_PARTITION", "ALLOY_CPUS", "ALLOY_CLAIM_")
# Variables that Kubernetes and container runtimes add for a service or link of that name.
_SERVICE_LINK: Final = re.compile(r"_SERVICE_(HOST|PORT)|_PORT(_[0-9]+_(TCP|UDP).*)?$")


def _overlays(
    environ: Mapping[str, str], overrides: Mapping[str, Any]
) -> Iterator[tuple[str, Any, str]]:
    names = setting_names()
    by_variable = {variable_of(name): name for name in names}
    for variable, text in environ.items():
        name = by_variable.get(variable)
        if name is not None:
            source = f"environment {variable}"
            yield name, _from_text(text, names[name], source), source
    for name, value in overrides.items():
        source = f"command line {name}"
        if name not in names:
            raise ConfigError(f"{source}: unknown setting", cure=unknown_name(name, names))
        yield (
            name,
            _from_text(value, names[name], source) if isinstance(value, str) else value,
            source,
        )


def _from_text(text: str, type_: Any, source: str) -> Any:
    hint = str(type_)
    if "tuple" in hint:
        parts = [part.strip() for part in text.split(",") if part.strip()]
        return [scalar_of(part, source) for part in parts] if "int" in hint else parts
    if "str" in hint or "Literal" in hint:
        return text
    return scalar_of(text, source)


def _put(tree: Located, name: str, value: Any, source: str) -> None:
    """Put one value over the tree, marked with where it came from."""
    if isinstance(value, (list, tuple)):
        node = Located([Located(part, source, 0) for part in value], source, 0)
    else:
        node = Located(value, source, 0)
    section, _, key = name.rpartition(".")
    target = tree
    if section and isinstance(tree.value, dict):
        inner = tree.value.get(section)
        if inner is None or inner.value is None:
            inner = tree.value[section] = Located({}, source, 0)
        target = inner
    if isinstance(target.value, dict):
        target.value[key] = node


def _check_together(settings: Settings, tree: Located) -> None:
    """Refuse values that are each legal but not together."""
    sampler, observe, brain, metrics = (
        settings.sampler,
        settings.observe,
        settings.brain,
        settings.metrics,
    )
    _ordered(
        tree, "sampler", ("rate_hz", sampler.rate_hz), ("burst_rate_hz", sampler.burst_rate_hz)
    )
    _ordered(
        tree,
        "observe",
        ("restart_min_s", observe.restart_min_s),
        ("restart_max_s", observe.restart_max_s),
    )
    _ordered(
        tree,
        "brain",
        ("reconnect_min_s", brain.reconnect_min_s),
        ("reconnect_max_s", brain.reconnect_max_s),
    )
    _both(tree, "metrics", "tls_certificate_file", "tls_key_file", metrics)
    if metrics.client_ca_file is not None and metrics.tls_certificate_file is None:
        cause = "stands without metrics.tls_certificate_file"
        raise _conflict(tree, "metrics", "client_ca_file", cause, "add the certificate and its key")
    _both(tree, "brain", "certificate_file", "key_file", brain)
    _check_address(tree, "metrics", metrics.address)
    if settings.drain.hook and not settings.drain.hook[0].startswith("/"):
        cause = f"{settings.drain.hook[0]!r} is no absolute path"
        raise _conflict(tree, "drain", "hook", cause, "write [/path/of/program, argument, ...]")
    if settings.layout.name is not None and settings.layout.file is None:
        raise _conflict(tree, "layout", "name", "stands without layout.file", "add layout.file")
    if brain.address is not None:
        _check_brain(tree, brain)
    if settings.backends.cpu != Enable.OFF:
        _check_reserved(tree, settings.cpu.reserved_cores)


POSSIBLE_CPUS: Final = "/sys/devices/system/cpu/possible"


def _check_reserved(tree: Located, reserved: tuple[int, ...]) -> None:
    """Refuse to keep CPUs that this host cannot have: a slip there would keep nothing at all."""
    possible = _possible_cpus()
    for number, cpu in enumerate(reserved):
        if possible and cpu not in possible:
            node = tree.at("cpu", "reserved_cores", number)
            raise ConfigError(
                f"{node.where}: cpu.reserved_cores[{number}]: this host has no CPU {cpu}",
                cure=f"its CPUs are {min(possible)} to {max(possible)}",
            )


def _possible_cpus() -> frozenset[int]:
    """Return the CPUs that the host has or may be given; none where the kernel does not tell."""
    found: set[int] = set()
    try:
        text = Path(POSSIBLE_CPUS).read_text(encoding="ascii")
        for part in text.strip().split(","):
            first, _, last = part.partition("-")
            found |= set(range(int(first), int(last or first) + 1))
    except (OSError, ValueError):
        return frozenset()
    return frozenset(found)


def _check_brain(tree: Located, brain: BrainSettings) -> None:
    address = brain.address or ""
    if not address.startswith("unix:"):
        _check_address(tree, "brain", address)
    if brain.insecure or LOOPBACK.fullmatch(address):
        return
    missing = [
        f"brain.{key}"
        for key in ("ca_file", "certificate_file", "key_file")
        if getattr(brain, key) is None
    ]
    if missing:
        raise _conflict(
            tree,
            "brain",
            "address",
            f"{address} is not on loopback, and mutual TLS lacks {', '.join(missing)}",
            "add them, or set brain.insecure: true to talk in plain text",
        )


def _check_address(tree: Located, section: str, address: str) -> None:
    match = re.fullmatch(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]*):([0-9]{1,5})", address)
    if match is None or int(match[2]) > 65535:
        raise _conflict(
            tree, section, "address", f"{address!r} is no host:port", "write it like 127.0.0.1:9464"
        )


def _ordered(tree: Located, section: str, low: tuple[str, float], high: tuple[str, float]) -> None:
    if low[1] <= high[1]:
        return
    key = low[0] if tree.at(section).child(low[0]) is not None else high[0]
    raise _conflict(
        tree,
        section,
        key,
        f"{section}.{low[0]} {low[1]:g} is above {section}.{high[0]} {high[1]:g}",
        "lower the one or raise the other",
    )


def _both(tree: Located, section: str, first: str, second: str, values: Value) -> None:
    given = [key for key in (first, second) if getattr(values, key) is not None]
    if len(given) == 1:
        other = second if given[0] == first else first
        raise _conflict(
            tree, section, given[0], f"stands without {section}.{other}", f"add {section}.{other}"
        )


def _conflict(tree: Located, section: str, key: str, cause: str, cure: str) -> ConfigError:
    node = tree.at(section, key)
    return ConfigError(f"{node.where}: {section}.{key}: {cause}", cure=cure)
