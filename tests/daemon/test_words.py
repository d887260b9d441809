"""Words in commands: what is stored, logged and handed to keepers is bounded and in one line."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alloy_agent.daemon.words import REASON_LENGTH, SESSION_LENGTH, check_words
from alloy_agent.errors import ConfigError
from alloy_agent.proto import agent_pb2 as pb

TEXT = st.text(st.characters(exclude_categories=["Cs"]))


def commands(session: str, reason: str) -> list[pb.BrainMessage]:
    """Return every kind of command that has words, with these."""
    found = []
    for field in pb.BrainMessage.DESCRIPTOR.fields:
        if field.message_type is None:
            continue
        message = pb.BrainMessage()
        body = getattr(message, field.name)
        body.SetInParent()
        for name, text in (("session", session), ("reason", reason)):
            if name in field.message_type.fields_by_name:
                setattr(body, name, text)
        found.append(message)
    return found


@given(session=TEXT, reason=TEXT, times=st.sampled_from([1, 1, 5000]))
def test_what_passes_is_bounded_and_can_be_shown(session: str, reason: str, times: int) -> None:
    """Any words are refused with a typed error, or are short, printable and in one line."""
    for message in commands(session * times, reason * times):
        try:
            check_words(message)
        except ConfigError as exc:
            told = str(exc)
        else:
            told = ""
        assert len(told) < 500
        if told:
            continue
        body = getattr(message, str(message.WhichOneof("body")))
        kept = getattr(body, "session", ""), getattr(body, "reason", "")
        assert all(isinstance(text, str) and text.isprintable() for text in kept)
        assert len(kept[0]) <= SESSION_LENGTH
        assert len(kept[1]) <= REASON_LENGTH


def test_which_commands_have_words() -> None:
    """A session without end is refused in a rate policy, a drain and its end; plain ones pass."""
    refused = set()
    for message in commands("s" * 70_000, ""):
        try:
            check_words(message)
        except ConfigError:
            refused.add(message.WhichOneof("body"))
    assert refused == {"set_rate_policy", "drain", "undrain"}
    for message in commands("node-1", "fans are loud"):
        before = message.SerializeToString()
        check_words(message)
        assert message.SerializeToString() == before


def test_a_reason_of_several_lines_becomes_one() -> None:
    """Someone who drains a node with a note of two lines is not refused."""
    message = pb.BrainMessage(drain=pb.Drain(reason="fan 3\n\tis loud\x1b[31m"))
    check_words(message)
    assert message.drain.reason == "fan 3 is loud [31m"
    with pytest.raises(ConfigError, match="at most 2048"):
        check_words(pb.BrainMessage(drain=pb.Drain(reason="x" * 3000)))
