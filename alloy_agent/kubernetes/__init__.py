"""The agent as a DRA driver: START in `dra.py` (kubelet side) or `publishing.py` (scheduler side).

Kubernetes allocates; the agent says what there is and makes what was allocated.

    observer --> offers --> slices --> publishing ==> API server ==> scheduler
                                                                         |
    tenant <-- CDI file <-- cdi <-- preparing <-- dra <== kubelet <======+

    names.py       names as Kubernetes takes them (pure)
    offers.py      what a device offers, and the counters that keep it honest (pure)
    slices.py      ResourceSlices: made, checked, compared (pure)
    claims.py      what a ResourceClaim says for this driver (pure)
    cdi.py         container device specs: made, checked (pure), written, swept
    preparing.py   the prepare and unprepare contract over store and hardware
    dra.py         kubelet plug-in: registration, DRA v1 and v1beta1, health
    statuses.py    what a claim's status says of its pieces
    probes.py      the kubelet's gRPC probes
    api.py         a REST client of the verbs used here
    publishing.py  keeps the slices in the API server as they should be
    pods.py        from pid to pod and container (pure), and the pod-resources client
    draining.py    taint, wait, let go
    driver.py      the room's front: what the daemon starts and stops

Rules that stay true in here:

* Nothing is allocated here; a claim is honoured as allocated or refused with the reason.
* Hardware is changed through the reconciler alone; a claim's record is on disk before that.
* Whatever comes from the API server or kubelet is untrusted input.
"""
