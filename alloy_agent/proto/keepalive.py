"""What both ends of a stream agree on, in one place: keepalive, limits and the hint keys.

A client that pings more often than the server allows is sent away with GOAWAY "too_many_pings":
the server of gRPC core tolerates one ping per 300 s by default, and none without a call. So the
two sides are one table here, and `MIN_PING_INTERVAL_MS` is less than `PING_INTERVAL_MS` by a
margin for timer skew.

An agent must also live with a brain behind a proxy that has the defaults. The client side of gRPC
core doubles its interval when it is told so; the application heartbeat (`HEARTBEAT_S`) then finds
a dead peer.

Windows stay at HTTP/2's 64 KiB (`bdp_probe` off): streams are thin, and a window that grows to
megabytes is memory for each of thousands of peers, filled by whoever does not slow down.

Source: gRPC core `doc/keepalive.md` and `grpc_types.h` (argument names and defaults).
"""

from __future__ import annotations

PING_INTERVAL_MS = 20_000
PING_TIMEOUT_MS = 10_000  # a peer that does not answer for so long is gone
MIN_PING_INTERVAL_MS = 10_000
MAX_MESSAGE_BYTES = 8 * 1024 * 1024
HEARTBEAT_S = 5.0  # the agent sends something at least this often, unless Welcome says otherwise
SILENCE_S = 3 * HEARTBEAT_S  # no message for so long: the stream counts as dead on either side
REFUSAL_KEY = "alloy-refusal-bin"  # trailing metadata: a serialised PlaceRefusal
RETRY_AFTER_KEY = (
    "alloy-retry-after-ms"  # trailing metadata: when to come back, decimal milliseconds
)
MAX_CONNECTION_BACKOFF_MS = 5_000

Options = tuple[tuple[str, int | str], ...]


def client_options() -> Options:
    """Return the channel arguments of whoever dials."""
    return (
        ("grpc.keepalive_time_ms", PING_INTERVAL_MS),
        ("grpc.keepalive_timeout_ms", PING_TIMEOUT_MS),
        ("grpc.keepalive_permit_without_calls", 0),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.bdp_probe", 0),
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", MAX_CONNECTION_BACKOFF_MS),
        ("grpc.enable_retries", 0),
        ("grpc.use_local_subchannel_pool", 1),
    )


def server_options() -> Options:
    """Return the server arguments of whoever is dialled."""
    return (
        ("grpc.keepalive_time_ms", PING_INTERVAL_MS),
        ("grpc.keepalive_timeout_ms", PING_TIMEOUT_MS),
        ("grpc.keepalive_permit_without_calls", 0),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", MIN_PING_INTERVAL_MS),
        ("grpc.http2.max_ping_strikes", 2),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.bdp_probe", 0),
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.so_reuseport", 0),
    )
