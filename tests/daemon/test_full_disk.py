"""A daemon on a disk without room: it observes and audits, says why, and writes again by itself."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.daemon.harness import DaemonProcess, Site, wait_for

pytestmark = pytest.mark.host


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Give a small file system of its own."""
    place = tmp_path / "disk"
    place.mkdir()
    if os.geteuid() != 0:
        pytest.skip("needs root to mount a file system")
    made = subprocess.run(
        ["/usr/bin/mount", "-t", "tmpfs", "-o", "size=8m", "alloy-test", place],
        capture_output=True,
        text=True,
        check=False,
    )
    if made.returncode != 0:
        pytest.skip(f"cannot mount a file system here: {made.stderr.strip()}")
    yield place
    subprocess.run(["/usr/bin/umount", "-l", place], check=True)


def fill(disk: Path) -> Path:
    """Take all room there is, and return what took it."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file:
        for size in (1 << 16, 1 << 12):
            try:
                while file.write(bytes(size)):
                    pass
            except OSError:
                continue
    return filler


def site_on(disk: Path, folder: Path) -> Site:
    """Return a site whose state is on the small disk."""
    site = Site(folder, "1xA100-SXM4-40GB")
    site.state = disk / "state"
    site.globals[1] = str(site.state)
    return site


@pytest.mark.parametrize("first", [True, False], ids=["first start", "later start"])
def test_a_daemon_on_a_full_disk_observes_and_writes_again(
    disk: Path, tmp_path: Path, first: bool
) -> None:
    """It starts degraded, with the reason everywhere, changes nothing, and recovers by itself."""
    site = site_on(disk, tmp_path)
    layout = tmp_path / "layout.yaml"
    layout.write_text(
        "version: v1\nlayouts:\n  a:\n    - match: {vendor: nvidia}\n      mig: [3g.20gb]\n"
    )
    if not first:
        assert site.run("apply", str(layout), "--yes").returncode == 0
    filler = fill(disk)
    site.environment["ALLOY_SOCKET_PATH"] = str(tmp_path / "agent.sock")
    daemon = DaemonProcess(site)
    try:
        ready = daemon.wait_event("ready")
        assert "no space is left" in ready["degraded"]
        status, body = daemon.get("readyz")
        assert status == 503
        assert "no space is left" in body
        audit = site.run("audit", "--json")
        assert json.loads(audit.stdout)["partitions"] is not None, audit.stderr
        refused = site.run("apply", str(layout), "--yes")
        assert refused.returncode != 0
        assert "no changes are made" in refused.stderr
        assert "no space is left" in refused.stderr
        told = {d["subject"]: d for d in site.document("doctor", "--json")["diagnoses"]}
        assert "0 MiB free" in told["state directory"]["found"]
        assert not told["state directory"]["ok"]
        assert daemon.get("healthz")[0] == 200
        filler.unlink()
        daemon.wait_event("room_again")
        again = daemon.wait_event("ready", count=2)
        assert again["degraded"] == ""
        if first:
            assert site.run("apply", str(layout), "--yes").returncode == 0
        (partition,) = wait_for("the partition", site.partitions)
        assert partition["profile"] == "3g.20gb"
        assert daemon.process.poll() is None
        assert daemon.stop() == 0
    finally:
        if daemon.process.poll() is None:
            daemon.kill()


def test_a_disk_that_fills_up_meanwhile_stops_changes_until_there_is_room(
    disk: Path, tmp_path: Path
) -> None:
    """A change that cannot be journalled is refused, and works once there is room again."""
    site = site_on(disk, tmp_path)
    site.environment["ALLOY_SOCKET_PATH"] = str(tmp_path / "agent.sock")
    layout = tmp_path / "layout.yaml"
    layout.write_text(
        "version: v1\nlayouts:\n  a:\n    - match: {vendor: nvidia}\n      mig: [3g.20gb]\n"
    )
    daemon = DaemonProcess(site)
    try:
        daemon.ready()
        filler = fill(disk)
        refused = site.run("apply", str(layout), "--yes")
        assert refused.returncode != 0
        assert "no space is left" in refused.stderr
        assert [p["profile"] for p in site.partitions()] == ["whole"]
        filler.unlink()
        wait_for("a change", lambda: site.run("apply", str(layout), "--yes").returncode == 0)
        assert [p["profile"] for p in site.partitions()] == ["3g.20gb"]
        assert daemon.process.poll() is None
    finally:
        if daemon.process.poll() is None:
            daemon.kill()


def test_a_drain_that_cannot_be_kept_is_refused(disk: Path, tmp_path: Path) -> None:
    """Nothing is acknowledged that a restart would forget: neither a drain nor its end.

    What held goes on to hold, `/readyz` says why, and all of it works once there is room.
    """
    site = site_on(disk, tmp_path)
    site.environment["ALLOY_SOCKET_PATH"] = str(tmp_path / "agent.sock")
    (device,) = site.document("devices", "--json")["devices"]
    daemon = DaemonProcess(site)
    held = ["node: early"]

    def drains() -> list[str]:
        return list(site.document("top", "--json")["drains"])

    try:
        daemon.ready()
        assert site.run("drain", "--reason", "early").returncode == 0
        filler = fill(disk)
        # without room, and then because nothing is changed any more
        for words in (["drain", device["id"], "--reason", "late"], ["undrain"]) * 2:
            refused = site.run(*words)
            assert refused.returncode != 0, words
            assert "no space is left" in refused.stderr
            assert refused.stderr.count("\n") == 1
            assert drains() == held
        status, body = daemon.get("readyz")
        assert (status, "no space is left" in body) == (503, True)
        daemon.kill()
        filler.unlink()
        daemon = DaemonProcess(site).ready()
        assert daemon.get("readyz")[0] == 200
        assert drains() == held
        assert site.run("undrain").returncode == 0
        assert site.run("drain", device["id"], "--reason", "late").returncode == 0
        daemon.kill()
        daemon = DaemonProcess(site).ready()
        assert drains() == [f"{device['id']}: late"]
    finally:
        if daemon.process.poll() is None:
            daemon.kill()
