"""A site of its own for each test of the daemon."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.daemon.harness import Site


@pytest.fixture
def site(tmp_path: Path) -> Site:
    """Give a node with one simulated H100 and nothing of the host."""
    return Site(tmp_path, "1xH100-SXM5-80GB")


@pytest.fixture
def cpu_site(tmp_path: Path) -> Iterator[Site]:
    """Give the host's own cores under a cgroup root of this test's own."""
    site = Site(tmp_path, cpu=True)
    yield site
    site.clean()
