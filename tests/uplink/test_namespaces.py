"""A network that swallows everything, between real processes in network namespaces of their own."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from alloy_agent.proto import keepalive
from tests.daemon.harness import WAIT_S, Site, daemon, wait_for

pytestmark = [pytest.mark.host, pytest.mark.slow]

IP, IPTABLES = "/usr/sbin/ip", "/usr/sbin/iptables"
LAYOUT = (
    "version: v1\nlayouts:\n  a:\n    - match: {vendor: nvidia}\n      mig: [3g.20gb, 3g.20gb]\n"
)
# Longer than silence, pings and their answer, a reservation and its answer together.
HOLE_S = 2.0 * (keepalive.SILENCE_S + keepalive.PING_INTERVAL_MS / 1e3 + 10.0)


def run(*words: str) -> subprocess.CompletedProcess[str]:
    """Run a command of the host."""
    return subprocess.run(words, capture_output=True, text=True, check=False, timeout=WAIT_S)


class Place:
    """A namespace behind a pair of virtual links, and a brain in it."""

    def __init__(self, folder: Path) -> None:
        number = os.getpid() % 16_000
        self.name = f"alloy-{number}"
        self.near = f"alt{number}"
        base = f"10.231.{number // 64}.{number % 64 * 4}".rsplit(".", 1)
        self.host, self.brain = (f"{base[0]}.{int(base[1]) + n}" for n in (1, 2))
        self.address = f"{self.brain}:7443"
        self.folder = folder

    def __enter__(self) -> Place:
        far = f"{self.near}b"
        for words in (
            (IP, "netns", "add", self.name),
            (IP, "link", "add", self.near, "type", "veth", "peer", "name", far, "netns", self.name),
            (IP, "addr", "add", f"{self.host}/30", "dev", self.near),
            (IP, "link", "set", self.near, "up"),
            (*self.inside(IP, "addr", "add", f"{self.brain}/30", "dev", far),),
            (*self.inside(IP, "link", "set", far, "up"),),
            (*self.inside(IP, "link", "set", "lo", "up"),),
        ):
            done = run(*words)
            if done.returncode != 0:
                self.__exit__()
                pytest.skip(f"{' '.join(words)}: {done.stderr.strip()}")
        return self

    def __exit__(self, *_: object) -> None:
        run(IP, "netns", "del", self.name)
        run(IP, "link", "del", self.near)

    def inside(self, *words: str) -> tuple[str, ...]:
        """Return a command that runs in the namespace."""
        return (IP, "netns", "exec", self.name, *words)

    def swallow(self, chain: str, *, on: bool) -> None:
        """Drop every packet on its way in or out of the namespace, or let them pass again."""
        side = "-i" if chain == "INPUT" else "-o"
        flag = "-I" if on else "-D"
        words = (IPTABLES, flag, chain, side, f"{self.near}b", "-j", "DROP")
        done = run(*self.inside(*words))
        if done.returncode != 0:
            pytest.skip(f"{' '.join(words)}: {done.stderr.strip()}")

    @contextlib.contextmanager
    def serving(self) -> Iterator[None]:
        """Have a brain in the namespace meanwhile."""
        argv = self.inside(
            sys.executable, "-m", "alloy_brain", "serve", "--listen", "0.0.0.0:7443", "--insecure",
            "--ledger", str(self.folder / "brain.db"),
        )  # fmt: skip
        with (
            (self.folder / "brain.log").open("wb") as log,
            subprocess.Popen(argv, stderr=log, stdout=log) as brain,
        ):
            try:
                yield
            finally:
                brain.kill()

    def ask(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run one command of the brain's beside it."""
        python = (sys.executable, "-m", "alloy_brain", words[0], "--brain", "127.0.0.1:7443")
        return run(*self.inside(*python, *words[1:]))

    def connected(self) -> bool:
        """Whether the brain hears the node."""
        done = self.ask("nodes", "--json")
        found = json.loads(done.stdout)["nodes"] if done.returncode == 0 else []
        return any(node.get("connected") for node in found)

    def leases(self) -> dict[str, list[str]]:
        """Return the pieces of each lease in the brain's book."""
        found = json.loads(self.ask("leases", "--json").stdout)["leases"]
        return {
            lease["lease"]: [granted["partition"]["id"] for granted in lease["granted"]]
            for lease in found
        }

    def place(self, request: str) -> subprocess.CompletedProcess[str]:
        """Ask for one piece."""
        words = ("--tenant", "t", "--request", request, "--profile", "3g*", "--json")
        return self.ask("place", *words)


def placed(place: Place, request: str) -> bool:
    """Whether a request has its piece."""
    return place.place(request).returncode == 0


def held(site: Site) -> set[str]:
    """Return the partitions that the node says somebody has."""
    return {str(p["id"]) for p in site.partitions() if p["tenant"]}


def agreed(site: Site, place: Place) -> Any:
    """Return the brain's book once the node's is the same."""
    book = place.leases()
    pieces = [piece for lease in book.values() for piece in lease]
    assert len(pieces) == len(set(pieces)), f"one piece in two leases: {book}"
    return book if set(pieces) == held(site) else None


@pytest.mark.parametrize("ways", [("INPUT", "OUTPUT"), ("INPUT",)], ids=["both ways", "one way"])
def test_a_black_hole_of_minutes_grants_nothing_twice_and_loses_nothing(
    tmp_path: Path, ways: tuple[str, ...]
) -> None:
    """Longer than every time-out, leases stay, nothing new is granted, and both books agree after.

    One way: the brain hears nothing of the node, whose packets are lost, while its own arrive.
    """
    if os.geteuid() != 0 or not Path(IP).exists() or not Path(IPTABLES).exists():
        pytest.skip("needs root, ip and iptables")
    site = Site(tmp_path, "2xA100-SXM4-40GB")
    layout = tmp_path / "layout.yaml"
    layout.write_text(LAYOUT)
    assert site.run("apply", str(layout), "--yes").returncode == 0
    site.environment |= {"ALLOY_BRAIN_INSECURE": "true", "ALLOY_NODE_NAME": "one"}
    with Place(tmp_path) as place, place.serving():
        address = {"ALLOY_BRAIN_ADDRESS": place.address}
        with daemon(site, **address) as agent:
            wait_for("the node", place.connected, within_s=180.0)
            wait_for("a lease", lambda: place.place("r-0").returncode == 0)
            before = wait_for("one book", lambda: agreed(site, place))
            began_s = time.monotonic()
            for chain in ways:
                place.swallow(chain, on=True)
            late = [place.place(f"late-{number}") for number in range(2)]
            agent.wait_event("brain_unavailable")
            wait_for("the brain to miss the node", lambda: not place.connected())
            while time.monotonic() - began_s < HOLE_S:  # the hole itself, not what is judged
                time.sleep(1.0)
            assert all(done.returncode != 0 for done in late)
            assert place.place("in-the-hole").returncode == 1
            assert held(site) == {piece for lease in before.values() for piece in lease}
            for chain in ways:
                place.swallow(chain, on=False)
            wait_for("the node again", place.connected, within_s=180.0)
            agent.wait_event("brain_connected", count=2)
            after = wait_for("one book again", lambda: agreed(site, place), within_s=180.0)
            assert set(before) <= set(after)
            for number in range(4):
                wait_for("the rest", partial(placed, place, f"r-{number}"))
            full = wait_for("a full book", lambda: agreed(site, place))
            assert sum(map(len, full.values())) == 4
            assert place.place("r-4").returncode == 1
            assert agreed(site, place) == full
