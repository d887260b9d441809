"""A real kubelet with a real container runtime, on this host, in folders of their own.

containerd runs in a mount namespace of its own, where `/dev` also has the nodes of accelerators
that are not here: copies of `/dev/null`. No registry is reached: the image is made of busybox.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import tarfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Self

from tests.kubernetes.cluster import WITH_US, Cluster, _ports, program

BUSYBOX: Final = "/bin/busybox"
IMAGE: Final = "localhost/busybox:1"
PAUSE: Final = "localhost/pause:1"
NODES: Final = (
    "nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset",
    "kfd", *(f"dri/renderD{n}" for n in range(128, 136)), *(f"neuron{n}" for n in range(16)),
    *(f"nvidia{n}" for n in range(8)),
    *(f"nvidia-caps/nvidia-cap{n}" for n in range(1, 300)),
)  # fmt: skip
HELD: Final = ("cpu", "cpuacct", "cpuset", "memory", "devices", "freezer", "blkio", "pids",
               "systemd", "unified", "")  # fmt: skip


def lacking() -> str:
    """Return why no kubelet can run here with a runtime that knows CDI, or nothing."""
    if os.geteuid() != 0:
        return "a kubelet needs root"
    for name in ("kubelet", "containerd", "containerd-shim-runc-v2", "ctr"):
        if program(name) is None:
            return f"no {name} beside kube-apiserver or on the PATH"
    if shutil.which("runc") is None or not Path(BUSYBOX).exists():
        return "no runc, or no busybox-static, on this host"
    done = subprocess.run(
        [str(program("containerd")), "--version"], capture_output=True, text=True, check=False
    )
    version = done.stdout.split()[2].lstrip("v") if done.stdout.count(" ") > 1 else "0"
    if int(version.split(".")[0]) < 2:
        return f"containerd {version} does not read CDI by itself"
    return ""


class Machine:
    """One node: runtime and kubelet. Use as a context manager; everything goes at the end."""

    def __init__(self, cluster: Cluster, name: str, folder: Path) -> None:
        self.cluster = cluster
        self.name = name
        self.folder = folder
        self.kubelet_dir = folder / "k"
        self.cdi = folder / "cdi"
        self.group = f"alloy-kube-{uuid.uuid4().hex[:8]}"
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        try:
            self._make_groups()
            self.start_runtime()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in ("kubelet", "containerd"):
            if name in self._running:
                self.end(name, signal.SIGKILL)
        self._kill_group()
        self._unmount()
        self._drop_groups()

    # --- runtime ---

    def start_runtime(self) -> None:
        """Start containerd and give it the image."""
        socket_path = self.folder / "c.sock"
        config = self.folder / "containerd.toml"
        config.write_text(
            f"""
version = 3
root = "{self.folder}/r"
state = "{self.folder}/s"
[grpc]
  address = "{socket_path}"
[ttrpc]
  address = "{socket_path}.ttrpc"
[plugins.'io.containerd.cri.v1.images']
  snapshotter = "native"
[plugins.'io.containerd.cri.v1.images'.pinned_images]
  sandbox = "{PAUSE}"
[plugins.'io.containerd.cri.v1.runtime']
  cdi_spec_dirs = ["{self.cdi}"]
  restrict_oom_score_adj = true
  disable_apparmor = true
[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]
  runtime_type = "io.containerd.runc.v2"
