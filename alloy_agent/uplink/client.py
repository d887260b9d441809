"""The stream to the brain: dial, resume, say what is news, do what is asked, dial again.

Theory of operation. One thread (`uplink`) owns the connection: it opens a call, reads what the
brain says until the call ends, waits with full jitter, and begins again. gRPC pulls what is sent
out of `_outgoing`, so a brain that does not read stops us there and not in memory. Commands go
through bounded queues to a thread each for the node's books and for its hardware; when a queue is
full the reading stops, and with it the brain. A third thread looks for silence and for renewed
certificates.

Rules that stay true in here:

* One channel for life; one call at a time, cancelled in `finally`.
* Nothing is sent before Welcome but Hello. Events go in order behind what was acknowledged, with a
  bounded number on their way.
* A command runs once for each id; the same id again gets the same reply.
* Whatever the brain sends, the agent stays: what it cannot read or does not know is answered.
* Being without a brain is normal weather: one line when it begins, one when it ends.
"""

from __future__ import annotations

import collections
import importlib
import logging
import queue
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from alloy_agent.config import LOOPBACK, BrainSettings
from alloy_agent.errors import AlloyError, BrainUnavailableError, ConfigError
from alloy_agent.host.clock import boottime_s
from alloy_agent.model import Value
from alloy_agent.proto import agent_pb2 as pb
from alloy_agent.proto import keepalive
from alloy_agent.proto.failures import failure_reply, unknown_command_reply
from alloy_agent.uplink import codec, tunnel
from alloy_agent.uplink.mailbox import Mailbox
from alloy_agent.uplink.outbox import Outbox

if TYPE_CHECKING:
    import grpc
    import tenacity

LOG = logging.getLogger(__name__)

METHOD: Final = "/alloy.agent.v1.PlacementBrain/Attach"
MAX_WAITING: Final = 128  # commands of one lane
MAX_UNACKNOWLEDGED: Final = 512  # events on their way
MAX_REMEMBERED: Final = 1024  # replies kept for repeated commands
MAX_REMEMBERED_BYTES: Final = 64 * 1024  # of one reply
MAX_GARBAGE: Final = 100  # unreadable messages of one stream
SAY_AGAIN_S: Final = 300.0
UNACKNOWLEDGED_S: Final = 30.0
IDLE_S: Final = 5.0
DIALLING_LOOK_S: Final = 0.25
LOOK_S: Final = 1.0
GRPC_WAIT_S: Final = 5.0
BOOKS: Final = codec.LEASE_COMMANDS | {"drain", "undrain", "set_rate_policy"}
Emit = Callable[[pb.AgentMessage], None]


class UplinkState(Value, frozen=True, kw_only=True):
    """How the stream is doing, for status documents and metrics."""

    configured: bool
    connected: bool
    address: str = ""
    brain: str = ""
    brain_epoch: int = 0
    attempts: int = 0
    streams: int = 0
    since_s: float = 0.0
    heard_s: float = 0.0
    round_trip_s: float | None = None
    events_waiting: int = 0
    events_dropped: int = 0
    events_acknowledged: int = 0
    telemetry_dropped: int = 0
    commands: int = 0
    garbage: int = 0
    reason: str = ""


class _Session:
    """One call, from Hello to its end."""

    def __init__(self, now_s: float) -> None:
        self.began_s = now_s
        self.heard_s = now_s
        self.welcome: pb.Welcome | None = None
        self.welcomed = threading.Event()
        self.closed = threading.Event()
        self.held_up = False  # reading waits for a command lane
        self.sent_through = 0
        self.acknowledged = 0
        self.acknowledged_s = now_s
        self.garbage = 0
        self.reason = ""
        self.hint_s = 0.0
        self.call: Any = None

    def end(self, reason: str) -> None:
        """End the call from any thread."""
        if not self.closed.is_set():
            self.reason = self.reason or reason
            self.closed.set()
        if self.call is not None:
            self.call.cancel()


