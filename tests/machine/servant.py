"""Runs in the guest: does the commands that come through the port, one after the other.

Each line that comes in is a JSON object with `argv`, and each line that goes out is one with `rc`,
`out` and `err`; the first line after a start says which boot this is. Standard library only: the
guest has nothing else.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import IO

PORT = "/dev/virtio-ports/alloy.test"


def answer(line: str) -> dict[str, object]:
    """Return what became of one command."""
    command = json.loads(line)
    try:
        done = subprocess.run(
            command["argv"],
            input=command.get("stdin", ""),
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=command.get("timeout_s", 60),
            env=None,
        )
    except (OSError, subprocess.TimeoutExpired) as exc:
        return {"rc": -1, "out": "", "err": f"{type(exc).__name__}: {exc}"}
    return {"rc": done.returncode, "out": done.stdout, "err": done.stderr}


def serve(port: IO[bytes]) -> None:
    """Answer until the port closes."""

    def say(what: dict[str, object]) -> None:
        port.write(json.dumps(what).encode() + b"\n")

    say({"boot_id": Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()})
    buffer = b""
    while part := port.read(1 << 16):
        *lines, buffer = (buffer + part).split(b"\n")
        for line in filter(None, lines):
            say({"id": json.loads(line).get("id"), **answer(line.decode())})


def main() -> int:
    """Serve the port; it can be opened once only, so one descriptor goes both ways."""
    with Path(PORT).open("r+b", buffering=0) as port:
        serve(port)
    return 0


if __name__ == "__main__":
    sys.exit(main())
