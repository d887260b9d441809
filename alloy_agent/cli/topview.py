"""What `alloy-agent top` draws: lines of a width and height from one document. Pure.

Every state is told in words, so that nothing is lost without colour; colour repeats it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from alloy_agent.daemon.live import TopDevice, TopDocument, TopPartition

BARS: Final = "▁▂▃▄▅▆▇█"
PLAIN_BARS: Final = "_.:-=+*#"
HISTORY: Final = 60
VIEWS: Final = ("partitions", "devices", "findings")
SORTS: Final = ("device", "active", "memory", "headroom", "tenant", "gate")
HELP: Final = (
    "Keys",
    "  q         leave                     h or ?    this help, again to close it",
    "  tab       partitions, devices, findings",
    "  s         next order                r         reverse it",
    "  /         filter by text; Enter keeps it, Escape drops it",
    "  + and -   refresh more or less often",
    "  space     hold the picture          arrows    scroll",
    "",
    "GATE is the worst gate of a row: open, closed or unknown, then which one and why.",
    "ACTIVE and MEMORY are measured now, HEADROOM is what P95 of a minute leaves.",
    "'-' stands where the source has no value; a value is never made up.",
)


class Span(NamedTuple):
    """A piece of a line: its text, and the name of its colour."""

    text: str
    style: str = ""


Line = tuple[Span, ...]


class View(NamedTuple):
    """What the viewer has chosen."""

    view: str = "partitions"
    sort: str = "device"
    reverse: bool = False
    filter: str = ""
    typing: bool = False
    help: bool = False
    held: bool = False
    top: int = 0
    interval_s: float = 1.0
    plain: bool = False  # no character outside of ASCII


class History:
    """The last activity of each partition, for its sparkline."""

    def __init__(self) -> None:
        self._values: dict[tuple[str, int], deque[float | None]] = {}

    def add(self, document: TopDocument) -> None:
        """Take one document's values; partitions that are gone are forgotten."""
        living = set()
        for piece in document.partitions:
            key = (piece.id, piece.generation)
            living.add(key)
            values = self._values.setdefault(key, deque(maxlen=HISTORY))
            values.append(piece.active_ratio)
        for key in [key for key in self._values if key not in living]:
            del self._values[key]

    def spark(self, piece: TopPartition, width: int, *, plain: bool) -> str:
        """Return the last values as bars, the newest at the right."""
        values = list(self._values.get((piece.id, piece.generation), ()))[-width:]
        bars = PLAIN_BARS if plain else BARS
        return "".join(map(_bar(bars), values)).rjust(width)


def _bar(bars: str) -> Callable[[float | None], str]:
    top = len(bars) - 1

    def one(value: float | None) -> str:
        return " " if value is None else bars[min(top, max(0, int(value * len(bars))))]

    return one


def clean(text: str, *, plain: bool) -> str:
    """Return a text without anything that a terminal would obey."""
    kept = "".join(c if c.isprintable() else "?" for c in text)
    return kept.encode("ascii", "replace").decode() if plain else kept


def ratio(value: float | None) -> str:
    """Return a ratio in percent."""
    return "-" if value is None else f"{value * 100:.0f}%"


def size(value: float | None) -> str:
    """Return bytes in few characters."""
    if value is None:
        return "-"
    for unit, scale in (("T", 1 << 40), ("G", 1 << 30), ("M", 1 << 20)):
        if value >= scale:
            return f"{value / scale:.1f}{unit}"
    return f"{value / 1024:.0f}K"


def frame(
    document: TopDocument, view: View, history: History, width: int, height: int
) -> list[Line]:
    """Return exactly `height` lines of at most `width` columns."""
    head = _head(document, view, width)
    foot = _foot(view, width)
    room = max(0, height - len(head) - 1)
    if view.help:
        body: list[Line] = [(Span(text[:width]),) for text in HELP]
    else:
        body = _body(document, view, history, width)
    titles, rows = body[:1], body[1:]
    if view.help:
        titles, rows = [], body
    top = min(view.top, max(0, len(rows) - max(1, room - len(titles))))
    shown = [*titles, *rows[top:]][:room]
    blank: Line = (Span(""),)
    shown += [blank] * (room - len(shown))
    return [*head, *shown, foot][:height]


