"""The story: what happens on the stage, each claim of it looked at before it is made."""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from alloy_agent.cli.demo.stage import HOST, Agent, DemoError, Stage
from alloy_agent.errors import AlloyError
from alloy_agent.host import interpreter
from alloy_agent.proto import agent_pb2 as pb
from alloy_agent.proto import placement_pb2 as pl

if TYPE_CHECKING:
    from alloy_brain.client import BrainClient

TENANTS = ("vision", "search", "speech", "lab")
STREAM = 30
STEP_OUT_PID = 4242  # of the simulation


class Claim:
    """One sentence of the story, and whether it holds."""

    def __init__(self, chapter: str, text: str, holds: bool, seen: str) -> None:
        self.chapter = chapter
        self.text = text
        self.holds = holds
        self.seen = seen


class Told:
    """Everything the report shows."""

    def __init__(self) -> None:
        self.claims: list[Claim] = []
        self.began_wall_s = time.time()
        self.took_s = 0.0
        self.place_ms: list[float] = []
        self.nodes: list[dict[str, Any]] = []
        self.used: list[tuple[float, dict[str, float]]] = []  # share of pieces lent, over time
        self.gates: list[tuple[str, str, str]] = []  # device, state, why
        self.tiers: list[tuple[float, str, str, str, str]] = []  # when, where, from, to, why
        self.race: dict[str, str] = {}
        self.decision: dict[str, Any] = {}
        self.evidence: list[tuple[str, int, int, bool]] = []
        self.notes: list[str] = []

    @property
    def holds(self) -> bool:
        """Whether every claim does."""
        return bool(self.claims) and all(claim.holds for claim in self.claims)


class Teller:
    """Says what happens: lines in a pipe, a growing list on a terminal."""

    def __init__(self, chapter: Callable[[str], None], line: Callable[[str, bool], None]) -> None:
        self.chapter = chapter
        self.line = line


@contextlib.contextmanager
def teller() -> Iterator[Teller]:
    """Give a teller for standard output."""
    if not sys.stdout.isatty():
        yield Teller(
            lambda title: print(title, flush=True),
            lambda text, holds: print(f"  {'ok ' if holds else 'NOT'} {text}", flush=True),
        )
        return
    from rich.console import Console

    console = Console(highlight=False)
    with console.status("starting") as status:

        def chapter(title: str) -> None:
            console.print(f"[bold]{title}[/bold]")
            status.update(title)

        def line(text: str, holds: bool) -> None:
            from rich.text import Text

            mark = Text("  ✔ " if holds else "  ✘ ", style="green" if holds else "bold red")
            console.print(mark.append(text, style="default"))

        yield Teller(chapter, line)


class Play:
    """The story in progress."""

    def __init__(self, stage: Stage, tell: Teller) -> None:
        self.stage = stage
        self.tell = tell
        self.told = Told()
        self.began_s = time.monotonic()
        self.leases: dict[str, pl.PlaceReply] = {}
        self.findings: list[tuple[float, str, pb.Finding]] = []
        self._chapter = ""

    @property
    def client(self) -> BrainClient:
        """Return the brain as a client sees it."""
        return self.stage.client

    def chapter(self, title: str) -> None:
        """Begin a part of the story."""
        self._chapter = title
        self.tell.chapter(title)

    def claim(self, text: str, holds: object, seen: str = "") -> None:
        """Make a claim; `seen` is what it rests on."""
        self.told.claims.append(Claim(self._chapter, text, bool(holds), seen))
        self.tell.line(f"{text}{f' ({seen})' if seen else ''}", bool(holds))

    def now_s(self) -> float:
        """Return seconds since the story began."""
        return time.monotonic() - self.began_s

    def look(self) -> None:
        """Note how much of each node is lent."""
        shares = {
            node.node: node.leased_count / max(1, node.partition_count)
            for node in self.client.nodes()
        }
        self.told.used.append((self.now_s(), shares))


def play(stage: Stage, tell: Teller) -> Told:
    """Return what was told."""
    story = Play(stage, tell)
    stop = threading.Event()
    threading.Thread(target=_watch, args=(story, stop), daemon=True).start()
    try:
        for chapter in (_nodes, _stream, _race, _stale, _step_out, _ill, _evidence):
            chapter(story)
    except AlloyError as exc:
        story.claim("the story could be told to its end", False, str(exc))
    finally:
        stop.set()
    story.told.took_s = story.now_s()
    return story.told


