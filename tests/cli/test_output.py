"""Tables that fit, whatever stands in them."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from alloy_agent.cli.output import WIDTH, Column, plain_table

CELLS = st.text(alphabet=st.characters(min_codepoint=33, max_codepoint=126), max_size=200)


def test_a_table_is_aligned_and_stable() -> None:
    """Titles, left and right cells stand in columns two blanks apart."""
    columns = (Column("NAME", flexible=True), Column("SIZE", right=True))
    text = plain_table(columns, [("a", "10"), ("long name", "7")])
    assert text == "NAME       SIZE\na            10\nlong name     7"


def test_long_cells_are_wrapped_not_cut() -> None:
    """Nothing of a long cell is lost."""
    columns = (Column("ID"), Column("REASON", flexible=True))
    reason = "word " * 60 + "end"
    text = plain_table(columns, [("x", reason)])
    assert all(len(line) <= WIDTH for line in text.splitlines())
    assert text.split().count("word") == 60


@given(st.lists(st.tuples(CELLS, CELLS, CELLS, CELLS), max_size=5))
def test_every_table_fits(rows: list[tuple[str, str, str, str]]) -> None:
    """No content makes a table wider than the page, and every character is still there."""
    columns = (
        Column("A", flexible=True),
        Column("B", right=True),
        Column("C", flexible=True),
        Column("D"),
    )
    text = plain_table(columns, rows)
    assert all(len(line) <= WIDTH for line in text.splitlines())
    kept = sum(len(cell) for row in rows for cell in row)
    assert len("".join(text.split())) == kept + len("ABCD")


HOSTILE = st.text(max_size=60)


@given(st.lists(st.tuples(HOSTILE, HOSTILE), max_size=4))
def test_no_cell_steers_a_terminal(rows: list[tuple[str, str]]) -> None:
    """Whatever a cell holds, a row stays on its lines and nothing but printable text comes out."""
    text = plain_table((Column("A", flexible=True), Column("B")), rows)
    assert all(line.isprintable() and len(line) <= WIDTH for line in text.split("\n"))


def test_colours_are_words_of_meaning_only() -> None:
    """Drawn and coloured it is the same table with a rule; a word in a sentence has no colour."""
    columns = (Column("ID"), Column("TIER"), Column("WHY"))
    rows = [("a", "hard", "it is hard")]
    plain, drawn = (
        plain_table(columns, rows, drawn=d, coloured=d).splitlines() for d in (False, True)
    )
    bare = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in drawn]
    assert [bare[0], bare[2]] == plain
    assert set(bare[1]) == {"─"}
    assert drawn[2].count("\x1b[32mhard\x1b[0m") == 1
    assert drawn[2].endswith("it is hard")
