"""Tables of the boards that can be simulated.

They exist for simulation only: a backend takes every number from its driver, never from here.
"""

from __future__ import annotations

from typing import Final

from alloy_agent.silicon.boards.amd import AMD_BOARDS
from alloy_agent.silicon.boards.neuron import NEURON_INSTANCES
from alloy_agent.silicon.boards.nvidia import NVIDIA_BOARDS
from alloy_agent.silicon.boards.shapes import AmdBoard, InstanceShape, NeuronInstance, NvidiaBoard

Board = NvidiaBoard | AmdBoard | NeuronInstance

BOARDS: Final[dict[str, Board]] = {
    board.name: board for board in (*NVIDIA_BOARDS, *AMD_BOARDS, *NEURON_INSTANCES)
}

__all__ = [
    "AMD_BOARDS",
    "BOARDS",
    "NEURON_INSTANCES",
    "NVIDIA_BOARDS",
    "AmdBoard",
    "Board",
    "InstanceShape",
    "NeuronInstance",
    "NvidiaBoard",
]
