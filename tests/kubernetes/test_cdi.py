"""Container device specs: what readers load, what they never see half of, what is swept."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alloy_agent.kubernetes import cdi
from alloy_agent.kubernetes.cdi import CdiDevice, CdiDirectory, CdiError
from alloy_agent.model import Access

CLAIM = "8c5b2f3e-1c8e-4b9a-9f43-0d5a7f9f2a11"
VENDOR = "gpu.alloy.dev"
ACCESS = Access(
    device_nodes=("/dev/nvidia0", "/dev/nvidia-caps/nvidia-cap12"),
    environment={"NVIDIA_VISIBLE_DEVICES": "MIG-1"},
)


def spec(claim: str = CLAIM, nodes: int = 1) -> dict[str, Any]:
    devices = [
        CdiDevice(name=cdi.device_name(claim, f"dev-{n}"), access=ACCESS) for n in range(nodes)
    ]
    return cdi.spec_of(VENDOR, devices, {"ALLOY_CLAIM": claim})


def test_a_spec_grants_exactly_what_the_piece_needs() -> None:
    """Nodes `rw` and variables of the piece, under the version that old readers know."""
    made = spec()
    assert cdi.problems(made) == ()
    assert made["cdiVersion"] == "0.5.0"
    (device,) = made["devices"]
    assert device["name"] == f"{CLAIM}-dev-0"
    nodes = device["containerEdits"]["deviceNodes"]
    assert nodes == [{"path": path, "permissions": "rw"} for path in ACCESS.device_nodes]
    assert "NVIDIA_VISIBLE_DEVICES=MIG-1" in device["containerEdits"]["env"]


def test_pieces_of_one_claim_are_named_together() -> None:
    """A container sees the last setting of a variable, so each device names all pieces."""
    devices = [
        CdiDevice(
            name=f"dev-{n}", access=Access(environment={"NVIDIA_VISIBLE_DEVICES": f"MIG-{n}"})
        )
        for n in range(2)
    ]
    both = cdi.joined(devices)
    assert {one.access.environment["NVIDIA_VISIBLE_DEVICES"] for one in both} == {"MIG-0,MIG-1"}
    amd = [
        CdiDevice(name=f"dev-{n}", access=Access(environment={"ROCR_VISIBLE_DEVICES": "0"}))
        for n in range(2)
    ]
    assert cdi.joined(amd)[0].access.environment["ROCR_VISIBLE_DEVICES"] == "0,1"


BAD: dict[str, Any] = {
    "no object": [],
    "unknown key": {**spec(), "devcies": []},
    "newer version": {**spec(), "cdiVersion": "0.6.0"},
    "no class": {**spec(), "kind": "gpu.alloy.dev"},
    "a class of one letter": {**spec(), "kind": "gpu.alloy.dev/c"},
    "a class with a dot": {**spec(), "kind": "gpu.alloy.dev/a.b"},
    "a vendor that starts with a digit": {**spec(), "kind": "1gpu/claim"},
    "no devices": {**spec(), "devices": []},
    "two of one name": {**spec(), "devices": spec()["devices"] * 2},
    "a device without edits": {**spec(), "devices": [{"name": "one", "containerEdits": {}}]},
    "empty edits": {**spec(), "devices": [{"name": "one", "containerEdits": {"env": []}}]},
    "a device of one letter": {
        **spec(),
        "devices": [{"name": "d", "containerEdits": {"env": ["A=b"]}}],
    },
    "unknown edits": {
        **spec(),
        "devices": [{"name": "one", "containerEdits": {"environment": ["A=b"]}}],
    },
    "no NAME=VALUE": {**spec(), "devices": [{"name": "one", "containerEdits": {"env": ["A"]}}]},
    "a relative node": {
        **spec(),
        "devices": [{"name": "one", "containerEdits": {"deviceNodes": [{"path": "dev/kfd"}]}}],
    },
    "a way out": {
        **spec(),
        "devices": [{"name": "one", "containerEdits": {"deviceNodes": [{"path": "/dev/../a"}]}}],
    },
    "mknod": {
        **spec(),
        "devices": [
            {
                "name": "one",
                "containerEdits": {"deviceNodes": [{"path": "/dev/kfd", "permissions": "rwm"}]},
            }
        ],
    },
}


@pytest.mark.parametrize("what", BAD)
def test_what_readers_would_not_load_is_never_written(what: str, tmp_path: Path) -> None:
    """Each defect is named, and the directory stays as it was."""
    assert cdi.problems(BAD[what])
    if isinstance(BAD[what], dict):
        with pytest.raises(CdiError, match="would not load"):
            CdiDirectory(tmp_path, VENDOR).write(CLAIM, BAD[what])
    assert list(tmp_path.iterdir()) == []


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


@given(json_values, st.sampled_from(["devices", "kind", "cdiVersion", "containerEdits"]))
def test_any_content_is_judged_without_failing(value: Any, key: str) -> None:
    """Whatever stands in a file, the check answers."""
    assert isinstance(cdi.problems(value), tuple)
    assert isinstance(cdi.problems({**spec(), key: value}), tuple)


def test_a_reader_never_sees_a_part(tmp_path: Path) -> None:
    """While a file is rewritten 400 times, whoever reads it always sees a whole spec."""
    folder = CdiDirectory(tmp_path, VENDOR)
    folder.write(CLAIM, spec())
    stop, bad, reads = threading.Event(), [], 0

    def read() -> None:
        nonlocal reads
        while not stop.is_set():
            for path in tmp_path.glob("*.json"):
                reads += 1
                try:
                    if cdi.problems(json.loads(path.read_bytes())):
                        bad.append("invalid")
                except ValueError:
                    bad.append("partial")

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    for number in range(400):
        assert folder.write(CLAIM, spec(nodes=2 + number % 9))
    stop.set()
    thread.join(10)
    assert not bad
    assert reads > 10
    assert not list(tmp_path.glob(".*"))


def test_the_same_content_is_not_written_again(tmp_path: Path) -> None:
    """A second write of one spec touches nothing, so no runtime reads its directory anew."""
    folder = CdiDirectory(tmp_path, VENDOR)
    assert folder.write(CLAIM, spec())
    before = folder.file_of(CLAIM).stat()
    assert not folder.write(CLAIM, spec())
    assert folder.file_of(CLAIM).stat().st_ino == before.st_ino
    assert folder.file_of(CLAIM).stat().st_mode & 0o777 == 0o644
    assert folder.read(CLAIM) == spec()


def test_leftovers_go_and_foreign_files_stay(tmp_path: Path) -> None:
    """Swept are our files of dead claims and half-written ones; nothing else is touched."""
    folder = CdiDirectory(tmp_path, VENDOR)
    folder.write(CLAIM, spec())
    folder.write("dead", spec("dead"))
    for name in (f".{VENDOR}-x.tmp", "nvidia.yaml", "gpu.alloy.dev.json", ".other.tmp"):
        (tmp_path / name).write_text("{")
    removed = folder.sweep([CLAIM])
    assert set(removed) == {f"{VENDOR}-claim_dead.json", f".{VENDOR}-x.tmp"}
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {folder.file_of(CLAIM).name, "nvidia.yaml", "gpu.alloy.dev.json", ".other.tmp"}


def test_a_file_that_does_not_load_reads_as_none(tmp_path: Path) -> None:
    """A truncated file of ours is no spec, and is put right by the next write."""
    folder = CdiDirectory(tmp_path, VENDOR)
    folder.write(CLAIM, spec())
    folder.file_of(CLAIM).write_bytes(b'{"cdiVersion": "0.5')
    assert folder.read(CLAIM) is None
    assert folder.write(CLAIM, spec())
    assert folder.read(CLAIM) == spec()


def test_a_directory_that_refuses_is_one_line(tmp_path: Path) -> None:
    """A file where the directory should be: thing, cause and cure, and no file is left."""
    (tmp_path / "cdi").write_text("")
    with pytest.raises(CdiError, match=r"CDI directory .*: .*: mount it writable"):
        CdiDirectory(tmp_path / "cdi", VENDOR).write(CLAIM, spec())
    with pytest.raises(CdiError, match="no name for a file"):
        CdiDirectory(tmp_path, VENDOR).write("../../etc/passwd", spec())


@pytest.mark.host
def test_a_full_disk_leaves_no_part(tmp_path: Path) -> None:
    """On a file system without room the write fails in one line and leaves nothing behind."""
    import subprocess

    mount = tmp_path / "small"
    mount.mkdir()
    done = subprocess.run(
        ["/bin/mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", str(mount)], check=False
    )
    if done.returncode:
        pytest.skip("no tmpfs can be mounted here")
    try:
        folder = CdiDirectory(mount, VENDOR)
        folder.write(CLAIM, spec())
        with pytest.raises(CdiError, match="No space left"):
            folder.write("other", spec("other", nodes=60))
        assert list(mount.iterdir()) == [folder.file_of(CLAIM)]
        assert folder.read(CLAIM) == spec()
    finally:
        subprocess.run(["/bin/umount", str(mount)], check=True)