class Uplink:
    """The agent's end of the stream, from `start()` to `stop()`.

    Args:
        settings: Address, identity and pace.
        outbox: Events until acknowledged.
        hello: Makes a Hello with what this room does not know: node, boot, versions, capabilities,
            leases, the newest brain epoch and token.
        state: Makes the messages that tell all of the node (Inventory, PartitionState).
        run_command: Runs one command and emits its progress and its reply; returns a defect.
        on_defect: Told of an exception that no command may raise.
        on_welcome: Told of a brain's term before anything else is taken from it; raises
            `AlloyError` to refuse it.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - the rooms that meet here
        self,
        settings: BrainSettings,
        outbox: Outbox,
        hello: Callable[[], pb.Hello],
        state: Callable[[], Sequence[pb.AgentMessage]],
        run_command: Callable[[pb.BrainMessage, Emit], BaseException | None],
        on_defect: Callable[[BaseException], None] | None = None,
        on_welcome: Callable[[pb.Welcome], None] | None = None,
    ) -> None:
        check_settings(settings)
        self._settings = settings
        self._outbox = outbox
        self._hello = hello
        self._state = state
        self._run_command = run_command
        self._on_defect = on_defect
        self._on_welcome = on_welcome
        self._mailbox = Mailbox(boottime_s)
        self._stop = threading.Event()
        self._lanes: dict[str, queue.Queue[pb.BrainMessage | None]] = {
            "books": queue.Queue(MAX_WAITING),
            "hardware": queue.Queue(MAX_WAITING),
        }
        self._remembered: collections.OrderedDict[tuple[int, str], bytes] = (
            collections.OrderedDict()
        )
        self._memory = threading.Lock()
        self._session: _Session | None = None
        self._newest_term = 0
        self._failures = 0
        self._attempts = 0
        self._streams = 0
        self._commands = 0
        self._garbage = 0
        self._hint_s = 0.0
        self._round_trip_s: float | None = None
        self._reason = "not started"
        self._said: tuple[str, float] = ("", 0.0)
        self._threads: list[threading.Thread] = []
        self._secure = not _is_plain(settings)
        self._tunnel = tunnel.Tunnel(settings, self._unreached) if self._secure else None
        outbox.on_event(self._mailbox.wake)

    # --- for the daemon ---------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to dial."""
        if self._tunnel is not None:
            self._tunnel.start()
        for name, target in (
            ("uplink", self._dial),
            ("uplink-watch", self._watch),
            ("uplink-books", lambda: self._work("books")),
            ("uplink-hardware", lambda: self._work("hardware")),
        ):
            thread = threading.Thread(target=target, name=name, daemon=True)
            thread.start()
            self._threads.append(thread)

    def stop(self) -> None:
        """End the stream; a command that runs is given five seconds to end."""
        self._stop.set()
        session = self._session
        if session is not None:
            session.end("the agent stops")
        self._mailbox.close()
        for thread in self._threads[:2]:
            thread.join(5.0)
        for lane in self._lanes.values():  # nobody fills them any more
            _empty(lane)
            lane.put(None)
        for thread in self._threads[2:]:
            thread.join(5.0)
        if self._tunnel is not None:
            self._tunnel.stop()

    def offer(self, message: pb.AgentMessage, *, urgent: bool = False) -> None:
        """Say something of which only the newest counts: Fast, Slow, Inventory, PartitionState."""
        self._mailbox.offer(message, urgent=urgent)

    def state(self) -> UplinkState:
        """Return how the stream is doing."""
        session = self._session
        welcome = session.welcome if session is not None else None
        connected = session is not None and welcome is not None and not session.closed.is_set()
        return UplinkState(
            configured=True,
            connected=connected,
            address=self._settings.address or "",
            brain=welcome.brain if welcome is not None else "",
            brain_epoch=welcome.epoch if welcome is not None else 0,
            attempts=self._attempts,
            streams=self._streams,
            since_s=session.began_s if session is not None else 0.0,
            heard_s=session.heard_s if session is not None else 0.0,
            round_trip_s=self._round_trip_s,
            events_waiting=self._outbox.waiting,
            events_dropped=self._outbox.dropped,
            events_acknowledged=self._outbox.acknowledged,
            telemetry_dropped=self._mailbox.telemetry_dropped,
            commands=self._commands,
            garbage=self._garbage,
            reason="" if connected else self._reason,
        )

    # --- dialling ---------------------------------------------------------------------------------

    def _dial(self) -> None:
        """Keep a stream standing until told to stop."""
        import tenacity

        jitter = tenacity.wait_random_exponential(
            multiplier=self._settings.reconnect_min_s, max=self._settings.reconnect_max_s
        )
        channel = self._channel()
        try:
            attach = channel.stream_stream(
                METHOD,
                request_serializer=pb.AgentMessage.SerializeToString,
                response_deserializer=_tolerant,
            )
            retrying = tenacity.Retrying(
                retry=tenacity.retry_always,
                wait=lambda state: self._delay_s(state, jitter),
                sleep=self._pause,
                stop=tenacity.stop_when_event_set(self._stop),
                retry_error_callback=lambda _state: None,
            )
            retrying(self._attempt, attach)
        finally:
            channel.close()

    def _pause(self, delay_s: float) -> None:
        self._stop.wait(delay_s)

    def _channel(self) -> grpc.Channel:
        """Return the one channel; behind the tunnel where TLS is spoken."""
        import grpc

        settings = self._settings
        _wait_in_peace()
        options: list[tuple[str, int | str]] = list(keepalive.client_options())
        if self._tunnel is None:
            return grpc.insecure_channel(settings.address or "", options=options)
        host, _port = tunnel.split_address(settings.address or "")
        options.append(("grpc.default_authority", settings.server_name or host))
        options.append(("grpc.enable_http_proxy", 0))
        return grpc.insecure_channel(self._tunnel.target, options=options)

    def _delay_s(self, state: tenacity.RetryCallState, jitter: Any) -> float:
        """Return how long to wait: full jitter by failures in a row, behind the brain's hint."""
        state.attempt_number = max(1, self._failures)
        hint_s, self._hint_s = self._hint_s, 0.0
        delay_s = float(jitter(state))
        if hint_s:
            delay_s += hint_s + random.uniform(0.0, hint_s / 2)  # noqa: S311 - spreads load
        return delay_s

    def _attempt(self, attach: Callable[..., Any]) -> None:
        """Have one stream, from dialling to its end."""
        if self._stop.is_set():
            return
        import grpc

        self._attempts += 1
        session = self._session = _Session(boottime_s())
        failure: Exception | None = None
        try:
            self._converse(session, attach)
        except AlloyError as exc:
            session.reason = str(exc)
        except grpc.RpcError as exc:
            failure = exc
        except Exception as exc:
            LOG.exception("uplink_defect")
            failure = exc
            if self._on_defect is not None:
                self._on_defect(exc)
        finally:
            session.end("the brain closed the stream" if failure is None else "")
            self._mailbox.close()
            for lane in self._lanes.values():
                _empty(lane)  # the brain asks again for what was not begun
            self._ended(session, failure)

    def _converse(self, session: _Session, attach: Callable[..., Any]) -> None:
        """Read what the brain says until the stream ends."""
        session.call = attach(self._outgoing(session))
        if session.closed.is_set():
            return
        for message in session.call:
            session.heard_s = boottime_s()
            self._receive(session, message)
            if session.closed.is_set():
                return

    def _unreached(self, failure: BrainUnavailableError) -> None:
        """End the call that waits for a connection which failed: gRPC would dial on in silence."""
        session = self._session
        if session is not None:
            session.end(str(failure))

    def _ended(self, session: _Session, exc: Exception | None) -> None:
        """Note why a stream ended and what follows from it."""
        cause = session.reason
        if not cause:
            failure = self._tunnel.failure if self._tunnel is not None else None
            cause = _meaning(exc) if failure is None else str(failure)
        stood = session.welcome is not None
        self._failures = 1 if stood else self._failures + 1
        self._hint_s = max(session.hint_s, _hint_of(exc))
        self._reason = cause
        if self._stop.is_set():
            return
        said, when_s = self._said
        now_s = boottime_s()
        if stood or cause != said or now_s - when_s > SAY_AGAIN_S:
            self._said = (cause, now_s)
            LOG.warning(
                "brain_unavailable",
                extra={
                    "brain": self._settings.address,
                    "cause": cause,
                    "attempt": self._attempts,
                    "events_waiting": self._outbox.waiting,
                },
            )

    # --- sending ----------------------------------------------------------------------------------

    def _outgoing(self, session: _Session) -> Iterator[pb.AgentMessage]:
        """Yield what is to be sent; gRPC asks for more when it has sent the last."""
        yield self._stamped(pb.AgentMessage(hello=self._make_hello()))
        while not session.welcomed.wait(0.5):
            if session.closed.is_set():
                return
        welcome = session.welcome or pb.Welcome()
        intervals_s = {"fast": self._pace_s(welcome)}
        events = self._events(session)
        while not session.closed.is_set():
            message = self._mailbox.take(events, intervals_s)
            if message is None:
                self._mailbox.wait(IDLE_S)  # whoever ends the session wakes it
            else:
                yield self._stamped(message)

    def _pace_s(self, welcome: pb.Welcome) -> float:
        """Return the least time between two samples: the slower of both wishes."""
        return max(1 / self._settings.rate_hz, welcome.telemetry_interval_ms / 1e3)

    def _make_hello(self) -> pb.Hello:
        hello = self._hello()
        hello.schema_version = codec.SCHEMA_VERSION
        hello.epoch = self._outbox.epoch
        hello.last_acknowledged = self._outbox.acknowledged
        hello.last_sequence = self._outbox.last_sequence
        hello.attempt = self._attempts
        return hello

    def _stamped(self, message: pb.AgentMessage) -> pb.AgentMessage:
        message.sent_boottime_ms = round(boottime_s() * 1e3)
        if not message.sequence:
            message.epoch = self._outbox.epoch
        if message.HasField("fast"):
            message.fast.dropped = self._mailbox.telemetry_dropped
        return message

    def _events(self, session: _Session) -> Iterator[pb.AgentMessage | None]:
        """Yield events in order, None while there are none or too many are on their way."""
        while True:
            if session.sent_through - session.acknowledged >= MAX_UNACKNOWLEDGED:
                yield None
                continue
            page = self._outbox.pending(session.sent_through)
            if not page:
                yield None
            for message in page:
                session.sent_through = message.sequence
                yield message

    # --- receiving --------------------------------------------------------------------------------

    def _receive(self, session: _Session, message: pb.BrainMessage) -> None:
        """Take one message of the brain.

        Raises:
            BrainUnavailableError: The stream cannot go on.
        """
        kind = message.WhichOneof("body")
        if session.welcome is None:
            self._begin(session, message)
        elif kind == "ack":
            self._acknowledge(session, message.ack)
        elif kind == "retry_hint":
            _take_hint(session, message.retry_hint)
        elif kind == "echo":
            self._echo(message.echo)
        elif kind is None:
            self._unreadable(session, message)
        elif kind != "welcome":
            self._enqueue(session, kind, message)

    def _begin(self, session: _Session, message: pb.BrainMessage) -> None:
        """Take the brain's first message."""
        kind = message.WhichOneof("body")
        if kind == "retry_hint":
            _take_hint(session, message.retry_hint)
            return
        if kind != "welcome":
            raise BrainUnavailableError(
                f"brain {self._settings.address}: it began with {kind or 'garbage'}, not a welcome"
            )
        welcome = message.welcome
        newest = max(1, self._hello().brain_epoch, self._newest_term)
        if welcome.epoch < newest:
            raise BrainUnavailableError(
                f"brain {self._settings.address}: its term {welcome.epoch} is older than {newest}",
                cure="stop the older brain",
            )
        if self._on_welcome is not None:
            self._on_welcome(welcome)
        self._newest_term = welcome.epoch
        self._outbox.resume(welcome.resume_after)
        session.sent_through = session.acknowledged = self._outbox.acknowledged
        session.welcome = welcome
        self._streams += 1
        self._said = ("", 0.0)
        self._tell_all()
        self._mailbox.open()
        session.welcomed.set()
        LOG.info(
            "brain_connected",
            extra={
                "brain": welcome.brain or self._settings.address,
                "term": welcome.epoch,
                "resume_after": session.acknowledged,
                "events_waiting": self._outbox.waiting,
                "stream": self._streams,
            },
        )

    def _tell_all(self) -> None:
        """Put everything that a brain has to know into the slots."""
        for message in self._state():
            self._mailbox.offer(message, urgent=True)
        notice = self._outbox.notice(self._mailbox.telemetry_dropped)
        self._mailbox.offer(pb.AgentMessage(outbox_notice=notice))

    def _acknowledge(self, session: _Session, ack: pb.Ack) -> None:
        """Forget what the brain has, if it can have it."""
        if ack.epoch != self._outbox.epoch or ack.sequence > session.sent_through:
            self._garbage += 1
            LOG.warning(
                "acknowledgement_ignored",
                extra={"sequence": ack.sequence, "sent": session.sent_through},
            )
            return
        if ack.sequence > session.acknowledged:
            session.acknowledged = ack.sequence
            session.acknowledged_s = boottime_s()
            self._outbox.acknowledge(ack.sequence)
            self._mailbox.wake()

    def _echo(self, echo: pb.Echo) -> None:
        """Answer a question about the round trip, or take the answer to ours."""
        if echo.reply:
            sent_s = echo.token / 1e6
            self._round_trip_s = max(0.0, boottime_s() - sent_s)
        else:
            answer = pb.Echo(token=echo.token, reply=True)
            self._mailbox.offer(pb.AgentMessage(echo=answer))

    def _unreadable(self, session: _Session, message: pb.BrainMessage) -> None:
        """Answer what this version cannot read or does not know."""
        self._garbage += 1
        session.garbage += 1
        if session.garbage > MAX_GARBAGE:
            raise BrainUnavailableError(
                f"brain {self._settings.address}: it sends what this agent cannot read",
                cure="compare the versions of agent and brain",
            )
        reply = unknown_command_reply(message.id, "a message that this agent cannot read")
        self._mailbox.reply(pb.AgentMessage(reply=reply))

    def _enqueue(self, session: _Session, kind: str, message: pb.BrainMessage) -> None:
        """Put a command into its lane; wait, and so make the brain wait, while that is full."""
        refusal = self._refusal(session, message)
        if refusal is not None:
            self._mailbox.reply(pb.AgentMessage(reply=refusal))
            return
        if kind == "snapshot":
            self._tell_all()
            done = pb.Reply(command_id=message.id, status=pb.STATUS_OK)
            self._mailbox.reply(pb.AgentMessage(reply=done))
            return
        lane = self._lanes["books" if kind in BOOKS else "hardware"]
        session.held_up = True
        while not session.closed.is_set():
            try:
                lane.put(message, timeout=0.5)
                break
            except queue.Full:
                continue
        session.held_up = False

    def _refusal(self, session: _Session, message: pb.BrainMessage) -> pb.Reply | None:
        """Return the refusal of a command that cannot be this brain's."""
        term = session.welcome.epoch if session.welcome is not None else 0
        failure: AlloyError | None = None
        if not message.id:
            failure = ConfigError("a command without an id", cure="give every command its own")
        elif message.epoch != term:
            failure = ConfigError(
                f"command {message.id[:64]}: term {message.epoch} on a stream of term {term}",
                cure="send commands under the term of Welcome",
            )
        if failure is None:
            return None
        reply = failure_reply(message.id, failure)
        if message.id:
            reply.refusal = pb.REFUSAL_STALE_EPOCH
        return reply

    # --- commands ---------------------------------------------------------------------------------

    def _work(self, name: str) -> None:
        """Do the commands of one lane, one after the other."""
        lane = self._lanes[name]
        while not self._stop.is_set():
            message = lane.get()
            if message is None:
                return
            self._do(message)

    def _do(self, message: pb.BrainMessage) -> None:
        """Run a command, or repeat the reply that it had."""
        key = (message.epoch, message.id)
        with self._memory:
            known = self._remembered.get(key)
        if known is not None:
            self._mailbox.reply(pb.AgentMessage.FromString(known))
            return

        def emit(said: pb.AgentMessage) -> None:
            if said.HasField("reply"):
                self._remember(key, said)
            self._mailbox.reply(said)

        self._commands += 1
        defect = self._run_command(message, emit)
        if defect is not None and self._on_defect is not None:
            self._on_defect(defect)

    def _remember(self, key: tuple[int, str], reply: pb.AgentMessage) -> None:
        data = reply.SerializeToString()
        if len(data) > MAX_REMEMBERED_BYTES:
            return  # a document: asked again, it is made again
        with self._memory:
            self._remembered[key] = data
            while len(self._remembered) > MAX_REMEMBERED:
                self._remembered.popitem(last=False)

    # --- watching ---------------------------------------------------------------------------------

    def _watch(self) -> None:
        """End streams that are silent or whose certificate was renewed; keep a pulse."""
        looked = tunnel.stamps(self._settings) if self._secure else ()
        pulse_s = 0.0
        pause_s = DIALLING_LOOK_S
        while not self._stop.wait(pause_s):
            pause_s = DIALLING_LOOK_S
            session = self._session
            if session is None or session.closed.is_set():
                looked = tunnel.stamps(self._settings) if self._secure else ()
                continue
            now_s = boottime_s()
            beat_s, silence_s = _beats(session)
            if session.welcomed.is_set():  # from now on the pace is known
                pause_s = min(LOOK_S, max(DIALLING_LOOK_S, beat_s / 4))
            if now_s - session.heard_s > silence_s and not session.held_up:
                session.end(f"brain {self._settings.address}: silent for {silence_s:.0f} s")
            elif session.welcomed.is_set() and now_s - pulse_s >= beat_s:
                pulse_s = now_s
                self._mailbox.offer(pb.AgentMessage(echo=pb.Echo(token=round(now_s * 1e6))))
            self._look_at_acknowledgements(session, now_s)
            if self._secure:
                looked = self._renewed(session, looked)

    def _look_at_acknowledgements(self, session: _Session, now_s: float) -> None:
        """Say so when the brain takes events and does not acknowledge them."""
        waits = session.sent_through > session.acknowledged
        if not waits:
            session.acknowledged_s = now_s
        elif now_s - session.acknowledged_s > UNACKNOWLEDGED_S:
            session.acknowledged_s = now_s
            LOG.warning(
                "brain_does_not_acknowledge",
                extra={"sent": session.sent_through, "acknowledged": session.acknowledged},
            )

    def _renewed(
        self, session: _Session, looked: tuple[tunnel.Stamp | None, ...]
    ) -> tuple[tunnel.Stamp | None, ...]:
        """Begin a new stream when a whole new identity is on disk; return what was looked at."""
        seen = tunnel.stamps(self._settings)
        if seen == looked or None in seen:
            return looked
        try:
            tunnel.context(self._settings)
        except BrainUnavailableError:
            return looked  # half way through the renewal
        LOG.info("identity_renewed", extra={"certificate": self._settings.certificate_file})
        if session.welcomed.is_set():
            session.end("the certificate was renewed")
        if self._tunnel is not None:
            self._tunnel.reset()
        return seen


