"""The kernel's list format of CPU and node numbers (`0-3,8,10-11`) to tuples and back."""

from __future__ import annotations

from collections.abc import Iterable

MAX_CPU = 65_535  # far above CONFIG_NR_CPUS of any kernel; bounds what a corrupt list can expand to


def parse_cpu_list(text: str) -> tuple[int, ...]:
    """Return the numbers of a list, ascending and without doubles; an empty list is `()`.

    Raises:
        ValueError: The text is not such a list; it names the part that is not.
    """
    numbers: set[int] = set()
    for part in text.strip().split(","):
        if not part:
            if text.strip():
                raise ValueError(f"empty entry in CPU list {text.strip()!r}")
            continue
        first, dash, last = part.partition("-")
        low, high = _number(first, part), _number(last if dash else first, part)
        if low > high:
            raise ValueError(f"descending range {part!r} in CPU list")
        numbers.update(range(low, high + 1))
    return tuple(sorted(numbers))


def format_cpu_list(numbers: Iterable[int]) -> str:
    """Return numbers in the kernel's shortest form: `(0, 1, 2, 8)` gives `0-2,8`."""
    parts: list[str] = []
    ordered = sorted(set(numbers))
    start = 0
    for index, number in enumerate(ordered):
        if index + 1 == len(ordered) or ordered[index + 1] != number + 1:
            first = ordered[start]
            parts.append(str(first) if first == number else f"{first}-{number}")
            start = index + 1
    return ",".join(parts)


def _number(text: str, part: str) -> int:
    if not (text.isascii() and text.isdigit()) or len(text) > 5 or int(text) > MAX_CPU:
        raise ValueError(f"{part!r} is no CPU number or range")
    return int(text)
