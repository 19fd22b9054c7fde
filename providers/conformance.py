"""What every provider promises, each promise as a check that runs real code in it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from providers.base import (
    ARGUMENTS,
    ARTIFACTS,
    ENVIRONMENT,
    FILES,
    KEPT,
    STREAMING,
    SandboxProvider,
)
from providers.errors import SandboxError
from providers.isolation import LEVELS, SHARINGS
from providers.sandbox import Sandbox
from providers.values import (
    Event,
    ExecutionResult,
    InputFile,
    Job,
    RunLimits,
    SandboxLimits,
    SandboxSpec,
)


class CheckFailed(Exception):
    """A provider does not do what it promises; the message says what it did."""


@dataclass(frozen=True)
class Probe:
    """A provider and the language that a check is made in."""

    provider: SandboxProvider
    language: str

    def open(self, limits: SandboxLimits | None = None) -> Sandbox:
        """A sandbox for one run, of the provider's own size unless `limits` are given."""
        return self.provider.open(SandboxSpec(self.language, limits=limits), "contract")

    def run(
        self, code: str, *, within: SandboxLimits | None = None, **options: Any
    ) -> ExecutionResult:
        """Run code in a sandbox of its own. `options` are a job's."""
        sandbox = self.open(within)
        try:
            return sandbox.run(Job(code, self.language, **options))
        finally:
            sandbox.close()


@dataclass(frozen=True)
class Check:
    """One promise. It applies to the languages of `codes`, and where the capability is declared."""

    name: str
    codes: dict[str, str]
    verify: Callable[[Probe, str], None]
    capability: str = ""


PROMISES: list[Check] = []

_Verify = Callable[[Probe, str], None]


def promise(name: str, capability: str = "", **codes: str) -> Callable[[_Verify], _Verify]:
    def register(verify: _Verify) -> _Verify:
        PROMISES.append(Check(name, codes, verify, capability))
        return verify

    return register


def expect(what: str, got: object, wanted: object) -> None:
    if got != wanted:
        raise CheckFailed(f"{what}: {got!r:.300} instead of {wanted!r:.300}")


def expect_in(what: str, part: str, text: str) -> None:
    if part not in text:
        raise CheckFailed(f"{what}: {part!r} is not in {text!r:.500}")


def expect_refusal(what: str, code: str, call: Callable[[], object]) -> None:
    try:
        got = call()
    except SandboxError as error:
        expect(what, error.code, code)
        if error.started:
            raise CheckFailed(f"{what}: the error says that code has started") from None
    else:
        raise CheckFailed(f"{what}: {got!r:.300} instead of {code}")


_UNICODE = "héllo wörld ✓ 🎈 漢字"


@promise(
    "prints unicode",
    python=f"print({_UNICODE!r})",
    javascript=f"console.log('{_UNICODE}')",
    bash=f"echo '{_UNICODE}'",
)
def _prints(probe: Probe, code: str) -> None:
    result = probe.run(code)
    expect("stdout", result.stdout, f"{_UNICODE}\n")
    expect("exit code", result.exit_code, 0)
    expect("timed out", result.timed_out, False)


@promise(
    "keeps stderr apart, and it is no failure",
    python="import sys\nprint('out')\nprint('err', file=sys.stderr)",
    javascript="console.log('out'); console.error('err')",
    bash="echo out; echo err >&2",
)
def _separates(probe: Probe, code: str) -> None:
    result = probe.run(code)
    expect("streams", (result.stdout, result.stderr), ("out\n", "err\n"))
    expect("exit code", result.exit_code, 0)


@promise("passes on the exit code", python="import sys\nsys.exit(3)", bash="exit 3")
def _exits(probe: Probe, code: str) -> None:
    expect("exit code", probe.run(code).exit_code, 3)


@promise(
    "reports an error of the code as a result",
    python="\n1/0",
    javascript="\nthrow new Error('division')",
    bash="echo division >&2\nfalse",
)
def _fails(probe: Probe, code: str) -> None:
    result = probe.run(code)
    expect("exit code", result.exit_code, 1)
    expect_in("stderr", "division", result.stderr)


@promise("reports a syntax error", python="def (", javascript="function (")
def _misspelt(probe: Probe, code: str) -> None:
    result = probe.run(code)
    expect("exit code", result.exit_code, 1)
    expect_in("stderr", "SyntaxError", result.stderr)


_ARGUMENTS = {
    "yes": True,
    "no": False,
    "none": None,
    "text": "'q' \"d\" \\ \n \u2028 🎈",
    "number": 2.5,
    "nested": {"list": [1, {"a": []}]},
}


