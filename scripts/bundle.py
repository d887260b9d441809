"""Collect everything that a host or a build without a network needs to install the agent.

    python scripts/bundle.py wheels wheels [--python 3.13] [--machine x86_64]
    python scripts/bundle.py pack alloy-agent-bundle.tar.gz --wheels wheels [--image image.tar]

`wheels` makes a folder with the agent's wheel and exactly the locked versions that it needs, in
`requirements.txt` with the hash of each file; pip and pipx, in `tools.txt`; and `sbom.cdx.json`
(CycloneDX 1.6) of what the agent needs. The Dockerfile builds from that folder with no network.
`pack` puts it into one archive together with unit file, manifests, chart, this version's
documentation and, if given, an image archive. The wheel brings the launch gate, built by this
host's C compiler: collect on a system whose C library is no newer than the nodes'. Both are
reproducible: the same checkout, compiler and SOURCE_DATE_EPOCH give the same bytes.

Needs pip with a network (or `--find-links` in PIP_FIND_LINKS) and `pip install cyclonedx-bom`.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
SOURCES: Final = ("alloy_agent", "alloy_brain")
FILES: Final = ("pyproject.toml", "README.md", "LICENSE", "requirements.lock")
# What manylinux tags an interpreter of Debian 12 or later takes.
LEVELS: Final = ("manylinux2014", "manylinux_2_28", "manylinux_2_34")
TOOLS: Final = ("pip", "pipx")
PACKED: Final = ("systemd", "deploy", "docs", "examples", "LICENSE", "README.md", "CHANGELOG.md")
NOTE: Final = """Install on a host, with no network:

    sha256sum --check SHA256SUMS
    python3 -m venv /opt/alloy
    /opt/alloy/bin/pip install --no-index --find-links wheels --require-hashes --no-deps \\
        --requirement wheels/requirements.txt
    ln -s /opt/alloy/bin/alloy-agent /usr/local/bin/alloy-agent
    install -m 0644 systemd/alloy-agent.service /etc/systemd/system/
    alloy-agent doctor
    systemctl daemon-reload && systemctl enable --now alloy-agent

On a cluster: load image.tar (`ctr -n k8s.io images import image.tar`, `podman load -i image.tar`)
on each node or into your registry, then `kubectl apply -k deploy/daemonset/overlays/...`
(docs/kubernetes.md).
"""


class BundleError(Exception):
    """A step failed: its words."""


def main(argv: list[str] | None = None) -> int:
    """Make what was asked for; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    commands = parser.add_subparsers(dest="command", required=True)
    wheels = commands.add_parser("wheels", help="a folder to install from")
    wheels.add_argument("folder", type=Path)
    wheels.add_argument("--python", default="3.13", help="version of the interpreter there")
    wheels.add_argument("--machine", default="x86_64", choices=("x86_64", "aarch64"))
    pack = commands.add_parser("pack", help="one archive of all")
    pack.add_argument("archive", type=Path)
    pack.add_argument("--wheels", type=Path, required=True)
    pack.add_argument("--image", type=Path, help="as `podman save` or `docker save` writes it")
    arguments = parser.parse_args(argv)
    try:
        if arguments.command == "wheels":
            make_wheels(arguments.folder, arguments.python, arguments.machine)
        else:
            make_archive(arguments.archive, arguments.wheels, arguments.image)
    except BundleError as exc:
        print(f"bundle: {exc}", file=sys.stderr)  # noqa: T201
        return 1
    return 0


def make_wheels(folder: Path, python: str, machine: str) -> None:
    """Fill a folder that is empty or new.

    Raises:
        BundleError: It is not empty, or a tool failed.
    """
    if folder.is_dir() and any(folder.iterdir()):
        raise BundleError(f"{folder}: is not empty: give a new folder")
    folder.mkdir(parents=True, exist_ok=True)
    pip = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch) / "source"
        source.mkdir()
        for name in SOURCES:
            ignored = shutil.ignore_patterns("__pycache__", ".*_cache")
            shutil.copytree(ROOT / name, source / name, ignore=ignored)
        for name in FILES:
            shutil.copy(ROOT / name, source / name)
        _gate(source, machine)
        _run(*pip, "wheel", "--no-deps", "--wheel-dir", str(folder), str(source))
    (wheel,) = folder.glob("alloy_agent-*.whl")
    platforms = [w for level in LEVELS for w in ("--platform", f"{level}_{machine}")]
    fetch = (
        *(*pip, "download", "--dest", str(folder), "--only-binary", ":all:"),
        *("--python-version", python, *platforms, "--constraint", str(ROOT / "requirements.lock")),
    )
    _run(*fetch, str(wheel))
    needed = set(folder.glob("*.whl"))
    (folder / "requirements.txt").write_text(_pinned(needed))
    _run(*fetch, *TOOLS)
    (folder / "tools.txt").write_text(_pinned(set(folder.glob("*.whl")) - needed))
    _sbom(folder / "requirements.txt", folder / "sbom.cdx.json")


