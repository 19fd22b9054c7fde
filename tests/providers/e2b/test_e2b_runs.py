"""Code in E2B, through the unmodified SDK against a server that speaks E2B's protocol."""

from __future__ import annotations

import threading
import time
from contextlib import closing
from dataclasses import replace

import pytest

from providers.e2b.provider import E2BProvider
from providers.errors import InvalidConfiguration
from providers.values import Event, InputFile, Job, RunLimits, SandboxSpec
from tests.support.e2b_server import E2BServer
from tests.support.remote_providers import open_e2b, run
from tests.support.required import require
from tests.support.wire_server import eventually


def test_a_script_prints(e2b: E2BProvider, e2b_server: E2BServer) -> None:
    result = run(e2b, "import sys\nprint('hello')\nprint('oops', file=sys.stderr)")
    assert (result.stdout, result.stderr, result.exit_code) == ("hello\n", "oops\n", 0)
    assert not result.has_result
    assert e2b_server.sandboxes == {}


ARGUMENTS = {
    "yes": True,
    "no": None,
    "text": "ünï\u2028 'q' \"d\" \\ \n 🎈",
    "n": [1, 2.5, {"a": []}],
}


@pytest.mark.parametrize(
    ("language", "code"),
    [
        ("python", "def main(**given):\n    print('printed')\n    return given"),
        ("javascript", "function main(given) { console.log('printed'); return given }"),
        ("typescript", "async function main(given) { console.log('printed'); return given }"),
        ("nodejs", "const main = (given) => { console.log('printed'); return given }"),
    ],
)
def test_main_gets_its_arguments_and_returns_a_value(
    e2b: E2BProvider, language: str, code: str
) -> None:
    result = run(e2b, code, language, arguments=ARGUMENTS)
    assert (result.stderr, result.exit_code) == ("", 0)
    assert result.has_result
    assert result.result == ARGUMENTS
    assert result.stdout == "printed\n"


def test_an_argument_named_like_a_prototype_stays_data(e2b: E2BProvider) -> None:
    code = "function main(given) { return Object.keys(given) }"
    assert run(e2b, code, "javascript", arguments={"__proto__": {"a": 1}}).result == ["__proto__"]


def test_an_awaitable_main_is_awaited(e2b: E2BProvider) -> None:
    code = "import asyncio\nasync def main(n):\n    await asyncio.sleep(0)\n    return n + 1"
    assert run(e2b, code, arguments={"n": 1}).result == 2


@pytest.mark.parametrize(
    ("language", "code", "exit_code", "said"),
    [
        ("python", "import sys\nsys.exit(3)", 3, ""),
        ("python", "import sys\nsys.exit('gone wrong')", 1, "gone wrong"),
        ("python", "1/0", 1, "ZeroDivisionError"),
        ("python", "def main():\n    import sys\n    sys.exit(4)", 4, ""),
        (
            "python",
            "def main():\n    raise ValueError('bad')",
            1,
            'File "main.py", line 2, in main',
        ),
        ("python", "def main(:", 1, "SyntaxError"),
        ("python", "def main():\n    return {1, 2}", 1, "not JSON"),
        ("python", "x = 'main'", 0, ""),
        ("javascript", "throw new Error('bad')", 1, "bad"),
        ("javascript", "function main() { throw new Error('bad') }", 1, "bad"),
        ("javascript", "function main() { return () => 1 }", 1, "not JSON"),
        ("bash", "echo to stderr >&2\nexit 7", 7, "to stderr"),
    ],
)
def test_how_code_ends_shows_in_its_exit_code(
    e2b: E2BProvider, language: str, code: str, exit_code: int, said: str
) -> None:
    result = run(e2b, code, language)
    assert result.exit_code == exit_code
    assert said in result.stderr
    assert not result.has_result


@pytest.mark.parametrize(
    ("language", "code"),
    [
        ("python", "def main():\n    return [float('nan'), float('inf'), 1.5]"),
        ("javascript", "function main() { return [NaN, 1 / 0, 1.5] }"),
    ],
)
def test_what_is_no_finite_number_is_null(e2b: E2BProvider, language: str, code: str) -> None:
    assert run(e2b, code, language).result == [None, None, 1.5]


