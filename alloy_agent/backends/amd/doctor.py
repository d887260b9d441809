"""What this host has and lacks for AMD accelerators, as lines of `doctor`."""

from __future__ import annotations

from alloy_agent.backends.amd.files import Files, Roots
from alloy_agent.backends.amd.library import Library
from alloy_agent.backends.amd.topology import GFX_PLAIN, read_topology
from alloy_agent.errors import AlloyError
from alloy_agent.host.pidspace import initial_namespace
from alloy_agent.model import Diagnosis


class Doctor:
    """Looks once."""

    def __init__(self, files: Files, roots: Roots, library: Library, driver: str) -> None:
        self._files, self._roots, self._library, self._driver = files, roots, library, driver

    def lines(self) -> tuple[Diagnosis, ...]:
        """Return one line for each thing looked at. Never raises."""
        lines = (self._kfd(), self._node(), self._namespace(), self._debug(), self._smi())
        return tuple(line for line in lines if line is not None)

    def _kfd(self) -> Diagnosis:
        try:
            topology = read_topology(self._files, self._roots)
        except AlloyError as error:
            return Diagnosis(
                subject="amdgpu compute driver",
                ok=False,
                found=error.message,
                cure=error.cure,
                required=True,
            )
        devices = topology.devices()
        other = [
            node
            for node in topology.nodes
            if node.gpu_id and not node.cuttable and node.gfx not in GFX_PLAIN
        ]
        left = f"; {len(other)} GPUs of other kinds are left alone" if other else ""
        pieces = sum(len(nodes) for nodes in devices.values())
        return Diagnosis(
            subject="amdgpu compute driver",
            ok=True,
            found=f"{self._driver or 'unknown version'}: {len(devices)} accelerators, "
            f"{pieces} partitions{left}",
            required=True,
        )

    def _node(self) -> Diagnosis:
        path = f"{self._roots.dev}/kfd"
        there = self._files.there(path)
        return Diagnosis(
            subject="compute node",
            ok=there,
            found=path if there else f"no {path}",
            cure="" if there else "let udev make it, and give the agent the host's /dev",
        )

    def _namespace(self) -> Diagnosis | None:
        """Return a line where this agent cannot see the processes that KFD tells of."""
        if initial_namespace(self._roots.proc):
            return None
        return Diagnosis(
            subject="pid namespace",
            ok=False,
            found="one of the agent's own: processes on the devices cannot be told",
            cure="run the agent in the host's pid namespace (hostPID: true)",
        )

    def _debug(self) -> Diagnosis:
        path = f"{self._roots.debug}/kfd/mqds"
        there = self._files.there(path)
        return Diagnosis(
            subject="CU masks in force",
            ok=True,
            found=f"can be read from {path}"
            if there
            else f"cannot be verified: no {path} (mount debugfs in the host to verify them)",
        )

    def _smi(self) -> Diagnosis:
        tried = self._library.tried()
        note = self._library.note
        if note or tried.trouble:
            return Diagnosis(
                subject="amdsmi",
                ok=True,
                found=f"{note or tried.trouble}; events come from the kernel's files alone",
            )
        return Diagnosis(subject="amdsmi", ok=True, found=f"{self._library.version}: events")
