"""Every command over simulated silicon: what it prints, what it changes, how it exits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from alloy_agent import __version__
from alloy_agent.cli.output import WIDTH
from tests.cli.conftest import Run
from tests.daemon.harness import Site, wait_for


def test_version(alloy: Run) -> None:
    """`--version` names the program and its version."""
    assert alloy("--version").out == f"alloy-agent {__version__}\n"


def test_devices_shows_what_can_be_cut(alloy: Run) -> None:
    """The table names device, model, profiles with their starts, and the best tier."""
    done = alloy("devices")
    assert done.code == 0
    assert "H100-SXM5-80GB" in done.out
    assert "mig hard" in done.out
    line = next(x for x in done.out.splitlines() if x.startswith("3g.40gb"))
    assert line.split()[-2:] == ["0", "4"]


@pytest.mark.parametrize("fake", ["8xH100-SXM5-80GB", "8xMI300X", "trn2.48xlarge", "mixed"])
def test_every_table_fits(alloy: Run, fake: str) -> None:
    """No table is wider than 100 columns, whatever the node."""
    done = alloy("devices", fake=fake)
    assert done.code == 0, done.err
    assert max(len(line) for line in done.out.splitlines()) <= WIDTH


def test_devices_as_a_document(alloy: Run) -> None:
    """The document has its schema first and what the contract names of devices and partitions."""
    done = alloy("devices", "--json")
    document = done.json
    assert next(iter(document)) == "schema"
    assert document["schema"] == "alloy.devices/v1"
    (device,) = document["devices"]
    assert {"id", "vendor", "model", "tier_limits", "partitions", "profiles", "links"} <= set(
        device
    )
    assert device["simulated"] is True
    (whole,) = device["partitions"]
    assert {"id", "profile", "tier", "tenant", "generation"} <= set(whole)


def test_plan_apply_and_what_is_there_after(alloy: Run, layout: Path) -> None:
    """Plan tells the steps, apply does them, devices shows them, and a second plan is empty."""
    planned = alloy("plan", str(layout), "--layout", "halves", "--json", "--exit-code")
    assert planned.code == 1
    document = planned.json
    assert document["schema"] == "alloy.plan/v1"
    assert [step["kind"] for step in document["steps"]] == ["set_mode", "create", "create"]
    assert document["steps"][0]["interrupts"]

    refused = alloy("apply", str(layout), "--layout", "halves")
    assert refused.code == 2
    assert "--yes" in refused.err

    applied = alloy("apply", str(layout), "--layout", "halves", "--yes", "--json")
    assert applied.code == 0, applied.err
    assert applied.json["schema"] == "alloy.apply/v1"
    assert applied.json["reached"] is True

    (device,) = alloy("devices", "--json").json["devices"]
    assert [p["profile"] for p in device["partitions"]] == ["3g.40gb", "3g.40gb"]
    assert [p["made_by"] for p in device["partitions"]] == ["alloy", "alloy"]

    again = alloy("plan", str(layout), "--layout", "halves", "--exit-code")
    assert (again.code, again.out) == (0, "layout halves: nothing to do\n")
    unchanged = alloy("apply", str(layout), "--layout", "halves")
    assert unchanged.code == 0
    assert "already so" in unchanged.out


def test_plan_changes_nothing(alloy: Run, layout: Path, tmp_path: Path) -> None:
    """Looking leaves device and state directory as they were."""
    before = alloy("devices", "--json").json["devices"]
    assert alloy("plan", str(layout), "--layout", "halves").code == 0
    assert alloy("devices", "--json").json["devices"] == before
    assert not (tmp_path / "state" / "state.db").exists()


def test_a_plan_reads_standard_input(layout: Path, tmp_path: Path) -> None:
    """`/dev/stdin` is a file argument like any other, and names itself in errors."""
    command = [
        sys.executable,
        "-m",
        "alloy_agent",
        "--fake",
        "1xH100-SXM5-80GB",
        "--state-dir",
        str(tmp_path / "s"),
        "plan",
        "/dev/stdin",
        "--layout",
    ]
    environment = {**os.environ, "ALLOY_BACKENDS_CPU": "off"}
    done = subprocess.run(
        [*command, "halves"],
        input=layout.read_text(),
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "3g.40gb@4" in done.stdout


def test_an_apply_that_was_killed_is_settled_by_the_next(layout: Path, tmp_path: Path) -> None:
    """The next apply finishes what was begun, says so, and then does its own work at once."""
    slow = tmp_path / "slow.yaml"
    slow.write_text(
        "boards: [{board: H100}]\n"
        "faults: [{call: gpu.create_gpu_instance, device: '*', action: slow, delay_s: 4, "
        "nth: 2, times: 2}]\n"
    )
    site = Site(tmp_path, str(slow))
    layout.write_text(
        f"{layout.read_text()}"
        "  quarters: [{match: {vendor: nvidia}, mig: [1g.20gb, 1g.20gb, 1g.20gb, 1g.20gb]}]\n"
    )
    first = subprocess.Popen(
        site.command("apply", str(layout), "--layout", "quarters", "--yes"), env=site.environment
    )
    wait_for("a first piece", lambda: [p for p in site.partitions() if p["made_by"] == "alloy"])
    first.kill()
    first.wait()
    second = site.run("apply", str(layout), "--layout", "halves", "--yes")
    assert second.returncode == 0, second.stderr
    assert "an apply of layout quarters was cut off: now applied" in second.stderr
    assert [p["profile"] for p in site.partitions()] == ["3g.40gb", "3g.40gb"]


def test_generations_grow(alloy: Run, layout: Path) -> None:
    """A partition that is made anew at its place has the next generation."""

    def generations() -> list[int]:
        (device,) = alloy("devices", "--json").json["devices"]
        return [p["generation"] for p in device["partitions"] if p["profile"] == "3g.40gb"]

    for name in ("halves", "whole", "halves"):
        assert alloy("apply", str(layout), "--layout", name, "--yes").code == 0
    assert generations() == [2, 2]


def test_audit_in_every_form(alloy: Run, layout: Path, tmp_path: Path) -> None:
    """Table, JSON, HTML, SARIF and DSSE come from one audit; its evidence verifies offline."""
    assert alloy("apply", str(layout), "--layout", "halves", "--yes").code == 0
    paths = {form: tmp_path / f"report.{form}" for form in ("html", "sarif", "dsse")}
    options = [part for form, path in paths.items() for part in (f"--{form}", str(path))]
    done = alloy("audit", *options)
    assert done.code in (0, 1, 3), done.err
    assert max(len(line) for line in done.out.splitlines()) <= WIDTH
    assert "PART-01" in done.out or "3g.40gb" in done.out
    assert "<html" in paths["html"].read_text().lower()
    assert json.loads(paths["sarif"].read_text())["version"] == "2.1.0"
    assert "payload" in json.loads(paths["dsse"].read_text())

    document = alloy("audit", "--json")
    assert document.json["schema"] == "alloy.audit/v1"
    assert document.code == {"pass": 0, "fail": 1, "unknown": 3}[document.json["verdict"]]

    state = str(tmp_path / "state")
    verified = alloy("evidence", "verify", state, fake=None)
    assert verified.code == 0, verified.out
    key = tmp_path / "key.pem"
    key.write_text(alloy("evidence", "key", fake=None).out)
    assert alloy("evidence", "verify", state, "--public-key", str(key), "--json").json["report"][
        "ok"
    ]


def test_evidence_that_was_changed_is_named(alloy: Run, tmp_path: Path) -> None:
    """A changed record makes the verification exit with 1 and name it."""
    assert alloy("audit").code in (0, 1, 3)
    (path, *_) = sorted((tmp_path / "state" / "evidence").glob("*.jsonl"))
    lines = path.read_bytes().splitlines(keepends=True)
    lines[1] = lines[1].replace(b'"kind":"', b'"kind":"x', 1)
    path.write_bytes(b"".join(lines))
    done = alloy("evidence", "verify", str(tmp_path / "state"))
    assert done.code == 1
    assert f"{path.name}:2" in done.out


def test_a_head_from_outside_must_be_in_the_chain(alloy: Run, tmp_path: Path) -> None:
    """A head that the chain does not have is a problem; what is no head is refused."""
    assert alloy("audit").code in (0, 1, 3)
    state = str(tmp_path / "state")
    head = next(
        line.split()[1]
        for line in alloy("evidence", "verify", state).out.splitlines()
        if line.startswith("head ")
    )
    assert alloy("evidence", "verify", state, "--head", head).code == 0
    told = [line.split()[1] for line in alloy("audit").out.splitlines() if line.startswith("head ")]
    assert len(told) == 1
    assert alloy("evidence", "verify", state, "--head", told[0]).code == 0
    assert alloy("evidence", "verify", state, "--head", f"1:{'0' * 64}").code == 1
    assert alloy("evidence", "verify", state, "--head", "nonsense").code == 2


def _cut(state: Path) -> None:
    path = state / "state.db"
    path.write_bytes(path.read_bytes()[:5000])


def _pipe(state: Path) -> None:
    (state / "state.db").unlink()
    os.mkfifo(state / "state.db")


def _folder(state: Path) -> None:
    (state / "state.db").unlink()
    (state / "state.db").mkdir()


@pytest.mark.parametrize("spoil", [_cut, _pipe, _folder])
def test_devices_are_shown_whatever_the_state_is(
    alloy: Run, layout: Path, tmp_path: Path, spoil: Callable[[Path], None]
) -> None:
    """With state that cannot be read, what the devices say is shown, with why the rest is not."""
    assert alloy("apply", str(layout), "--layout", "halves", "--yes").code == 0
    spoil(tmp_path / "state")
    shown = alloy("devices")
    assert shown.code == 0
    assert "3g.40gb@4" in shown.out
    assert "state.db" in shown.err
    assert alloy("plan", str(layout), "--layout", "halves", "--exit-code").code == 0
    assert alloy("audit").code == 3
    assert alloy("apply", str(layout), "--layout", "whole", "--yes").code == 2


def test_whose_a_partition_is_stays_unknown_where_the_books_are_closed(
    alloy: Run, layout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To a user who may not read the state nothing is said of generation and maker, but that."""
    from alloy_agent.errors import StoreError
    from alloy_agent.store import Store

    assert alloy("apply", str(layout), "--layout", "halves", "--yes").code == 0
    opened = Store.open

    def closed(path: Path | str, **how: bool) -> Store:
        if Path(path).name == "state":
            raise StoreError(f"{path}: permission denied", cure="run as root")
        return opened(path, **how)

    monkeypatch.setattr(Store, "open", closed)
    shown = alloy("devices")
    (row,) = [line for line in shown.out.splitlines() if "3g.40gb@4" in line]
    assert row.split()[1] == "-"
    assert row.split()[-1] == "unknown"
    assert "makers and tenants are not known" in shown.err
    planned = alloy("plan", str(layout), "--layout", "whole")
    assert "3g.40gb@4 is not known" in " ".join(planned.out.split())
    assert "was not made by this agent" not in planned.out


