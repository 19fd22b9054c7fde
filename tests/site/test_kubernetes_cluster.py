"""The cluster of the tests itself: what others rely on when they test against it."""

from __future__ import annotations

import json
import os
import ssl
import subprocess
import time
import urllib.error
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
import websocket

from tests.support.kubernetes import Cluster

SECONDS = 240.0
PROTOCOL = "v4.channel.k8s.io"
COPY = ["cat"]


class Pods:
    """The Pods of one namespace."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.namespace = cluster.namespace()
        self.path = f"/api/v1/namespaces/{self.namespace}/pods"

    def create(self, name: str, command: list[str], container: Any = None, **spec: Any) -> Any:
        body = {
            "metadata": {"name": name},
            "spec": {
                "restartPolicy": "Never",
                "terminationGracePeriodSeconds": 1,
                "automountServiceAccountToken": False,
                **spec,
                "containers": [
                    {"name": "main", "image": "machine", "command": command, **(container or {})}
                ],
            },
        }
        return self.cluster.request("POST", self.path, body)

    def read(self, name: str) -> Any:
        return self.cluster.request("GET", f"{self.path}/{name}")

    def is_there(self, name: str) -> bool:
        try:
            self.read(name)
        except urllib.error.HTTPError as error:
            if error.code != 404:
                raise
            return False
        return True

    def wait(self, name: str, phase: str = "Running") -> Any:
        """Wait until the Pod has reached its phase, and return it."""
        found: dict[str, Any] = {}

        def has_it() -> bool:
            found.update(self.read(name))
            return bool(found["status"]["phase"] == phase)

        until(has_it, lambda: f"{json.dumps(found, indent=1)}\n{self.cluster.logs()}")
        return found

    def end_of(self, name: str, phase: str = "Failed") -> Any:
        """The end of the Pod's container, as its status has it."""
        return self.wait(name, phase)["status"]["containerStatuses"][0]["state"]["terminated"]

    def log(self, name: str) -> str:
        return str(self.cluster.request("GET", f"{self.path}/{name}/log").decode())

    def delete(self, name: str, **options: Any) -> Any:
        return self.cluster.request("DELETE", f"{self.path}/{name}", options or None)

    @contextmanager
    def connection(self, name: str, verb: str, **query: Any) -> Iterator[websocket.WebSocket]:
        """A connection to the Pod's streams, over the API server."""
        cluster = self.cluster
        words = urlencode({"stdin": 1, "stdout": 1, "stderr": 1, **query}, doseq=True)
        certificate = str(cluster.identity("admin"))
        socket = websocket.create_connection(
            f"{cluster.url.replace('https', 'wss')}{self.path}/{name}/{verb}?{words}",
            subprotocols=[PROTOCOL],
            timeout=SECONDS,
            sslopt={
                "certfile": certificate,
                "keyfile": certificate,
                "ca_certs": str(cluster.folder / "ca.pem"),
                "cert_reqs": ssl.CERT_REQUIRED,
            },
        )
        try:
            assert socket.recv() == b"\x01"
            yield socket
        finally:
            socket.shutdown()

    def run(self, name: str, *command: str) -> tuple[bytes, bytes, Any]:
        """What a command in the Pod writes to its outputs, and its status."""
        streams: dict[int, bytes] = {1: b"", 2: b"", 3: b""}
        with self.connection(name, "exec", command=list(command), stdin=0) as socket:
            while message := read_message(socket):
                streams[message[0]] += message[1:]
        return streams[1], streams[2], json.loads(streams[3])


def until(is_so: Callable[[], bool], complaint: Callable[[], str] = lambda: "") -> None:
    deadline = time.monotonic() + SECONDS
    while not is_so():
        assert time.monotonic() < deadline, complaint()
        time.sleep(0.02)


def read_message(socket: websocket.WebSocket) -> bytes:
    """The next message."""
    message = socket.recv()
    return message if isinstance(message, bytes) else message.encode()


def read_bytes(socket: websocket.WebSocket, length: int) -> bytes:
    """So many bytes of the container's output."""
    found = b""
    while len(found) < length:
        message = read_message(socket)
        assert message[0] == 1, message
        found += message[1:]
    return found


@pytest.fixture
def pods(cluster: Cluster) -> Pods:
    return Pods(cluster)


def test_a_command_in_a_pod_gives_its_output_and_its_exact_exit_code(pods: Pods) -> None:
    pods.create("one", ["sleep", "600"], {"env": [{"name": "COLOUR", "value": "red"}]})
    pods.wait("one")
    assert pods.run("one", "sh", "-c", "echo $COLOUR; cat /proc/1/cmdline >&2") == (
        b"red\n",
        b"sleep\x00600\x00",
        {"metadata": {}, "status": "Success"},
    )
    _, _, status = pods.run("one", "sh", "-c", "exit 7")
    assert status["reason"] == "NonZeroExitCode"
    assert status["details"]["causes"] == [{"reason": "ExitCode", "message": "7"}]


