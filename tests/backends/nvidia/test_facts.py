"""Numbers of NVML that the backend has written down: each compared with the vendor's own binding.

The binding (`nvidia-ml-py` 13.615.71) is made from the header; a number that is not in it was
never verified, and is not here.
"""

from __future__ import annotations

import importlib
from typing import Any, Final

import pytest

from alloy_agent.backends.nvidia import evidence, gpu, library, shares, signals, view
from alloy_agent.telemetry.catalogue import load

NUMBERS: Final[tuple[tuple[int, str], ...]] = (
    (signals.ENERGY, "NVML_FI_DEV_TOTAL_ENERGY_CONSUMPTION"),
    (signals.POWER, "NVML_FI_DEV_POWER_INSTANT"),
    (signals.THROTTLES[0], "NVML_FI_DEV_PERF_POLICY_POWER"),
    (signals.THROTTLES[1], "NVML_FI_DEV_PERF_POLICY_SYNC_BOOST"),
    (signals.THROTTLES[2], "NVML_FI_DEV_CLOCKS_EVENT_REASON_SW_THERM_SLOWDOWN"),
    (signals.THROTTLES[3], "NVML_FI_DEV_CLOCKS_EVENT_REASON_HW_THERM_SLOWDOWN"),
    (signals.THROTTLES[4], "NVML_FI_DEV_CLOCKS_EVENT_REASON_HW_POWER_BRAKE_SLOWDOWN"),
    (signals.ECC_CORRECTED, "NVML_FI_DEV_ECC_SBE_VOL_TOTAL"),
    (signals.ECC_UNCORRECTED, "NVML_FI_DEV_ECC_DBE_VOL_TOTAL"),
    (signals.ECC_CORRECTED_AGGREGATE, "NVML_FI_DEV_ECC_SBE_AGG_TOTAL"),
    (signals.ECC_UNCORRECTED_AGGREGATE, "NVML_FI_DEV_ECC_DBE_AGG_TOTAL"),
    (signals.PCIE_REPLAY, "NVML_FI_DEV_PCIE_REPLAY_COUNTER"),
    (signals.RECOVERY, "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION"),
    (signals.NVLINK_SENT, "NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX"),
    (signals.NVLINK_RECEIVED, "NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX"),
    (signals.NVLINK_ERRORS[0], "NVML_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL"),
    (signals.NVLINK_ERRORS[1], "NVML_FI_DEV_NVLINK_CRC_DATA_ERROR_COUNT_TOTAL"),
    (signals.NVLINK_ERRORS[2], "NVML_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL"),
    (signals.NVLINK_ERRORS[3], "NVML_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL"),
    (signals.GPM_SM_UTIL, "NVML_GPM_METRIC_SM_UTIL"),
    (signals.GPM_DRAM_BW_UTIL, "NVML_GPM_METRIC_DRAM_BW_UTIL"),
    (signals.MEMORY_V2, "nvmlMemory_v2"),
    (gpu.RESETLESS_FIELD, "NVML_FI_DEV_IS_RESETLESS_MIG_SUPPORTED"),
    (gpu.AMPERE, "NVML_DEVICE_ARCH_AMPERE"),
    (gpu.HOPPER, "NVML_DEVICE_ARCH_HOPPER"),
    (shares.UNLIMITED, "NVML_DEVICE_MEMORY_LIMIT_MAX"),
    (library.INIT_NO_GPUS, "NVML_INIT_FLAG_NO_GPUS"),
    (library.INVALID_ARGUMENT, "NVML_ERROR_INVALID_ARGUMENT"),
    (library.NOT_SUPPORTED, "NVML_ERROR_NOT_SUPPORTED"),
    (library.NO_PERMISSION, "NVML_ERROR_NO_PERMISSION"),
    (library.NOT_FOUND, "NVML_ERROR_NOT_FOUND"),
    (library.DRIVER_NOT_LOADED, "NVML_ERROR_DRIVER_NOT_LOADED"),
    (library.TIMEOUT, "NVML_ERROR_TIMEOUT"),
    (library.LIBRARY_NOT_FOUND, "NVML_ERROR_LIBRARY_NOT_FOUND"),
    (library.FUNCTION_NOT_FOUND, "NVML_ERROR_FUNCTION_NOT_FOUND"),
    (library.GPU_IS_LOST, "NVML_ERROR_GPU_IS_LOST"),
    (library.RESET_REQUIRED, "NVML_ERROR_RESET_REQUIRED"),
    (library.LIB_RM_VERSION_MISMATCH, "NVML_ERROR_LIB_RM_VERSION_MISMATCH"),
    (library.IN_USE, "NVML_ERROR_IN_USE"),
    (library.INSUFFICIENT_RESOURCES, "NVML_ERROR_INSUFFICIENT_RESOURCES"),
    (library.UNKNOWN, "NVML_ERROR_UNKNOWN"),
)
REASONS: Final[dict[str, str]] = {
    "software power cap": "nvmlClocksEventReasonSwPowerCap",
    "hardware slow-down": "nvmlClocksThrottleReasonHwSlowdown",
    "sync boost": "nvmlClocksEventReasonSyncBoost",
    "software thermal slow-down": "nvmlClocksEventReasonSwThermalSlowdown",
    "hardware thermal slow-down": "nvmlClocksThrottleReasonHwThermalSlowdown",
    "power brake": "nvmlClocksThrottleReasonHwPowerBrakeSlowdown",
}


@pytest.fixture(scope="module")
def binding() -> Any:
    """Return the vendor's module; it is imported without a library."""
    return importlib.import_module("pynvml")


@pytest.mark.parametrize(("number", "name"), NUMBERS, ids=[name for _, name in NUMBERS])
def test_a_number_is_the_vendors(number: int, name: str, binding: Any) -> None:
    """What the backend has written down is what the vendor's header says."""
    assert number == getattr(binding, name)


def test_reasons_of_low_clocks_are_the_vendors_bits(binding: Any) -> None:
    """Each reason that THR-01 names is its bit of the header."""
    assert {text: bit for bit, text in evidence.THROTTLES.items()} == {
        text: getattr(binding, name) for text, name in REASONS.items()
    }


def test_every_recovery_action_of_the_header_has_words(binding: Any) -> None:
    """No action that the driver can ask for is unknown to the agent."""
    prefix = "NVML_GPU_RECOVERY_ACTION_"
    actions = {getattr(binding, name) for name in dir(binding) if name.startswith(prefix)} - {0}
    assert set(view.RECOVERY) == actions
    assert {int(number) for number in load().verdicts} == actions | {0}
    assert load().verdicts["6"] == "reset"  # of the bus
    assert load().verdicts["7"] == "reboot"


def test_the_limits_name_a_cgroup_and_two_sizes(binding: Any) -> None:
    """The memory limit's structure has the fields that the backend fills and reads."""
    told = [name for name, *_ in binding.c_nvmlSetMemoryLimits_v1_t._fields_]
    read = [name for name, *_ in binding.c_nvmlGetMemoryLimits_v1_t._fields_]
    assert told == ["nameSpace", "softLimit", "hardLimit"]
    assert read == [*told, "currentUsed"]
