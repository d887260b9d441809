"""`alloy-agent slurm`: what Slurm's hooks call, so that a job is the tenant of partitions.

    Prolog=      alloy-agent slurm prolog       (root, before the job)   binds, and writes a note
    TaskProlog=  alloy-agent slurm task-prolog  (the user, each task)    prints the note for slurmd
    Epilog=      alloy-agent slurm epilog       (root, after the job)    releases

The tenant is `slurm/JOB`. Which partitions: those on the GPUs that Slurm gave to the job
(`SLURM_JOB_GPUS`, by index among GPUs: every vendor counts from 0, CPU nodes too), one on each;
else one free partition of `--profile`. Where neither is said, the hook does nothing. A prolog that
fails makes Slurm drain the node and requeue the job, as it must when isolation cannot be had.

Source: Slurm 22.05, "Prolog and Epilog Guide": variables, user and standard output of each hook.
"""

from __future__ import annotations

import hashlib
import os
import re
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from alloy_agent.cli import output
from alloy_agent.errors import AlloyError, ConfigError

if TYPE_CHECKING:
    from alloy_agent.daemon.documents import AccessDocument, DevicesDocument

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# whose devices `SLURM_JOB_GPUS` counts. Source: Slurm 22.05, gres.conf(5): AutoDetect=nvml, rsmi
GPU_VENDORS = ("amd", "nvidia")


