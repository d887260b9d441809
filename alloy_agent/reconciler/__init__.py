"""The only writer of hardware: journal the step, do it, observe again."""

from __future__ import annotations

from alloy_agent.reconciler.reconciler import Limits, Reconciler, WorkerLike

__all__ = ["Limits", "Reconciler", "WorkerLike"]
