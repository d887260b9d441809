"""Regenerate `alloy_agent/proto` from `proto/`, or check that it is current and compatible.

The committed descriptor set (`proto/alloy.agent.v1.binpb`) is the contract that is out there.
`--check` fails when the generated code differs from the sources, or when the sources break that
contract. A normal run refuses to overwrite the descriptor set with an incompatible one unless
`--break` is given.

Generated modules carry guards that tie them to the exact versions of protoc and grpcio that made
them. The project supports older runtimes (tests run on the oldest), so the guards are cut out;
everything else is left as it is.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from google.protobuf import descriptor_pb2

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "proto"
PACKAGE = ROOT / "alloy_agent" / "proto"
DESCRIPTORS = SOURCES / "alloy.agent.v1.binpb"
GENERATED = ("*_pb2.py", "*_pb2.pyi", "*_pb2_grpc.py", "*_pb2_grpc.pyi")


def main(argv: list[str] | None = None) -> int:
    """Return 0 when the generated code is (now) current and compatible."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing, fail on a difference")
    parser.add_argument(
        "--break", dest="breaking", action="store_true", help="accept an incompatible change"
    )
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="alloy-proto-") as folder:
        fresh = Path(folder)
        _generate(fresh)
        problems = _incompatibilities(fresh / "descriptors.binpb")
        if options.check:
            problems += _differences(fresh)
        elif options.breaking or not problems:
            problems = []
            _install(fresh)
    for problem in problems:
        print(problem, file=sys.stderr)  # noqa: T201
    return 1 if problems else 0


def _generate(fresh: Path) -> None:
    """Write modules, stubs and the descriptor set for all sources into `fresh`."""
    out = fresh / "out"
    out.mkdir()
    for folder in ("alloy", "kubernetes"):  # only the first is a contract of our own
        found = sorted(SOURCES.glob(f"{folder}/**/*.proto"))
        files = [str(path.relative_to(SOURCES)) for path in found]
        _compile(out, files, fresh / ("descriptors.binpb" if folder == "alloy" else "others.binpb"))
    for pattern in GENERATED:
        for path in out.rglob(pattern):
            (fresh / path.name).write_text(_localised(path.read_text()))


def _compile(out: Path, files: list[str], descriptors: Path) -> None:
    plugin_path = Path(sys.executable).parent
    command = [
        sys.executable, "-m", "grpc_tools.protoc", f"-I{SOURCES}",
        f"--plugin=protoc-gen-mypy={plugin_path / 'protoc-gen-mypy'}",
        f"--plugin=protoc-gen-mypy_grpc={plugin_path / 'protoc-gen-mypy_grpc'}",
        f"--python_out={out}", f"--grpc_python_out={out}",
        f"--mypy_out=quiet:{out}", f"--mypy_grpc_out=quiet:{out}",
        f"--descriptor_set_out={descriptors}",
        *files,
    ]  # fmt: skip
    subprocess.run(command, check=True)


def _localised(text: str) -> str:
    """Return generated code that imports from the package and runs on every supported runtime."""
    place = r"(?:alloy\.agent\.v1|kubernetes)"
    text = re.sub(rf"^from {place} import", "from alloy_agent.proto import", text, flags=re.M)
    text = re.sub(
        rf"^import {place}\.(\w+)$", r"from alloy_agent.proto import \1", text, flags=re.M
    )
    text = re.sub(rf"\b{place}\.(\w+_pb2)\.", r"\1.", text)
    text = re.sub(r"^# Protobuf Python Version: .*\n", "", text, flags=re.M)
    text = re.sub(r"^from google\.protobuf import runtime_version as .*\n", "", text, flags=re.M)
    text = re.sub(
        r"^_runtime_version\.ValidateProtobufRuntimeVersion\(\n(?:.*\n)*?\)\n", "", text, flags=re.M
    )
    text = re.sub(r"^import warnings\n", "", text, flags=re.M)
    return re.sub(
        r"^GRPC_GENERATED_VERSION = .*\n(?:.*\n)*?^if _version_not_supported:\n"
        r"(?:    .*\n|        .*\n)*",
        "", text, flags=re.M,
    )  # fmt: skip


