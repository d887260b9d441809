"""A memory mode that waits for the driver: accepted, told, and in force after a reload."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from alloy_agent.silicon.__main__ import main as silicon
from tests.cli.conftest import Run

QUARTERS = """
version: v1
layouts:
  quarters:
    - match: {vendor: amd}
      compute: CPX
      memory: NPS4
"""


def test_a_pending_mode_holds_after_the_simulated_driver_is_loaded_again(
    alloy: Run, tmp_path: Path
) -> None:
    """Apply exits 0 while the mode waits, the audit fails for that reason, a reload cures it."""
    file = tmp_path / "quarters.yaml"
    file.write_text(QUARTERS)

    def do(*arguments: str) -> Any:
        return alloy(*arguments, fake="2xMI300X")

    for _ in range(2):  # asking again changes nothing
        done = do("apply", str(file), "--yes", "--disruptive", "--json")
        assert done.code == 0, done.err
        assert done.json["report"]["outcome"] == "pending"
        assert done.json["report"]["pending"]
    audited = do("audit", "--json")
    assert audited.code == 1
    judged = [j for p in audited.json["partitions"] for j in p["judgements"]]
    reasons = {j["reason"] for j in judged if j["check"] == "CPX-01" and j["verdict"] == "fail"}
    assert any("memory NPS4 waits for a driver reload" in reason for reason in reasons)

    assert silicon(["reload", "2xMI300X", "--state-dir", str(tmp_path / "state")]) == 0
    again = do("apply", str(file), "--yes", "--disruptive", "--json")
    assert again.code == 0, again.err
    assert again.json["report"]["outcome"] in {"applied", "unchanged"}
    assert do("audit").code == 0


def test_only_a_node_that_is_there_is_reloaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another directory or another node than the agent's is one line, and nothing is made."""
    assert silicon(["reload", "1xMI300X", "--state-dir", str(tmp_path)]) == 1
    assert "--fake" in capsys.readouterr().err
    assert silicon(["reload", "1xMI3OOX", "--state-dir", str(tmp_path)]) == 1
    assert "MI3OOX" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
