"""A stand-in for `scontrol` over a file: one node, and what an administrator can do to it.

It answers and refuses as Slurm 22.05 does; `tests/daemon/test_slurm.py` runs the same suite over
this and over a real slurmctld.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

PROGRAM = """#!{python}
import runpy, sys
sys.argv = ["scontrol", {state!r}, *sys.argv[1:]]
runpy.run_path({here!r}, run_name="__main__")
"""


def install(folder: Path, node: str) -> Path:
    """Make the program and the node's state; return the program's path."""
    state, program = folder / "slurm.json", folder / "scontrol"
    state.write_text(json.dumps({"node": node, "base": "IDLE", "flags": [], "reason": ""}))
    program.write_text(
        PROGRAM.format(python=sys.executable, state=str(state), here=str(Path(__file__)))
    )
    program.chmod(0o700)
    return program


def main(state: Path, words: list[str]) -> int:
    """Do one command; return the exit code."""
    node = json.loads(state.read_text())
    if words[0] == "show":
        if words[2] != node["node"]:
            print(f"Node {words[2]} not found")
            return 1
        print(shown(node))
        return 0
    given = dict(word.split("=", 1) for word in words[1:])
    if given["NodeName"] != node["node"]:
        print("slurm_update error: Invalid node name specified", file=sys.stderr)
        return 1
    change(node, given)
    state.write_text(json.dumps(node))
    return 0


def change(node: dict[str, Any], given: dict[str, str]) -> None:
    """Change the node as slurmctld does."""
    flags = set(node["flags"])
    wanted = given.get("State", "").upper()
    node["reason"] = given.get("Reason", node["reason"]).split("\n")[0]
    if wanted == "DRAIN":
        flags.add("DRAIN")
    elif wanted == "DOWN":
        node["base"] = "DOWN"
    elif wanted in ("UNDRAIN", "RESUME"):
        flags.discard("DRAIN")
        if wanted == "RESUME":
            node["base"] = "IDLE"
        if node["base"] != "DOWN":
            node["reason"] = ""
    node["flags"] = sorted(flags)


def shown(node: dict[str, Any]) -> str:
    """Return the lines that `show node` prints, as far as anybody reads them."""
    flags = "+".join([str(node["base"]), *node["flags"]])
    lines = [
        f"NodeName={node['node']} Arch=x86_64 CoresPerSocket=1 ",
        "   CPUAlloc=0 CPUEfctv=2 CPUTot=2 CPULoad=3.13",
        f"   State={flags} ThreadsPerCore=1 TmpDisk=0 Weight=1 Owner=N/A MCS_label=N/A",
        "   Partitions=p ",
    ]
    if node["reason"]:
        lines.append(f"   Reason={node['reason']} [root@2026-11-30T11:09:43]")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
