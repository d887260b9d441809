"""What `alloy-agent top` draws: lines of a width and height from one document. Pure.

Every state is told in words, so that nothing is lost without colour; colour repeats it. Only the
rows that fit are made, so that a picture costs what is seen of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from alloy_agent.daemon.live import TopDevice, TopDocument, TopPartition
    from alloy_agent.daemon.shareviews import TopShare, TopTenant

BARS: Final = "▁▂▃▄▅▆▇█"
PLAIN_BARS: Final = "_.:-=+*#"
TO_PLAIN: Final = str.maketrans(BARS, PLAIN_BARS)
HISTORY: Final = 60
COLUMN_S: Final = 1.0  # of a sparkline, however often is drawn
WIDE: Final = 100
HEAD_LINES: Final = 2
GATE_ROOM: Final = 12  # what the bars of a sparkline leave for a gate: its word and a beginning
DRAINS_SHOWN: Final = 2
VIEWS: Final = ("partitions", "devices", "tenants", "shares", "findings")
SORTS: Final = ("device", "active", "memory", "headroom", "tenant", "gate")
HELP: Final = (
    "Keys",
    "  q         leave                     h or ?    this help, again to close it",
    "  tab       partitions, devices, tenants, shares, findings",
    "  s         next order                r         reverse it",
    "  /         filter by text; Enter keeps it, Escape drops it",
    "  + and -   refresh more or less often",
    "  space     hold the picture          arrows    scroll",
    "",
    "GATE is the worst gate of a row: open, closed or unknown, then which and why.",
    "ACTIVE and MEMORY are measured now, HEAD is what P95 of a minute leaves of",
    "the scarcest resource; a bar is a second. RATE is how a shared device is",
    "controlled. '-' stands where the source has no value; none is ever made up.",
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
    bars: int = HISTORY  # at most, of a sparkline


class History:
    """The activity of each partition in the last minute, for its sparkline."""

    def __init__(self) -> None:
        self._bars: dict[tuple[str, int], str] = {}  # the last column still grows
        self._peaks: dict[tuple[str, int], float | None] = {}
        self._column_s = float("-inf")

    def add(self, document: TopDocument) -> None:
        """Take one document's values; partitions that are gone are forgotten."""
        elapsed_s = document.taken_at_s - self._column_s
        begins = not 0 <= elapsed_s < COLUMN_S * 0.95
        if begins:
            self._column_s = document.taken_at_s
        bars, peaks = {}, {}
        for piece in document.partitions:
            key, value = (piece.id, piece.generation), piece.active_ratio
            before = self._bars.get(key, "")
            if not begins and before:
                last = self._peaks.get(key)
                value = last if value is None else value if last is None else max(last, value)
                before = before[:-1]
            bars[key] = before[1 - HISTORY :] + bar(value)
            peaks[key] = value
        self._bars, self._peaks = bars, peaks

    def spark(self, piece: TopPartition, width: int, *, plain: bool) -> str:
        """Return the last values as bars, the newest at the right."""
        text = self._bars.get((piece.id, piece.generation), "")[-width:].rjust(width)
        return text.translate(TO_PLAIN) if plain else text


def bar(value: float | None) -> str:
    """Return a ratio as a bar; a space where there is none."""
    return " " if value is None else BARS[min(len(BARS) - 1, max(0, int(value * len(BARS))))]


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


class Table(NamedTuple):
    """A view: its title, its rows, and how one of them is drawn."""

    title: str
    rows: Sequence[Any]
    draw: Callable[[Any], Line]


def frame(
    document: TopDocument, view: View, history: History, width: int, height: int
) -> list[Line]:
    """Return exactly `height` lines of at most `width` columns."""
    head = _head(document, view, width)
    room = _room(document, height)
    if view.help:
        table = Table("", HELP, lambda text: (Span(text[:width]),))
    else:
        table = _table(document, view, history, width)
    titles: list[Line] = [(Span(table.title[:width], "bold"),)] if table.title else []
    titles = titles[:room]
    rows = room - len(titles)
    top = _top(view, len(table.rows), rows)
    shown = [*titles, *map(table.draw, table.rows[top : top + rows])]
    blank: Line = (Span(""),)
    shown += [blank] * (room - len(shown))
    return [*head, *shown, _foot(view, width)][:height]


