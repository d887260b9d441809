"""Nodes with 64 and 128 partitions, from the kernel's files to the reference brain."""

from __future__ import annotations

from pathlib import Path

import pytest

from alloy_brain.client import BrainClient
from alloy_brain.embedded import EmbeddedBrain
from alloy_brain.server import BrainSettings
from tests.daemon.harness import Site, daemon, wait_for
from tests.fakes.amd_tree import Tree, tree_of

PATIENT_S = 180.0


def node_of(devices: int, folder: Path) -> tuple[Tree, Site]:
    """Return a node of MI300X in CPX, and an agent that reads it through its AMD backend."""
    tree = tree_of(f"{devices}xMI300X", folder, many_minors=True)
    for state in tree.machine.state.devices:
        tree.machine.amd(state.id).set_compute_mode("CPX")
    tree.refresh()
    roots = ", ".join(f"{name}_root: {folder / name}" for name in ("sys", "proc", "dev", "debug"))
    config = folder / "agent.yaml"
    config.write_text(f"backends: {{nvidia: off, neuron: off}}\namd: {{library: off, {roots}}}\n")
    site = Site(folder)
    site.globals += ["--config", str(config)]
    return tree, site


@pytest.mark.parametrize(
    ("devices", "partitions"), [(8, 64), pytest.param(16, 128, marks=pytest.mark.slow)]
)
def test_the_brain_knows_every_partition_of_a_node(
    devices: int, partitions: int, tmp_path: Path
) -> None:
    """What the agent lists is what the brain counts; with samples of it, it can be placed on."""
    _tree, site = node_of(devices, tmp_path)
    settings = BrainSettings(address="127.0.0.1:0", ledger=str(tmp_path / "brain.db"))
    with (
        EmbeddedBrain(settings) as brain,
        BrainClient(brain.address) as client,
        daemon(site, ALLOY_BRAIN_ADDRESS=brain.address) as running,
    ):

        def known() -> bool:
            return any(
                node.connected and node.partition_count == partitions and node.telemetry_age_ms
                for node in client.nodes()
            )

        wait_for(f"{partitions} partitions at the brain", known, within_s=PATIENT_S)
        assert len(site.partitions()) == partitions
        assert len({piece["id"] for piece in site.partitions()}) == partitions
        assert running.stop() == 0
