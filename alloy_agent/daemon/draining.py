r"""Drain and undrain as commands, and the others who are told: Slurm, and the operator's hook.

    brain, socket, end of a drain --> Telemetry.drains --> kubernetes (taints, node condition)
                                                       \-> Outlets --> Slurm, hook

An outlet is brought to the drains that are held, rather than told of changes: whatever was missed,
by a crash, a program that failed or a cluster that did not answer, is made up for. Each has a
thread of its own, so that a slow one never delays the other; without outlets there is none.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from alloy_agent.errors import AlloyError
from alloy_agent.model import Scope, Snapshot, Value
from alloy_agent.proto import agent_pb2 as pb
from alloy_agent.telemetry.drains import Drained, Drains

if TYPE_CHECKING:
    from alloy_agent.config import DrainSettings, Settings
    from alloy_agent.daemon.telemetry import Telemetry
    from alloy_agent.store import Store

LOG = logging.getLogger(__name__)

RETRY_MIN_S: Final = 1.0
RETRY_MAX_S: Final = 60.0
LOOK_AGAIN_S: Final = 20.0  # while drained: somebody may have taken our drain back over there
STOP_JOIN_S: Final = 0.2


class DrainDocument(Value, frozen=True, kw_only=True):
    """What a drain or undrain did; `drain` None: it was not drained.

    `also` says who else takes nothing new because of it, where that is more than was asked for.
    """

    schema: str = "alloy.drain/v1"
    drained: bool
    drain: Drained | None
    also: tuple[str, ...] = ()


def slurm_name(settings: Settings) -> str:
    """Return the name of this node in Slurm."""
    return settings.drain.slurm_node or settings.node_name.split(".")[0]


def reaches_beyond(settings: Settings, drain: Drained) -> tuple[str, ...]:
    """Return who else takes nothing new because of a drain, where that is more than its scope."""
    found = []
    if settings.drain.slurm and drain.scope is not Scope.NODE:
        found.append(f"Slurm: node {slurm_name(settings)} as a whole, it knows no smaller piece")
    if settings.kubernetes.enabled and drain.scope is Scope.PARTITION:
        found.append("Kubernetes: every offered piece that overlaps it")
    return tuple(found)


def drain_reply(
    telemetry: Telemetry,
    command: pb.BrainMessage,
    look: Callable[[], Snapshot],
    beyond: Callable[[Drained], tuple[str, ...]] = lambda _: (),
) -> pb.Reply:
    """Return the answer to a drain or undrain, after it was done.

    What a drain reaches is what `look` finds now, not what was seen a while ago.

    Raises:
        ConfigError: There is nothing of that name.
        StaleTokenError: The session is not the one that holds.
    """
    if command.WhichOneof("body") == "drain":
        wish = command.drain
        drain = telemetry.drain(wish.subject, wish.session, wish.reason, look(), wish.ttl_ms / 1000)
        document = DrainDocument(drained=True, drain=drain, also=beyond(drain))
    else:
        back = command.undrain
        undrained = telemetry.undrain(back.subject, back.session, look())
        document = DrainDocument(drained=False, drain=undrained)
    return pb.Reply(
        command_id=command.id,
        status=pb.STATUS_OK,
        document=pb.Document(schema=document.schema, json=msgspec.json.encode(document)),
    )


def in_words(drain: Drained) -> str:
    """Return whose a drain is, until when it holds and why."""
    ends = f", until {stamp(drain.until_wall_s)}" if drain.until_wall_s else ""
    return f"session {drain.session}{ends}: {drain.reason}"


def told(drain: Drained) -> str:
    """Return a drain in one line."""
    what = f"{drain.scope} {drain.subject}" if drain.subject else "node"
    return f"{what}, {in_words(drain)}"


def stamp(wall_s: float) -> str:
    """Return a wall time for people and other programs, in UTC."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(wall_s))


# --- who else is told -----------------------------------------------------------------------------


class Outlet(Protocol):
    """Somebody who is brought to the drains that are held."""

    @property
    def name(self) -> str:
        """For the log."""

    def bring(self, held: Drains) -> None:
        """Bring it there; raises an `AlloyError` where that is to be tried again."""


def outlets_of(settings: Settings, store: Store | None) -> tuple[Outlet, ...]:
    """Return those that the settings name."""
    wanted: DrainSettings = settings.drain
    found: list[Outlet] = []
    if wanted.slurm:
        from alloy_agent.daemon.slurm import Slurm

        found.append(Slurm(wanted.scontrol, slurm_name(settings), wanted.deadline_s))
    if wanted.hook:
        from alloy_agent.daemon.hook import Hook

        found.append(Hook(wanted.hook, wanted.deadline_s, wanted.hook_attempts, store))
    return tuple(found)


class Line:
    """One outlet on a thread of its own: brought to what is held, tried again until it is there.

    Args:
        outlet: Whom to bring.
        held: Returns the drains that are held now.
    """

    def __init__(self, outlet: Outlet, held: Callable[[], Drains]) -> None:
        self._outlet = outlet
        self._held = held
        self._wake = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=outlet.name, daemon=True)

    def start(self) -> None:
        """Begin, with what is held already: a restart may have missed something."""
        self._thread.start()

    def wake(self) -> None:
        """Look again at once: something is drained or taken back."""
        self._wake.set()

    def stop(self) -> None:
        """Ask for the end; a call in hand is left to its deadline."""
        self._stop.set()
        self._wake.set()

    def join(self) -> None:
        """Wait a little for the end."""
        self._thread.join(STOP_JOIN_S)

    def _run(self) -> None:
        failures = 0
        while not self._stop.is_set():
            self._wake.clear()
            held = self._held()
            try:
                self._outlet.bring(held)
            except AlloyError as exc:
                wait_s: float | None = min(RETRY_MAX_S, RETRY_MIN_S * 2**failures)
                failures = min(failures + 1, 16)
                fields = {"outlet": self._outlet.name, "reason": str(exc), "again_s": wait_s}
                LOG.warning("drain_not_told", extra=fields)
            except Exception:
                wait_s = RETRY_MAX_S
                LOG.exception("outlet_defect", extra={"outlet": self._outlet.name})
            else:
                failures = 0
                wait_s = LOOK_AGAIN_S if held else None
            self._wake.wait(wait_s)


class Outlets:
    """All of them together."""

    def __init__(self, outlets: tuple[Outlet, ...], held: Callable[[], Drains]) -> None:
        self._lines = tuple(Line(outlet, held) for outlet in outlets)

    def start(self) -> None:
        """Begin."""
        for line in self._lines:
            line.start()

    def changed(self) -> None:
        """Something is drained or taken back."""
        for line in self._lines:
            line.wake()

    def stop(self) -> None:
        """End."""
        for line in self._lines:
            line.stop()
        for line in self._lines:
            line.join()
