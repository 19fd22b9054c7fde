"""What a Kubernetes control plane does for sandboxes a second, and 200 sessions in Pods.

etcd, API server, scheduler and controller manager are Kubernetes' own, on one machine with all that
calls them. The nodes are virtual. In the first part they are hollow: they report that a Pod runs,
and start nothing, so what is measured is the control plane alone. Attached Pods and the sessions
have containers of runc. Needs root, `.ci/install-kubernetes` and requirements-kubernetes.txt.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.hollow_nodes import NODES, ROOM, hollow_nodes, wait_for
from benchmarks.measure import Figures, measure, percentiles, table, write_json
from benchmarks.processors import Usage, add_usage, processor_ms_each, service_usage, usage_of
from benchmarks.service import (
    ROOT,
    Service,
    api_caller,
    http_caller,
    running_service,
)
from benchmarks.sessions import opened
from providers.runtime.launchers.container_guest import Image, guest_command
from providers.runtime.launchers.kubernetes.api import MERGE, Api, Object
from providers.runtime.launchers.kubernetes.cache import PodCache
from providers.runtime.launchers.kubernetes.manifest import (
    APP,
    APP_LABEL,
    CONTAINER,
    pod_manifest,
)
from providers.runtime.pool.hardening import RUNC, Hardening
from providers.runtime.pool.template import Template
from providers.values import SandboxLimits
from tests.support.kubernetes import PROGRAMS, Cluster

# Callers at once in all rows with several.
CALLERS = 16
# So many times one row as another where a single call takes less.
MANY = 5
WAIT_SECONDS = 120.0
IDLE_SECONDS = 10.0

COMPONENTS = {
    "etcd": "etcd",
    "kube-apiserver": "API server",
    "kube-scheduler": "scheduler",
    "kube-controller-manager": "controllers",
    "tests.support.virtual_kubelet": "nodes",
    "benchmarks.hollow_nodes": "nodes",
}
CLOSED_NETWORK = {
    "apiVersion": "networking.k8s.io/v1",
    "kind": "NetworkPolicy",
    "metadata": {"name": "sandboxes"},
    "spec": {
        "podSelector": {"matchLabels": {APP_LABEL: APP}},
        "policyTypes": ["Ingress", "Egress"],
    },
}
# An object such as a claim of agent-sandbox's: a reference to a pool, and a status.
CLAIMS: dict[str, Any] = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {"name": "claims.bench.example"},
    "spec": {
        "group": "bench.example",
        "scope": "Namespaced",
        "names": {"plural": "claims", "singular": "claim", "kind": "Claim"},
        "versions": [
            {
                "name": "v1",
                "served": True,
                "storage": True,
                "subresources": {"status": {}},
                "schema": {
                    "openAPIV3Schema": {
                        "type": "object",
                        "x-kubernetes-preserve-unknown-fields": True,
                    }
                },
            }
        ],
    },
}
COPY = "import os\nwhile data := os.read(0, 65536): os.write(1, data)"
_RENEW = """
import statistics, time
from executions.sessions.maintenance import renew_living
renew_living()
took = []
for _ in range(5):
    began = time.perf_counter()
    renew_living()
    took.append(time.perf_counter() - began)
print(statistics.median(took))
"""


def cluster_usage() -> dict[str, Usage]:
    """Return what each component of this process's cluster has used, and its nodes."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    found: dict[str, Usage] = {}
    for pid in map(int, children):
        try:
            command = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        except OSError:
            continue
        words = {Path(word).name for word in command[:3]}
        for program, component in COMPONENTS.items():
            if program in words:
                for each in _family(pid):
                    found[component] = add_usage(found.get(component), usage_of(each))
    return found


def _family(pid: int) -> Iterator[int]:
    """A process and all that it has started: of the nodes also the containers."""
    yield pid
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = path.read_text().split()
        except OSError:
            continue
        for child in children:
            yield from _family(int(child))


def idle_ms(usage: Callable[[], Mapping[str, Usage]]) -> dict[str, float]:
    """Return the processor time that each component uses in a second, in ms."""
    before = usage()
    time.sleep(IDLE_SECONDS)
    return processor_ms_each(before, usage(), int(IDLE_SECONDS))