def add(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser("slurm", help="hooks of Slurm: a job is a partition's tenant")
    hooks = parser.add_subparsers(dest="hook", required=True, metavar="HOOK")
    prolog = hooks.add_parser("prolog", help="bind the job (Prolog, root)")
    prolog.add_argument("--profile", metavar="NAME", help="one free partition of this profile")
    prolog.set_defaults(run=run_prolog)
    task = hooks.add_parser("task-prolog", help="print the job's variables (TaskProlog, the user)")
    task.set_defaults(run=run_task_prolog)
    epilog = hooks.add_parser("epilog", help="release the job (Epilog, root)")
    epilog.set_defaults(run=run_epilog)


def job_of(environ: Mapping[str, str]) -> str:
    """Return the number of the job.

    Raises:
        ConfigError: Slurm did not call this.
    """
    job = environ.get("SLURM_JOB_ID", "")
    if not re.fullmatch(r"[0-9]{1,19}", job):
        raise ConfigError(
            f"slurm: SLURM_JOB_ID is {job!r}", cure="name this command in slurm.conf, as a hook"
        )
    return job


def wanted(devices: DevicesDocument, gpus: str, profile: str | None) -> tuple[tuple[str, ...], ...]:
    """Return the partitions to try for each piece that a job needs, best first.

    Args:
        devices: The node.
        gpus: Indices of devices, as Slurm lists them; empty: none.
        profile: Of one partition, where no devices are listed.

    Raises:
        ConfigError: A listed device is no GPU here, is one of two, or has no free partition; or
            there is none of the profile.
    """
    free = [(d, p) for d, p in _pieces(devices) if p.get("tenant") is None]
    if gpus:
        words = dict.fromkeys(word.strip() for word in gpus.split(","))
        return tuple(_on_gpu(devices, free, word) for word in words)
    if profile is None:
        return ()
    fitting = tuple(str(p["id"]) for _, p in free if p["profile"] == profile)
    if not fitting:
        raise ConfigError(
            f"slurm: no free partition of profile {profile}",
            cure="apply a layout with more of them, or let Slurm count them as a resource (Gres)",
        )
    return (fitting,)


def _on_gpu(
    devices: DevicesDocument, free: Sequence[tuple[dict[str, Any], dict[str, Any]]], word: str
) -> tuple[str, ...]:
    """Return the free partitions of the GPU with an index, and of no other kind of device."""
    every = cast("tuple[dict[str, Any], ...]", devices.devices)
    gpus = [d for d in every if d["vendor"] in GPU_VENDORS and str(d["index"]) == word]
    if len({d["vendor"] for d in gpus}) > 1:
        raise ConfigError(
            f"slurm: GPU {word} is {' or '.join(str(d['id']) for d in gpus)}",
            cure="say --profile in the prolog: Slurm's numbers do not tell two vendors apart",
        )
    here = tuple(str(p["id"]) for d, p in free if any(d is gpu for gpu in gpus))
    if not here:
        raise ConfigError(
            f"slurm: device {word} has no free partition" if gpus else f"slurm: no GPU {word} here",
            cure="apply a layout for it" if gpus else "see alloy-agent devices and gres.conf",
        )
    return here


def _pieces(devices: DevicesDocument) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    for device in cast("tuple[dict[str, Any], ...]", devices.devices):
        for piece in device["partitions"]:
            yield device, piece


def run_prolog(arguments: Namespace) -> int:
    """Bind the job to its partitions, all or none, and leave a note for its tasks."""
    from alloy_agent.cli.sources import open_node, require_root

    require_root("slurm prolog")
    job = job_of(os.environ)
    note = note_of(arguments, job)
    with open_node(arguments, write=True) as node:
        pieces = wanted(node.devices(), os.environ.get("SLURM_JOB_GPUS", ""), arguments.profile)
        bound: list[AccessDocument] = []
        try:
            for piece in pieces:
                bound.append(_bind(node, piece, f"slurm/{job}", bound))
            if bound:
                _write(note, bound)
        except (AlloyError, OSError):
            for one in bound:
                node.release(one.partition, str(one.tenant))
            raise
    return 0


def _bind(
    node: Any, candidates: Sequence[str], tenant: str, taken: Sequence[AccessDocument]
) -> AccessDocument:
    """Bind the first candidate that nobody has taken meanwhile."""
    refused: AlloyError | None = None
    mine = {str(one.partition) for one in taken}
    for candidate in candidates:
        if candidate in mine:
            continue
        try:
            document: AccessDocument = node.access(candidate, tenant, None)
        except AlloyError as exc:
            refused = exc
        else:
            return document
    raise refused or ConfigError("slurm: no partition is left", cure="apply a larger layout")


def run_task_prolog(arguments: Namespace) -> int:
    """Print the job's variables as slurmd reads them; a job without partitions has none."""
    try:
        text = note_of(arguments, job_of(os.environ)).read_text(encoding="utf-8")
    except FileNotFoundError:
        return 0
    output.write(text.rstrip("\n"))
    return 0


def run_epilog(arguments: Namespace) -> int:
    """Release what the job has, and remove its note."""
    from alloy_agent.cli.sources import open_node, require_root

    require_root("slurm epilog")
    job = job_of(os.environ)
    with open_node(arguments, write=True) as node:
        for _, piece in _pieces(node.devices()):
            if piece.get("tenant") == f"slurm/{job}":
                node.release(str(piece["id"]), f"slurm/{job}")
    note_of(arguments, job).unlink(missing_ok=True)
    return 0


def note_of(arguments: Namespace, job: str) -> Path:
    """Return where a job's variables are noted, for the user of the job to read.

    The state directory is closed to users, so a note lies in the run directory; an agent with a
    state of its own has a folder of its own there.
    """
    from alloy_agent.cli.sources import settings_of

    settings = settings_of(arguments)
    state, default = (os.path.abspath(one.state_dir) for one in (settings, type(settings)()))  # noqa: PTH100 - links are not followed: a user might not be able to
    own = "" if state == default else f"-{hashlib.sha256(os.fsencode(state)).hexdigest()[:12]}"
    return Path(settings.socket_path).parent / f"slurm{own}" / job


def _write(note: Path, bound: Sequence[AccessDocument]) -> None:
    """Write the variables of all pieces, for everyone to read: there are no secrets in it."""
    note.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    note.parent.chmod(0o755)
    part = note.with_suffix(".new")
    part.write_text("".join(f"{line}\n" for line in lines_of(bound)), encoding="utf-8")
    part.chmod(0o644)
    part.replace(note)


def lines_of(bound: Sequence[AccessDocument]) -> tuple[str, ...]:
    """Return the lines that slurmd takes from a task prolog: `export NAME=VALUE`, `unset NAME`."""
    values: dict[str, list[str]] = {"ALLOY_PARTITIONS": [str(one.partition) for one in bound]}
    unset: dict[str, None] = {}
    for one in bound:
        unset.update(dict.fromkeys(one.access.unset))
        for key, value in one.access.environment.items():
            values.setdefault(key, []).append(value)
    lines = [f"unset {key}" for key in unset if key not in values and NAME.fullmatch(key)]
    for key, several in values.items():
        text = ",".join(dict.fromkeys(several))
        if NAME.fullmatch(key) and "\n" not in text:
            lines.append(f"export {key}={text}")
    return tuple(lines)
