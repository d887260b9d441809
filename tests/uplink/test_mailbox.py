"""The pace of the slots: no faster than agreed on the whole, and no lateness shifts it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from alloy_agent.proto import agent_pb2 as pb
from alloy_agent.uplink.mailbox import Mailbox

FAST = {"fast": 1.0}


def nothing() -> Iterator[pb.AgentMessage | None]:
    while True:
        yield None


class Desk:
    """A mailbox on a clock of its own."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.box = Mailbox(lambda: self.now_s)
        self.number = 0

    def offer(self, *, urgent: bool = False) -> None:
        """Offer the next sample."""
        self.number += 1
        self.box.offer(pb.AgentMessage(fast=pb.Fast(sample=self.number)), urgent=urgent)

    def taken(self) -> int:
        """Return the sample that goes now; 0 for none."""
        message = self.box.take(nothing(), FAST)
        return 0 if message is None else message.fast.sample


def test_samples_as_often_as_agreed_are_never_kept_waiting() -> None:
    """Jitter of some milliseconds either way, and one late sender, delay no later sample."""
    desk = Desk()
    for jitter_s in (0.0, 0.004, -0.005, 0.3, 0.0, -0.004, 0.002):
        at_s = desk.now_s
        desk.now_s = at_s + jitter_s
        desk.offer()
        assert desk.taken() == desk.number
        desk.now_s = at_s + 1.0


@pytest.mark.parametrize("every_s", [0.1, 0.3, 0.95])
def test_faster_samples_go_at_the_agreed_pace(every_s: float) -> None:
    """However often something is offered, on the whole no more goes than was agreed."""
    desk = Desk()
    sent = 0
    for _ in range(round(50 / every_s)):
        desk.offer()
        sent += bool(desk.taken())
        desk.now_s += every_s
    assert 40 <= sent <= 52


def test_what_is_urgent_goes_at_once() -> None:
    """A gate that has changed does not wait for the pace."""
    desk = Desk()
    desk.offer()
    assert desk.taken() == 1
    desk.offer()
    assert desk.taken() == 0
    desk.offer(urgent=True)
    assert desk.taken() == 3
    assert desk.box.telemetry_dropped == 1
