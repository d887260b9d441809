"""`alloy-agent top`: the node as it is now, drawn anew as often as asked.

With a daemon it shows what the daemon knows; without one it samples by itself and leaves nothing
behind. In a pipe, or with `--once`, it prints one picture; on a terminal that cannot place its text
(TERM=dumb) one after the other.
"""

from __future__ import annotations

import locale
import os
import shutil
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from alloy_agent.cli import output, topview
from alloy_agent.errors import ConfigError

if TYPE_CHECKING:
    from alloy_agent.cli.topscreen import Watch
    from alloy_agent.daemon.live import TopDocument

FIRST_LOOK_S = 1.2  # sampling by itself: so long until there is something to show


def add(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser("top", help="live view of devices, partitions, tenants, gates")
    parser.add_argument("--interval", metavar="SECONDS", type=float, default=1.0, help="0.1 to 10")
    parser.add_argument("--once", action="store_true", help="print one picture and leave")
    parser.add_argument("--json", action="store_true", help="print the document of now and leave")
    parser.add_argument("--sort", choices=topview.SORTS, default="device")
    parser.add_argument("--filter", default="", metavar="TEXT")
    parser.add_argument("--no-color", action="store_true", help="also by NO_COLOR")
    parser.set_defaults(run=run)


def run(arguments: Namespace) -> int:
    """Draw until told to leave."""
    if not 0.1 <= arguments.interval <= 10:
        raise ConfigError(
            f"--interval {arguments.interval:g}: not between 0.1 and 10 seconds",
            cure="give a number of seconds such as 1",
        )
    view = topview.View(
        sort=arguments.sort,
        filter=arguments.filter,
        interval_s=arguments.interval,
        plain="utf" not in locale.getpreferredencoding().lower(),
    )
    with _source(arguments) as source:
        if arguments.json:
            output.write_json(source.fetch())
            return 0
        if arguments.once or not (sys.stdout.isatty() and sys.stdin.isatty()):
            return _print_once(source.fetch(), view)
        if not _can_place():
            return _print_ever(source.watch(view.interval_s), view)
        return _draw(source.watch, view, color=not (arguments.no_color or _no_color()))


class Source(NamedTuple):
    """Where documents come from: one now, or one each so many seconds."""

    fetch: Callable[[], TopDocument]
    watch: Watch


def _no_color() -> bool:
    return bool(os.environ.get("NO_COLOR"))


@contextmanager
def _source(arguments: Namespace) -> Iterator[Source]:
    """Give the daemon of this host, or a node of our own."""
    from alloy_agent.cli.sources import quiet_logs, settings_of
    from alloy_agent.daemon.addresses import may_answer

    settings = settings_of(arguments)
    quiet_logs(arguments)
    if may_answer(settings):
        from alloy_agent.daemon.remote import find_daemon

        daemon = find_daemon(settings, write=False)
        if daemon is not None:
            with daemon:
                yield Source(daemon.top, daemon.watch_top)
            return
    from alloy_agent.daemon.alone import watching

    with watching(settings) as fetch:
        time.sleep(FIRST_LOOK_S)
        yield Source(fetch, lambda period_s: _asking(fetch, period_s))


def _asking(fetch: Callable[[], TopDocument], period_s: float) -> Iterator[TopDocument]:
    """Yield a document each period."""
    due_s = time.monotonic()
    while True:
        yield fetch()
        due_s = max(due_s + period_s, time.monotonic())
        time.sleep(due_s - time.monotonic() if due_s > time.monotonic() else 0.0)


def _print_once(document: TopDocument, view: topview.View) -> int:
    width = shutil.get_terminal_size((100, 24)).columns
    for line in _picture(document, view._replace(bars=1), topview.History(), width):
        output.write(line)
    return 0


def _picture(
    document: TopDocument, view: topview.View, history: topview.History, width: int
) -> list[str]:
    """Return the lines of a picture of everything, without the keys at its foot."""
    history.add(document)
    height = max(len(document.partitions), len(document.devices)) + len(document.drains[:2]) + 5
    lines = topview.frame(document, view, history, width, height)[:-1]
    texts = ["".join(span.text for span in line).rstrip() for line in lines]
    while texts and not texts[-1]:
        texts.pop()
    return texts


def _can_place() -> bool:
    """Whether this terminal can put text anywhere; one that cannot gets pictures in a row.

    Raises:
        ConfigError: Nobody knows what kind of terminal it is.
    """
    import curses

    try:
        curses.setupterm()
    except curses.error as exc:
        raise ConfigError(
            f"TERM {os.environ.get('TERM', '')}: unknown terminal", cure="use --once, or set TERM"
        ) from exc
    return bool(curses.tigetstr("cup"))


def _print_ever(documents: Iterator[TopDocument], view: topview.View) -> int:
    """Print one picture after the other until interrupted."""
    history = topview.History()
    for document in documents:
        width = shutil.get_terminal_size((80, 24)).columns
        for line in _picture(document, view, history, width):
            output.write(line)
        output.write("")
        output.flush()
    return 0


def _draw(watch: Watch, view: topview.View, *, color: bool) -> int:
    from alloy_agent.cli import topscreen

    os.environ.setdefault("ESCDELAY", "50")
    locale.setlocale(locale.LC_ALL, "")
    with topscreen.opened(color=color) as window:
        return topscreen.show(window, watch, view, color=color)
