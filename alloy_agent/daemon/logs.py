"""The daemon's log: events with fields, one JSON object a line, or readable lines on a terminal.

Every room logs through the standard library with an event name and `extra` fields; structlog
renders those here. One-shot commands never come here: they answer on stdout and fail on stderr.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from structlog.typing import Processor


@contextlib.contextmanager
def _without(module: str) -> Iterator[None]:
    """Have a module look absent to whoever imports it optionally.

    structlog loads rich (5 MB) for tracebacks on terminals if it is there; a daemon that logs JSON
    shall not carry it.
    """
    hide = module not in sys.modules
    if hide:
        sys.modules[module] = None  # type: ignore[assignment]  # the documented way to block one
    try:
        yield
    finally:
        if hide:
            del sys.modules[module]


def configure(level: str, form: str, stream: TextIO | None = None) -> logging.Handler:
    """Send all logging to one stream, rendered as `json` or `console`; return the handler."""
    target = stream or sys.stderr
    console = form == "console" or (form == "auto" and target.isatty())
    with contextlib.nullcontext() if console else _without("rich"):
        import structlog

    renderer = (
        structlog.dev.ConsoleRenderer(colors=target.isatty())
        if console
        else structlog.processors.JSONRenderer(default=str)
    )
    shared: list[Processor] = [
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.ExtraAdder(),
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    final: list[Processor] = [structlog.stdlib.ProcessorFormatter.remove_processors_meta]
    if not console:
        final.append(structlog.processors.dict_tracebacks)
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=shared, processors=[*final, renderer]
    )
    handler = logging.StreamHandler(target)
    handler.setFormatter(formatter)
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level.upper())
    return handler
