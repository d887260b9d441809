"""Shared devices beneath a daemon: adopted over restarts, audited, told to brains and people."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from alloy_agent.conformance.gate.pages import StatePage
from alloy_agent.conformance.keeper import client
from alloy_agent.control import ControlClient
from alloy_agent.host.cgroupfs import detect
from alloy_agent.proto import agent_pb2 as pb
from tests.daemon import harness
from tests.daemon.harness import DaemonProcess, Site
from tests.rate.conftest import NEIGHBOUR, PRODUCTION
from tests.rate.test_share import SLIPPING, WITHIN_S, built, end_tenants, processes_of

pytestmark = [pytest.mark.host, pytest.mark.slow]

LAYOUT = """
version: v1
layouts:
  shared:
    - match: {vendor: nvidia}
      shared: {production: 1, opportunistic: 2}
"""


def wait_for(what: str, look: Callable[[], Any]) -> Any:
    """Return the first true answer of `look`."""
    return harness.wait_for(what, look, WITHIN_S)


class Share:
    """A daemon on a simulated GPU that is cut into shares, and its tenants."""

    def __init__(self, site: Site, libraries: tuple[Path, Path]) -> None:
        self.site = site
        built(libraries, site.state)
        layout = site.folder / "layout.yaml"
        layout.write_text(LAYOUT, encoding="utf-8")
        assert site.run("apply", str(layout), "--yes").returncode == 0
        self.tenants: list[subprocess.Popen[str]] = []
        self.agent = DaemonProcess(site).ready()
        devices = site.document("devices", "--json")["devices"]
        self.device = str(next(d["id"] for d in devices if d["vendor"] == "nvidia"))
        self.folder = site.state / "share" / self.device

    def start(self, role: str, name: str, program: str) -> subprocess.Popen[str]:
        """Start a tenant through the agent."""
        argv = self.site.command("share", "run", role, "--name", name, self.device, "--")
        process = subprocess.Popen(
            [*argv, sys.executable, "-c", program, "600"],
            env=self.site.environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.tenants.append(process)
        return process

    def view(self) -> dict[str, Any]:
        """Return how the device stands; {} where no keeper tells."""
        found = client.views(self.folder.parent)
        views = [json.loads(msgspec.json.encode(v)) for v in found if v.device == self.device]
        return dict(views[0]) if views else {}

    def told(self, key: str) -> Any:
        """Return something that the keeper tells, once it does."""
        return wait_for(key, lambda: self.view().get(key))

    def tenant(self, name: str) -> dict[str, Any]:
        return next((t for t in self.view().get("tenants", ()) if t["name"] == name), {})

    def launched(self, name: str) -> int:
        """Return the launches on a tenant's page, which is there without a keeper too."""
        with contextlib.suppress(OSError):
            page = StatePage(self.folder / f"{name}.state")
            with contextlib.closing(page):
                return sum(slot.launched for slot in page.slots() or ())
        return 0

    def grows(self, name: str, by: int = 20) -> None:
        """Return when a tenant has launched more than now."""
        before = self.launched(name)
        wait_for(f"launches of {name}", lambda: self.launched(name) >= before + by)

    def judged(self) -> dict[tuple[str, str], str]:
        """Return the verdicts that the daemon's own audit has published, and the tiers."""
        _, text = self.agent.get("metrics")
        found = {}
        for line in text.splitlines():
            if line.startswith("alloy_check_verdict{"):
                labels = dict(part.split("=") for part in line[20 : line.index("}")].split(","))
                key = (labels["check"].strip('"'), labels["subject"].strip('"').partition("/")[2])
                found[key] = labels["verdict"].strip('"')
            elif line.startswith("alloy_partition_tier{") and line.endswith(" 1.0"):
                labels = dict(part.split("=") for part in line[21 : line.index("}")].split(","))
                piece = labels["partition"].strip('"').partition("/")[2]
                found["TIER", piece] = labels["tier"].strip('"')
        return found

    def close(self) -> None:
        for process in self.tenants:
            process.kill()
        end_tenants(self.site.folder)
        for process in self.tenants:
            process.communicate()
        if self.agent.process.poll() is None:
            self.agent.stop()
        wait_for("the end of every process", lambda: not processes_of(self.site.folder))


@pytest.fixture
def share(libraries: tuple[Path, Path]) -> Iterator[Share]:
    if os.geteuid() != 0 or detect().unified is None:
        pytest.skip("needs root and a v2 cgroup tree")
    # a folder with a short name: a socket's path has 107 bytes, and a device's id is long
    with tempfile.TemporaryDirectory(prefix="alloy-") as folder:
        made = Share(Site(Path(folder), "1xH100-SXM5-80GB"), libraries)
        yield made
        made.close()