def test_a_partition_id_is_never_broken(
    alloy: Run, layout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a terminal of 80 columns each partition has a name on one line that commands take."""
    assert alloy("apply", str(layout), "--layout", "halves", "--yes").code == 0
    monkeypatch.setattr("alloy_agent.cli.output.width", lambda: 80)
    lines = alloy("devices").out.splitlines()
    first = next(n for n, line in enumerate(lines) if line.startswith("PARTITION"))
    names = [line.split()[0] for line in lines[first + 1 : first + 3]]
    for name, place in zip(names, ("3g.40gb@0", "3g.40gb@4"), strict=True):
        assert name.endswith(f"/{place}")
        assert alloy("devices", "--environment", name).code == 0
    assert max(map(len, lines)) <= 80


def test_a_layout_without_its_devices_says_that_a_worker_is_down(
    alloy: Run, layout: Path, tmp_path: Path
) -> None:
    """'Matches no device' is half of the truth where the worker of those devices cannot start."""
    assert alloy("apply", str(layout), "--layout", "halves", "--yes").code == 0
    (machine,) = (tmp_path / "state").glob("silicon-*.json")
    machine.write_text("{")
    done = alloy("plan", str(layout), "--layout", "halves")
    assert done.code == 2
    assert "matches no device" in done.err
    assert "worker fake is down" in done.err


def test_a_read_only_state_directory_is_looked_at(alloy: Run, layout: Path, tmp_path: Path) -> None:
    """While another process holds the state, devices, plan and audit still answer."""
    from alloy_agent.store import Store

    assert alloy("apply", str(layout), "--layout", "halves", "--yes").code == 0
    holder = Store.open(tmp_path / "state")
    try:
        assert "3g.40gb@4" in alloy("devices").out
        assert alloy("plan", str(layout), "--layout", "halves", "--exit-code").code == 0
        audited = alloy("audit", "--json")
        assert audited.json["evidence_hash"] is None
        assert "nothing is recorded" in audited.err
        refused = alloy("apply", str(layout), "--layout", "whole", "--yes")
        assert refused.code == 2
        assert str(os.getpid()) in refused.err
    finally:
        holder.close()


def test_doctor_says_what_is_missing(alloy: Run) -> None:
    """Each diagnosis of the agent and its backends is a row, and the exit code follows them."""
    done = alloy("doctor", "--json")
    assert done.json["schema"] == "alloy.doctor/v1"
    subjects = {d["subject"] for d in done.json["diagnoses"]}
    assert {"python", "kernel", "state directory", "control groups"} <= subjects
    assert done.code == (0 if done.json["ok"] else 1)
    lacking = [d for d in done.json["diagnoses"] if not d["ok"]]
    assert all(d["cure"] for d in lacking)


@pytest.mark.parametrize("shell", ["bash", "zsh", "tcsh"])
def test_completion_knows_every_command(alloy: Run, shell: str) -> None:
    """The script completes commands and options."""
    done = alloy("completion", shell)
    assert done.code == 0
    assert all(word in done.out for word in ("devices", "apply", "evidence", "disruptive"))


def test_a_bash_completion_loads(alloy: Run) -> None:
    """The bash script is valid for bash."""
    script = alloy("completion", "bash").out
    subprocess.run(["/bin/bash", "-n"], input=script, text=True, check=True, timeout=20)


def test_exec_needs_a_command_and_a_partition(alloy: Run) -> None:
    """What exec cannot start exits with 125, so that it is not taken for the command's own code."""
    assert alloy("exec", "nowhere").code == 125
    missing = alloy("exec", "nowhere", "--", "true")
    assert missing.code == 125
    assert "nowhere" in missing.err


def test_a_closed_pipe_is_no_error(tmp_path: Path) -> None:
    """`alloy-agent devices | head -1` ends quietly."""
    command = f"{sys.executable} -m alloy_agent --fake 8xH100-SXM5-80GB --state-dir {tmp_path} "
    environment = {**os.environ, "ALLOY_BACKENDS_CPU": "off"}
    done = subprocess.run(
        ["/bin/bash", "-c", command + "devices | head -1"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stderr == ""
    assert done.stdout.count("\n") == 1


def test_importing_the_command_line_loads_no_room() -> None:
    """Parsing a command line costs no library that only some command needs."""
    code = "import sys, alloy_agent.cli; print(*sorted(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    loaded = set(done.stdout.split())
    heavy = {"grpc", "msgspec", "yaml", "rich", "structlog", "cryptography", "sqlite3", "psutil"}
    assert not heavy & loaded
