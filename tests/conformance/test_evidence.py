"""The evidence chain: what is written verifies, and what is tampered with is named."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
import rfc8785
from hypothesis import given, settings
from hypothesis import strategies as st

from alloy_agent.conformance.evidence import (
    ChainHead,
    Entry,
    EvidenceLog,
    SigningKey,
    VerifyReport,
    verify,
)
from alloy_agent.conformance.evidence.keys import KEY_FILE, PUBLIC_FILE
from alloy_agent.conformance.evidence.log import Times
from alloy_agent.conformance.evidence.record import HEAD_EVERY, decode_line, encode_line, seal
from alloy_agent.errors import ConfigError, StoreCorruptError, StoreError


class HandClock:
    """Three clocks that move when a test says so."""

    def __init__(self) -> None:
        self.times = Times(
            boottime_us=1_000_000_000, monotonic_us=900_000_000, wall_us=1_700_000_000_000_000
        )

    def now(self) -> Times:
        """Return the clocks."""
        return self.times

    def move(self, *, awake_s: float = 0, asleep_s: float = 0, step_s: float = 0) -> None:
        """Let time pass awake, asleep, and step the wall clock."""
        now = self.times
        self.times = Times(
            boottime_us=now.boottime_us + int((awake_s + asleep_s) * 1e6),
            monotonic_us=now.monotonic_us + int(awake_s * 1e6),
            wall_us=now.wall_us + int((awake_s + asleep_s + step_s) * 1e6),
        )


def open_log(state: Path, clock: HandClock | None = None, **options: Any) -> EvidenceLog:
    """Return the log of a state directory with a fixed identity."""
    return EvidenceLog.open(
        state,
        boot_id=str(options.pop("boot_id", "boot-1")),
        agent_version="1.0",
        config_digest="c0ffee",
        clock=clock or HandClock(),
        **options,
    )


def entry(number: int) -> Entry:
    """Return one plausible record."""
    return Entry(
        kind="judgement",
        subject=f"cpu:0/2c@{number % 7}",
        check="CPU-01",
        verdict="pass",
        expected="1-2",
        observed=f"1-2 ({number})",
        tenant="acme",
        data={"number": number, "open": False, "none": None, "cpus": ("1", "2")},
    )


def build(state: Path, count: int = 40, **options: Any) -> Path:
    """Write a chain of `count` judgements in a closed log and return its directory."""
    with open_log(state, **options) as log:
        for number in range(count):
            log.append([entry(number)])
    return state / "evidence"


def lines_of(directory: Path) -> list[bytes]:
    """Return the lines of a chain of one file."""
    (file,) = directory.glob("*.jsonl")
    return file.read_bytes().splitlines(keepends=True)


def put_lines(directory: Path, lines: list[bytes]) -> None:
    """Replace the lines of a chain of one file."""
    (file,) = directory.glob("*.jsonl")
    file.write_bytes(b"".join(lines))


def kinds(report: VerifyReport) -> set[tuple[str, int | None]]:
    """Return what the report names."""
    return {(problem.kind, problem.sequence) for problem in report.problems}


def public_key(state: Path) -> str:
    """Return the PEM of the node's public key."""
    return (state / "keys" / PUBLIC_FILE).read_text()


def test_a_chain_that_nobody_touched_verifies(tmp_path: Path) -> None:
    """What the log wrote verifies whole, with the key given, and says up to where it is signed."""
    directory = build(tmp_path)
    report = verify(directory, public_key(tmp_path))
    assert report.ok, report.problems
    assert report.records == 44  # start, head, 40 judgements, stop, head
    assert report.signed_up_to == report.last_sequence == 44
    assert report.key_source == "given"


def test_records_are_plain_canonical_json(tmp_path: Path) -> None:
    """Every line is byte for byte what an independent RFC 8785 encoder makes of it."""
    for line in lines_of(build(tmp_path)):
        document = json.loads(line)
        assert rfc8785.dumps(document) == line.rstrip(b"\n")
        assert document["body"]["agent"] == "1.0"
        assert document["body"]["boot"] == "boot-1"


