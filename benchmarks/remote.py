"""What Cofferdam adds to a bare call of the E2B SDK: a sandbox made, code run in it, and ended.

The service is the tests' own on loopback, in a process of its own, so the network costs nothing
and what is left is what our layer costs. It runs the code for real, in a bubblewrap sandbox.
"""

from __future__ import annotations

import argparse
import os
import platform
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.measure import Figures, measure, table, write_json
from benchmarks.service import ROOT, api_caller, running_service
from providers.options import Usual, use_options

KEY = "e2b_try"
PROGRAM = "print(1)"


@contextmanager
def running_e2b() -> Iterator[str]:
    """The address of a test server that speaks E2B's protocol."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.e2b_server", str(port)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        if not process.stdout.readline():
            raise RuntimeError("the test server did not start")
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(10)


def sdk_caller(url: str) -> Callable[[], Callable[[], None]]:
    """The SDK as its documentation has it."""
    from e2b_code_interpreter import Sandbox

    def call() -> None:
        sandbox = Sandbox.create(api_key=KEY, api_url=url, sandbox_url=url)
        try:
            execution = sandbox.run_code(PROGRAM)
        finally:
            sandbox.kill()
        if execution.logs.stdout != ["1\n"]:
            raise RuntimeError(f"unexpected answer: {execution!r}")

    return lambda: call


def provider_caller(url: str) -> Callable[[], Callable[[], None]]:
    """The same through the provider, which also looks for artifacts."""
    from providers.e2b.provider import E2BProvider

    provider = E2BProvider()
    provider.initialize(E2BProvider.check_config(config_of(url)))

    def call() -> None:
        instance = provider.create_instance("python").instance_id
        try:
            result = provider.execute_code(instance, PROGRAM, "python")
        finally:
            provider.destroy_instance(instance)
        if result.stdout != "1\n":
            raise RuntimeError(f"unexpected answer: {result!r}")

    return lambda: call


def config_of(url: str) -> dict[str, object]:
    return {"api_key": KEY, "api_url": url, "sandbox_url": url}


def measure_all(calls: int) -> list[Figures]:
    """One caller each. Every row is measured in turn, three times, and the middle one counts:
    what else the machine does must not fall on one row alone."""
    with (
        running_e2b() as url,
        tempfile.TemporaryDirectory(prefix="cofferdam-bench-") as folder,
        running_service(Path(folder), config_of(url), provider="e2b") as service,
    ):
        callers = {
            "E2B SDK: create, run_code, kill": sdk_caller(url),
            "the same through the e2b provider": provider_caller(url),
            "POST /api/v1/executions, e2b, audited": lambda: api_caller(
                service, {"code": PROGRAM}, b'"stdout":"1\\n"'
            ),
        }
        rounds: dict[str, list[Figures]] = {name: [] for name in callers}
        for _ in range(3):
            for name, caller in callers.items():
                print(f"measuring {name} ...", file=sys.stderr)
                rounds[name].append(measure(name, caller, callers=1, calls=calls))
                time.sleep(0.5)
    return [sorted(figures, key=lambda row: row.p50_ms)[1] for figures in rounds.values()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=200, help="counted calls per round (200)")
    parser.add_argument("--json", type=Path, default=Path("var/bench/remote.json"))
    options = parser.parse_args()
    # Before the provider asks which addresses it may use.
    use_options(Usual(PROVIDER_ALLOWED_NETWORKS=["127.0.0.0/8"]))
    rows = measure_all(options.calls)
    print(table(rows, rows[0]))
    added = [round(row.p50_ms - rows[0].p50_ms, 2) for row in rows[1:]]
    print(f"\nadded to the SDK's p50: provider {added[0]} ms, service {added[1]} ms")
    extra: dict[str, object] = {"machine": platform.platform(), "cpus": os.cpu_count()}
    write_json(options.json, rows, extra | {"added_ms": added})


if __name__ == "__main__":
    main()
