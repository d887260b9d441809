"""The stage: a brain in this process, an agent process for each node, and all of it removed again.

Each agent has a state directory, a socket and simulated silicon of its own. This host's cores join
as a fourth node where the user is root and a core can be spared.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from alloy_agent.errors import AlloyError
from alloy_agent.host import interpreter
from alloy_agent.model import Value

if TYPE_CHECKING:
    from alloy_agent.silicon.machine import Machine
    from alloy_brain.client import BrainClient
    from alloy_brain.embedded import EmbeddedBrain

T = TypeVar("T")
WAIT_S = 40.0
STOP_S = 8.0

H100 = """
    - match: {vendor: nvidia, index: 0}
      mig: [7g.80gb]
    - match: {vendor: nvidia, index: 1}
      mig: [4g.40gb, 3g.40gb]
    - match: {vendor: nvidia, index: 2}
      mig: [3g.40gb, 2g.20gb, 1g.10gb, 1g.10gb]
    - match: {vendor: nvidia, index: 3}
      mig: [3g.40gb, 2g.20gb, 1g.10gb, 1g.10gb]
    - match: {vendor: nvidia, index: 4}
      mig: [2g.20gb, 2g.20gb, 2g.20gb]
    - match: {vendor: nvidia, index: 5}
      mig: [1g.10gb, 1g.10gb, 1g.10gb, 1g.10gb, 1g.10gb, 1g.10gb, 1g.10gb]
"""
MI300X = """
    - match: {vendor: amd, index: 0}
      compute: CPX
    - match: {vendor: amd, index: 1}
      compute: CPX
"""
TRN2 = """
    - match: {vendor: neuron, index: 0}
      cores: [2, 2]
    - match: {vendor: neuron, index: 1}
      cores: [1, 1, 2]
    - match: {vendor: neuron, index: 2}
      cores: [4]
"""
CPU = """
    - match: {vendor: cpu, numa: 0}
      cores: [1]
      memory: [64MiB]
"""


class Plot(Value, frozen=True, kw_only=True):
    """One node of the demo: its silicon, and how it is cut."""

    name: str
    what: str
    fake: str
    layout: str


PLOTS = (
    Plot(name="rack1-h100", what="8 x H100 80GB", fake="8xH100-SXM5-80GB", layout=H100),
    Plot(name="rack1-mi300x", what="8 x MI300X", fake="8xMI300X", layout=MI300X),
    Plot(name="rack1-trn2", what="trn2.48xlarge", fake="trn2.48xlarge", layout=TRN2),
)
HOST = Plot(name="this-host", what="this host's cores", fake="", layout=CPU)


class DemoError(AlloyError):
    """The demo cannot go on; what it had started is ended."""


class Agent:
    """One agent process."""

    def __init__(self, plot: Plot, home: Path, process: subprocess.Popen[bytes]) -> None:
        self.plot = plot
        self.home = home
        self.process = process

    @property
    def name(self) -> str:
        """Return the node's name."""
        return self.plot.name

    @property
    def evidence(self) -> Path:
        """Return where its evidence is."""
        return self.home / "state" / "evidence"

    @property
    def log(self) -> Path:
        """Return what it said."""
        return self.home / "agent.log"

    def machine(self) -> Machine:
        """Return the silicon of the node, to do to it what nobody asks the agent for."""
        from alloy_agent.silicon.build import open_machine
        from alloy_agent.silicon.spec import parse_specs

        return open_machine(parse_specs((self.plot.fake,)), self.home / "state")


