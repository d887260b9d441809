"""The terminal of `alloy-agent top`: what is drawn where, which key was pressed, what is new.

Rules that stay true in here:

* A line is written when it is otherwise than the one that stands there, and not else; after
  a change of size all are, for a while: a terminal moves its lines before or after it tells.
* Documents come on a thread of their own, newest wins: a daemon that is slow to answer never makes
  a key wait.
* Nothing wakes up but for a key, a document, or a terminal that was resized.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

from alloy_agent.cli import topview

if TYPE_CHECKING:
    from alloy_agent.daemon.live import TopDocument

Watch = Callable[[float], Iterator["TopDocument"]]
RESIZE_S: Final = 0.5  # so late a terminal's new size may be noticed
SETTLES_S: Final = 1.5  # so long a resized terminal may still move what is on it
STYLES: Final = (("good", "GREEN"), ("bad", "RED"), ("warn", "YELLOW"))


class Incoming:
    """The newest document, read on a thread; a byte in a pipe tells of each.

    Args:
        watch: Yields documents at a period.
    """

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._lock = threading.Lock()
        self._newest: TopDocument | None = None
        self._failure: BaseException | None = None
        self._number = 0  # of the period that is wanted now; readers of earlier ones end
        self.reader, self._writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def begin(self, period_s: float) -> None:
        """Read at a period from now on."""
        self.pause()
        number = self._number
        threading.Thread(
            target=self._read, args=(number, period_s), name="top", daemon=True
        ).start()

    def pause(self) -> None:
        """Read no more; who reads now ends with the next document, and closes its source."""
        with self._lock:
            self._number += 1

    def _read(self, number: int, period_s: float) -> None:
        try:
            for document in self._watch(period_s):
                with self._lock:
                    if number != self._number:
                        return
                    self._newest = document
                self._tell()
        except BaseException as exc:  # noqa: BLE001 - it is raised again where it is shown
            with self._lock:
                if number != self._number:
                    return
                self._failure = exc
            self._tell()

    def _tell(self) -> None:
        with contextlib.suppress(BlockingIOError):  # full: the reader has enough to come for
            os.write(self._writer, b".")

    def take(self) -> TopDocument | None:
        """Return the newest document that was not taken yet, or None.

        Raises:
            AlloyError: Reading has failed; as it failed.
        """
        with contextlib.suppress(BlockingIOError):
            os.read(self.reader, 4096)
        with self._lock:
            if self._failure is not None:
                raise self._failure
            document, self._newest = self._newest, None
        return document


@contextlib.contextmanager
def opened(*, color: bool) -> Iterator[Any]:
    """Give the whole terminal, and hand it back as it was.

    Without colour none is begun: curses' own start would paint everything white on black.
    """
    import curses

    if _real_size() is not None:  # what a parent has exported was its own, and outlives a resize
        for name in ("LINES", "COLUMNS"):
            os.environ.pop(name, None)
    window = curses.initscr()
    try:
        curses.noecho()
        curses.cbreak()
        if color:
            with contextlib.suppress(curses.error):
                curses.start_color()
        yield window
    finally:
        window.keypad(False)
        curses.echo()
        curses.nocbreak()
        curses.endwin()


def _real_size() -> tuple[int, int] | None:
    """Return lines and columns as the terminal itself says, or None where it does not know."""
    try:
        width, height = os.get_terminal_size(sys.stdout.fileno())
    except OSError:
        return None
    return (height, width) if min(height, width) > 0 else None


class Screen:
    """The terminal: draws lines, tells keys."""

    def __init__(self, window: Any, *, color: bool) -> None:
        import curses

        self._window = window
        self._styles: dict[str, int] = {"bold": curses.A_BOLD}
        self._shown: list[topview.Line] = []
        self.drawn = (0, 0)  # the size of the last picture
        self._settles_s = 0.0
        with contextlib.suppress(curses.error):  # some terminals always show their cursor
            curses.curs_set(0)
        if color and curses.has_colors():
            curses.use_default_colors()
            for number, (style, ink) in enumerate(STYLES, 1):
                curses.init_pair(number, getattr(curses, f"COLOR_{ink}"), -1)
                self._styles[style] = curses.color_pair(number)
        window.keypad(True)
        window.nodelay(True)

    @property
    def size(self) -> tuple[int, int]:
        """Lines and columns."""
        height, width = self._window.getmaxyx()
        return height, width

    def follow(self) -> None:
        """Take over the terminal's size, also where nobody told that it has another."""
        import curses

        real = _real_size()
        if real is not None and real != self.size:
            with contextlib.suppress(curses.error):
                curses.resizeterm(*real)

    @property
    def settling(self) -> bool:
        """Whether the size has changed a moment ago."""
        return time.monotonic() < self._settles_s

    def draw(self, lines: list[topview.Line]) -> None:
        """Show a picture; a terminal that is being made smaller loses what does not fit."""
        size = self.size
        if size != self.drawn:
            self._settles_s = time.monotonic() + SETTLES_S
        if self.settling:
            self._window.clearok(True)
        if size != self.drawn or len(lines) != len(self._shown):
            self._window.erase()
            self.drawn, self._shown = size, [()] * len(lines)
        for row, line in enumerate(lines):
            if line != self._shown[row]:
                self._write(row, line)
        self._shown = lines
        self._window.refresh()

    def _write(self, row: int, line: topview.Line) -> None:
        import curses

        column = 0
        with contextlib.suppress(curses.error):
            self._window.move(row, 0)
            for span in line:
                self._window.addstr(row, column, span.text, self._styles.get(span.style, 0))
                column += len(span.text)
            self._window.clrtoeol()

    def pressed(self) -> Iterator[str]:
        """Yield the keys that were pressed, by the names that `topview.press` knows."""
        import curses

        names = {
            curses.KEY_UP: "up", curses.KEY_DOWN: "down", curses.KEY_NPAGE: "pagedown",
            curses.KEY_PPAGE: "pageup", curses.KEY_BACKSPACE: "backspace",
            curses.KEY_ENTER: "enter", curses.KEY_RESIZE: "resize",
            "\n": "enter", "\r": "enter", "\t": "tab", "\x1b": "escape", "\x7f": "backspace",
            "\b": "backspace",
        }  # fmt: skip
        while True:
            try:
                pressed = self._window.get_wch()
            except curses.error:
                return
            name = names.get(pressed, pressed if isinstance(pressed, str) else "")
            if name:
                yield str(name)


def show(window: Any, watch: Watch, view: topview.View, *, color: bool) -> int:
    """Draw what comes until somebody leaves; return the exit code."""
    screen, history, incoming = Screen(window, color=color), topview.History(), Incoming(watch)
    incoming.begin(view.interval_s)
    document: TopDocument | None = None
    try:
        while True:
            ready, _, _ = select.select([sys.stdin, incoming.reader], [], [], RESIZE_S)
            came = incoming.take() if incoming.reader in ready else None
            if came is not None:
                document = came
                history.add(document)
            before = view
            for key in screen.pressed():
                after = topview.press(view, key)
                if after is None:
                    return 0
                view = after
            if (view.interval_s, view.held) != (before.interval_s, before.held):
                _pace(incoming, view)
            screen.follow()
            moved = screen.settling or screen.size != screen.drawn
            if document is not None and (came or moved or view != before):
                height, width = screen.size
                view = topview.clamped(document, view, history, height)
                screen.draw(topview.frame(document, view, history, max(1, width - 1), height))
    finally:
        incoming.pause()


def _pace(incoming: Incoming, view: topview.View) -> None:
    if view.held:
        incoming.pause()
    else:
        incoming.begin(view.interval_s)
