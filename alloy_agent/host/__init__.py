"""What this host's kernel offers: clocks, cgroups, processes, their events, the service manager.

Nothing here knows of partitions or devices. Every root (`/proc`, `/sys`, the cgroup mounts) can be
moved, so that a host's trees may be mounted elsewhere in a container and generated trees may stand
in for kernels that are not at hand.
"""