def memory_growth(before: Mapping[str, Usage], after: Mapping[str, Usage]) -> dict[str, float]:
    """Return by how much the memory of each component grew, in MiB."""
    return {
        name: round(after[name].memory_mib - before[name].memory_mib, 1)
        for name in after
        if name in before
    }


def prepared_namespace(cluster: Cluster) -> str:
    """Make a namespace for sandboxes, whose network is closed, and return its name."""
    name = cluster.namespace()
    policies = f"/apis/networking.k8s.io/v1/namespaces/{name}/networkpolicies"
    cluster.request("POST", policies, CLOSED_NETWORK)
    return name


def _is_established(cluster: Cluster, kinds: str) -> bool:
    found = cluster.request("GET", f"{kinds}/{CLAIMS['metadata']['name']}")
    conditions = (found.get("status") or {}).get("conditions") or ()
    return any(each["type"] == "Established" and each["status"] == "True" for each in conditions)


class Sandboxes:
    """Pods as the launcher makes them, without anything in them. One event loop has it."""

    def __init__(self, api: Api, cache: PodCache, owner: Mapping[str, Any]) -> None:
        self.api, self.cache = api, cache
        self._owner = owner
        self._count = 0
        template = Template("python", "python")
        argument = template.guest_argument(
            workspace="/workspace", watch_memory=True, uid=None, alone_seconds=60
        )
        self._guest = guest_command(
            Image("python", "", {"python": "python3"}, {}, b"", -1), argument
        )

    @classmethod
    async def open(cls, api: Api) -> Sandboxes:
        await api.open()
        lease = {"metadata": {"name": "bench"}, "spec": {"holderIdentity": "bench"}}
        leases = f"/apis/coordination.k8s.io/v1/namespaces/{api.namespace}/leases"
        made = await api.call("POST", leases, lease)
        owner = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "name": "bench",
            "uid": made["metadata"]["uid"],
        }
        cache = PodCache(api, f"{APP_LABEL}={APP}")
        await cache.open()
        return cls(api, cache, owner)

    async def start(self, command: list[str] | None = None) -> Object:
        """Create a Pod and wait until it runs."""
        self._count += 1
        name = f"bench-{self._count}"
        body = pod_manifest(
            name,
            image="sandbox",
            command=command or self._guest,
            environment=["PATH=/usr/bin:/bin"],
            limits=SandboxLimits(),
            hardening=Hardening.of(RUNC),
            user=20_000,
            runtime_class="",
            pull_secret="",
            labels={"cofferdam.pool": "bench"},
            owner=self._owner,
        )
        self.cache.put(await self.api.call("POST", self.api.pods, body))
        async with asyncio.timeout(WAIT_SECONDS):
            pod = await self.cache.wait(name, _is_running)
        assert pod
        return pod

    async def remove(self, pod: Object) -> None:
        """Delete a Pod and wait until it is gone."""
        name = pod["metadata"]["name"]
        body = {"gracePeriodSeconds": 0, "preconditions": {"uid": pod["metadata"]["uid"]}}
        await self.api.call("DELETE", f"{self.api.pods}/{name}", body)
        async with asyncio.timeout(WAIT_SECONDS):
            await self.cache.wait(name, lambda seen: seen is None)

    async def label(self, name: str, value: str) -> None:
        body = {"metadata": {"labels": {"bench": value}}}
        await self.api.call("PATCH", f"{self.api.pods}/{name}", body, content_type=MERGE)


def _is_running(pod: Object | None) -> bool:
    return pod is not None and (pod.get("status") or {}).get("phase") == "Running"


async def _at_once(count: int, callers: int, call: Callable[[int], Awaitable[None]]) -> float:
    """Make so many calls, by so many callers. Return the seconds taken."""
    numbers = iter(range(count))

    async def caller() -> None:
        for number in numbers:
            await call(number)

    began = time.perf_counter()
    await asyncio.gather(*(caller() for _ in range(callers)))
    return time.perf_counter() - began


