"""A brain to test the uplink with: a real gRPC server that remembers, and can be told to misbehave.

It is the other side of the contract and nothing more: it keeps what it was told, acknowledges,
sends what a test asks for. Run as a program it serves one address until it is killed and keeps its
memory in a file, so that a test can kill -9 it.
"""

from __future__ import annotations

import json
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc

from alloy_agent.proto import agent_pb2 as pb
from alloy_agent.proto import agent_pb2_grpc, keepalive

WAIT_S = 30.0


def until(condition: Callable[[], Any], what: str) -> None:
    """Wait for something that must come; give up after a generous while."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"never came: {what}")
        time.sleep(0.005)


class Stream:
    """One stream as the brain sees it."""

    def __init__(self, hello: pb.Hello) -> None:
        self.hello = hello
        self.out: queue.Queue[pb.BrainMessage | bytes | None] = queue.Queue()
        self.received: list[pb.AgentMessage] = []
        self.ended = threading.Event()

    def send(self, message: pb.BrainMessage | bytes) -> None:
        self.out.put(message)

    def close(self) -> None:
        self.out.put(None)


class Brain:
    """What a brain knows; shared by all streams of one server, and by servers after one another."""

    def __init__(self, epoch: int = 1) -> None:
        self.epoch = epoch
        self.acknowledges = True
        self.welcomes = True
        self.answers_echo = True
        self.heartbeat_ms = 200
        self.telemetry_interval_ms = 0
        self.refusal: tuple[grpc.StatusCode, str, tuple[tuple[str, str], ...]] | None = None
        self.streams: list[Stream] = []
        self.events: dict[tuple[str, int, int], pb.AgentMessage] = {}
        self.order: list[tuple[int, int]] = []
        self.duplicates = 0
        self.high: dict[tuple[str, int], int] = {}
        self.replies: list[pb.Reply] = []
        self.progress: list[pb.Progress] = []
        self.fast: list[pb.Fast] = []
        self.bodies: list[str] = []
        self.lock = threading.Lock()

    @property
    def stream(self) -> Stream:
        return self.streams[-1]

    def attach(self, incoming: Iterator[pb.AgentMessage], context: Any) -> Iterator[Any]:
        if self.refusal is not None:
            code, text, metadata = self.refusal
            context.set_trailing_metadata(metadata)
            context.abort(code, text)
        hello = next(incoming).hello
        stream = Stream(hello)
        threading.Thread(target=self.read, args=(stream, incoming), daemon=True).start()
        context.add_callback(stream.close)
        # Before the welcome: whoever sees the agent connected may ask for its stream at once.
        self.streams.append(stream)
        if self.welcomes:
            after = self.high.get((hello.node, hello.epoch), 0)
            yield pb.BrainMessage(
                epoch=self.epoch,
                welcome=pb.Welcome(
                    epoch=self.epoch,
                    brain="test",
                    resume_after=after,
                    heartbeat_ms=self.heartbeat_ms,
                    telemetry_interval_ms=self.telemetry_interval_ms,
                ),
            )
        while (message := stream.out.get()) is not None:
            yield message

    def read(self, stream: Stream, incoming: Iterator[pb.AgentMessage]) -> None:
        try:
            for message in incoming:
                stream.received.append(message)
                self.take(stream, message)
        except Exception:  # noqa: BLE001, S110 - the agent went away
            pass
        finally:
            stream.ended.set()
            stream.close()

    def take(self, stream: Stream, message: pb.AgentMessage) -> None:
        kind = str(message.WhichOneof("body"))
        with self.lock:
            self.bodies.append(kind)
            if message.sequence:
                self.event(stream, message)
            elif kind == "reply":
                self.replies.append(message.reply)
            elif kind == "progress":
                self.progress.append(message.progress)
            elif kind == "fast":
                self.fast.append(message.fast)
            elif kind == "echo" and not message.echo.reply and self.answers_echo:
                echo = pb.Echo(token=message.echo.token, reply=True)
                stream.send(pb.BrainMessage(epoch=self.epoch, echo=echo))

    def event(self, stream: Stream, message: pb.AgentMessage) -> None:
        key = (stream.hello.node, message.epoch, message.sequence)
        self.order.append((message.epoch, message.sequence))
        if key in self.events:
            self.duplicates += 1
        self.events[key] = message
        where = (stream.hello.node, message.epoch)
        self.high[where] = max(self.high.get(where, 0), message.sequence)
        self.remember()
        if self.acknowledges:
            ack = pb.Ack(epoch=message.epoch, sequence=message.sequence)
            stream.send(pb.BrainMessage(epoch=self.epoch, ack=ack))

    def remember(self) -> None:
        """Put what counts on disk; nothing to do for a brain that is not killed."""


class FileBrain(Brain):
    """A brain whose memory outlives kill -9: one line for each event."""

    def __init__(self, path: Path, epoch: int) -> None:
        super().__init__(epoch)
        self.file = path.open("a+")
        self.file.seek(0)
        for line in self.file:
            node, stream_epoch, sequence = json.loads(line)
            where = (node, stream_epoch)
            self.high[where] = max(self.high.get(where, 0), sequence)

    def event(self, stream: Stream, message: pb.AgentMessage) -> None:
        line = json.dumps([stream.hello.node, message.epoch, message.sequence])
        self.file.write(line + "\n")
        self.file.flush()
        super().event(stream, message)
        self.events.clear()


def serve(
    brain: Brain,
    address: str = "127.0.0.1:0",
    credentials: grpc.ServerCredentials | None = None,
    options: Any = None,
) -> tuple[grpc.Server, int]:
    """Return a started server and its port. Answers may be bytes: they are sent as they are."""
    server = grpc.server(
        futures.ThreadPoolExecutor(32),
        options=keepalive.server_options() if options is None else options,
    )
    handler = grpc.stream_stream_rpc_method_handler(
        brain.attach,
        request_deserializer=pb.AgentMessage.FromString,
        response_serializer=lambda one: one if isinstance(one, bytes) else one.SerializeToString(),
    )
    server.add_generic_rpc_handlers(
        (
            grpc.method_handlers_generic_handler(
                "alloy.agent.v1.PlacementBrain", {"Attach": handler}
            ),
        )
    )
    if credentials is None:
        port = server.add_insecure_port(address)
    else:
        port = server.add_secure_port(address, credentials)
    server.start()
    return server, port


def main() -> None:
    """Serve `<address> <memory file> <epoch>` until killed, with traffic of our own."""
    address, memory, epoch = sys.argv[1:]
    brain = FileBrain(Path(memory), int(epoch))
    _server, port = serve(brain, address)
    print(port, flush=True)
    number = 0
    while True:
        time.sleep(0.002)
        if brain.streams:
            number += 1
            command = pb.BrainMessage(
                id=f"{epoch}-{number}", epoch=brain.epoch, reserve=pb.Reserve(lease=f"l{number}")
            )
            brain.stream.send(command)


if __name__ == "__main__":
    assert agent_pb2_grpc is not None
    main()
