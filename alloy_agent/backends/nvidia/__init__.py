"""The NVIDIA backend over NVML: MIG instances and whole GPUs.

`nvidia-ml-py` is imported in the worker process alone. `library.py` makes the calls, `gpu.py` knows
one GPU, `instances.py` what it is cut into, `cutting.py` changes that; `view.py` says it in the
agent's nouns; `signals.py` and `events.py` measure and listen; `evidence.py` and `processes.py`
collect facts; `doctor.py` says what is lacking.
"""

from __future__ import annotations

from pathlib import Path

from alloy_agent.backends.nvidia.backend import NvidiaBackend
from alloy_agent.backends.nvidia.library import Nvml, load
from alloy_agent.model import Json

__all__ = ["NvidiaBackend", "open_backend"]


def open_backend(options: dict[str, Json]) -> NvidiaBackend:
    """Return the backend; that there is no driver or library is said by its calls.

    Options: `library` ("" for the driver's own; a path; "module:factory" for a stand-in),
    `library_options` (for the factory), `root` (where `/proc` and `/sys` are), `calls_per_tick`.
    """
    library = options.get("library")
    inner = options.get("library_options")
    root = options.get("root")
    module = load(
        library if isinstance(library, str) else "", inner if isinstance(inner, dict) else {}
    )
    backend = NvidiaBackend(Nvml(module), Path(root if isinstance(root, str) else "/"))
    calls = options.get("calls_per_tick")
    if isinstance(calls, int):
        backend.calls_max = calls
    return backend
