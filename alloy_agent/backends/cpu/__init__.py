"""The host's CPU as a device: runs of physical cores with a memory cap, fenced by cgroups.

A device is a NUMA node (`cpu-node0`); a partition is the cgroup `<root>/<device>/<profile>@<start>`
in every hierarchy that has the cpuset or memory controller, and in the v2 tree. Everything that
`observe` tells is read from the kernel; the names of directories only say what was granted.

Rules that stay true in here:

* Core 0's node keeps its reserve: reserved cores are in `Device.reserved_units`, never in `units`.
* A step that was cut short leaves a half-made cgroup, which is no partition but a fault; the same
  step completes it, its undo removes it, and the next step on the device clears what is left.
* Nobody's process is ever ended or moved, except by `confine_system`, which the operator turns on.

Facts, each with its method (subject: the partition, or the device where it says so):

| fact | value |
| --- | --- |
| `cpu.granted` | CPUs that the partition's name grants, siblings included |
| `cgroup.hierarchies` | list of `label, version, path, present` |
| `cgroup.cpus`, `cgroup.cpus_effective`, `cgroup.mems_effective` | numbers, as set and in force |
| `cgroup.memory_limit_bytes` | cap of the cgroup itself; null: none |
| `cgroup.memory_leaves` | list of `path, limit_bytes, ceiling_bytes, processes` of every leaf |
| `cgroup.memory_used_bytes` | bytes charged now |
| `cgroup.swap_limit_bytes` | cap of memory and swap (v1) or of swap (v2); null: none |
| `cgroup.exclusive` | "member", "root", "isolated" (v2), "shared", "exclusive" (v1) |
| `cgroup.members` | list of `pid, comm, uid, cpus, lacks, threads, threads_outside` |
| `partition.processes` | list of `pid, start_ticks, comm, uid` |
| `device.parent_processes` | device: `pid` of those in the device's own cgroup, beside partitions |
| `cpu.outsiders_pinned` | processes elsewhere with an affinity narrower than the host's that
reaches | | | these CPUs: someone placed them here | | `cpu.outsiders_ran` | processes elsewhere
that ran last on these CPUs, `active` since the last look | | `cpu.outsiders_allowed` | how many
processes elsewhere merely may run here, with a few names | | `cpu.confined` | device: whether
`confine_system` is in force, its CPUs, and who is not in it | | `cpu.hierarchies` | device: which
cgroup version has cpuset and memory, and the mode of the host |

`outsiders_pinned` and `outsiders_ran` are apart on purpose: by default every process of a host may
run on every CPU, and a cpuset fences its members in, not others out. Being allowed to is contention
at most; being placed there is a breach. `confine_system` turns the first into something enforced.
"""

from __future__ import annotations

from alloy_agent.backends.cpu.backend import CpuBackend

__all__ = ["CpuBackend"]
