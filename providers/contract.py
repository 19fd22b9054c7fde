"""What every provider promises, as checks that run real code in it.

Which checks apply follows from the provider's own capabilities and languages. The tests run them
against every provider, and `manage.py check_provider` against a real account.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from providers.base import (
    ARGUMENTS,
    ARTIFACTS,
    CONTEXTS,
    FILES,
    STREAMING,
    WORKSPACE,
    ExecutionResult,
    InputFile,
    Limits,
    SandboxProvider,
)
from providers.errors import SandboxError
from providers.isolation import LEVELS, SHARINGS


class Broken(Exception):
    """A provider does not do what it promises; the message says what it did."""


@dataclass(frozen=True)
class Probe:
    """A provider and the language that a check is made in."""

    provider: SandboxProvider
    language: str

    def run(self, code: str, *, timeout: float = 10, **options: Any) -> ExecutionResult:
        """Run code in an instance of its own."""
        instance = self.provider.create_instance(self.language, owner="contract")
        try:
            return self.provider.execute_code(
                instance.instance_id, code, self.language, timeout, **options
            )
        finally:
            self.provider.destroy_instance(instance.instance_id)


@dataclass(frozen=True)
class Check:
    """One promise. It applies to the languages of `codes`, and where the capability is declared."""

    name: str
    codes: dict[str, str]
    verify: Callable[[Probe, str], None]
    capability: str = ""


@dataclass(frozen=True)
class Verdict:
    """What came of a check: `outcome` is ok, failed or not offered."""

    check: str
    language: str
    outcome: str
    message: str = ""
    seconds: float = 0.0


CHECKS: list[Check] = []

_Verify = Callable[[Probe, str], None]


def _check(name: str, capability: str = "", **codes: str) -> Callable[[_Verify], _Verify]:
    def register(verify: _Verify) -> _Verify:
        CHECKS.append(Check(name, codes, verify, capability))
        return verify

    return register


def examine(provider: SandboxProvider) -> Iterator[Verdict]:
    """Make every check in every language it has code for, one after the other."""
    offered = provider.get_supported_languages()
    for check in CHECKS:
        for language in check.codes:
            if language not in offered or not _is_offered(provider, check):
                yield Verdict(check.name, language, "not offered")
                continue
            began = time.monotonic()
            try:
                check.verify(Probe(provider, language), check.codes[language])
            except Broken as broken:
                outcome, message = "failed", str(broken)
            except SandboxError as error:
                outcome, message = "failed", f"{error.code}: {error.message}"
            else:
                outcome, message = "ok", ""
            seconds = round(time.monotonic() - began, 3)
            yield Verdict(check.name, language, outcome, message, seconds)


def _is_offered(provider: SandboxProvider, check: Check) -> bool:
    return not check.capability or check.capability in provider.capabilities


def _expect(what: str, got: object, wanted: object) -> None:
    if got != wanted:
        raise Broken(f"{what}: {got!r:.300} instead of {wanted!r:.300}")


def _expect_in(what: str, part: str, text: str) -> None:
    if part not in text:
        raise Broken(f"{what}: {part!r} is not in {text!r:.500}")


def _expect_refusal(what: str, code: str, call: Callable[[], object]) -> None:
    try:
        got = call()
    except SandboxError as error:
        _expect(what, error.code, code)
        if error.started:
            raise Broken(f"{what}: the error says that code has started") from None
    else:
        raise Broken(f"{what}: {got!r:.300} instead of {code}")


_UNICODE = "héllo wörld ✓ 🎈 漢字"


@_check(
    "prints unicode",
    python=f"print({_UNICODE!r})",
    javascript=f"console.log('{_UNICODE}')",
    bash=f"echo '{_UNICODE}'",
)
def _prints(probe: Probe, code: str) -> None:
    result = probe.run(code)
    _expect("stdout", result.stdout, f"{_UNICODE}\n")
    _expect("exit code", result.exit_code, 0)
    _expect("timed out", result.timed_out, False)


@_check(
    "keeps stderr apart, and it is no failure",
    python="import sys\nprint('out')\nprint('err', file=sys.stderr)",
    javascript="console.log('out'); console.error('err')",
    bash="echo out; echo err >&2",
)
def _separates(probe: Probe, code: str) -> None:
    result = probe.run(code)
    _expect("streams", (result.stdout, result.stderr), ("out\n", "err\n"))
    _expect("exit code", result.exit_code, 0)


@_check("passes on the exit code", python="import sys\nsys.exit(3)", bash="exit 3")
def _exits(probe: Probe, code: str) -> None:
    _expect("exit code", probe.run(code).exit_code, 3)


@_check(
    "reports an error of the code as a result",
    python="\n1/0",
    javascript="\nthrow new Error('division')",
    bash="echo division >&2\nfalse",
)
def _fails(probe: Probe, code: str) -> None:
    result = probe.run(code)
    _expect("exit code", result.exit_code, 1)
    _expect_in("stderr", "division", result.stderr)


@_check("reports a syntax error", python="def (", javascript="function (")
def _misspelt(probe: Probe, code: str) -> None:
    result = probe.run(code)
    _expect("exit code", result.exit_code, 1)
    _expect_in("stderr", "SyntaxError", result.stderr)


_ARGUMENTS = {
    "yes": True,
    "no": False,
    "none": None,
    "text": "'q' \"d\" \\ \n \u2028 🎈",
    "number": 2.5,
    "nested": {"list": [1, {"a": []}]},
}


@_check(
    "hands arguments to main() and returns its value",
    ARGUMENTS,
    python="def main(**given):\n    print('printed')\n    return given",
    javascript="function main(given) { console.log('printed'); return given }",
)
def _calls_main(probe: Probe, code: str) -> None:
    result = probe.run(code, arguments=_ARGUMENTS)
    _expect("exit code", (result.exit_code, result.stderr), (0, ""))
    _expect("result", (result.has_result, result.result), (True, _ARGUMENTS))
    _expect("stdout", result.stdout, "printed\n")


@_check(
    "awaits an asynchronous main()",
    ARGUMENTS,
    python="import asyncio\nasync def main(n):\n    await asyncio.sleep(0.01)\n    return n + 1",
    javascript="async function main({ n }) { return new Promise("
    "(resolve) => setTimeout(() => resolve(n + 1), 10)) }",
)
def _awaits(probe: Probe, code: str) -> None:
    result = probe.run(code, arguments={"n": 1})
    _expect("result", (result.result, result.stderr), (2, ""))


@_check(
    "does not call a main() that the code calls itself",
    ARGUMENTS,
    python="def main():\n    print('once')\nmain()",
    javascript="function main() { console.log('once') }\nmain()",
)
def _leaves_main(probe: Probe, code: str) -> None:
    result = probe.run(code)
    _expect("stdout", (result.stdout, result.has_result), ("once\n", False))


@_check(
    "names the caller's own lines in an error of main()",
    ARGUMENTS,
    python="def main():\n    raise ValueError('bad value')",
    javascript="function main() {\n  throw new TypeError('bad value') }",
)
def _traces(probe: Probe, code: str) -> None:
    result = probe.run(code)
    _expect("ended", (result.exit_code, result.has_result), (1, False))
    _expect_in("stderr", "bad value", result.stderr)
    if probe.language == "python":
        _expect_in("stderr", "line 2", result.stderr)


@_check(
    "refuses a value that is not JSON",
    ARGUMENTS,
    python="def main():\n    return {1, 2}",
    javascript="function main() { return NaN }",
)
def _refuses_value(probe: Probe, code: str) -> None:
    result = probe.run(code)
    _expect("ended", (result.exit_code, result.has_result), (1, False))
    _expect_in("stderr", "not JSON", result.stderr)


@_check(
    "ends code at its deadline",
    python="print('begun', flush=True)\nwhile True: pass",
    javascript="while (true) {}",
    bash="while :; do :; done",
)
def _times_out(probe: Probe, code: str) -> None:
    began = time.monotonic()
    instance = probe.provider.create_instance(probe.language, owner="contract")
    began = time.monotonic()
    try:
        result = probe.provider.execute_code(instance.instance_id, code, probe.language, 1)
        seconds = time.monotonic() - began
    finally:
        probe.provider.destroy_instance(instance.instance_id)
    _expect("verdict", (result.timed_out, result.exit_code), (True, None))
    if not 1 <= seconds <= 2:
        raise Broken(f"a run of 1 s was ended after {seconds:.2f} s")


@_check(
    "bounds output and goes on",
    python="print('x' * 1_000_000)\nprint('end')",
    javascript="console.log('x'.repeat(1_000_000))",
    bash="head -c 1000000 /dev/zero | tr '\\0' x",
)
def _bounds(probe: Probe, code: str) -> None:
    result = probe.run(code, limits=Limits(output_bytes=5000))
    _expect("length of stdout", len(result.stdout), 5000)
    _expect("ended", (result.stdout_truncated, result.exit_code), (True, 0))


@_check(
    "puts files into the workspace",
    FILES,
    python="print(len(open('data/in.bin', 'rb').read()))",
    javascript="const fs = await import('node:fs')\n"
    "console.log(fs.readFileSync('data/in.bin').length)",
    bash="wc -c < data/in.bin",
)
def _takes_files(probe: Probe, code: str) -> None:
    result = probe.run(code, files=[InputFile("data/in.bin", bytes(range(256)))])
    _expect("stdout", (result.stdout.strip(), result.stderr), ("256", ""))


@_check(
    "collects artifacts",
    ARTIFACTS,
    python="import os\nos.mkdir('artifacts/sub')\nopen('artifacts/sub/out.csv', 'w').write('a,b')",
    bash="mkdir artifacts/sub; printf a,b > artifacts/sub/out.csv",
)
def _collects(probe: Probe, code: str) -> None:
    found = [(one.name, one.mime_type, one.content) for one in probe.run(code).artifacts]
    _expect("artifacts", found, [("sub/out.csv", "text/csv", b"a,b")])


@_check("keeps state in a context", CONTEXTS, python="kept = 41")
def _keeps_state(probe: Probe, code: str) -> None:
    provider = probe.provider
    instance = provider.create_instance(probe.language, owner="contract").instance_id
    try:
        context = provider.create_context(instance, probe.language)
        provider.execute_in_context(instance, context, code)
        result = provider.execute_in_context(instance, context, "print(kept + 1)")
        _expect("stdout", (result.stdout, result.stderr), ("42\n", ""))
        other = provider.create_context(instance, probe.language)
        result = provider.execute_in_context(instance, other, "print(kept)")
        _expect_in("stderr of another context", "NameError", result.stderr)
        _expect("destroyed", provider.destroy_context(instance, context), True)
    finally:
        provider.destroy_instance(instance)


@_check("hands output over as it comes", STREAMING, python="print('one')", bash="echo one")
def _streams(probe: Probe, code: str) -> None:
    provider = probe.provider
    instance = provider.create_instance(probe.language, owner="contract").instance_id
    pieces: list[tuple[str, str]] = []
    try:
        provider.stream_code(
            instance,
            code,
            probe.language,
            on_output=lambda stream, text: pieces.append((stream, text)),
        )
    finally:
        provider.destroy_instance(instance)
    _expect("pieces", "".join(text for _, text in pieces), "one\n")


@_check("writes and reads files of a workspace", WORKSPACE, python="print(open('kept').read())")
def _reads_files(probe: Probe, code: str) -> None:
    provider = probe.provider
    instance = provider.create_instance(probe.language, owner="contract").instance_id
    try:
        provider.write_file(instance, InputFile("kept", b"content"))
        _expect("stdout", provider.execute_code(instance, code, "python").stdout, "content\n")
        _expect("read", provider.read_file(instance, "kept", 100), b"content")
        _expect("read of nothing", provider.read_file(instance, "missing", 100), None)
    finally:
        provider.destroy_instance(instance)


@_check("separates one instance from another", python="print(open('secret').read())")
def _separates_instances(probe: Probe, code: str) -> None:
    probe.run("open('secret', 'w').write('mine')")
    result = probe.run(code)
    _expect("exit code", result.exit_code, 1)
    _expect_in("stderr", "No such file", result.stderr)


@_check("runs nothing in an instance that was destroyed", python="print(1)", bash="echo 1")
def _destroys(probe: Probe, code: str) -> None:
    provider = probe.provider
    instance = provider.create_instance(probe.language, owner="contract").instance_id
    _expect("destroyed", provider.destroy_instance(instance), True)
    _expect("destroyed again", provider.destroy_instance(instance), False)
    _expect_refusal(
        "run", "SB009", lambda: provider.execute_code(instance, code, probe.language, 5)
    )


@_check("refuses what it does not offer", python="print(1)")
def _refuses(probe: Probe, code: str) -> None:
    provider = probe.provider
    _expect_refusal("language", "SB002", lambda: provider.create_instance("cobol-2"))
    if CONTEXTS not in provider.capabilities:
        _expect_refusal("context", "SB002", lambda: provider.create_context("x"))
    if provider.max_timeout is not None:
        longer = provider.max_timeout + 1
        _expect_refusal("timeout", "SB002", lambda: probe.run(code, timeout=longer))


@_check("declares how it isolates", python="", javascript="", bash="")
def _declares(probe: Probe, code: str) -> None:
    provider = probe.provider
    instance = provider.create_instance(probe.language, owner="contract")
    provider.destroy_instance(instance.instance_id)
    told = instance.metadata.get("isolation", provider.isolation)
    if told not in LEVELS:
        raise Broken(
            f"isolation: {told!r} is none of {', '.join(LEVELS)}, so it counts as none, and "
            "nothing runs in it unless MINIMUM_ISOLATION is none. Set `isolation` on the class, "
            "or in the metadata of each instance."
        )
    shared = instance.metadata.get("sharing", provider.sharing)
    if shared not in SHARINGS:
        raise Broken(f"sharing: {shared!r} is none of {', '.join(SHARINGS)}")


@_check("says that it is healthy", python="")
def _is_healthy(probe: Probe, code: str) -> None:
    health = probe.provider.health_check()
    _expect("health", (health.healthy, health.message), (True, ""))
