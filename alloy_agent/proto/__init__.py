"""The wire: code generated from `proto/` by `scripts/generate_proto.py`, and what both ends agree on (`keepalive`).

Nothing is imported here: protobuf takes time to load, and commands that never touch the wire do not pay for it.
"""
