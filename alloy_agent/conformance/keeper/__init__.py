"""The keeper: one process for each shared device, which runs its control loop.

`process.py` is the process (`python -m alloy_agent.conformance.keeper`), `messages.py` what it is
asked and what it tells, `client.py` how it is asked and started, `members.py` the tenants that
outlive it, `watch.py` the witness and the look for ways around the gate, `emulator.py` the device
of those who have none. It is a process of its own, since a lease lasts 50 ms and the control
process's interpreter may be busy for longer.
"""
