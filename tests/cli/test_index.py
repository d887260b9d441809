"""Device numbers where several vendors each count their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Run

COUNTED = "# counts for each vendor alone"


@pytest.mark.host
def test_numbers_that_stand_twice_are_explained(
    alloy: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside the host's CPUs number 0 stands twice: the list says so, and a layout must too."""
    assert COUNTED not in alloy("devices").out
    monkeypatch.delenv("ALLOY_BACKENDS_CPU")
    assert COUNTED in alloy("devices").out
    path = tmp_path / "bare.yaml"
    text = "version: v1\nlayouts:\n  bare:\n    - match: {index: 0}\n      shared: {}\n"
    path.write_text(text)
    refused = alloy("plan", str(path))
    assert (refused.code, refused.out) == (2, "")
    assert "bare.yaml:4: index 0 is that of cpu-node0" in refused.err
    assert "add the vendor" in refused.err
    path.write_text(text.replace("index: 0", "vendor: nvidia, index: 0"))
    planned = alloy("plan", str(path)).out
    assert "on GPU-" in planned
    assert "cpu-node0" not in planned