def test_attached_bytes_go_both_ways_unchanged(pods: Pods) -> None:
    pods.create("one", COPY, {"stdin": True})
    pods.wait("one")
    data = os.urandom(1 << 20)
    with pods.connection("one", "attach") as socket:
        for start in range(0, len(data), 1 << 15):
            socket.send_binary(b"\0" + data[start : start + (1 << 15)])
        assert read_bytes(socket, len(data)) == data
        with pods.connection("one", "attach") as other:
            other.send_binary(b"\0again")
            assert read_bytes(other, 5) == b"again"
            # The first has lost the streams, and its connection.
            with pytest.raises(websocket.WebSocketConnectionClosedException):
                while socket.recv():
                    pass
                raise websocket.WebSocketConnectionClosedException
    with pods.connection("one", "attach") as socket:
        socket.send_binary(b"\0later")
        assert read_bytes(socket, 5) == b"later"


def test_an_input_that_is_taken_once_ends_with_its_connection(pods: Pods) -> None:
    pods.create("one", COPY, {"stdin": True, "stdinOnce": True})
    pods.wait("one")
    with pods.connection("one", "attach") as socket:
        socket.send_binary(b"\0text")
        assert read_bytes(socket, 4) == b"text"
    assert pods.end_of("one", "Succeeded")["exitCode"] == 0


def test_the_end_of_a_container_ends_what_is_attached(pods: Pods) -> None:
    pods.create("one", ["sh", "-c", "read word; echo got $word; exit 3"], {"stdin": True})
    pods.wait("one")
    with pods.connection("one", "attach") as socket:
        socket.send_binary(b"\0bread\n")
        assert read_bytes(socket, 10) == b"got bread\n"
        assert json.loads(socket.recv()[1:])["status"] == "Success"
    assert pods.end_of("one")["exitCode"] == 3
    assert pods.log("one") == "got bread\n"


@pytest.mark.parametrize("handler", ["runc", "runsc"])
def test_a_container_that_takes_too_much_memory_is_reported(pods: Pods, handler: str) -> None:
    pods.cluster.runtime_class(handler, handler)
    limits = {"memory": "64Mi", "cpu": "500m"}
    resources = {"resources": {"limits": limits, "requests": limits}}
    command = ["python3", "-c", "bytearray(1 << 28)"]
    pods.create("one", command, resources, runtimeClassName=handler)
    end = pods.end_of("one")
    assert (end["exitCode"], end["reason"]) == (137, "OOMKilled")


def test_a_pod_is_ended_at_its_deadline(pods: Pods) -> None:
    pods.create("one", ["sleep", "600"], activeDeadlineSeconds=1)
    pod = pods.wait("one", "Failed")
    assert pod["status"]["reason"] == "DeadlineExceeded"
    until(lambda: "terminated" in pods.read("one")["status"]["containerStatuses"][0]["state"])


def test_a_deleted_container_is_asked_to_end_first(pods: Pods) -> None:
    command = ["sh", "-c", "trap 'exit 0' TERM; echo ready; while :; do sleep 0.05; done"]
    pods.create("one", command, terminationGracePeriodSeconds=600)
    pods.wait("one")
    until(lambda: pods.log("one") == "ready\n")
    uid = pods.read("one")["metadata"]["uid"]
    with pytest.raises(urllib.error.HTTPError) as refused:
        pods.delete("one", preconditions={"uid": "another"})
    assert refused.value.code == 409
    pods.delete("one", preconditions={"uid": uid})
    until(lambda: not pods.is_there("one"))


def test_a_container_that_does_not_end_is_killed(pods: Pods) -> None:
    # Process 1 has no handler for the signal, so that it does nothing.
    pods.create("one", ["sleep", "600"])
    pods.wait("one")
    pods.delete("one")
    until(lambda: not pods.is_there("one"))


