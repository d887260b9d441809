"""Proof of isolation: facts, judgements, tiers, evidence and reports."""
