"""The reference placement brain."""
