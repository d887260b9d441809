"""The daemon as a real process: start, service, signals, crash and restart."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

import pytest

from tests.daemon.harness import DaemonProcess, Site, daemon, gone, wait_for

LAYOUT = """\
version: v1
layouts:
  halves:
    - match: {vendor: nvidia}
      mig: [3g.40gb@0, 3g.40gb@4]
  quarters:
    - match: {vendor: nvidia}
      mig: [1g.20gb, 1g.20gb, 1g.20gb, 1g.20gb]
"""


@pytest.fixture
def layout(tmp_path: Path) -> Path:
    path = tmp_path / "layout.yaml"
    path.write_text(LAYOUT)
    return path


def test_it_serves_until_told_to_stop(site: Site, layout: Path) -> None:
    """Addresses are logged, pages answer, commands use the socket, SIGTERM ends it cleanly."""
    with daemon(site) as running:
        assert running.get("healthz") == (200, "ok\n")
        assert running.get("readyz") == (200, "ok\n")
        applied = site.run("apply", str(layout), "--layout", "halves", "--yes")
        assert applied.returncode == 0, applied.stderr
        assert {p["profile"] for p in site.partitions()} == {"3g.40gb"}
        wait_for(
            "partitions on /metrics",
            lambda: running.get("metrics")[1].count('profile="3g.40gb"') == 2,
        )
        workers = running.workers()
        assert workers
        assert running.stop() == 0
        wait_for("the end of the workers", lambda: all(gone(pid) for pid in workers))
        assert not (site.state / "agent.sock").exists()
    assert {p["profile"] for p in site.partitions()} == {"3g.40gb"}, "stopping changed partitions"


def test_a_second_daemon_is_refused_in_one_line(site: Site) -> None:
    """One state directory has one daemon; the other says who has it and changes nothing."""
    with daemon(site) as running:
        second = site.run("run")
        assert second.returncode == 2
        assert second.stderr.count("\n") == 1
        assert str(running.process.pid) in second.stderr
        assert running.get("healthz")[0] == 200


def test_a_reload_adopts_a_good_layout_and_refuses_a_bad_one(
    site: Site, layout: Path, tmp_path: Path
) -> None:
    """SIGHUP reads settings and layout again; a bad file is one line and the old one stays."""
    config = tmp_path / "agent.yaml"
    config.write_text(f"layout: {{file: {layout}, name: halves}}\nlog: {{level: info}}\n")
    with daemon(site, "--config", str(config)) as running:
        wait_for("the layout", lambda: len(site.partitions()) == 2)
        layout.write_text(LAYOUT + "  broken: [{match: {vendor: nvidia}, mgi: []}]\n")
        running.signal(signal.SIGHUP)
        refused = running.wait_event("reload_refused")
        assert f"{layout}:" in refused["reason"]
        assert "mgi" in refused["reason"]
        layout.write_text(LAYOUT)
        config.write_text(f"layout: {{file: {layout}, name: quarters}}\nlog: {{level: debug}}\n")
        running.signal(signal.SIGHUP)
        running.wait_event("reloaded")
        wait_for("the new layout", lambda: len(site.partitions()) == 4)
        assert running.stop() == 0


def test_a_reload_says_what_needs_a_restart(site: Site, tmp_path: Path) -> None:
    """A setting that cannot change in a running agent is named."""
    config = tmp_path / "agent.yaml"
    config.write_text("sampler: {rate_hz: 10}\n")
    with daemon(site, "--config", str(config)) as running:
        config.write_text("sampler: {rate_hz: 20}\n")
        running.signal(signal.SIGHUP)
        assert running.wait_event("restart_needed")["settings"] == ["sampler"]


def test_the_layout_is_kept(site: Site, layout: Path, tmp_path: Path) -> None:
    """A partition that somebody removes comes back, with a new generation."""
    with daemon(site):
        assert site.run("apply", str(layout), "--layout", "halves", "--yes").returncode == 0
        before = {p["id"]: p["generation"] for p in site.partitions()}
        victim = sorted(before)[0]
        remove_behind_its_back(site, victim)
        wait_for(
            "the partition to come back",
            lambda: any(
                p["id"] == victim and p["generation"] > before[victim] for p in site.partitions()
            ),
        )


def remove_behind_its_back(site: Site, partition: str) -> None:
    """Destroy a simulated partition as another program on the node would."""
    from alloy_agent.backends import BackendSpec, open_backend
    from alloy_agent.model import Destroy

    options = {"specs": ["1xH100-SXM5-80GB"], "state_dir": str(site.state)}
    backend = open_backend(BackendSpec(name="fake", options=options))  # type: ignore[arg-type]
    try:
        (device,) = backend.discover()
        found = next(p for p in backend.observe(device).partitions if p.id == partition)
        backend.apply(Destroy(device=device, partition=found))
    finally:
        backend.close()


def test_killed_and_started_again(site: Site, layout: Path) -> None:
    """A kill -9 leaves no worker behind; the next start finds state, socket and layout."""
    with daemon(site) as running:
        assert site.run("apply", str(layout), "--layout", "halves", "--yes").returncode == 0
        workers = running.workers()
        running.kill()
        wait_for("the end of the workers", lambda: all(gone(pid) for pid in workers))
    with daemon(site) as running:
        assert {p["profile"] for p in site.partitions()} == {"3g.40gb"}
        assert running.stop() == 0


def test_a_killed_worker_costs_its_devices_for_a_moment_only(site: Site) -> None:
    """The daemon stays healthy and starts the worker again."""
    with daemon(site) as running:
        os.kill(running.workers()[0], signal.SIGKILL)
        assert running.get("healthz")[0] == 200
        wait_for(
            "the restart",
            lambda: 'alloy_worker_restarts_total{backend="fake"} 1.0' in running.get("metrics")[1],
        )
        assert running.get("healthz")[0] == 200


def test_damaged_state_leaves_observation(site: Site, layout: Path) -> None:
    """State that cannot be trusted is said once; devices are shown and nothing is changed."""
    with daemon(site) as running:
        running.stop()
    database = site.state / "state.db"
    for suffix in ("-wal", "-shm"):
        (site.state / f"state.db{suffix}").unlink(missing_ok=True)
    data = bytearray(database.read_bytes())
    data[: len(data) // 2] = os.urandom(len(data) // 2)
    database.write_bytes(data)
    with daemon(site) as running:
        assert running.events("degraded")
        assert len(site.document("devices", "--json")["devices"]) == 1
        refused = site.run("apply", str(layout), "--layout", "halves", "--yes")
        assert refused.returncode == 2
        assert "no changes are made" in refused.stderr
        assert "alloy_agent_degraded 1.0" in running.get("metrics")[1]
        assert database.read_bytes() == bytes(data), "the damaged file was touched"


def test_an_unwritable_state_directory_is_refused(site: Site) -> None:
    """A state directory that cannot be made is one line, before anything is started."""
    site.folder.joinpath("file").write_text("")
    site.globals[1] = str(site.folder / "file" / "state")
    done = site.run("run")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "Traceback" not in done.stderr


def test_the_service_manager_is_told(site: Site, tmp_path: Path) -> None:
    """READY after the first look at the node, WATCHDOG while it lives, RELOADING, STOPPING."""
    path = str(tmp_path / "n")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(path)
        manager.settimeout(60)
        heard: list[str] = []

        def until(word: str) -> None:
            while not any(word in line for line in heard):
                heard.append(manager.recv(4096).decode())

        with daemon(site, NOTIFY_SOCKET=path, WATCHDOG_USEC="400000") as running:
            until("READY=1")
            until("WATCHDOG=1")
            running.signal(signal.SIGHUP)
            until("RELOADING=1")
            until("READY=1")
            running.stop()
            until("STOPPING=1")
    assert "WATCHDOG" not in heard[0]


def test_an_address_in_use_stops_the_start(site: Site) -> None:
    """A metrics address that is taken is one line that names the setting."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        done = site.run("run", ALLOY_METRICS_ADDRESS=address)
    assert done.returncode == 2
    assert "metrics.address" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_stopping_before_ready_is_clean(site: Site) -> None:
    """SIGTERM during the start ends with 0 and leaves no process."""
    running = DaemonProcess(site)
    running.wait_event("starting")
    (told,) = running.events("starting")
    assert told["settings"]["socket_path"] == str(site.state / "agent.sock")  # the one in force
    assert running.stop() == 0