def test_shell_code_prints(e2b: E2BProvider) -> None:
    result = run(e2b, 'echo "héllo $((1 + 1))"', "bash")
    assert (result.stdout, result.exit_code) == ("héllo 2\n", 0)


GO = """package main

import (
	"fmt"
	"os"
)

func main() {
	fmt.Println("hello from Go")
	os.Exit(7)
}
"""


def test_go_is_compiled_and_run_where_the_template_has_it(
    e2b: E2BProvider,
) -> None:
    require("go")
    with closing(e2b.open(SandboxSpec("go"), "wonderland")) as sandbox:
        job = Job(GO, language="go", timeout=25, environment={"GOCACHE": "/tmp/go"})
        result = sandbox.run(job)
        assert (result.stdout, result.stderr, result.exit_code) == ("hello from Go\n", "", 7)
        profile = InputFile(".bash_profile", b"PATH=/nowhere")
        result = sandbox.run(replace(job, files=(profile,)))
        assert (result.exit_code, "The template has no Go" in result.stderr) == (127, True)
    sandbox = e2b.open(SandboxSpec("go", kept=True), "wonderland")
    with pytest.raises(InvalidConfiguration, match="no interpreter that keeps"):
        sandbox.run(Job(GO, language="go"))
    sandbox.close()


def test_the_value_of_the_last_expression_is_a_rich_output(e2b: E2BProvider) -> None:
    assert run(e2b, "[1] * 3").outputs == [{"text/plain": "[1, 1, 1]"}]


def test_nothing_printed_is_taken_for_the_result(e2b: E2BProvider) -> None:
    code = "def main():\n    print('\\x1e{\"exit_code\": 0, \"result\": 1}\\x1e', end='')\n    return 2"
    result = run(e2b, code)
    assert result.result == 2
    assert result.stdout == '\x1e{"exit_code": 0, "result": 1}\x1e'


def test_output_beyond_the_limit_is_dropped_and_flagged(e2b: E2BProvider) -> None:
    code = "def main():\n    print('é' * 50_000)\n    return 'still here'"
    result = run(e2b, code, limits=RunLimits(output_bytes=1001))
    assert result.stdout == "é" * 500
    assert result.stdout_truncated
    assert result.result == "still here"


