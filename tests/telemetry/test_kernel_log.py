"""The kernel's log as a witness: what is read of it, what is not believed, what is read once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alloy_agent.telemetry import kernel_log
from alloy_agent.telemetry.kernel_log import KernelLog, fault_of, parse


@pytest.mark.parametrize(
    ("line", "where", "code"),
    [
        ("NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, GPU has fallen", "0000:3b:00.0", "xid:79"),
        ("NVRM: Xid (PCI:00000000:3B:00.0): 031, pid=7", "0000:3b:00.0", "xid:31"),
        (
            "amdgpu 0000:c1:00.0: amdgpu: ring gfx_0.0.0 timeout, signaled seq=1",
            "0000:c1:00.0",
            "amd:ring_hang",
        ),
        ("amdgpu 0000:c1:00.0: amdgpu: GPU reset begin!", "0000:c1:00.0", "amd:gpu_pre_reset"),
        (
            "amdgpu 0000:c1:00.0: amdgpu: 1 uncorrectable hardware errors detected in UMC block",
            "0000:c1:00.0",
            "ras:umc",
        ),
    ],
)
def test_faults_are_found_with_their_device(line: str, where: str, code: str) -> None:
    """The code is the catalogue's, the address is written as the agent writes it."""
    found = fault_of(line)
    assert found is not None
    assert (found.where, found.code) == (where, code)


def test_what_user_space_wrote_is_no_witness() -> None:
    """A program can write any line into the log; only the kernel's facility is believed."""
    line = b"NVRM: Xid (PCI:0000:3b:00): 79, pid=1\n"
    assert parse(b"4,17,1000000,-;" + line) is not None
    assert parse(b"12,18,1000000,-;" + line) is None


def test_a_name_inside_of_another_drivers_line_is_no_witness() -> None:
    """What a tenant prints through its own device's driver never blames another device."""
    assert fault_of("neuron:ncdev_printk: NVRM: Xid (PCI:0000:3b:00): 79, pid=1") is None
    assert fault_of("neuron: amdgpu 0000:c1:00.0: amdgpu: GPU reset begin!") is None


@given(st.binary(max_size=400))
def test_any_record_is_taken(raw: bytes) -> None:
    """Whatever stands in the log, reading it does not fail."""
    record = parse(raw)
    if record is not None:
        fault_of(record.text)


@given(st.text(max_size=200))
def test_any_line_is_taken(line: str) -> None:
    """Whatever a line says, it is a fault of the table's form or none."""
    fault_of("NVRM: Xid (PCI:" + line)
    found = fault_of(line)
    assert found is None or ":" in found.code


def test_a_restart_reads_on_behind_the_last_record(tmp_path: Path) -> None:
    """Records up to the kept number are left out, later ones come once, and reading never waits."""
    path = tmp_path / "kmsg"
    os.mkfifo(path)
    keep = os.open(path, os.O_RDWR | os.O_NONBLOCK)
    log = KernelLog(after=5, path=str(path))
    try:
        assert log.read() == ()
        os.write(keep, b"4,5,1000000,-;old\n")
        assert [r.sequence for r in log.read()] == []
        os.write(keep, b"4,6,2000000,-;new\n")
        assert [(r.sequence, r.text) for r in log.read()] == [(6, "new")]
        assert log.read() == ()
        assert log.sequence == 6
    finally:
        log.close()
        os.close(keep)


def test_without_a_log_there_is_a_reason(tmp_path: Path) -> None:
    """No permission or no device: nothing is read, and it says why."""
    log = KernelLog(path=str(tmp_path / "nothing"))
    assert log.read() == ()
    assert "no such file" in log.reason
    assert kernel_log.bus_of("00000000:3B:00.0") == "0000:3b:00.0"
