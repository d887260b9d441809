"""How answers look: plain in a pipe, drawn on a terminal, never wider than 100 columns.

Rules that stay true in here: no text from elsewhere steers a terminal, whatever it holds; every
character can be printed in every locale; an answer that could not be written is an error.
"""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from alloy_agent.errors import AlloyError

if TYPE_CHECKING:
    from alloy_agent.daemon.api import OnProgress, Progress

WIDTH = 100
NARROWEST = 40  # a terminal that says less is not believed
PLAIN_RULES = str.maketrans("─│…", "-|.")  # where the locale has no such characters
GAP = 2
MIN_FLEXIBLE = 12

# SGR parameters. Source: ECMA-48, section 8.3.117
STYLES = {
    "pass": "32",
    "fail": "1;31",
    "unknown": "33",
    "hard": "32",
    "enforced": "36",
    "soft": "33",
    "advisory": "35",
    "ok": "32",
    "missing": "1;31",
    "lost": "1;31",
    "stalled": "1;31",
    "failed": "1;31",
}


class OutputError(AlloyError):
    """The answer could not be written: the disk behind standard output is full, or it failed."""


class Column(NamedTuple):
    """One column: its title, and whether its cells may be broken over lines."""

    title: str
    flexible: bool = False
    right: bool = False


def open_streams() -> None:
    """Make the three standard streams usable, whoever closed them and whatever the locale is.

    A closed one becomes nowhere: else the next file opened would take its number, and what is
    printed would land in it.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            nowhere = os.open(os.devnull, os.O_RDWR)
            if nowhere != number:
                os.dup2(nowhere, number)
                os.close(nowhere)
            os.set_inheritable(number, True)
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, mode, encoding="utf-8", closefd=False))
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")


@contextmanager
def writing() -> Iterator[None]:
    """Turn a failed write to standard output into an error that says so; a closed pipe stays one.

    Raises:
        OutputError: It cannot be written.
    """
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as exc:
        reason = (exc.strerror or str(exc)).lower()
        raise OutputError(f"standard output: {reason}", cure="the answer is not complete") from exc


def printable(text: str) -> str:
    """Return a text without characters that would steer a terminal, its line ends kept."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)


def write(text: str) -> None:
    """Write one block of text and a line end to standard output."""
    if (sys.stdout.encoding or "").lower().replace("-", "") != "utf8":
        text = text.translate(PLAIN_RULES)
    with writing():
        sys.stdout.write(text if text.endswith("\n") else f"{text}\n")


def flush() -> None:
    """Hand on what was written.

    Raises:
        OutputError: It cannot be written.
    """
    with writing():
        sys.stdout.flush()


def width() -> int:
    """Return how wide the page is: the terminal's width up to 100, 100 in a pipe."""
    if not is_terminal():
        return WIDTH
    columns = shutil.get_terminal_size().columns
    return min(WIDTH, columns) if columns >= NARROWEST else NARROWEST


def is_coloured() -> bool:
    """Whether colours are wanted: a terminal that can, and nobody said no."""
    return is_terminal() and os.environ.get("TERM") != "dumb" and not os.environ.get("NO_COLOR")


def write_json(document: object) -> None:
    """Write a document as indented JSON."""
    import msgspec

    body = msgspec.json.encode(document)
    write(msgspec.json.format(body, indent=2).decode())


def is_terminal() -> bool:
    """Whether a person reads standard output."""
    return sys.stdout.isatty()


def note(line: str) -> None:
    """Write a remark that is no part of the answer."""
    print(f"alloy-agent: {printable(line)}", file=sys.stderr)


