"""Tests of the agent as a DRA driver."""