def test_a_container_is_bound_as_its_pod_says(pods: Pods) -> None:
    security = {
        "runAsUser": 1234,
        "runAsGroup": 2345,
        "runAsNonRoot": True,
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    show = (
        "exec 2>&1; id -u; id -g; grep -E 'CapBnd|NoNewPrivs|Seccomp:' /proc/self/status; hostname; pwd;"
        "touch /tmp/a || echo read only; touch /scratch/b && stat -c %a /scratch;"
        "head -c 2M /dev/zero > /scratch/c || echo full; tail -n +3 /proc/net/dev"
    )
    container = {
        "securityContext": security,
        "workingDir": "/scratch",
        "volumeMounts": [{"name": "work", "mountPath": "/scratch"}],
    }
    volume = {"name": "work", "emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}}
    pods.create("one", ["sh", "-c", show], container, volumes=[volume])
    pods.wait("one", "Succeeded")
    lines = [line.split() for line in pods.log("one").splitlines()]
    for expected in (
        ["1234"],
        ["2345"],
        ["CapBnd:", "0000000000000000"],
        ["NoNewPrivs:", "1"],
        ["Seccomp:", "2"],
        ["one"],
        ["/scratch"],
        ["read", "only"],
        ["1777"],
        ["full"],
    ):
        assert expected in lines
    assert [line[0] for line in lines if line and line[0].endswith(":")][-1] == "lo:"


def test_a_container_that_must_not_be_root_waits(pods: Pods) -> None:
    pods.create("one", ["true"], {"securityContext": {"runAsNonRoot": True}})

    def waits() -> bool:
        states = pods.read("one")["status"].get("containerStatuses") or [{"state": {}}]
        reason = (states[0]["state"].get("waiting") or {}).get("reason")
        return bool(reason == "CreateContainerConfigError")

    until(waits)
    pods.delete("one")
    until(lambda: not pods.is_there("one"))


def test_a_pod_has_its_secrets_and_what_its_first_container_has_left(pods: Pods) -> None:
    objects = pods.path.removesuffix("pods")
    secret = {"metadata": {"name": "key"}, "stringData": {"word": "sesame"}}
    pods.cluster.request("POST", f"{objects}secrets", secret)
    config = {"metadata": {"name": "settings"}, "data": {"colour": "red"}}
    pods.cluster.request("POST", f"{objects}configmaps", config)
    mounts = [
        {"name": "shared", "mountPath": "/shared"},
        {"name": "settings", "mountPath": "/settings"},
    ]
    reference = {"secretKeyRef": {"name": "key", "key": "word"}}
    first = {
        "name": "first",
        "image": "machine",
        "command": ["sh", "-c", "echo $WORD > /shared/word"],
        "env": [{"name": "WORD", "valueFrom": reference}],
        "volumeMounts": mounts[:1],
    }
    pods.create(
        "one",
        ["sh", "-c", "cat /shared/word /settings/colour"],
        {"volumeMounts": mounts},
        initContainers=[first],
        volumes=[
            {"name": "shared", "emptyDir": {}},
            {"name": "settings", "configMap": {"name": "settings"}},
        ],
    )
    assert pods.end_of("one", "Succeeded")["exitCode"] == 0
    assert pods.log("one") == "sesame\nred"


def test_a_container_is_started_again_and_ready_when_its_probe_says_so(pods: Pods) -> None:
    command = [
        "sh",
        "-c",
        "echo x >> /kept/starts; test $(wc -l < /kept/starts) -gt 1 && sleep 600",
    ]
    pods.create(
        "one",
        command,
        {
            "volumeMounts": [{"name": "kept", "mountPath": "/kept"}],
            "readinessProbe": {"exec": {"command": ["test", "-e", "/kept/ready"]}},
        },
        restartPolicy="Always",
        volumes=[{"name": "kept", "emptyDir": {}}],
    )

    def status() -> Any:
        (found,) = pods.read("one")["status"].get("containerStatuses") or [{}]
        return found

    until(lambda: status().get("restartCount", 0) >= 1 and "running" in status()["state"])
    assert status()["lastState"]["terminated"]["exitCode"] == 1
    assert not status()["ready"]
    pods.run("one", "touch", "/kept/ready")
    until(lambda: status()["ready"])


def test_a_runtime_class_gives_gvisor(pods: Pods) -> None:
    pods.cluster.runtime_class("gvisor", "runsc")
    pods.create("one", COPY, {"stdin": True}, runtimeClassName="gvisor")
    pods.wait("one")
    output, _, status = pods.run("one", "dmesg")
    assert status["status"] == "Success"
    assert b"gVisor" in output
    data = os.urandom(1 << 17)
    with pods.connection("one", "attach") as socket:
        socket.send_binary(b"\0" + data)
        assert read_bytes(socket, len(data)) == data
    pods.delete("one")
    until(lambda: not pods.is_there("one"))


def test_a_runtime_class_that_no_node_has_is_reported_in_an_event(pods: Pods) -> None:
    pods.cluster.runtime_class("kata", "kata")
    pods.create("one", ["true"], runtimeClassName="kata")
    events = pods.path.removesuffix("pods") + "events"

    def has_event() -> bool:
        found = pods.cluster.request("GET", events)["items"]
        return any(event["reason"] == "FailedCreatePodSandBox" for event in found)

    until(has_event)
    assert pods.read("one")["status"]["phase"] == "Pending"


def test_a_full_quota_refuses_a_pod(pods: Pods) -> None:
    path = pods.path.removesuffix("pods") + "resourcequotas"
    body = {"metadata": {"name": "small"}, "spec": {"hard": {"pods": "1"}}}
    pods.cluster.request("POST", path, body)
    until(lambda: "used" in pods.cluster.request("GET", f"{path}/small")["status"])
    pods.create("one", ["sleep", "600"])
    with pytest.raises(urllib.error.HTTPError) as refused:
        pods.create("two", ["sleep", "600"])
    assert refused.value.code == 403
    assert b"exceeded quota" in refused.value.read()


def test_a_service_account_may_do_what_its_role_says(pods: Pods, tmp_path: Path) -> None:
    kubeconfig = pods.cluster.kubeconfig_of(tmp_path / "own.yaml", "default", pods.namespace)

    def list_pods() -> subprocess.CompletedProcess[str]:
        command = ["kubectl", "--kubeconfig", str(kubeconfig), "get", "pods"]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    assert "Forbidden" in list_pods().stderr
    rights = "/apis/rbac.authorization.k8s.io/v1/namespaces/" + pods.namespace
    rules = [{"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]}]
    pods.cluster.request("POST", f"{rights}/roles", {"metadata": {"name": "look"}, "rules": rules})
    subject = {"kind": "ServiceAccount", "name": "default", "namespace": pods.namespace}
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "look"}
    binding = {"metadata": {"name": "look"}, "subjects": [subject], "roleRef": role}
    pods.cluster.request("POST", f"{rights}/rolebindings", binding)
    until(lambda: list_pods().returncode == 0)


def test_the_pods_of_a_lost_node_are_marked_and_go_with_it(pods: Pods) -> None:
    cluster = pods.cluster
    cluster.add_node("spare")
    pods.create("one", ["sleep", "600"], nodeSelector={"kubernetes.io/hostname": "spare"})
    pods.wait("one")
    with pods.connection("one", "attach") as socket:
        cluster.lose_node("spare")
        with pytest.raises((websocket.WebSocketException, OSError)):
            while socket.recv():
                pass
            raise websocket.WebSocketConnectionClosedException
    until(lambda: "deletionTimestamp" in pods.read("one")["metadata"])
    cluster.remove_node("spare")
    until(lambda: not pods.is_there("one"))


def test_a_node_that_comes_back_runs_nothing_twice(pods: Pods, tmp_path: Path) -> None:
    cluster = pods.cluster
    cluster.add_node("returning")
    volume = {"name": "notes", "hostPath": {"path": str(tmp_path)}}
    container = {"volumeMounts": [{"name": "notes", "mountPath": "/notes"}]}
    pods.create(
        "one",
        ["sh", "-c", "echo run >> /notes/runs; sleep 600"],
        container,
        nodeName="returning",
        volumes=[volume],
        # It stays for longer than the node is away.
        tolerations=[{"operator": "Exists"}],
    )
    until((tmp_path / "runs").exists)
    pods.wait("one")
    cluster.lose_node("returning")
    cluster.add_node("returning")
    assert pods.end_of("one")["exitCode"] == 255
    assert (tmp_path / "runs").read_text() == "run\n"
    cluster.remove_node("returning")


def test_a_drained_node_gives_its_pods_up(pods: Pods) -> None:
    cluster = pods.cluster
    cluster.add_node("leaving")
    pods.create("one", ["sleep", "600"], nodeSelector={"kubernetes.io/hostname": "leaving"})
    pods.wait("one")
    cluster.drain("leaving")
    until(lambda: not pods.is_there("one"))
    cluster.remove_node("leaving")


def test_a_deletion_is_finished_after_the_api_server_was_gone(pods: Pods) -> None:
    cluster = pods.cluster
    pods.create("one", ["sleep", "600"])
    pods.create("two", ["sleep", "600"])
    pods.wait("one")
    pods.wait("two")
    pods.delete("one")
    cluster.stop_api()
    cluster.start_api()
    until(lambda: not pods.is_there("one"))
    assert pods.run("two", "echo", "here")[0] == b"here\n"


def test_a_store_that_stands_still_is_waited_for(pods: Pods) -> None:
    pods.cluster.stop_etcd()
    pods.cluster.continue_etcd()
    pods.create("one", ["true"])
    assert pods.end_of("one", "Succeeded")["reason"] == "Completed"
