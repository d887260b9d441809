"""The control plane that all tests of one worker share; what they make carries names of its own."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kubernetes.cluster import CONTROLLERS, NEEDED, Cluster, missing
from tests.kubernetes.installed import Installed


@pytest.fixture(scope="session")
def control() -> Iterator[Cluster]:
    """Yield a control plane of etcd and a real kube-apiserver."""
    reason = missing()
    if reason:
        pytest.skip(reason)
    with tempfile.TemporaryDirectory(prefix="alloy-kube-") as folder, Cluster(Path(folder)) as made:
        yield made


@pytest.fixture(scope="session")
def installed(control: Cluster) -> Installed:
    """Return the control plane with what `deploy/daemonset/base` puts there, in force."""
    return Installed(control)


@pytest.fixture(scope="session")
def scheduled(installed: Installed) -> Installed:
    """Return the installed control plane with scheduler and controllers at work."""
    if missing(*NEEDED):
        pytest.skip(missing(*NEEDED))
    installed.cluster.start_controllers(*CONTROLLERS)
    installed.cluster.start_scheduler()
    installed.cluster.until(lambda: installed.cluster.get("ServiceAccount", "default"))
    return installed
