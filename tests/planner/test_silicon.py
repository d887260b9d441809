"""Plans carried out on simulated silicon, which refuses what a device would refuse."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from alloy_agent.backends.fake import FakeBackend
from alloy_agent.errors import ConfigError
from alloy_agent.layout import choose, read_layout
from alloy_agent.model import Layout, Snapshot
from alloy_agent.planner import difference, disruptive, plan

EXAMPLES = Path(__file__).parents[2] / "examples"


def observed(backend: FakeBackend) -> Snapshot:
    """Return the simulated node as its backend reads it back."""
    seen = [backend.observe(device) for device in backend.discover()]
    return Snapshot(
        boot_id="boot",
        sequence=1,
        taken_at_s=0.0,
        taken_wall_s=0.0,
        devices=tuple(one.device for one in seen),
        partitions=tuple(piece for one in seen for piece in one.partitions),
    )


def carry_out(backend: FakeBackend, layout: Layout) -> None:
    """Do every step of the plan, and check that the layout holds and needs no further step."""
    made = plan(layout, observed(backend))
    for planned in made.steps:
        backend.quiesce(planned.step.device)
        backend.apply(planned.step)
        backend.resume(planned.step.device)
    after = observed(backend)
    assert difference(layout, after) == ()
    assert plan(layout, after).steps == ()


@pytest.mark.parametrize(
    ("file", "spec"),
    [
        ("h100.yaml", "2xH100-SXM5-80GB"),
        ("mixed.yaml", "mixed"),
        ("mig-parted/all.yaml", "4xA100-SXM4-80GB"),
        ("mig-parted/all.yaml", "1xA100-SXM4-40GB"),
        ("mig-parted/per-device.yaml", "8xH100-SXM5-80GB"),
    ],
)
def test_the_samples_hold_on_the_boards_they_are_written_for(file: str, spec: str) -> None:
    """From each layout of a sample to each other one: nothing is refused, nothing is left over."""
    backend = FakeBackend.from_specs((spec,))
    layouts = read_layout((EXAMPLES / file).read_text(encoding="utf-8"), file)
    names = list(layouts.layouts)
    dice = random.Random(5)  # noqa: S311
    for _ in range(3):
        dice.shuffle(names)
        for name in names:
            layout = choose(layouts, name, observed(backend).devices)
            if disruptive(plan(layout, observed(backend))):
                continue  # a driver reload is not a step of the plan
            carry_out(backend, layout)


@pytest.mark.parametrize("board", ["A100-SXM4-40GB", "H100-SXM5-80GB", "B200-180GB", "A30-24GB"])
def test_random_layouts_of_a_board_follow_each_other(board: str) -> None:
    """Forty layouts in a row, with places pinned or free, on the board's own refusals."""
    backend = FakeBackend.from_specs((f"1x{board}",))
    (device,) = observed(backend).devices
    dice = random.Random(board)  # noqa: S311
    done = 0
    while done < 40:
        names = []
        for profile in dice.choices(device.profiles, k=dice.randint(0, 6)):
            pin = f"@{dice.choice(profile.starts)}" if dice.random() < 0.3 else ""
            names.append(f"'{profile.name}{pin}'")
        text = (
            "version: v1\nlayouts:\n  a:\n    - match: {vendor: nvidia}\n"
            f"      mig: [{', '.join(names)}]\n"
        )
        try:
            layout = choose(read_layout(text, "random.yaml"), None, observed(backend).devices)
        except ConfigError:
            continue
        carry_out(backend, layout)
        done += 1