class Stage:
    """Brain and agents, as a context manager.

    Args:
        keep: A directory to work in and leave behind; None: a temporary one, removed.
    """

    brain: EmbeddedBrain
    client: BrainClient

    def __init__(self, keep: str | None = None) -> None:
        self._stack = contextlib.ExitStack()
        self._keep = keep
        self.home = Path()
        self.sockets = Path()
        self.agents: dict[str, Agent] = {}
        self.cgroup = f"alloy-demo-{os.getpid()}"
        self.why_no_host = ""

    def __enter__(self) -> Stage:
        with contextlib.ExitStack() as stack:
            if self._keep:
                self.home = Path(self._keep).absolute()
                self.home.mkdir(parents=True, exist_ok=True)
            else:
                self.home = Path(tempfile.mkdtemp(prefix="alloy-demo-"))
                stack.callback(shutil.rmtree, self.home, ignore_errors=True)
            # A socket's path has 107 bytes at most, wherever the home is.
            self.sockets = Path(tempfile.mkdtemp(prefix="alloy-", dir="/tmp"))
            stack.callback(shutil.rmtree, self.sockets, ignore_errors=True)
            self._start_brain(stack)
            stack.callback(self._remove_host)
            stack.callback(self.stop)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def _start_brain(self, stack: contextlib.ExitStack) -> None:
        from alloy_brain.client import BrainClient
        from alloy_brain.embedded import EmbeddedBrain
        from alloy_brain.server import BrainSettings

        handler = logging.FileHandler(self.home / "brain.log")
        logger = logging.getLogger("alloy_brain")
        logger.addHandler(handler)
        logger.propagate = False
        logger.setLevel(logging.INFO)
        stack.callback(handler.close)
        stack.callback(logger.removeHandler, handler)
        serving = BrainSettings(
            address="127.0.0.1:0",
            ledger=str(self.home / "brain.db"),
            name="demo",
            telemetry_interval_ms=200,
        )
        self.brain = stack.enter_context(EmbeddedBrain(serving))
        self.client = stack.enter_context(BrainClient(self.brain.address))

    def start_agents(self) -> None:
        """Start an agent for each node."""
        self.why_no_host = why_no_host()
        plots = PLOTS if self.why_no_host else (*PLOTS, HOST)
        for plot in plots:
            self.agents[plot.name] = self._agent(plot)

    def _agent(self, plot: Plot) -> Agent:
        home = self.home / plot.name
        home.mkdir()
        layout = home / "layout.yaml"
        layout.write_text(f"version: v1\nlayouts:\n  demo:{plot.layout}", encoding="utf-8")
        fake = f'["{plot.fake}"]' if plot.fake else "[]"
        settings = home / "agent.yaml"
        settings.write_text(
            f"node_name: {plot.name}\n"
            f"state_dir: {home / 'state'}\n"
            f"socket_path: {self.sockets / plot.name}\n"
            f"fake: {fake}\n"
            f"backends: {{cpu: {'off' if plot.fake else 'on'}, nvidia: off, amd: off, "
            "neuron: off}\n"
            f"cpu: {{cgroup_root: {self.cgroup}}}\n"
            f"brain: {{address: '{self.brain.address}', rate_hz: 5}}\n"
            "sampler: {rate_hz: 2}\n"
            "audit: {period_s: 2s, poll_period_s: 250ms}\n"
            f"layout: {{file: {layout}}}\n"
            "metrics: {enabled: false}\n"
            "log: {format: json}\n",
            encoding="utf-8",
        )
        with (home / "agent.log").open("wb") as log:
            process = subprocess.Popen(
                interpreter.module("alloy_agent.cli.demo.agent", str(settings)),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=interpreter.environment(),
                cwd=interpreter.FOLDER,
            )
        return Agent(plot, home, process)

    def command(self, agent: Agent, *words: str) -> str:
        """Return what one command of the agent's own command line printed."""
        settings = agent.home / "agent.yaml"
        done = subprocess.run(
            interpreter.module("alloy_agent", "--config", str(settings), *words),
            capture_output=True,
            text=True,
            check=False,
            timeout=WAIT_S,
            env=interpreter.environment(),
            cwd=interpreter.FOLDER,
        )
        if done.returncode != 0:
            raise DemoError(f"{agent.name}: {' '.join(words[:1])}: {done.stderr.strip()}")
        return done.stdout

    def until(self, look: Callable[[], T | None], what: str, wait_s: float = WAIT_S) -> T:
        """Return what a look finds, looking until it finds something.

        Raises:
            DemoError: It never did.
        """
        until_s = time.monotonic() + wait_s
        while time.monotonic() < until_s:
            found = look()
            if found:
                return found
            for agent in self.agents.values():
                if agent.process.poll() is not None:
                    last = agent.log.read_text(errors="replace").strip().splitlines()[-1:]
                    raise DemoError(f"agent {agent.name} ended: {''.join(last)[:500]}")
            time.sleep(0.05)
        raise DemoError(f"waited {wait_s:.0f} s for {what}", cure="read agent.log with --keep DIR")

    def stop(self) -> None:
        """End the agents; their state stays until the stage is left."""
        for agent in self.agents.values():
            if agent.process.poll() is None:
                agent.process.send_signal(signal.SIGTERM)
        until_s = time.monotonic() + STOP_S
        for agent in self.agents.values():
            try:
                agent.process.wait(max(0.1, until_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                os.killpg(agent.process.pid, signal.SIGKILL)
                agent.process.wait()

    def _remove_host(self) -> None:
        """Give this host's core back: the partition, then the group it was in."""
        agent = self.agents.get(HOST.name)
        if agent is None:
            return
        clear = agent.home / "clear.yaml"
        text = "version: v1\nlayouts:\n  clear:\n    - match: {vendor: cpu}\n      cores: []\n"
        clear.write_text(text, encoding="utf-8")
        with contextlib.suppress(AlloyError, subprocess.TimeoutExpired):
            self.command(agent, "apply", str(clear), "--yes")
        for procs in Path("/sys/fs/cgroup").glob(f"**/{self.cgroup}"):
            with contextlib.suppress(OSError):
                procs.rmdir()


def why_no_host() -> str:
    """Return why this host's own cores take no part; empty when they do."""
    if os.geteuid() != 0:
        return "this user may not make control groups: run as root to see a real tenant caught"
    if len(os.sched_getaffinity(0)) < 2:
        return "it has one core, which stays with the system"
    try:
        from alloy_agent.host.cgroups import detect

        if detect().of("cpuset") is None:
            return "there is no cpuset controller"
    except (AlloyError, OSError) as exc:
        return str(exc)
    return ""
