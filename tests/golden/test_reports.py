"""Reports of one known audit, compared with what was read and approved before.

After an intended change: `ALLOY_GOLDEN=write pytest tests/golden`, then read the difference.
"""

from __future__ import annotations

import base64
import json
import os
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest

from alloy_agent.conformance import report
from alloy_agent.conformance.checks import judge, residual_table, worst
from alloy_agent.conformance.evidence import EvidenceLog, SigningKey
from alloy_agent.conformance.recording import Recorder
from alloy_agent.conformance.report import Event
from alloy_agent.errors import ConfigError
from alloy_agent.model import AuditResult, TenantId, Verdict
from tests.conformance.world import CPU_PIECE, INTENT, NEURON_PIECE, SNAPSHOT, facts

HERE = Path(__file__).parent
HOSTILE = '<script>alert("x")</script>&[red]\\'


def audited() -> AuditResult:
    """Return an audit with passes, a failure by a hostile process name, and an unknown."""
    member = {"pid": 10, "comm": HOSTILE, "uid": 0, "cpus": [0, 1, 2]}
    seen = tuple(
        fact
        for fact in facts({(CPU_PIECE.id, "cgroup.members"): [member]})
        if (fact.subject, fact.name) != (NEURON_PIECE.id, "neuron.cores")
    )
    reports, node = judge(SNAPSHOT, seen, INTENT)
    return AuditResult(
        node="node-7",
        boot_id=SNAPSHOT.boot_id,
        sequence=SNAPSHOT.sequence,
        taken_at_s=100.0,
        taken_wall_s=SNAPSHOT.taken_wall_s,
        agent_version="1.2.3",
        verdict=worst(reports, node),
        devices=SNAPSHOT.devices,
        partitions=reports,
        node_judgements=node,
        residual_classes=residual_table(reports),
        evidence_sequence=42,
        evidence_hash="ab" * 32,
        mode="events",
    )


HISTORY = (
    Event(
        sequence=41,
        wall_s=1_799_999_990.0,
        kind="judgement",
        subject=CPU_PIECE.id,
        check="CPU-03",
        verdict="fail",
        text=f"observed {HOSTILE}",
    ),
    Event(
        sequence=40,
        wall_s=1_799_999_000.0,
        kind="gap",
        subject="",
        check="",
        verdict="",
        text="restart",
    ),
)


def compare(name: str, text: str) -> None:
    """Compare with the approved file, or approve it."""
    path = HERE / name
    if os.environ.get("ALLOY_GOLDEN") == "write":
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8"), f"{name} differs"


def test_table() -> None:
    """The table is as approved, plain in a pipe, and never wider than 100 columns."""
    text = report.to_table(audited(), colour=False)
    compare("audit.txt", text)
    assert max(map(len, text.splitlines())) <= 100
    assert "\x1b" not in text
    assert HOSTILE in text.replace("\n", "")


def test_table_in_colour_says_the_same() -> None:
    """Colours add nothing but colours."""
    coloured = report.to_table(audited(), colour=True)
    assert "\x1b[" in coloured
    plain = re.sub(r"\x1b\[[0-9;]*m", "", coloured)
    assert plain.split() == report.to_table(audited(), colour=False).split()


def test_nothing_steers_the_terminal() -> None:
    """Escape sequences in what others named are shown, not sent."""
    result = audited()
    judgement = msgspec.structs.replace(
        result.partitions[0].judgements[0], verdict=Verdict.FAIL, observed="\x1b]0;title\x07\r\n"
    )
    one = msgspec.structs.replace(
        result.partitions[0], judgements=(judgement,), reason="\x1b[2J cleared"
    )
    hostile = msgspec.structs.replace(result, partitions=(one,), node="\x1b[31mred")
    text = report.to_table(hostile, colour=False)
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "\\x1b" in text


def test_what_fails_alike_is_told_once_with_short_names() -> None:
    """Nine pieces of one GPU that fail in the same way are one entry, and ids stay unbroken."""
    result = audited()
    report_, device = result.partitions[0], result.devices[0]
    uuid = "GPU-29f7be15-b41a-57ec-8e9d-406335e59932"
    many = []
    for start in range(9):
        piece = msgspec.structs.replace(report_.partition, id=f"{uuid}/1g.10gb@{start}")
        fail = msgspec.structs.replace(
            report_.judgements[0],
            subject=piece.id,
            verdict=Verdict.FAIL,
            observed=f"{uuid} differs",
        )
        many.append(msgspec.structs.replace(report_, partition=piece, judgements=(fail,)))
    wide = msgspec.structs.replace(
        result,
        devices=(msgspec.structs.replace(device, id=uuid),),
        partitions=tuple(many),
        node_judgements=(),
    )
    text = report.to_table(wide, colour=False)
    assert text.count(f"FAIL {many[0].judgements[0].check} ") == 1
    assert "and 3 more: " in " ".join(text.split())
    assert "GPU-29f7be15/1g.10gb@8" in text
    assert "observed  GPU-29f7be15 differs" in text
    assert uuid not in "".join(text.split())


