"""An emulated accelerator: an engine without a clock, workloads, a simulation, a device process."""