def _room(document: TopDocument, height: int) -> int:
    """Return the lines between the head and the foot."""
    return max(0, height - HEAD_LINES - len(document.drains[:DRAINS_SHOWN]) - 1)


def _top(view: View, count: int, rows: int) -> int:
    return max(0, min(view.top, count - max(1, rows)))


def clamped(document: TopDocument, view: View, history: History, height: int) -> View:
    """Return a view that is not scrolled behind its last row."""
    if not view.top:
        return view
    count = len(HELP) if view.help else len(_table(document, view, history, WIDE).rows)
    return view._replace(top=_top(view, count, _room(document, height) - 1))


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
    shown = document.drains[:DRAINS_SHOWN]
    drains = (clean(f"drained {drain}", plain=view.plain) for drain in shown)
    return [*lines, *((Span(drain[:width], "bad"),) for drain in drains)]


def _foot(view: View, width: int) -> Line:
    if view.typing:
        return (Span(f"filter: {view.filter}_"[:width], "bold"),)
    chosen = f" filter:{view.filter}" if view.filter else ""
    order = view.sort + (" reversed" if view.reverse else "")
    text = f"q quit  h help  tab {view.view}  s sort:{order}  / filter{chosen}"
    return (Span(f"{text}  {view.interval_s:g}s"[:width], "bold"),)


def _table(document: TopDocument, view: View, history: History, width: int) -> Table:
    if view.view == "devices":
        return _devices(document, view, width)
    if view.view == "tenants":
        return _tenants(document, view, width)
    if view.view == "shares":
        return _shares(document, view, width)
    if view.view == "findings":
        rows = [f for f in document.findings if view.filter.lower() in f.lower()] or ["none"]
        title = "FINDINGS OF THE NEWEST AUDIT"
        return Table(title, rows, lambda row: (Span(clean(row, plain=view.plain)[:width]),))
    return _partitions(document, view, history, width)


def _empty(what: str, title: str, width: int) -> Table:
    return Table(title, (what,), lambda row: (Span(row[:width]),))


def _matches(view: View, words: Iterable[str]) -> bool:
    wanted = view.filter.lower()
    return not wanted or any(wanted in word.lower() for word in words)


def _cut(text: str, width: int, view: View) -> str:
    """Return a name in exactly so many columns; "-" where there is none."""
    return f"{clean(text, plain=view.plain)[:width] or '-':<{width}}"


# --- partitions -----------------------------------------------------------------------------------

GATES: Final = {"closed": 0, "unknown": 1}


def ordered(document: TopDocument, view: View) -> list[TopPartition]:
    """Return the partitions that match, in the chosen order."""
    place = {device.id: device.index for device in document.devices}
    chosen: Iterable[TopPartition] = document.partitions
    if view.filter:
        chosen = [
            p
            for p in chosen
            if _matches(
                view, (p.id, p.tenant, p.profile, p.gate, p.tier, f"#{place.get(p.device)}")
            )
        ]
    keys: dict[str, Callable[[TopPartition], tuple[object, ...]]] = {
        "device": lambda p: (place.get(p.device, 0), p.id),
        "active": lambda p: (-(p.active_ratio or 0.0), p.id),
        "memory": lambda p: (-(p.memory_used_bytes or 0.0), p.id),
        "headroom": lambda p: (2.0 if p.headroom_ratio is None else p.headroom_ratio, p.id),
        "tenant": lambda p: (not p.tenant, p.tenant, p.id),
        "gate": lambda p: (GATES.get(p.gate, 2), p.id),
    }
    return sorted(chosen, key=keys[view.sort], reverse=view.reverse)


