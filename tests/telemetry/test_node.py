"""A real daemon over simulated silicon: faults, stalls, restarts, re-made partitions, drains."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from alloy_agent.control import ControlClient
from alloy_agent.errors import AlloyError
from alloy_agent.proto import agent_pb2 as pb
from alloy_agent.silicon.build import open_machine
from alloy_agent.silicon.machine import Machine
from alloy_agent.silicon.spec import parse_specs
from alloy_agent.silicon.state import Client, Fault
from tests.daemon.harness import DaemonProcess, Site, daemon, wait_for

FAKE = "2xH100-SXM5-80GB"
LAYOUT = """
version: v1
layouts:
  a:
    - match: {vendor: nvidia}
      mig: [1g.10gb, 1g.10gb]
"""


@pytest.fixture
def site(tmp_path: Path) -> Site:
    """Give a node with two simulated H100."""
    site = Site(tmp_path, FAKE)
    site.environment["ALLOY_TELEMETRY_PERIOD_S"] = "200ms"
    site.environment["ALLOY_TELEMETRY_KERNEL_LOG"] = "false"
    site.environment["ALLOY_OBSERVE_CALL_DEADLINE_S"] = "300ms"
    return site


def machine(site: Site) -> Machine:
    """Return the silicon that the daemon's worker has, to change it from outside."""
    return open_machine(parse_specs((FAKE,)), site.state)


def page(running: DaemonProcess) -> str:
    """Return the metrics page."""
    status, body = running.get("metrics")
    assert status == 200
    return body


def wait_page(running: DaemonProcess, what: str, holds: Callable[[str], object]) -> str:
    """Return the page once something holds on it."""
    found: list[str] = []

    def look() -> bool:
        found[:] = [page(running)]
        return bool(holds(found[0]))

    wait_for(what, look)
    return found[0]


def apply(site: Site, text: str = LAYOUT) -> None:
    """Make a layout so."""
    path = site.folder / "layout.yaml"
    path.write_text(text)
    done = site.run("apply", str(path), "--yes")
    assert done.returncode == 0, done.stderr


def state_of(device: str, state: str) -> str:
    """Return the line that says that a device is in a state."""
    return f'alloy_health_state{{device="{device}",state="{state}"}} 1.0'


def closed(subject: str, gate: str) -> str:
    """Return the line that says that a gate is closed."""
    return f'alloy_gate{{subject="{subject}",gate="{gate}",state="closed"}} 1.0'


def test_four_faults_in_one_tick_are_four_and_survive_a_restart(site: Site) -> None:
    """62, 45, 31, 31 at once: counted 1, 1, 2, the gate closes, and a restart changes nothing."""
    with daemon(site) as running:
        silicon = machine(site)
        gpu = silicon.state.devices[0].id
        wait_page(running, "the device", lambda body: state_of(gpu, "ok") in body)
        for code in ("xid:62", "xid:45", "xid:31", "xid:31"):
            silicon.inject_event(gpu, code)
        counted = [
            f'alloy_device_fault_events_total{{device="{gpu}",code="xid:{code}"}} {times}'
            for code, times in (("62", "1.0"), ("45", "1.0"), ("31", "2.0"))
        ]
        wait_page(running, "the faults", lambda body: all(line in body for line in counted))
        body = wait_page(running, "the gate", lambda body: closed(gpu, "health") in body)
        assert state_of(gpu, "failed") in body
        assert 'code="xid:62",class="reset",action="reset",scope="device"' in body
        assert running.get("healthz")[0] == 200
        assert running.stop() == 0
    with daemon(site) as running:
        body = wait_page(running, "the gate", lambda body: closed(gpu, "health") in body)
        assert all(line in body for line in counted)
        assert state_of(gpu, "failed") in body


def test_a_read_that_never_returns_costs_its_own_device(site: Site) -> None:
    """Device 0 blocks for ever: its gate closes, the other stays fresh, the agent stays well."""
    with daemon(site) as running:
        silicon = machine(site)
        first, second = (entry.id for entry in silicon.state.devices)
        wait_page(running, "the devices", lambda body: state_of(second, "ok") in body)
        key = silicon.add_fault(Fault(device="#0", call="*", action="hang"))
        try:
            wait_page(running, "the closed gate", lambda body: closed(first, "health") in body)
            power = re.compile(rf'signal="alloy_device_power_watts",subject="{second}"}} 0\.\d+\n')

            def others_are_fresh(body: str) -> bool:
                stalled = f'alloy_probe_stalled_seconds{{device="{first}"}}' in body
                return stalled and state_of(second, "ok") in body and bool(power.search(body))

            wait_page(running, "the stall, and a fresh neighbour", others_are_fresh)
            assert running.get("healthz")[0] == 200
        finally:
            silicon.remove_fault(key)
        assert running.stop() == 0


