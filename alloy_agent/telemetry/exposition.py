"""The text that Prometheus reads, made fast: families of samples that are rendered once.

What of a line comes again at every scrape, all but its number, is built once (`begun`, bounded),
and so is the group of lines that says which of its states something is in (`stated`). What is left
is one number to text for each series. No lock of the sampler is taken here and no device is asked.

Both forms are written: text format 0.0.4, and OpenMetrics 1.0 for clients that ask for it.
Source: prometheus.io exposition formats; OpenMetrics 1.0 section 5.1.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Final, Literal

Kind = Literal["gauge", "counter", "info", "histogram"]

_ESCAPES: Final = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
LABELS_CACHED: Final = 16384


def labelled(names: tuple[str, ...], values: tuple[str, ...]) -> str:
    """Return labels as text with braces; "" for none."""
    pairs = ",".join(
        f'{name}="{value.translate(_ESCAPES)}"' for name, value in zip(names, values, strict=True)
    )
    return f"{{{pairs}}}" if pairs else ""


@lru_cache(maxsize=LABELS_CACHED)
def begun(name: str, names: tuple[str, ...], values: tuple[str, ...]) -> str:
    """Return a sample's line up to its number."""
    return begun_text(name, names, values)


def begun_text(name: str, names: tuple[str, ...], values: tuple[str, ...]) -> str:
    """Return a sample's line up to its number, for those who keep it themselves."""
    return f"{name}{labelled(names, tuple(map(str, values)))} "


@lru_cache(maxsize=LABELS_CACHED)
def stated(
    name: str,
    names: tuple[str, ...],
    values: tuple[str, ...],
    states: tuple[str, ...],
    holds: str,
) -> tuple[str, ...]:
    """Return the lines that are 1 for the state that holds and 0 for the others."""
    return tuple(
        begun_text(name, names, (*values, state)) + number(state == holds) for state in states
    )


_COMMON: Final = {0.0: "0.0\n", 1.0: "1.0\n"}


def number(value: float) -> str:
    """Return a number as Prometheus writes it, with the end of its line."""
    common = _COMMON.get(value)
    if common is not None:
        return common
    if value - value == 0.0:  # finite
        return f"{value * 1.0!r}\n"
    if value != value:  # noqa: PLR0124 - only NaN differs from itself
        return "NaN\n"
    return "+Inf\n" if value > 0 else "-Inf\n"


class Family:
    """One metric: its name without suffix, its help, and its samples.

    A counter is named without `_total`, an info without `_info`; both are added.
    """

    __slots__ = ("_sample", "_suffix", "help", "kind", "labels", "lines", "name")

    def __init__(self, kind: Kind, name: str, help_: str, labels: Sequence[str] = ()) -> None:
        self.kind: Kind = kind
        self.name = name.removesuffix("_total") if kind == "counter" else name
        self.help = help_
        self.labels = tuple(labels)
        self.lines: list[str] = []
        self._suffix = {"counter": "_total", "info": "_info"}.get(kind, "")
        self._sample = self.name + self._suffix

    def add(self, values: tuple[str, ...], value: float) -> None:
        """Add a sample."""
        self.lines.append(begun(self._sample, self.labels, values) + number(value))

    def add_state(self, values: tuple[str, ...], states: tuple[str, ...], holds: str) -> None:
        """Add a sample for each state, its label the last one: 1 for the state that holds."""
        self.lines += stated(self._sample, self.labels, values, states, holds)

    def add_buckets(
        self, values: tuple[str, ...], buckets: Iterable[tuple[float, int]], total: float
    ) -> None:
        """Add a histogram: cumulative counts by upper edge, and the sum of what was measured."""
        text = labelled(self.labels, values)
        edge_names = (*self.labels, "le")
        last = 0
        for edge, count in buckets:
            edges = labelled(edge_names, (*values, number(edge).rstrip()))
            self.lines.append(f"{self.name}_bucket{edges} {count}\n")
            last = count
        self.lines.append(f"{self.name}_sum{text} {number(total)}")
        self.lines.append(f"{self.name}_count{text} {last}\n")

    def head(self, *, openmetrics: bool) -> str:
        """Return the lines before the samples."""
        if openmetrics:
            return f"# HELP {self.name} {self.help}\n# TYPE {self.name} {self.kind}\n"
        name = self.name + self._suffix
        kind = "gauge" if self.kind == "info" else self.kind
        return f"# HELP {name} {self.help}\n# TYPE {name} {kind}\n"


def gauge(name: str, help_: str, labels: Sequence[str] = ()) -> Family:
    """Return a family of gauges."""
    return Family("gauge", name, help_, labels)


def counter(name: str, help_: str, labels: Sequence[str] = ()) -> Family:
    """Return a family of counters."""
    return Family("counter", name, help_, labels)


def info(name: str, help_: str, labels: Sequence[str] = ()) -> Family:
    """Return a family whose samples are 1 and whose labels are what it says."""
    return Family("info", name, help_, labels)


def single(kind: Kind, name: str, help_: str, value: float) -> Family:
    """Return a family with one sample without labels."""
    family = Family(kind, name, help_)
    family.add((), value)
    return family


def render(families: Iterable[Family], room: int, *, openmetrics: bool) -> tuple[str, int, int]:
    """Return the text of families, how many samples are in it, and how many had no room."""
    parts: list[str] = []
    written = dropped = 0
    for family in families:
        lines = family.lines
        if not lines:
            continue
        left = room - written
        if len(lines) > left:
            dropped += len(lines) - max(0, left)
            lines = lines[: max(0, left)]
            if not lines:
                continue
        parts.append(family.head(openmetrics=openmetrics))
        parts.extend(lines)
        written += len(lines)
    return "".join(parts), written, dropped
