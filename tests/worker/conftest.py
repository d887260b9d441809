"""Workers over the vendored test library."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from alloy_agent.errors import BackendError
from alloy_agent.worker.client import Worker, WorkerSettings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

FACTORY = f"{Path(__file__).with_name('vendor.py')}:open_it"
PATIENCE_S = 60.0  # only so that a broken build ends; no test asserts on it


class Spec(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker needs of a backend's spec."""

    name: str = "vendored"
    options: dict[str, Any] = msgspec.field(default_factory=dict)


class Lab:
    """Starts workers and ends them."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.workers: list[Worker] = []

    def worker(
        self,
        faults: dict[str, str] | None = None,
        *,
        settings: WorkerSettings | None = None,
        sample: bool = True,
        on_event: Callable[[Any], None] | None = None,
        **options: Any,
    ) -> Worker:
        """Return a started worker whose library has these faults; it has answered, if it opens."""
        everything = {"dir": str(self.directory), "faults": faults or {}, **options}
        made = Worker(
            Spec(options=everything),  # type: ignore[arg-type]
            settings or WorkerSettings(observe_deadline_s=0.3, backoff_base_s=0.01),
            sample=sample,
            on_event=on_event,
            factory=FACTORY,
        )
        made.start()
        self.workers.append(made)
        if not any(call.startswith(".") for call in faults or {}):
            with contextlib.suppress(BackendError):  # a crash may come before the answer
                made.discover(PATIENCE_S)
        return made

    def free(self, device: str) -> None:
        """Let the calls that hang on a device return."""
        (self.directory / f"free-{device}").touch()

    def entered(self, device: str, call: str) -> list[tuple[int, float]]:
        """Return (worker pid, time) of each entry into a faulty call."""
        marks = self.directory / f"entered-{device}-{call}"
        if not marks.exists():
            return []
        return [(int(a), float(b)) for a, b in map(str.split, marks.read_text().splitlines())]


def wait_for(what: Callable[[], Any], about: str) -> Any:
    """Return the first true result of `what`; fail when there is none for very long."""
    until_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < until_s:
        found = what()
        if found:
            return found
        time.sleep(0.01)
    pytest.fail(f"never: {about}")


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    made = Lab(tmp_path)
    yield made
    for worker in made.workers:
        with contextlib.suppress(OSError):
            worker.stop()
