"""A real control plane of one test run: etcd and kube-apiserver, scheduler and controllers on call.

The binaries are not part of this repository. `KUBE_APISERVER` names a kube-apiserver; the other
programs are looked for beside it and on the PATH, etcd also as `ETCD`. What is not there makes the
tests that need it skip, with the reason printed.

Each cluster has its own folder, ports, certificates and tokens, listens on loopback alone, and is
ended with everything it started.
"""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import time
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Self

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from alloy_agent.kubernetes.api import ApiAccess, ApiClient, ApiError

Document = dict[str, Any]

# What is started goes when this process goes, however that ends.
WITH_US: Final = ("/usr/bin/setpriv", "--pdeathsig", "KILL")
READY_S: Final = 180.0
PORTS: Final = range(21000, 30000)  # below the ports that the kernel hands out by itself
# What schedules, and what it needs around it.
NEEDED: Final = ("kube-scheduler", "kube-controller-manager")
CONTROLLERS: Final = (
    "serviceaccount-controller",
    "resourceclaim-controller",
    "device-taint-eviction-controller",
    "garbage-collector-controller",
)
NO_SERVER: Final = "no kube-apiserver here: set KUBE_APISERVER to one, with etcd on the PATH"
CORE: Final = {
    "Namespace": "namespaces", "Node": "nodes", "Pod": "pods", "Event": "events",
    "ServiceAccount": "serviceaccounts", "Secret": "secrets",
}  # fmt: skip
GROUPED: Final = {
    "DaemonSet": "daemonsets", "ClusterRole": "clusterroles", "Role": "roles",
    "ClusterRoleBinding": "clusterrolebindings", "RoleBinding": "rolebindings",
    "NetworkPolicy": "networkpolicies", "DeviceClass": "deviceclasses",
    "ResourceSlice": "resourceslices", "ResourceClaim": "resourceclaims",
    "ResourceClaimTemplate": "resourceclaimtemplates", "DeviceTaintRule": "devicetaintrules",
    "ValidatingAdmissionPolicy": "validatingadmissionpolicies",
    "ValidatingAdmissionPolicyBinding": "validatingadmissionpolicybindings",
}  # fmt: skip
NAMESPACED: Final = frozenset(
    {"Pod", "Event", "ServiceAccount", "Secret", "DaemonSet", "Role", "RoleBinding",
     "NetworkPolicy", "ResourceClaim", "ResourceClaimTemplate"}
)  # fmt: skip


# --- programs ------------------------------------------------------------------------------------


def program(name: str) -> Path | None:
    """Return a program of Kubernetes or etcd, or None where there is none."""
    named = os.environ.get(name.upper().replace("-", "_"))
    if named:
        return Path(named)
    server = os.environ.get("KUBE_APISERVER")
    if server and (beside := Path(server).parent / name).is_file():
        return beside
    found = shutil.which(name)
    return Path(found) if found else None


def missing(*names: str) -> str:
    """Return why tests with these programs cannot run here, or nothing."""
    if any(program(name) is None for name in ("kube-apiserver", "etcd")):
        return NO_SERVER
    if not Path(WITH_US[0]).exists():
        return f"{NO_SERVER} and {WITH_US[0]} (util-linux) beside it"
    absent = [name for name in names if program(name) is None]
    return f"no {', '.join(absent)} beside kube-apiserver or on the PATH" if absent else ""


# --- certificates --------------------------------------------------------------------------------


