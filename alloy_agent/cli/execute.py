"""`alloy-agent exec`: becomes a tenant's command inside of a partition.

The process joins the partition's control groups itself and then turns into the command, so that
there is no parent of ours that could outlive it, signals reach it directly, and its exit code is
the exit code.
"""

from __future__ import annotations

import os
import signal
import sys
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from alloy_agent.errors import BackendError, ConfigError

if TYPE_CHECKING:
    from alloy_agent.model import Access

CANNOT_START = 125  # the agent's own failure; 126 and 127 are the command's, as env(1) has them
NOT_EXECUTABLE = 126
NOT_FOUND = 127


def add(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "exec",
        help="start a command inside of a partition",
        usage="alloy-agent exec [-h] [--tenant NAME] PARTITION -- COMMAND [ARGUMENT ...]",
    )
    parser.add_argument(
        "partition",
        metavar="PARTITION",
        help="id or UUID, or a beginning that names one; #GENERATION may follow",
    )
    parser.add_argument("--tenant", metavar="NAME", help="whose the process is")
    parser.set_defaults(run=run)


def run(arguments: Namespace) -> int:
    """Bind the tenant, join the partition and turn into the command."""
    from alloy_agent.cli.output import note
    from alloy_agent.cli.sources import open_node, require_root

    argv = arguments.tail
    if not argv:
        raise ConfigError("exec: no command given", cure="write it behind '--'")
    require_root("exec")
    with open_node(arguments, write=True) as node:
        document = node.access(arguments.partition, arguments.tenant, os.getpid())
    join(document.access)
    for line in document.notes:
        note(line)
    if document.fence:
        prove_fenced(document.fence)
    environment = tenant_environment(document.access, os.environ)
    sys.stdout.flush()
    sys.stderr.flush()
    return become(argv, environment)


def join(access: Access) -> None:
    """Move this process into every control group of a partition.

    Raises:
        BackendError: The kernel refuses one of them.
    """
    for path in access.cgroup_procs:
        try:
            Path(path).write_text("0\n", encoding="ascii")  # 0 is the writer itself
        except OSError as exc:
            raise BackendError(
                f"exec: joining {path}: {exc.strerror or exc}",
                cure="run 'alloy-agent devices' to see whether the partition still exists",
            ) from exc


def prove_fenced(fence: str) -> None:
    """Judge the device fence from inside, before the command starts.

    Raises:
        BackendError: This process is not behind it.
    """
    from alloy_agent.host.cgroupfs import detect
    from alloy_agent.host.devicefence import verify_inside
    from alloy_agent.host.processes import read_process

    this = read_process(os.getpid())
    problem = verify_inside(detect(), fence, this.cgroups if this else {})
    if problem:
        raise BackendError(
            f"exec: the device fence is not in force: {problem}",
            cure="look who else moves processes or writes to this devices cgroup",
        )


def tenant_environment(access: Access, environ: Any) -> dict[str, str]:
    """Return the caller's environment with what the partition sets and removes."""
    kept = {key: value for key, value in environ.items() if key not in access.unset}
    return {**kept, **access.environment}


def become(argv: list[str], environment: dict[str, str]) -> int:
    """Turn into the command; return only if that fails."""
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # ignored by Python, and that is inherited
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvpe(argv[0], argv, environment)  # noqa: S606 - no shell on purpose
    except FileNotFoundError:
        print(f"alloy-agent: exec: {argv[0]}: not found: give a path or fix PATH", file=sys.stderr)
        return NOT_FOUND
    except OSError as exc:
        reason = (exc.strerror or str(exc)).lower()
        print(f"alloy-agent: exec: {argv[0]}: {reason}: name a program", file=sys.stderr)
        return NOT_EXECUTABLE