async def measure_lives(
    sandboxes: Sandboxes, count: int, callers: int, idle: Mapping[str, float]
) -> tuple[list[Figures], dict[str, float]]:
    """Time Pods from their creation until they run, and until they are gone. Also return the
    processor time of each component for one Pod, in ms."""
    starts: list[float] = []
    lives: list[float] = []

    async def live(_: int) -> None:
        began = time.perf_counter()
        pod = await sandboxes.start()
        starts.append((time.perf_counter() - began) * 1000)
        await sandboxes.remove(pod)
        lives.append((time.perf_counter() - began) * 1000)

    before = cluster_usage()
    seconds = await _at_once(count, callers, live)
    each = processor_ms_each(before, cluster_usage(), count, seconds, idle)
    rows = [
        percentiles("a Pod created until it runs", callers, starts, seconds),
        percentiles("and deleted until it is gone", callers, lives, seconds),
    ]
    return rows, each


async def measure_patches(
    sandboxes: Sandboxes, names: list[str], count: int, callers: int, idle: Mapping[str, float]
) -> tuple[list[Figures], dict[str, float]]:
    """Time label patches until their answer, and until a watch shows them. Also return the
    processor time of each component for one patch, in ms."""
    sent: dict[str, float] = {}
    answers: list[float] = []
    lags: list[float] = []
    query = {
        "watch": "true",
        "labelSelector": f"{APP_LABEL}={APP}",
        "timeoutSeconds": "600",
    }
    all_seen = asyncio.Event()
    wanted = {f"{callers}-{number}" for number in range(count)}

    async def follow() -> None:
        async for event in sandboxes.api.watch(sandboxes.api.pods, query):
            value = event["object"]["metadata"]["labels"].get("bench", "")
            if value in wanted and value in sent:
                wanted.discard(value)
                lags.append((time.perf_counter() - sent[value]) * 1000)
                if not wanted:
                    all_seen.set()
                    return

    async def patch(number: int) -> None:
        value = f"{callers}-{number}"
        sent[value] = time.perf_counter()
        await sandboxes.label(names[number % len(names)], value)
        answers.append((time.perf_counter() - sent[value]) * 1000)

    following = asyncio.ensure_future(follow())
    before = cluster_usage()
    seconds = await _at_once(count, callers, patch)
    each = processor_ms_each(before, cluster_usage(), count, seconds, idle)
    async with asyncio.timeout(WAIT_SECONDS):
        await all_seen.wait()
    await following
    rows = [
        percentiles("a label patch until its answer", callers, answers, seconds),
        percentiles("a label patch until a watch shows it", callers, lags, seconds),
    ]
    return rows, each


async def measure_claims(
    api: Api, count: int, callers: int, idle: Mapping[str, float]
) -> tuple[Figures, dict[str, float]]:
    """Time objects of a custom kind that are created, get a status, and are deleted. Also return
    the processor time of each component for one, in ms."""
    path = f"/apis/bench.example/v1/namespaces/{api.namespace}/claims"
    took: list[float] = []

    async def claim(number: int) -> None:
        name = f"claim-{number}"
        body = {
            "apiVersion": "bench.example/v1",
            "kind": "Claim",
            "metadata": {"name": name},
            "spec": {"warmPoolRef": {"name": "bench"}},
        }
        status = {"status": {"sandbox": {"name": name}, "conditions": []}}
        began = time.perf_counter()
        await api.call("POST", path, body)
        await api.call("PATCH", f"{path}/{name}/status", status, content_type=MERGE)
        await api.call("DELETE", f"{path}/{name}")
        took.append((time.perf_counter() - began) * 1000)

    before = cluster_usage()
    seconds = await _at_once(count, callers, claim)
    each = processor_ms_each(before, cluster_usage(), count, seconds, idle)
    return percentiles("a custom object: created, status, deleted", callers, took, seconds), each