def _wait_in_peace() -> None:
    """Spare a thread that waits for the brain ten looks a second.

    gRPC has every waiting thread wake that often so that the main thread can handle signals; here
    the main thread never waits in gRPC. Source: grpc 1.85, `_common.wait`.
    """
    common: Any = importlib.import_module("grpc._common")
    if hasattr(common, "MAXIMUM_WAIT_TIMEOUT"):
        common.MAXIMUM_WAIT_TIMEOUT = GRPC_WAIT_S


def check_settings(settings: BrainSettings) -> None:
    """Refuse to speak in plain text where nobody said so.

    Raises:
        ConfigError: There is no address, or it needs mutual TLS that is not configured.
    """
    if settings.address is None:
        raise ConfigError("brain.address: there is none", cure="set it or leave the uplink out")
    files = (settings.ca_file, settings.certificate_file, settings.key_file)
    if not _is_plain(settings) and None in files:
        raise ConfigError(
            f"brain.address {settings.address}: it is not on loopback and mutual TLS is incomplete",
            cure="set brain.ca_file, certificate_file and key_file, or brain.insecure: true",
        )


def _is_plain(settings: BrainSettings) -> bool:
    """Whether the stream is in plain text: by explicit wish, or on loopback without an identity."""
    if settings.insecure:
        return True
    files = (settings.ca_file, settings.certificate_file, settings.key_file)
    return bool(LOOPBACK.match(settings.address or "")) and files == (None, None, None)


