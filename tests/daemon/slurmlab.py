"""A Slurm cluster of one node on this host: munged, slurmctld and slurmd in a folder."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.daemon.harness import wait_for

NODE = "alloy1"
PROGRAMS = ("munged", "slurmctld", "slurmd", "scontrol")
CONFIGURATION = """ClusterName=alloytest
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
CryptoType=crypto/munge
SlurmctldPort={control}
SlurmdPort={port}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
ReturnToService=2
MpiDefault=none
NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 CPUs=1 State=UNKNOWN
PartitionName=p Nodes={node} Default=YES MaxTime=INFINITE State=UP
"""


def lacking() -> str:
    """Return why no cluster can be made here, or nothing."""
    missing = [name for name in PROGRAMS if program(name) is None]
    if missing:
        return f"no {', '.join(missing)} here: apt-get install slurmctld slurmd slurm-client munge"
    return "" if os.geteuid() == 0 else "slurmctld needs root"


def program(name: str) -> str | None:
    """Return the path of a program, also where only root looks."""
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@contextlib.contextmanager
def cluster(folder: Path, more: str = "") -> Iterator[Path]:
    """Give the configuration file of a cluster whose node is idle; end it afterwards.

    Args:
        folder: Where everything is.
        more: Lines for the configuration.
    """
    for name in ("state", "spool"):
        (folder / name).mkdir()
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    conf = folder / "slurm.conf"
    host = socket.gethostname().split(".")[0]
    conf.write_text(
        CONFIGURATION.format(
            folder=folder, host=host, node=NODE, control=_free_port(), port=_free_port()
        )
        + more
    )
    environment = {**os.environ, "SLURM_CONF": str(conf)}
    with contextlib.ExitStack() as stack:

        def start(name: str, *arguments: str) -> None:
            # By another name: whoever audits this host at the same time must not meet its manager.
            path = folder / f"lab-{name}"
            path.symlink_to(str(program(name)))
            log = stack.enter_context((folder / f"{name}.out").open("wb"))
            process = subprocess.Popen(
                [str(path), *arguments],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
            stack.callback(process.wait, 30)
            stack.callback(process.kill)

        start(
            "munged", "-f", "-F", f"--socket={folder}/munge.sock", f"--key-file={key}",
            f"--log-file={folder}/munge.log", f"--pid-file={folder}/munge.pid",
            f"--seed-file={folder}/munge.seed", "--num-threads=1",
        )  # fmt: skip
        wait_for("munge", (folder / "munge.sock").exists)
        start("slurmctld", "-D", "-c")
        start("slurmd", "-D", "-N", NODE)
        scontrol = str(program("scontrol"))

        def idle() -> bool:
            done = subprocess.run(
                [scontrol, "show", "node", NODE],
                env=environment,
                capture_output=True,
                text=True,
                timeout=30,
                check=False,
            )
            return "State=IDLE " in done.stdout

        wait_for("an idle node in Slurm", idle, 120)
        yield conf