def test_json() -> None:
    """The document is as approved and reads back as the same result."""
    text = report.to_json(audited())
    compare("audit.json", text)
    document = json.loads(text)
    assert document["schema"] == "alloy.audit/v1"
    assert report.from_json(text) == audited()


@pytest.mark.parametrize("text", ["", "[]", '{"schema":"other/v1"}', '{"schema":"alloy.audit/v1"}'])
def test_other_documents_are_refused(text: str) -> None:
    """What is no audit document gives one line."""
    with pytest.raises(ConfigError):
        report.from_json(text)


SARIF: dict[str, Any] = {
    "type": "object",
    "required": ["version", "runs"],
    "properties": {
        "version": {"const": "2.1.0"},
        "runs": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["tool", "results"],
                "properties": {
                    "tool": {
                        "type": "object",
                        "required": ["driver"],
                        "properties": {
                            "driver": {
                                "type": "object",
                                "required": ["name", "rules"],
                                "properties": {
                                    "rules": {
                                        "type": "array",
                                        "uniqueItems": True,
                                        "items": {
                                            "type": "object",
                                            "required": ["id"],
                                            "properties": {
                                                "shortDescription": {"required": ["text"]}
                                            },
                                        },
                                    }
                                },
                            }
                        },
                    },
                    "results": {
                        "type": "array",
                        "items": {
                            "type": "object",
                            "required": ["message", "ruleId", "kind", "level"],
                            "properties": {
                                "message": {"type": "object", "required": ["text"]},
                                "kind": {"enum": ["pass", "fail", "open", "notApplicable"]},
                                "level": {"enum": ["error", "none"]},
                                "locations": {
                                    "items": {"required": ["logicalLocations"]},
                                    "minItems": 1,
                                },
                                "partialFingerprints": {"additionalProperties": {"type": "string"}},
                            },
                            # section 3.27.10: a level other than "none" belongs to kind "fail"
                            "if": {"properties": {"kind": {"const": "fail"}}},
                            "then": {"properties": {"level": {"const": "error"}}},
                            "else": {"properties": {"level": {"const": "none"}}},
                        },
                    },
                },
            },
        },
    },
}


# The names that SARIF 2.1.0 has for what we write (sections 3.13 to 3.52): it allows no others, so
# a slip in one makes the log invalid.
SARIF_NAMES: dict[str, set[str]] = {
    "log": {"$schema", "version", "runs", "inlineExternalProperties", "properties"},
    "run": {
        "tool", "invocations", "conversion", "language", "versionControlProvenance",
        "originalUriBaseIds", "artifacts", "logicalLocations", "graphs", "results",
        "automationDetails", "runAggregates", "baselineGuid", "redactionTokens",
        "defaultEncoding", "defaultSourceLanguage", "newlineSequences", "columnKind",
        "properties",
    },
    "driver": {
        "guid", "name", "organization", "product", "fullName", "version", "semanticVersion",
        "informationUri", "downloadUri", "rules", "notifications", "taxa", "properties",
        "shortDescription", "fullDescription", "releaseDateUtc", "language",
    },
    "rule": {
        "id", "guid", "name", "shortDescription", "fullDescription", "messageStrings",
        "defaultConfiguration", "helpUri", "help", "relationships", "properties",
        "deprecatedIds",
    },
    "result": {
        "ruleId", "ruleIndex", "rule", "kind", "level", "message", "analysisTarget",
        "locations", "guid", "correlationGuid", "occurrenceCount", "partialFingerprints",
        "fingerprints", "relatedLocations", "suppressions", "baselineState", "rank",
        "properties", "hostedViewerUri",
    },
    "location": {"id", "physicalLocation", "logicalLocations", "message", "properties"},
    "logical": {"name", "index", "fullyQualifiedName", "decoratedName", "parentIndex", "kind"},
}  # fmt: skip


def _named(kind: str, *objects: dict[str, Any]) -> None:
    for found in objects:
        assert set(found) <= SARIF_NAMES[kind], (kind, set(found) - SARIF_NAMES[kind])


def test_sarif() -> None:
    """The SARIF log is as approved and in the standard's shape; each result names its rule."""
    text = report.to_sarif(audited())
    compare("audit.sarif", text)
    document = json.loads(text)
    jsonschema.validate(document, SARIF)
    _named("log", document)
    _named("run", *document["runs"])
    for one in document["runs"]:
        _named("driver", one["tool"]["driver"])
        _named("rule", *one["tool"]["driver"]["rules"])
        _named("result", *one["results"])
        places = [place for found in one["results"] for place in found["locations"]]
        _named("location", *places)
        _named("logical", *(logical for place in places for logical in place["logicalLocations"]))
        assert all(one["tool"]["driver"]["rules"][r["ruleIndex"]] for r in one["results"])
    (run,) = document["runs"]
    rules = [rule["id"] for rule in run["tool"]["driver"]["rules"]]
    results = run["results"]
    assert all(rules[entry["ruleIndex"]] == entry["ruleId"] for entry in results)
    prints = [tuple(entry["partialFingerprints"].values()) for entry in results]
    assert len(set(prints)) == len(prints)


