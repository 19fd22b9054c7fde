"""A recorded run in a warm Pod, beside one in a container of Docker's and beside a bare `exec`.

All are called in turn within one run, with a pause before each in which a pool refills. `exec` is
an interpreter that is started in a running Pod over the API server, as `kubectl exec` does it. Then
come runs a second of many callers, and what processor time a run takes of each process. The control
plane is Kubernetes' own, the nodes are virtual, and all of it shares the processors of one machine.

Needs root, .ci/install-kubernetes, requirements-kubernetes.txt, Docker's engine (DOCKER_HOST) and
the images of `manage.py build_images`.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import docker
from kubernetes.client import CoreV1Api
from kubernetes.stream import stream

from benchmarks.control_plane import (
    cluster_usage,
    idle_ms,
    prepared_namespace,
    require_programs,
    service_on,
)
from benchmarks.executions import PROGRAM, PYTHON, process_caller
from benchmarks.hollow_nodes import ROOM
from benchmarks.measure import Call, Figures, measure, percentiles, table, write_json
from benchmarks.processors import Usage, processor_ms_each, service_usage
from benchmarks.service import ROOT, Service, api_caller, running_service
from tests.support.kubernetes import Cluster

LAUNCHERS = ("docker", "kubernetes")
# Fresh for each run, or one of a tenant that is used again.
SHARINGS = ("execution", "tenant")
PAUSE_SECONDS = 1.0
SETTLE_SECONDS, REFILL_SECONDS = 5.0, 3.0
CALLERS = 8
CONFIG: dict[str, object] = {"max_sandboxes": 16, "queue_timeout": 60, "runtime": "runc"}
# More kept sandboxes than twice the processors only make each other wait.
KEPT: dict[str, object] = {**CONFIG, "isolation": "tenant", "pool_size": 2, "max_sandboxes": 4}
_CONTAINER = "idle"


@contextmanager
def idle_pod(cluster: Cluster) -> Iterator[tuple[str, str]]:
    """Have a running Pod that does nothing: its namespace and its name."""
    namespace, name = prepared_namespace(cluster), "idle"
    path = f"/api/v1/namespaces/{namespace}/pods"
    container = {"name": _CONTAINER, "image": "sandbox", "command": ["sleep", "3600"]}
    spec = {
        "containers": [container],
        "terminationGracePeriodSeconds": 0,
        "automountServiceAccountToken": False,
    }
    cluster.request("POST", path, {"metadata": {"name": name}, "spec": spec})
    while cluster.request("GET", f"{path}/{name}")["status"]["phase"] != "Running":
        time.sleep(0.1)
    yield namespace, name
    cluster.request("DELETE", f"{path}/{name}")


def exec_caller(cluster: Cluster, namespace: str, name: str) -> Call:
    """Return a call that starts an interpreter in a Pod over the API server."""
    pods = cluster.objects(CoreV1Api)

    def call() -> None:
        printed = stream(
            pods.connect_get_namespaced_pod_exec,
            name,
            namespace,
            container=_CONTAINER,
            command=[PYTHON, "-c", PROGRAM],
            stdin=False,
            stdout=True,
            stderr=True,
            tty=False,
        )
        if str(printed).strip() != "1":
            raise RuntimeError(f"exec printed {printed!r}")

    return call


def post_caller(service: Service) -> Call:
    """Return a call that posts a program and waits for its record."""
    return api_caller(service, {"code": PROGRAM}, b'"stdout":"1\\n"')


@contextmanager
def launched(
    launcher: str, cluster: Cluster, folder: Path, config: dict[str, object]
) -> Iterator[Service]:
    """Start a service whose pool has this launcher."""
    if launcher == "kubernetes":
        with service_on(cluster, folder, config) as service:
            yield service
    else:
        with running_service(folder, config, "self_managed", POOL_LAUNCHER=launcher) as service:
            yield service


def in_turn(ways: dict[str, Call], rounds: int) -> list[Figures]:
    """Time the calls in turn, each after a pause; each is the first of a round as often."""
    took: dict[str, list[float]] = {name: [] for name in ways}
    order = list(ways)
    for number in range(rounds + 2):
        order = [*order[1:], order[0]]
        for name in order:
            time.sleep(PAUSE_SECONDS)
            began = time.perf_counter()
            ways[name]()
            if number >= 2:
                took[name].append((time.perf_counter() - began) * 1000)
    return [percentiles(name, 1, took[name], paused=True) for name in ways]


def latencies(cluster: Cluster, folder: Path, rounds: int) -> list[Figures]:
    """Return the rows of one caller; the first is `exec`."""
    with ExitStack() as held:
        namespace, name = held.enter_context(idle_pod(cluster))
        services = {
            launcher: held.enter_context(launched(launcher, cluster, folder / launcher, CONFIG))
            for launcher in LAUNCHERS
        }
        ways: dict[str, Call] = {
            f"exec {PYTHON} -c 'print(1)' in a Pod": exec_caller(cluster, namespace, name),
            f"{PYTHON} -c 'print(1)'": process_caller([PYTHON, "-c", PROGRAM])(),
        }
        for launcher, service in services.items():
            ways[f"POST /api/v1/executions, {launcher}"] = post_caller(service)
        return in_turn(ways, rounds)


def throughput(
    cluster: Cluster, folder: Path, launcher: str, sharing: str, calls: int
) -> tuple[Figures, dict[str, float]]:
    """Return the row of many callers, and the processor time of a run in each process, in ms."""
    name = f"POST /api/v1/executions, {launcher}, {sharing}"

    def usage(service: Service) -> dict[str, Usage]:
        of_cluster = cluster_usage() if launcher == "kubernetes" else {}
        return {**of_cluster, **service_usage(service)}

    config = KEPT if sharing == "tenant" else CONFIG
    with launched(launcher, cluster, folder, config) as service:
        caller: Callable[[], Call] = lambda: post_caller(service)  # noqa: E731
        measure("warm-up", caller, callers=CALLERS, calls=CALLERS)
        time.sleep(SETTLE_SECONDS)
        idle = idle_ms(lambda: usage(service))
        before, began = usage(service), time.monotonic()
        row = measure(name, caller, callers=CALLERS, calls=calls)
        if sharing == "execution":
            # The pool makes the next ones, and what these cost belongs to the runs.
            time.sleep(REFILL_SECONDS)
        seconds = time.monotonic() - began
        # Of each caller two calls are uncounted, and what they used is not.
        runs = calls + 2 * CALLERS
        return row, processor_ms_each(before, usage(service), runs, seconds, idle)


def require_engine() -> None:
    """Exit with the remedy where Docker's engine does not answer."""
    try:
        docker.from_env().ping()
    except docker.errors.DockerException as error:
        raise SystemExit(f"Docker's engine does not answer. Set DOCKER_HOST: {error}") from None


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kubernetes", description=__doc__)
    parser.add_argument("--rounds", type=int, default=20, help="of one caller, in turn (20)")
    parser.add_argument("--calls", type=int, default=240, help="of many callers (240)")
    parser.add_argument("--json", type=Path, default=ROOT / "var" / "bench" / "kubernetes.json")
    options = parser.parse_args()
    require_programs()
    require_engine()
    extra: dict[str, Any] = {
        "machine": platform.platform(),
        "cpus": os.cpu_count(),
        "load": [os.getloadavg()],
    }
    with tempfile.TemporaryDirectory(prefix="cofferdam-bench-") as name, Cluster(()) as cluster:
        folder = Path(name)
        cluster.add_node("runc", **ROOM)
        print("measuring one caller ...", file=sys.stderr)
        rows = latencies(cluster, folder, options.rounds)
        print(table(rows, rows[0], rows[0]), flush=True)
        extra["processor_ms"] = {}
        found = []
        for sharing in SHARINGS:
            calls = options.calls if sharing == "tenant" else options.calls // 5
            for launcher in LAUNCHERS:
                print(f"measuring {CALLERS} callers, {launcher}, {sharing} ...", file=sys.stderr)
                place = folder / f"{launcher}-{sharing}"
                row, each = throughput(cluster, place, launcher, sharing, calls)
                found.append(row)
                extra["processor_ms"][row.name] = each
        print(table(found, found[0]))
        rows += found
    extra["load"].append(os.getloadavg())
    for what, each in extra["processor_ms"].items():
        print(f"ms of the processors for a run, {what}: {each}")
    print(f"load average before and after: {extra['load'][0][0]:.1f}, {extra['load'][1][0]:.1f}")
    write_json(options.json, rows, extra)
    print(f"written to {options.json}", file=sys.stderr)


if __name__ == "__main__":
    main()