@promise(
    "hands arguments to main() and returns its value",
    ARGUMENTS,
    python="def main(**given):\n    print('printed')\n    return given",
    javascript="function main(given) { console.log('printed'); return given }",
)
def _calls_main(probe: Probe, code: str) -> None:
    result = probe.run(code, arguments=_ARGUMENTS)
    expect("exit code", (result.exit_code, result.stderr), (0, ""))
    expect("result", (result.has_result, result.result), (True, _ARGUMENTS))
    expect("stdout", result.stdout, "printed\n")


@promise(
    "awaits an asynchronous main()",
    ARGUMENTS,
    python="import asyncio\nasync def main(n):\n    await asyncio.sleep(0.01)\n    return n + 1",
    javascript="async function main({ n }) { return new Promise("
    "(resolve) => setTimeout(() => resolve(n + 1), 10)) }",
)
def _awaits(probe: Probe, code: str) -> None:
    result = probe.run(code, arguments={"n": 1})
    expect("result", (result.result, result.stderr), (2, ""))


@promise(
    "does not call a main() that the code calls itself",
    ARGUMENTS,
    python="def main():\n    print('once')\nmain()",
    javascript="function main() { console.log('once') }\nmain()",
)
def _leaves_main(probe: Probe, code: str) -> None:
    result = probe.run(code)
    expect("stdout", (result.stdout, result.has_result), ("once\n", False))


@promise(
    "names the caller's own lines in an error of main()",
    ARGUMENTS,
    python="def main():\n    raise ValueError('bad value')",
    javascript="function main() {\n  throw new TypeError('bad value') }",
)
def _traces(probe: Probe, code: str) -> None:
    result = probe.run(code)
    expect("ended", (result.exit_code, result.has_result), (1, False))
    expect_in("stderr", "bad value", result.stderr)
    if probe.language == "python":
        expect_in("stderr", "line 2", result.stderr)


@promise(
    "refuses a value that is not JSON",
    ARGUMENTS,
    python="def main():\n    return {1, 2}",
    javascript="function main() { return () => 1 }",
)
def _refuses_value(probe: Probe, code: str) -> None:
    result = probe.run(code)
    expect("ended", (result.exit_code, result.has_result), (1, False))
    expect_in("stderr", "not JSON", result.stderr)


@promise(
    "returns null for numbers that are not finite",
    ARGUMENTS,
    python="def main():\n    return [float('nan'), float('-inf'), 1.5]",
    javascript="function main() { return [NaN, -1 / 0, 1.5] }",
)
def _returns_null(probe: Probe, code: str) -> None:
    result = probe.run(code)
    expect("result", (result.has_result, result.result), (True, [None, None, 1.5]))


@promise(
    "ends code at its deadline",
    python="print('begun', flush=True)\nwhile True: pass",
    javascript="while (true) {}",
    bash="while :; do :; done",
)
def _times_out(probe: Probe, code: str) -> None:
    sandbox = probe.open()
    began = time.monotonic()
    try:
        result = sandbox.run(Job(code, probe.language, 1))
        seconds = time.monotonic() - began
    finally:
        sandbox.close()
    expect("verdict", (result.timed_out, result.exit_code), (True, None))
    if not 1 <= seconds <= 2:
        raise CheckFailed(f"a run of 1 s was ended after {seconds:.2f} s")


@promise(
    "limits output and continues",
    python="print('x' * 1_000_000)\nprint('end')",
    javascript="console.log('x'.repeat(1_000_000))",
    bash="head -c 1000000 /dev/zero | tr '\\0' x",
)
def _bounds(probe: Probe, code: str) -> None:
    result = probe.run(code, limits=RunLimits(output_bytes=5000))
    expect("length of stdout", len(result.stdout), 5000)
    expect("ended", (result.stdout_truncated, result.exit_code), (True, 0))


@promise(
    "puts files into the workspace",
    FILES,
    python="print(len(open('data/in.bin', 'rb').read()))",
    javascript="const fs = await import('node:fs')\n"
    "console.log(fs.readFileSync('data/in.bin').length)",
    bash="wc -c < data/in.bin",
)
def _takes_files(probe: Probe, code: str) -> None:
    result = probe.run(code, files=[InputFile("data/in.bin", bytes(range(256)))])
    expect("stdout", (result.stdout.strip(), result.stderr), ("256", ""))


_SUBPROCESS = "echo ${PROMISED-none}"


