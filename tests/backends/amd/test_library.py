"""The vendor's AMD library: found, tried, judged by its version, and used for events alone."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

from alloy_agent.backends.amd.library import Library, attempt, candidates, load_wrapper
from alloy_agent.model import ModeKind, SetMode
from tests.fakes.amd_tree import tree_of
from tests.fakes.amdsmi import FakeSmi, library_over, loaded

SOURCE = """
#include <unistd.h>
#include <stdint.h>
int amdsmi_get_lib_version(uint32_t *v) {{ v[0] = {major}; v[1] = {minor}; v[2] = 0; return 0; }}
{init}
"""
INIT = "int amdsmi_init(uint64_t f) { return 0; }"
KINDS = {
    "good": (26, 1, INIT, ""),
    "old": (25, 4, INIT, "version 25.4"),
    "newer": (26, 2, INIT, "version 26.2"),
    "newest": (26, 5, INIT, "version 26.5"),
    "crash": (
        26,
        0,
        "int amdsmi_init(uint64_t f) { *(volatile int *)8 = 1; return 0; }",
        "SIGSEGV",
    ),
    "hang": (26, 0, "int amdsmi_init(uint64_t f) { sleep(60); return 0; }", "did not return"),
    "refusal": (26, 0, "int amdsmi_init(uint64_t f) { return 34; }", "status 34"),
    "lacking": (26, 0, "", "lacks a function"),
}


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Real shared objects of every kind, compiled here."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler on this host to make stand-in libraries with")
    folder = tmp_path_factory.mktemp("libraries")
    found = {}
    for name, (major, minor, init, _) in KINDS.items():
        source, target = folder / f"{name}.c", folder / f"{name}.so"
        source.write_text(SOURCE.format(major=major, minor=minor, init=init))
        subprocess.run([compiler, "-shared", "-fPIC", "-w", "-o", target, source], check=True)
        found[name] = str(target)
    return found


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_each_kind_of_library_is_judged_in_a_child(kind: str, libraries: dict[str, str]) -> None:
    """Crash, hang, missing symbol and foreign version are told apart; this process lives on."""
    tried = attempt([libraries[kind]], deadline_s=1.0 if kind == "hang" else 20.0)
    expected = KINDS[kind][3]
    assert expected in tried.trouble
    assert bool(tried.trouble) == bool(expected)


def test_an_absent_library_names_every_candidate(capfd: pytest.CaptureFixture[str]) -> None:
    """All causes are kept, not only the last, and nothing is printed."""
    tried = attempt(["/nowhere/a.so", "/nowhere/b.so"], deadline_s=20.0)
    assert "/nowhere/a.so" in tried.trouble
    assert "/nowhere/b.so" in tried.trouble
    assert capfd.readouterr().out == ""


def test_candidates_follow_the_wrapper() -> None:
    """ROCM_HOME hides ROCM_PATH in the first place, as in the wrapper; a path stands alone."""
    found = candidates("auto", {"ROCM_HOME": "/a", "ROCM_PATH": "/b"})
    assert found == ["/a/lib/libamd_smi.so", "libamd_smi.so", "/b/lib/libamd_smi.so"]
    assert candidates("/x/libamd_smi.so", {}) == ["/x/libamd_smi.so"]


def test_the_wrapper_without_library_is_a_reason(capfd: pytest.CaptureFixture[str]) -> None:
    """The wrapper raises KeyError at import: that becomes a note, and stdout stays clean."""

    def loader(path: str) -> object:
        with loaded(None):
            return load_wrapper(path)

    from alloy_agent.backends.amd.library import Tried

    library = Library(lambda: Tried(path="/x", version=(26, 0, 0)), loader)  # type: ignore[arg-type]
    assert library.open() is False
    assert "KeyError" in library.note
    assert capfd.readouterr().out == ""


def test_a_missing_symbol_is_a_reason(tmp_path: Path) -> None:
    """One symbol of 184 missing ends the import with AttributeError: a note, no crash."""
    tree = tree_of("1xMI300X", tmp_path)
    library = library_over(FakeSmi(tree, lacks=frozenset({"amdsmi_get_fw_info"})))
    assert library.open() is False
    assert "amdsmi_get_fw_info" in library.note


def test_doctor_says_why_the_library_is_not_used(tmp_path: Path) -> None:
    """The doctor's line has the cause, and capabilities say what stands in."""
    tree = tree_of("1xMI300X", tmp_path)
    backend = tree.backend()
    lines = {line.subject: line for line in backend.diagnose()}
    assert "none in this test" in lines["amdsmi"].found
    assert backend.capabilities().library == "sysfs"


