"""How this package starts Python children: none takes code from the folder it is started in.

An agent is started by root in whatever folder root stands in. Python puts that folder first on its
path for `-m` and for `-c`, so a `json.py` there would be run as root; a child that stands in the
folder would also find it by an empty entry of `PYTHONPATH`. Every child is started by way of here.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Container
from pathlib import Path
from typing import Final

FOLDER: Final = "/"  # where a child stands; root alone writes there


def module(name: str, *words: str) -> list[str]:
    """Return the command line of one of our modules, without the folder and the user's site."""
    return [sys.executable, "-s", "-P", "-m", name, *words]


def isolated(*words: str) -> list[str]:
    """Return the command line of code that needs no package and no variable of ours."""
    return [sys.executable, "-I", *words]


def environment(without: Container[str] = ()) -> dict[str, str]:
    """Return our environment for `module`, in which a child finds this package."""
    kept = {name: value for name, value in os.environ.items() if name not in without}
    known = [part for part in kept.get("PYTHONPATH", "").split(os.pathsep) if part]
    here = str(Path(__file__).resolve().parents[2])
    if "-packages" not in here:  # a source tree: the interpreter does not find it by itself
        known.insert(0, here)
    if known:
        kept["PYTHONPATH"] = os.pathsep.join(known)
    else:
        kept.pop("PYTHONPATH", None)
    return kept
