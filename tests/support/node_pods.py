"""A Pod on a virtual node: its containers from their start to their end, and its status.

Restarts, init containers, deadlines and deletion are those of a kubelet. Of probes there is
readiness, for Pods that have the machine's network.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import logging
import shutil
import signal
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from providers.runtime.pool.cgroup import CgroupParent
from tests.support.node_api import MERGE, Api, ApiError, timestamp
from tests.support.pod_bundles import (
    BadContainer,
    Place,
    expand,
    is_in_memory,
    quantity,
    write_bundle,
)
from tests.support.pod_container import Container, End, cgroup_path

logger = logging.getLogger("virtual_kubelet")

TOOLS = {"": "runc", "runc": "runc", "runsc": "/usr/local/bin/runsc"}
RETRY_SECONDS = 1.0
_UNBOUND = 1 << 40
# What gVisor's own kernel takes beside the programs in it.
_GVISOR_BYTES = 64 << 20
_numbers = itertools.count(1)

Pods = dict[str, "NodePod"]


@dataclass
class Setup:
    """What all nodes have in common."""

    api: Api
    folder: Path
    images: Path
    cgroups: CgroupParent
    serving: ssl.SSLContext
    client: str


@dataclass
class State:
    """What the status of a container says."""

    spec: dict[str, Any]
    now: dict[str, Any] = field(
        default_factory=lambda: {"waiting": {"reason": "ContainerCreating"}}
    )
    last: dict[str, Any] = field(default_factory=dict)
    restarts: int = 0
    number: int = 0
    is_ready: bool = False
    is_over: bool = False

    def status(self) -> dict[str, Any]:
        return {
            "name": self.spec["name"],
            "image": self.spec["image"],
            "imageID": f"virtual://{self.spec['image']}" if self.number else "",
            "containerID": f"virtual://{self.number}" if self.number else "",
            "ready": self.is_ready,
            "started": "running" in self.now,
            "restartCount": self.restarts,
            "state": self.now,
            "lastState": self.last,
        }

    @property
    def code(self) -> int | None:
        end = self.now.get("terminated")
        return None if end is None else int(end["exitCode"])


class NodePod:
    """One Pod here. `containers` has those that run, by name, each with its process; `logs` are
    what the newest of each name has written."""

    def __init__(self, pod: dict[str, Any], setup: Setup, node: str) -> None:
        self.pod = pod
        self.uid: str = pod["metadata"]["uid"]
        self.name: str = pod["metadata"]["name"]
        self.namespace: str = pod["metadata"]["namespace"]
        self.containers: dict[str, tuple[Container, dict[str, Any]]] = {}
        self.logs: dict[str, bytearray] = {}
        self._spec: dict[str, Any] = pod["spec"]
        self._setup = setup
        self._api = setup.api
        self._node = node
        self._number = next(_numbers)
        self._folder = setup.folder / self.uid
        self._path = f"/api/v1/namespaces/{self.namespace}/pods/{self.name}"
        self._states = [State(each) for each in self._spec["containers"]]
        self._init_states = [State(each) for each in self._spec.get("initContainers") or []]
        self._started_at = timestamp()
        self._failure: dict[str, str] = {}
        self._publishing = asyncio.Lock()
        self._change = asyncio.Event()
        self._deletion = asyncio.Event()
        self._shorter_grace = asyncio.Event()
        self._is_ending = False
        self._is_over = pod["status"].get("phase") in ("Succeeded", "Failed")
        # Its containers were those of a node that was lost, which has come back without them.
        self._was_lost = any(
            each.get("containerID") for each in pod["status"].get("containerStatuses") or []
        )
        self._kill_at = 0.0
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    def update(self, pod: dict[str, Any]) -> None:
        """Take note of the newest object."""
        self.pod = pod
        self._change.set()
        metadata = pod["metadata"]
        if metadata.get("deletionTimestamp"):
            loop = asyncio.get_running_loop()
            wanted = loop.time() + float(metadata.get("deletionGracePeriodSeconds") or 0)
            if not self._deletion.is_set() or wanted < self._kill_at:
                self._kill_at = wanted
                self._shorter_grace.set()
            self._deletion.set()

    async def vanish(self) -> None:
        """Kill all containers. Nothing is reported any more."""
        self._is_ending = True
        if self._task:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._remove()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            if not self._is_over:
                life = asyncio.create_task(self._run_containers())
                deadline = asyncio.create_task(self._pass_deadline())
                deletion = asyncio.create_task(self._deletion.wait())
                works: set[asyncio.Task[Any]] = {life, deadline, deletion}
                try:
                    await asyncio.wait(works, return_when=asyncio.FIRST_COMPLETED)
                    if not life.done():
                        if not deletion.done():
                            grace = self._spec.get("terminationGracePeriodSeconds", 30)
                            self._kill_at = loop.time() + float(grace)
                            self._failure = {
                                "reason": "DeadlineExceeded",
                                "message": "Pod was active on the node longer than the specified deadline",
                            }
                            await self._publish()
                        await self._stop(life)
                    await life
                finally:
                    for work in works:
                        work.cancel()
                    await asyncio.gather(*works, return_exceptions=True)
                self._is_over = True
                await self._publish()
                await self._remove()
            await self._deletion.wait()
            await self._delete()
        except asyncio.CancelledError:
            raise
        except Exception:
            logger.exception("%s: the Pod is given up", self.name)
            raise

    async def _pass_deadline(self) -> None:
        """Wait until the Pod has lasted as long as it may, which can be changed meanwhile."""
        loop = asyncio.get_running_loop()
        start = loop.time()
        while True:
            self._change.clear()
            limit = self.pod["spec"].get("activeDeadlineSeconds")
            left = None if limit is None else start + float(limit) - loop.time()
            if left is not None and left <= 0:
                return
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._change.wait(), left)

    async def _stop(self, life: asyncio.Task[None]) -> None:
        """Ask the containers to end, and kill those that have not in the time they were given."""
        loop = asyncio.get_running_loop()
        self._is_ending = True
        for container, _ in list(self.containers.values()):
            await container.signal(signal.SIGTERM)
        while not life.done():
            self._shorter_grace.clear()
            shorter = asyncio.create_task(self._shorter_grace.wait())
            left = max(0.0, self._kill_at - loop.time())
            await asyncio.wait({life, shorter}, timeout=left, return_when="FIRST_COMPLETED")
            shorter.cancel()
            if loop.time() >= self._kill_at:
                for container, _ in list(self.containers.values()):
                    await container.signal(signal.SIGKILL)
                # One that was about to start is killed the next time.
                await asyncio.wait({life}, timeout=0.1)

    async def _delete(self) -> None:
        body = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "gracePeriodSeconds": 0,
            "preconditions": {"uid": self.uid},
        }
        await self._tolerate("DELETE", self._path, body)

    async def _remove(self) -> None:
        works = [each.remove() for each, _ in self.containers.values()]
        await asyncio.gather(*works)
        self.containers.clear()
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _run_containers(self) -> None:
        """Run all containers until they are over. Returns early where the Pod is to end."""
        if self._was_lost and self._spec.get("restartPolicy") == "Never":
            for state in self._states:
                state.now = {"terminated": {"exitCode": 255, "reason": "Unknown"}}
                state.is_over = True
            return
        tool = await self._find_tool()
        place = await self._make_place()
        if tool is None or place is None:
            return
        for state in self._init_states:
            await self._run_container(state, tool, place)
            if state.code != 0:
                for other in self._states:
                    other.is_over = True
                return
        await asyncio.gather(*(self._run_container(state, tool, place) for state in self._states))

    async def _find_tool(self) -> str | None:
        name = self._spec.get("runtimeClassName")
        if not name:
            return TOOLS[""]
        path = f"/apis/node.k8s.io/v1/runtimeclasses/{name}"
        while not self._is_ending:
            try:
                handler = (await self._api.insist("GET", path, None))["handler"]
            except ApiError as error:
                handler = f"of {name}, {error}"
            if handler in TOOLS:
                return TOOLS[handler]
            await self._make_event(
                "FailedCreatePodSandBox",
                f'Failed to create pod sandbox: no runtime for "{handler}" is configured',
            )
            await self._pause()
        return None

    async def _make_place(self) -> Place | None:
        while not self._is_ending:
            try:
                self._folder.mkdir(mode=0o711, exist_ok=True)
                volumes = await self._make_volumes()
                split = urlsplit(self._api.url)
                host, port = ("10.96.0.1", 443)
                if self._spec.get("hostNetwork"):
                    host, port = split.hostname or "", split.port or 443
                variables = {
                    "KUBERNETES_SERVICE_HOST": host,
                    "KUBERNETES_SERVICE_PORT": str(port),
                }
                return Place(self._folder, volumes, self._setup.images, variables)
            except (LookupError, BadContainer) as error:
                await self._make_event("FailedMount", f"MountVolume.SetUp failed: {error}")
                await self._pause()
        return None

    async def _pause(self) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._deletion.wait(), RETRY_SECONDS)

    async def _run_container(self, state: State, tool: str, place: Place) -> None:
        """Run a container until it is not to be started again."""
        policy = self._spec.get("restartPolicy", "Always")
        is_first = state in self._init_states
        while not self._is_ending:
            container = await self._start(state, tool, place)
            if container is not None:
                await self._publish()
                probe = asyncio.create_task(self._probe(state))
                try:
                    end = await asyncio.shield(container.end)
                finally:
                    probe.cancel()
                await self._note_end(state, container, end)
            if state.code is None:
                await self._publish()
                await self._pause()
                continue
            again = policy == "Always" and not is_first
            again = again or (policy != "Never" and state.code != 0)
            if self._is_ending or not again:
                break
            if old := self.containers.get(state.spec["name"]):
                await old[0].remove()
                del self.containers[state.spec["name"]]
            state.last, state.restarts = state.now, state.restarts + 1
            if state.restarts > 1:
                state.now = {"waiting": {"reason": "CrashLoopBackOff"}}
                await self._publish()
                await self._pause()
        state.is_over = True

    async def _start(self, state: State, tool: str, place: Place) -> Container | None:
        spec = state.spec
        try:
            environment = dict(place.variables) | await self._environment(spec)
            limits = (spec.get("resources") or {}).get("limits") or {}
            size = int(quantity(limits["memory"])) if "memory" in limits else _UNBOUND
            if tool != TOOLS[""]:
                size += _GVISOR_BYTES
            cgroup = self._setup.cgroups.new(size)
            cgroup.yield_processors(yields=False)
            state.number = next(_numbers)
            folder = self._folder / f"{spec['name']}-{state.number}"
            container = Container(
                tool,
                folder,
                f"pod-{self._number}-{state.number}",
                cgroup,
                has_input=bool(spec.get("stdin")),
                input_once=bool(spec.get("stdinOnce")),
            )
            try:
                process = write_bundle(
                    folder, self.pod, spec, environment, place, cgroup_path(cgroup)
                )
                await container.start()
            except BaseException:
                await container.remove()
                raise
        except BadContainer as error:
            state.number = 0
            state.now = {"waiting": {"reason": error.reason, "message": str(error)}}
            await self._make_event("Failed", str(error))
            return None
        except OSError as error:
            when = timestamp()
            state.now = {
                "terminated": {
                    "exitCode": 128,
                    "reason": "StartError",
                    "message": str(error),
                    "startedAt": when,
                    "finishedAt": when,
                }
            }
            return None
        self.containers[spec["name"]] = (container, process)
        self.logs[spec["name"]] = container.log
        state.now = {"running": {"startedAt": timestamp()}}
        state.is_ready = not spec.get("readinessProbe")
        return container

    async def _note_end(self, state: State, container: Container, end: End) -> None:
        state.is_ready = False
        state.now = {
            "terminated": {
                "exitCode": end.code,
                "reason": end.reason,
                "startedAt": state.now["running"]["startedAt"],
                "finishedAt": timestamp(),
                "containerID": f"virtual://{state.number}",
            }
        }

    async def _probe(self, state: State) -> None:
        probe = state.spec.get("readinessProbe")
        if not probe:
            return
        await asyncio.sleep(float(probe.get("initialDelaySeconds") or 0))
        while True:
            was = state.is_ready
            state.is_ready = await self._is_ready(state, probe)
            if was != state.is_ready:
                await self._publish()
            await asyncio.sleep(float(probe.get("periodSeconds") or 10) if was else 0.5)

    async def _is_ready(self, state: State, probe: Mapping[str, Any]) -> bool:
        timeout = float(probe.get("timeoutSeconds") or 1)
        ports = {each.get("name"): each["containerPort"] for each in state.spec.get("ports") or []}
        try:
            async with asyncio.timeout(max(timeout, 10)):
                if action := probe.get("httpGet"):
                    port = ports.get(action["port"], action["port"])
                    url = f"http://127.0.0.1:{port}{action.get('path') or '/'}"
                    headers = {
                        each["name"]: each["value"] for each in action.get("httpHeaders") or []
                    }
                    async with (
                        aiohttp.ClientSession() as session,
                        session.get(url, headers=headers, allow_redirects=False) as answer,
                    ):
                        return answer.status < 400
                if action := probe.get("tcpSocket"):
                    port = ports.get(action["port"], action["port"])
                    _, writer = await asyncio.open_connection("127.0.0.1", int(port))
                    writer.close()
                    return True
                container, process = self.containers[state.spec["name"]]
                command = await container.exec(probe["exec"]["command"], process, next(_numbers))
                await command.communicate()
                return bool(command.returncode == 0)
        except (OSError, aiohttp.ClientError, TimeoutError):
            return False

    async def _object(self, kind: str, name: str, is_optional: bool | None) -> dict[str, Any]:
        """Raises BadContainer where there is none."""
        path = f"/api/v1/namespaces/{self.namespace}/{kind}/{name}"
        try:
            found: dict[str, Any] = await self._api.insist("GET", path, None)
            return found
        except ApiError as error:
            if is_optional:
                return {}
            raise BadContainer("CreateContainerConfigError", f"{kind} {name}: {error}") from error

    async def _data(self, source: Mapping[str, Any], name: str) -> dict[str, bytes]:
        """The data of a secret or a ConfigMap, which `source` names in `secret...` or `config...`."""
        is_secret = any(key.startswith("secret") for key in source)
        found = await self._object(
            "secrets" if is_secret else "configmaps",
            name,
            next(iter(source.values())).get("optional"),
        )
        data = found.get("data") or {}
        if is_secret:
            return {key: base64.b64decode(value) for key, value in data.items()}
        return {key: value.encode() for key, value in data.items()}

    async def _environment(self, spec: Mapping[str, Any]) -> dict[str, str]:
        """Raises BadContainer."""
        found: dict[str, str] = {}
        for each in spec.get("envFrom") or []:
            source = {key: value for key, value in each.items() if key != "prefix"}
            data = await self._data(source, next(iter(source.values()))["name"])
            for key, value in data.items():
                found[each.get("prefix", "") + key] = value.decode()
        for each in spec.get("env") or []:
            if "valueFrom" not in each:
                found[each["name"]] = expand(each.get("value") or "", found)
                continue
            source = each["valueFrom"]
            if path := (source.get("fieldRef") or {}).get("fieldPath"):
                found[each["name"]] = self._field(path)
            elif reference := source.get("secretKeyRef") or source.get("configMapKeyRef"):
                data = await self._data(source, reference["name"])
                if reference["key"] in data:
                    found[each["name"]] = data[reference["key"]].decode()
                elif not reference.get("optional"):
                    raise BadContainer(
                        "CreateContainerConfigError",
                        f"couldn't find key {reference['key']} in {reference['name']}",
                    )
            else:
                raise BadContainer(
                    "CreateContainerConfigError", f"{each['name']}: {source} is not known here"
                )
        return found

    def _field(self, path: str) -> str:
        known = {
            "metadata.name": self.name,
            "metadata.namespace": self.namespace,
            "metadata.uid": self.uid,
            "spec.nodeName": self._node,
            "spec.serviceAccountName": self._spec.get("serviceAccountName", "default"),
            "status.hostIP": "127.0.0.1",
            "status.podIP": self._address,
        }
        for kind in ("labels", "annotations"):
            prefix = f"metadata.{kind}['"
            if path.startswith(prefix):
                values = self.pod["metadata"].get(kind) or {}
                return str(values.get(path.removeprefix(prefix).removesuffix("']"), ""))
        if path not in known:
            raise BadContainer("CreateContainerConfigError", f"the field {path} is not known here")
        return str(known[path])

    @property
    def _address(self) -> str:
        if self._spec.get("hostNetwork"):
            return "127.0.0.1"
        return f"10.244.{self._number // 250 % 250}.{self._number % 250 + 1}"

    async def _make_volumes(self) -> dict[str, Path]:
        """The folders of the volumes that are not in memory. Raises BadContainer."""
        found: dict[str, Path] = {}
        containers = [*self._spec["containers"], *(self._spec.get("initContainers") or [])]
        for volume in self._spec.get("volumes") or []:
            name = volume["name"]
            folder = self._folder / f"volume-{name}"
            if is_in_memory(volume, containers):
                continue
            if "hostPath" in volume:
                found[name] = Path(volume["hostPath"]["path"])
                continue
            folder.mkdir(exist_ok=True)
            found[name] = folder
            if "emptyDir" in volume:
                folder.chmod(0o1777)
                continue
            folder.chmod(0o755)
            sources = (volume.get("projected") or {}).get("sources") or [
                {key: value for key, value in volume.items() if key != "name"}
            ]
            for source in sources:
                await self._fill(folder, source)
        return found

    async def _fill(self, folder: Path, source: Mapping[str, Any]) -> None:
        """Write the files of a secret or a ConfigMap."""
        ((kind, named),) = source.items()
        if kind not in ("secret", "configMap"):
            raise BadContainer("FailedMount", f"a volume of {kind} is not known here")
        data = await self._data(source, named.get("secretName") or named["name"])
        items = named.get("items") or [{"key": key, "path": key} for key in data]
        for item in items:
            if item["key"] not in data:
                raise BadContainer("FailedMount", f"references non-existent key: {item['key']}")
            path = folder / item["path"]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data[item["key"]])
            path.chmod(item.get("mode") or named.get("defaultMode") or 0o644)
            group = (self._spec.get("securityContext") or {}).get("fsGroup")
            if group is not None:
                shutil.chown(path, group=int(group))
                path.chmod(path.stat().st_mode | 0o040)

    def _phase(self) -> str:
        if self._failure:
            return "Failed"
        if any(state.is_over and state.code not in (0, None) for state in self._init_states):
            return "Failed"
        codes = [state.code for state in self._states]
        if self._is_over or (all(s.is_over for s in self._states) and None not in codes):
            return "Succeeded" if codes and not any(code != 0 for code in codes) else "Failed"
        waits = [not state.number and not state.restarts for state in self._states]
        return "Pending" if any(waits) else "Running"

    def _status(self) -> dict[str, Any]:
        ready = all(state.is_ready for state in self._states)
        first = all(state.code == 0 for state in self._init_states)
        phase = self._phase()
        when = timestamp()
        old = {each["type"]: each for each in self.pod["status"].get("conditions") or []}
        conditions = []
        for kind, is_so in (
            ("Initialized", first),
            ("Ready", ready),
            ("ContainersReady", ready),
            ("PodScheduled", True),
        ):
            status = str(is_so)
            since = old.get(kind, {})
            time = since.get("lastTransitionTime") if since.get("status") == status else when
            conditions.append({"type": kind, "status": status, "lastTransitionTime": time})
        return {
            "phase": phase,
            "startTime": self._started_at,
            "hostIP": "127.0.0.1",
            "podIP": self._address,
            "podIPs": [{"ip": self._address}],
            "conditions": conditions,
            "containerStatuses": [state.status() for state in self._states],
            "initContainerStatuses": [state.status() for state in self._init_states],
            **self._failure,
        }

    async def _publish(self) -> None:
        """Report what is so by then. An object that is not this Pod's any more is left alone."""
        async with self._publishing:
            body = {"metadata": {"uid": self.uid}, "status": self._status()}
            await self._tolerate("PATCH", f"{self._path}/status", body, MERGE)

    async def _tolerate(self, method: str, path: str, body: Any, kind: str = "") -> None:
        """Ask again until there is an answer, which may be that the object is another one's."""
        try:
            await self._api.insist(method, path, body, kind)
        except ApiError as error:
            logger.info("%s: %s", self.name, error)

    async def _make_event(self, reason: str, message: str) -> None:
        """Make an event of the Pod."""
        when = timestamp()
        event = {
            "metadata": {"generateName": f"{self.name}."},
            "involvedObject": {
                "apiVersion": "v1",
                "kind": "Pod",
                "name": self.name,
                "namespace": self.namespace,
                "uid": self.uid,
            },
            "type": "Warning",
            "reason": reason,
            "message": message,
            "source": {"component": "kubelet", "host": self._node},
            "firstTimestamp": when,
            "lastTimestamp": when,
            "count": 1,
        }
        await self._tolerate("POST", f"/api/v1/namespaces/{self.namespace}/events", event)
