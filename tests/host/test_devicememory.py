"""Caps on device memory: `dmem` in a tree that refuses as the kernel does."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alloy_agent.errors import BackendError, DeviceBusyError, UnsupportedError
from alloy_agent.host.devicememory import DeviceMemory, regions, same_bus
from alloy_agent.host.sharegroups import ShareGroups
from tests.fakes.dmem import DmemTree

BUS = "0000:05:00.0"
AMD, NVIDIA = f"drm/{BUS}/vram0", "nvidia/00000000:3B:00.0/vidmem".lower()
GIB = 1 << 30


def tree_of(tmp_path: Path) -> tuple[DmemTree, ShareGroups]:
    """Return a tree with the memory of an AMD and of an NVIDIA device, and its shares."""
    tree = DmemTree(tmp_path / "cg", {AMD: 192 * GIB, NVIDIA: 80 * GIB})
    return tree, ShareGroups(str(tree.mount), "alloy-test", tree)


@pytest.mark.parametrize("bus", [BUS, "0000:3b:00.0"])
def test_a_cap_is_set_and_lifted_whoever_made_the_device(bus: str, tmp_path: Path) -> None:
    """The controller is handed down to the share's cgroup, and the cap reads back as written."""
    _, groups = tree_of(tmp_path)
    groups.make("dev", "production-0")
    folder = groups.folder("dev", "production-0")
    assert groups.memory is not None
    assert folder is not None
    groups.memory.set_cap(folder, bus, 8 * GIB)
    cap = groups.cap("dev", "production-0", bus)
    assert cap is not None
    assert (cap.max_bytes, cap.ceiling_bytes, cap.current_bytes) == (8 * GIB, 8 * GIB, 0)
    other = "0000:3b:00.0" if bus == BUS else BUS
    untouched = groups.cap("dev", "production-0", other)
    assert untouched is not None
    assert untouched.ceiling_bytes is None
    groups.memory.set_cap(folder, bus, None)
    lifted = groups.cap("dev", "production-0", bus)
    assert lifted is not None
    assert lifted.max_bytes is None


def test_the_lowest_cap_up_to_the_root_binds(tmp_path: Path) -> None:
    """A leaf that allows more than its parent is bound by the parent, and the other way round."""
    tree, groups = tree_of(tmp_path)
    groups.make("dev", "production-0")
    folder = groups.folder("dev", "production-0") or ""
    memory = groups.memory
    assert memory is not None
    memory.set_cap(folder, BUS, 8 * GIB)
    tree.write(f"{folder}/cgroup.subtree_control", "+dmem")
    leaf = f"{folder}/leaf"
    tree.make(leaf)
    tree.write(f"{leaf}/dmem.max", f"{AMD} {64 * GIB}")
    seen = memory.cap(leaf, BUS)
    assert seen is not None
    assert (seen.max_bytes, seen.ceiling_bytes) == (64 * GIB, 8 * GIB)
    tree.write(f"{leaf}/dmem.max", f"{AMD} {2 * GIB}")
    seen = memory.cap(leaf, BUS)
    assert seen is not None
    assert seen.ceiling_bytes == 2 * GIB


def test_a_kernel_that_keeps_no_cap_is_found_out(tmp_path: Path) -> None:
    """What does not read back was not set."""
    tree, groups = tree_of(tmp_path)
    groups.make("dev", "a")
    tree.deaf = True
    assert groups.memory is not None
    with pytest.raises(BackendError, match="shows None"):
        groups.memory.set_cap(groups.folder("dev", "a") or "", BUS, GIB)


def test_without_a_region_or_a_tree_nothing_is_capped(tmp_path: Path) -> None:
    """No region, no cap: said, not skipped; and no tree is no group."""
    _, groups = tree_of(tmp_path)
    assert not groups.can_cap("0000:99:00.0")
    assert groups.memory is not None
    groups.make("dev", "a")
    with pytest.raises(UnsupportedError, match="dmem"):
        groups.memory.set_cap(groups.folder("dev", "a") or "", "0000:99:00.0", GIB)
    bare = ShareGroups(None, "alloy-test")
    bare.make("dev", "a")
    assert (bare.pids("dev", "a"), bare.procs("dev", "a"), bare.can_cap(BUS)) == ((), (), False)
    assert bare.cap("dev", "a", BUS) is None


def test_who_is_below_a_share_is_in_it(tmp_path: Path) -> None:
    """Processes of nested cgroups count; an occupied one is not removed, an empty one is."""
    tree, groups = tree_of(tmp_path)
    groups.make("dev", "a")
    groups.make("dev", "b")
    folder = Path(groups.folder("dev", "a") or "")
    tree.make(str(folder / "pod"))
    tree.enter(folder / "pod", 41)
    tree.enter(folder, 40)
    assert groups.pids("dev", "a") == (40, 41)
    groups.remove("dev", "a")
    assert folder.exists()
    with pytest.raises(DeviceBusyError):
        tree.remove(str(folder / "pod"))
    groups.remove("dev", "b")
    assert not Path(groups.folder("dev", "b") or "").exists()
    assert folder.exists()


@given(text=st.text(max_size=200))
def test_any_text_of_a_dmem_file_is_read(text: str) -> None:
    """Whatever stands in a file of the tree, reading it never raises, and a number is a number."""
    assert all(value is None or value >= 0 for value in regions(text).values())
    assert not same_bus(text, "not a bus")


def test_names_of_regions_follow_the_drivers() -> None:
    """Both drivers name their regions; a stolen or system region is none."""
    assert same_bus(AMD, BUS)
    assert same_bus(NVIDIA, "0000:3b:00.0")
    for name in (f"drm/{BUS}/stolen", f"drm/{BUS}", f"xyz/{BUS}/vram0", "drm/0000:06:00.0/vram0"):
        assert not same_bus(name, BUS)
    assert DeviceMemory("/nowhere").region(BUS) is None