"""
        )
        dev = self._make_dev()
        script = " && ".join(
            [
                f"mount --rbind /dev/pts {dev}/pts",
                f"mount --rbind /dev/shm {dev}/shm",
                f"mount --rbind {dev} /dev",
                f"exec {program('containerd')} --config {config}",
            ]
        )
        path = f"{program('containerd').parent}:{os.environ['PATH']}:/usr/sbin:/sbin"  # type: ignore[union-attr]
        self._run(
            "containerd",
            ["/usr/bin/unshare", "--mount", "--propagation", "slave", "sh", "-c", script],
            {"PATH": path},
        )
        self.cluster.until(lambda: self._answers(socket_path))
        for name, command in ((IMAGE, ["/bin/sh"]), (PAUSE, ["/bin/sleep", "2147483647"])):
            archive = self.folder / "image.tar"
            archive.write_bytes(image(name, command))
            self.cluster.until(functools.partial(self._ctr, "images", "import", str(archive)))

    def _make_dev(self) -> Path:
        """Return a folder of device nodes: the usual ones, and those of accelerators."""
        dev = self.folder / "dev"
        for name in ("pts", "shm", "nvidia-caps", "dri"):
            (dev / name).mkdir(parents=True)
        for name in ("null", "zero", "full", "random", "urandom", "tty"):
            status = Path("/dev", name).stat()
            os.mknod(dev / name, 0o666 | stat.S_IFCHR, status.st_rdev)
        for name, target in (("fd", "/proc/self/fd"), ("ptmx", "pts/ptmx")):
            (dev / name).symlink_to(target)
        for name in NODES:
            os.mknod(dev / name, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
        return dev

    def _answers(self, path: Path) -> bool:
        self._look("containerd")
        with contextlib.closing(socket.socket(socket.AF_UNIX)) as probe:
            try:
                probe.connect(str(path))
            except OSError:
                return False
        return True

    def _ctr(self, *arguments: str) -> bool:
        command = [str(program("ctr")), "-a", f"{self.folder}/c.sock", "-n", "k8s.io", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            (self.folder / "ctr.log").write_text(done.stdout + done.stderr)
        return done.returncode == 0

    # --- kubelet ---

    def start_kubelet(self) -> None:
        """Start a kubelet that runs pods in a control group of their own."""
        (port,) = _ports(1)
        settings = {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "address": "127.0.0.1",
            "port": port,
            "healthzPort": 0,
            "authentication": {
                "anonymous": {"enabled": False},
                "webhook": {"enabled": False},
                "x509": {"clientCAFile": f"{self.cluster.authority.folder}/ca.crt"},
            },
            "authorization": {"mode": "AlwaysAllow"},
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": f"/{self.group}",
            "enforceNodeAllocatable": [],
            "failSwapOn": False,
            "failCgroupV1": False,
            "localStorageCapacityIsolation": False,
            "containerRuntimeEndpoint": f"unix://{self.folder}/c.sock",
            "podLogsDir": f"{self.folder}/logs",
            "evictionHard": {"memory.available": "0%", "nodefs.available": "0%"},
            "imageGCHighThresholdPercent": 100,
            "resolvConf": "",
            "featureGates": {"KubeletInUserNamespace": True},
        }
        config = self.folder / "kubelet.json"
        config.write_text(json.dumps(settings))
        kubeconfig = self.cluster.kubeconfig(f"node:{self.name}", "system:nodes")
        self._run(
            "kubelet",
            [
                str(program("kubelet")),
                f"--config={config}",
                f"--kubeconfig={kubeconfig}",
                f"--root-dir={self.kubelet_dir}",
                f"--cert-dir={self.folder}/certs",
                f"--hostname-override={self.name}",
                "--node-ip=127.0.0.1",
                "--v=2",
            ],
            {},
        )

    def _run(self, name: str, command: list[str], environment: dict[str, str]) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            self._running[name] = subprocess.Popen(
                [*WITH_US, *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **environment},
            )

    def end(self, name: str, number: int = signal.SIGTERM) -> None:
        """End one of the two and wait until it has."""
        process = self._running.pop(name)
        process.send_signal(number)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(30)

    def _look(self, name: str) -> None:
        assert self._running[name].poll() is None, self.tail(name)

    def tail(self, name: str, size: int = 3000) -> str:
        """Return the end of what a program wrote."""
        path = self.folder / f"{name}.log"
        return path.read_text(errors="replace")[-size:] if path.exists() else ""

    # --- control groups, and what is left at the end ---

    def groups(self) -> Iterator[Path]:
        """Yield the group of this machine in each hierarchy."""
        for held in HELD:
            root = Path("/sys/fs/cgroup") / held
            if (root / "cgroup.procs").exists():
                yield root / self.group

    def _make_groups(self) -> None:
        for group in self.groups():
            group.mkdir()
            if group.parent.name == "cpuset" and (group / "cpuset.cpus").exists():
                for name in ("cpuset.cpus", "cpuset.mems"):
                    (group / name).write_text((group.parent / name).read_text())

    def pids(self) -> set[int]:
        """Return all processes of this machine's containers."""
        found: set[int] = set()
        for group in self.groups():
            for path in group.rglob("cgroup.procs"):
                with contextlib.suppress(OSError):
                    found |= {int(line) for line in path.read_text().split()}
        return found

    def _kill_group(self) -> None:
        """End the containers, and the shims that hold them: those name this machine's folder."""
        end = time.monotonic() + 30
        while time.monotonic() < end:
            left = self.pids() | self._shims()
            if not left:
                return
            for pid in left:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.1)

    def _shims(self) -> set[int]:
        found = set()
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError):
                line = (entry / "cmdline").read_bytes()
                if b"containerd-shim" in line and f"{self.folder}/".encode() in line:
                    found.add(int(entry.name))
        return found

    def _unmount(self) -> None:
        lines = Path("/proc/self/mounts").read_text().splitlines()
        for line in reversed(lines):
            where = line.split(" ")[1]
            if where.startswith(f"{self.folder}/"):
                subprocess.run(["/bin/umount", "-l", where], check=False, capture_output=True)

    def _drop_groups(self) -> None:
        for group in self.groups():
            below = sorted(group.rglob("*"), key=lambda p: -len(p.parts))
            for path in [*below, group]:
                if path.is_dir():
                    with contextlib.suppress(OSError):
                        path.rmdir()


def image(name: str, command: list[str]) -> bytes:
    """Return an image of busybox alone, as `docker save` writes one."""
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as tar:
        for folder in ("bin", "tmp", "proc", "dev", "sys", "etc"):
            entry = tarfile.TarInfo(folder)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(entry)
        tar.add(BUSYBOX, "bin/busybox", filter=_plain)
        for applet in ("sh", "sleep", "env", "ls", "cat", "echo"):
            entry = tarfile.TarInfo(f"bin/{applet}")
            entry.type, entry.linkname = tarfile.SYMTYPE, "busybox"
            tar.addfile(entry)
    content = layer.getvalue()
    config: dict[str, Any] = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"Cmd": command, "Env": ["PATH=/bin"]},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(content).hexdigest()}"]},
    }
    text = json.dumps(config).encode()
    label = f"{hashlib.sha256(text).hexdigest()}.json"
    manifest = json.dumps([{"Config": label, "RepoTags": [name], "Layers": ["layer.tar"]}])
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as tar:
        for path, data in (
            ("layer.tar", content),
            (label, text),
            ("manifest.json", manifest.encode()),
        ):
            entry = tarfile.TarInfo(path)
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))
    return made.getvalue()


def _plain(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    entry.mode = 0o755
    return entry
