"""Simulated machines: board tables, live state, the device's own refusals, and scripted faults.

A `Machine` is a node full of accelerators as their drivers see it. It is no kinder than the device:
what overlaps is refused, what is in use stays, a mode that needs a reset stays pending. Ids are
deterministic. It knows no backend and no vendor library; `backends/fake.py` and the vendor-library
fakes of the tests stand on it.

* `boards/` - frozen tables, each with its source;
* `state.py` - the live state as plain structs, which is also the state file;
* `nvidia.py`, `amd.py`, `neuron.py` - what each vendor's device does and refuses;
* `faults.py` - scripted faults and crash points;
* `signals.py` - deterministic load, power, temperature and energy;
* `machine.py` - one node: calls, persistence, processes, events, reboot and driver reload;
* `spec.py` - what `--fake` means.
"""