async def measure_attach(
    sandboxes: Sandboxes, count: int
) -> tuple[list[Figures], dict[str, float]]:
    """Time attaching to a container, and a line there and back. Also return the processor time of
    each component for one line, in ms."""
    pod = await sandboxes.start(["python3", "-c", COPY])
    name = pod["metadata"]["name"]
    loop = asyncio.get_running_loop()

    async def there_and_back(end: Any) -> None:
        await loop.sock_sendall(end, b"1\n")
        if await loop.sock_recv(end, 16) != b"1\n":
            raise RuntimeError("the container sent something else")

    attached: list[float] = []
    for _ in range(count):
        began = time.perf_counter()
        stream = await sandboxes.api.attach(name, CONTAINER)
        await there_and_back(stream.end)
        attached.append((time.perf_counter() - began) * 1000)
        stream.end.close()
        await stream.close()
    stream = await sandboxes.api.attach(name, CONTAINER)
    lines: list[float] = []
    before = cluster_usage()
    for _ in range(count * MANY):
        began = time.perf_counter()
        await there_and_back(stream.end)
        lines.append((time.perf_counter() - began) * 1000)
    each = processor_ms_each(before, cluster_usage(), len(lines))
    stream.end.close()
    await stream.close()
    await sandboxes.remove(pod)
    rows = [
        percentiles("attach, with a first line there and back", 1, attached),
        percentiles("a line there and back, attached", 1, lines),
    ]
    return rows, each


async def measure_control_plane(
    cluster: Cluster, kubeconfig: Path, pods: int
) -> tuple[list[Figures], dict[str, Any]]:
    """Return the rows of the first part, and what they cost each component."""
    api = Api(prepared_namespace(cluster), kubeconfig)
    sandboxes = await Sandboxes.open(api)
    rows: list[Figures] = []
    each: dict[str, Any] = {}
    try:
        with hollow_nodes(cluster, kubeconfig):
            await measure_lives(sandboxes, CALLERS, CALLERS, {})  # uncounted
            idle = idle_ms(cluster_usage)
            each["ms of the processors in a second, idle"] = idle
            for callers in (1, CALLERS):
                count = pods if callers > 1 else pods // MANY
                found, each[f"a Pod, {callers} callers"] = await measure_lives(
                    sandboxes, count, callers, idle
                )
                rows += found
            before = cluster_usage()
            kept: list[Object] = []

            async def keep(_: int) -> None:
                kept.append(await sandboxes.start())

            await _at_once(pods, CALLERS, keep)
            each["MiB more with the Pods"] = memory_growth(before, cluster_usage())
            each["bytes of a Pod as JSON"] = len(json.dumps(kept[0]))
            names = [pod["metadata"]["name"] for pod in kept]
            for callers in (1, CALLERS):
                count = pods * (MANY if callers > 1 else 1)
                found, each[f"a patch, {callers} callers"] = await measure_patches(
                    sandboxes, names, count, callers, idle
                )
                rows += found

            kinds = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
            cluster.request("POST", kinds, CLAIMS)
            wait_for(lambda: _is_established(cluster, kinds), "the kind is not established")
            row, each["a custom object"] = await measure_claims(api, pods, CALLERS, idle)
            rows.append(row)

            async def remove(number: int) -> None:
                await sandboxes.remove(kept[number])

            await _at_once(len(kept), CALLERS, remove)
        for number in range(NODES):
            cluster.request("DELETE", f"/api/v1/nodes/hollow-{number}")
        cluster.add_node("runc", **ROOM)
        found, each["a line, attached"] = await measure_attach(sandboxes, 40)
        rows += found
    finally:
        sandboxes.cache.close()
        await api.close()
    return rows, each


@contextmanager
def service_on(
    cluster: Cluster, folder: Path, config: dict[str, object], **settings: str
) -> Iterator[Service]:
    """Start a service whose pool makes Pods in a namespace of its own."""
    folder.mkdir()
    with running_service(
        folder / "data",
        config,
        "self_managed",
        POOL_LAUNCHER="kubernetes",
        KUBECONFIG=str(cluster.kubeconfig(folder / "kubeconfig")),
        KUBERNETES_NAMESPACE=prepared_namespace(cluster),
        **settings,
    ) as service:
        yield service


