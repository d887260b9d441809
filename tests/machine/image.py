"""A guest's disk and kernel, made from Debian's packages: the agent is installed as the docs say.

Nothing here is kept between runs, so what is tested is always what is in the checkout. Needs root
(chroot, device nodes) and the network that the package managers use; `missing()` says what is not
there. Making it takes one to two minutes, most of it in the package manager.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.machine.wheels import ROOT, collect, run

SUITE = "bookworm"
PYTHON = "3.11"  # of the suite
MIRROR = os.environ.get("ALLOY_TEST_DEBIAN_MIRROR", "http://deb.debian.org/debian")
KERNEL = "linux-image-cloud-amd64"
PACKAGES = "systemd,systemd-sysv,udev,kmod,dbus,procps,python3,python3-venv"
MODULES = ("virtio_pci", "virtio_blk", "virtio_console", "virtio_rng")
DISK_BYTES = 4 << 30
TOOLS = ("mmdebstrap", "qemu-system-x86_64", "mke2fs", "busybox", "depmod", "unshare")


@dataclass(frozen=True)
class Image:
    """What a machine is started from."""

    kernel: Path
    initrd: Path
    disk: Path


def missing() -> str:
    """Return why no machine can be made here, or nothing."""
    if os.geteuid() != 0:
        return "not root"
    if os.uname().machine != "x86_64":
        return f"the machine is {os.uname().machine}, the image is x86_64"
    absent = [tool for tool in TOOLS if shutil.which(tool) is None]
    return f"not installed: {', '.join(absent)}" if absent else ""


def build(folder: Path) -> Image:
    """Make kernel, first file system and disk in an empty folder.

    Raises:
        StepError: A step failed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tree, wheels = folder / "tree", folder / "wheels"
    collect(wheels, PYTHON, ("pytest", "hypothesis", "jsonschema", "rfc8785", "nvidia-ml-py"))
    _debian(tree)
    kernel = _kernel(tree, folder)
    _furnish(tree, wheels)
    initrd = folder / "initrd"
    initrd.write_bytes(b"".join(_initramfs(tree, kernel.name.removeprefix("vmlinuz-"))))
    disk = folder / "disk"
    with disk.open("wb") as file:
        file.truncate(DISK_BYTES)
    run("mke2fs", "-q", "-t", "ext4", "-E", "lazy_itable_init=1", "-d", str(tree), str(disk))
    shutil.rmtree(tree)
    return Image(kernel=kernel, initrd=initrd, disk=disk)


def _debian(tree: Path) -> None:
    """Fill a folder with a small Debian that boots."""
    run(
        *("mmdebstrap", "--quiet", "--mode=root", "--variant=minbase"),
        *('--aptopt=APT::Install-Recommends "false"', "--dpkgopt=force-unsafe-io"),
        "--dpkgopt=path-exclude=/usr/share/doc/*",
        "--dpkgopt=path-exclude=/usr/share/man/*",
        "--dpkgopt=path-exclude=/usr/share/locale/*",
        f"--include={PACKAGES}",
        # The kernel's package is fetched only: its scripts would make an initrd that we do not use.
        f'--customize-hook=chroot "$1" sh -c \'cd /var/cache/apt && apt-get -qq download'
        f' $(apt-cache depends {KERNEL} | sed -n "s/ *Depends: //p")\'',
        *(SUITE, str(tree), MIRROR),
    )


def _kernel(tree: Path, folder: Path) -> Path:
    """Unpack the kernel's package, its modules into the tree; return the kernel."""
    package = next((tree / "var/cache/apt").glob("linux-image-*.deb"))
    aside = folder / "kernel"  # not over the tree, where `lib` is a link
    run("dpkg-deb", "-x", str(package), str(aside))
    package.unlink()
    shutil.move(aside / "lib/modules", tree / "usr/lib/modules")
    image = next((aside / "boot").glob("vmlinuz-*"))
    run("depmod", "-b", str(tree), image.name.removeprefix("vmlinuz-"))
    return image


