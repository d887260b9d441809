"""Alloy's node agent: partitions, measures, audits and lends the accelerators of one node."""

__version__ = "0.1.0"