def test_events_reach_the_agent_whatever_bytes_they_hold(tmp_path: Path) -> None:
    """A message in invalid UTF-8, written by a tenant, is told; the next event is told too."""
    tree = tree_of("2xMI300X", tmp_path)
    smi = FakeSmi(tree)
    backend = tree.backend(library=library_over(smi))
    first, second = backend.discover()
    backend.wait_events(0.05)
    smi.push(first, 0, "vmfault", b"comm \xff\xfe")
    smi.push(second, 0, "ring_hang")
    smi.push(second, 0, "gpu_pre_reset")
    events = backend.wait_events(1.0)
    assert [(e.device, e.kind, e.code) for e in events] == [
        (first, "fault", "amd:vmfault"),
        (second, "fault", "amd:ring_hang"),
        (second, "reset", "amd:gpu_pre_reset"),
    ]
    assert "\\xff" in events[0].detail
    backend.close()
    assert not smi.running


def test_readers_are_let_go_before_a_switch_and_come_back(tmp_path: Path) -> None:
    """Our own readers never make the driver refuse, and after resume they read again."""
    tree = tree_of("2xMI300X", tmp_path)
    smi = FakeSmi(tree)
    backend = tree.backend(library=library_over(smi))
    device = backend.discover()[0]
    backend.wait_events(0.05)
    assert smi.readers
    backend.quiesce(device)
    assert not smi.readers
    backend.wait_events(0.05)
    assert not smi.readers
    backend.apply(SetMode(device=device, kind=ModeKind.COMPUTE, current="SPX", wanted="CPX"))
    backend.resume(device)
    backend.wait_events(0.05)
    assert len(smi.readers) == 9
    backend.close()


def test_a_switch_without_quiesce_lets_go_too(tmp_path: Path) -> None:
    """Even a bare step frees `/dev/kfd` first: the switch works at the first try."""
    tree = tree_of("1xMI300X", tmp_path)
    backend = tree.backend(library=library_over(FakeSmi(tree)))
    device = backend.discover()[0]
    backend.wait_events(0.05)
    backend.apply(SetMode(device=device, kind=ModeKind.COMPUTE, current="SPX", wanted="DPX"))
    assert len(backend.observe(device).partitions) == 2


def test_garbage_addresses_open_no_reader(tmp_path: Path) -> None:
    """A library whose libdrm failed tells nonsense with SUCCESS: no device is taken for another."""
    tree = tree_of("1xMI300X", tmp_path)
    smi = FakeSmi(tree)
    smi.garbage_addresses = True
    backend = tree.backend(library=library_over(smi))
    backend.discover()
    backend.wait_events(0.05)
    assert not smi.readers


def test_the_address_layout_is_the_wrappers(tmp_path: Path) -> None:
    """The wrapper's own bit fields agree with how addresses are read here."""
    from alloy_agent.backends.amd.library import _address

    with loaded(FakeSmi(tree_of("1xMI300X", tmp_path))):
        bdf = load_wrapper("/x").amdsmi_bdf_t()
    value = 3 << 16 | 0x85 << 8 | 2 << 3 | 5
    ctypes.memmove(ctypes.byref(bdf), value.to_bytes(8, "little"), 8)
    assert _address(bdf) == ("0003:85:02.0", 5)
    inner = getattr(bdf, "struct_amdsmi_bdf_t", bdf)
    fields = {name for name, *_ in getattr(inner, "_fields_", [])}
    assert fields