def _watch(story: Play, stop: threading.Event) -> None:
    """Collect the findings that the agents send to the brain."""
    import grpc

    try:
        for event in story.client.watch(("finding",)):
            story.findings.append((story.now_s(), event.node, event.finding))
            if stop.is_set():
                return
    except (grpc.RpcError, ValueError):
        return  # the brain has left the stage


# --- chapters -------------------------------------------------------------------------------------


def _nodes(story: Play) -> None:
    """Agents attach, and cut their devices."""
    stage = story.stage
    story.chapter("Nodes attach and are cut into partitions")
    stage.start_agents()
    wanted = {agent.name: _pieces(agent) for agent in stage.agents.values()}

    def settled() -> list[pl.NodeSummary] | None:
        nodes = stage.client.nodes(full=True)
        judged = all(p.tier for n in nodes for p in n.partitions)
        cut = {n.node: n.partition_count for n in nodes if n.connected} == wanted
        return nodes if cut and judged else None

    nodes = stage.until(settled, f"every node to be cut and audited ({wanted})")
    for node in nodes:
        kinds = collections.Counter(p.profile for p in node.partitions)
        tiers = collections.Counter(pb.Tier.Name(p.tier)[5:].lower() for p in node.partitions)
        what = stage.agents[node.node].plot.what
        story.claim(
            f"{node.node} ({what}) is cut into {node.partition_count}, all audited",
            node.partition_count == wanted[node.node],
            ", ".join(f"{count} {tier}" for tier, count in sorted(tiers.items())),
        )
        story.told.nodes.append(
            {"node": node.node, "what": what, "kinds": dict(kinds), "tiers": dict(tiers)}
        )
    if stage.why_no_host:
        story.told.notes.append(f"This host's own cores take no part: {stage.why_no_host}.")
    story.look()


def _pieces(agent: Agent) -> int:
    """Return how many partitions a node has once its layout is in force."""
    return {"rack1-h100": 23, "rack1-mi300x": 22, "rack1-trn2": 6, HOST.name: 1}[agent.name]


def _stream(story: Play) -> None:
    """Requests of four tenants arrive and are placed."""
    story.chapter("Requests are placed")
    _gang(story)
    chance = random.Random(7)  # noqa: S311 - the same story every time
    pieces: list[tuple[str, str]] = []
    for number in range(STREAM):
        demand = chance.choice(
            (
                pl.Demand(count=1, vendor=pb.VENDOR_NVIDIA, memory_bytes=8 << 30, profile="1g*"),
                pl.Demand(count=1, vendor=pb.VENDOR_NVIDIA, memory_bytes=18 << 30, profile="2g*"),
                pl.Demand(count=1, vendor=pb.VENDOR_AMD, profile="CPX"),
                pl.Demand(count=1, vendor=pb.VENDOR_NEURON, compute_units=1),
            )
        )
        reply = _place(story, f"stream-{number}", chance.choice(TENANTS), demand)
        if reply is not None:
            pieces.extend((g.node, g.partition.id) for g in reply.granted)
        if number % 3 == 0:
            story.look()
    story.claim(
        f"{len(pieces)} of {STREAM} requests are placed, the others are told why",
        len(pieces) >= STREAM // 2,
        f"median {sorted(story.told.place_ms)[len(story.told.place_ms) // 2]:.1f} ms",
    )
    story.claim(
        "no piece was given twice", len(pieces) == len(set(pieces)), f"{len(pieces)} pieces"
    )
    refusal = _refusal(story, "impossible", pl.Demand(count=1, memory_bytes=4 << 40))
    story.claim(
        "a request that can never be met is refused with what would be possible",
        refusal[0] == "INVALID_ARGUMENT" and refusal[2],
        refusal[1],
    )
    story.look()


def _gang(story: Play) -> None:
    """Ask for the eight pieces of one accelerator, all or none."""
    gang = pl.Demand(count=8, vendor=pb.VENDOR_AMD, profile="CPX")
    reply = _place(story, "gang", "training", gang, pb.TIER_ENFORCED, pl.LOCALITY_ONE_DEVICE)
    devices = {granted.device for granted in reply.granted} if reply is not None else set()
    story.claim(
        "a gang of eight gets the eight pieces of one accelerator, under one lease",
        reply is not None and len(reply.granted) == 8 and len(devices) == 1,
        "" if reply is None else f"lease {reply.lease}",
    )


