"""Nodes of a Kubernetes cluster that report each of their Pods as running, and start nothing.

With them a control plane is measured alone. They have a process of their own:
`python -m benchmarks.hollow_nodes KUBECONFIG`.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.service import ROOT
from providers.runtime.launchers.kubernetes.api import MERGE, Api, Object
from tests.support.kubernetes import Cluster

NODES = 4
REPORT_SECONDS = 5.0
WAIT_SECONDS = 120.0
# Room for all Pods on one virtual node, whatever the machine has.
ROOM = {"cpu": "2000", "memory": "2000Gi", "pods": "2000"}


class HollowNode:
    """A node that reports each of its Pods as running, and starts nothing."""

    def __init__(self, name: str, api: Api) -> None:
        self._name, self._api = name, api
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Add the node, and follow its Pods from now on."""
        await self._api.call("POST", "/api/v1/nodes", {"metadata": {"name": self._name}})
        await self._report()
        self._later(self._report_again())
        self._later(self._follow())

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def _report(self) -> None:
        when = _timestamp()
        ready = {
            "type": "Ready",
            "status": "True",
            "reason": "Hollow",
            "lastHeartbeatTime": when,
            "lastTransitionTime": when,
        }
        room = {**ROOM, "ephemeral-storage": "2000Gi"}
        status = {"capacity": room, "allocatable": room, "conditions": [ready]}
        path = f"/api/v1/nodes/{self._name}/status"
        await self._api.call("PATCH", path, {"status": status}, content_type=MERGE)

    async def _report_again(self) -> None:
        while True:
            await asyncio.sleep(REPORT_SECONDS)
            await self._report()

    async def _follow(self) -> None:
        query = {
            "watch": "true",
            "fieldSelector": f"spec.nodeName={self._name}",
            "timeoutSeconds": "3600",
        }
        async for event in self._api.watch("/api/v1/pods", query):
            if event["type"] == "ADDED":
                self._later(self._run(event["object"]))

    async def _run(self, pod: Object) -> None:
        when = _timestamp()
        metadata, spec = pod["metadata"], pod["spec"]["containers"][0]
        container = {
            "name": spec["name"],
            "image": spec["image"],
            "imageID": "",
            "containerID": f"hollow://{metadata['uid']}",
            "ready": True,
            "restartCount": 0,
            "state": {"running": {"startedAt": when}},
        }
        status = {"phase": "Running", "startTime": when, "containerStatuses": [container]}
        path = f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}/status"
        await self._api.call("PATCH", path, {"status": status}, content_type=MERGE)

    def _later(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _timestamp() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


async def serve_hollow_nodes(kubeconfig: Path) -> None:
    """Have hollow nodes until standard input ends. Prints a line when they are there."""
    api = Api("default", kubeconfig)
    await api.open()
    nodes = [HollowNode(f"hollow-{number}", api) for number in range(NODES)]
    for node in nodes:
        await node.start()
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    for node in nodes:
        node.close()
    await api.close()


@contextmanager
def hollow_nodes(cluster: Cluster, kubeconfig: Path) -> Iterator[None]:
    """Have hollow nodes of a cluster in a process of their own, which Pods may use."""
    command = [sys.executable, "-m", "benchmarks.hollow_nodes", str(kubeconfig)]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, cwd=ROOT)
    try:
        assert process.stdout
        if process.stdout.readline() != b"ready\n":
            raise RuntimeError("the hollow nodes did not start")
        wait_for(lambda: not any(_taints(cluster)), "the hollow nodes are not ready")
        yield
    finally:
        process.communicate()


def _taints(cluster: Cluster) -> list[Any]:
    nodes = cluster.request("GET", "/api/v1/nodes")["items"]
    return [node["spec"].get("taints") for node in nodes]


def wait_for(is_so: Callable[[], bool], complaint: str) -> None:
    """Wait until something is so. Raises RuntimeError with the complaint after WAIT_SECONDS."""
    deadline = time.monotonic() + WAIT_SECONDS
    while not is_so():
        if time.monotonic() > deadline:
            raise RuntimeError(complaint)
        time.sleep(0.1)


if __name__ == "__main__":
    asyncio.run(serve_hollow_nodes(Path(sys.argv[1])))
