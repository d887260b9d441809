"""Shared rules of the suite: what a mark needs, and how property tests behave."""

from __future__ import annotations

import os
import shutil

import pytest
from hypothesis import HealthCheck, settings

# No deadlines: machines that run this are shared and noisy. CI runs the same examples each time.
settings.register_profile("local", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile(
    "ci", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("ci" if os.environ.get("CI") else "local")


def _why_not(item: pytest.Item) -> str | None:
    """Return why this machine cannot run the test, or None."""
    if item.get_closest_marker("device"):
        return "needs accelerator hardware: name it with --device-backend"
    if item.get_closest_marker("host") and os.geteuid() != 0:
        return "needs root and real cgroups on this host"
    if item.get_closest_marker("net"):
        if os.geteuid() != 0:
            return "needs root to make network namespaces"
        if shutil.which("ip") is None:
            return "needs `ip` (package iproute2) to make network namespaces"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip, with the reason, what this machine cannot run."""
    for item in items:
        reason = _why_not(item)
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))
