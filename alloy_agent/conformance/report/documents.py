"""One audit result as JSON, SARIF 2.1.0, and an in-toto Statement in a DSSE envelope.

Source: SARIF 2.1.0 (OASIS standard), sections 3.27.9 (kind) and 3.27.10 (level); in-toto
attestation framework, Statement v1; DSSE protocol v1 (pre-authentication encoding).
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from hashlib import sha256
from typing import Any

import msgspec

from alloy_agent.conformance.checks import CHECKS
from alloy_agent.conformance.evidence import PublicKey, SigningKey
from alloy_agent.conformance.evidence.record import canonical
from alloy_agent.errors import ConfigError
from alloy_agent.model import AuditResult, Judgement, PartitionReport, Verdict

SCHEMA = "alloy.audit/v1"
SARIF_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE = "urn:alloy:isolation-conformance:v1"
PAYLOAD_TYPE = "application/vnd.in-toto+json"

KIND = {
    Verdict.PASS: "pass",
    Verdict.FAIL: "fail",
    Verdict.UNKNOWN: "open",
    Verdict.NOT_APPLICABLE: "notApplicable",
}


def to_json(result: AuditResult) -> str:
    """Return the audit document `alloy.audit/v1`, one line for each value."""
    document = {"schema": SCHEMA, **msgspec.to_builtins(result)}
    return msgspec.json.format(msgspec.json.encode(document), indent=2).decode() + "\n"


def from_json(text: str | bytes) -> AuditResult:
    """Return the result that an audit document holds.

    Raises:
        ConfigError: It is no such document.
    """
    try:
        document = msgspec.json.decode(text)
        if not isinstance(document, dict) or document.pop("schema", None) != SCHEMA:
            raise ConfigError(
                f"this is no {SCHEMA} document", cure="give what `alloy-agent audit --json` wrote"
            )
        return msgspec.convert(document, AuditResult)
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise ConfigError(
            f"audit document: {exc}", cure="give what `alloy-agent audit --json` wrote"
        ) from exc


def time_of(wall_s: float) -> str:
    """Return a wall time as RFC 3339 in UTC, to the second."""
    return datetime.fromtimestamp(wall_s, tz=UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def all_judgements(result: AuditResult) -> Iterator[tuple[Judgement, PartitionReport | None]]:
    """Yield every judgement with the partition it belongs to (None: device or node)."""
    for report in result.partitions:
        for judgement in report.judgements:
            yield judgement, report
    for judgement in result.node_judgements:
        yield judgement, None


# --- SARIF -------------------------------------------------------------------------------------


def to_sarif(result: AuditResult) -> str:
    """Return the judgements as one SARIF run: a rule for each check, a result for each verdict."""
    rules = _rules(result)
    index = {rule["id"]: number for number, rule in enumerate(rules)}
    document = {
        "$schema": SARIF_SCHEMA,
        "version": "2.1.0",
        "runs": [
            {
                "tool": {
                    "driver": {
                        "name": "alloy-agent",
                        "semanticVersion": result.agent_version,
                        "rules": rules,
                    }
                },
                "automationDetails": {"id": f"alloy-audit/{result.node}/"},
                "invocations": [
                    {
                        "executionSuccessful": True,
                        "endTimeUtc": time_of(result.taken_wall_s),
                        "machine": result.node,
                    }
                ],
                "columnKind": "utf16CodeUnits",
                "results": [
                    _result(judgement, report, index)
                    for judgement, report in all_judgements(result)
                ],
                "properties": {
                    "verdict": result.verdict.value,
                    "tiers": {r.partition.id: r.tier.value for r in result.partitions},
                    "evidenceHash": result.evidence_hash or "",
                },
            }
        ],
    }
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


def _rules(result: AuditResult) -> list[dict[str, Any]]:
    known = {check.id: check for check in CHECKS}
    claims: dict[str, str] = {}
    for judgement, _ in all_judgements(result):
        claims.setdefault(judgement.check, judgement.claim)
    rules = []
    for ident in sorted(claims):
        check = known.get(ident)
        rules.append(
            {
                "id": ident,
                "shortDescription": {"text": check.claim if check else claims[ident]},
                "defaultConfiguration": {"level": "error"},
                "properties": {
                    "supportsTiers": [tier.value for tier in check.supports] if check else [],
                    "requiredForTiers": [t.value for t in check.required_for] if check else [],
                },
            }
        )
    return rules


def _result(
    judgement: Judgement, report: PartitionReport | None, index: Mapping[str, int]
) -> dict[str, Any]:
    fingerprint = sha256(f"{judgement.check}\n{judgement.subject}".encode()).hexdigest()
    return {
        "ruleId": judgement.check,
        "ruleIndex": index[judgement.check],
        "kind": KIND[judgement.verdict],
        "level": "error" if judgement.verdict is Verdict.FAIL else "none",
        "message": {"text": _message(judgement)},
        "locations": [
            {
                "logicalLocations": [
                    {"fullyQualifiedName": str(judgement.subject), "kind": "resource"}
                ]
            }
        ],
        "partialFingerprints": {"alloyCheckAndSubject/v1": fingerprint},
        "properties": {
            "expected": judgement.expected,
            "observed": judgement.observed,
            "method": judgement.method,
            "resolution": judgement.resolution,
            "tier": report.tier.value if report else "",
            "tenant": (report.partition.tenant or "") if report else "",
            "simulated": report.simulated if report else False,
        },
    }


def _message(judgement: Judgement) -> str:
    parts = [judgement.claim]
    if judgement.expected:
        parts.append(f"Expected: {judgement.expected}.")
    if judgement.observed:
        parts.append(f"Observed: {judgement.observed}.")
    if judgement.reason:
        parts.append(f"{judgement.reason[0].upper()}{judgement.reason[1:]}.")
    return " ".join(parts)


# --- in-toto and DSSE --------------------------------------------------------------------------


def to_statement(result: AuditResult) -> dict[str, Any]:
    """Return the audit as an in-toto Statement v1: what was audited, and what was found."""
    subjects = [{"name": f"node/{result.node}", "digest": {"sha256": _digest([result.boot_id])}}]
    subjects += [
        {"name": f"partition/{r.partition.id}", "digest": {"sha256": partition_digest(r)}}
        for r in result.partitions
    ]
    return {
        "_type": STATEMENT_TYPE,
        "subject": subjects,
        "predicateType": PREDICATE_TYPE,
        "predicate": {
            "auditedAt": time_of(result.taken_wall_s),
            "agentVersion": result.agent_version,
            "bootId": result.boot_id,
            "snapshotSequence": result.sequence,
            "mode": result.mode,
            "verdict": result.verdict.value,
            "evidenceHead": {
                "sequence": result.evidence_sequence,
                "sha256": result.evidence_hash,
            },
            "partitions": [_predicate(report) for report in result.partitions],
            "node": [_check(judgement) for judgement in result.node_judgements],
            "residualClasses": [msgspec.to_builtins(c) for c in result.residual_classes],
        },
    }


def partition_digest(report: PartitionReport) -> str:
    """Return the digest that names one incarnation of a partition in the hands of one tenant."""
    p = report.partition
    return _digest([p.device, p.id, p.incarnation, str(p.generation), p.tenant or ""])


def _digest(words: list[str]) -> str:
    return sha256(canonical(words)).hexdigest()


def _predicate(report: PartitionReport) -> dict[str, Any]:
    return {
        "partition": report.partition.id,
        "device": report.partition.device,
        "generation": report.partition.generation,
        "tenant": report.partition.tenant,
        "tier": report.tier.value,
        "reason": report.reason,
        "simulated": report.simulated,
        "checks": [_check(judgement) for judgement in report.judgements],
        "residual": list(report.residual),
    }


def _check(judgement: Judgement) -> dict[str, Any]:
    builtins: dict[str, Any] = msgspec.to_builtins(judgement)
    return builtins


def to_dsse(result: AuditResult, key: SigningKey) -> str:
    """Return the statement in a DSSE envelope, signed with the node's key."""
    payload = json.dumps(to_statement(result), separators=(",", ":"), sort_keys=True).encode()
    envelope = {
        "payload": base64.b64encode(payload).decode("ascii"),
        "payloadType": PAYLOAD_TYPE,
        "signatures": [
            {"keyid": key.public.id, "sig": key.sign(pre_authentication(payload), context=b"")}
        ],
    }
    return json.dumps(envelope, indent=2) + "\n"


