"""YAML text to a tree of plain values that knows the line of every part.

Hostile input is bounded before it is built: the text's size, the nesting, and the number of values
counted with every alias written out (so that a small file of aliases cannot grow). The parser's
events are consumed with a stack of our own, hence no recursion on input. Scalars follow the YAML
1.2 core rules in decimal: `no`, `on`, `0x10` and `007` are texts, `true` is a boolean; NaN and
infinities are refused, since no setting means them. Mapping keys are texts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from alloy_agent.errors import ConfigError

if TYPE_CHECKING:
    import yaml

SIZE_MAX_BYTES: Final = 4 << 20
DEPTH_MAX: Final = 32
VALUES_MAX: Final = 200_000

Scalar = str | int | float | bool | None
Path = tuple[str | int, ...]

_INT: Final = re.compile(r"[-+]?(?:0|[1-9][0-9]{0,18})", re.ASCII)
_FLOAT: Final = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?", re.ASCII)
_NOT_FINITE: Final = re.compile(r"[-+]?\.inf|\.nan", re.IGNORECASE | re.ASCII)
_WORDS: Final[dict[str, Scalar]] = {
    "": None, "~": None, "null": None, "Null": None, "NULL": None,
    "true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False,
}  # fmt: skip
_STRING_TAG: Final = "tag:yaml.org,2002:str"


class Located:
    """A scalar, a list or a mapping, with where it stands.

    `line` counts from 1; 0 means that `file` is not a file but says by itself where the value came
    from ("environment ALLOY_LOG_LEVEL"). For a mapping, `key_lines` has the line of each key.
    """

    __slots__ = ("count", "file", "key_lines", "line", "value")

    def __init__(
        self,
        value: Scalar | list[Located] | dict[str, Located],
        file: str,
        line: int,
        key_lines: dict[str, int] | None = None,
    ) -> None:
        self.value = value
        self.file = file
        self.line = line
        self.key_lines = key_lines or {}
        self.count = 1  # values in here, aliases written out

    @property
    def where(self) -> str:
        """The position as people quote it: "layout.yaml:12"."""
        return f"{self.file}:{self.line}" if self.line else self.file

    def at(self, *path: str | int) -> Located:
        """Return the part at `path`, or the deepest part on the way that exists."""
        node = self
        for step in path:
            inner = node.child(step)
            if inner is None:
                break
            node = inner
        return node

    def child(self, step: str | int) -> Located | None:
        """Return the direct part under a key or position, or None."""
        if isinstance(self.value, dict) and isinstance(step, str):
            return self.value.get(step)
        if isinstance(self.value, list) and isinstance(step, int):
            return self.value[step] if 0 <= step < len(self.value) else None
        return None

    def children(self) -> Iterator[tuple[str | int, Located]]:
        """Yield the direct parts with their key or position."""
        if isinstance(self.value, dict):
            yield from self.value.items()
        elif isinstance(self.value, list):
            yield from enumerate(self.value)


def path_text(path: Path) -> str:
    """Return a path the way people write it: `layouts.inference[0].mig`."""
    text = ""
    for step in path:
        if isinstance(step, int):
            text += f"[{step}]"
        else:
            text += f".{step[:60]}" if text else step[:60]
    return text


def located_error(node: Located, path: Path, cause: str, cure: str = "") -> ConfigError:
    """Return the error about one part: its position, its path, the cause, the cure."""
    place = path_text(path)
    return ConfigError(
        f"{node.where}: {place}: {cause}" if place else f"{node.where}: {cause}", cure=cure
    )


def parse_yaml(text: str, file: str) -> Located:
    """Return the one document of a YAML text; a text without any is an empty mapping.

    Raises:
        ConfigError: It is not YAML, or goes past a bound; the message has file and line.
    """
    check_text(text, file)
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    builder = _Builder(file)
    try:
        for event in yaml.parse(text, Loader=loader):
            builder.feed(event)
    except yaml.MarkedYAMLError as exc:
        mark = exc.problem_mark or exc.context_mark
        place = f"{file}:{mark.line + 1}" if mark else file
        cause = " ".join(filter(None, (exc.context, exc.problem))) or "broken"
        cure = "indent with spaces only, and put texts with ':' or '#' in quotes"
        raise ConfigError(f"{place}: not YAML, {cause}", cure=cure) from exc
    except yaml.YAMLError as exc:
        cause = " ".join(str(exc).split())[:200]
        raise ConfigError(
            f"{file}: not YAML, {cause}", cure="save the file as plain UTF-8 text"
        ) from exc
    return builder.root if builder.root is not None else Located({}, file, 1)


def check_text(text: str, file: str) -> None:
    """Raise a `ConfigError` when a text is too large to parse, or holds NUL or half a character."""
    if len(text) > SIZE_MAX_BYTES:
        raise ConfigError(
            f"{file}: {len(text)} characters are more than {SIZE_MAX_BYTES}", cure="split the file"
        )
    bad = _BAD_CHARACTER.search(text)
    if bad is not None:
        line = text.count("\n", 0, bad.start()) + 1
        raise ConfigError(
            f"{file}:{line}: character U+{ord(bad[0]):04X} cannot stand in a text file",
            cure="remove it; is this the right file?",
        )


# What YAML calls printable, less what Python cannot encode (YAML 1.2.2, section 5.1).
_BAD_CHARACTER: Final = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x84\x86-\x9f\ud800-\udfff\ufffe\uffff]"
)


class _Builder:
    """Turns the parser's events into one tree."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.root: Located | None = None
        self._open: list[Located] = []
        self._keys: list[
            tuple[str, int] | None
        ] = []  # per open part: the key that waits for its value
        self._anchors: dict[str, Located] = {}

    def feed(self, event: yaml.Event) -> None:
        """Take one event of the parser."""
        import yaml

        line = event.start_mark.line + 1 if event.start_mark else 0
        if isinstance(event, yaml.ScalarEvent):
            self._scalar(event, line)
        elif isinstance(event, yaml.AliasEvent):
            self._alias(event.anchor or "", line)
        elif isinstance(event, (yaml.MappingStartEvent, yaml.SequenceStartEvent)):
            self._refuse_tag(event.tag, line)
            value: dict[str, Located] | list[Located] = (
                {} if isinstance(event, yaml.MappingStartEvent) else []
            )
            self._start(Located(value, self.file, line), event.anchor)
        elif isinstance(event, (yaml.MappingEndEvent, yaml.SequenceEndEvent)):
            self._keys.pop()
            self._place(self._open.pop())
        elif isinstance(event, yaml.DocumentStartEvent) and self.root is not None:
            raise self._error(
                line, "a second document begins", "keep one document; remove this '---'"
            )

    def _start(self, node: Located, anchor: str | None) -> None:
        if len(self._open) >= DEPTH_MAX:
            raise self._error(node.line, f"nested deeper than {DEPTH_MAX}", "flatten it")
        if self._expects_key():
            raise self._error(
                node.line, "a list or mapping stands as a key", "use a plain text as the key"
            )
        self._open.append(node)
        self._keys.append(None)
        if anchor is not None:
            self._anchors[anchor] = node

    def _scalar(self, event: yaml.ScalarEvent, line: int) -> None:
        if self._expects_key():
            self._key(event.value, line)
            return
        self._refuse_tag(event.tag, line)
        plain = event.implicit[0] and event.tag is None
        value: Scalar = self._resolve(event.value, line) if plain else event.value
        node = Located(value, self.file, line)
        if event.anchor is not None:
            self._anchors[event.anchor] = node
        self._place(node)

    def _alias(self, anchor: str, line: int) -> None:
        node = self._anchors.get(anchor)
        if node is None:
            raise self._error(
                line, f"alias *{anchor[:40]} has no anchor", f"write &{anchor[:40]} before it"
            )
        if any(node is part for part in self._open):
            raise self._error(
                line, f"alias *{anchor[:40]} stands inside its own anchor", "write it out"
            )
        if self._expects_key():
            raise self._error(line, "an alias stands as a key", "write the key out")
        self._place(node)

    def _expects_key(self) -> bool:
        return (
            bool(self._open) and isinstance(self._open[-1].value, dict) and self._keys[-1] is None
        )

    def _key(self, key: str, line: int) -> None:
        parent = self._open[-1]
        if key == "<<":
            raise self._error(line, "merge keys ('<<') are not accepted", "write the keys out")
        first = parent.key_lines.get(key)
        if first is not None:
            raise self._error(
                line,
                f"key '{key[:60]}' stands here again, first on line {first}",
                "keep one of the two",
            )
        parent.key_lines[key] = line
        self._keys[-1] = (key, line)

    def _place(self, node: Located) -> None:
        if not self._open:
            self.root = node
            return
        parent = self._open[-1]
        parent.count += node.count
        if parent.count > VALUES_MAX:
            raise self._error(
                node.line,
                f"more than {VALUES_MAX} values with the aliases written out",
                "shorten the file",
            )
        if isinstance(parent.value, list):
            parent.value.append(node)
        elif isinstance(parent.value, dict):
            key = self._keys[-1]
            self._keys[-1] = None
            if key is not None:
                parent.value[key[0]] = node

    def _resolve(self, text: str, line: int) -> Scalar:
        if text in _WORDS:
            return _WORDS[text]
        if _INT.fullmatch(text):
            return int(text)
        if _NOT_FINITE.fullmatch(text):
            raise self._error(line, f"{text} is no finite number", "write a finite number")
        if text[0] not in "-+.0123456789" or not _FLOAT.fullmatch(text):
            return text
        if _LEADING_ZERO.match(text):
            return text
        number = float(text)
        if number in (float("inf"), float("-inf")):
            raise self._error(line, f"{text[:40]} is no finite number", "write a finite number")
        return number

    def _refuse_tag(self, tag: str | None, line: int) -> None:
        if tag not in (None, "!", _STRING_TAG):
            raise self._error(line, f"tag {tag} is not accepted"[:120], "remove the tag")

    def _error(self, line: int, cause: str, cure: str) -> ConfigError:
        return ConfigError(f"{self.file}:{line}: {cause}", cure=cure)


_LEADING_ZERO: Final = re.compile(r"[-+]?0[0-9]", re.ASCII)


def scalar_of(text: str, file: str) -> Scalar:
    """Return what a plain text (of an environment variable or option) means as a YAML scalar."""
    return _Builder(file)._resolve(text.strip(), 0)  # noqa: SLF001 - same module
