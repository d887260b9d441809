"""What this host has and lacks for Neuron devices, each with the cure."""

from __future__ import annotations

import os

from alloy_agent.backends.neuron.facts import DRIVER_FLOOR
from alloy_agent.backends.neuron.monitor import MonitorHealth
from alloy_agent.backends.neuron.options import NeuronOptions
from alloy_agent.backends.neuron.record import Record
from alloy_agent.backends.neuron.tree import NeuronTree
from alloy_agent.errors import BackendError
from alloy_agent.model import Diagnosis

MOVED_FROM = (2, 31)  # reorganised its sysfs; the new paths were not to be seen


def diagnose(
    tree: NeuronTree, options: NeuronOptions, record: Record, monitor: MonitorHealth
) -> tuple[Diagnosis, ...]:
    """Return one line for the driver, its devices, the tools, the record and the privileges."""
    return (
        _driver(tree),
        _devices(tree),
        *(_tool(options, name) for name in ("neuron-ls", "neuron-monitor")),
        _monitor(monitor),
        _record(record),
        _privileges(),
    )


def version_key(version: str) -> tuple[int, ...]:
    """Return a version for comparing: its leading numbers."""
    numbers = []
    for part in version.split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)


def _driver(tree: NeuronTree) -> Diagnosis:
    subject, version = "neuron driver", tree.driver_version()
    if not tree.loaded():
        return Diagnosis(
            subject=subject, ok=False, found="not loaded", cure="modprobe neuron", required=True
        )
    if not version:
        return Diagnosis(
            subject=subject, ok=False, found="no version told", cure="install a current driver"
        )
    safe = version_key(version) >= version_key(DRIVER_FLOOR)
    cure = "" if safe else f"update to {DRIVER_FLOOR} or later before tenants share this host"
    moved = version_key(version) >= MOVED_FROM
    found = f"{version}, which moved attributes: they are found by name" if moved else version
    return Diagnosis(subject=subject, ok=safe, found=found, cure=cure)


def _devices(tree: NeuronTree) -> Diagnosis:
    count = len(tree.devices())
    if count:
        return Diagnosis(subject="neuron devices", ok=True, found=f"{count} devices")
    return Diagnosis(
        subject="neuron devices",
        ok=False,
        found="waiting-driver: none shown yet",
        cure="wait for the driver; see dmesg if it stays so",
        required=True,
    )


def _tool(options: NeuronOptions, name: str) -> Diagnosis:
    path = f"{options.tools_dir}/{name}"
    there = os.access(path, os.X_OK)
    cure = "" if there else "install aws-neuronx-tools; without it less is known, nothing fails"
    return Diagnosis(subject=name, ok=there, found=path if there else "not there", cure=cure)


def _monitor(health: MonitorHealth) -> Diagnosis:
    subject = "neuron-monitor child"
    if health.running or not health.restarts:
        found = f"{health.reports} reports" if health.running else "not running"
        return Diagnosis(subject=subject, ok=True, found=found)
    return Diagnosis(
        subject=subject,
        ok=False,
        found=f"telemetry-degraded: {health.problem}, {health.restarts} restarts",
        cure="run neuron-monitor by hand to see why; device health is judged without it",
    )


def _record(record: Record) -> Diagnosis:
    subject = "record of grants"
    try:
        record.read()
    except BackendError as exc:
        return Diagnosis(subject=subject, ok=False, found=exc.message, cure=exc.cure, required=True)
    return Diagnosis(subject=subject, ok=True, found=record.path or "kept in memory only")


def _privileges() -> Diagnosis:
    root = os.geteuid() == 0
    return Diagnosis(
        subject="privileges for Neuron evidence",
        ok=root,
        found="root" if root else f"uid {os.geteuid()}",
        cure="" if root else "run as root: descriptors of others tell who holds a device",
    )
