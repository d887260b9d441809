"""What the Neuron backend can be told: where things are, and which choices the operator made."""

from __future__ import annotations

from typing import Literal, Self

import msgspec

from alloy_agent.errors import ConfigError
from alloy_agent.model import Json, Value


class NeuronOptions(Value, frozen=True, kw_only=True):
    """Options of the backend; all have defaults.

    Attributes:
        state_dir: Where the record of grants is kept; None: it ends with the process.
        sys_root: Where sysfs is; `proc_root` likewise.
        tools_dir: Where the vendor's programs are; they are on no PATH of a service.
        default_lnc_file: The node's default of the logical core configuration.
        product_name_file: Where the instance type is told without asking the network.
        kernel_log: Where kernel messages are read; "" reads none.
        monitor: Whether `neuron-monitor` is started.
        monitor_period_s: Its period. Shorter than a second is not documented.
        core_numbers: How NEURON_RT_VISIBLE_CORES counts: over all cores of the host, or from the
            first granted device on, as inside a container.
        share_hbm_bank: Whether one half of a pair of cores with a common bank is granted.
        ports_from: Port of the collectives' meeting point of the node's first core.
    """

    state_dir: str | None = None
    sys_root: str = "/sys"
    proc_root: str = "/proc"
    tools_dir: str = "/opt/aws/neuron/bin"
    default_lnc_file: str = "/opt/aws/neuron/logical_nc_config"
    product_name_file: str = "/sys/devices/virtual/dmi/id/product_name"
    kernel_log: str = "/dev/kmsg"
    monitor: bool = True
    monitor_period_s: float = 1.0
    core_numbers: Literal["host", "container"] = "host"
    share_hbm_bank: bool = False
    ports_from: int = 61000

    @classmethod
    def read(cls, options: dict[str, Json]) -> Self:
        """Return the options of a specification.

        Raises:
            ConfigError: One is unknown or of the wrong type.
        """
        try:
            return msgspec.convert(options, cls)
        except msgspec.ValidationError as exc:
            raise ConfigError(
                f"neuron: options: {exc}",
                cure=f"use {', '.join(cls.__struct_fields__)}",
            ) from exc
