"""`python -m alloy_agent.host.subscribe FD`: subscribes to process events, hands the socket over.

pyroute2 brings 190 modules, 9 MB and a quarter of a second for the three calls that open, bind and
subscribe a socket. A short-lived process makes them, passes the socket through the unix socket FD,
and ends; the subscription is the socket's and stays with whoever holds it.
"""

from __future__ import annotations

import os
import socket
import sys

RECEIVE_BUFFER_BYTES = 4 << 20  # about 30,000 events while the reader is away
SO_RCVBUFFORCE = 33  # asm-generic/socket.h
DONE = b"ok"


def main(arguments: list[str]) -> int:
    """Subscribe and pass the socket on; what fails is passed on as its text."""
    with socket.socket(fileno=int(arguments[0])) as channel:
        try:
            from pyroute2.netlink.connector.cn_proc import ProcEventSocket

            events = ProcEventSocket()
            events.bind()
            with socket.socket(fileno=os.dup(events.fileno())) as raw:
                raw.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, RECEIVE_BUFFER_BYTES)
            events.control(listen=True)
        except (OSError, ImportError, KeyError) as exc:  # pyroute2: KeyError for "no address"
            channel.sendall(str(exc).encode()[:4096] or b"failed")
            return 1
        socket.send_fds(channel, [DONE], [events.fileno()])
        channel.recv(1)  # until the other side holds it; closing ours must not be the last
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)  # pyroute2 would unsubscribe the socket on its way out