def _gate(source: Path, machine: str) -> None:
    """Build the launch gate into the package, so that its nodes need no compiler."""
    lacks = "" if shutil.which("cc") or shutil.which("gcc") else "no C compiler here"
    if machine != os.uname().machine:
        lacks = f"this machine is {os.uname().machine}"
    if lacks:
        print(f"bundle: {lacks}: nodes build the launch gate themselves", file=sys.stderr)  # noqa: T201
        return
    _run("env", "-C", str(source), sys.executable, "-m", "alloy_agent.conformance.gate.build")


def _pinned(wheels: set[Path]) -> str:
    lines = []
    for wheel in sorted(wheels):
        name, version = wheel.name.split("-")[:2]
        lines.append(f"{name.replace('_', '-')}=={version} --hash=sha256:{_digest(wheel)}\n")
    return "".join(lines)


def _sbom(requirements: Path, target: Path) -> None:
    tool = (sys.executable, "-m", "cyclonedx_py")
    _run(
        *(*tool, "requirements", "--output-reproducible", "--spec-version", "1.6"),
        *("--pyproject", str(ROOT / "pyproject.toml"), "--mc-type", "application"),
        *("--output-file", str(target), str(requirements)),
        cure="pip install cyclonedx-bom",
    )


def make_archive(archive: Path, wheels: Path, image: Path | None) -> None:
    """Write the archive, whole or not at all.

    Raises:
        BundleError: The folder of wheels is none, or something cannot be read or written.
    """
    if not (wheels / "requirements.txt").is_file():
        raise BundleError(f"{wheels}: no folder of wheels: make it with `bundle.py wheels`")
    members: dict[str, Path] = {}
    for name in PACKED:
        members.update(_members(ROOT / name, name))
    members.update(_members(wheels, "wheels"))
    if image is not None:
        members["image.tar"] = image
    part = archive.with_name(archive.name + ".part")
    try:
        with tempfile.TemporaryDirectory() as scratch:
            made = {"INSTALL.txt": NOTE, "SHA256SUMS": _sums(members)}
            for name, text in made.items():
                (Path(scratch) / name).write_text(text)
                members[name] = Path(scratch) / name
            _write(part, members)
        part.replace(archive)
    except OSError as exc:
        part.unlink(missing_ok=True)
        raise BundleError(f"{archive}: {exc.strerror or exc}") from exc


def _members(path: Path, name: str) -> dict[str, Path]:
    if path.is_file():
        return {name: path}
    found = sorted(p for p in path.rglob("*") if p.is_file() and "__pycache__" not in p.parts)
    return {f"{name}/{p.relative_to(path)}": p for p in found}


def _sums(members: dict[str, Path]) -> str:
    return "".join(f"{_digest(path)}  {name}\n" for name, path in sorted(members.items()))


def _write(target: Path, members: dict[str, Path]) -> None:
    """Write a tar archive in which nothing depends on when or by whom it was made."""
    epoch = int(os.environ.get("SOURCE_DATE_EPOCH", "0"))
    with (
        target.open("wb") as raw,
        gzip.GzipFile(filename="", fileobj=raw, mode="wb", mtime=epoch) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tar,
    ):
        for name, path in sorted(members.items()):
            info = tarfile.TarInfo(f"alloy-agent/{name}")
            info.size, info.mtime, info.mode = path.stat().st_size, epoch, 0o644
            with path.open("rb") as content:
                tar.addfile(info, content)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _run(*argv: str, cure: str = "") -> None:
    done = subprocess.run(argv, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode != 0:
        words = (done.stderr or done.stdout).strip()[-1500:]
        hint = f"\n{cure}" if cure else ""
        raise BundleError(f"{' '.join(argv[:5])}: exit code {done.returncode}: {words}{hint}")


if __name__ == "__main__":
    sys.exit(main())