@settings(max_examples=150, deadline=None)
@given(
    text=st.text(st.characters(codec=None, exclude_categories=()), max_size=60),
    number=st.integers(-(2**53) + 1, 2**53 - 1),
    items=st.lists(st.text(max_size=8), max_size=4),
)
def test_any_text_and_number_is_written_canonically(
    text: str, number: int, items: list[str]
) -> None:
    """Hostile names, surrogates and the largest numbers are recorded, canonical, and read back."""
    with tempfile.TemporaryDirectory() as name:
        state = Path(name)
        with open_log(state) as log:
            log.append([Entry(kind="x", observed=text, data={"n": number, "l": tuple(items)})])
        for line in lines_of(state / "evidence"):
            assert rfc8785.dumps(json.loads(line)) == line.rstrip(b"\n")
        assert verify(state / "evidence").ok


def test_a_number_that_json_cannot_hold_is_refused(tmp_path: Path) -> None:
    """2^53 has no exact canonical form, so it is an error and leaves the chain as it was."""
    with open_log(tmp_path) as log:
        before = log.head
        with pytest.raises(StoreError, match="beyond 2\\^53-1"):
            log.append([Entry(kind="x", data={"n": 2**53})])
        with pytest.raises(StoreError, match="lower-case ASCII"):
            log.append([Entry(kind="x", data={"Größe": 1})])
        assert log.head == before
    assert verify(tmp_path / "evidence").ok


def test_each_changed_record_is_named(tmp_path: Path) -> None:
    """Two records edited by hand give exactly two problems, each with its file and line."""
    directory = build(tmp_path)
    lines = lines_of(directory)
    for index in (9, 10):
        lines[index] = lines[index].replace(b'"verdict":"pass"', b'"verdict":"fail"')
    put_lines(directory, lines)
    report = verify(directory, public_key(tmp_path))
    assert kinds(report) == {("changed", 10), ("changed", 11)}
    assert [problem.line for problem in report.problems] == [10, 11]


def test_a_changed_record_with_a_new_hash_is_named(tmp_path: Path) -> None:
    """Who also repairs the record's own hash is found by the record that follows it."""
    directory = build(tmp_path)
    lines = lines_of(directory)
    lines[9] = rehash(lines[9], verdict="fail")
    put_lines(directory, lines)
    assert kinds(verify(directory, public_key(tmp_path))) == {("changed", 10)}


def rehash(line: bytes, **changes: str) -> bytes:
    """Return the line with fields changed and its hash made to fit again."""
    document = json.loads(line)
    document["body"].update(changes)
    raw = rfc8785.dumps(document["body"])
    record = decode_line(encode_line(raw, "0" * 64, document.get("sig", "")).rstrip(b"\n"))
    return encode_line(raw, record.actual, document.get("sig", ""))


def test_a_chain_rewritten_to_its_end_fails_at_its_heads(tmp_path: Path) -> None:
    """Who re-chains everything after a change cannot sign the heads anew."""
    directory = build(tmp_path)
    lines = lines_of(directory)
    previous = ""
    for index in range(9, len(lines)):
        changes = {"prev": previous} if previous else {"verdict": "fail"}
        lines[index] = rehash(lines[index], **changes)
        previous = decode_line(lines[index].rstrip(b"\n")).actual
    put_lines(directory, lines)
    report = verify(directory, public_key(tmp_path))
    assert kinds(report) == {("bad_signature", 44)}
    assert "records after 2 may have been rewritten" in report.problems[0].text


def test_each_missing_record_is_named(tmp_path: Path) -> None:
    """Removed records are named as ranges, wherever they were removed."""
    directory = build(tmp_path)
    lines = lines_of(directory)
    del lines[20], lines[10:13]
    put_lines(directory, lines)
    report = verify(directory, public_key(tmp_path))
    assert {(p.kind, p.sequence, p.until) for p in report.problems} == {
        ("missing", 11, 13),
        ("missing", 21, 21),
    }


def test_the_front_of_a_chain_cannot_be_removed(tmp_path: Path) -> None:
    """A directory whose chain does not begin at record 1 lacks those before."""
    directory = build(tmp_path)
    put_lines(directory, lines_of(directory)[5:])
    report = verify(directory, public_key(tmp_path))
    assert ("missing", 1) in kinds(report)


