"""The shared devices in the report: a sentence for each, and a chart of its last minutes.

The chart is two panels over one axis of time: production's speed against solo with the promise as
a line, and the share of the device's time that its neighbours had. It is drawn as SVG in the page,
without a script; where nothing was measured the line is broken, never drawn at zero.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from typing import Final

from alloy_agent.model import ShareReport

WIDTH: Final = 860.0
LEFT: Final = 52.0
RIGHT: Final = 12.0
PANEL: Final = 112.0  # height of a panel
TOP: Final = 22.0  # of the first panel; its title stands above
BETWEEN: Final = 40.0
ANSWERS: Final = {"conform": "pass", "violated": "fail"}
SPAN_S: Final = (60.0, 120.0, 300.0, 600.0)


def shares_section(shares: Sequence[ShareReport]) -> str:
    """Return the section of shared devices; "" where there is none."""
    if not shares:
        return ""
    parts = "\n".join(_share(share) for share in shares)
    return (
        f"<section><h2>Shared devices</h2>{parts}<p>Production is compared with bursts of its own "
        "during which no neighbour had anything outstanding. Undecided is not conform.</p>"
        "</section>"
    )


def _share(share: ShareReport) -> str:
    word = ANSWERS.get(share.answer, "unknown")
    reason = f": {escape(share.reason)}" if share.reason else ""
    ways = "".join(f'<p class="note">Way around the gate: {escape(t)}</p>' for t in share.bypasses)
    return (
        f"<h3><code>{escape(share.device)}</code> "
        f'<span class="badge {word}">{escape(share.answer)}</span></h3>'
        f"<p>Production {_names(share.production)}, opportunistic {_names(share.opportunistic)}; "
        f"{escape(share.stage)}{reason}. {_figures(share)}</p>{ways}{_chart(share)}"
    )


def _names(names: Sequence[str]) -> str:
    return ", ".join(f"<code>{escape(name)}</code>" for name in names) or "none"


def _figures(share: ShareReport) -> str:
    span = "no interval of the mean slowdown yet"
    if share.lower_ratio is not None and share.upper_ratio is not None:
        low, high = 100 * share.lower_ratio, 100 * share.upper_ratio
        span = f"mean slowdown {low:.2f} to {high:.2f} %"
    return (
        f"Promise: at most {100 * share.budget_ratio:g} %; {span}; e-value {share.e_value:.3g} "
        f"after {share.windows} windows of 1 s, {share.skipped} not judged."
    )


def _chart(share: ShareReport) -> str:
    if len(share.history_age_s) < 2:
        return "<p>There is no history yet.</p>"
    span_s = next((s for s in SPAN_S if s >= share.history_age_s[0]), share.history_age_s[0])
    speeds = [p for p in share.production_ratio if p is not None]
    floor = min([0.9, *(int(20 * p) / 20 for p in speeds)])
    ceiling = max([1.0, *speeds])
    ceiling = 1.02 if ceiling <= 1.02 else (int(20 * ceiling) + 1) / 20
    second = TOP + PANEL + BETWEEN
    height = second + PANEL + 34.0
    body = "".join(
        (
            _panel("Production, speed against solo", TOP, (floor, ceiling), _ticks(floor)),
            _level(1.0 - share.budget_ratio, TOP, (floor, ceiling)),
            _line(share.history_age_s, share.production_ratio, span_s, TOP, (floor, ceiling), "a"),
            _panel("Device time that neighbours had", second, (0.0, 1.0), (0.0, 0.5, 1.0)),
            _line(share.history_age_s, share.lent_ratio, span_s, second, (0.0, 1.0), "b"),
            _times(span_s, second + PANEL),
        )
    )
    title = f"Production against solo and lent share of {share.device}"
    return (
        f'<figure><svg viewBox="0 0 {WIDTH:g} {height:g}" role="img" class="chart">'
        f"<title>{escape(title)}</title>{body}</svg></figure>"
    )


def _ticks(floor: float) -> tuple[float, ...]:
    return (floor, 0.5 * (floor + 1.0), 1.0)


def _panel(title: str, top: float, span: tuple[float, float], ticks: Sequence[float]) -> str:
    """Return the frame of a panel: title, grid lines and their labels."""
    lines = "".join(
        f'<line class="grid" x1="{LEFT:g}" x2="{WIDTH - RIGHT:g}" y1="{y:.1f}" y2="{y:.1f}"/>'
        f'<text x="{LEFT - 6:g}" y="{y + 4:.1f}" text-anchor="end">{100 * tick:.0f} %</text>'
        for tick in ticks
        for y in (_y(tick, top, span),)
    )
    return f'<text class="title" x="{LEFT:g}" y="{top - 8:g}">{escape(title)}</text>{lines}'


def _level(value: float, top: float, span: tuple[float, float]) -> str:
    """Return the line of the promise with its word."""
    y = _y(value, top, span)
    return (
        f'<line class="promise" x1="{LEFT:g}" x2="{WIDTH - RIGHT:g}" y1="{y:.1f}" y2="{y:.1f}"/>'
        f'<text x="{WIDTH - RIGHT:g}" y="{y + 13:.1f}" text-anchor="end">promise</text>'
    )


def _line(  # noqa: PLR0913, PLR0917 - a line in its panel
    ages_s: Sequence[float],
    values: Sequence[float | None],
    span_s: float,
    top: float,
    span: tuple[float, float],
    name: str,
) -> str:
    """Return a line that is broken where there is no value."""
    width = WIDTH - LEFT - RIGHT
    parts = []
    for run in _runs(ages_s, values):
        points = [
            f"{LEFT + width * (1.0 - min(1.0, age / span_s)):.1f} {_y(value, top, span):.1f}"
            for age, value in run
        ]
        parts.append(f"M{' L'.join(points)}" if len(points) > 1 else f"M{points[0]} h1")
    return f'<path class="{name}" d="{" ".join(parts)}"/>' if parts else ""


def _runs(
    ages_s: Sequence[float], values: Sequence[float | None]
) -> Iterator[list[tuple[float, float]]]:
    run: list[tuple[float, float]] = []
    for age, value in zip(ages_s, values, strict=False):
        if value is None:
            if run:
                yield run
            run = []
        else:
            run.append((age, value))
    if run:
        yield run


def _times(span_s: float, bottom: float) -> str:
    """Return the labels of the axis of time."""
    width = WIDTH - LEFT - RIGHT
    labels = []
    for part in (0.0, 0.5, 1.0):
        age_s = span_s * (1.0 - part)
        word = "now" if age_s == 0.0 else f"{age_s / 60:g} min ago"
        anchor = {0.0: "start", 0.5: "middle", 1.0: "end"}[part]
        labels.append(
            f'<text x="{LEFT + width * part:.1f}" y="{bottom + 20:g}" text-anchor="{anchor}">'
            f"{word}</text>"
        )
    return "".join(labels)


def _y(value: float, top: float, span: tuple[float, float]) -> float:
    low, high = span
    part = (min(max(value, low), high) - low) / (high - low)
    return top + PANEL * (1.0 - part)
