"""AWS Neuron devices: runs of cores, their holders, telemetry and evidence, by the driver's sysfs.

Theory of operation. The driver knows no partitions: a core set is the agent's own record
(`record`), handed to the tenant as a device node and variables that the runtime reads in the
tenant's process. So a partition is observed from two sides: the record says what was granted,
`/proc` (descriptors by device number), `neuron-ls` and `neuron-monitor` say who is really there.
Where the two differ, that is shown; the record is never taken for proof.

Rules that stay true in here:

* No device node is ever opened: at most 16 processes attach, and a holder blocks every reset.
* sysfs is the ground. The vendor's tools add to it; without them the agent works and says so.
* Any attribute may be missing, moved or malformed: it is absent, and the reader says which.
* A process's variables are what it was started with: configuration, never proof.
* Cores that somebody holds are not granted, whatever the record says.
"""

from __future__ import annotations

from alloy_agent.backends.neuron.backend import NeuronBackend
from alloy_agent.backends.neuron.options import NeuronOptions
from alloy_agent.model import Json

__all__ = ["NeuronBackend", "NeuronOptions", "open_backend"]


def open_backend(options: dict[str, Json]) -> NeuronBackend:
    """Return the backend of a `BackendSpec`; the options are the fields of `NeuronOptions`.

    Raises:
        ConfigError: An option is unknown or of the wrong type.
    """
    return NeuronBackend(NeuronOptions.read(options))