def _place(  # noqa: PLR0913, PLR0917 - what a request says
    story: Play,
    request: str,
    tenant: str,
    demand: pl.Demand,
    tier: pb.Tier.ValueType = pb.TIER_UNSPECIFIED,
    locality: pl.Locality.ValueType = pl.LOCALITY_ANY,
) -> pl.PlaceReply | None:
    """Return what a request got, or None where it was refused for now."""
    from alloy_brain.client import PlacementError

    asked = pl.PlaceRequest(
        request=request, tenant=tenant, demands=[demand], tier_floor=tier, locality=locality
    )
    began_s = time.monotonic()
    try:
        reply = story.client.place(asked)
    except PlacementError as exc:
        if exc.code != "RESOURCE_EXHAUSTED":
            raise DemoError(f"request {request}: {exc.code}: {exc}") from exc
        return None
    finally:
        story.told.place_ms.append((time.monotonic() - began_s) * 1e3)
    story.leases[request] = reply
    return reply


def _refusal(
    story: Play,
    request: str,
    demand: pl.Demand,
    tier: pb.Tier.ValueType = pb.TIER_UNSPECIFIED,
) -> tuple[str, str, tuple[str, ...]]:
    """Return the status of a request that is refused, why, and what would be possible."""
    from alloy_brain.client import PlacementError

    try:
        asked = pl.PlaceRequest(
            request=request, tenant="lab", demands=[demand], tier_floor=tier, dry_run=True
        )
        story.client.place(asked)
    except PlacementError as exc:
        return exc.code, exc.message, exc.possible
    return "OK", "it was placed", ()


def _race(story: Play) -> None:
    """Two requests want the only piece of its kind at the same moment."""
    story.chapter("Two requests race for one piece")
    from alloy_brain.client import PlacementError

    start = threading.Barrier(2)

    def run(tenant: str) -> tuple[str, pl.PlaceReply | PlacementError]:
        demand = pl.Demand(count=1, profile="7g.80gb")
        asked = pl.PlaceRequest(request=f"race-{tenant}", tenant=tenant, demands=[demand])
        start.wait()
        try:
            return tenant, story.client.place(asked)
        except PlacementError as exc:
            return tenant, exc

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(run, ("red", "blue")))
    won = [(t, a) for t, a in answers if isinstance(a, pl.PlaceReply)]
    lost = [(t, a) for t, a in answers if isinstance(a, PlacementError)]
    story.claim("exactly one of them gets it", len(won) == 1 and len(lost) == 1)
    if not (won and lost):
        return
    (winner, reply), (loser, refusal) = won[0], lost[0]
    story.claim(
        "the loser is told who was faster",
        reply.lease in refusal.message and refusal.code == "RESOURCE_EXHAUSTED",
        refusal.message,
    )
    story.leases["race"] = reply
    document = json.loads(story.client.explain(lease=reply.lease).document.json)
    story.told.decision = document
    story.told.race = {"winner": winner, "loser": loser, "why": refusal.message}
    story.claim(
        "its decision record, replayed from its snapshots, gives the same choice",
        document["replayed"] and document["choice"]["picked"],
        f"{len(document['candidates'])} candidates on {len(document['snapshots'])} nodes",
    )


def _stale(story: Play) -> None:
    """A decision on an old generation reaches the node."""
    story.chapter("A stale decision fails on the node")
    from alloy_brain.link import LinkDownError

    node = next(n for n in story.client.nodes("rack1-mi300x", full=True))
    piece = next(p for p in node.partitions if not p.lease)
    broker = story.stage.brain.server.broker
    reserve = pb.Reserve(
        lease="l-stale",
        tenant="late",
        partitions=[pb.PartitionRef(id=piece.id, generation=piece.generation + 1)],
        ttl_ms=5000,
    )
    message = pb.BrainMessage(id="stale/reserve", reserve=reserve)
    try:
        reply = story.stage.brain.call(broker.ask(node.node, message))
    except LinkDownError as exc:
        raise DemoError(str(exc)) from exc
    story.claim(
        "the node refuses it and names the generation that holds",
        reply.refusal == pb.REFUSAL_STALE_GENERATION,
        reply.error.message,
    )


def _step_out(story: Play) -> None:
    """A tenant steps out of its partition, is caught, and the tier falls."""
    story.chapter("A tenant steps out of its partition")
    if HOST.name in story.stage.agents:
        _step_out_for_real(story)
    else:
        _step_out_simulated(story)