def _partitions(document: TopDocument, view: View, history: History, width: int) -> Table:
    place = {device.id: device.index for device in document.devices}
    rates = rates_of(document)
    rows = ordered(document, view)
    wide = width >= WIDE
    bars, tenant_w, fixed = (20, 16, 66) if wide else (10, 10, 47)
    names = {p.id: f"#{place.get(p.device, '?')} {p.id.rpartition('/')[2]}" for p in rows}
    name_w = min(24, max([9, *map(len, names.values())]))
    spark = max(1, min(bars, view.bars, width - fixed - name_w - GATE_ROOM))
    rate_title = f"{'RATE':<12} " if wide else ""
    title = (
        f"{'PARTITION':<{name_w}} {'TENANT':<{tenant_w}} {'TIER':<8} {'ACTIVE':>6} "
        f"{'':<{spark}} {'MEMORY':>11} {'HEAD':>5} {rate_title}GATE"
    )
    if not rows:
        what = "no partition matches" if document.partitions else "no partitions"
        return _empty(what, title, width)

    def draw(piece: TopPartition) -> Line:
        memory = f"{size(piece.memory_used_bytes)}/{size(piece.memory_bytes)}"
        rate = f"{_cut(rates.get(piece.id, ''), 12, view)} " if wide else ""
        text = (
            f"{_cut(names[piece.id], name_w, view)} {_cut(piece.tenant, tenant_w, view)} "
            f"{(piece.tier or '-'):<8} {ratio(piece.active_ratio):>6} "
            f"{history.spark(piece, spark, plain=view.plain)} "
            f"{memory:>11} {ratio(piece.headroom_ratio):>5} {rate}"
        )
        return _with_gate(text, piece, view, width)

    return Table(title, rows, draw)


def rates_of(document: TopDocument) -> dict[str, str]:
    """Return role and state of each partition whose tenant's rate is controlled."""
    return {
        tenant.partition: f"{ROLES.get(tenant.role, tenant.role)} {tenant.state}"
        for share in document.shares
        for tenant in share.tenants
        if tenant.partition
    }


ROLES: Final = {"production": "prod", "opportunistic": "opp"}


def _with_gate(text: str, row: TopPartition | TopDevice, view: View, width: int) -> Line:
    """Return a row with its gate at the end, as much of the reason as fits."""
    gate = row.gate
    if gate != "open":
        gate += f" {row.gate_name}" + (f": {row.reason}" if row.reason else "")
    style = {"open": "good", "closed": "bad"}.get(row.gate, "warn")
    left = max(0, width - len(text))
    return Span(text[:width]), Span(clean(gate, plain=view.plain)[:left], style)


# --- devices, tenants, shares ---------------------------------------------------------------------


def devices_ordered(document: TopDocument, view: View) -> list[TopDevice]:
    """Return the devices that match, in the chosen order as far as devices have it."""
    chosen = [
        d for d in document.devices if _matches(view, (d.id, d.model, d.health, d.gate, *d.faults))
    ]
    keys: dict[str, Callable[[TopDevice], tuple[object, ...]]] = {
        "active": lambda d: (-(d.power_w or 0.0), d.index),
        "memory": lambda d: (-(d.memory_used_bytes or 0.0), d.index),
        "headroom": lambda d: (float("inf") if d.margin_c is None else d.margin_c, d.index),
        "gate": lambda d: (GATES.get(d.gate, 2), d.index),
    }
    return sorted(chosen, key=keys.get(view.sort, lambda d: (d.index,)), reverse=view.reverse)


def _devices(document: TopDocument, view: View, width: int) -> Table:
    stages = {share.device: share.stage for share in document.shares}
    name_w = 20 if width >= WIDE else 12
    title = (
        f"{'#':>2} {'DEVICE':<{name_w}} {'MODEL':<{name_w}} {'HEALTH':<11} {'POWER':>6} "
        f"{'MARGIN':>6} {'MEM':>6} {'RATE':<8} GATE"
    )
    rows = devices_ordered(document, view)
    if not rows:
        return _empty("no device matches" if document.devices else "no devices", title, width)

    def draw(device: TopDevice) -> Line:
        power = "-" if device.power_w is None else f"{device.power_w:.0f}W"
        margin = "-" if device.margin_c is None else f"{device.margin_c:.0f}C"
        text = (
            f"{device.index:>2} {_cut(device.id, name_w, view)} "
            f"{_cut(device.model, name_w, view)} {device.health:<11} "
            f"{power:>6} {margin:>6} {size(device.memory_used_bytes):>6} "
            f"{_cut(stages.get(device.id, ''), 8, view)} "
        )
        return _with_gate(text, device, view, width)

    return Table(title, rows, draw)


class Tenant(NamedTuple):
    """What one tenant has, added up."""

    name: str
    partitions: int
    devices: int
    active: float | None  # mean of what is measured
    memory_bytes: float | None
    worst: str  # of its gates
    rate: str


