"""Which processes of a tenant's page live, also where they count their pids in a namespace.

A slot holds the pid that its process has for itself. In a container that is another number than
ours, and ours may be anybody's: what counts is the tenant's own processes and what they call
themselves.

Rules that stay true in here:

* Where it cannot be told, a process counts as alive as long as the tenant has any: production must
  never be taken for dead.
* Another tenant's process that happens to have the number never counts.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from alloy_agent.host.processes import read_bytes

FOLDERS_MOST: Final = 256  # a tenant that makes more of them must not hold the control loop up
PIDS_MOST: Final = 4096


def pids_below(folder: Path, folders_most: int = FOLDERS_MOST) -> tuple[frozenset[int], bool]:
    """Return the processes in a cgroup and below it, and whether these are all of them.

    They are not where some cannot be seen from here, or where there are too many cgroups.
    """
    found: set[int] = set()
    whole = True
    waiting, looked = [str(folder)], 0
    while waiting:
        if looked >= folders_most:
            return frozenset(found), False
        place, looked = waiting.pop(), looked + 1
        try:
            with open(f"{place}/cgroup.procs", encoding="ascii") as file:  # noqa: PTH123 - ten a second
                found.update(int(line) for line in file)
            with os.scandir(place) as entries:
                waiting += [e.path for e in entries if e.is_dir(follow_symlinks=False)]
        except FileNotFoundError:
            continue
        except (OSError, ValueError):
            whole = False
    if 0 in found:  # stands for one outside of our own pid namespace
        found.discard(0)
        whole = False
    return frozenset(found), whole


def own_numbers(pid: int) -> tuple[int, ...]:
    """Return a process's pids from our namespace to its own; empty if it is gone."""
    for line in read_bytes(f"/proc/{pid}/status").split(b"\n"):
        if line.startswith(b"NSpid:"):
            return tuple(int(number) for number in line.split()[1:])
    return ()


class Living:
    """The living processes of one tenant, as of the last look.

    Args:
        page: The tenant's state page.
        pid: The process that became the tenant, 0: unknown.
        folder: Its cgroup, None: it has none.
    """

    def __init__(self, page: Path, pid: int, folder: Path | None) -> None:
        self._mark = b"ALLOY_GATE_STATE=" + os.fsencode(page)
        self._pid, self._folder = pid, folder
        self._known: dict[int, tuple[int, ...]] = {}  # by our number: the others
        self._own: frozenset[int] = frozenset()
        self._whole = False

    def look(self) -> None:
        """See who lives. To be called after the slots were read that are asked for."""
        if not self._pid and self._folder is None:
            return
        pids, whole = (
            pids_below(self._folder) if self._folder is not None else (frozenset[int](), False)
        )
        apart = self._pid > 0 and self._pid not in pids and bool(own_numbers(self._pid))
        if apart:  # it has no cgroup, or is not in it
            pids |= self._descendants()
        self._known = {pid: self._known.get(pid) or own_numbers(pid) for pid in pids}
        self._known = {pid: numbers for pid, numbers in self._known.items() if numbers}
        self._own = frozenset(numbers[-1] for numbers in self._known.values())
        flat = all(len(numbers) == 1 for numbers in self._known.values())
        self._whole = flat if apart else whole

    def has(self, number: int) -> bool:
        """Whether the process that calls itself so is one of the tenant's and lives."""
        if not 0 < number < 1 << 22:
            return False
        if not self._pid and self._folder is None:
            return _answers(number)
        if number in self._own or self._carries(number):
            return True
        return bool(self._known) and not self._whole

    def _carries(self, pid: int) -> bool:
        """Whether a process outside of the cgroup was started with this tenant's page."""
        if self._mark not in read_bytes(f"/proc/{pid}/environ").split(b"\0"):
            return False
        return own_numbers(pid)[-1:] == (pid,)

    def _descendants(self) -> frozenset[int]:
        found, waiting = {self._pid}, [self._pid]
        while waiting and len(found) < PIDS_MOST:
            pid = waiting.pop()
            try:
                threads = os.listdir(f"/proc/{pid}/task")  # noqa: PTH208 - names only
            except OSError:
                continue
            for thread in threads:
                text = read_bytes(f"/proc/{pid}/task/{thread}/children")
                fresh = {int(word) for word in text.split()} - found
                found |= fresh
                waiting += fresh
        return frozenset(found)


def _answers(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
