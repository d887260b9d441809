"""One agent's stream as the brain holds it: commands out, replies matched, everything bounded."""

from __future__ import annotations

import asyncio
import itertools
from typing import Final

from alloy_agent.proto import agent_pb2 as pb

MAX_OUTGOING: Final = 1024
_NUMBERS = itertools.count(1)


class LinkDownError(Exception):
    """The stream ended, or is too slow, before an answer came: what became of it is not known."""


class Link:
    """The brain's end of one `Attach` call."""

    def __init__(self, node: str, term: int) -> None:
        self.node = node
        self.number = next(_NUMBERS)
        self.closed = False
        self._term = term
        self._out: asyncio.Queue[pb.BrainMessage | None] = asyncio.Queue(MAX_OUTGOING)
        self._waiting: dict[str, asyncio.Future[pb.Reply]] = {}
        self._acked: pb.BrainMessage | None = None

    def send(self, message: pb.BrainMessage) -> None:
        """Put a message on its way.

        Raises:
            LinkDownError: The stream has ended, or its agent does not read.
        """
        if self.closed:
            raise LinkDownError(f"node {self.node}: its stream is down")
        message.epoch = self._term
        try:
            self._out.put_nowait(message)
        except asyncio.QueueFull:
            raise LinkDownError(f"node {self.node}: it does not read") from None

    async def ask(self, message: pb.BrainMessage, timeout_s: float) -> pb.Reply:
        """Return the reply to a command.

        Raises:
            LinkDownError: None came.
        """
        future: asyncio.Future[pb.Reply] = asyncio.get_running_loop().create_future()
        self._waiting[message.id] = future
        try:
            self.send(message)
            return await asyncio.wait_for(future, timeout_s)
        except TimeoutError:
            raise LinkDownError(f"node {self.node}: no answer in {timeout_s:.0f} s") from None
        finally:
            self._waiting.pop(message.id, None)

    def replied(self, reply: pb.Reply) -> None:
        """Give a reply to who waits for it."""
        future = self._waiting.get(reply.command_id)
        if future is not None and not future.done():
            future.set_result(reply)

    async def outgoing(self) -> pb.BrainMessage | None:
        """Return the next message to write; None: the stream shall end."""
        return await self._out.get()

    def close(self) -> None:
        """End the stream; who waits is told."""
        if self.closed:
            return
        self.closed = True
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(LinkDownError(f"node {self.node}: its stream went down"))
        if self._out.full():
            self._out.get_nowait()
        self._out.put_nowait(None)
