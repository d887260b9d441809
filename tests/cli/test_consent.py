"""Whose consent `apply` asks for, and when it needs none."""

from __future__ import annotations

from pathlib import Path

from tests.cli.conftest import Run


def test_empty_partitions_go_without_a_yes(alloy: Run, tmp_path: Path) -> None:
    """Pieces of our own in which nobody is are destroyed without consent."""
    path = tmp_path / "two.yaml"
    path.write_text(
        "version: v1\nlayouts:\n"
        "  two:\n    - match: {vendor: neuron}\n      cores: [2, 2]\n"
        "  clear:\n    - match: {vendor: neuron}\n      cores: []\n"
    )
    assert alloy("apply", str(path), "--layout", "two", fake="trn2.3xlarge").code == 0
    done = alloy("apply", str(path), "--layout", "clear", fake="trn2.3xlarge")
    assert (done.code, done.err) == (0, "")
    assert "2 steps done and read back" in done.out


def test_whoever_a_mode_interrupts_is_asked(alloy: Run, layout: Path) -> None:
    """In a pipe whoever would be interrupted is named, and nothing is done without `--yes`."""
    refused = alloy("apply", str(layout), "--layout", "halves")
    assert refused.code == 2
    assert "interrupts device GPU-" in refused.err
    assert "no terminal is here to ask" in refused.err
    assert "--yes" in refused.err
