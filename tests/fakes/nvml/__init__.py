"""A stand-in for `libnvidia-ml.so.1` on simulated silicon, beneath the real `pynvml`.

`open_library(options)` is what the option `nvidia.library: "tests.fakes.nvml:open_library"` names.
Options: `specs` (as `--fake`), `state_dir` (where the machine is kept, so that commands compose),
`root` (where the driver's files are written), `missing` (shell patterns of symbols that this driver
lacks), `privileged`, `no_library`, `no_driver`, `no_gpus`, `vanish` (a lost GPU leaves the
enumeration), `memory_limits` (the driver has them).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from alloy_agent.silicon.build import open_machine
from alloy_agent.silicon.spec import parse_specs
from tests.fakes.nvml.library import FakeNvml, Traits
from tests.fakes.nvml.root import write_root

__all__ = ["FakeNvml", "Traits", "open_library", "write_root"]


def open_library(options: dict[str, Any]) -> FakeNvml:
    """Return the library that `options` describe; `OSError` if there is none on this host."""
    if options.get("no_library"):
        raise OSError("libnvidia-ml.so.1: cannot open shared object file")
    state_dir = options.get("state_dir")
    machine = open_machine(
        parse_specs([str(spec) for spec in options["specs"]]),
        None if state_dir is None else Path(state_dir),
    )
    traits = Traits(
        missing=tuple(options.get("missing", ())),
        privileged=bool(options.get("privileged", True)),
        no_driver=bool(options.get("no_driver", False)),
        no_gpus=bool(options.get("no_gpus", False)),
        vanish=bool(options.get("vanish", False)),
        memory_limits=bool(options.get("memory_limits", False)),
    )
    root = options.get("root")
    if root is not None:
        write_root(machine, Path(root))
    return FakeNvml(machine, traits)
