"""Reports from one audit result: table, JSON, SARIF, in-toto in DSSE, HTML.

Each is imported when it is asked for: a command prints one of them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from alloy_agent.conformance.report.documents import (
        from_json,
        open_dsse,
        to_dsse,
        to_json,
        to_sarif,
        to_statement,
    )
    from alloy_agent.conformance.report.history import Event, history_of
    from alloy_agent.conformance.report.page import to_html
    from alloy_agent.conformance.report.table import to_table

__all__ = [
    "Event",
    "from_json",
    "history_of",
    "open_dsse",
    "to_dsse",
    "to_html",
    "to_json",
    "to_sarif",
    "to_statement",
    "to_table",
]

_ROOMS = {"Event": "history", "history_of": "history", "to_html": "page", "to_table": "table"}


def __getattr__(name: str) -> object:
    """Return a report's function, imported on first use."""
    if name in __all__:
        module = importlib.import_module(f"{__name__}.{_ROOMS.get(name, 'documents')}")
        return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