def pre_authentication(payload: bytes, payload_type: str = PAYLOAD_TYPE) -> bytes:
    """Return DSSE's encoding of what is signed."""
    kind = payload_type.encode()
    return b"DSSEv1 %d %s %d %s" % (len(kind), kind, len(payload), payload)


def open_dsse(envelope: str | bytes, key: PublicKey) -> dict[str, Any]:
    """Return the statement of an envelope whose signature is the key's.

    Raises:
        ConfigError: It is no such envelope, or nobody with this key signed it.
    """
    try:
        document = json.loads(envelope)
        payload = base64.b64decode(document["payload"], validate=True)
        message = pre_authentication(payload, document["payloadType"])
        signatures = [str(entry["sig"]) for entry in document["signatures"]]
        statement = json.loads(payload)
    except (ValueError, KeyError, TypeError, AttributeError) as exc:
        raise ConfigError(
            "this is no DSSE envelope of an audit", cure="give what `audit --dsse` wrote"
        ) from exc
    if not any(key.verifies(signature, message, context=b"") for signature in signatures):
        raise ConfigError(
            "the envelope is not signed by this key", cure="ask its sender which key made it"
        )
    if not isinstance(statement, dict):
        raise ConfigError("the envelope holds no statement", cure="give what `audit --dsse` wrote")
    return statement