def _step_out_for_real(story: Play) -> None:
    """Start a process inside this host's partition, then move it out."""
    reply = _place(story, "host", "night", pl.Demand(count=1, vendor=pb.VENDOR_CPU))
    story.claim("a core of this host is leased to tenant night", reply is not None)
    if reply is None:
        return
    agent = story.stage.agents[HOST.name]
    piece = reply.granted[0].partition.id
    worker = "import time\nwhile True: time.sleep(0.01)"
    words = interpreter.module("alloy_agent", "--config", str(agent.home / "agent.yaml"))
    words += ["exec", "--tenant", "night", piece, "--", *interpreter.isolated("-c", worker)]
    tenant = subprocess.Popen(
        words,
        stderr=subprocess.PIPE,
        start_new_session=True,
        env=interpreter.environment(),
        cwd=interpreter.FOLDER,
    )
    try:
        inside = story.stage.until(
            lambda: _groups(tenant.pid) if _in_partition(tenant.pid, story) else None,
            "the tenant to be inside of its partition",
        )
        story.claim(f"process {tenant.pid} runs inside of {piece}", True, inside)
        time.sleep(1.0)  # the audit has seen it inside
        before_s = story.now_s()
        _move_out(tenant.pid, story)
        _caught(story, HOST.name, piece, before_s, f"process {tenant.pid} moved itself out")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(tenant.pid, signal.SIGKILL)
        tenant.wait()


def _groups(pid: int) -> str:
    """Return the control group of a process that names the demo."""
    text = Path(f"/proc/{pid}/cgroup").read_text(encoding="utf-8")
    return next((line for line in text.splitlines() if "alloy-demo" in line), "")


def _in_partition(pid: int, story: Play) -> bool:
    try:
        return story.stage.cgroup in Path(f"/proc/{pid}/cgroup").read_text(encoding="utf-8")
    except OSError:
        return False


def _move_out(pid: int, story: Play) -> None:
    """Move a process out of the demo's control groups, in every hierarchy."""
    from alloy_agent.host.cgroups import detect

    topology = detect()
    for controller in ("cpuset", "memory", "cpu"):
        hierarchy = topology.of(controller)
        if hierarchy is not None and story.stage.cgroup in _groups(pid):
            procs = Path(hierarchy.mount) / "cgroup.procs"
            with contextlib.suppress(OSError):
                procs.write_text(str(pid), encoding="ascii")
    os.sched_setaffinity(pid, os.sched_getaffinity(0))


def _step_out_simulated(story: Play) -> None:
    """Let a process of a Neuron tenant use its neighbour's cores."""
    from alloy_agent.silicon.state import Client

    agent = story.stage.agents["rack1-trn2"]
    node = next(n for n in story.client.nodes(agent.name, full=True))
    pair = [p for p in node.partitions if p.profile == "2c"]
    first = next(p for p in pair if p.start == 0)
    cores = tuple(range(first.start + first.size + 1))
    before_s = story.now_s()
    machine = agent.machine()
    machine.start_process(
        Client(pid=STEP_OUT_PID, device=first.device, cores=cores, name="python3")
    )
    _caught(story, agent.name, first.id, before_s, f"a process took cores {cores}")
    machine.stop_process(STEP_OUT_PID)
    machine.close()


def _caught(story: Play, node: str, piece: str, before_s: float, what: str) -> None:
    """Claim that the brain heard of a lower tier of a piece, and that it counts."""

    def fell() -> tuple[float, pb.Finding] | None:
        for when_s, where, finding in story.findings:
            lower = finding.tier_after > finding.tier_before > 0
            if where == node and finding.subject == piece and when_s > before_s and lower:
                return when_s, finding
        return None

    when_s, finding = story.stage.until(fell, f"a finding about {piece}", 15.0)
    names = [pb.Tier.Name(t)[5:].lower() for t in (finding.tier_before, finding.tier_after)]
    place = f"{node}/{piece}"
    story.told.tiers.append((when_s, place, names[0], names[1], finding.observed))
    story.claim(
        f"it is caught: {what}; the tier falls from {names[0]} to {names[1]}",
        finding.tier_after == pb.TIER_ADVISORY,
        f"after {when_s - before_s:.1f} s: {finding.observed}",
    )

    def known() -> bool:
        found = next(n for n in story.client.nodes(node, full=True))
        return any(p.id == piece and p.tier == finding.tier_after for p in found.partitions)

    story.stage.until(lambda: known() or None, "the brain to know the lower tier", 10.0)
    _closed_to_stronger(story, node, piece, finding.tier_before)