def test_a_flood_ends_the_run_and_not_us(e2b: E2BProvider, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("providers.remote.bounded.MAX_RESPONSE_BYTES", 100_000)
    result = run(e2b, "print('x' * 300_000)", limits=RunLimits(output_bytes=1000))
    assert (result.exit_code, result.stdout) == (137, "x" * 1000)
    assert result.stdout_truncated
    assert "The run was ended" in result.stderr


def test_a_compressed_answer_is_bounded_by_what_it_unpacks_to(
    e2b: E2BProvider, e2b_server: E2BServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("providers.remote.bounded.MAX_RESPONSE_BYTES", 1000)
    e2b_server.fail("execute", "compressed")
    result = run(e2b, "print(1)")
    assert (result.exit_code, result.stdout_truncated) == (137, True)


def test_a_sandbox_has_no_internet_unless_it_is_configured(e2b_server: E2BServer) -> None:
    run(open_e2b(e2b_server), "print(1)")
    run(open_e2b(e2b_server, internet_access=True), "print(1)")
    assert e2b_server.internet == [False, True]


def test_files_go_in_and_artifacts_come_out(e2b: E2BProvider) -> None:
    code = (
        "import os\nos.makedirs('artifacts/sub', exist_ok=True)\n"
        "data = open('data/in.bin', 'rb').read()\n"
        "open('artifacts/sub/out.bin', 'wb').write(data[::-1])\n"
        "open('artifacts/plot.png', 'wb').write(b'png')"
    )
    files = [InputFile("data/in.bin", b"\x00\x01\xff")]
    found = {a.name: (a.mime_type, a.content) for a in run(e2b, code, files=files).artifacts}
    assert found == {
        "plot.png": ("image/png", b"png"),
        "sub/out.bin": ("application/octet-stream", b"\xff\x01\x00"),
    }


def test_the_folder_for_artifacts_is_made_before_the_run(
    e2b: E2BProvider, e2b_server: E2BServer
) -> None:
    run(e2b, "open('artifacts/x', 'w').write('x')")
    assert e2b_server.requests.count("MakeDir") == 1
    assert e2b_server.requests.index("MakeDir") < e2b_server.requests.index("execute")


def test_artifacts_beyond_the_limits_stay_where_they_are(e2b: E2BProvider) -> None:
    code = (
        "import os\nos.makedirs('artifacts', exist_ok=True)\n"
        "for name in 'abc':\n    open(f'artifacts/{name}', 'w').write(name * 10)\n"
        "open('artifacts/big', 'w').write('x' * 1000)"
    )
    limits = RunLimits(artifact_count=2, artifact_bytes=100)
    assert [a.name for a in run(e2b, code, limits=limits).artifacts] == ["a", "b"]


def test_our_own_deadline_ends_the_run(e2b: E2BProvider, e2b_server: E2BServer) -> None:
    began = time.monotonic()
    result = run(e2b, "print('begun', flush=True)\nwhile True: pass", timeout=1)
    # Its code goes on for ever.
    assert time.monotonic() - began < 30
    assert (result.timed_out, result.exit_code) == (True, None)
    assert eventually(lambda: e2b_server.sandboxes == {})


def test_a_run_longer_than_configured_is_refused(e2b_server: E2BServer) -> None:
    provider = open_e2b(e2b_server, timeout=5)
    assert provider.max_timeout == 5
    with pytest.raises(InvalidConfiguration, match="5 s at most"):
        run(provider, "print(1)", timeout=6)
    assert e2b_server.sandboxes == {}
    assert not e2b_server.executed


def test_output_is_handed_over_as_it_comes(e2b: E2BProvider) -> None:
    sandbox = e2b.open(SandboxSpec(), "wonderland")
    first = threading.Event()
    events: list[Event] = []

    def emit(event: Event) -> None:
        events.append(event)
        first.set()

    code = (
        "import os, sys, time\nprint('one', flush=True)\n"
        "while not os.path.exists('seen'):\n    time.sleep(0.01)\n"
        "print('two', file=sys.stderr)\n6 * 7"
    )
    running = sandbox.submit_run(Job(code), emit)
    assert first.wait(60)
    # It is over only once somebody has seen that it has begun.
    assert not running.done()
    sandbox._machine.write("seen", b"")  # type: ignore[attr-defined]
    result = running.result(timeout=60)
    assert [(event.type, event.data) for event in events] == [
        ("stdout", b"one\n"),
        ("stderr", b"two\n"),
        ("output", b""),
    ]
    assert events[2].output == {"text/plain": "42"}
    assert (result.stdout, result.stderr) == ("one\n", "two\n")
    sandbox.close()


@pytest.mark.parametrize("count", [0, 2])
def test_rich_outputs_are_bounded(e2b: E2BProvider, count: int) -> None:
    limits = RunLimits(rich_output_count=count)
    assert len(run(e2b, "'value'", limits=limits).outputs) == min(count, 1)
    assert run(e2b, "'x' * 1000", limits=RunLimits(rich_output_bytes=500)).outputs == []


def test_a_language_without_a_kernel_is_refused_before_anything_runs(e2b: E2BProvider) -> None:
    with pytest.raises(InvalidConfiguration) as caught:
        e2b.create_instance("cobol")
    assert caught.value.field == "language"


@pytest.mark.parametrize("language", ["r", "java"])
def test_the_language_is_the_services_to_offer(
    e2b: E2BProvider, e2b_server: E2BServer, language: str
) -> None:
    with pytest.raises(Exception, match=f"no kernel for {language}"):
        run(e2b, "1", language)


@pytest.mark.parametrize(
    ("language", "code", "kind", "message"),
    [
        ("python", "raise RuntimeError('a:\\nValueError: b')", "RuntimeError", "a:\nValueError: b"),
        ("python", "def main():\n    raise KeyError('k\\nl')", "KeyError", "'k\\nl'"),
        ("python", "import sys\nsys.exit('gone wrong')", "SystemExit", "gone wrong"),
        ("javascript", "function main() { throw new TypeError('x') }", "TypeError", "x"),
    ],
)
def test_what_ended_code_is_told_as_the_service_or_the_code_says(
    e2b: E2BProvider, language: str, code: str, kind: str, message: str
) -> None:
    result = run(e2b, code, language)
    assert result.exception is not None, result.stderr
    assert (result.exception["type"], result.exception["message"]) == (kind, message)
    assert run(e2b, "1", language).exception is None
