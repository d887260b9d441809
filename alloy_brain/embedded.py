"""A brain inside another process: on a thread of its own with its own event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from alloy_brain.server import BrainServer, BrainSettings, boot_id

T = TypeVar("T")
START_S = 30.0


class EmbeddedBrain:
    """The reference brain, as a context manager: `address` is where agents and clients dial.

    Args:
        settings: Where and how it serves.

    Raises:
        LedgerError: The ledger cannot be opened.
        IdentityError: The address cannot be used.
    """

    def __init__(self, settings: BrainSettings) -> None:
        self.server = BrainServer(settings, boot_id())
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="brain", daemon=True)

    def __enter__(self) -> EmbeddedBrain:
        self._thread.start()
        try:
            self.call(self.server.start())
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_exc: object) -> None:
        self.stop()

    @property
    def address(self) -> str:
        """Return where it listens."""
        return self.server.address

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Return what a coroutine returns, run on the brain's loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(START_S)

    def stop(self) -> None:
        """Stop serving."""
        self.call(self.server.stop(0.2))
        self._end()

    def _end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5.0)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.close()
