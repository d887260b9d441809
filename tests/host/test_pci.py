"""The root complex of a device, from trees as the kernel makes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from alloy_agent.host.pci import pcie_root


def tree(sys: Path, way: str) -> None:
    """Make a device at a place under `/sys/devices`, with the link of its bus."""
    place = sys / "devices" / way
    place.mkdir(parents=True, exist_ok=True)
    links = sys / "bus/pci/devices"
    links.mkdir(parents=True, exist_ok=True)
    (links / place.name).symlink_to(f"../../../devices/{way}")


@pytest.mark.parametrize(
    ("way", "root"),
    [
        ("pci0000:00/0000:00:02.0", "pci0000:00"),
        ("pci0000:40/0000:40:01.1/0000:41:00.0/0000:42:00.0/0000:43:00.0", "pci0000:40"),
        ("pci0000:00/0000:00:0e.0/pci10000:e0/10000:e0:06.0", None),  # its address is no standard
        ("pci0002:00/0002:00:00.0/0002:01:00.0", "pci0002:00"),
        ("LNXSYSTM:00/VMBUS:00/pci0001:00/0001:00:00.0", None),
        ("platform/axi/1000110000.pcie/0000:01:00.0", None),
    ],
)
def test_the_root_is_the_first_part_of_the_way(way: str, root: str | None, tmp_path: Path) -> None:
    """However many switches lie between; another shape of tree has no root to name."""
    tree(tmp_path, way)
    assert pcie_root(way.rsplit("/", 1)[-1], tmp_path) == root


@pytest.mark.parametrize(
    "bus", ["", "0000:1A:00.0", "00000000:1a:00.0", "../../x", "0000:1a:00.8", "0000:1a:00.0\n"]
)
def test_what_is_no_address_is_not_looked_for(bus: str, tmp_path: Path) -> None:
    """Nothing but a full lower-case address reaches the file system."""
    tree(tmp_path, "pci0000:00/0000:1a:00.0")
    assert pcie_root(bus, tmp_path) is None


def test_a_device_that_is_gone_has_no_root(tmp_path: Path) -> None:
    """No link, and a link to nothing."""
    assert pcie_root("0000:1a:00.0", tmp_path) is None
    links = tmp_path / "bus/pci/devices"
    links.mkdir(parents=True)
    (links / "0000:1a:00.0").symlink_to("../../../devices/pci0000:00/0000:1a:00.0")
    assert pcie_root("0000:1a:00.0", tmp_path) is None