def test_reordered_and_duplicated_records_are_named(tmp_path: Path) -> None:
    """Swapped lines and a repeated line are named, and nothing else is."""
    directory = build(tmp_path)
    lines = lines_of(directory)
    lines[10], lines[11] = lines[11], lines[10]
    lines.insert(31, lines[20])
    put_lines(directory, lines)
    assert kinds(verify(directory, public_key(tmp_path))) == {("reordered", 11), ("duplicated", 21)}


def test_an_unreadable_line_is_named_once(tmp_path: Path) -> None:
    """Garbage in place of a record is one problem and not also a missing record."""
    directory = build(tmp_path)
    lines = lines_of(directory)
    lines[10] = b'{"body":\xff}\n'
    lines[20] = lines[20].replace(b":", b": ", 1)  # the same content, not canonical
    put_lines(directory, lines)
    assert kinds(verify(directory, public_key(tmp_path))) == {("malformed", 11), ("malformed", 21)}


def test_a_cut_within_a_record_is_named(tmp_path: Path) -> None:
    """A file that ends within a record is truncated."""
    directory = build(tmp_path)
    lines = lines_of(directory)
    put_lines(directory, [*lines[:-1], lines[-1][:-20]])
    assert "truncated" in {kind for kind, _ in kinds(verify(directory, public_key(tmp_path)))}


def test_a_cut_tail_is_found_with_a_known_head(tmp_path: Path) -> None:
    """Records removed from the end are found against a head kept elsewhere, and only so."""
    with open_log(tmp_path) as log:
        log.append([entry(number) for number in range(10)])
        known = log.sign_head()
    directory = tmp_path / "evidence"
    put_lines(directory, lines_of(directory)[:8])
    alone = verify(directory, public_key(tmp_path))
    assert alone.ok
    assert any("known from outside" in note for note in alone.notes)
    assert any("records 3 to 8 are not covered" in note for note in alone.notes)
    report = verify(directory, public_key(tmp_path), known)
    assert kinds(report) == {("truncated", known.sequence)}


def test_a_head_that_does_not_match_the_known_one_is_named(tmp_path: Path) -> None:
    """A chain that has the sequence of the known head, but not its hash, is another chain."""
    directory = build(tmp_path)
    report = verify(directory, public_key(tmp_path), ChainHead(sequence=44, hash="ab" * 32))
    assert kinds(report) == {("changed", 44)}


def test_another_key_is_named(tmp_path: Path) -> None:
    """Heads signed by a key other than the one given are each named."""
    directory = build(tmp_path)
    report = verify(directory, SigningKey.generate().public.pem)
    assert kinds(report) == {("wrong_key", 2), ("wrong_key", 44)}


def test_a_replaced_key_is_seen_without_any_key(tmp_path: Path) -> None:
    """Without a key the first start record binds the chain: heads of a later key stand out."""
    directory = build(tmp_path)
    (tmp_path / "keys" / KEY_FILE).unlink()
    (tmp_path / "keys" / PUBLIC_FILE).unlink()
    build(tmp_path, count=1)
    report = verify(directory)
    assert report.key_source == "chain"
    assert {kind for kind, _ in kinds(report)} == {"wrong_key"}


