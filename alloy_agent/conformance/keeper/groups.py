"""The cgroups that are made for tenants who have none: v2, so that they can be frozen and counted.

They lie below `alloy-share/AGENT/DEVICE/TENANT`, where AGENT tells agents with other folders apart,
and go with their tenant.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from pathlib import Path
from typing import Final

from alloy_agent.conformance.keeper.names import DeviceName, TenantName

OWN_GROUP: Final = "alloy-share"
MAKE_TRIES: Final = 8


def own_group(
    root: Path, device: DeviceName, tenant: TenantName, tree: Path
) -> tuple[str, tuple[str, ...]]:
    """Make a cgroup for a tenant; return its path and the file by which it is entered.

    Where none can be made, there is none.
    """
    agent = hashlib.sha256(os.fsencode(root)).hexdigest()[:8]
    path = f"{OWN_GROUP}/{agent}/{device}/{tenant}"
    if not make(path, tree):
        return "", ()
    return path, (str(tree / path / "cgroup.procs"),)


def is_own(path: str) -> bool:
    """Whether a cgroup is one that is made here, by its path."""
    parts = path.split("/")
    return len(parts) == 4 and parts[0] == OWN_GROUP and not {"", ".", ".."} & set(parts)


def make(path: str, tree: Path) -> bool:
    """Make a cgroup with what stands above it; return whether it is there."""
    for _ in range(MAKE_TRIES):
        try:
            (tree / path).mkdir(parents=True, exist_ok=True)
        except FileNotFoundError:  # what stands above it was empty, and has just been removed
            continue
        except OSError:
            return False
        return True
    return False


def clear(path: str, tree: Path) -> None:
    """Remove a tenant's cgroup, with empty ones that it made, and what is empty above it.

    The kernel keeps every cgroup that has a process or a cgroup in it.
    """
    if not is_own(path):
        return
    for folder, _, _ in os.walk(tree / path, topdown=False):
        with contextlib.suppress(OSError):
            Path(folder).rmdir()
    while path := path.rpartition("/")[0]:
        with contextlib.suppress(OSError):
            (tree / path).rmdir()