def tenants_of(document: TopDocument) -> list[Tenant]:
    """Return what each tenant has, by name."""
    rates = rates_of(document)
    had: dict[str, list[TopPartition]] = {}
    for piece in document.partitions:
        if piece.tenant:
            had.setdefault(piece.tenant, []).append(piece)
    found = []
    for name, pieces in sorted(had.items()):
        active = [p.active_ratio for p in pieces if p.active_ratio is not None]
        memory = [p.memory_used_bytes for p in pieces if p.memory_used_bytes is not None]
        found.append(
            Tenant(
                name=name,
                partitions=len(pieces),
                devices=len({p.device for p in pieces}),
                active=sum(active) / len(active) if active else None,
                memory_bytes=sum(memory) if memory else None,
                worst=min((p.gate for p in pieces), key=lambda gate: GATES.get(gate, 2)),
                rate=", ".join(sorted({rates[p.id] for p in pieces if p.id in rates})),
            )
        )
    return found


def _tenants(document: TopDocument, view: View, width: int) -> Table:
    name_w = 32 if width >= WIDE else 20
    title = (
        f"{'TENANT':<{name_w}} {'PIECES':>6} {'DEVICES':>7} {'ACTIVE':>6} {'MEMORY':>7} "
        f"{'GATES':<8} RATE"
    )
    rows = [t for t in tenants_of(document) if _matches(view, (t.name, t.worst, t.rate))]
    keys: dict[str, Callable[[Tenant], tuple[object, ...]]] = {
        "active": lambda t: (-(t.active or 0.0), t.name),
        "memory": lambda t: (-(t.memory_bytes or 0.0), t.name),
        "gate": lambda t: (GATES.get(t.worst, 2), t.name),
    }
    rows.sort(key=keys.get(view.sort, lambda t: (t.name,)), reverse=view.reverse)
    if not rows:
        return _empty("no tenant", title, width)

    def draw(one: Tenant) -> Line:
        text = (
            f"{_cut(one.name, name_w, view)} {one.partitions:>6} {one.devices:>7} "
            f"{ratio(one.active):>6} {size(one.memory_bytes):>7} {one.worst:<8} "
            f"{clean(one.rate, plain=view.plain) or '-'}"
        )
        return (Span(text[:width]),)

    return Table(title, rows, draw)


def _shares(document: TopDocument, view: View, width: int) -> Table:
    """Return the devices whose rates are controlled, each with its tenants under it."""
    spark = 20 if width >= WIDE else 10
    title = (
        f"{'DEVICE':<16} {'STAGE':<11} {'VERDICT':<9} {'LOSS':>6} {'BUDGET':>6} {'LENT':>5} "
        f"{'SOLO SPEED':<{spark}} WHY"
    )
    rows: list[tuple[TopShare, TopTenant | None]] = []
    for share in document.shares:
        words = (share.device, share.stage, share.verdict, *(t.name for t in share.tenants))
        if _matches(view, words):
            rows += [(share, None), *((share, tenant) for tenant in share.tenants)]
    if not rows:
        return _empty("no device is shared now", title, width)

    def draw(row: tuple[TopShare, TopTenant | None]) -> Line:
        share, tenant = row
        return _share(share, view, width, spark) if tenant is None else _member(tenant, view, width)

    return Table(title, rows, draw)


def _share(share: TopShare, view: View, width: int, spark: int) -> Line:
    loss = "-" if share.loss_ratio is None else f"{100 * share.loss_ratio:.1f}%"
    bars = "".join(map(bar, share.production_ratio[-spark:])).rjust(spark)
    text = (
        f"{_cut(share.device, 16, view)} {share.stage:<11} {share.verdict:<9} {loss:>6} "
        f"{100 * share.budget_ratio:>5.1f}% {ratio(share.lent_now_ratio):>5} "
        f"{bars.translate(TO_PLAIN) if view.plain else bars} "
    )
    why = "; ".join(filter(None, (share.reason, *share.bypasses)))
    style = "bad" if share.verdict == "violated" or share.bypasses else ""
    left = max(0, width - len(text))
    return Span(text[:width]), Span(clean(why, plain=view.plain)[:left], style)


def _member(tenant: TopTenant, view: View, width: int) -> Line:
    text = (
        f"  {_cut(tenant.name, 14, view)} {tenant.role:<13} weight {tenant.weight:g}, "
        f"{tenant.processes} processes, {tenant.device_s:.1f} s, "
        f"lease {tenant.lease or '-'}, {tenant.state}"
    )
    return (Span(clean(text, plain=view.plain)[:width]),)


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
