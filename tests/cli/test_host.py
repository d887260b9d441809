"""The command line on this host's own cores: real control groups, real tenants."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.daemon.harness import Site, daemon, wait_for

pytestmark = pytest.mark.host

CAP = 256 << 20
CAP_FILES = ("memory.limit_in_bytes", "memory.max")
LAYOUT = """\
version: v1
layouts:
  one: [{match: {vendor: cpu, index: 0}, cores: [1], memory: [256MiB]}]
  clear: [{match: {vendor: cpu}, cores: []}]
"""


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """Give one partition of one core with 256 MiB."""
    site = Site(tmp_path, cpu=True)
    (tmp_path / "layout.yaml").write_text(LAYOUT)
    applied = apply(site, "one")
    assert applied.returncode == 0, applied.stderr
    yield site
    site.clean()


def apply(site: Site, name: str) -> subprocess.CompletedProcess[str]:
    return site.run("apply", str(site.folder / "layout.yaml"), "--layout", name, "--yes")


def tenant(site: Site, *command: str) -> subprocess.Popen[bytes]:
    """Start a tenant and return once it is the command."""
    (partition,) = site.partitions()
    running = subprocess.Popen(
        site.command("exec", partition["id"], "--tenant", "acme", "--", *command),
        env=site.environment,
        stdout=subprocess.DEVNULL,
    )
    comm = Path(f"/proc/{running.pid}/comm")
    wait_for("the tenant", lambda: comm.read_text().strip() == Path(command[0]).name)
    return running


def test_a_tenant_is_where_it_was_put(site: Site) -> None:
    """Exec runs the command on the partition's cores, in its groups, and exits as it does."""
    (partition,) = site.partitions()
    script = "grep Cpus_allowed_list /proc/self/status; cat /proc/self/cgroup; exit 7"
    done = site.run("exec", partition["id"], "--tenant", "acme", "--", "sh", "-c", script)
    assert done.returncode == 7
    cpus = done.stdout.splitlines()[0].split()[1]
    assert cpus == ",".join(str(unit) for unit in partition["units"])
    assert f"{site.root}/{partition['id']}" in done.stdout


def test_a_tenant_is_named_by_a_beginning_and_inherits_nothing_odd(site: Site) -> None:
    """A unique beginning is enough, a generation that is over is not; SIGPIPE ends a tenant."""
    (partition,) = site.partitions()
    name, generation = partition["id"][:-1], partition["generation"]
    script = "trap '' TERM; yes | head -1; grep SigIgn /proc/self/status"
    done = site.run("exec", f"{name}#{generation}", "--", "sh", "-c", script)
    assert (done.returncode, done.stderr) == (0, "")
    ignored = int(done.stdout.split("SigIgn:")[1], 16)
    # What the shell of this run ignored for all its children stays so; Python's own two do not.
    inherited = int(Path("/proc/self/status").read_text().split("SigIgn:")[1].split()[0], 16)
    for own in (signal.SIGPIPE, signal.SIGXFSZ):
        inherited &= ~(1 << (own - 1))
    assert ignored == inherited | 1 << (signal.SIGTERM - 1)
    refused = site.run("exec", f"{name}#{generation + 1}", "--", "true")
    assert refused.returncode == 125
    assert f"is at generation {generation}, not {generation + 1}" in refused.stderr


def test_signals_reach_the_tenant_itself(site: Site) -> None:
    """The process that exec became is the command; what kills it is its exit."""
    running = tenant(site, "sleep", "60")
    running.send_signal(signal.SIGTERM)
    assert running.wait(30) == -signal.SIGTERM


def test_audit_proves_a_tenant_inside(site: Site) -> None:
    """With a tenant in its partition every check of it passes and the tier is enforced."""
    running = tenant(site, "sleep", "60")
    try:
        document = site.document("audit", "--json")
        (report,) = document["partitions"]
        assert report["tier"] == "enforced"
        assert report["partition"]["tenant"] == "acme"
        verdicts = {j["check"]: j["verdict"] for j in report["judgements"]}
        assert verdicts
        assert set(verdicts.values()) <= {"pass", "not_applicable"}
        assert report["residual"]
    finally:
        running.kill()
        running.wait()


