"""Where a command's answers come from: the files it is given, and the node that it asks."""

from __future__ import annotations

import gc
import os
import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from alloy_agent.cli.output import note
from alloy_agent.errors import ConfigError

if TYPE_CHECKING:
    from alloy_agent.config import Settings
    from alloy_agent.daemon.api import NodeApi

GARBAGE_EVERY = 100_000  # more objects than one look at a large node makes


def read_text(path: str) -> str:
    """Return the text of a file argument; `/dev/stdin` works.

    Raises:
        ConfigError: It cannot be read, is no file or no UTF-8, or is too large to be what it should
            be.
    """
    from alloy_agent import decoding

    return decoding.read_text(path)


def write_file(path: str, body: str | bytes) -> None:
    """Write a report to `path`, replacing it whole.

    Raises:
        ConfigError: It cannot be written.
    """
    data = body.encode() if isinstance(body, str) else body
    target = Path(path)
    try:
        if target.exists() and not target.is_file():  # /dev/stdout, a pipe
            with target.open("wb") as stream:
                stream.write(data)
            return
        scratch = target.with_name(f".{target.name}.{os.getpid()}")
        scratch.write_bytes(data)
        scratch.replace(target)
    except OSError as exc:
        reason = (exc.strerror or str(exc)).lower()
        raise ConfigError(f"{path}: {reason}", cure="name a path that can be written") from exc


def require_writable(path: str) -> None:
    """Refuse a report's path that cannot be written, before the work for it begins.

    Raises:
        ConfigError: The folder is not there, or is closed to this user.
    """
    target = Path(path)
    if target.exists() and not target.is_file():  # /dev/stdout, a pipe; a folder is none
        folder = None if target.is_dir() else target
        reason = "is a directory"
    else:
        folder = target.parent
        reason = "no such file or directory" if not folder.is_dir() else ""
    if folder is None or not os.access(folder, os.W_OK):
        raise ConfigError(
            f"{path}: {reason or 'permission denied'}", cure="name a path that can be written"
        )


def require_root(action: str) -> None:
    """Refuse an action that only root can do.

    Raises:
        ConfigError: The effective user is not root.
    """
    if os.geteuid() != 0:
        raise ConfigError(
            f"{action} needs root, and this is user {os.geteuid()}",
            cure="run it with sudo, or as root",
        )


def settings_of(arguments: Namespace) -> Settings:
    """Return the settings: defaults, then the file, then the environment, then the options given.

    Raises:
        ConfigError: The file, a variable or an option is wrong.
    """
    from alloy_agent.config import find_config, read_settings

    given: dict[str, object] = {}
    if arguments.state_dir:
        given["state_dir"] = str(Path(arguments.state_dir).absolute())
    if arguments.fake:
        given["fake"] = tuple(arguments.fake)
    if arguments.log_level:
        given["log.level"] = arguments.log_level
    if arguments.log_format:
        given["log.format"] = arguments.log_format
    return read_settings(find_config(arguments.config, os.environ), os.environ, given)


def read_layout_text(path: str) -> str:
    """Return the text of a layout file that is one, before anything is started for it.

    Raises:
        ConfigError: It cannot be read, or is no layout file; with file and line.
    """
    from alloy_agent.layout import read_layout

    text = read_text(path)
    read_layout(text, path)
    return text


@contextmanager
def open_node(
    arguments: Namespace, *, write: bool = False, lenient: bool = False
) -> Iterator[NodeApi]:
    """Give the daemon of this host if one answers, else a node of our own for one command.

    `write` opens the state for writing, which one process at a time can; `lenient` goes on without
    recording where it cannot be written.
    """
    from alloy_agent.daemon.addresses import may_answer

    settings = settings_of(arguments)
    quiet_logs(arguments)
    note_variables()
    if may_answer(settings):
        from alloy_agent.daemon.remote import find_daemon

        daemon = find_daemon(settings, write=write and not lenient)
        if daemon is not None:
            with daemon:
                yield daemon
            return
    from alloy_agent.daemon.node import Node

    with seldom_collected(), Node(settings, write=write, lenient=lenient) as node:
        yield node
        for line in node.notes:
            note(line)


def note_variables() -> None:
    """Say which variables look like a setting and are none, each with the one that was meant."""
    from alloy_agent.config import unknown_variables

    for variable, close in unknown_variables(os.environ):
        note(f"{variable} is no setting and is ignored: did you mean {close}?")


@contextmanager
def seldom_collected() -> Iterator[None]:
    """Have cycles collected seldom: a command that looks once makes none and keeps all it made.

    On a node of 64 partitions the collector would take a tenth of the time of an audit.
    """
    before = gc.get_threshold()
    gc.set_threshold(GARBAGE_EVERY, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


def quiet_logs(arguments: Namespace) -> None:
    """Keep a command's rooms from logging, unless a level was asked for."""
    import logging

    if not arguments.log_level:
        logging.getLogger().addHandler(logging.NullHandler())
        return
    from alloy_agent.daemon import logs

    logs.configure(arguments.log_level, arguments.log_format or "auto")


def is_piped() -> bool:
    """Whether nobody is there to answer a question."""
    return not (sys.stdin.isatty() and sys.stderr.isatty())
