"""The command line in this process, with a state directory of its own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from alloy_agent.cli import main


class Done(NamedTuple):
    """What one command did."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The document on standard output."""
        return json.loads(self.out)


Run = Callable[..., Done]


@pytest.fixture
def alloy(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> Run:
    """Give `alloy("devices", "--json")`: simulated silicon only, unless `fake` says otherwise."""
    for name, value in {"ALLOY_BACKENDS_CPU": "off", "ALLOY_CPU_CGROUP_ROOT": "alloy-none"}.items():
        monkeypatch.setenv(name, value)

    def run(*arguments: str, fake: str | None = "1xH100-SXM5-80GB", state: str = "state") -> Done:
        given = ["--state-dir", str(tmp_path / state)]
        if fake is not None:
            given += ["--fake", fake]
        try:
            code = main([*given, *arguments])
        except SystemExit as exc:
            code = int(exc.code or 0)
        captured = capsys.readouterr()
        return Done(code, captured.out, captured.err)

    return run


@pytest.fixture
def layout(tmp_path: Path) -> Path:
    """Give a layout file with two layouts for a MIG device."""
    path = tmp_path / "layout.yaml"
    path.write_text(
        "version: v1\n"
        "layouts:\n"
        "  halves:\n"
        "    - match: {vendor: nvidia}\n"
        "      mig: [3g.40gb@0, 3g.40gb@4]\n"
        "  whole:\n"
        "    - match: {vendor: nvidia}\n"
        "      mig: none\n"
    )
    return path