def _tolerant(data: bytes) -> pb.BrainMessage:
    """Return a message, or an empty one for bytes that are none."""
    from google.protobuf.message import DecodeError

    try:
        return pb.BrainMessage.FromString(data)
    except DecodeError:
        return pb.BrainMessage()


def _beats(session: _Session) -> tuple[float, float]:
    """Return how often to speak, and after how much silence the brain is gone, in seconds."""
    welcome = session.welcome
    if welcome is None or not welcome.heartbeat_ms:
        return keepalive.HEARTBEAT_S, keepalive.SILENCE_S
    beat_s = min(60.0, max(0.2, welcome.heartbeat_ms / 1e3))
    return beat_s, 3 * beat_s


def _take_hint(session: _Session, hint: pb.RetryHint) -> None:
    """Note when to come back, at most in an hour; end the stream when asked to."""
    session.hint_s = min(3600.0, hint.after_ms / 1e3)
    if hint.reconnect:
        session.end(f"the brain asked to come back later: {hint.reason}")


def _hint_of(exc: Exception | None) -> float:
    """Return the wait in seconds that a refused call asks for in its metadata; 0: none."""
    metadata = getattr(exc, "trailing_metadata", lambda: ())() or ()
    for key, value in metadata:
        if key == keepalive.RETRY_AFTER_KEY and str(value).isdigit():
            return min(3600.0, int(value) / 1e3)
    return 0.0


def _meaning(exc: Exception | None) -> str:
    """Return what the end of a call means to a person."""
    if exc is None:
        return "the brain closed the stream"
    code = getattr(exc, "code", lambda: None)()
    if code is None:
        return f"the stream broke: {type(exc).__name__}"
    detail = " ".join(str(getattr(exc, "details", lambda: "")() or "").split())
    return f"{code.name.lower().replace('_', ' ')}: {detail}"


def _empty(lane: queue.Queue[pb.BrainMessage | None]) -> None:
    while True:
        try:
            lane.get_nowait()
        except queue.Empty:
            return
