"""Damaged files of the state directory, one at a time: rebuilt with a note, or refused by name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.daemon.harness import DaemonProcess, Site, daemon, wait_for

# Every file beside the database, and the event that says what became of it; "": it plays hardware,
# so its devices are down, and it is left as it is.
FILES = {
    "marks.json": "marks_damaged",
    "starts.json": "starts_damaged",
    "usage/open.json": "usage_damaged",
    "silicon-*.json": "",
}


@pytest.fixture(scope="module")
def used(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a state directory that a daemon has used, with a partition in it."""
    site = Site(tmp_path_factory.mktemp("used"), "1xA100-SXM4-40GB")
    layout = site.folder / "layout.yaml"
    layout.write_text(
        "version: v1\nlayouts:\n  a:\n    - match: {vendor: nvidia}\n      mig: [3g.20gb]\n"
    )
    assert site.run("apply", str(layout), "--yes").returncode == 0
    with daemon(site) as running:
        wait_for("usage", (site.state / "usage/open.json").exists)
        assert running.stop() == 0
    return site.state


@pytest.mark.parametrize("damage", [b"", b"\xff\x00" * 40], ids=["empty", "garbage"])
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_leaves_a_note_or_is_refused(
    used: Path, tmp_path: Path, name: str, damage: bytes
) -> None:
    """The daemon runs and says which file it did not believe; simulated hardware is then absent."""
    site = Site(tmp_path, "1xA100-SXM4-40GB")
    shutil.copytree(used, site.state, ignore=shutil.ignore_patterns("*.sock", "*.lock", "lock"))
    (path,) = site.state.glob(name)
    path.write_bytes(damage)
    running = DaemonProcess(site)
    try:
        if FILES[name]:
            running.ready()
            note = running.wait_event(FILES[name])
            assert str(path) in json.dumps(note)
            (partition,) = site.partitions()
            assert (partition["profile"], partition["generation"]) == ("3g.20gb", 1)
            assert running.stop() == 0
        else:
            wait_for("its name", lambda: any(str(path) in json.dumps(e) for e in running.log()))
            assert running.process.poll() is None
            assert path.read_bytes() == damage  # left for whoever looks into it
    finally:
        if running.process.poll() is None:
            running.kill()
