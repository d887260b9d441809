"""Measurements of what design promises; each prints one JSON document."""