def test_removed_heads_are_noticed(tmp_path: Path) -> None:
    """A chain re-made without signed heads is not accepted for lack of signatures to fail."""
    directory = build(tmp_path, count=300)
    kept: list[bytes] = []
    lines, previous = lines_of(directory), "0" * 64
    for line in lines:
        document = json.loads(line)
        if document["body"]["kind"] == "head":
            continue
        document["body"].update(prev=previous, seq=len(kept) + 1)
        raw = rfc8785.dumps(document["body"])
        record = decode_line(encode_line(raw, "0" * 64).rstrip(b"\n"))
        kept.append(encode_line(raw, record.actual))
        previous = record.actual
    put_lines(directory, kept)
    report = verify(directory, public_key(tmp_path))
    assert {kind for kind, _ in kinds(report)} == {"unsigned"}


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_no_single_edit_goes_unnoticed(data: st.DataObject) -> None:
    """One byte changed, or one line removed, repeated or moved, in the signed part, is never ok."""
    with tempfile.TemporaryDirectory() as name:
        state = Path(name)
        directory = build(state, count=12)
        lines = lines_of(directory)
        index = data.draw(st.integers(0, len(lines) - 2))
        action = data.draw(st.sampled_from(["byte", "remove", "repeat", "move"]))
        if action == "byte":
            at = data.draw(st.integers(0, len(lines[index]) - 1))
            value = data.draw(st.integers(0, 255).filter(lambda v: v != lines[index][at]))
            lines[index] = lines[index][:at] + bytes([value]) + lines[index][at + 1 :]
        elif action == "remove":
            del lines[index]
        elif action == "repeat":
            lines.insert(data.draw(st.integers(0, len(lines))), lines[index])
        else:
            target = data.draw(st.integers(0, len(lines) - 1).filter(lambda v: v != index))
            lines.insert(target, lines.pop(index))
        put_lines(directory, lines)
        report = verify(directory, public_key(state))
        assert not report.ok
        assert all(problem.text for problem in report.problems)


