"""That a limit a caller names is obeyed or refused, never dropped: one check for each.

A provider may be stricter, never laxer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from providers.base import ARGUMENTS, ARTIFACTS
from providers.errors import InvalidConfiguration
from providers.promises import Broken, Check, Probe
from providers.values import ExecutionResult, RunLimits, SandboxLimits

MIB = 1 << 20

# For each limit of a sandbox: less than any provider has, and a program that goes beyond BOUND.
# It prints `beyond` where nothing keeps it from that.
_SANDBOX: dict[str, tuple[int, str]] = {
    "memory_bytes": (
        64 * MIB,
        # A provider may give its own processes some beside what the program has.
        "import time\ndata = b'x' * (BOUND * 3 // 2)\ntime.sleep(0.5)\nprint('beyond')",
    ),
    "workspace_bytes": (
        4 * MIB,
        "piece = b'x' * (1 << 20)\n"
        "for number in range(BOUND // (1 << 20) + 1):\n"
        "    with open(f'piece-{number}', 'wb') as file:\n"
        "        file.write(piece)\n"
        "print('beyond')",
    ),
    "file_bytes": (
        1 * MIB,
        "piece = b'x' * (1 << 20)\n"
        "with open('large', 'wb') as file:\n"
        "    for _ in range(BOUND // (1 << 20) + 1):\n"
        "        file.write(piece)\n"
        "print('beyond')",
    ),
    "processes": (
        8,
        "import os, signal, time\n"
        "born = []\n"
        "try:\n"
        "    for _ in range(BOUND):\n"
        "        child = os.fork()\n"
        "        if child == 0:\n"
        "            time.sleep(60)\n"
        "        born.append(child)\n"
        "    print('beyond')\n"
        "finally:\n"
        "    for child in born:\n"
        "        os.kill(child, signal.SIGKILL)",
    ),
    "open_files": (32, "files = [open('/dev/null') for _ in range(BOUND)]\nprint('beyond')"),
}


def _sandbox_check(name: str) -> Check:
    small, code = _SANDBOX[name]

    def verify(probe: Probe, code: str) -> None:
        # What is small may be refused; where it is not, it has to hold. The usual one holds anyway,
        # for whoever names it and for whoever names nothing.
        usual: int = getattr(SandboxLimits(), name)
        for bound in (small, usual):
            try:
                sandbox = probe.open(SandboxLimits(**{name: bound}))
            except InvalidConfiguration as refusal:
                _expect_named(refusal, name)
                continue
            sandbox.close()
            result = probe.run(
                code.replace("BOUND", str(bound)), within=SandboxLimits(**{name: bound})
            )
            if "beyond" in result.stdout:
                raise Broken(f"{name}: {bound} was requested, and the program had more")

    return Check(f"applies or refuses {name} of a sandbox", {"python": code}, verify)


def _expect_named(refusal: InvalidConfiguration, name: str) -> None:
    if refusal.field not in (name, "limits"):
        raise Broken(f"{name}: it is refused, but the error names {refusal.field!r}")


def _run_check(
    name: str, bound: int, code: str, fits: Callable[[ExecutionResult], bool], capability: str = ""
) -> Check:
    def verify(probe: Probe, code: str) -> None:
        limits: dict[str, Any] = {name: bound}
        try:
            result = probe.run(code, limits=RunLimits(**limits))
        except InvalidConfiguration as refusal:
            _expect_named(refusal, name)
            return
        if not fits(result):
            raise Broken(f"{name}: {bound} was requested, and the result is {result!r:.300}")

    return Check(f"applies or refuses {name} of a run", {"python": code}, verify, capability)


def _is_refused_value(result: ExecutionResult) -> bool:
    return not result.has_result and result.exit_code == 1


def _files(result: ExecutionResult) -> Sequence[int]:
    return [len(artifact.content) for artifact in result.artifacts]


_THREE_FILES = "for name in 'abc':\n    open(f'artifacts/{name}', 'w').write('x' * 1000)"
_THREE_OUTPUTS = "for _ in range(3):\n    display('x' * 1000)"


def _fits_outputs(result: ExecutionResult, bound: int) -> bool:
    return sum(len(str(text)) for each in result.outputs for text in each.values()) <= bound


LIMIT_CHECKS = [
    *(_sandbox_check(name) for name in _SANDBOX),
    _run_check("output_bytes", 500, "print('x' * 1000)", lambda run: len(run.stdout) <= 500),
    _run_check(
        "result_bytes", 500, "def main():\n    return 'x' * 1000", _is_refused_value, ARGUMENTS
    ),
    _run_check(
        "artifact_count", 2, _THREE_FILES, lambda run: len(_files(run)) == 2, capability=ARTIFACTS
    ),
    _run_check(
        "artifact_bytes", 999, _THREE_FILES, lambda run: not _files(run), capability=ARTIFACTS
    ),
    _run_check(
        "artifacts_total_bytes",
        2500,
        _THREE_FILES,
        lambda run: sum(_files(run)) == 2000,
        capability=ARTIFACTS,
    ),
    _run_check("rich_output_count", 2, _THREE_OUTPUTS, lambda run: len(run.outputs) <= 2),
    _run_check("rich_output_bytes", 2500, _THREE_OUTPUTS, lambda run: _fits_outputs(run, 2500)),
]
