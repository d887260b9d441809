"""A node that is watched for a while without a daemon: its own workers, nothing kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from alloy_agent.config import Settings
    from alloy_agent.daemon.live import TopDocument


@contextmanager
def watching(settings: Settings) -> Iterator[Callable[[], TopDocument]]:
    """Give what returns the live document of now; each call observes and judges anew."""
    from alloy_agent.daemon.live import top_document
    from alloy_agent.daemon.node import Node
    from alloy_agent.daemon.telemetry import Hooks, Telemetry
    from alloy_agent.telemetry.signals import all_sane

    def nobody(*_what: object) -> None:
        return None

    with Node(settings, sample=True, lenient=True) as node:
        hooks = Hooks(health=nobody, gates=nobody, usage=nobody, drains=nobody)
        telemetry = Telemetry(node.workers, hooks)

        def fetch() -> TopDocument:
            snapshot = node.observe()
            telemetry.tick(snapshot, {})
            measured = all_sane(s for worker in node.workers for s in worker.signals())
            return top_document(node.name, snapshot, None, telemetry, measured)

        fetch()  # opens the devices, so that the samplers begin
        yield fetch
