"""One suite for every backend."""