@promise(
    "gives a run and its subprocesses their variables, and no other run",
    ENVIRONMENT,
    python="import os, subprocess\n"
    f"child = subprocess.check_output({_SUBPROCESS!r}, shell=True, text=True).strip()\n"
    "print(os.environ.get('PROMISED', 'none'), child)",
    javascript="const { execSync } = await import('node:child_process')\n"
    f"const child = execSync({_SUBPROCESS!r}).toString().trim()\n"
    "console.log(process.env.PROMISED ?? 'none', child)",
    bash=f"echo ${{PROMISED-none}} $(sh -c {_SUBPROCESS!r})",
)
def _sets_variables(probe: Probe, code: str) -> None:
    value = "'q'\"$é✓"
    result = probe.run(code, environment={"PROMISED": value})
    expect("stdout", (result.stdout, result.stderr), (f"{value} {value}\n", ""))
    expect("stdout of the next run", probe.run(code).stdout, "none none\n")


@promise(
    "collects artifacts",
    ARTIFACTS,
    python="import os\nos.mkdir('artifacts/sub')\nopen('artifacts/sub/out.csv', 'w').write('a,b')",
    bash="mkdir artifacts/sub; printf a,b > artifacts/sub/out.csv",
)
def _collects(probe: Probe, code: str) -> None:
    found = [(one.name, one.mime_type, one.content) for one in probe.run(code).artifacts]
    expect("artifacts", found, [("sub/out.csv", "text/csv", b"a,b")])


@promise("sends output while the code runs", STREAMING, python="print('one')", bash="echo one")
def _streams(probe: Probe, code: str) -> None:
    sandbox = probe.open()
    events: list[Event] = []
    try:
        result = sandbox.run(Job(code, probe.language), events.append)
    finally:
        sandbox.close()
    data = b"".join(event.data for event in events if event.type == "stdout")
    expect("events", (data, result.stdout), (b"one\n", "one\n"))


@promise("separates one sandbox from another", python="print(open('secret').read())")
def _separates_instances(probe: Probe, code: str) -> None:
    probe.run("open('secret', 'w').write('mine')")
    result = probe.run(code)
    expect("exit code", result.exit_code, 1)
    expect_in("stderr", "No such file", result.stderr)


@promise("runs nothing in a sandbox that was closed", python="print(1)", bash="echo 1")
def _closes(probe: Probe, code: str) -> None:
    sandbox = probe.open()
    expect("closed", sandbox.close(), True)
    expect("closed again", sandbox.close(), False)
    expect_refusal("run", "SB009", lambda: sandbox.run(Job(code, probe.language, 5)))


@promise("refuses what it does not offer", python="print(1)")
def _refuses(probe: Probe, code: str) -> None:
    provider = probe.provider
    other = SandboxSpec("cobol-2")
    expect_refusal("language", "SB002", lambda: provider.open(other, "contract"))
    if KEPT not in provider.capabilities:
        kept = SandboxSpec(probe.language, kept=True)
        expect_refusal("a kept sandbox", "SB002", lambda: provider.open(kept, "contract"))
        expect_refusal("attach", "SB002", lambda: provider.attach("x"))
    if ENVIRONMENT not in provider.capabilities:
        given = {"PROMISED": "value"}
        expect_refusal("variables", "SB002", lambda: probe.run(code, environment=given))
    if provider.max_timeout is not None:
        longer = provider.max_timeout + 1
        expect_refusal("timeout", "SB002", lambda: probe.run(code, timeout=longer))


@promise("declares how it isolates", python="", javascript="", bash="")
def _declares(probe: Probe, code: str) -> None:
    provider = probe.provider
    sandbox = probe.open()
    sandbox.close()
    told = sandbox.metadata.get("isolation", provider.isolation)
    if told not in LEVELS:
        raise CheckFailed(
            f"isolation: {told!r} is not one of {', '.join(LEVELS)}, so it counts as none, and "
            "nothing runs in it unless MINIMUM_ISOLATION is none. Set `isolation` on the class, "
            "or in the metadata of each sandbox."
        )
    shared = sandbox.metadata.get("sharing", provider.sharing)
    if shared not in SHARINGS:
        raise CheckFailed(f"sharing: {shared!r} is not one of {', '.join(SHARINGS)}")


@promise("reports that it is healthy", python="")
def _is_healthy(probe: Probe, code: str) -> None:
    health = probe.provider.health_check()
    expect("health", (health.healthy, health.message), (True, ""))
