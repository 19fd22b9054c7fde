"""A Kubernetes cluster of a test's own: a real control plane, and nodes that run real containers.

etcd, the API server, the controller manager and the scheduler are Kubernetes' own programs
(.ci/install-kubernetes). The nodes are `tests.support.virtual_kubelet`. All of it is on loopback.
"""

from __future__ import annotations

import base64
import importlib.util
import json
import os
import secrets
import shutil
import signal
import ssl
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests.support.certificates import Authority
from tests.support.processes import ROOT, free_port
from tests.support.required import missing, require

PROGRAMS = Path("/usr/local/lib/cofferdam-kubernetes")
WAIT_SECONDS = 240.0
ADMIN = "admin"

# Who may do everything, and whom the nodes let in.
_MASTERS = ("system:masters",)
_API_SERVER = "kube-apiserver"

# A node without a sign of life for so long is lost. Neither a busy machine nor a test that stops
# the API server is to lose any: `lose_node` reports the loss itself.
_GRACE_SECONDS = 120
# After so long its Pods are deleted, which is five minutes elsewhere.
_TOLERATION_SECONDS = 1

_TRIES = 3
_PREFIX = "cofferdam-cluster-"

T = TypeVar("T")


class Cluster:
    """The control plane and its nodes, which run from the entry of its context to the exit.

    What it starts ends with it, or with the thread that has started it: start it, and an API
    server again, in a thread that goes on.
    """

    def __init__(self, nodes: Sequence[str] = ("node-1", "node-2")) -> None:
        self._first_nodes = nodes
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._identities: dict[str, Path] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> Cluster:
        memory = Path("/dev/shm")
        place = memory if os.access(memory, os.W_OK) else Path(tempfile.gettempdir())
        _remove_abandoned(place)
        self.folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=place))
        try:
            self._authority = Authority("Cluster")
            (self.folder / "ca.pem").write_text(self._authority.pem)
            self._server = self._authority.issue(self.folder, "kubernetes.default.svc").path
            self._accounts = self._authority.issue(self.folder).path
            self._context = ssl.create_default_context(cadata=self._authority.pem)
            self._context.load_cert_chain(self.identity(ADMIN, _MASTERS))
            self._start_store_and_api()
            own = self.kubeconfig(self.folder / "admin.yaml")
            self._start_controllers(own)
            self._start_kubelet()
            for node in self._first_nodes:
                self.add_node(node)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        # The nodes end their containers, for which they need no API server.
        for name in ("kubelet", *self._processes):
            self._end(name, gently=name == "kubelet")
        shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.port}"

    def identity(self, user: str, groups: Sequence[str] = ()) -> Path:
        """The certificate and key of a user, in one file, which is made at the first call."""
        if user not in self._identities:
            issued = self._authority.issue_identity(self.folder, user, groups)
            self._identities[user] = issued.path
        return self._identities[user]

    def kubeconfig(self, path: Path, user: str = ADMIN) -> Path:
        """Write the kubeconfig of a user. `admin` may do everything, others what RBAC gives them."""
        pem = self.identity(user, _MASTERS if user == ADMIN else ()).read_bytes()
        data = base64.b64encode(pem).decode()
        return self._write(path, {"client-certificate-data": data, "client-key-data": data})

    def kubeconfig_of(self, path: Path, account: str, namespace: str) -> Path:
        """Write the kubeconfig of a service account."""
        return self._write(path, {"token": self.token_of(account, namespace)}, namespace)

    def token_of(self, account: str, namespace: str, seconds: int = 3600) -> str:
        """Request a token of a service account."""
        body = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenRequest",
            "spec": {"expirationSeconds": seconds},
        }
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{account}/token"
        token: str = self.request("POST", path, body)["status"]["token"]
        return token

    def _write(self, path: Path, user: Mapping[str, str], namespace: str = "default") -> Path:
        authority = base64.b64encode(self._authority.pem.encode()).decode()
        described = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [
                {
                    "name": "test",
                    "cluster": {"server": self.url, "certificate-authority-data": authority},
                }
            ],
            "users": [{"name": "user", "user": dict(user)}],
            "contexts": [
                {
                    "name": "test",
                    "context": {"cluster": "test", "user": "user", "namespace": namespace},
                }
            ],
            "current-context": "test",
        }
        path.touch(mode=0o600)
        # JSON is YAML.
        path.write_text(json.dumps(described, indent=1))
        return path

    def objects(self, kind: Callable[..., T], kubeconfig: Path | None = None) -> T:
        """One of the official client's classes, such as CoreV1Api, for the admin or another user."""
        from kubernetes import config

        path = kubeconfig or self.folder / "admin.yaml"
        client: Any = config
        return kind(client.new_client_from_config(config_file=str(path)))

    def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        content_type: str = "application/json",
    ) -> Any:
        """Ask the API server as the admin, and return what it answers. Raises HTTPError."""
        request = urllib.request.Request(
            self.url + path,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": content_type},
            method=method,
        )
        with urllib.request.urlopen(request, timeout=WAIT_SECONDS, context=self._context) as answer:
            text = answer.read()
        return json.loads(text) if text[:1] in (b"{", b"[") else text

    def namespace(self) -> str:
        """Make a namespace, whose default service account is there, and return its name."""
        name = f"test-{secrets.token_hex(4)}"
        self.request("POST", "/api/v1/namespaces", {"metadata": {"name": name}})
        account = f"/api/v1/namespaces/{name}/serviceaccounts/default"

        def has_account() -> bool:
            try:
                return bool(self.request("GET", account).get("secrets"))
            except urllib.error.HTTPError as error:
                if error.code != 404:
                    raise
                return False

        self._wait(has_account, f"no service account in {name}")
        return name

    def runtime_class(self, name: str, handler: str) -> None:
        """Make a RuntimeClass, unless there is one. The nodes know the handlers runc and runsc."""
        body = {"metadata": {"name": name}, "handler": handler}
        try:
            self.request("POST", "/apis/node.k8s.io/v1/runtimeclasses", body)
        except urllib.error.HTTPError as error:
            if error.code != 409:
                raise

    def provide_image(self, name: str, root: Path, config: Mapping[str, Any] | None = None) -> None:
        """Have the nodes know an image: its unpacked root, and its configuration as OCI has it
        (Entrypoint, Cmd, Env, User, WorkingDir). Other names stand for this machine's programs."""
        path = self.folder / "images.json"
        known = json.loads(path.read_text()) if path.exists() else {}
        known[name] = {"root": str(root), "config": dict(config or {})}
        new = path.with_suffix(".new")
        new.write_text(json.dumps(known))
        new.rename(path)

    def add_node(self, name: str, cpu: str = "64", memory: str = "64Gi", pods: str = "500") -> None:
        """Add a node, or a lost one again, and wait until Pods may run on it."""
        self.command("add", name=name, capacity={"cpu": cpu, "memory": memory, "pods": pods})

        def is_ready() -> bool:
            node = self.request("GET", f"/api/v1/nodes/{name}")
            return not node["spec"].get("taints")

        self._wait(is_ready, f"the node {name} is not ready")

    def lose_node(self, name: str) -> None:
        """Have a node vanish: its containers end, its connections are cut, nothing is reported.

        That it is lost is known at once, not after the time that the controller manager gives it.
        Its Pods are marked for deletion after a second, and go when the node is removed.
        """
        self.command("lose", name=name)

    def remove_node(self, name: str) -> None:
        """Lose a node, and remove its object with those of its Pods, as a cloud provider does."""
        self.lose_node(name)
        self.request("DELETE", f"/api/v1/nodes/{name}")
        for pod in self._pods_on(name):
            self.request("DELETE", _path_of(pod), {"gracePeriodSeconds": 0})

    def drain(self, name: str) -> None:
        """Let nothing new onto a node, and evict its Pods, as `kubectl drain` does. Does not wait
        for their end."""
        self.cordon(name)
        for pod in self._pods_on(name):
            metadata = pod["metadata"]
            eviction = {
                "apiVersion": "policy/v1beta1",
                "kind": "Eviction",
                "metadata": {"name": metadata["name"], "namespace": metadata["namespace"]},
            }
            with suppress(urllib.error.HTTPError):
                self.request("POST", f"{_path_of(pod)}/eviction", eviction)

    def cordon(self, name: str, *, is_closed: bool = True) -> None:
        """Let nothing new onto a node, or let it again."""
        patch = {"spec": {"unschedulable": is_closed}}
        path = f"/api/v1/nodes/{name}"
        self.request("PATCH", path, patch, "application/merge-patch+json")

    def _pods_on(self, name: str) -> list[dict[str, Any]]:
        path = f"/api/v1/pods?fieldSelector=spec.nodeName%3D{name}"
        pods: list[dict[str, Any]] = self.request("GET", path)["items"]
        return pods

    def stop_api(self) -> None:
        """Kill the API server: connections are cut, and none is taken."""
        self._end("api", gently=False)

    def start_api(self) -> None:
        """Start the API server again, and wait until it is ready."""
        self._start_api()
        self._wait(self._is_ready, "the API server is not ready")

    def stop_etcd(self) -> None:
        """Have etcd stand still: the API server waits for it."""
        self._processes["etcd"].send_signal(signal.SIGSTOP)

    def continue_etcd(self) -> None:
        """Let etcd go on."""
        self._processes["etcd"].send_signal(signal.SIGCONT)

    def _start_store_and_api(self) -> None:
        """Another process may take a port between the choice and the start: choose again then."""
        for tries_left in reversed(range(_TRIES)):
            self.port, self._client_port, self._peer_port = free_port(), free_port(), free_port()
            try:
                self._start_etcd()
                self._start_api()
                self._wait(self._is_ready, "the API server is not ready")
                return
            except AssertionError as error:
                if not tries_left or "address already in use" not in str(error):
                    raise
                for name in ("api", "etcd"):
                    self._end(name, gently=False)
                shutil.rmtree(self.folder / "etcd", ignore_errors=True)

    def _start_etcd(self) -> None:
        client, peer = (f"http://127.0.0.1:{port}" for port in (self._client_port, self._peer_port))
        self._start(
            "etcd",
            require("etcd"),
            data_dir=self.folder / "etcd",
            listen_client_urls=client,
            advertise_client_urls=client,
            listen_peer_urls=peer,
            initial_advertise_peer_urls=peer,
            initial_cluster=f"default={peer}",
        )

    def _start_api(self) -> None:
        authority = self.folder / "ca.pem"
        to_nodes = self.identity(_API_SERVER)
        self._start(
            "api",
            PROGRAMS / "kube-apiserver",
            etcd_servers=f"http://127.0.0.1:{self._client_port}",
            bind_address="127.0.0.1",
            secure_port=self.port,
            advertise_address="127.0.0.1",
            endpoint_reconciler_type="none",
            cert_dir=self.folder,
            tls_cert_file=self._server,
            tls_private_key_file=self._server,
            client_ca_file=authority,
            authorization_mode="RBAC",
            service_account_issuer="https://kubernetes.default.svc",
            service_account_key_file=self._accounts,
            service_account_signing_key_file=self._accounts,
            service_cluster_ip_range="10.96.0.0/24",
            kubelet_certificate_authority=authority,
            kubelet_client_certificate=to_nodes,
            kubelet_client_key=to_nodes,
            kubelet_preferred_address_types="InternalIP",
            default_not_ready_toleration_seconds=_TOLERATION_SECONDS,
            default_unreachable_toleration_seconds=_TOLERATION_SECONDS,
        )

    def _start_controllers(self, kubeconfig: Path) -> None:
        common: dict[str, object] = {
            "kubeconfig": kubeconfig,
            "leader_elect": "false",
            "port": 0,
            "secure_port": 0,
            # What they ask for a second; by default they would wait where there are many Pods.
            "kube_api_qps": 300,
            "kube_api_burst": 600,
        }
        self._start(
            "controllers",
            PROGRAMS / "kube-controller-manager",
            service_account_private_key_file=self._accounts,
            root_ca_file=self.folder / "ca.pem",
            node_monitor_period="1s",
            node_monitor_grace_period=f"{_GRACE_SECONDS}s",
            # What is for clouds has nothing to do here.
            controllers="*,-nodeipam,-cloud-node-lifecycle,-route,-service",
            **common,
        )
        self._start("scheduler", PROGRAMS / "kube-scheduler", **common)

    def _start_kubelet(self) -> None:
        serving = self._authority.issue(self.folder).path
        command = [
            *(sys.executable, "-m", "tests.support.virtual_kubelet"),
            *("--api", self.url, "--authority", str(self.folder / "ca.pem")),
            *("--identity", str(self.identity(ADMIN)), "--serving", str(serving)),
            *("--client", _API_SERVER, "--folder", str(self.folder)),
        ]
        self._spawn("kubelet", command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def command(self, command: str, **arguments: Any) -> None:
        """Have the process of the nodes do something, and wait until it is done."""
        process = self._processes["kubelet"]
        assert process.stdin is not None
        assert process.stdout is not None
        with self._lock:
            process.stdin.write(json.dumps({"command": command, **arguments}).encode() + b"\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        assert answer == b"done\n", f"{answer.decode()}\n{self.logs()}"

    def _start(self, name: str, program: str | Path, **options: object) -> None:
        given = [f"--{key.replace('_', '-')}={value}" for key, value in options.items()]
        self._spawn(name, [str(program), *given])

    def _spawn(self, name: str, command: list[str], **streams: Any) -> None:
        """The process dies with the thread that is here, where the test itself is killed."""
        end = "TERM" if name == "kubelet" else "KILL"
        streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL} | streams
        with (self.folder / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                ["setpriv", "--pdeathsig", end, "--", *command], stderr=log, cwd=ROOT, **streams
            )

    def _end(self, name: str, *, gently: bool) -> None:
        process = self._processes.pop(name, None)
        if process is None:
            return
        if gently:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(WAIT_SECONDS)
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream:
                stream.close()

    def _is_ready(self) -> bool:
        try:
            return bool(self.request("GET", "/readyz") == b"ok")
        except OSError:
            return False

    def _wait(self, is_so: Callable[[], bool], complaint: str) -> None:
        deadline = time.monotonic() + WAIT_SECONDS
        while not is_so():
            dead = [name for name, each in self._processes.items() if each.poll() is not None]
            if dead or time.monotonic() > deadline:
                raise AssertionError(f"{complaint}; ended: {dead}\n{self.logs()}")
            time.sleep(0.05)

    def logs(self, lines: int = 20) -> str:
        """The ends of all logs."""
        found = []
        for path in sorted(self.folder.glob("*.log")):
            end = path.read_text(errors="replace").splitlines()[-lines:]
            found.append("\n".join([f"== {path.name}", *end]))
        return "\n".join(found)


def _remove_abandoned(place: Path) -> None:
    """Remove the folders of clusters whose tests were killed."""
    for folder in place.glob(f"{_PREFIX}*"):
        if not Path("/proc", folder.name.split("-")[2]).exists():
            shutil.rmtree(folder, ignore_errors=True)


def _path_of(pod: Mapping[str, Any]) -> str:
    metadata = pod["metadata"]
    return f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}"


def require_cluster() -> None:
    """Skip the test where a cluster cannot be here; under REQUIRE=all fail it."""
    for program in ("etcd", "runc", "setpriv"):
        require(program)
    for name in ("kube-apiserver", "kube-controller-manager", "kube-scheduler"):
        if not os.access(PROGRAMS / name, os.X_OK):
            missing(f"{name} is not in {PROGRAMS} (.ci/install-kubernetes)")
    if importlib.util.find_spec("kubernetes") is None:
        missing("the Python package kubernetes is not installed")
    if os.geteuid() != 0:
        missing("the nodes of a cluster need root")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A cluster with two nodes. It takes a tenth of a processor even when it has nothing to do, so
    no other module's tests run beside it. A test that stops a part of it starts that again, and
    gives back a node that it has lost or closed."""
    require_cluster()
    with Cluster() as running:
        yield running
