"""The wire: generated code, and what both ends agree on (`keepalive`, `failures`).

`scripts/generate_proto.py` makes the `*_pb2*` files from `proto/`. Nothing is imported here:
protobuf takes time to load, and commands that never touch the wire do not pay for it.
"""
