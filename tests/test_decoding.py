"""Strict typed YAML and JSON: what is read, and that every refusal is one line with its place."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from alloy_agent import decoding
from alloy_agent.decoding import (
    GIB,
    SIZE_MAX_BYTES,
    decode_json,
    decode_yaml,
    duration,
    duration_seconds,
    parse_yaml,
    read_text,
    scalar_of,
    size,
    size_bytes,
)
from alloy_agent.errors import ConfigError
from alloy_agent.model import Value


class Inner(Value, frozen=True, kw_only=True):
    """One entry."""

    name: str
    period_s: Annotated[float, duration("10ms", "1h")] = 1.0
    memory_bytes: Annotated[int, size("1MiB", "1TiB")] | None = None
    level: Literal["low", "high"] = "low"
    on: bool = False


class Outer(Value, frozen=True, kw_only=True):
    """A file."""

    groups: dict[str, tuple[Inner, ...]]
    count: int = 0
    mixed: str | tuple[int, ...] | None = None


def refusal(text: str, type_: Any = Outer) -> str:
    """Return the one line with which a text is refused."""
    with pytest.raises(ConfigError) as caught:
        decode_yaml(text, type_, "f.yaml")
    line = str(caught.value)
    assert "\n" not in line
    assert line.startswith("f.yaml")
    return line


def told(call: Any, *arguments: Any) -> str:
    """Return the refusal of a call, or "read" where there is none; anything else is raised."""
    try:
        call(*arguments)
    except ConfigError as error:
        return str(error)
    return "read"


# --- reading -----------------------------------------------------------------------------------


def test_a_file_is_read_into_frozen_values_with_units() -> None:
    """Texts with units and plain numbers give the same seconds and bytes."""
    text = """
    count: 3
    mixed: [1, 2]
    groups:
      a:
        - {name: x, period_s: 100ms, memory_bytes: 8GiB}
        - {name: "1", period_s: 0.1, memory_bytes: 8589934592, level: high, on: true}
    """
    read = decode_yaml(text, Outer, "f.yaml")
    first, second = read.groups["a"]
    assert first.period_s == second.period_s == pytest.approx(0.1)
    assert first.memory_bytes == second.memory_bytes == 8 * GIB
    assert (read.count, read.mixed, second.on) == (3, (1, 2), True)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("no", "no"),
        ("on", "on"),
        ("0x10", "0x10"),
        ("007", "007"),
        ("00.5", "00.5"),
        ("1_000", "1_000"),
        ("12:30", "12:30"),
        ("2024-01-01", "2024-01-01"),
        ("~", None),
        ("true", True),
        ("-7", -7),
        ("1e3", 1000.0),
        (".5", 0.5),
        ("'7'", "7"),
        ("!!str 7", "7"),
        ("99999999999999999999", 1e20),
    ],
)
def test_plain_scalars_follow_the_core_rules(text: str, value: object) -> None:
    """Only true, false, null and decimal numbers are more than text."""
    read = parse_yaml(f"k: {text}", "f.yaml").at("k").value
    assert read == value
    assert type(read) is type(value)


def test_an_alias_is_its_anchor() -> None:
    """Entries written once can be used twice."""
    text = "groups:\n  a: &g\n    - {name: x}\n  b: *g\n"
    read = decode_yaml(text, Outer, "f.yaml")
    assert read.groups["a"] == read.groups["b"]


def test_an_empty_text_is_an_empty_mapping() -> None:
    """A file of comments only holds no key, and is no error by itself."""
    assert parse_yaml("# nothing\n", "f.yaml").value == {}
    assert "key 'groups' is missing" in refusal("# nothing\n")


@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-(10**17), 10**17)
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.text(
            st.characters(
                min_codepoint=32, max_codepoint=0x24F, blacklist_characters="\x7f\x85\xa0\xad"
            ),
            max_size=12,
        ).filter(lambda t: not any(0x7F <= ord(c) <= 0x9F for c in t)),
        lambda inner: (
            st.lists(inner, max_size=4)
            | st.dictionaries(st.text("abcdefgh", min_size=1, max_size=5), inner, max_size=4)
        ),
        max_leaves=12,
    )
)
def test_what_a_careful_writer_writes_is_read_back(value: Any) -> None:
    """Values written with quotes where needed come back as they were, with a line for each part."""
    text = yaml.safe_dump({"k": value}, default_style=None, allow_unicode=True)
    node = parse_yaml(text, "f.yaml").at("k")
    assert plain(node) == value


def plain(node: Any) -> Any:
    """Return a tree without its places."""
    assert node.line >= 1
    if isinstance(node.value, dict):
        return {key: plain(part) for key, part in node.value.items()}
    if isinstance(node.value, list):
        return [plain(part) for part in node.value]
    return node.value


# --- refusing ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "start", "words"),
    [
        ("groups: [1\n", "f.yaml:2: not YAML", "flow sequence"),
        ("a: b: c\n", "f.yaml:1: not YAML", "mapping values"),
        ("\tcount: 1\n", "f.yaml:1: not YAML", "token"),
        ("count: 1\ncount: 2\n", "f.yaml:2: key 'count'", "first on line 1"),
        ("groups: {}\ncuont: 1\n", "f.yaml:2: unknown key 'cuont'", "did you mean 'count'?"),
        ("groups: {}\nzzz: 1\n", "f.yaml:2: unknown key 'zzz'", "known are count, groups, mixed"),
        ("groups:\n  a:\n    - {nmae: x}\n", "f.yaml:3: groups.a[0]: unknown", "'name'?"),
        ("groups:\n  a:\n    - on: true\n", "f.yaml:3: groups.a[0]: key 'name'", "missing"),
        ("groups: {}\ncount: true\n", "f.yaml:2: count: expected a whole number", "true or false"),
        ("groups: {}\ncount: 1.5\n", "f.yaml:2: count: expected a whole number", "got"),
        ("groups: {}\nmixed: {}\n", "f.yaml:2: mixed: expected", "got a mapping"),
        ("groups: {}\ncount: .nan\n", "f.yaml:2: .nan is no finite number", "finite"),
        ("groups: {}\ncount: -.INF\n", "f.yaml:2: -.INF is no finite number", "finite"),
        ("groups: {}\ncount: 1e999\n", "f.yaml:2: 1e999 is no finite number", "finite"),
        ("groups:\n  b: []\n  a:\n    - {name: 7}\n", "f.yaml:4: groups.a[0].name", "a text"),
        (
            "groups:\n  b: [{name: x}]\n  a:\n    - name: x\n      level: loud\n",
            "f.yaml:5: groups.a[0].level: unknown value 'loud'",
            "use one of high, low",
        ),
        (
            "groups:\n  a:\n    - name: x\n      period_s: 1ms\n",
            "f.yaml:4: groups.a[0].period_s: expected a number >= 0.01",
            "'1ms'",
        ),
        (
            "groups:\n  a: [{name: x, period_s: 5 parsecs}]\n",
            "f.yaml:2: groups.a[0].period_s: '5 parsecs' is not a duration",
            "100ms",
        ),
        (
            "groups:\n  a: [{name: x, memory_bytes: 9XB}]\n",
            "f.yaml:2: groups.a[0].memory_bytes: '9XB' is not a size",
            "512MiB",
        ),
        (
            "groups:\n  a: [{name: x, memory_bytes: 2TiB}]\n",
            "f.yaml:2: groups.a[0].memory_bytes: expected a whole number <=",
            "'2TiB'",
        ),
        ("count: !!python/object:os.system 1\n", "f.yaml:1: tag", "not accepted"),
        ("count: !!int '1'\n", "f.yaml:1: tag", "not accepted"),
        ("count: *nowhere\n", "f.yaml:1: alias *nowhere has no anchor", "&nowhere"),
        ("groups: &g\n  a: *g\n", "f.yaml:2: alias *g stands inside", "write it out"),
        ("? [1]\n: 2\n", "f.yaml:1: a list or mapping stands as a key", "plain text"),
        ("a: &a k\n? *a\n: 2\n", "f.yaml:2: an alias stands as a key", "write"),
        ("a: &a {count: 1}\nb:\n  <<: *a\n", "f.yaml:3: merge keys", "write the keys out"),
        ("count: 1\n---\ncount: 2\n", "f.yaml:2: a second document", "remove"),
        ("count: 1\x00\n", "f.yaml:1: character U+0000", "right file"),
        ("count: 1\n\x1b[31m\n", "f.yaml:2: character U+001B", "right file"),
        ("[" * 1000, "f.yaml:1: nested deeper than 32", "flatten"),
        ("- " * 1000 + "1", "f.yaml:1: nested deeper than 32", "flatten"),
        ("just text\n", "f.yaml:1: expected a mapping, got a text", ""),
    ],
)
def test_bad_input_is_one_line_with_place_cause_and_cure(text: str, start: str, words: str) -> None:
    """Each kind of mistake is told with its line and what to do."""
    line = refusal(text)
    assert line.startswith(start), line
    assert words in line


def test_aliases_that_grow_are_refused_before_they_do() -> None:
    """Ten levels of ten aliases would be ten thousand million values."""
    levels = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    levels += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 11)]
    assert "values with the aliases written out" in refusal("\n".join(levels))


def test_a_text_that_is_too_large_is_refused_unparsed() -> None:
    """The bound is on the text, before the parser sees it."""
    assert "are more than" in refusal("#" * (SIZE_MAX_BYTES + 1))


@given(st.text(max_size=200))
@example("\ud800")
@example("%YAML 9.9\n---\n")
@example("&a &b c")
@example("!<tag:x> y")
@example("? ")
@example("- - - ? - : -")
def test_no_text_ever_raises_anything_else(text: str) -> None:
    """Whatever the text, it is read or refused in one line."""
    for type_ in (Outer, Inner):
        assert "\n" not in told(decode_yaml, text, type_, "f.yaml")


@given(
    st.lists(
        st.sampled_from(
            [
                "groups",
                "a",
                "count",
                ":",
                "[",
                "]",
                "{",
                "}",
                ",",
                "&x",
                "*x",
                "!!str",
                "name",
                "period_s",
                "1s",
                "9",
                "true",
                "null",
                "'",
                "|",
                ">",
                "#",
                "<<",
                "-",
                " ",
                "\n",
                "  ",
                '"',
            ]
        ),
        max_size=40,
    )
)
def test_no_arrangement_of_yaml_marks_raises_anything_else(parts: list[str]) -> None:
    """Nearly right files are read or refused in one line."""
    assert told(decode_yaml, "".join(parts), Outer, "f.yaml").startswith(("f.yaml", "read"))


@given(st.binary(max_size=200))
def test_no_file_ever_raises_anything_else(tmp_path_factory: Any, raw: bytes) -> None:
    """Bytes that are no text are refused with file and line."""
    path: Path = tmp_path_factory.mktemp("fuzz") / "f.yaml"
    path.write_bytes(raw)

    def read() -> Outer:
        return decode_yaml(read_text(path), Outer, str(path))

    assert told(read).startswith((str(path), "read"))


# --- files -------------------------------------------------------------------------------------


def test_files_that_cannot_be_read_are_named_with_the_cure(tmp_path: Path) -> None:
    """Missing, a directory, not UTF-8, too large, impossible."""
    bad = tmp_path / "latin.yaml"
    bad.write_bytes(b"a: 1\nb: \xe9\n")
    large = tmp_path / "large.yaml"
    large.write_bytes(b"#" * (SIZE_MAX_BYTES + 1))
    for path, words in (
        (tmp_path / "none.yaml", "no such file"),
        (tmp_path, "directory"),
        (bad, "latin.yaml:2: byte 0xe9 is no UTF-8"),
        (large, "larger than"),
        ("a\0b", "not a path"),
    ):
        with pytest.raises(ConfigError) as caught:
            read_text(path)
        assert words in str(caught.value)
        assert caught.value.cure


def _huge(path: Path) -> None:
    """Make a file that is large and takes no room."""
    path.touch()
    os.truncate(path, 1 << 36)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (os.mkfifo, "a named pipe"),
        (lambda path: path.symlink_to("/dev/zero"), "a device"),
        (lambda path: path.symlink_to("/dev/null"), "a device"),
        (lambda path: path.symlink_to(path.with_name("pipe")), "a named pipe"),
        (_huge, "68719476736 bytes"),
        (lambda path: path.mkdir(), "directory"),
    ],
    ids=["pipe", "endless", "empty", "link", "huge", "directory"],
)
def test_what_is_no_file_is_refused_at_once(
    tmp_path: Path, make: Callable[[Path], object], words: str
) -> None:
    """Nothing but a file is opened, and nothing of a huge one is read: one line with the cure."""
    os.mkfifo(tmp_path / "pipe")
    path = tmp_path / "layout.yaml"
    make(path)
    with pytest.raises(ConfigError, match=words) as caught:
        read_text(path)
    assert str(path) in caught.value.message
    assert caught.value.cure


def test_a_file_that_becomes_a_pipe_meanwhile_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replaced between the look and the open, it is still refused."""
    path, judge, looks = tmp_path / "layout.yaml", decoding._refuse_odd, []
    path.write_text("a: 1\n")

    def replaced(name: str, info: os.stat_result) -> None:
        judge(name, info)
        looks.append(name)
        if len(looks) == 1:
            path.unlink()
            os.mkfifo(path)

    monkeypatch.setattr(decoding, "_refuse_odd", replaced)
    with pytest.raises(ConfigError, match="named pipe"):
        read_text(path)