def _head(document: TopDocument, view: View, width: int) -> list[Line]:
    age = document.snapshot_age_s
    seen = "not seen yet" if age is None else f"seen {age:.1f} s ago"
    closed = sum(p.gate == "closed" for p in document.partitions)
    parts = [
        clean(document.node, plain=view.plain),
        f"{len(document.devices)} devices",
        f"{len(document.partitions)} partitions" + (f", {closed} closed" if closed else ""),
        f"audit {document.verdict or 'pending'}",
        seen + (" (held)" if view.held else ""),
    ]
    samplers = "  ".join(f"{name}: {words}" for name, words in document.samplers.items())
    lines: list[Line] = [
        (Span("  ".join(parts)[:width], "bold"),),
        (Span(clean(samplers, plain=view.plain)[:width]),),
    ]
    drains = (clean(f"drained {drain}", plain=view.plain) for drain in document.drains[:2])
    return [*lines, *((Span(drain[:width], "bad"),) for drain in drains)]


def _foot(view: View, width: int) -> Line:
    if view.typing:
        return (Span(f"filter: {view.filter}_"[:width], "bold"),)
    chosen = f" filter:{view.filter}" if view.filter else ""
    order = view.sort + (" reversed" if view.reverse else "")
    text = f"q quit  h help  tab {view.view}  s sort:{order}  / filter{chosen}"
    return (Span(f"{text}  {view.interval_s:g}s"[:width], "bold"),)


def _body(document: TopDocument, view: View, history: History, width: int) -> list[Line]:
    if view.view == "devices":
        return _devices(document, view, width)
    if view.view == "findings":
        rows = [f for f in document.findings if view.filter.lower() in f.lower()] or ["none"]
        title: Line = (Span("FINDINGS OF THE NEWEST AUDIT"[:width], "bold"),)
        return [title, *((Span(clean(r, plain=view.plain)[:width]),) for r in rows)]
    return _partitions(document, view, history, width)


def _matches(view: View, words: Iterable[str]) -> bool:
    wanted = view.filter.lower()
    return not wanted or any(wanted in word.lower() for word in words)


def ordered(document: TopDocument, view: View) -> list[TopPartition]:
    """Return the partitions that match, in the chosen order."""
    place = {device.id: device.index for device in document.devices}
    chosen = [
        p
        for p in document.partitions
        if _matches(view, (p.id, p.tenant, p.profile, p.gate, p.tier, f"#{place.get(p.device)}"))
    ]
    keys: dict[str, Callable[[TopPartition], tuple[object, ...]]] = {
        "device": lambda p: (place.get(p.device, 0), p.id),
        "active": lambda p: (-(p.active_ratio or 0.0), p.id),
        "memory": lambda p: (-(p.memory_used_bytes or 0.0), p.id),
        "headroom": lambda p: (2.0 if p.headroom_ratio is None else p.headroom_ratio, p.id),
        "tenant": lambda p: (not p.tenant, p.tenant, p.id),
        "gate": lambda p: ({"closed": 0, "unknown": 1}.get(p.gate, 2), p.id),
    }
    return sorted(chosen, key=keys[view.sort], reverse=view.reverse)


def _partitions(document: TopDocument, view: View, history: History, width: int) -> list[Line]:
    place = {device.id: device.index for device in document.devices}
    rows = ordered(document, view)
    names = [f"#{place.get(p.device, '?')} {p.id.rpartition('/')[2]}" for p in rows]
    wide = width >= 100
    spark = 20 if wide else 10
    name_w = min(24, max([9, *map(len, names)]))
    tenant_w = 16 if wide else 10
    title = (
        f"{'PARTITION':<{name_w}} {'TENANT':<{tenant_w}} {'TIER':<8} {'ACTIVE':>6} "
        f"{'':<{spark}} {'MEMORY':>11} {'HEAD':>5} GATE"
    )
    lines: list[Line] = [(Span(title[:width], "bold"),)]
    for piece, name in zip(rows, names, strict=True):
        memory = f"{size(piece.memory_used_bytes)}/{size(piece.memory_bytes)}"
        text = (
            f"{clean(name, plain=view.plain)[:name_w]:<{name_w}} "
            f"{(clean(piece.tenant, plain=view.plain) or '-')[:tenant_w]:<{tenant_w}} "
            f"{(piece.tier or '-'):<8} {ratio(piece.active_ratio):>6} "
            f"{history.spark(piece, spark, plain=view.plain)} "
            f"{memory:>11} {ratio(piece.headroom_ratio):>5} "
        )
        lines.append(_with_gate(text, piece, view, width))
    if not rows:
        what = "no partition matches" if document.partitions else "no partitions"
        lines.append((Span(what[:width]),))
    return lines


