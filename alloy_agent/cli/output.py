"""How answers look: plain in a pipe, drawn on a terminal, never wider than 100 columns."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from alloy_agent.daemon.api import OnProgress, Progress

WIDTH = 100
GAP = 2
MIN_FLEXIBLE = 12

STYLES = {
    "pass": "green",
    "fail": "bold red",
    "unknown": "yellow",
    "hard": "green",
    "enforced": "cyan",
    "soft": "yellow",
    "advisory": "magenta",
    "ok": "green",
    "missing": "bold red",
    "lost": "bold red",
    "stalled": "bold red",
    "failed": "bold red",
}


class Column(NamedTuple):
    """One column: its title, and whether its cells may be broken over lines."""

    title: str
    flexible: bool = False
    right: bool = False


def write(text: str) -> None:
    """Write one block of text and a line end to standard output."""
    sys.stdout.write(text)
    if not text.endswith("\n"):
        sys.stdout.write("\n")


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
    print(f"alloy-agent: {line}", file=sys.stderr)


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
    while sum(widths) > room:
        givers = [i for i in flexible if widths[i] > MIN_FLEXIBLE] or range(len(widths))
        widest = max(givers, key=lambda i: widths[i])
        if widths[widest] <= 1:
            break
        widths[widest] -= 1
    return widths


def _wrapped(cell: str, width: int) -> list[str]:
    return textwrap.wrap(cell, width, break_long_words=True, break_on_hyphens=False) or [""]


def _lines(columns: Sequence[Column], row: Sequence[str], widths: Sequence[int]) -> Iterator[str]:
    """Yield the lines of one row, its long cells broken."""
    cells = [_wrapped(cell, width) for cell, width in zip(row, widths, strict=True)]
    for number in range(max(len(cell) for cell in cells)):
        parts = []
        for column, cell, width in zip(columns, cells, widths, strict=True):
            text = cell[number] if number < len(cell) else ""
            parts.append(text.rjust(width) if column.right else text.ljust(width))
        yield (" " * GAP).join(parts).rstrip()


def plain_table(
    columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int = WIDTH
) -> str:
    """Return a table of plain text, at most `width` columns wide."""
    widths = fit(columns, rows, width)
    lines = list(_lines(columns, [c.title for c in columns], widths))
    for row in rows:
        lines.extend(_lines(columns, row, widths))
    return "\n".join(lines)


def _rich_table(columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold", show_edge=False)
    for column in columns:
        table.add_column(
            column.title,
            justify="right" if column.right else "left",
            overflow="fold",
            no_wrap=not column.flexible and len(rows) > 0 and len(columns) < 8,
        )
    for row in rows:
        table.add_row(*(Text(cell, style=STYLES.get(cell, "")) for cell in row))
    Console(width=width, highlight=False).print(table)


def table(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> None:
    """Write a table: drawn on a terminal, plain in a pipe."""
    if not is_terminal():
        write(plain_table(columns, rows))
        return
    sys.stdout.flush()
    _rich_table(columns, rows, min(WIDTH, shutil.get_terminal_size().columns))


def paragraph(text: str, indent: str = "") -> None:
    """Write a text wrapped to the width, its further lines indented."""
    write(textwrap.fill(text, WIDTH, subsequent_indent=indent, break_on_hyphens=False))


@contextmanager
def progress(what: str) -> Iterator[OnProgress | None]:
    """Give a callback that shows progress on a terminal, or None where nobody watches."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console

    with Console(stderr=True).status(what) as status:

        def show(step: Progress) -> None:
            status.update(f"{what} [{step.done}/{step.total}] {step.text}")

        yield show


def ask(question: str, read: Callable[[str], str] = input) -> bool:
    """Whether the person at the terminal says yes."""
    try:
        return read(f"{question} [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:
        return False
