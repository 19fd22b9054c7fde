"""Nodes of a test's Kubernetes cluster: `python -m tests.support.virtual_kubelet`.

For the API server each is a kubelet of its own. Their Pods are containers of runc on this machine,
or of runsc where the handler of their RuntimeClass says so. A Pod has a network of loopback alone,
or the machine's with hostNetwork. There are no probes but readiness. Images are pulled from
registries on loopback alone.

Commands come as lines of JSON on standard input; each is answered with a line "done".
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import json
import logging
import os
import shutil
import signal
import ssl
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp

from providers.runtime.pool.cgroup import ROOT, CgroupParent, own_groups
from tests.support.node_api import MERGE, RETRY_SECONDS, Api, ApiError, timestamp
from tests.support.node_pods import NodePod, Pods, Setup
from tests.support.pod_streams import StreamServer
from tests.support.processes import free_port

logger = logging.getLogger("virtual_kubelet")

HEARTBEAT_SECONDS = 2.0
_SUBREAPER = 36
_REMOVAL_SECONDS, _LOOK_SECONDS = 5.0, 0.02


class Node:
    """One node: its object, its heartbeat, its Pods, and the port of its kubelet."""

    def __init__(self, name: str, capacity: dict[str, str], setup: Setup) -> None:
        self.name = name
        self._capacity = {"ephemeral-storage": "2000Gi", **capacity}
        self._setup = setup
        self._api = setup.api
        self._pods: Pods = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._server = StreamServer(self._pods, setup.client)
        self._port = 0

    async def start(self) -> None:
        self._port = await self._serve()
        body = {
            "metadata": {
                "name": self.name,
                "labels": {
                    "kubernetes.io/hostname": self.name,
                    "kubernetes.io/os": "linux",
                    "kubernetes.io/arch": "amd64",
                },
            }
        }
        try:
            await self._api.insist("POST", "/api/v1/nodes", body)
        except ApiError as error:
            if error.code != 409:
                raise
        await self._report("True", "KubeletReady")
        for work in (self._renew_lease(), self._watch()):
            self._tasks.append(asyncio.create_task(work))

    async def _serve(self) -> int:
        for tries_left in reversed(range(3)):
            port = free_port()
            try:
                await self._server.start(port, self._setup.serving)
                return port
            except OSError:
                if not tries_left:
                    raise
        raise AssertionError

    async def lose(self) -> None:
        """Vanish: nothing is reported from now on, but that the node is not known to live."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.close()
        await asyncio.gather(*(pod.vanish() for pod in self._pods.values()))
        self._pods.clear()

    async def declare_lost(self) -> None:
        """Report what the controller manager finds out about a lost node in the end."""
        await self._report("Unknown", "NodeStatusUnknown")

    async def _report(self, ready: str, reason: str) -> None:
        when = timestamp()
        facts = (
            *("machineID", "systemUUID", "bootID", "kernelVersion", "osImage"),
            *("containerRuntimeVersion", "kubeletVersion", "kubeProxyVersion"),
        )
        conditions = [
            {"type": kind, "status": "False" if ready == "True" else ready, "reason": reason}
            for kind in ("MemoryPressure", "DiskPressure", "PIDPressure")
        ]
        conditions.append({"type": "Ready", "status": ready, "reason": reason})
        for each in conditions:
            each |= {"lastHeartbeatTime": when, "lastTransitionTime": when}
        status = {
            "capacity": self._capacity,
            "allocatable": self._capacity,
            "conditions": conditions,
            "addresses": [
                {"type": "InternalIP", "address": "127.0.0.1"},
                {"type": "Hostname", "address": self.name},
            ],
            "daemonEndpoints": {"kubeletEndpoint": {"Port": self._port}},
            "nodeInfo": {
                **dict.fromkeys(facts, "virtual"),
                "operatingSystem": "linux",
                "architecture": "amd64",
            },
        }
        path = f"/api/v1/nodes/{self.name}/status"
        await self._api.insist("PATCH", path, {"status": status}, MERGE)

    async def _renew_lease(self) -> None:
        """Renew the node's lease, and say that it is ready where something else has been said."""
        leases = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"
        count = 0
        while True:
            when = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
            spec = {
                "holderIdentity": self.name,
                "leaseDurationSeconds": 40,
                "renewTime": when,
            }
            try:
                await self._api.patch(f"{leases}/{self.name}", {"spec": spec})
                if count % 5 == 0:
                    await self._report("True", "KubeletReady")
                count += 1
            except ApiError as error:
                if error.code == 404:
                    body = {"metadata": {"name": self.name}, "spec": spec}
                    with contextlib.suppress(ApiError, aiohttp.ClientError, TimeoutError):
                        await self._api.request("POST", leases, body)
            except (aiohttp.ClientError, TimeoutError, json.JSONDecodeError):
                logger.info("%s: no heartbeat", self.name)
            await asyncio.sleep(HEARTBEAT_SECONDS)

    async def _watch(self) -> None:
        """Follow the Pods of this node; list them anew after whatever has ended the watch."""
        while True:
            try:
                version = await self._list()
                await self._follow(version)
            except (aiohttp.ClientError, TimeoutError, json.JSONDecodeError, ApiError) as error:
                logger.info("%s: watch: %s", self.name, error)
            await asyncio.sleep(RETRY_SECONDS)

    async def _list(self) -> str:
        found = await self._api.request("GET", self._selection())
        there = {pod["metadata"]["uid"] for pod in found["items"]}
        for pod in found["items"]:
            self._note(pod)
        for uid, own in list(self._pods.items()):
            if uid not in there:
                self._forget(own)
        return str(found["metadata"]["resourceVersion"])

    async def _follow(self, version: str) -> None:
        while True:
            path = f"{self._selection()}&watch=1&resourceVersion={version}"
            async for event in self._api.watch(
                f"{path}&allowWatchBookmarks=true&timeoutSeconds=300"
            ):
                kind, found = event["type"], event["object"]
                if kind == "ERROR":
                    return
                version = found["metadata"]["resourceVersion"]
                if kind in ("ADDED", "MODIFIED"):
                    self._note(found)
                elif kind == "DELETED" and (own := self._pods.get(found["metadata"]["uid"])):
                    self._forget(own)

    def _selection(self) -> str:
        return f"/api/v1/pods?fieldSelector=spec.nodeName%3D{self.name}"

    def _note(self, pod: dict[str, Any]) -> None:
        uid = pod["metadata"]["uid"]
        own = self._pods.get(uid)
        if own is None:
            own = NodePod(pod, self._setup, self.name)
            self._pods[uid] = own
            own.start()
        own.update(pod)

    def _forget(self, pod: NodePod) -> None:
        """The object is gone: what is left of it here goes, too."""
        self._pods.pop(pod.uid, None)
        _start_task(pod.vanish())


