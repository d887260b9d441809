"""Benchmarks of the agent's promises; each is `python -m benchmarks.NAME [--quick]`."""
