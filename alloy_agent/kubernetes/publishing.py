"""Keeps the slices in the API server as they should be, whoever removes or changes them.

Theory of operation. `want` takes what each pool should hold; one thread lists what is there and
writes the difference, another watches. A kubelet that starts deletes all slices of the node without
telling anyone: the watch sees it, and the next round writes them again, within a second or two.

Rules that stay true in here:

* The server is asked before anything is written; what equals what is wanted is not written.
* A pool that does not pass the check is not written, and says why.
* A refusal or silence is tried again with growing delays; other pools go on. What somebody else
  changed or deleted meanwhile is looked at again at once, a few times: a kubelet that wipes the
  slices of its node takes a while, and rounds fall into it.
* Fields that the server drops turn the feature off here, with a note, rather than publish half.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final, Protocol

import msgspec

from alloy_agent.kubernetes import slices
from alloy_agent.kubernetes.api import ApiError
from alloy_agent.kubernetes.slices import Document, SliceOptions

LOG = logging.getLogger(__name__)

RETRY_S: Final = 0.5
RETRY_MAX_S: Final = 30.0
RESYNC_S: Final = 300.0
PAUSE_S: Final = 0.05  # gathers the changes of one moment into one round
OVERTAKEN: Final = (404, 409)  # somebody else changed or deleted it since it was listed
HASTE: Final = 10  # so often it is looked at once more without a delay


class SliceApi(Protocol):
    """What is asked of the API server."""

    def slices(self, driver: str, node: str) -> tuple[list[Document], str]:
        """Return the slices and the version of the list."""
        ...

    def create_slice(self, document: Document) -> Document:
        """Create one."""
        ...

    def update_slice(self, document: Document) -> Document:
        """Replace one."""
        ...

    def delete_slice(self, document: Document) -> None:
        """Delete one."""
        ...

    def watch_slices(
        self, driver: str, node: str, version: str, timeout_s: float
    ) -> Iterator[Document]:
        """Yield changes."""
        ...


Specs = Callable[[SliceOptions], dict[str, tuple[Document, ...]]]


class Publisher:
    """Writes and keeps the slices of one node.

    Args:
        api: The API server.
        options: Of whom the slices speak; features found missing are turned off in it.
    """

    def __init__(self, api: SliceApi, options: SliceOptions) -> None:
        self.options = options
        self.converged = threading.Event()
        self.problem = ""
        self.written = 0
        self._api = api
        self._specs: Specs | None = None
        self._overtaken = False  # whatever failed in the last round failed for that
        self._hasty = 0  # rounds in a row that were
        self._wake = threading.Event()
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=run, name=name, daemon=True)
            for name, run in (("slices", self._run), ("slices-watch", self._watch))
        ]

    def start(self) -> None:
        """Begin; nothing is written before the first `want`."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End; the slices stay, for the agent that comes next."""
        self._stop.set()
        self._wake.set()
        if self._threads[0].ident is not None:
            self._threads[0].join(10)

    def want(self, specs: Specs) -> None:
        """Take over what should be published: specs by pool, made for the options in force."""
        self._specs = specs
        self.converged.clear()
        self._wake.set()

    def wake(self) -> None:
        """Look again as soon as possible."""
        self.converged.clear()
        self._wake.set()

    def _run(self) -> None:
        delay_s = 0.0
        while not self._stop.is_set():
            self._wake.wait(delay_s or RESYNC_S)
            if self._stop.wait(PAUSE_S):
                return
            self._wake.clear()
            if self._specs is None:
                continue
            try:
                again = self.converge()
            except ApiError as exc:
                self._note(str(exc))
                again = True
            except Exception:
                LOG.exception("publish_defect")
                again = True
            if again and self._overtaken and self._hasty < HASTE:
                self._hasty += 1
                self._wake.set()
                continue
            self._hasty = 0
            if again:
                delay_s = min(max(delay_s * 2, RETRY_S), RETRY_MAX_S)
                self._stop.wait(delay_s)
                self._wake.set()
            else:
                delay_s = 0.0
                if not self._wake.is_set():
                    self.converged.set()

    def converge(self) -> bool:
        """Do one round; return whether another is needed.

        Raises:
            ApiError: The slices cannot be listed.
        """
        if self._specs is None:
            return False
        self._overtaken = False
        existing, _ = self._api.slices(self.options.driver, self.options.node)
        wanted = self._specs(self.options)
        self._overtaken = True
        by_pool: dict[str, list[Document]] = {pool: [] for pool in wanted}
        for one in existing:
            pool = one.get("spec", {}).get("pool", {}).get("name", "")
            by_pool.setdefault(pool, []).append(one)
        failures = [
            text
            for pool, present in sorted(by_pool.items())
            if (text := self._pool(pool, wanted.get(pool, ()), present))
        ]
        if not (failures and self._overtaken and self._hasty < HASTE):
            self._note("; ".join(failures))
        return bool(failures)

    def _pool(self, pool: str, specs: Sequence[Document], present: list[Document]) -> str:
        """Write one pool; return why it is not as it should be."""
        wrong = (
            slices.problems([{**s, "pool": {**s["pool"], "generation": 1}} for s in specs])
            if specs
            else ()
        )
        if wrong:
            self._overtaken = False
            return f"pool {pool} is not published: {wrong[0]}"
        change = slices.writes(specs, present, self.options)
        try:
            for one in change.delete:
                self._api.delete_slice(one)
            for one in change.update:
                self._look(one, self._api.update_slice(one))
            for one in change.create:
                self._look(one, self._api.create_slice(one))
        except ApiError as exc:
            self._overtaken &= exc.status in OVERTAKEN
            return f"pool {pool}: {exc}"
        self.written += len(change.update) + len(change.create) + len(change.delete)
        return ""

    def _look(self, sent: Document, answered: Document) -> None:
        """Notice features that the server does not have."""
        gone = slices.dropped(sent, answered)
        if not gone:
            return
        LOG.error(
            "server_lacks_features",
            extra={"fields": gone, "cure": "use Kubernetes 1.36 or enable DRAPartitionableDevices"},
        )
        self.options = msgspec.structs.replace(
            self.options,
            counters=self.options.counters and set(gone) <= {"taints"},
            taints=self.options.taints and "taints" not in gone,
        )
        self._wake.set()

    def _note(self, problem: str) -> None:
        if problem != self.problem:
            if problem:
                LOG.warning("slices_not_published", extra={"reason": problem})
            else:
                LOG.info("slices_published", extra={"driver": self.options.driver})
        self.problem = problem

    def _watch(self) -> None:
        """Wake whenever a slice of ours was changed or deleted by somebody."""
        delay_s = RETRY_S
        while not self._stop.is_set():
            begun_s = time.monotonic()
            try:
                driver, node = self.options.driver, self.options.node
                _, version = self._api.slices(driver, node)
                for event in self._api.watch_slices(driver, node, version, 60.0):
                    if self._stop.is_set():
                        return
                    if event.get("type") in ("DELETED", "MODIFIED"):
                        self.wake()
            except ApiError as exc:
                LOG.debug("watch_ended", extra={"reason": str(exc)})
            except Exception:
                LOG.exception("watch_defect")
            lived = time.monotonic() - begun_s > RETRY_MAX_S
            delay_s = RETRY_S if lived else min(delay_s * 2, RETRY_MAX_S)
            self._stop.wait(delay_s if not lived else 0.0)
            if self._specs is not None:
                self._wake.set()  # what happened between two watches was not seen