def test_a_byte_order_mark_is_not_part_of_the_text(tmp_path: Path) -> None:
    """Editors that write one do not break the first key."""
    path = tmp_path / "bom.yaml"
    path.write_bytes(b"\xef\xbb\xbfcount: 1\ngroups: {}\n")
    assert decode_yaml(read_text(path), Outer, str(path)).count == 1


# --- units -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("100ms", 0.1),
        ("2s", 2.0),
        ("1.5m", 90.0),
        ("5min", 300.0),
        ("6h", 21600.0),
        ("250us", 25e-5),
    ],
)
def test_durations(text: str, seconds: float) -> None:
    """The unit follows the number."""
    assert duration_seconds(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("text", "count"),
    [("8GiB", 8 << 30), ("512MiB", 512 << 20), ("1.5GB", 1_500_000_000), ("1KiB", 1024), ("7B", 7)],
)
def test_sizes(text: str, count: int) -> None:
    """Binary and decimal units are told apart."""
    assert size_bytes(text) == count


@pytest.mark.parametrize("text", ["", "5", "s", "-1s", "1 s s", "1e3s", "nan s", "inf", "٣s", "1S"])
def test_what_is_no_duration_or_size_is_refused(text: str) -> None:
    """No sign, no exponent, no other digits, no unit left out."""
    with pytest.raises(ValueError, match="write it like"):
        duration_seconds(text)
    with pytest.raises(ValueError, match="write it like"):
        size_bytes(text)