def measure_sessions(
    cluster: Cluster, folder: Path, count: int, calls: int
) -> tuple[list[Figures], dict[str, Any]]:
    """Return the rows of cells and runs beside so many sessions, and what the sessions cost."""
    # Half of them may be kept, and one tenant has four fifths of these.
    config: dict[str, object] = {"max_sandboxes": 4 * count, "queue_timeout": 60}
    bounds = {"SESSIONS_PER_TENANT": "1000", "SANDBOX_MAX_TOTAL": "1000"}
    rows: list[Figures] = []
    found: dict[str, Any] = {"sessions": count}
    with service_on(cluster, folder, config, **bounds) as service:
        headers = {"X-API-Key": service.api_key}
        content = json.dumps({"code": "x = 1\nx"}).encode()

        def run() -> Callable[[], None]:
            return api_caller(service, {"code": "print(1)"}, b'"stdout":"1\\n"')

        def cell(session: str) -> Callable[[], None]:
            path = f"/api/v1/sessions/{session}/executions"
            return http_caller(service.port, path, content, headers, b'"text/plain":"1"')

        rows.append(measure("a single run, no session", run, callers=1, calls=calls, pause=0.5))
        before = {**cluster_usage(), **service_usage(service)}
        began = time.perf_counter()
        with ThreadPoolExecutor(4) as threads:
            sessions = list(threads.map(lambda _: opened(service), range(count)))
        found["sessions opened a second"] = round(count / (time.perf_counter() - began), 1)
        took = []
        for session in sessions:
            call = cell(session)
            began = time.perf_counter()
            call()
            took.append((time.perf_counter() - began) * 1000)
        rows.append(percentiles(f"the first cell of each of {count} sessions", 1, took))
        after = {**cluster_usage(), **service_usage(service)}
        found["MiB more with the sessions"] = memory_growth(before, after)
        found["ms of the processors for a session and a cell"] = processor_ms_each(
            before, after, count
        )
        rows.append(
            measure("a cell of one of them", lambda: cell(sessions[0]), callers=1, calls=calls)
        )
        rows.append(measure("a single run beside them", run, callers=1, calls=calls, pause=0.5))
        found["ms for one renewed session"] = round(
            1000 * float(service.manage("shell", "-c", _RENEW).splitlines()[-1]) / count, 2
        )
        found["ms of the processors in a second beside idle sessions"] = idle_ms(
            lambda: {**cluster_usage(), **service_usage(service)}
        )
    return rows, found


def require_programs() -> None:
    """Exit with the remedy where a cluster cannot be here."""
    if os.geteuid() != 0:
        raise SystemExit("The nodes of a cluster need root.")
    if not (PROGRAMS / "kube-apiserver").exists():
        raise SystemExit("Kubernetes is missing. Install it: sudo .ci/install-kubernetes")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.control_plane", description=__doc__)
    parser.add_argument("--pods", type=int, default=300, help="in each row of Pods (300)")
    parser.add_argument("--sessions", type=int, default=200, help="(200; 0: none)")
    parser.add_argument("--calls", type=int, default=40, help="cells and runs in each row (40)")
    parser.add_argument("--json", type=Path, default=ROOT / "var" / "bench" / "control_plane.json")
    options = parser.parse_args()
    require_programs()
    extra: dict[str, Any] = {
        "machine": platform.platform(),
        "cpus": os.cpu_count(),
        "load": [os.getloadavg()],
    }
    with tempfile.TemporaryDirectory(prefix="cofferdam-bench-") as name, Cluster(()) as cluster:
        folder = Path(name)
        kubeconfig = cluster.kubeconfig(folder / "kubeconfig")
        print("measuring Pods ...", file=sys.stderr)
        rows, extra["control_plane"] = asyncio.run(
            measure_control_plane(cluster, kubeconfig, options.pods)
        )
        print(table(rows, rows[0]))
        if options.sessions:
            print("measuring sessions ...", file=sys.stderr)
            found, extra["kept"] = measure_sessions(
                cluster, folder / "service", options.sessions, options.calls
            )
            print(table(found, found[0]))
            rows += found
    extra["load"].append(os.getloadavg())
    for part in ("control_plane", "kept"):
        for what, value in extra.get(part, {}).items():
            print(f"{what}: {value}")
    print(f"load average before and after: {extra['load'][0][0]:.1f}, {extra['load'][1][0]:.1f}")
    write_json(options.json, rows, extra)
    print(f"written to {options.json}", file=sys.stderr)


if __name__ == "__main__":
    main()
