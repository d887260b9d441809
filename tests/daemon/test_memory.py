"""Giving memory back touches nothing but clean copies of files."""

from __future__ import annotations

from alloy_agent.daemon import memory

MAPS = """\
55d0c0000000-55d0c0001000 r--p 00000000 fe:00 1 /usr/bin/python3.11
55d0c0001000-55d0c0005000 r-xp 00001000 fe:00 1 /usr/bin/python3.11
7f0000000000-7f0000010000 rw-p 00000000 00:00 0
7f0000010000-7f0000020000 r-xp 00000000 00:00 0
7f0000020000-7f0000021000 r-xp 00000000 00:00 0 [vdso]
7f0000030000-7f0000032000 rwxp 00000000 fe:00 2 /usr/lib/jit.so
7f0000040000-7f0000042000 r-xp 00000000 fe:00 3 /usr/lib/a b.so
"""


def test_only_code_of_files_is_dropped() -> None:
    """Writable, anonymous and kernel-made mappings are never named."""
    assert list(memory.code_ranges(MAPS.splitlines(keepends=True))) == [
        (0x55D0C0001000, 0x4000),
        (0x7F0000040000, 0x2000),
    ]


def test_the_process_lives_on() -> None:
    """After it, code runs and data is as it was."""
    before = list(range(1000))
    memory.settle()
    import decimal

    assert before == list(range(1000))
    assert decimal.Decimal("1.1") + decimal.Decimal("2.2") == decimal.Decimal("3.3")
