"""The live state of a simulated machine: plain structs that are the state file too.

Everything that outlives a process of the agent stands in here: what the driver and the devices
know, who uses them, the faults that are scripted and the events that happened. What belongs to one
process (open handles) does not.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

STATE_VERSION: Final = 1
EVENTS_KEPT: Final = 1024

GrantKind = Literal["cores", "production", "opportunistic"]
FaultAction = Literal["error", "hang", "slow", "sigkill", "sigsegv", "crash"]
ErrorName = Literal[
    "insufficient_resources",
    "in_use",
    "reset_required",
    "invalid_argument",
    "not_supported",
    "not_permitted",
    "not_found",
    "lost",
    "unknown",
]


class Fault(
    msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True, frozen=True
):
    """One scripted fault.

    Attributes:
        call: Name of the call, or a shell pattern over names (`gpu.*`, `*`).
        device: Device id or `#<index>`, or a shell pattern over ids.
        action: `error` refuses, `hang` blocks until the fault is removed, `slow` waits first,
            `sigkill`/`sigsegv` end the process, `crash` raises `SimulatedCrash`.
        when: Before the device does it, or after (done, but the caller never hears so).
        error: Which refusal.
        code: The vendor's code, for fakes of vendor libraries.
        nth: Only from the n-th matching call on (1 is the first).
        times: How often it strikes; 0 is for ever.
        delay_s: Of `slow`.
    """

    call: str = "*"
    device: str = "*"
    action: FaultAction = "error"
    when: Literal["before", "after"] = "before"
    error: ErrorName = "unknown"
    code: int | None = None
    nth: int = 1
    times: int = 0
    delay_s: float = 0.0


class FaultState(msgspec.Struct, kw_only=True):
    """A scripted fault with how often it was met and how often it struck."""

    key: int
    fault: Fault
    met: int = 0
    struck: int = 0


class Client(msgspec.Struct, kw_only=True):
    """A process that uses a device.

    Attributes:
        pid: Of the simulation; need not exist on the host.
        instance: GPU instance id, or XCD partition number; None: on the parent device.
        compute_instance: Within the GPU instance.
        cores: Logical cores of a Neuron device.
        memory_bytes: Device memory it holds.
        load_ratio: How busy it keeps its piece, 0 to 1.
        opportunistic: Runs in an opportunistic share.
        tag: The partition that it says it belongs to, where the vendor lets it say so.
        monitor: Holds a handle and no context (an exporter, a management daemon).
    """

    pid: int
    device: str
    name: str = "python3"
    instance: int | None = None
    compute_instance: int | None = None
    cores: tuple[int, ...] = ()
    memory_bytes: int = 0
    load_ratio: float = 0.5
    opportunistic: bool = False
    tag: str = ""
    monitor: bool = False


class ComputeInstance(msgspec.Struct, kw_only=True):
    """A compute instance: `slices` of its GPU instance from compute slice `start`."""

    id: int
    slices: int
    start: int
    uuid: str


class GpuInstance(msgspec.Struct, kw_only=True):
    """A GPU instance; ids are re-used, `serial` is the simulation's own and never seen outside."""

    id: int
    profile: int  # vendor id
    start: int
    size: int
    serial: int
    compute: list[ComputeInstance] = []


class Grant(msgspec.Struct, kw_only=True):
    """A binding of a piece to a tenant-to-be that no device knows: core runs, shares of a device.

    Such bindings live in files on a real node (environment, CDI); the machine keeps them likewise.
    """

    kind: GrantKind
    profile: str
    start: int
    size: int
    ordinal: int = 0
    memory_bytes: int | None = None
    serial: int
    group: tuple[str, ...] = ()  # devices that one tenant was meant to get together
    cu_mask: tuple[int, int] | None = None


class SignalScript(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """Values that a signal takes one after the other in place of the generated ones.

    None reads as absent. The last value stays, unless `repeat`.
    """

    values: tuple[float | None, ...]
    step_s: float = 1.0
    started_s: float = 0.0
    repeat: bool = False


class DeviceState(msgspec.Struct, kw_only=True):
    """One device as its driver sees it. Fields of other vendors stay at their defaults."""

    id: str
    board: str
    index: int
    bus: str
    serial: str
    uuid: str
    numa: int = -1
    driver: str = ""
    lost: bool = False
    passthrough: bool = False  # a guest's device that the hypervisor does not let reset
    needs_reset: bool = False
    fenced: bool = True  # tenants get a device rule of exactly their own nodes
    # NVIDIA
    minor: int = 0
    mig: bool = False
    mig_pending: bool = False
    instances: list[GpuInstance] = []
    row_remap_pending: bool = False
    row_remap_failed: bool = False
    recovery_action: int = 0
    # AMD
    compute_mode: str = ""
    memory_mode: str = ""
    memory_requested: str | None = None
    hive: str = ""
    switches: int = 0
    isolation: list[int] = []
    # Neuron
    lnc: int = 0
    # all
    grants: list[Grant] = []
    ecc_corrected: int = 0
    ecc_uncorrected: int = 0
    energy_j: float = 0.0
    energy_since_s: float = 0.0
    throttle_s: float = 0.0  # as of `energy_since_s`, like `energy_j`
    scripts: dict[str, SignalScript] = {}  # by signal name, for the device and its pieces


class Event(msgspec.Struct, kw_only=True, frozen=True):
    """Something a device reported; `number` grows for ever."""

    number: int
    device: str
    kind: str
    code: str = ""
    instance: int | None = None
    time_s: float = 0.0
    detail: str = ""


class MachineState(msgspec.Struct, kw_only=True):
    """A whole simulated node."""

    version: int = STATE_VERSION
    seed: int = 0
    boot: int = 1
    serial: int = 0
    recipe: str = ""  # digest of the specification that made it
    kfd_busy_scope: Literal["device", "node"] = "device"
    display_card: bool = False
    many_minors: bool = False  # a kernel that goes on above renderD191
    devices: list[DeviceState] = []
    clients: list[Client] = []
    faults: list[FaultState] = []
    fault_key: int = 0
    crash_at: int | None = None
    crash_how: Literal["raise", "sigkill"] = "raise"
    events: list[Event] = []
    event_number: int = 0