class Authority:
    """A certificate authority of one cluster; everything it makes lies in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True)
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _named("alloy-tests")
        self._write("ca", self._sign(self._name, self._key, ca=True), self._key)
        signing = ec.generate_private_key(ec.SECP256R1())
        (folder / "accounts.key").write_bytes(_pem(signing))
        (folder / "accounts.pub").write_bytes(
            signing.public_key().public_bytes(
                serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
            )
        )

    def issue(self, name: str, organization: str = "") -> tuple[Path, Path]:
        """Return a certificate and its key, good for server and client."""
        key = ec.generate_private_key(ec.SECP256R1())
        label = name.replace(":", "-")
        return self._write(label, self._sign(_named(name, organization), key), key)

    def _sign(
        self, subject: x509.Name, key: ec.EllipticCurvePrivateKey, *, ca: bool = False
    ) -> x509.Certificate:
        now = datetime.datetime.now(datetime.UTC)
        names = [
            x509.DNSName("localhost"),
            x509.DNSName("kubernetes.default.svc"),
            x509.IPAddress(ipaddress.ip_address("127.0.0.1")),
        ]
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
            .add_extension(
                x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False
            )
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()),
                critical=False,
            )
        )
        if ca:
            usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
            builder = builder.add_extension(usage, critical=True)
        else:
            purposes = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
            builder = builder.add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
        return builder.sign(self._key, hashes.SHA256())

    def _write(
        self, label: str, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey
    ) -> tuple[Path, Path]:
        crt, pem = self.folder / f"{label}.crt", self.folder / f"{label}.key"
        crt.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        pem.write_bytes(_pem(key))
        return crt, pem


def _named(name: str, organization: str = "") -> x509.Name:
    parts = [x509.NameAttribute(NameOID.COMMON_NAME, name)]
    if organization:
        parts.insert(0, x509.NameAttribute(NameOID.ORGANIZATION_NAME, organization))
    return x509.Name(parts)


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.TraditionalOpenSSL,
        serialization.NoEncryption(),
    )


# --- the cluster ---------------------------------------------------------------------------------


class Cluster:
    """One control plane. Use as a context manager; `admin` may do everything.

    Args:
        folder: Of everything it writes.
        gates: Feature gates beside the defaults, for all components.
        runtime: API versions beside the defaults, as `--runtime-config` takes them.
    """

    def __init__(
        self, folder: Path, gates: Mapping[str, bool] | None = None, runtime: str = ""
    ) -> None:
        self.folder = folder
        self.authority = Authority(folder / "pki")
        self.url = ""
        self.admin: ApiClient
        self._gates = ",".join(f"{k}={str(v).lower()}" for k, v in (gates or {}).items())
        self._runtime = runtime
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._started: dict[str, tuple[tuple[str, ...], Mapping[str, str] | None]] = {}

    def __enter__(self) -> Self:
        for _ in range(5):  # a port that was free may be taken before it is used
            try:
                self._begin()
            except _PortTakenError:
                self.stop()
            except BaseException:
                self.stop()
                raise
            else:
                return self
        raise AssertionError(f"no cluster: {self.tail('kube-apiserver')}")

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _begin(self) -> None:
        client, peer, port = _ports(3)
        etcd = f"http://127.0.0.1:{client}"
        shutil.rmtree(self.folder / "etcd", ignore_errors=True)
        self.run(
            "etcd",
            f"--data-dir={self.folder}/etcd",
            f"--listen-client-urls={etcd}",
            f"--advertise-client-urls={etcd}",
            f"--listen-peer-urls=http://127.0.0.1:{peer}",
            f"--initial-advertise-peer-urls=http://127.0.0.1:{peer}",
            f"--initial-cluster=default=http://127.0.0.1:{peer}",
            "--log-level=warn",
        )
        pki = self.authority.folder
        certificate, key = self.authority.issue("kube-apiserver")
        more = [f"--feature-gates={self._gates}"] if self._gates else []
        more += [f"--runtime-config={self._runtime}"] if self._runtime else []
        self.url = f"https://127.0.0.1:{port}"
        self.run(
            "kube-apiserver",
            f"--etcd-servers={etcd}",
            "--bind-address=127.0.0.1",
            "--advertise-address=127.0.0.1",
            f"--secure-port={port}",
            f"--cert-dir={pki}",
            f"--tls-cert-file={certificate}",
            f"--tls-private-key-file={key}",
            f"--client-ca-file={pki}/ca.crt",
            f"--service-account-key-file={pki}/accounts.pub",
            f"--service-account-signing-key-file={pki}/accounts.key",
            "--service-account-issuer=https://kubernetes.default.svc",
            "--service-cluster-ip-range=10.96.0.0/24",
            "--authorization-mode=Node,RBAC",
            "--enable-admission-plugins=NodeRestriction",
            "--endpoint-reconciler-type=none",
            "--allow-privileged=true",
            "--anonymous-auth=false",
            *more,
        )
        certificate, key = self.authority.issue("admin", "system:masters")
        self.admin = ApiClient(
            ApiAccess(
                server=self.url,
                ca_file=f"{pki}/ca.crt",
                certificate_file=str(certificate),
                key_file=str(key),
                timeout_s=30.0,
            )
        )
        self.until(self._ready, READY_S)

    def _ready(self) -> bool:
        """Whether the server is.

        Raises:
            AssertionError: Something that was started has ended.
        """
        for name, process in self._running.items():
            if process.poll() is not None:
                if "address already in use" in self.tail(name, 20000):
                    raise _PortTakenError
                raise AssertionError(f"{name} ended: {self.tail(name)}")
        try:
            self.admin._once("GET", "/readyz?verbose=no", None, "")
        except ApiError as exc:
            return "is no JSON" in str(exc)  # "ok" it says
        return True

    def until_ready(self) -> None:
        """Wait until the server is ready again."""
        self.until(self._ready, READY_S)

    def run(self, name: str, *arguments: str, environment: Mapping[str, str] | None = None) -> None:
        """Start a program; its output goes to a file of its name."""
        found = program(name)
        assert found is not None, name
        self._started[name] = (arguments, environment)
        with (self.folder / f"{name}.log").open("ab") as log:
            self._running[name] = subprocess.Popen(
                [*WITH_US, str(found), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.folder,
                env={**os.environ, **(environment or {})},
            )

    def end(self, name: str, number: int = signal.SIGTERM) -> None:
        """End a program and wait until it has."""
        process = self._running.pop(name)
        process.send_signal(number)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(30)

    def again(self, name: str) -> None:
        """Start a program that was ended as it was started before."""
        arguments, environment = self._started[name]
        self.run(name, *arguments, environment=environment)

    def stop(self) -> None:
        """End everything, the last that was started first."""
        for name in reversed(list(self._running)):
            self.end(name, signal.SIGKILL)

    def tail(self, name: str, size: int = 3000) -> str:
        """Return the end of a program's output."""
        with contextlib.suppress(FileNotFoundError):
            return (self.folder / f"{name}.log").read_text(errors="replace")[-size:]
        return ""

    def start_scheduler(self) -> None:
        """Start a scheduler; it retries at once what did not fit."""
        config = self.folder / "scheduler.json"
        config.write_text(
            json.dumps(
                {
                    "apiVersion": "kubescheduler.config.k8s.io/v1",
                    "kind": "KubeSchedulerConfiguration",
                    "clientConnection": {"kubeconfig": str(self.kubeconfig("kube-scheduler"))},
                    "leaderElection": {"leaderElect": False},
                    "podInitialBackoffSeconds": 1,
                    "podMaxBackoffSeconds": 1,
                }
            )
        )
        more = [f"--feature-gates={self._gates}"] if self._gates else []
        self.run("kube-scheduler", f"--config={config}", "--secure-port=0", *more)

    def start_controllers(self, *names: str) -> None:
        """Start these controllers."""
        config = self.kubeconfig("kube-controller-manager")
        more = [f"--feature-gates={self._gates}"] if self._gates else []
        self.run(
            "kube-controller-manager",
            f"--kubeconfig={config}",
            f"--controllers={','.join(names)}",
            f"--service-account-private-key-file={self.authority.folder}/accounts.key",
            f"--root-ca-file={self.authority.folder}/ca.crt",
            "--use-service-account-credentials=false",
            "--leader-elect=false",
            "--secure-port=0",
            *more,
        )

    def kubeconfig(self, who: str, organization: str = "system:masters") -> Path:
        """Return a kubeconfig of a client certificate of that name."""
        certificate, key = self.authority.issue(f"system:{who}", organization)
        path = self.folder / f"{who.replace(':', '-')}.kubeconfig"
        path.write_text(
            json.dumps(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "current-context": "here",
                    "clusters": [
                        {
                            "name": "here",
                            "cluster": {
                                "server": self.url,
                                "certificate-authority": f"{self.authority.folder}/ca.crt",
                            },
                        }
                    ],
                    "users": [
                        {
                            "name": "me",
                            "user": {
                                "client-certificate": str(certificate),
                                "client-key": str(key),
                            },
                        }
                    ],
                    "contexts": [{"name": "here", "context": {"cluster": "here", "user": "me"}}],
                }
            )
        )
        return path

    # --- objects ---

    def apply(self, document: Document, *, dry_run: bool = False) -> Document:
        """Apply an object on the server's side, strictly; return it as the server has it."""
        query = {"fieldManager": "tests", "force": "true", "fieldValidation": "Strict"}
        if dry_run:
            query["dryRun"] = "All"
        path = f"{path_of(document)}?{urllib.parse.urlencode(query)}"
        return self.admin.request("PATCH", path, document, kind="application/apply-patch+yaml")

    def create(self, document: Document) -> Document:
        """Create an object."""
        return self.admin.request("POST", path_of(document).rsplit("/", 1)[0], document)

    def get(self, kind: str, name: str, version: str = "v1", namespace: str = "default") -> Any:
        """Return an object, or None where there is none."""
        return self.admin._found(path_of(_reference(kind, name, version, namespace)))

    def delete(self, kind: str, name: str, version: str = "v1", namespace: str = "default") -> None:
        """Delete an object at once; one that is gone already is fine."""
        path = path_of(_reference(kind, name, version, namespace))
        try:
            self.admin.request("DELETE", f"{path}?gracePeriodSeconds=0")
        except ApiError as exc:
            if exc.status != 404:
                raise

    def until(self, done: Callable[[], Any], seconds: float = 120.0) -> Any:
        """Return what `done` says once it is something; say what went on when it never is."""
        end = time.monotonic() + seconds
        while not (found := done()):
            assert time.monotonic() < end, "\n".join(
                f"--- {name}\n{self.tail(name)}" for name in self._running
            )
            time.sleep(0.1)
        return found

    # --- accounts ---

    def node(self, name: str) -> Document:
        """Create a node that nobody runs, ready for pods; return it."""
        labels = {"kubernetes.io/hostname": name}
        metadata = {"name": name, "labels": labels}
        try:
            self.create({"apiVersion": "v1", "kind": "Node", "metadata": metadata})
        except ApiError as exc:
            if exc.status != 409:
                raise
        ready = {"spec": {"taints": None}}  # a new node is tainted until its kubelet speaks
        self.admin.request(
            "PATCH", f"/api/v1/nodes/{name}", ready, kind="application/merge-patch+json"
        )
        size = {"cpu": "64", "memory": "256Gi", "pods": "500"}
        status = {
            "capacity": size,
            "allocatable": size,
            "conditions": [{"type": "Ready", "status": "True", "reason": "Test"}],
        }
        return self.admin.request(
            "PATCH",
            f"/api/v1/nodes/{name}/status",
            {"status": status},
            kind="application/strategic-merge-patch+json",
        )

    def token(self, account: str, namespace: str, pod: Document | None = None) -> str:
        """Return a token of a service account, bound to a pod where one is given."""
        spec: Document = {"expirationSeconds": 3600}
        if pod is not None:
            metadata = pod["metadata"]
            spec["boundObjectRef"] = {
                "apiVersion": "v1",
                "kind": "Pod",
                "name": metadata["name"],
                "uid": metadata["uid"],
            }
        answer = self.admin.request(
            "POST",
            f"/api/v1/namespaces/{namespace}/serviceaccounts/{account}/token",
            {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec},
        )
        return str(answer["status"]["token"])

    def client(self, token: str) -> ApiClient:
        """Return the agent's own client with a token."""
        return ApiClient(self.access(token))

    def access(self, token: str) -> ApiAccess:
        """Return how an agent gets here with a token."""
        path = self.folder / f"token-{random.getrandbits(64):x}"
        path.write_text(token)
        return ApiAccess(
            server=self.url,
            ca_file=f"{self.authority.folder}/ca.crt",
            token_file=str(path),
            timeout_s=30.0,
        )