_background: set[asyncio.Task[None]] = set()


def _start_task(work: Coroutine[Any, Any, None]) -> None:
    task = asyncio.create_task(work)
    _background.add(task)
    task.add_done_callback(_background.discard)


class Kubelet:
    """All nodes of this process, and the commands to it."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._nodes: dict[str, Node] = {}

    async def add(self, name: str, capacity: dict[str, str]) -> None:
        if name in self._nodes:
            return
        node = Node(name, capacity, self._setup)
        self._nodes[name] = node
        await node.start()

    async def lose(self, name: str) -> None:
        node = self._nodes.pop(name, None)
        if node:
            await node.lose()
            await node.declare_lost()

    async def close(self) -> None:
        await asyncio.gather(*(node.lose() for node in self._nodes.values()))
        if _background:
            await asyncio.wait(_background, timeout=10)

    async def serve(self, lines: asyncio.StreamReader) -> None:
        """Do what the lines say, until there are no more."""
        commands: dict[str, Callable[..., Coroutine[Any, Any, None]]] = {
            "add": self.add,
            "lose": self.lose,
        }
        while line := await lines.readline():
            arguments = json.loads(line)
            answer = "done"
            try:
                await commands[arguments.pop("command")](**arguments)
            except (ApiError, OSError) as error:
                answer = f"failed: {error}"
            print(answer, flush=True)


def remove_groups(parent: CgroupParent) -> None:
    """Remove the group of all Pods, with those of this name that runc has made on version 1."""
    name = parent.path.name
    deadline = time.monotonic() + _REMOVAL_SECONDS
    if parent.version == 1:
        for controller, own in own_groups(Path("/proc")).items():
            kind = controller.removeprefix("name=") or "unified"
            group = ROOT / kind / own.lstrip("/") / name
            for folder in (*group.glob("*/"), group):
                _remove_group(folder, deadline)
    parent.remove()


def _remove_group(folder: Path, deadline: float) -> None:
    """The last process of a group may need a moment to leave it."""
    while True:
        try:
            folder.rmdir()
            return
        except FileNotFoundError:
            return
        except OSError as error:
            if time.monotonic() > deadline:
                logger.warning("%s could not be removed: %s", folder, error)
                return
            time.sleep(_LOOK_SECONDS)


async def run(options: argparse.Namespace) -> None:
    context = ssl.create_default_context(cafile=options.authority)
    context.load_cert_chain(options.identity)
    serving = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=options.authority)
    serving.verify_mode = ssl.CERT_REQUIRED
    serving.load_cert_chain(options.serving)
    cgroups = CgroupParent.create()
    if cgroups is None:
        sys.exit("no cgroup can be made here")
    folder = Path(tempfile.mkdtemp(prefix="pods-", dir=options.folder))
    folder.chmod(0o711)
    api = Api(options.api, context)
    images = Path(options.folder) / "images.json"
    kubelet = Kubelet(Setup(api, folder, images, cgroups, serving, options.client))
    loop = asyncio.get_running_loop()
    lines = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    work = asyncio.create_task(kubelet.serve(lines))
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, work.cancel)
    try:
        with contextlib.suppress(asyncio.CancelledError):
            await work
    finally:
        await kubelet.close()
        await api.close()
        remove_groups(cgroups)
        shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    for name in ("api", "authority", "identity", "serving", "client", "folder"):
        parser.add_argument(f"--{name}", required=True)
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)
    # What is made here is for containers of any user to read.
    os.umask(0o022)
    # The first process of a container loses its parent, and is to be ours.
    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)
    asyncio.set_child_watcher(asyncio.PidfdChildWatcher())
    asyncio.run(run(options))


if __name__ == "__main__":
    main()
