"""Reports from one audit result: table, JSON, SARIF, in-toto in DSSE, HTML."""

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