def test_fingerprints_outlive_a_verdict() -> None:
    """A result keeps its fingerprint when its verdict changes, so that viewers track it."""
    result = audited()
    first = json.loads(report.to_sarif(result))["runs"][0]["results"][0]
    one = result.partitions[0]
    judgements = (
        msgspec.structs.replace(one.judgements[0], verdict=Verdict.FAIL),
        *one.judgements[1:],
    )
    changed = msgspec.structs.replace(
        result,
        partitions=(
            msgspec.structs.replace(one, judgements=judgements),
            *result.partitions[1:],
        ),
    )
    second = json.loads(report.to_sarif(changed))["runs"][0]["results"][0]
    assert first["partialFingerprints"] == second["partialFingerprints"]
    assert first["kind"] != second["kind"]


def test_dsse() -> None:
    """The envelope holds an in-toto statement that only the node's key opens."""
    key = SigningKey.generate()
    envelope = report.to_dsse(audited(), key)
    statement = report.open_dsse(envelope, key.public)
    assert statement == report.to_statement(audited())
    assert statement["_type"] == "https://in-toto.io/Statement/v1"
    assert len(statement["subject"]) == len(audited().partitions) + 1
    assert statement["predicate"]["verdict"] == "fail"
    with pytest.raises(ConfigError, match="not signed by this key"):
        report.open_dsse(envelope, SigningKey.generate().public)
    forged = json.loads(envelope)
    payload = base64.b64decode(forged["payload"]).replace(b'"verdict":"fail"', b'"verdict":"pass"')
    forged["payload"] = base64.b64encode(payload).decode()
    with pytest.raises(ConfigError, match="not signed by this key"):
        report.open_dsse(json.dumps(forged), key.public)
    for bad in ("", "{}", '{"payload":1}', "[]"):
        with pytest.raises(ConfigError):
            report.open_dsse(bad, key.public)


def test_a_statement_names_the_incarnation() -> None:
    """A partition made anew, or in other hands, is another subject."""
    result = audited()
    one = result.partitions[0]

    def subject(**changes: Any) -> str:
        partition = msgspec.structs.replace(one.partition, **changes)
        changed = msgspec.structs.replace(
            result, partitions=(msgspec.structs.replace(one, partition=partition),)
        )
        return str(report.to_statement(changed)["subject"][1]["digest"]["sha256"])

    digests = {
        subject(),
        subject(generation=2),
        subject(incarnation="two"),
        subject(tenant=TenantId("x")),
    }
    assert len(digests) == 4


class Page(HTMLParser):
    """Collects what a page would load or run, its text, and unclosed elements."""

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.open: list[str] = []
        self.ids: list[str] = []
        self.targets: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note what a tag does."""
        if tag in {"script", "link", "img", "iframe", "object", "embed", "form"}:
            self.loads.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            if name == "href" and (value or "").startswith("#"):
                self.targets.append((value or "")[1:])
            elif name in {"href", "src", "style"} or name.startswith("on"):
                self.loads.append(f"{tag} {name}={value}")
        if tag not in {"meta", "br"}:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        """Close a tag."""
        assert self.open.pop() == tag


def test_html() -> None:
    """The page is as approved, well-formed, loads nothing, and escapes hostile names."""
    text = report.to_html(audited(), HISTORY)
    compare("audit.html", text)
    page = Page()
    page.feed(text)
    assert page.loads == []
    assert page.open == []
    assert len(set(page.ids)) == len(page.ids)
    assert set(page.targets) <= set(page.ids)
    assert "<script" not in text
    assert "&lt;script&gt;" in text
    assert "url(" not in text
    assert "@import" not in text


def test_an_empty_node_has_reports_too() -> None:
    """Without partitions every report is still whole."""
    empty = msgspec.structs.replace(
        audited(),
        partitions=(),
        node_judgements=(),
        residual_classes=(),
        devices=(),
        evidence_sequence=None,
        evidence_hash=None,
        mode="once",
        verdict=Verdict.PASS,
    )
    assert "no partitions" in report.to_table(empty)
    page = Page()
    page.feed(report.to_html(empty))
    assert page.open == []
    assert json.loads(report.to_sarif(empty))["runs"][0]["results"] == []
    assert len(report.to_statement(empty)["subject"]) == 1


def test_history_comes_from_the_chain(tmp_path: Path) -> None:
    """What was recorded is what a report's history shows, newest first."""
    with EvidenceLog.open(tmp_path, boot_id="b", agent_version="1") as log:
        Recorder(None, log).record(audited())
    events = report.history_of(tmp_path / "evidence")
    assert events[0].kind == "stop"
    assert events[-1].kind == "start"
    failed = next(e for e in events if e.check == "CPU-03" and e.verdict == "fail")
    assert HOSTILE.replace("\\", "") in failed.text.replace("\\", "")
    assert "fail" in report.to_html(audited(), events)
    (tmp_path / "evidence" / "evidence-999999999999.jsonl").write_bytes(b"\xff\n{}\n")
    assert report.history_of(tmp_path / "evidence") == events
