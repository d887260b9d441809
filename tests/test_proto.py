"""The wire contract: generated code is current, and what is out there stays understood."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from google.protobuf import descriptor_pb2

from alloy_agent.proto import agent_pb2 as pb
from alloy_agent.proto import keepalive, placement_pb2

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "scripts" / "generate_proto.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_proto", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def contract() -> descriptor_pb2.FileDescriptorSet:
    data = (ROOT / "proto" / "alloy.agent.v1.binpb").read_bytes()
    return descriptor_pb2.FileDescriptorSet.FromString(data)


def test_generated_code_is_current_and_compatible() -> None:
    """The committed code is what the sources give, and the sources keep the committed contract."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--check"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def changed(contract: descriptor_pb2.FileDescriptorSet) -> descriptor_pb2.FileDescriptorSet:
    copy = descriptor_pb2.FileDescriptorSet()
    copy.CopyFrom(contract)
    return copy


def message_of(
    files: descriptor_pb2.FileDescriptorSet, name: str
) -> descriptor_pb2.DescriptorProto:
    return next(one for file in files.file for one in file.message_type if one.name == name)


def test_additions_are_compatible(
    script: ModuleType, contract: descriptor_pb2.FileDescriptorSet
) -> None:
    """New fields, messages and values break nobody."""
    new = changed(contract)
    message_of(new, "Echo").field.add(name="more", number=3, type=9, label=1)
    new.file[0].message_type.add(name="Novelty")
    assert script.breaking_changes(contract, new) == []


@pytest.mark.parametrize("how", ["number", "type", "name", "gone", "message", "method", "value"])
def test_breaking_changes_are_found(
    script: ModuleType, contract: descriptor_pb2.FileDescriptorSet, how: str
) -> None:
    """A field, message, value or method that changes or goes is named."""
    new = changed(contract)
    echo = message_of(new, "Echo")
    if how == "number":
        echo.field[0].number = 100
    elif how == "type":
        echo.field[0].type = descriptor_pb2.FieldDescriptorProto.TYPE_STRING
    elif how == "name":
        echo.field[0].name = "other"
    elif how == "gone":
        del echo.field[0]
    elif how == "message":
        echo.name = "Reverberation"
    elif how == "method":
        service = next(one for file in new.file for one in file.service if one.name == "NodeAgent")
        service.method[0].server_streaming = False
    else:
        enum = next(one for file in new.file for one in file.enum_type if one.name == "Gate")
        del enum.value[-1]
    assert script.breaking_changes(contract, new)


def test_a_removed_field_may_go_when_its_number_is_reserved(
    script: ModuleType, contract: descriptor_pb2.FileDescriptorSet
) -> None:
    """Removal with a reservation is the one legal way."""
    new = changed(contract)
    echo = message_of(new, "Echo")
    del echo.field[0]
    echo.reserved_range.add(start=1, end=2)
    assert script.breaking_changes(contract, new) == []


def test_unknown_fields_survive_an_older_reader() -> None:
    """What a later version adds is carried through by one that does not know it."""
    later = pb.Echo(token=5).SerializeToString() + b"\xa0\x06\x07"
    assert pb.Echo.FromString(later).SerializeToString() == later


def test_both_ends_agree_on_keepalive() -> None:
    """The client never pings faster than the server allows, and gives up before it is forgotten."""
    client, server = dict(keepalive.client_options()), dict(keepalive.server_options())
    slowest = server["grpc.http2.min_recv_ping_interval_without_data_ms"]
    assert int(client["grpc.keepalive_time_ms"]) >= 1.5 * int(slowest)
    assert keepalive.SILENCE_S > 2 * keepalive.HEARTBEAT_S
    shared = "grpc.max_receive_message_length"
    assert client[shared] == server[shared]


def test_services_are_what_the_contract_names() -> None:
    """Brain, client and node services have the methods that others call."""
    services = pb.DESCRIPTOR.services_by_name
    assert set(services) == {"PlacementBrain", "NodeAgent"}
    attach = services["PlacementBrain"].methods_by_name["Attach"]
    assert (attach.client_streaming, attach.server_streaming) == (True, True)
    placement = placement_pb2.DESCRIPTOR.services_by_name["Placement"]
    assert {"Place", "Release", "Explain", "ListNodes", "ListLeases", "Watch"} <= set(
        placement.methods_by_name
    )
