"""The Docker pool beside what else runs a line of Python in a container, under runc and gVisor.

Peers: the image's own interpreter started inside a container, `docker run --rm`, `docker exec`,
llm-sandbox, and a bare fork server. Ours: the provider's create, run, destroy; the pool's POST
/run; and the audited POST /api/v1/executions. What is fresh for every run is called with pauses in
which the pool refills, as no engine makes containers as fast as they are used; how fast it makes
them, and where the time of a run goes, is the last part.

The interpreter's start is the baseline, measured as what it is compared with: without pauses after
each part, because the machine's speed drifts, and with the same pauses in turn with the calls that
have them. Needs the engine (DOCKER_HOST) and the images of `manage.py build_images`.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import django
import docker

from benchmarks import docker_launcher
from benchmarks.executions import PROGRAM, process_caller, soak
from benchmarks.fork_limit import fork_limit
from benchmarks.measure import Call, Figures, measure, percentiles, table, write_json
from benchmarks.service import Service, api_caller, http_caller, running_service

IMAGE = "cofferdam/python"

# Before each run in a fresh container and each start in turn with it, and between two measurements:
# the pool refills, and the engine comes to rest.
PAUSE_SECONDS = 1.0
SETTLE_SECONDS = 8.0

# At the level `tenant`: as many as keep both processors busy. More only make each other wait.
KEPT_SANDBOXES = 4

IMPORT = """
import time
began = time.perf_counter()
import pandas
print((time.perf_counter() - began) * 1000)
"""

# Runs in a container: for each line an interpreter is started, the answer is its milliseconds.
STARTS = """
import subprocess, sys, time
for _ in sys.stdin:
    began = time.perf_counter()
    subprocess.run(["/usr/bin/python3", "-c", "print(1)"], check=True, capture_output=True)
    print((time.perf_counter() - began) * 1000, flush=True)