def _incompatibilities(fresh: Path) -> list[str]:
    """Return what the new descriptors break of the committed ones."""
    if not DESCRIPTORS.exists():
        return []
    old = descriptor_pb2.FileDescriptorSet.FromString(DESCRIPTORS.read_bytes())
    new = descriptor_pb2.FileDescriptorSet.FromString(fresh.read_bytes())
    return breaking_changes(old, new)


def breaking_changes(old: object, new: object) -> list[str]:
    """Return one line for each thing that `new` takes from `old` (both FileDescriptorSets).

    Breaking is: a message, enum, service or method that is gone or has another type; a field
    whose number, type, label, name or oneof changed; a field or value that is gone without its
    number being reserved.
    """
    before, after = _flatten(old), _flatten(new)
    problems = []
    for name, was in before.items():
        if name.endswith("!"):  # what was reserved may be used
            continue
        now = after.get(name)
        if now is None:
            if f"{name}!" not in after:
                problems.append(f"{name}: is gone, was {was}; keep it, or reserve its number")
        elif now != was:
            problems.append(f"{name}: was {was}, is {now}; give the new meaning a new number")
    return problems


def _flatten(files: object) -> dict[str, str]:
    """Return every name of the contract with its shape; a reserved number has one too."""
    shapes: dict[str, str] = {}
    for file in files.file:  # type: ignore[attr-defined]
        for message in file.message_type:
            _flatten_message(f"{file.package}.{message.name}", message, shapes)
        for enum in file.enum_type:
            for value in enum.value:
                shapes[f"{file.package}.{enum.name}#{value.number}"] = value.name
        for service in file.service:
            for method in service.method:
                streams = f"{method.client_streaming:d}{method.server_streaming:d}"
                name = f"{file.package}.{service.name}/{method.name}"
                shapes[name] = f"{method.input_type} -> {method.output_type} streams {streams}"
    return shapes


def _flatten_message(prefix: str, message: object, shapes: dict[str, str]) -> None:
    """Add one message, its fields and everything nested in it."""
    shapes[prefix] = "message"
    for field in message.field:  # type: ignore[attr-defined]
        oneof = ""
        if field.HasField("oneof_index"):
            oneof = message.oneof_decl[field.oneof_index].name  # type: ignore[attr-defined]
        kind = f"{field.type} {field.type_name} label {field.label}"
        shapes[f"{prefix}#{field.number}"] = f"{field.name} type {kind} {oneof}".strip()
    for span in message.reserved_range:  # type: ignore[attr-defined]
        for number in range(span.start, span.end):
            shapes[f"{prefix}#{number}!"] = "reserved"
    for nested in message.nested_type:  # type: ignore[attr-defined]
        _flatten_message(f"{prefix}.{nested.name}", nested, shapes)
    for enum in message.enum_type:  # type: ignore[attr-defined]
        for value in enum.value:
            shapes[f"{prefix}.{enum.name}#{value.number}"] = value.name


def _differences(fresh: Path) -> list[str]:
    """Return one line for each committed file that is not what the sources give."""
    problems = []
    for path in _generated_in(fresh):
        committed = PACKAGE / path.name
        if not committed.exists() or committed.read_text() != path.read_text():
            problems.append(
                f"{committed.relative_to(ROOT)}: is not current; run {Path(__file__).name}"
            )
    names = {path.name for path in _generated_in(fresh)}
    problems += [
        f"{path.relative_to(ROOT)}: has no source"
        for path in _generated_in(PACKAGE)
        if path.name not in names
    ]
    if (
        not DESCRIPTORS.exists()
        or DESCRIPTORS.read_bytes() != (fresh / "descriptors.binpb").read_bytes()
    ):
        problems.append(
            f"{DESCRIPTORS.relative_to(ROOT)}: is not current; run {Path(__file__).name}"
        )
    return problems


def _install(fresh: Path) -> None:
    """Replace the committed files by the fresh ones."""
    for path in _generated_in(PACKAGE):
        path.unlink()
    for path in _generated_in(fresh):
        shutil.copyfile(path, PACKAGE / path.name)
    shutil.copyfile(fresh / "descriptors.binpb", DESCRIPTORS)


def _generated_in(folder: Path) -> list[Path]:
    return sorted(path for pattern in GENERATED for path in folder.glob(pattern))


if __name__ == "__main__":
    sys.exit(main())
