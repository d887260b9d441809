"""Tests of simulated silicon."""
