"""What a host has and lacks for NVIDIA GPUs, one line each, with the cure."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from alloy_agent.backends.nvidia.library import (
    DRIVER_NOT_LOADED,
    LIB_RM_VERSION_MISMATCH,
    LIBRARY_NOT_FOUND,
    NO_PERMISSION,
    Nvml,
    NvmlCallError,
)
from alloy_agent.host.pidspace import initial_namespace
from alloy_agent.model import Diagnosis

CAP_SYS_ADMIN: Final = 21
# What each group of functions is for, and the driver that brought them.
# Source: go-nvml's nvml.h by version; the three marked with "about" are not confirmed on a device.
GROUPS: Final = (
    ("nvmlDeviceGetGpuInstanceProfileInfoV", "names of MIG profiles", "R470"),
    ("nvmlDeviceGetComputeRunningProcesses_v3", "processes with their instance", "R510"),
    ("nvmlDeviceGetFieldValues", "batched counters", "R418"),
    ("nvmlGpmSampleGet", "activity per instance (GPM)", "about R520"),
    ("nvmlDeviceGetGpuFabricInfoV", "state of the NVLink fabric", "about R535"),
    ("nvmlEventSetWait_v2", "events with their instance", "R450"),
)


def diagnose(nvml: Nvml, root: Path) -> tuple[Diagnosis, ...]:
    """Return the lines; never raises."""
    lines = [_driver(root)]
    try:
        nvml.ensure()
    except NvmlCallError as failure:
        return (*lines, _refused(failure))
    lines += [_library(nvml), _gpus(nvml), *_functions(nvml), *_permission(nvml)]
    lines.append(_namespace(root))
    return tuple(lines)


def _namespace(root: Path) -> Diagnosis:
    """Return whether this agent sees the host's processes, whose pids the driver tells."""
    if initial_namespace(str(root / "proc")):
        return Diagnosis(subject="pid namespace", ok=True, found="the host's")
    return Diagnosis(
        subject="pid namespace",
        ok=False,
        found="one of the agent's own: processes on the GPUs cannot be told",
        cure="run the agent in the host's pid namespace (hostPID: true)",
    )


def _driver(root: Path) -> Diagnosis:
    subject = "NVIDIA driver"
    try:
        text = (root / "proc/driver/nvidia/version").read_text().splitlines()[0]
    except (OSError, IndexError):
        return Diagnosis(
            subject=subject,
            ok=False,
            found="not loaded (no /proc/driver/nvidia/version)",
            cure="install the driver and load it: modprobe nvidia",
        )
    return Diagnosis(subject=subject, ok=True, found=" ".join(text.split()))


def _refused(failure: NvmlCallError) -> Diagnosis:
    cures = {
        LIBRARY_NOT_FOUND: "install the driver's user-space libraries (libnvidia-ml.so.1)",
        DRIVER_NOT_LOADED: "load the driver: modprobe nvidia",
        LIB_RM_VERSION_MISMATCH: "library and kernel module differ: restart the node",
        NO_PERMISSION: "run as root, or give access to /dev/nvidiactl",
    }
    found = {LIBRARY_NOT_FOUND: "libnvidia-ml.so.1 cannot be loaded"}
    return Diagnosis(
        subject="NVML",
        ok=False,
        found=found.get(failure.code, str(failure)),
        cure=cures.get(failure.code, "look at the kernel log for NVRM messages"),
    )


def _library(nvml: Nvml) -> Diagnosis:
    try:
        version = nvml.call("nvmlSystemGetNVMLVersion")
        driver = nvml.call("nvmlSystemGetDriverVersion")
    except NvmlCallError as failure:
        return _refused(failure)
    return Diagnosis(subject="NVML", ok=True, found=f"library {version}, driver {driver}")


def _gpus(nvml: Nvml) -> Diagnosis:
    subject = "NVIDIA GPUs"
    try:
        count = int(nvml.call("nvmlDeviceGetCount"))
    except NvmlCallError as failure:
        return Diagnosis(subject=subject, ok=False, found=str(failure), cure="restart the node")
    silent = []
    for index in range(count):
        try:
            nvml.call("nvmlDeviceGetHandleByIndex", index)
        except NvmlCallError as failure:
            silent.append(f"GPU {index}: {failure}")
    if not count:
        return Diagnosis(
            subject=subject,
            ok=False,
            found="the driver is loaded and sees none",
            cure="look for them with lspci -d 10de: and for NVRM in the kernel log",
        )
    if silent:
        return Diagnosis(
            subject=subject,
            ok=False,
            found=f"{len(silent)} of {count} do not answer: {'; '.join(silent)}",
            cure="drain the node and reset those GPUs",
        )
    return Diagnosis(subject=subject, ok=True, found=f"{count} answer")


def _functions(nvml: Nvml) -> list[Diagnosis]:
    missing = [(what, since) for symbol, what, since in GROUPS if not nvml.has(symbol)]
    if not missing:
        return [Diagnosis(subject="NVML functions", ok=True, found="all that are used")]
    lacks = ", ".join(f"{what} ({since})" for what, since in missing)
    return [
        Diagnosis(
            subject="NVML functions",
            ok=False,
            found=f"this driver lacks {lacks}",
            cure="install a newer driver; until then these stay unknown",
        )
    ]


def _permission(nvml: Nvml) -> list[Diagnosis]:
    """Tell whether MIG may be changed, by asking what only the privileged may ask."""
    import ctypes

    subject = "permission to partition"
    try:
        handle = nvml.call("nvmlDeviceGetHandleByIndex", 0)
        info = nvml.call("nvmlDeviceGetGpuInstanceProfileInfo", handle, 0, version=1)
        nvml.call(
            "nvmlDeviceGetGpuInstancePossiblePlacements",
            handle,
            info.id,
            None,
            ctypes.byref(ctypes.c_uint(0)),
        )
    except NvmlCallError as failure:
        if failure.code != NO_PERMISSION:
            return []  # no GPU, or none that can be partitioned
        return [
            Diagnosis(
                subject=subject,
                ok=False,
                found=f"refused to uid {os.geteuid()}",
                cure="run the agent as root with CAP_SYS_ADMIN; it observes without",
            )
        ]
    return [Diagnosis(subject=subject, ok=True, found="granted")]