def _closed_to_stronger(story: Play, node: str, piece: str, tier: int) -> None:
    """Claim that a request for the tier of before does not get the piece."""
    device = piece.partition("/")[0]
    demand = pl.Demand(count=1, profile=piece.partition("/")[2].partition("@")[0])
    request = f"stronger-{node}"
    floor: Any = tier
    code, why, _ = _refusal(story, request, demand, floor)
    document = json.loads(story.client.explain(request=request).document.json)
    shut = [
        gate["reason"]
        for one in document["candidates"]
        if (one["node"], one["device"]) == (node, device) and one["tier"] == "advisory"
        for gate in one["gates"]
        if gate["gate"] == "tier" and gate["state"] != "open"
    ]
    story.claim("its tier gate is closed to whoever asks for more", shut, f"{code}: {why}")


def _ill(story: Play) -> None:
    """A device falls ill, and its gate closes."""
    from alloy_agent.silicon.state import Fault

    story.chapter("A device falls ill")
    agent = story.stage.agents["rack1-h100"]
    node = next(n for n in story.client.nodes(agent.name, full=True))
    pair = next(p for p in node.partitions if p.profile == "4g.40gb")
    machine = agent.machine()
    machine.add_fault(Fault(call="gpu.query", device=pair.device, action="error", error="lost"))
    machine.close()
    before_s = story.now_s()

    def shut() -> pb.Device | None:
        found = next(n for n in story.client.nodes(agent.name, full=True))
        device = next(d for d in found.devices if d.id == pair.device)
        return device if device.condition == pb.CONDITION_LOST else None

    device = story.stage.until(shut, f"{pair.device} to be reported lost", 15.0)
    story.claim(
        f"{pair.device} is lost and the brain knows",
        True,
        f"after {story.now_s() - before_s:.1f} s: {device.condition_reason}",
    )
    code, why, _ = _refusal(story, "onto-the-ill", pl.Demand(count=1, profile="4g.40gb"))
    document = json.loads(story.client.explain(request="onto-the-ill").document.json)
    gates = [
        gate
        for one in document["candidates"]
        if one["device"] == pair.device
        for gate in one["gates"]
        if gate["gate"] == "health"
    ]
    for one in document["candidates"]:
        health = next(g for g in one["gates"] if g["gate"] == "health")
        story.told.gates.append(
            (f"{one['node']}/{one['device']}", health["state"], health["reason"])
        )
    story.claim(
        "its health gate is closed: free as it is, nothing is placed on it",
        code == "RESOURCE_EXHAUSTED" and gates and all(g["state"] == "closed" for g in gates),
        why,
    )
    story.look()


def _evidence(story: Play) -> None:
    """Leases are given back, agents stop, and their evidence is verified."""
    from alloy_agent.conformance.evidence import verify

    story.chapter("Leases end, and the evidence is verified")
    tenants = {row.lease: row.tenant for row in story.client.leases()}
    for lease, tenant in tenants.items():
        story.client.release(lease, tenant, "the demo ends")
    left = story.stage.until(
        lambda: "none left" if not story.client.leases() else None, "the leases to end", 15.0
    )
    story.claim(f"all {len(tenants)} leases are given back", True, left)
    story.look()
    story.stage.stop()
    for agent in story.stage.agents.values():
        report = verify(agent.evidence)
        story.told.evidence.append((agent.name, report.records, report.heads, report.ok))
        story.claim(
            f"the evidence of {agent.name} is whole and signed",
            report.ok and report.records > 0 and report.heads > 0,
            f"{report.records} records, {report.heads} signed heads",
        )
    forged = _forged(next(iter(story.stage.agents.values())))
    story.claim("one changed byte in it is found", not forged[0], forged[1])


def _forged(agent: Agent) -> tuple[bool, str]:
    """Return what verification says of a copy of an agent's evidence with one byte changed."""
    import shutil

    from alloy_agent.conformance.evidence import verify

    copy = agent.home / "forged"
    shutil.copytree(agent.evidence, copy)
    path = sorted(copy.glob("*.jsonl"))[0]
    data = bytearray(path.read_bytes())
    at = data.index(b'"', len(data) // 2) - 1
    data[at] = ord("x") if data[at] != ord("x") else ord("y")
    path.write_bytes(bytes(data))
    report = verify(copy)
    text = f"{report.problems[0].kind}: {report.problems[0].text}" if report.problems else "nothing"
    return report.ok, text
