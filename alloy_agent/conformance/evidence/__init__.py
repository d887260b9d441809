"""The evidence chain: append-only records, hashed, chained and signed, that verify offline.

`record` is the format, `keys` the signing key, `log` the writer, `verify` the reader that needs
no agent.
"""

from alloy_agent.conformance.evidence.keys import PublicKey, SigningKey
from alloy_agent.conformance.evidence.log import EvidenceLog
from alloy_agent.conformance.evidence.record import ChainHead, Entry
from alloy_agent.conformance.evidence.verify import EvidenceProblem, VerifyReport, verify

__all__ = [
    "ChainHead",
    "Entry",
    "EvidenceLog",
    "EvidenceProblem",
    "PublicKey",
    "SigningKey",
    "VerifyReport",
    "verify",
]