def _with_gate(text: str, row: TopPartition | TopDevice, view: View, width: int) -> Line:
    """Return a row with its gate at the end, as much of the reason as fits."""
    gate = row.gate
    if gate != "open":
        gate += f" {row.gate_name}" + (f": {row.reason}" if row.reason else "")
    style = {"open": "good", "closed": "bad"}.get(row.gate, "warn")
    left = max(0, width - len(text))
    return Span(text[:width]), Span(clean(gate, plain=view.plain)[:left], style)


def _devices(document: TopDocument, view: View, width: int) -> list[Line]:
    title = (
        f"{'#':>2} {'DEVICE':<16} {'MODEL':<16} {'HEALTH':<11} {'POWER':>6} {'MARGIN':>6} "
        f"{'MEM':>6} GATE"
    )
    lines: list[Line] = [(Span(title[:width], "bold"),)]
    for device in document.devices:
        if not _matches(view, (device.id, device.model, device.health, device.gate)):
            continue
        power = "-" if device.power_w is None else f"{device.power_w:.0f}W"
        margin = "-" if device.margin_c is None else f"{device.margin_c:.0f}C"
        text = (
            f"{device.index:>2} {clean(device.id, plain=view.plain)[:16]:<16} "
            f"{clean(device.model, plain=view.plain)[:16]:<16} {device.health:<11} "
            f"{power:>6} {margin:>6} {size(device.memory_used_bytes):>6} "
        )
        lines.append(_with_gate(text, device, view, width))
    return lines


# --- keys -----------------------------------------------------------------------------------------

INTERVALS_S: Final = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)


def press(view: View, key: str) -> View | None:
    """Return the view after a key; None: leave. Keys are characters or names ("up", "enter")."""
    if view.typing:
        return _typed(view, key)
    if key in ("q", "Q"):
        return None
    if view.help or key in ("h", "?"):
        return view._replace(help=not view.help)
    if key in ("+", "-", "="):
        return view._replace(interval_s=_interval(view.interval_s, faster=key != "-"))
    changes: dict[str, dict[str, Any]] = {
        "tab": {"view": _next(VIEWS, view.view), "top": 0},
        "s": {"sort": _next(SORTS, view.sort)},
        "r": {"reverse": not view.reverse},
        "/": {"typing": True, "filter": ""},
        " ": {"held": not view.held},
        "down": {"top": view.top + 1},
        "up": {"top": max(0, view.top - 1)},
        "pagedown": {"top": view.top + 10},
        "pageup": {"top": max(0, view.top - 10)},
        "escape": {"filter": ""},
    }
    return view._replace(**changes.get(key, {}))


def _typed(view: View, key: str) -> View:
    if key == "enter":
        return view._replace(typing=False)
    if key == "escape":
        return view._replace(typing=False, filter="")
    if key == "backspace":
        return view._replace(filter=view.filter[:-1])
    if len(key) == 1 and key.isprintable():
        return view._replace(filter=(view.filter + key)[:40])
    return view


def _next(names: Sequence[str], name: str) -> str:
    return names[(names.index(name) + 1) % len(names)]


def _interval(interval_s: float, *, faster: bool) -> float:
    if faster:
        return max((i for i in INTERVALS_S if i < interval_s), default=INTERVALS_S[0])
    return min((i for i in INTERVALS_S if i > interval_s), default=INTERVALS_S[-1])