@settings(max_examples=80, deadline=None)
@given(content=st.binary(max_size=400), key=st.one_of(st.none(), st.binary(max_size=80)))
def test_any_bytes_give_a_report_and_no_traceback(content: bytes, key: bytes | None) -> None:
    """A file of any bytes, with any key, ends in a report or in a one-line error."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name, "evidence-000000000001.jsonl")
        path.write_bytes(content)
        with contextlib.suppress(ConfigError):
            assert not verify(path, key).ok
        assert not verify(path).ok


def test_the_chain_goes_on_over_files(tmp_path: Path) -> None:
    """Rotation keeps one chain, ends each file with a signed head, and a lost file is missing."""
    directory = build(tmp_path, count=120, rotate_bytes=20_000)
    files = sorted(directory.glob("*.jsonl"))
    assert len(files) > 3
    assert verify(directory, public_key(tmp_path)).ok
    for file in files:
        assert json.loads(file.read_bytes().splitlines()[-1])["body"]["kind"] == "head"
    alone = verify(files[1], public_key(tmp_path))
    assert alone.ok
    assert any("were not looked at" in note for note in alone.notes)
    files[1].unlink()
    (problem,) = verify(directory, public_key(tmp_path)).problems
    assert problem.kind == "missing"
    assert f"{problem.sequence:012d}" in files[1].name


def test_old_files_are_removed_with_a_record(tmp_path: Path) -> None:
    """Retention removes the oldest files and says so; more than that is still missing."""
    directory = build(tmp_path, count=200, rotate_bytes=20_000, keep_files=2)
    files = sorted(directory.glob("*.jsonl"))
    assert len(files) == 3
    report = verify(directory, public_key(tmp_path))
    assert report.ok, report.problems
    assert any("removed by retention" in note for note in report.notes)
    files[0].unlink()
    assert {kind for kind, _ in kinds(verify(directory, public_key(tmp_path)))} == {"missing"}


def test_a_chain_that_is_being_written_may_end_within_a_line(tmp_path: Path) -> None:
    """Whoever verifies while the log writes is not told of a cut that is none."""
    directory = build(tmp_path)
    (file,) = directory.glob("*.jsonl")
    file.write_bytes(file.read_bytes() + b'{"bo')
    assert not verify(directory, public_key(tmp_path)).ok
    assert verify(directory, public_key(tmp_path), live=True).ok


def test_files_that_changed_places_are_noticed(tmp_path: Path) -> None:
    """Two files of a chain with exchanged names are records out of their place."""
    directory = build(tmp_path, count=120, rotate_bytes=20_000)
    first, second = sorted(directory.glob("*.jsonl"))[:2]
    keep = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(keep)
    assert "reordered" in {kind for kind, _ in kinds(verify(directory, public_key(tmp_path)))}


def test_a_head_is_signed_at_least_every_256_records(tmp_path: Path) -> None:
    """One large batch has heads inside of it."""
    with open_log(tmp_path) as log:
        log.append([entry(number) for number in range(1000)])
    report = verify(tmp_path / "evidence", public_key(tmp_path))
    assert report.ok
    assert report.heads >= 1000 // HEAD_EVERY


def test_a_head_is_signed_when_its_time_has_come(tmp_path: Path) -> None:
    """Unsigned records get a head after the period, and a quiet chain does not grow."""
    clock = HandClock()
    with open_log(tmp_path, clock) as log:
        log.append([entry(1)])
        assert log.tick().sequence == 3
        clock.move(awake_s=61)
        assert log.tick().sequence == 4
        clock.move(awake_s=61)
        assert log.tick().sequence == 4
        assert log.sign_head().sequence == 4


def gaps_of(directory: Path) -> list[tuple[str, dict[str, object]]]:
    """Return reason and data of each gap record."""
    bodies = [json.loads(line)["body"] for line in lines_of(directory)]
    return [(body["reason"], body["data"]) for body in bodies if body["kind"] == "gap"]


def test_suspend_and_clock_steps_are_records(tmp_path: Path) -> None:
    """A suspend and a step of the wall clock are told apart and recorded with their length."""
    clock = HandClock()
    with open_log(tmp_path, clock) as log:
        clock.move(awake_s=10)
        log.tick()
        clock.move(awake_s=1, asleep_s=3600)
        log.tick()
        clock.move(awake_s=1, step_s=-7)
        log.append([entry(1)])
        clock.move(awake_s=86_400, step_s=20)  # within what slewing explains in a day
        log.append([entry(2)])
    assert gaps_of(tmp_path / "evidence") == [
        ("suspend", {"length_us": 3_600_000_000}),
        ("clock step", {"step_us": -7_000_000}),
    ]


def test_a_restart_is_a_record(tmp_path: Path) -> None:
    """The next start says how long nobody looked, whether the end was orderly, and any reboot."""
    clock = HandClock()
    build(tmp_path, count=1, clock=clock)
    clock.move(awake_s=5)
    build(tmp_path, count=1, clock=clock)
    clock.move(awake_s=9)
    build(tmp_path, count=1, clock=clock, boot_id="boot-2")
    (first, one), (second, two) = gaps_of(tmp_path / "evidence")
    assert (first, one["away_us"], one["orderly"]) == ("restart", 5_000_000, True)
    assert (second, two["away_us"], two["previous_boot"]) == ("reboot", 9_000_000, "boot-1")
    assert verify(tmp_path / "evidence", public_key(tmp_path)).ok


@pytest.mark.parametrize("tail", [b'{"body":{"agent":"1.0","boo', b"\0" * 512, b"x\n\0\0"])
def test_a_torn_tail_is_cut_aside_and_recorded(tmp_path: Path, tail: bytes) -> None:
    """What a crash left behind the last record is kept beside the file, and the chain goes on."""
    directory = build(tmp_path, count=3)
    (file,) = directory.glob("*.jsonl")
    if tail.startswith(b"x"):
        tail = tail[2:]
    file.write_bytes(file.read_bytes() + tail)
    build(tmp_path, count=1)
    assert verify(directory, public_key(tmp_path)).ok
    torn, data = gaps_of(directory)[0]
    assert (torn, data["bytes"]) == ("torn record cut aside", len(tail))
    assert (directory / str(data["kept_as"])).read_bytes() == tail


def test_a_first_record_torn_in_a_new_file_continues_the_old(tmp_path: Path) -> None:
    """A crash right after rotation leaves an empty or torn new file; the chain still goes on."""
    directory = build(tmp_path, count=3)
    last = verify(directory).last_sequence or 0
    (directory / f"evidence-{last + 1:012d}.jsonl").write_bytes(b'{"bo')
    build(tmp_path, count=3)
    report = verify(directory, public_key(tmp_path))
    assert report.ok, report.problems
    assert report.files == 2


def test_a_changed_last_record_stops_the_writer(tmp_path: Path) -> None:
    """The log does not build on a last record that somebody changed."""
    directory = build(tmp_path)
    lines = lines_of(directory)
    lines[-1] = lines[-1].replace(b'"boot-1"', b'"boot-7"')
    put_lines(directory, lines)
    with pytest.raises(StoreCorruptError, match="was changed"):
        open_log(tmp_path)
    assert lines_of(directory) == lines


def test_a_second_writer_is_refused(tmp_path: Path) -> None:
    """Two agents cannot write one chain."""
    with open_log(tmp_path), pytest.raises(StoreError, match="another agent writes"):
        open_log(tmp_path)


def test_the_key_is_private_and_kept(tmp_path: Path) -> None:
    """The key is made once, mode 0600, and tightened if somebody opened it up."""
    build(tmp_path, count=1)
    path = tmp_path / "keys" / KEY_FILE
    assert path.stat().st_mode & 0o777 == 0o600
    before = path.read_bytes()
    path.chmod(0o644)
    build(tmp_path, count=1)
    assert path.read_bytes() == before
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_damaged_key_is_named(tmp_path: Path) -> None:
    """A key file that is no key is an error that names it."""
    build(tmp_path, count=1)
    (tmp_path / "keys" / KEY_FILE).write_text("not a key")
    with pytest.raises(StoreError, match=r"evidence\.pem cannot be read as a key"):
        open_log(tmp_path)


def test_a_full_disk_is_an_error_and_leaves_the_chain_whole(tmp_path: Path) -> None:
    """A write that the kernel refuses half-way is undone; later records say how many were lost."""
    with open_log(tmp_path) as log:
        log.append([entry(0)])
        (file,) = (tmp_path / "evidence").glob("*.jsonl")
        before, head = file.read_bytes(), log.head
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 500, hard))
        try:
            with pytest.raises(StoreError, match="observation goes on"):
                log.append([entry(1), entry(2)])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            signal.signal(signal.SIGXFSZ, old)
        assert file.read_bytes() == before
        assert log.head == head
        log.append([entry(3)])
    assert gaps_of(tmp_path / "evidence") == [("the disk refused records", {"lost_records": 2})]
    assert verify(tmp_path / "evidence", public_key(tmp_path)).ok


WRITER = textwrap.dedent(
    """
    import sys
    from pathlib import Path
    from alloy_agent.conformance.evidence import Entry, EvidenceLog
    log = EvidenceLog.open(Path(sys.argv[1]), boot_id="b", agent_version="1", rotate_bytes=30_000)
    while True:
        head = log.append([Entry(kind="x", observed="y" * 300)] * 3)
        print(head.sequence, head.hash, flush=True)
    """
)


def test_nothing_acknowledged_is_lost_to_kill_9(tmp_path: Path) -> None:
    """Killed at any moment, the chain verifies and holds every record a caller was told about."""
    told = ChainHead(sequence=0, hash="")
    for delay_s in (0.05, 0.11, 0.02, 0.17):
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        )
        assert process.stdout is not None
        first = process.stdout.readline()
        time.sleep(delay_s)
        process.kill()
        rest = process.stdout.read().splitlines(keepends=True)
        process.stdout.close()
        process.wait()
        whole = [line for line in [first, *rest] if line.endswith("\n")]
        sequence, digest = whole[-1].split()
        told = ChainHead(sequence=int(sequence), hash=digest)
        with open_log(tmp_path):
            pass
        report = verify(tmp_path / "evidence", public_key(tmp_path), told)
        assert report.ok, report.problems


def test_verifying_needs_no_state(tmp_path: Path) -> None:
    """A copied file and a key are enough; a path that is not there is a one-line error."""
    directory = build(tmp_path)
    (file,) = directory.glob("*.jsonl")
    elsewhere = tmp_path / "copy" / "anything.jsonl"
    elsewhere.parent.mkdir()
    elsewhere.write_bytes(file.read_bytes())
    assert verify(elsewhere, public_key(tmp_path)).ok
    with pytest.raises(ConfigError, match="does not exist"):
        verify(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="no PEM public key"):
        verify(directory, b"\xff not a key")
    assert kinds(verify(tmp_path / "copy" / ".." / "keys")) == {("no_records", None)}


def test_sealed_bodies_round_trip(tmp_path: Path) -> None:
    """Sealing a decoded body again gives the same bytes and hash."""
    for line in lines_of(build(tmp_path, count=2)):
        record = decode_line(line.rstrip(b"\n"))
        assert seal(record.body) == (record.raw_body, record.actual)
