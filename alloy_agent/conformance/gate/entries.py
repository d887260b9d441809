"""The launch entry points that `gate.c` stands before, by vendor; a test holds the two together.

Sources: cuda.h 13.0, hip_runtime_api.h 7.0, hsa.h 1.2.
"""

from __future__ import annotations

from typing import Final

CUDA: Final = (
    *("cuLaunch", "cuLaunchGrid", "cuLaunchGridAsync", "cuLaunchKernel", "cuLaunchKernel_ptsz"),
    *("cuLaunchKernelEx", "cuLaunchKernelEx_ptsz", "cuLaunchCooperativeKernel"),
    *("cuLaunchCooperativeKernel_ptsz", "cuLaunchCooperativeKernelMultiDevice"),
    *("cuGraphLaunch", "cuGraphLaunch_ptsz"),
)
HIP: Final = (
    *("hipLaunchKernel", "hipLaunchKernel_spt", "hipExtLaunchKernel", "hipModuleLaunchKernel"),
    *("hipExtModuleLaunchKernel", "hipHccModuleLaunchKernel", "hipModuleLaunchCooperativeKernel"),
    *("hipLaunchCooperativeKernel", "hipLaunchCooperativeKernel_spt", "hipLaunchKernelExC"),
    *("hipDrvLaunchKernelEx", "hipLaunchCooperativeKernelMultiDevice"),
    *("hipExtLaunchMultiKernelMultiDevice", "hipModuleLaunchCooperativeKernelMultiDevice"),
    *("hipGraphLaunch", "hipGraphLaunch_spt"),
)
EMULATED: Final = ("emuLaunchKernel", "emuGraphLaunch")
LAUNCHES: Final = (*CUDA, *HIP, *EMULATED)
# a queue's doorbell is a signal like any other: only the gate can tell them apart
BELLS: Final = (
    "hsa_signal_store_relaxed",
    "hsa_signal_store_screlease",
    "hsa_signal_store_release",
)
