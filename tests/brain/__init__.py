"""Tests of the reference brain."""