def frozen(path: str) -> bool:
    tree = detect().unified
    assert tree is not None
    return "frozen 1" in Path(tree.folder(path), "cgroup.events").read_text(encoding="ascii")


def test_a_restarted_agent_thaws_and_adopts(share: Share) -> None:
    """What a killed agent froze launches nothing until the next one thaws it and says so.

    Production goes on meanwhile; both tenants are kept again without being started anew.
    """
    share.start("--production", "p", PRODUCTION)
    share.start("--opportunistic", "n", NEIGHBOUR)
    share.grows("p")
    share.grows("n")
    group = wait_for("the cgroup", lambda: share.tenant("n").get("cgroup"))
    state = share.folder / "n.state"
    with state.open("r+b") as page:  # a page without sense costs the lease, and freezes
        head = page.read(16)
        page.seek(0)
        page.write(b"\0" * 16)
    wait_for("the freeze", lambda: frozen(group))
    keeper = share.told("keeper_pid")
    share.agent.process.send_signal(signal.SIGSTOP)  # so that it cannot thaw in order
    os.kill(keeper, signal.SIGKILL)
    share.agent.kill()
    with state.open("r+b") as page:
        page.write(head)
    stopped = share.launched("n")
    share.grows("p", 200)
    assert frozen(group)
    assert share.launched("n") == stopped
    share.agent = DaemonProcess(share.site)
    wait_for("the thaw", lambda: not frozen(group))
    assert share.agent.wait_event("thawed")["cgroup"] == group
    share.agent.ready()
    wait_for("the tenants", lambda: set(share.view().get("adopted", ())) == {"n", "p"})
    share.grows("n")
    share.grows("p")


def test_a_lease_ends_with_the_agent(share: Share) -> None:
    """When agent and keeper are killed, the neighbour's launches end and production's do not."""
    share.start("--production", "p", PRODUCTION)
    share.start("--opportunistic", "n", NEIGHBOUR)
    share.grows("n")
    share.grows("p")
    keeper = share.told("keeper_pid")
    share.agent.kill()
    wait_for("the keeper's end", lambda: not Path(f"/proc/{keeper}").exists())
    before = share.launched("n")
    share.grows("p", 200)
    between = share.launched("n")
    share.grows("p", 200)
    assert share.launched("n") == between  # what was let through before has long been done
    assert between - before <= 2


def test_an_agent_takes_over_from_a_command(share: Share) -> None:
    """A tenant that was started without an agent is kept by the one that starts later."""
    share.agent.stop()
    share.device, share.folder = "emulated", share.site.state / "share" / "emulated"
    started = share.start("--opportunistic", "n", NEIGHBOUR)
    share.grows("n")
    assert share.told("keeper") == "own"
    share.agent = DaemonProcess(share.site).ready()
    wait_for("the agent's keeper", lambda: share.view().get("keeper") == "agent")
    wait_for("the tenant", lambda: share.view().get("adopted") == ["n"])
    share.grows("n")
    assert started.poll() is None


def test_a_bypass_lowers_the_tier_at_once(share: Share) -> None:
    """A child without the gate fails its check and takes the tier; watchers are told."""
    share.start("--production", "p", PRODUCTION)
    share.start("--opportunistic", "n", NEIGHBOUR)
    wait_for(
        "sound checks",
        lambda: (
            share.judged().get(("BYP-03", "opportunistic-0@0")) == "pass"
            and share.judged().get(("BYP-02", "opportunistic-0@0")) == "pass"
        ),
    )
    wait_for("control", lambda: share.judged().get(("RATE-02", "production-0@0")) == "pass")
    share.start("--opportunistic", "m", SLIPPING)
    wait_for(
        "the failure",
        lambda: share.judged().get(("BYP-03", "opportunistic-1@0")) == "fail",
    )
    judged = share.judged()
    assert judged["TIER", "opportunistic-1@0"] == "advisory"
    assert judged["BYP-03", "opportunistic-0@0"] == "pass"
    wait_for("the failure", lambda: share.judged().get(("RATE-02", "production-0@0")) == "fail")
    client = ControlClient.connect(share.site.state / "agent.sock")
    assert client is not None
    with client:
        for message in client.watch(kinds=("rate_state",)):
            assert message.rate_state.device == share.device
            if any("not beneath the gate" in text for text in message.rate_state.bypasses):
                break


def test_audit_of_vacant_shares_does_not_apply(share: Share) -> None:
    """Without a tenant the checks of shares say nothing, and no keeper runs."""
    result = share.site.document("audit", "--json")
    found = {
        j["check"]: j["verdict"]
        for report in result["partitions"]
        for j in report["judgements"]
        if j["check"].startswith(("RATE-", "BYP-"))
    }
    assert set(found) == {"RATE-01", "RATE-02", *(f"BYP-0{n}" for n in range(1, 6))}
    assert set(found.values()) == {"not_applicable"}
    assert result["shares"] == []
    assert share.view() == {}


