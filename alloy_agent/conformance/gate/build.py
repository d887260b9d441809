"""Builds the interposer, and the emulated driver library, of the package's one C file.

Images build at image build (`python -m alloy_agent.conformance.gate.build`) into the package, from
where the first use copies to the state directory: tenants have to see it, and they do not see the
image. Elsewhere the first use builds with the host's `cc`. Without a compiler and without a built
library no tenant shares a device: a neighbour that could only be frozen would not be governed.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Final

from alloy_agent.errors import UnsupportedError

SOURCE: Final = Path(__file__).with_name("gate.c")
BUNDLED: Final = Path(__file__).with_name("built")  # what an image brings
FLAGS: Final = ("-O2", "-Wall", "-Wextra", "-fPIC", "-shared", "-fvisibility=hidden")
LIBRARIES: Final = ("-ldl", "-lpthread", "-lm")
BUILD_DEADLINE_S: Final = 120.0


def library(folder: Path, *, emulated: bool = False) -> Path:
    """Return the path of a library, built if the folder has none of this source.

    Raises:
        UnsupportedError: There is no compiler, or it failed.
    """
    digest = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:12]
    name = "liballoyemu.so" if emulated else "liballoygate.so"
    path = folder / digest / name
    if path.exists():
        return path
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    # two tenants may ask at once, from two threads of one agent
    fresh = path.with_suffix(f".{os.getpid()}-{threading.get_ident()}")
    bundled = BUNDLED / digest / name
    if bundled.exists():
        shutil.copyfile(bundled, fresh)
    else:
        _compile(fresh, name, emulated=emulated)
    fresh.replace(path)
    return path


def _compile(fresh: Path, name: str, *, emulated: bool) -> None:
    """Build a library with the host's compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise UnsupportedError(
            f"{name} is not built and this host has no C compiler",
            cure="install gcc, or use an image or a package that brings the library",
        )
    options = (*FLAGS, *(("-DALLOY_EMULATED",) if emulated else ()))
    made = subprocess.run(
        [compiler, *options, str(SOURCE), "-o", str(fresh), *LIBRARIES],
        capture_output=True,
        text=True,
        timeout=BUILD_DEADLINE_S,
        check=False,
    )
    if made.returncode:
        first = (made.stderr.strip().splitlines() or ["no message"])[0]
        raise UnsupportedError(f"building {name} failed: {first}", cure=f"try {compiler} by hand")


def main() -> int:
    """Build both libraries into the package, for an image."""
    library(BUNDLED)
    library(BUNDLED, emulated=True)
    return os.EX_OK


if __name__ == "__main__":
    sys.exit(main())
