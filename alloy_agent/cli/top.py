"""`alloy-agent top`: the node as it is now, drawn anew as often as asked.

With a daemon it shows what the daemon knows; without one it samples by itself and leaves nothing
behind. In a pipe, or with `--once`, it prints one picture.
"""

from __future__ import annotations

import contextlib
import locale
import os
import shutil
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from alloy_agent.cli import output, topview
from alloy_agent.errors import ConfigError

if TYPE_CHECKING:
    from alloy_agent.daemon.live import TopDocument

Fetch = Callable[[], "TopDocument"]
FIRST_LOOK_S = 1.2  # sampling by itself: so long until there is something to show


def add(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser("top", help="live view of devices, partitions, tenants, gates")
    parser.add_argument("--interval", metavar="SECONDS", type=float, default=1.0, help="0.1 to 10")
    parser.add_argument("--once", action="store_true", help="print one picture and leave")
    parser.add_argument("--json", action="store_true", help="print the document of now and leave")
    parser.add_argument("--sort", choices=topview.SORTS, default="device")
    parser.add_argument("--filter", default="", metavar="TEXT")
    parser.add_argument("--no-color", action="store_true", help="also by NO_COLOR or TERM=dumb")
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
    with _source(arguments) as fetch:
        if arguments.json:
            output.write_json(fetch())
            return 0
        if arguments.once or not (sys.stdout.isatty() and sys.stdin.isatty()):
            return _print_once(fetch, view)
        return _draw(fetch, view, color=not arguments.no_color and not os.environ.get("NO_COLOR"))


@contextmanager
def _source(arguments: Namespace) -> Iterator[Fetch]:
    """Give what returns the document of now: the daemon of this host, or a node of our own."""
    from alloy_agent.cli.sources import quiet_logs, settings_of
    from alloy_agent.daemon.addresses import may_answer

    settings = settings_of(arguments)
    quiet_logs(arguments)
    if may_answer(settings):
        from alloy_agent.daemon.remote import find_daemon

        daemon = find_daemon(settings, write=False)
        if daemon is not None:
            with daemon:
                yield daemon.top
            return
    from alloy_agent.daemon.alone import watching

    with watching(settings) as fetch:
        time.sleep(FIRST_LOOK_S)
        yield fetch


def _print_once(fetch: Fetch, view: topview.View) -> int:
    document = fetch()
    history = topview.History()
    history.add(document)
    width = shutil.get_terminal_size((100, 24)).columns
    height = len(document.partitions) + len(document.drains[:2]) + 5
    for line in topview.frame(document, view, history, width, height)[:-1]:
        output.write("".join(span.text for span in line).rstrip())
    return 0


def _draw(fetch: Fetch, view: topview.View, *, color: bool) -> int:
    import curses

    os.environ.setdefault("ESCDELAY", "50")
    try:
        curses.setupterm()
    except curses.error as exc:
        raise ConfigError(
            f"TERM {os.environ.get('TERM', '')}: unknown terminal", cure="use --once, or set TERM"
        ) from exc
    locale.setlocale(locale.LC_ALL, "")
    return int(curses.wrapper(lambda screen: _loop(screen, fetch, view, color=color)))


class _Screen:
    """The terminal: draws lines, tells keys."""

    def __init__(self, window: Any, *, color: bool) -> None:
        import curses

        self._window = window
        self._styles: dict[str, int] = {"bold": curses.A_BOLD}
        with contextlib.suppress(curses.error):  # some terminals always show their cursor
            curses.curs_set(0)
        if color and curses.has_colors():
            curses.use_default_colors()
            for number, (style, ink) in enumerate(
                (
                    ("good", curses.COLOR_GREEN),
                    ("bad", curses.COLOR_RED),
                    ("warn", curses.COLOR_YELLOW),
                ),
                1,
            ):
                curses.init_pair(number, ink, -1)
                self._styles[style] = curses.color_pair(number)
        window.keypad(True)

    def draw(self, document: TopDocument, view: topview.View, history: topview.History) -> None:
        """Draw one picture; a terminal that is being made smaller loses what does not fit."""
        import curses

        height, width = self._window.getmaxyx()
        self._window.erase()
        lines = topview.frame(document, view, history, max(1, width - 1), height)
        for row, line in enumerate(lines):
            column = 0
            for span in line:
                try:
                    self._window.addstr(row, column, span.text, self._styles.get(span.style, 0))
                except curses.error:
                    break
                column += len(span.text)
        self._window.refresh()

    def key(self, timeout_s: float) -> str:
        """Return a key within a time; "" where none was pressed."""
        import curses

        self._window.timeout(max(0, int(timeout_s * 1e3)))
        try:
            pressed = self._window.get_wch()
        except curses.error:
            return ""
        names = {
            curses.KEY_UP: "up", curses.KEY_DOWN: "down", curses.KEY_NPAGE: "pagedown",
            curses.KEY_PPAGE: "pageup", curses.KEY_BACKSPACE: "backspace",
            curses.KEY_ENTER: "enter", curses.KEY_RESIZE: "resize",
            "\n": "enter", "\r": "enter", "\t": "tab", "\x1b": "escape", "\x7f": "backspace",
            "\b": "backspace",
        }  # fmt: skip
        return str(names.get(pressed, pressed if isinstance(pressed, str) else ""))


def _loop(window: Any, fetch: Fetch, view: topview.View, *, color: bool) -> int:
    screen, history = _Screen(window, color=color), topview.History()
    document = fetch()
    history.add(document)
    next_s = time.monotonic() + view.interval_s
    while True:
        screen.draw(document, view, history)
        key = screen.key(next_s - time.monotonic())
        if key:
            pressed = topview.press(view, key)
            if pressed is None:
                return 0
            if pressed.interval_s != view.interval_s:
                next_s = time.monotonic()
            view = pressed
        if time.monotonic() >= next_s:
            next_s = max(next_s + view.interval_s, time.monotonic())
            if not view.held:
                document = fetch()
                history.add(document)
