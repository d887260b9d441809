"""The telemetry of a running node: samples to windows, gates, health and usage, joined.

    tick (1 s)   kept frames of all workers -> frames.py -> windows (load.py) and accounts
                 snapshot and kernel log    -> healthbook.py
                 newest.py, health, load    -> gatebook.py -> told.py
    event        device event -> healthbook.py -> gatebook.py, on the thread that brought it
    scrape, top  shown.py
    brain        newest.py, gates and headroom -> samples.py, behind a tick of the sampler

`joined.py` holds the parts together; start there.
"""

from __future__ import annotations

from alloy_agent.daemon.telemetry.joined import Telemetry
from alloy_agent.daemon.telemetry.told import HealthChange, Hooks

__all__ = ["HealthChange", "Hooks", "Telemetry"]