def test_audit_finds_a_tenant_that_left(site: Site) -> None:
    """A tenant's process outside of its partition is a fail, and audit exits with 1."""
    running = tenant(site, "sleep", "60")
    try:
        for path in Path("/sys/fs/cgroup").glob("*/cgroup.procs"):
            path.write_text(str(running.pid))
        done = site.run("audit", "--json")
        assert done.returncode == 1, done.stderr
        failed = [
            j["check"]
            for report in json.loads(done.stdout)["partitions"]
            for j in report["judgements"]
            if j["verdict"] == "fail"
        ]
        assert failed
    finally:
        running.kill()
        running.wait()


def cpuset_of(site: Site) -> Path:
    """Return the directory of the site's only partition that says which CPUs it has."""
    return next(p for p in site.cgroups() if "1c@" in p.name and (p / "cpuset.cpus").exists())


def test_cores_changed_by_hand_are_planned_back(site: Site) -> None:
    """A widened cpuset is a step of the next plan; applying it repairs it around its tenant."""
    cpus = cpuset_of(site) / "cpuset.cpus"
    granted = cpus.read_text()
    running = tenant(site, "sleep", "60")
    try:
        cpus.write_text("0-1")
        layout = str(site.folder / "layout.yaml")
        planned = site.run("plan", layout, "--layout", "one", "--exit-code")
        assert planned.returncode == 1
        assert "holds 0-1" in " ".join(planned.stdout.split())
        applied = apply(site, "one")
        assert applied.returncode == 0, applied.stderr
        assert cpus.read_text() == granted
        assert running.poll() is None
        assert site.run("plan", layout, "--layout", "one", "--exit-code").returncode == 0
    finally:
        running.kill()
        running.wait()


def test_the_daemon_puts_cores_and_cap_right(site: Site) -> None:
    """What somebody changes in cgroupfs while the daemon runs is as granted again soon after."""
    cpus = cpuset_of(site) / "cpuset.cpus"
    caps = (path / name for path in site.cgroups() if "1c@" in path.name for name in CAP_FILES)
    cap = next(path for path in caps if path.exists())
    granted = cpus.read_text()
    with daemon(site):
        cpus.write_text("0-1")
        wait_for("the cores", lambda: cpus.read_text() == granted)
        cap.write_text(str(CAP // 2))
        wait_for("the cap", lambda: int(cap.read_text()) == CAP)


def test_a_partition_has_one_tenant_at_a_time(site: Site) -> None:
    """Another tenant is refused while one is inside, and may come when it has left."""
    (partition,) = site.partitions()
    running = tenant(site, "sleep", "60")
    refused = site.run("exec", partition["id"], "--tenant", "other", "--", "true")
    assert refused.returncode == 125
    assert "acme" in refused.stderr
    running.kill()
    running.wait()
    assert site.run("exec", partition["id"], "--tenant", "other", "--", "true").returncode == 0


@pytest.mark.slow
def test_a_partition_in_use_is_not_destroyed(site: Site) -> None:
    """An apply that would take a busy partition away fails, and says who is inside."""
    running = tenant(site, "sleep", "120")
    try:
        done = apply(site, "clear")
        assert done.returncode == 1
        assert str(running.pid) in done.stderr
        assert [p["memory_bytes"] for p in site.partitions()] == [CAP]
    finally:
        running.kill()
        running.wait()
    assert apply(site, "clear").returncode == 0
    assert site.cgroups() == []


def test_exec_through_a_daemon(site: Site) -> None:
    """With a daemon the binding is the daemon's, and its audit sees the tenant."""
    with daemon(site) as running:
        inside = tenant(site, "sleep", "60")
        try:
            wait_for("the tenant on /metrics", lambda: 'tenant="acme"' in running.get("metrics")[1])
            document = site.document("audit", "--json")
            assert document["mode"] in ("events", "polling")
            (report,) = document["partitions"]
            assert report["partition"]["tenant"] == "acme"
        finally:
            inside.kill()
            inside.wait()
        assert running.stop() == 0