def test_a_stall_at_the_start_blocks_nothing(site: Site) -> None:
    """Blocked before the agent starts: the other device is seen, the stalled one is told."""
    silicon = machine(site)
    first, second = (entry.id for entry in silicon.state.devices)
    key = silicon.add_fault(Fault(device="#0", call="*", action="hang"))
    try:
        with daemon(site) as running:
            body = wait_page(
                running,
                "the closed gate",
                lambda body: closed(first, "health") in body and state_of(second, "ok") in body,
            )
            assert closed(second, "health") not in body
    finally:
        silicon.remove_fault(key)


def test_a_partition_made_anew_is_metered_and_shown_anew(site: Site) -> None:
    """Under the same place for another tenant: another generation, another account."""
    with daemon(site) as running:
        apply(site)
        (one, *_) = site.partitions()
        wait_page(running, "the series", lambda body: f'partition="{one["id"]}"' in body)
        client = ControlClient.connect(site.state / "agent.sock")
        assert client is not None
        client.document(pb.BrainMessage(access=pb.Access(partition=one["id"], tenant="acme")))
        used = f'metering_allocated_seconds_total{{partition="{one["id"]}",generation="1"'
        wait_page(running, "the account", lambda body: used + ',tenant="acme"' in body)
        release = pb.Access(partition=one["id"], tenant="acme", release=True)
        client.document(pb.BrainMessage(access=release))
        wait_page(running, "the end of the account", lambda body: used not in body)
        apply(site, LAYOUT.replace("[1g.10gb, 1g.10gb]", "[]"))
        wait_page(running, "their end", lambda body: f'partition="{one["id"]}"' not in body)
        apply(site)
        again = f'partition="{one["id"]}",generation="2"'
        wait_page(running, "the new series", lambda body: again in body)
        client.document(pb.BrainMessage(access=pb.Access(partition=one["id"], tenant="bolt")))
        mark = f'partition="{one["id"]}",generation="2",tenant="bolt"'
        wait_page(running, "the new account", lambda body: mark in body)
        client.close()
    lines = [json.loads(line) for line in site.run("usage", "--format", "json").stdout.splitlines()]
    rows = [line["row"] for line in lines if line["row"]["partition"]]
    assert [(r["tenant"], r["generation"], r["final"]) for r in rows] == [
        ("acme", 1, True),
        ("bolt", 2, False),
    ]
    for row in rows:
        parts = row["active_ns"] + row["idle_ns"] + row["unobserved_ns"]
        assert parts == row["allocated_ns"]


def test_drain_and_undrain_through_the_socket(site: Site) -> None:
    """The answer says what is reached, the gate closes and opens, a stale session is refused."""
    with daemon(site) as running:
        apply(site)
        gpu = machine(site).state.devices[0].id
        wait_page(running, "the device", lambda body: state_of(gpu, "ok") in body)
        client = ControlClient.connect(site.state / "agent.sock")
        assert client is not None
        wish = pb.Drain(subject=gpu, session="s1", reason="new fan")
        answer = json.loads(client.document(pb.BrainMessage(drain=wish)))
        assert answer["drain"]["scope"] == "device"
        assert len(answer["drain"]["takes"]) == 2
        wait_page(running, "the drain", lambda body: closed(gpu, "drain") in body)
        with pytest.raises(AlloyError, match="s0"):
            client.document(pb.BrainMessage(undrain=pb.Undrain(subject=gpu, session="s0")))
        client.document(pb.BrainMessage(undrain=pb.Undrain(subject=gpu, session="s1")))
        wait_page(running, "its end", lambda body: closed(gpu, "drain") not in body)
        client.close()


def test_top_shows_what_the_daemon_knows(site: Site) -> None:
    """In a pipe: one picture within 80 columns, with tenants, activity and gates."""
    with daemon(site) as running:
        apply(site)
        silicon = machine(site)
        gpu = silicon.state.devices[0]
        load = Client(pid=4711, device=gpu.id, instance=gpu.instances[0].id, load_ratio=0.5)
        silicon.start_process(load)
        wait_page(running, "activity", lambda body: "compute_active_ratio{" in body)

        def busy() -> dict[str, Any] | None:
            top = site.document("top", "--json")
            return top if any((p["active_ratio"] or 0) > 0.3 for p in top["partitions"]) else None

        top = wait_for("activity in top", busy)
        assert {p["gate"] for p in top["partitions"]} <= {"open", "unknown"}
        shown = site.run("top", "--once", COLUMNS="80").stdout
        assert max(map(len, shown.splitlines())) <= 80
        assert "#0 1g.10gb@" in shown
    alone = site.run("top", "--once", "--sort", "active").stdout
    assert "#1 1g.10gb@" in alone
