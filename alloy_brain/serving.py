"""`alloy-brain serve`: one brain as a service, until SIGTERM or SIGINT."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import signal
import sys
import time
from pathlib import Path
from typing import Any

from alloy_brain.facts import Policy
from alloy_brain.identity import Identity, IdentityError, check
from alloy_brain.ledger import POSTGRES
from alloy_brain.server import BrainServer, BrainSettings, boot_id

STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonLines(logging.Formatter):
    """Renders a record as one line of JSON: event, fields, time."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        fields = {k: v for k, v in vars(record).items() if k not in STANDARD}
        line = {"event": record.getMessage(), **fields, "level": record.levelname.lower()}
        if record.exc_info:
            line["trace"] = self.formatException(record.exc_info)
        line["time"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(record.created))
        return json.dumps(line, default=str)


def settings_of(arguments: argparse.Namespace) -> BrainSettings:
    """Return the settings of a command line.

    Raises:
        IdentityError: An option makes no sense.
    """
    prices: dict[str, float] = {}
    for text in arguments.price:
        model, _, price = text.partition("=")
        try:
            prices[model] = float(price)
        except ValueError:
            raise IdentityError(f"--price {text}: give MODEL=NUMBER, like H100*=4.0") from None
    ledger = arguments.ledger
    if not ledger.startswith(POSTGRES):
        ledger = str(Path(ledger).absolute())
    return BrainSettings(
        address=arguments.listen,
        ledger=ledger,
        name=arguments.name,
        least_term=max(1, arguments.term),
        identity=Identity(
            ca_file=arguments.tls_ca,
            certificate_file=arguments.tls_certificate,
            key_file=arguments.tls_key,
            spiffe_nodes=arguments.spiffe_nodes,
            spiffe_clients=arguments.spiffe_clients,
            insecure=arguments.insecure,
        ),
        policy=Policy(prices_per_h=prices),
    )


def serve(arguments: argparse.Namespace) -> int:
    """Serve until told to stop; return the exit code."""
    settings = settings_of(arguments)
    check(settings.address, settings.identity)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    logging.basicConfig(level=arguments.log_level.upper(), handlers=[handler], force=True)
    with asyncio.Runner(loop_factory=_loop()) as runner:
        runner.run(_serve(settings))
    return 0


def _loop() -> Any:
    """Return what makes an event loop: uvloop's, which costs a third less, where it is there."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


async def _serve(settings: BrainSettings) -> None:
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    server = BrainServer(settings, boot_id())
    try:
        await server.start()
        await stopped.wait()
        logging.getLogger(__name__).info("stopping")
    finally:
        await server.stop()
