"""START HERE: how the rooms of the agent become one program.

`node.Node` builds every room of one host from the settings and joins them: one worker process for
each backend, the observer over them, the store, the reconciler, the audit. A command that acts once
enters a `Node`, asks it one thing and leaves; `loops.Daemon` keeps one open, turns its loops, and
answers others.

    cli ------------> api.NodeApi <---------------------------- kubernetes, brain
                       |         |
        (no daemon)    |         | (a daemon answers)
                       v         v
                   node.Node     remote.RemoteNode --socket--> control --> service.NodeService
                       ^                                                        |
                       +----------------------- loops.Daemon <------------------+

    addresses.py   where the daemon of given settings is reached
    api.py         what a node can be asked
    documents.py   the JSON documents; tables are printed from them and from nothing else
    node.py        the rooms, joined
    tenancy.py     what the books say of the pieces in a snapshot
    needs.py       what the agent itself needs of a host
    loops.py       the daemon: observe, keep, audit, leases; signals; health
    draining.py    drains as commands, and who else is told: slurm.py, hook.py (through calls.py)
    keeping.py     pure: what the daemon may do by itself to keep a layout
    feed.py        what happens, as wire messages, for watchers
    service.py     the node as the socket asks it
    web.py         /metrics, /healthz, /readyz
    logs.py        how events are rendered
    memory.py      what the start needed goes back to the kernel

How a change flows: a request (or the keeper) has the node observed, the layout resolved against the
devices, the plan made by the pure planner, and the reconciler carries it out one journalled step at
a time; the next snapshot shows what came of it, the auditor judges that, and the evidence of every
verdict that changed is on disk before anyone is told.

Rules that stay true in here:

* Rooms of one row meet here and nowhere else.
* Importing this package, or `addresses`, costs nothing; a room is imported by what uses it.
* No decision is made in here that a pure room could make.
"""
