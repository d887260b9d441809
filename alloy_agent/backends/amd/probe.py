"""Tries a library in a process of its own: `python probe.py CANDIDATE...`.

`amdsmi_init` has been seen to crash and to hang; neither may take the agent with it. Standard
library only, so that the start costs little. Writes one line of JSON: `path`, `errors`, and the
version as three numbers, or none if the library could not be started.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys

INIT_AMD_GPUS = 2


class Version(ctypes.Structure):
    """`amdsmi_version_t` of 26.x; in 25.x the year stands first, so that `major` reads 25 too."""

    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("release", ctypes.c_uint32),
        ("_padding", ctypes.c_ubyte * 4),
        ("build", ctypes.c_void_p),
        ("_room", ctypes.c_ubyte * 64),  # for versions whose structure is longer
    )


def main(candidates: list[str]) -> dict[str, object]:
    """Return what became of the first candidate that opens."""
    errors = []
    for path in candidates:
        try:
            library = ctypes.CDLL(path, mode=os.RTLD_NOW)
        except OSError as error:
            errors.append(f"{path}: {error}")
            continue
        version = Version()
        try:
            library.amdsmi_get_lib_version(ctypes.byref(version))
            numbers = [version.major, version.minor, version.release]
            status = library.amdsmi_init(ctypes.c_uint64(INIT_AMD_GPUS))
        except AttributeError as error:
            return {"path": path, "errors": [*errors, f"{path}: {error}"], "version": None}
        return {"path": path, "errors": errors, "version": numbers, "status": status}
    return {"path": None, "errors": errors, "version": None}


if __name__ == "__main__":
    found = json.dumps(main(sys.argv[1:]))
    os.write(1, found.encode() + b"\n")
    os._exit(0)  # the library's own exit handlers are of no use to anyone