def _natural(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> list[int]:
    """Return the width each column would like."""
    widths = []
    for index, column in enumerate(columns):
        cells = [row[index] for row in rows]
        widths.append(max([len(column.title), *(len(cell) for cell in cells)]))
    return widths


def fit(columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int) -> list[int]:
    """Return column widths that fit into `width`, taking from the widest flexible ones.

    Where flexible columns alone cannot give enough, the widest column of all gives.
    """
    widths = _natural(columns, rows)
    room = width - GAP * (len(columns) - 1)
    flexible = [i for i, column in enumerate(columns) if column.flexible]
    floors = [max(MIN_FLEXIBLE, len(column.title)) for column in columns]
    while sum(widths) > room:
        givers = [i for i in flexible if widths[i] > floors[i]] or range(len(widths))
        widest = max(givers, key=lambda i: widths[i])
        if widths[widest] <= 1:
            break
        widths[widest] -= 1
    return widths


def fits(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> bool:
    """Whether a table needs no cell broken but flexible ones, in `width()`."""
    widths = fit(columns, rows, width())
    whole = zip(columns, widths, _natural(columns, rows), strict=True)
    return all(given >= wanted for column, given, wanted in whole if not column.flexible)


def _wrapped(cell: str, width: int) -> list[str]:
    return textwrap.wrap(cell, width, break_long_words=True, break_on_hyphens=False) or [""]


def _lines(
    columns: Sequence[Column],
    row: Sequence[str],
    widths: Sequence[int],
    codes: Sequence[str] = (),
) -> Iterator[str]:
    """Yield the lines of one row, its long cells broken, each cell in its colour."""
    cells = [_wrapped(cell, width) for cell, width in zip(row, widths, strict=True)]
    for number in range(max(len(cell) for cell in cells)):
        parts = []
        for index, (column, cell) in enumerate(zip(columns, cells, strict=True)):
            text = cell[number] if number < len(cell) else ""
            last = index == len(columns) - 1
            blanks = " " * (widths[index] - len(text))
            code = codes[index] if index < len(codes) else ""
            shown = f"\x1b[{code}m{text}\x1b[0m" if code and text else text
            padded = f"{blanks}{shown}" if column.right else f"{shown}{'' if last else blanks}"
            parts.append(padded)
        yield (" " * GAP).join(parts).rstrip()


def plain_table(
    columns: Sequence[Column],
    rows: Sequence[Sequence[str]],
    width: int = WIDTH,
    *,
    drawn: bool = False,
    coloured: bool = False,
) -> str:
    """Return a table of text, at most `width` columns wide.

    Args:
        columns: What stands in the columns.
        rows: The cells; whatever they hold stays on its line.
        width: The page.
        drawn: With a rule below the titles.
        coloured: Titles bold, words of meaning in their colours.
    """
    safe = [[printable(" ".join(cell.split())) for cell in row] for row in rows]
    widths = fit(columns, safe, width)
    bold = ["1"] * len(columns) if coloured else []
    lines = list(_lines(columns, [c.title for c in columns], widths, bold))
    if drawn:
        lines.append("─" * (sum(widths) + GAP * (len(columns) - 1)))
    for row in safe:
        codes = [STYLES.get(cell, "") for cell in row] if coloured else []
        lines.extend(_lines(columns, row, widths, codes))
    return "\n".join(lines)


def table(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> None:
    """Write a table: drawn on a terminal, plain in a pipe."""
    drawn = is_terminal()
    write(plain_table(columns, rows, width(), drawn=drawn, coloured=is_coloured()))


def paragraph(text: str, indent: str = "") -> None:
    """Write a text wrapped to the width, its further lines indented."""
    text = printable(text)
    write(textwrap.fill(text, width(), subsequent_indent=indent, break_on_hyphens=False))


@contextmanager
def progress(what: str) -> Iterator[OnProgress | None]:
    """Give a callback that shows progress on a terminal, or None where nobody watches."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.text import Text

    with Console(stderr=True).status(Text(printable(what))) as status:

        def show(step: Progress) -> None:
            line = f"{what} [{step.done}/{step.total}] {step.text}"
            status.update(Text(printable(line)))

        yield show


def ask(question: str, read: Callable[[str], str] = input) -> bool:
    """Whether the person at the terminal says yes."""
    try:
        return read(f"{question} [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:
        return False