"""


class InterpreterStarts:
    """`python3 -c 'print(1)'` of the image, inside one container: milliseconds by its clock."""

    def __init__(self, runtime: str) -> None:
        options = ["--rm", "--interactive", "--network=none", f"--runtime={runtime}"]
        command = ["docker", "run", *options, IMAGE, "python3", "-I", "-S", "-c", STARTS]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, bufsize=1)
        self.taken: list[float] = []
        self.taken_in_turn: list[float] = []
        self._start()

    def measure(self, calls: int) -> None:
        self.taken += [self._start() for _ in range(calls)]

    def in_turn(self) -> None:
        self.taken_in_turn.append(self._start())

    def rows(self) -> list[Figures]:
        name = "python3 -c 'print(1)', inside"
        return [
            percentiles(name, 1, self.taken),
            percentiles(f"{name}, after pauses", 1, self.taken_in_turn, paused=True),
        ]

    def close(self) -> None:
        self._process.communicate()

    def _start(self) -> float:
        assert self._process.stdin
        assert self._process.stdout
        print(file=self._process.stdin)
        return float(self._process.stdout.readline())


def run_caller(runtime: str) -> Callable[[], Call]:
    command = ["docker", "run", "--rm", "--network=none", f"--runtime={runtime}", IMAGE]
    return process_caller([*command, "python3", "-c", PROGRAM])


@contextmanager
def idle_container(runtime: str) -> Iterator[str]:
    options = {"runtime": runtime, "network_mode": "none", "detach": True}
    container = docker.from_env().containers.run(IMAGE, ["sleep", "3600"], **options)
    try:
        yield container.id
    finally:
        container.remove(force=True)


def llm_sandbox_caller() -> Call:
    """A session of llm-sandbox, kept open. It fails under gVisor, where it cannot copy files."""
    from llm_sandbox import SandboxSession

    session = SandboxSession(
        client=docker.from_env(),
        image=IMAGE,
        lang="python",
        skip_environment_setup=True,
        runtime_configs={"command": ["sleep", "3600"], "network_mode": "none"},
    )
    session.open()

    def call() -> None:
        if session.run(PROGRAM).stdout.strip() != "1":
            raise RuntimeError("llm-sandbox printed something else")

    return call


def provider_caller(endpoint: str, config: dict[str, Any]) -> Callable[[], Call]:
    from providers.self_managed.provider import SelfManagedProvider

    provider = SelfManagedProvider()
    provider.initialize(provider.check_config({"endpoint": endpoint, **config}))

    def call() -> None:
        instance = provider.create_instance("python", owner="bench")
        result = provider.execute_code(instance.instance_id, PROGRAM, "python", 10)
        provider.destroy_instance(instance.instance_id)
        if result.stdout != "1\n":
            raise RuntimeError(f"unexpected result: {result}")

    return lambda: call


def measure_peers(runtime: str, calls: int) -> list[Figures]:
    rows = []
    few = max(8, calls // 5)
    for callers in (1, 8):
        rows.append(measure("docker run --rm", run_caller(runtime), callers=callers, calls=few))
    with idle_container(runtime) as identifier:
        command = ["docker", "exec", identifier, "python3", "-c", PROGRAM]
        for callers in (1, 8):
            rows.append(measure("docker exec", process_caller(command), callers=callers, calls=few))
    rows += fork_limit(runtime, calls)
    if runtime == "runc":
        rows.append(measure("llm-sandbox", llm_sandbox_caller, callers=1, calls=few))
    return rows


def measure_ours(
    service: Service, config: dict[str, Any], isolation: str, calls: int, starts: InterpreterStarts
) -> list[Figures]:
    """Rows at 1, 8 and 32 callers; where every run is fresh the first has pauses."""
    fresh = isolation == "execution"
    port = service.pool_port
    code = base64.b64encode(b"def main():\n    print(1)").decode()
    run = json.dumps({"code_b64": code, "language": "python"}).encode()
    ways: list[tuple[str, Callable[[], Call]]] = [
        ("provider: create, run, destroy", provider_caller(service.pool_endpoint, config)),
        (
            "POST /api/v1/executions, audited",
            lambda: api_caller(service, {"code": PROGRAM}, b'"stdout":"1\\n"'),
        ),
    ]
    if fresh:
        # RAGFlow names no tenant, so its runs are always fresh.
        ways.insert(
            1, ("pool: POST /run", lambda: http_caller(port, "/run", run, {}, b'"stdout":"1\\n"'))
        )
    rows = []
    for name, caller in ways:
        for callers in (1, 8, 32):
            label = f"{name}, {isolation}"
            print(f"  {label}, {callers} caller(s) ...", file=sys.stderr)
            how: dict[str, Any] = {"calls": 64 if fresh else max(640, calls)}
            if fresh and callers == 1:
                # Where the tail matters most, p99 shall not be the longest call.
                counted = 3 * calls if "audited" in name else calls
                how = {"calls": counted, "pause": PAUSE_SECONDS, "in_turn": starts.in_turn}
            rows.append(measure(label, caller, callers=callers, **how))
            if fresh:
                time.sleep(SETTLE_SECONDS)
    return rows


@contextmanager
def pool_service(runtime: str, **changes: Any) -> Iterator[tuple[Service, dict[str, Any]]]:
    config: dict[str, Any] = {"runtime": runtime, "max_sandboxes": 16, "queue_timeout": 60}
    config |= changes
    with (
        tempfile.TemporaryDirectory(prefix="cofferdam-bench-") as folder,
        running_service(Path(folder), config, "self_managed") as service,
    ):
        call = provider_caller(service.pool_endpoint, config)()
        for _ in range(3):
            call()
        time.sleep(SETTLE_SECONDS)
        yield service, config


def idle_megabytes(service: Service) -> float:
    """Memory of one warm container that waits, as its cgroup counts it without the page cache."""
    used = []
    label = f"cofferdam.pool=port-{service.pool_port}"
    for container in docker.from_env().containers.list(filters={"label": label}):
        memory = container.stats(stream=False)["memory_stats"]
        if "stats" not in memory:
            continue  # it has ended meanwhile
        counted = memory["stats"]
        cache = counted.get("total_inactive_file", counted.get("inactive_file", 0))
        used.append((memory["usage"] - cache) / 2**20)
    return round(statistics.mean(used), 1)


def preloaded_import(service: Service, config: dict[str, Any]) -> Figures:
    """What `import pandas` takes in a program, by its own clock."""
    from providers.self_managed.provider import SelfManagedProvider

    provider = SelfManagedProvider()
    provider.initialize(provider.check_config({"endpoint": service.pool_endpoint, **config}))
    taken = []
    for _ in range(20):
        instance = provider.create_instance("python", owner="bench")
        result = provider.execute_code(instance.instance_id, IMPORT, "python", 30)
        provider.destroy_instance(instance.instance_id)
        taken.append(float(result.stdout))
        time.sleep(PAUSE_SECONDS)
    return percentiles("import pandas, preloaded", 1, taken)


def measure_runtime(runtime: str, calls: int, runs: int) -> tuple[list[Figures], dict[str, object]]:
    print(f"{runtime}: peers ...", file=sys.stderr)
    starts = InterpreterStarts(runtime)
    starts.measure(calls)
    rows = measure_peers(runtime, calls)
    starts.measure(calls)
    facts: dict[str, object] = {}
    with pool_service(runtime, isolation="execution", pool_size=8) as (service, config):
        facts["idle_megabytes"] = idle_megabytes(service)
        rows += measure_ours(service, config, "execution", calls, starts)
        starts.measure(calls)
    kept = {"isolation": "tenant", "pool_size": 2, "max_sandboxes": KEPT_SANDBOXES}
    with pool_service(runtime, **kept) as (service, config):
        rows += measure_ours(service, config, "tenant", calls, starts)
        starts.measure(calls)
        if runs:
            facts["soak"] = soak(service, runs)
    with pool_service(runtime, pool_size=4, preload="numpy, pandas", max_memory="512m") as (
        service,
        config,
    ):
        rows.append(preloaded_import(service, config))
    starts.close()
    return [*starts.rows(), *rows], facts


def main() -> None:
    parser = argparse.ArgumentParser(prog="make bench-containers ARGS=...", description=__doc__)
    parser.add_argument(
        "--calls",
        type=int,
        default=100,
        help="counted calls per row (100), some rows have fewer or more",
    )
    parser.add_argument("--soak", type=int, default=10_000, help="runs for memory (10000; 0: none)")
    parser.add_argument("--runtimes", nargs="+", default=["runc", "runsc"])
    parser.add_argument("--json", type=Path, default=Path("var/bench/containers.json"))
    options = parser.parse_args()
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "sandbox_site.settings")
    os.environ["PROVIDER_ALLOWED_NETWORKS"] = "127.0.0.0/8"
    with tempfile.TemporaryDirectory(prefix="cofferdam-bench-") as folder:
        os.environ["DATA_DIR"] = folder
        subprocess.run([sys.executable, "manage.py", "bootstrap"], check=True, capture_output=True)
        django.setup()
        rows: list[Figures] = []
        facts: dict[str, object] = {}
        for runtime in options.runtimes:
            found, facts[runtime] = measure_runtime(runtime, options.calls, options.soak)
            print(f"\n{runtime}\n{table(found, *found[:2])}\n{facts[runtime]}\n")
            rows += found
        for runtime in options.runtimes:
            docker_launcher.run(runtime)
    write_json(
        options.json, rows, {"machine": platform.platform(), "cpus": os.cpu_count(), **facts}
    )


if __name__ == "__main__":
    main()
