"""Slurm's hooks: a job is the tenant of its partitions, from its first task to its end."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from alloy_agent.cli import slurm
from alloy_agent.daemon.documents import AccessDocument, DevicesDocument
from alloy_agent.errors import ConfigError
from alloy_agent.model import Access, PartitionId, TenantId
from tests.daemon import slurmlab
from tests.daemon.harness import wait_for

LAYOUT = {
    "version": "v1",
    "layouts": {"two": [{"match": {"index": 0}, "mig": ["3g.40gb", "3g.40gb"]}]},
}


class Node:
    """A state directory with one simulated device cut in two."""

    def __init__(self, root: Path) -> None:
        self.root = root
        config = {
            "node_name": "alloy1",
            "state_dir": str(root / "agent"),
            "socket_path": str(root / "run" / "agent.sock"),
            "fake": ["1xH100-SXM5-80GB"],
            "backends": dict.fromkeys(("nvidia", "amd", "neuron", "cpu"), "off"),
        }
        (root / "run").mkdir()
        (root / "agent.yaml").write_text(json.dumps(config))
        (root / "layout.yaml").write_text(json.dumps(LAYOUT))
        self.run("apply", str(root / "layout.yaml"), "--layout", "two", "--yes")

    @property
    def argv(self) -> list[str]:
        """Return the command that each call begins with."""
        return [sys.executable, "-m", "alloy_agent", "--config", str(self.root / "agent.yaml")]

    def run(self, *words: str, ok: bool = True, **environ: str) -> subprocess.CompletedProcess[str]:
        """Do a command with variables of a job."""
        done = subprocess.run(
            [*self.argv, *words],
            env={**os.environ, **environ},
            capture_output=True,
            text=True,
            check=False,
        )
        assert not ok or done.returncode == 0, done.stderr
        return done

    def tenants(self) -> list[str]:
        """Return who has the partitions."""
        document = json.loads(self.run("devices", "--json").stdout)
        return sorted(p["tenant"] or "" for d in document["devices"] for p in d["partitions"])


@pytest.fixture
def node() -> Iterator[Node]:
    with tempfile.TemporaryDirectory(prefix="alloy-s-") as folder:
        yield Node(Path(folder))


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="the hooks of Slurm run as root")


@needs_root
def test_a_job_has_its_partition_until_it_ends(node: Node) -> None:
    """Bound by the prolog, told to each task, released by the epilog; twice is as good as once."""
    job: Any = {"SLURM_JOB_ID": "71"}
    node.run("slurm", "prolog", "--profile", "3g.40gb", **job)
    assert node.tenants() == ["", "slurm/71"]
    told = node.run("slurm", "task-prolog", **job).stdout.splitlines()
    assert any(line.startswith("export NVIDIA_VISIBLE_DEVICES=MIG-") for line in told)
    assert any(line.startswith("export ALLOY_PARTITIONS=") for line in told)
    (note,) = (node.root / "run").glob("slurm*/71")
    assert stat.S_IMODE(note.stat().st_mode) == 0o644
    document = json.loads(node.run("devices", "--json").stdout)
    users = [o for d in document["devices"] for p in d["partitions"] for o in p["occupants"]]
    assert [(one["kind"], one["job"]) for one in users] == [("slurm", "71")]
    for _ in range(2):
        node.run("slurm", "epilog", **job)
        assert node.tenants() == ["", ""]
    assert not note.exists()
    assert node.run("slurm", "task-prolog", **job).stdout == ""


@needs_root
def test_jobs_never_share_a_partition(node: Node) -> None:
    """Each job gets another one; a job too many is refused in one line, and has nothing."""
    for job in ("1", "2"):
        node.run("slurm", "prolog", "--profile", "3g.40gb", SLURM_JOB_ID=job)
    done = node.run("slurm", "prolog", "--profile", "3g.40gb", ok=False, SLURM_JOB_ID="3")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "no free partition of profile 3g.40gb" in done.stderr
    assert node.tenants() == ["slurm/1", "slurm/2"]


@needs_root
def test_devices_that_slurm_gave_decide(node: Node) -> None:
    """One partition on each listed device, all or none."""
    done = node.run("slurm", "prolog", ok=False, SLURM_JOB_ID="5", SLURM_JOB_GPUS="0,1")
    assert (done.returncode, "no GPU 1 here" in done.stderr) == (2, True)
    assert node.tenants() == ["", ""]
    node.run("slurm", "prolog", SLURM_JOB_ID="5", SLURM_JOB_GPUS="0")
    assert node.tenants() == ["", "slurm/5"]
    node.run("slurm", "prolog", SLURM_JOB_ID="6")
    assert node.tenants() == ["", "slurm/5"], "a job that asked for nothing has nothing"


def devices_of(*devices: tuple[str, int]) -> DevicesDocument:
    """Return a node whose devices, by vendor and index, have one free partition each."""
    return DevicesDocument(
        node="n",
        boot_id="b",
        sequence=1,
        age_s=0.0,
        taken_wall_s=0.0,
        devices=tuple(
            {
                "id": f"{vendor}-{index}",
                "vendor": vendor,
                "index": index,
                "partitions": [{"id": f"{vendor}-{index}/a", "tenant": None, "profile": "a"}],
            }
            for vendor, index in devices
        ),
    )


@pytest.mark.parametrize("vendor", ["nvidia", "amd"])
def test_an_index_is_of_a_gpu(vendor: str) -> None:
    """Every vendor counts from 0: CPU nodes and accelerators that are no GPUs are never meant."""
    node = devices_of(("cpu", 0), ("cpu", 1), ("neuron", 0), (vendor, 0))
    assert slurm.wanted(node, "0", None) == ((f"{vendor}-0/a",),)
    with pytest.raises(ConfigError, match="no GPU 1 here"):
        slurm.wanted(node, "0,1", None)


def test_a_device_listed_twice_is_one() -> None:
    """A number that comes again asks for nothing more."""
    node = devices_of(("cpu", 0), ("nvidia", 0), ("nvidia", 1))
    assert slurm.wanted(node, "0,0, 0,1", None) == (("nvidia-0/a",), ("nvidia-1/a",))


def test_an_index_of_two_vendors_is_refused() -> None:
    """Which one is meant cannot be known, so neither is bound, with both named and a cure."""
    node = devices_of(("nvidia", 0), ("amd", 0), ("amd", 1))
    with pytest.raises(ConfigError, match=r"GPU 0 is nvidia-0 or amd-0: .*--profile"):
        slurm.wanted(node, "0", None)
    assert slurm.wanted(node, "1", None) == (("amd-1/a",),)


def test_agents_with_states_of_their_own_have_notes_of_their_own(tmp_path: Path) -> None:
    """The same job has another note for each state directory, outside of what users cannot enter.

    The same directory said otherwise is the same agent.
    """
    config = tmp_path / "agent.yaml"
    config.write_text(json.dumps({"socket_path": str(tmp_path / "run/agent.sock")}))

    def note(state: str | None) -> Path:
        given = {"state_dir": state, "fake": (), "log_level": None, "log_format": None}
        return slurm.note_of(Namespace(config=str(config), **given), "7")

    plain, one, two = note(None), note(str(tmp_path / "one")), note(str(tmp_path / "two"))
    assert plain == tmp_path / "run/slurm/7"
    assert len({plain, one, two}) == 3
    assert {path.name for path in (one, two)} == {"7"}
    assert not any(
        path.is_relative_to(tmp_path / name) for path in (one, two) for name in ("one", "two")
    )
    assert note(f"{tmp_path}/two/../one/") == one


@pytest.mark.parametrize("job", ["", "7x", "../7", "-1", "9" * 30])
def test_a_job_that_is_none_is_refused(job: str) -> None:
    """The number becomes a file name and a tenant, so it has to be one."""
    with pytest.raises(ConfigError, match="SLURM_JOB_ID"):
        slurm.job_of({"SLURM_JOB_ID": job})


def test_lines_for_slurmd_are_lines() -> None:
    """Several pieces are named together; a name or value that would be another line is left out."""

    def document(name: str, **environment: str) -> AccessDocument:
        return AccessDocument(
            node="n",
            partition=PartitionId(name),
            generation=1,
            tenant=TenantId("slurm/1"),
            access=Access(environment=environment, unset=("CUDA_VISIBLE_DEVICES",)),
        )

    odd: dict[str, Any] = {"A B": "1", "C": "x\nunset PATH"}
    lines = slurm.lines_of([document("a", V="1", **odd), document("b", V="2")])
    assert set(lines) == {
        "unset CUDA_VISIBLE_DEVICES",
        "export ALLOY_PARTITIONS=a,b",
        "export V=1,2",
    }


@pytest.mark.host
@pytest.mark.skipif(bool(slurmlab.lacking()), reason=slurmlab.lacking() or "-")
def test_a_real_job_sees_its_partition(node: Node) -> None:
    """Through slurmctld and slurmd: prolog, task prolog and epilog around a batch job."""
    for name in ("prolog", "task-prolog", "epilog"):
        more = " --profile 3g.40gb" if name == "prolog" else ""
        script = node.root / name
        path = f"cd {Path(__file__).resolve().parents[2]}"
        script.write_text(f"#!/bin/sh\n{path}\nexec {' '.join(node.argv)} slurm {name}{more}\n")
        script.chmod(0o755)
    named = {"Prolog": "prolog", "Epilog": "epilog", "TaskProlog": "task-prolog"}
    hooks = "".join(f"{key}={node.root}/{name}\n" for key, name in named.items())
    folder = node.root / "slurm"
    folder.mkdir()
    with slurmlab.cluster(folder, hooks + "PrologFlags=Alloc\n") as conf:
        out = node.root / "out"
        job = subprocess.run(
            [
                *("sbatch", "--parsable", "--output", str(node.root / "job.log")),
                *("--chdir", str(node.root), "--wrap", f"env > {out}.new && mv {out}.new {out}"),
            ],
            env={**os.environ, "SLURM_CONF": str(conf)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        wait_for("the job has run", out.exists, 120)
        environment = dict(
            line.split("=", 1) for line in out.read_text().splitlines() if "=" in line
        )
        assert environment["SLURM_JOB_ID"] == job
        assert environment["NVIDIA_VISIBLE_DEVICES"].startswith("MIG-")
        assert environment["ALLOY_PARTITIONS"]
        wait_for("the epilog has released it", lambda: node.tenants() == ["", ""], 120)
