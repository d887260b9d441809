"""A folder in which nobody should let Python look for modules."""

from __future__ import annotations

from pathlib import Path
from typing import Final

# modules of the standard library that everything here imports at some time
BAIT: Final = ("json", "socket", "selectors", "mmap", "logging", "struct", "hashlib", "ctypes")


def bait(folder: Path) -> Path:
    """Make the folder with modules that leave a mark beside it when somebody imports them."""
    folder.mkdir()
    for name in BAIT:
        code = f"open({str(mark_of(folder))!r}, 'a').write({name!r} + chr(10))\n"
        (folder / f"{name}.py").write_text(code + "raise ImportError('hostile')\n")
    return folder


def mark_of(folder: Path) -> Path:
    """Return the file that is there once somebody took the bait."""
    return folder.with_name(f"{folder.name}.mark")
