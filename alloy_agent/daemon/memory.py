"""Keeping the daemon small: memory that only its start needed goes back to the kernel."""

from __future__ import annotations

import contextlib
import ctypes
import gc
from collections.abc import Iterable, Iterator
from pathlib import Path

M_ARENA_MAX = -8  # malloc.h of glibc
ARENAS = 1
MADV_DONTNEED = 4  # asm-generic/mman-common.h


def one_arena() -> None:
    """Let all threads share one heap; to be called before there are any.

    glibc gives each thread a heap of its own to spare them a lock. Python threads hardly ever
    allocate at the same time, and two dozen half empty heaps cost 15 MB (measured, glibc 2.36).
    """
    with contextlib.suppress(OSError, AttributeError):  # another C library has no such switch
        ctypes.CDLL(None).mallopt(M_ARENA_MAX, ARENAS)


def settle() -> None:
    """Give back what the start needed, and spare the collector from what stays for good."""
    gc.collect()
    gc.freeze()
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        library.malloc_trim(0)
        library.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        with Path("/proc/self/maps").open(encoding="utf-8", errors="replace") as lines:
            ranges = tuple(code_ranges(lines))
        for start, size in ranges:
            library.madvise(start, size, MADV_DONTNEED)


def code_ranges(lines: Iterable[str]) -> Iterator[tuple[int, int]]:
    """Yield address and size of the code of libraries, from `/proc/PID/maps`.

    Such pages are clean copies of a file: what is dropped comes back from the page cache when it is
    run again. Pages that can be written, or that no file is behind, are never among them.
    """
    for line in lines:
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[1] == "r-xp" and fields[5].startswith("/"):
            start, stop = (int(edge, 16) for edge in fields[0].split("-"))
            yield start, stop - start