def test_a_policy_is_kept_and_obeyed(share: Share) -> None:
    """A policy reaches the keeper, outlives the agent, and is refused where it makes no sense."""
    share.start("--opportunistic", "n", NEIGHBOUR)
    share.grows("n")
    done = share.site.run("share", "policy", share.device, "--budget", "7", "--hold")
    assert done.returncode == 0, done.stderr
    wait_for("the hold", lambda: "holds the neighbours" in share.view().get("held", ""))
    wait_for("the budget", lambda: share.view().get("budget_ratio") == 0.07)
    share.agent.kill()
    share.agent = DaemonProcess(share.site).ready()
    wait_for("the hold", lambda: "holds the neighbours" in share.view().get("held", ""))
    assert share.site.run("share", "policy", share.device).returncode == 0
    wait_for("its end", lambda: share.view().get("held") == "")
    share.grows("n")
    for device, word in (("GPU-none", "GPU-none: no such device"), ("", "device")):
        refused = share.site.run("share", "policy", device, "--budget", "1")
        assert refused.returncode == 2
        assert word in refused.stderr


def test_the_brain_sets_a_policy_and_never_starts_a_tenant(share: Share) -> None:
    """SetRatePolicy is answered with its document or a typed refusal."""
    client = ControlClient.connect(share.site.state / "agent.sock")
    assert client is not None
    with client:
        wish = pb.SetRatePolicy(device=share.device, loss_budget_ratio=0.04, enabled=True)
        document = json.loads(client.rate_policy(wish))
        assert document == {
            "schema": "alloy.rate-policy/v1",
            "device": share.device,
            "loss_budget_ratio": 0.04,
            "enabled": True,
        }
        for wish in (
            pb.SetRatePolicy(device=share.device, loss_budget_ratio=2.0),
            pb.SetRatePolicy(device=share.device, session="s" * 70_000),
            pb.SetRatePolicy(device=share.device, session="a\nb"),
        ):
            call = client._stub.Command(pb.BrainMessage(id="x", set_rate_policy=wish))
            reply = next(m.reply for m in call if m.WhichOneof("body") == "reply")
            assert reply.status == pb.STATUS_REFUSED
            assert reply.refusal == pb.REFUSAL_INVALID
            assert reply.error.kind == "ConfigError"
            assert len(reply.error.message) < 200


def test_what_is_shown(share: Share) -> None:
    """`top`, `/metrics`, `devices` and the report show the tenants and the figures."""
    share.start("--production", "p", PRODUCTION)
    share.start("--opportunistic", "n", NEIGHBOUR)
    share.grows("n")
    wait_for("history", lambda: len(share.view().get("history", {}).get("age_s", ())) > 3)
    wait_for("metrics", lambda: "alloy_share_tenant_leased" in share.agent.get("metrics")[1])
    _, text = share.agent.get("metrics")
    assert f'alloy_share_budget_ratio{{device="{share.device}"}} 0.02' in text
    labels = f'device="{share.device}",tenant="n",role="opportunistic"'
    assert f"alloy_share_tenant_leased{{{labels}}}" in text
    assert f"alloy_share_tenant_launches_total{{{labels}}}" in text
    tenants = {p["id"].partition("/")[2]: p["tenant"] for p in share.site.partitions()}
    assert tenants["production-0@0"] == "p"
    assert tenants["opportunistic-0@0"] == "n"
    client = ControlClient.connect(share.site.state / "agent.sock")
    assert client is not None
    with client:
        top = wait_for(
            "shares in top",
            lambda: next((t for t in [json.loads(client.query("top"))] if t["shares"]), None),
        )
    assert top["shares"][0]["device"] == share.device
    assert {t["name"] for t in top["shares"][0]["tenants"]} == {"p", "n"}
    page = share.site.folder / "report.html"
    share.site.run("audit", "--html", str(page))
    html = page.read_text(encoding="utf-8")
    assert "Shared devices" in html
    assert "<svg" in html


def test_joining_what_cannot_be_shared_is_refused(share: Share) -> None:
    """An unknown device, a full role and a name in use are one line each."""
    share.start("--production", "p", PRODUCTION)
    share.grows("p")
    second = share.start("--production", "q", PRODUCTION)
    assert second.wait(WITHIN_S) == 2
    assert second.stderr is not None
    assert "every production share is held by p" in second.stderr.read()
    done = share.site.run("share", "run", "--opportunistic", "GPU-none", "--", "true")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