@given(st.text(max_size=20))
def test_units_of_any_text_are_finite_or_refused(text: str) -> None:
    """A unit parser gives a number that is none below zero, or a ValueError."""
    for read in (duration_seconds, size_bytes):
        try:
            value = read(text)
        except ValueError:
            continue
        assert math.isfinite(value)
        assert value >= 0


def test_a_scalar_of_a_variable_is_what_it_is_in_a_file() -> None:
    """Environment variables and options are read by the same rules."""
    assert [scalar_of(text, "env") for text in ("true", " 5 ", "no", "1.5")] == [True, 5, "no", 1.5]


# --- JSON --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"groups": {}, "count": 1', "f.json:1: not JSON"),
        ('{"groups": {},\n "count": 1,\n "count": 2}', "key 'count' stands twice"),
        ('{"groups": {},\n "count": "x"}', "f.json:2: count: expected a whole number"),
        ('{"groups": {},\n "counts": 1}', "f.json:2: unknown key 'counts'"),
        ('{"groups": {}, "count": NaN}', "NaN is no finite number"),
        ("[" * 100000, "f.json"),
        ("", "f.json:1: not JSON"),
    ],
)
def test_bad_json_is_one_line_with_place_and_cause(text: str, words: str) -> None:
    """JSON is refused as strictly as YAML."""
    with pytest.raises(ConfigError) as caught:
        decode_json(text, Outer, "f.json")
    assert words in str(caught.value)


def test_json_is_read_into_the_same_values() -> None:
    """A value written as JSON comes back equal."""
    value = Outer(groups={"a": (Inner(name="x", memory_bytes=2 << 20),)}, count=2)
    assert decode_json(msgspec.json.encode(value).decode(), Outer, "f.json") == value


@given(st.text(max_size=100) | st.binary(max_size=60).map(lambda raw: raw.decode("latin-1")))
def test_no_json_ever_raises_anything_else(text: str) -> None:
    """Whatever the text, it is read or refused in one line."""
    for candidate in (text, f'{{"groups": {text}}}'):
        assert "\n" not in told(decode_json, candidate, Outer, "f.json")


def test_a_named_pipe_is_refused_without_opening_it(tmp_path: Path) -> None:
    """A pipe that nobody writes to would hold up whoever reads it, a reload of the daemon too."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="named pipe: name a file"):
        read_text(tmp_path / "pipe")
