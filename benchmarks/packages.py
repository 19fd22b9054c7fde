"""What the environment of packages costs those that use it, and those that do not.

Two services, in turn: one whose programs have the packages of `manage.py packages`, and one whose
programs have this machine's interpreter alone. Memory is that of all sandboxes of a service that
nobody has called, so many of which are of Python.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

from benchmarks.service import Service, api_caller, processes_of, running_service
from providers.local import packages

IDLE = 8
PLAIN, WITH = "this machine's interpreter", "with packages"
IMPORTS = ("pandas", "matplotlib.pyplot", "sklearn")


def measure_in_turn(calls: dict[str, Callable[[], None]], count: int) -> dict[str, float]:
    """Median milliseconds of each call. Two of each go before, uncounted."""
    took: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(count + 2):
        for name, call in calls.items():
            began = time.perf_counter()
            call()
            if turn > 1:
                took[name].append((time.perf_counter() - began) * 1000)
    return {name: statistics.median(each) for name, each in took.items()}


def sandbox_memory(service: Service) -> float:
    """MiB (PSS) of what is not the service's own interpreter, for each idle sandbox of Python."""
    kibibytes = 0
    for pid in processes_of(service):
        with suppress(OSError):
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            if not command.startswith(sys.executable.encode() + b"\0"):
                lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
                kibibytes += next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return kibibytes / 1024 / IDLE


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=300)
    parser.add_argument("--imports", type=int, default=20, help="of each module")
    arguments = parser.parse_args()
    config: dict[str, object] = {"launcher": "bubblewrap", "pool_size": IDLE}
    with ExitStack() as stack:
        # Where sandboxes have nothing of their own.
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/var/tmp")))
        folder.chmod(0o755)
        python = packages.create(folder / "packages")
        packages.install(folder / "packages")
        services = {
            name: stack.enter_context(
                running_service(folder / f"data-{number}", config, SANDBOX_LOCAL_PYTHON=chosen)
            )
            for number, (name, chosen) in enumerate(((PLAIN, ""), (WITH, str(python))))
        }
        answer = b'"stdout":"1\\n"'
        runs = measure_in_turn(
            {
                name: api_caller(service, {"code": "print(1)"}, answer)
                for name, service in services.items()
            },
            arguments.calls,
        )
        for name, service in services.items():
            print(
                f"{name}: print(1) {runs[name]:.1f} ms at p50 ({runs[name] / runs[PLAIN]:.2f}), "
                f"{sandbox_memory(service):.1f} MiB for each idle sandbox"
            )
        for module in IMPORTS:
            body: dict[str, object] = {"code": f"import {module}; print(1)", "timeout": 30}
            call = api_caller(services[WITH], body, answer)
            took = measure_in_turn({module: call}, arguments.imports)
            print(f"import {module} in a new sandbox: {took[module]:.0f} ms at p50")


if __name__ == "__main__":
    main()
