"""The operator's command that is told of drains.

It is called as `HOOK... drain|undrain SCOPE SUBJECT SESSION REASON`, once for each drain and once
for each end of one, in the order of their coming. What it was told is kept on disk, so that a
restart tells it the rest; a crash between a call and its note repeats the call.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import msgspec

from alloy_agent.daemon import calls
from alloy_agent.errors import BackendError, StoreError
from alloy_agent.model import Value
from alloy_agent.telemetry.drains import Drained, Drains

if TYPE_CHECKING:
    from alloy_agent.store import Store

LOG = logging.getLogger(__name__)

META: Final = "drains_told"

Key = tuple[str, str, float]


def words_of(hook: Sequence[str], drain: Drained, *, begins: bool) -> list[str]:
    """Return the command line of one call."""
    verb = "drain" if begins else "undrain"
    subject = drain.subject or "node"
    told = (verb, str(drain.scope), subject, drain.session, drain.reason)
    return [*hook, *(word.replace("\0", "") for word in told)]


class Tried(Value, frozen=True, kw_only=True):
    """A drain that the command was called for; `done`: nothing of its beginning is left to tell."""

    drain: Drained
    done: bool


class Hook:
    """One command, and what it was told.

    Args:
        command: Program and arguments.
        deadline_s: How long one call may take.
        attempts: How often a call that fails is made.
        store: Where is kept what was told; None: nowhere.
    """

    name: Final = "hook"

    def __init__(
        self, command: Sequence[str], deadline_s: float, attempts: int, store: Store | None
    ) -> None:
        self._command = tuple(command)
        self._deadline_s = deadline_s
        self._attempts = attempts
        self._store = store
        self._failed: tuple[Key, bool, int] = (("", "", 0.0), False, 0)  # the call that is due
        self._tried: dict[Key, Tried] = {t.drain.key: t for t in self._kept()}

    def _kept(self) -> tuple[Tried, ...]:
        text = None if self._store is None else self._store.meta(META)
        if not text:
            return ()
        try:
            return msgspec.json.decode(text, type=tuple[Tried, ...])
        except msgspec.MsgspecError as exc:
            LOG.error("hook_record_damaged", extra={"reason": str(exc)})  # noqa: TRY400 - data
            return ()

    def bring(self, held: Drains) -> None:
        """Tell the command everything that it does not know.

        Raises:
            BackendError: A call failed; it is due again.
        """
        wanted = {drain.key: drain for drain in held}
        for key in [key for key in self._tried if key not in wanted]:
            self._tell(self._tried[key].drain, begins=False)
            del self._tried[key]
            self._note()
        for key, drain in wanted.items():
            tried = self._tried.get(key)
            if tried is None:
                self._tried[key] = Tried(drain=drain, done=False)
                self._note()  # first: whatever a call that fails has done, its end is told too
            if tried is None or not tried.done:
                self._tell(drain, begins=True)
                self._tried[key] = Tried(drain=drain, done=True)
                self._note()

    def _tell(self, drain: Drained, *, begins: bool) -> None:
        words = words_of(self._command, drain, begins=begins)
        called = calls.call(words, self._deadline_s)
        program, verb, subject = words[0], words[-5], words[-3]
        fields = {"program": program, "verb": verb, "subject": subject, "session": drain.session}
        if not called.failure:
            LOG.info("hook_called", extra={**fields, "said": calls.one_line(called.said)})
            return
        key, last, failed = self._failed
        failed = failed + 1 if (key, last) == (drain.key, begins) else 1
        self._failed = (drain.key, begins, failed)
        if failed < self._attempts:
            raise BackendError(f"{program} {verb} {subject}: {called.failure}")
        fields = {**fields, "attempts": str(failed), "reason": called.failure}
        LOG.error("hook_given_up", extra=fields)

    def _note(self) -> None:
        if self._store is None:
            return
        tried = msgspec.json.encode(tuple(self._tried.values())).decode()
        try:
            self._store.set_meta(META, tried)
        except StoreError as exc:
            LOG.warning("hook_record_not_kept", extra={"reason": str(exc)})