def _furnish(tree: Path, wheels: Path) -> None:
    """Install the agent, with no network at all, its unit, and what does the test's commands."""
    shutil.copytree(wheels, tree / "opt/wheels")
    opt = tree / "opt"
    shutil.copy(Path(__file__).with_name("servant.py"), opt / "servant.py")
    (tree / "etc/systemd/system/servant.service").write_text(
        "[Unit]\nAfter=systemd-udev-settle.service\n"
        "[Service]\nExecStart=/usr/bin/python3 /opt/servant.py\nRestart=always\nRestartSec=1\n"
        "[Install]\nWantedBy=multi-user.target\n"
    )
    (tree / "etc/hostname").write_text("alloy-machine\n")
    (tree / "etc/fstab").write_text("/dev/vda / ext4 defaults 0 1\n")
    shutil.copy(ROOT / "systemd/alloy-agent.service", tree / "etc/systemd/system")
    for name in ("tests", "systemd", "docs", "examples", "alloy_agent", "alloy_brain"):
        ignored = shutil.ignore_patterns("__pycache__", ".*_cache")
        shutil.copytree(ROOT / name, opt / "src" / name, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", opt / "src")
    offline = "--no-index --find-links /opt/wheels"
    inside = ("unshare", "--net", "chroot", str(tree), "sh", "-ec")
    run(
        *inside,
        f"python3 -m venv /opt/installer && /opt/installer/bin/pip -q install {offline} pipx\n"
        # The documented line, with a wheelhouse in the place of an index.
        f"/opt/installer/bin/pipx install --global --quiet "
        f"--pip-args='{offline}' alloy-agent\n"
        "systemctl --quiet enable servant.service\n"
        f"python3 -m venv /opt/tests && /opt/tests/bin/pip -q install {offline} alloy-agent"
        " pytest hypothesis jsonschema rfc8785 nvidia-ml-py\n",
    )


# --- the first file system: a shell, four drivers, and the step to the disk -----------------------

_INIT = """#!/bin/busybox sh
/bin/busybox mount -t devtmpfs dev /dev
while read module; do /bin/busybox insmod /$module; done < /order
until [ -b /dev/vda ]; do /bin/busybox usleep 20000; done
/bin/busybox mount -t ext4 /dev/vda /root
/bin/busybox mount --move /dev /root/dev
exec /bin/busybox switch_root /root /lib/systemd/systemd
"""


def _initramfs(tree: Path, release: str) -> Iterator[bytes]:
    """Yield an archive that loads the disk's driver and goes over to the disk."""
    order = _modules(tree, release)
    busybox = Path(str(shutil.which("busybox"))).read_bytes()
    files: list[tuple[str, int, bytes]] = [
        ("bin", 0o040755, b""),
        ("dev", 0o040755, b""),
        ("root", 0o040755, b""),
        ("bin/busybox", 0o100755, busybox),
        ("init", 0o100755, _INIT.encode()),
        ("order", 0o100644, "".join(f"{one.name}\n" for one in order).encode()),
        *((one.name, 0o100644, one.read_bytes()) for one in order),
    ]
    for number, (name, mode, data) in enumerate(files, 1):
        yield _cpio(number, name, mode, data)
    yield _cpio(0, "TRAILER!!!", 0, b"")


def _modules(tree: Path, release: str) -> Sequence[Path]:
    """Return the drivers' files, each after what it needs."""
    found: dict[Path, None] = {}
    for name in MODULES:
        done = subprocess.run(
            ["/sbin/modprobe", "-d", str(tree), "-S", release, "--show-depends", name],
            capture_output=True,
            text=True,
            check=True,
        )
        for line in done.stdout.splitlines():
            if line.startswith("insmod "):
                found.setdefault(Path(line.split()[1]))
    return tuple(found)


def _cpio(number: int, name: str, mode: int, data: bytes) -> bytes:
    """Return one member of an archive in the "new ASCII" format."""
    fields = (number, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(name) + 1, 0)
    head = b"070701" + b"".join(b"%08X" % one for one in fields) + name.encode() + b"\0"
    return head + b"\0" * (-len(head) % 4) + data + b"\0" * (-len(data) % 4)
