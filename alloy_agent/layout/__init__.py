"""Layout files: what the operator wants, resolved against the devices that are there.

`read_layout` types the file (native, or in mig-parted's format), `choose` picks one layout of it
and turns it into a `model.Layout` for the devices. Both refuse with file, line, the two things in
conflict and the cure, before anything is touched. Profile names are those that the device's driver
reports; nothing is derived from a model's name.
"""

from __future__ import annotations

from alloy_agent.layout.resolve import choose, sealed
from alloy_agent.layout.schema import LayoutFile, read_layout

__all__ = ["LayoutFile", "choose", "read_layout", "sealed"]