class _PortTakenError(Exception):
    """Another program was faster."""


def _ports(count: int) -> list[int]:
    """Return ports that are free now."""
    found: list[int] = []
    dice = random.SystemRandom()
    while len(found) < count:
        port = dice.choice(PORTS)
        with contextlib.closing(socket.socket()) as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        if port not in found:
            found.append(port)
    return found


def path_of(document: Document) -> str:
    """Return the address of an object."""
    kind, version, metadata = document["kind"], document["apiVersion"], document["metadata"]
    plural = CORE.get(kind) or GROUPED[kind]
    root = "/api/v1" if "/" not in version else f"/apis/{version}"
    space = f"/namespaces/{metadata.get('namespace', 'default')}" if kind in NAMESPACED else ""
    return f"{root}{space}/{plural}/{urllib.parse.quote(metadata.get('name', ''), safe='')}"


def _reference(kind: str, name: str, version: str, namespace: str) -> Document:
    return {
        "kind": kind,
        "apiVersion": version,
        "metadata": {"name": name, "namespace": namespace},
    }


def refused(act: Callable[[], object]) -> str:
    """Return what the API server says against something; nothing when it does it."""
    try:
        act()
    except ApiError as exc:
        if exc.status not in (400, 403, 409, 422):
            raise
        return str(exc)
    return ""


@contextlib.contextmanager
def cluster(folder: Path, **more: Any) -> Iterator[Cluster]:
    """Yield a running control plane."""
    with Cluster(folder, **more) as made:
        yield made
