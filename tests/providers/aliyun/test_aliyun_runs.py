"""Code in Aliyun's Code Interpreter, through the unmodified SDK against a server of its protocol."""

from __future__ import annotations

import time

import pytest

from providers.aliyun_codeinterpreter.provider import AliyunCodeInterpreterProvider
from providers.base import ARTIFACTS, STREAMING
from providers.errors import InvalidConfiguration, SandboxError
from providers.values import InputFile, RunLimits, SandboxLimits, SandboxSpec
from tests.support.agentrun_server import AgentRunServer
from tests.support.remote_providers import open_aliyun, run
from tests.support.wire_server import eventually

Aliyun = AliyunCodeInterpreterProvider


def test_a_script_prints(aliyun: Aliyun, aliyun_server: AgentRunServer) -> None:
    result = run(aliyun, "import sys\nprint('hello')\nprint('oops', file=sys.stderr)")
    assert (result.stdout, result.stderr, result.exit_code) == ("hello\n", "oops\n", 0)
    assert aliyun_server.sandboxes == {}
    assert aliyun_server.unsigned == 0


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
        ("nodejs", "async function main(given) { console.log('printed'); return given }"),
    ],
)
def test_main_gets_its_arguments_and_returns_a_value(
    aliyun: Aliyun, language: str, code: str
) -> None:
    result = run(aliyun, code, language, arguments=ARGUMENTS)
    assert (result.stderr, result.exit_code, result.has_result) == ("", 0, True)
    assert (result.result, result.stdout) == (ARGUMENTS, "printed\n")


@pytest.mark.parametrize(
    ("language", "code", "exit_code", "said"),
    [
        ("python", "import sys\nsys.exit(3)", 3, ""),
        ("python", "import sys\nsys.exit('gone wrong')", 1, "gone wrong"),
        ("python", "1/0", 1, "ZeroDivisionError"),
        ("python", "import sys\nprint('only a warning', file=sys.stderr)", 0, "only a warning"),
        (
            "python",
            "def main():\n    raise ValueError('bad')",
            1,
            'File "main.py", line 2, in main',
        ),
        ("javascript", "throw new Error('bad')", 1, "bad"),
        ("javascript", "async function main() { throw new Error('bad') }", 1, "bad"),
    ],
)
def test_how_code_ends_shows_in_its_exit_code(
    aliyun: Aliyun, language: str, code: str, exit_code: int, said: str
) -> None:
    result = run(aliyun, code, language)
    assert result.exit_code == exit_code
    assert said in result.stderr


def test_output_beyond_the_limit_is_dropped_and_flagged(aliyun: Aliyun) -> None:
    code = "def main():\n    print('é' * 50_000)\n    return 'still here'"
    result = run(aliyun, code, limits=RunLimits(output_bytes=1001))
    assert (result.stdout, result.stdout_truncated) == ("é" * 500, True)
    assert result.result == "still here"


def test_a_flood_ends_the_run_and_not_us(aliyun: Aliyun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("providers.remote.bounded.MAX_RESPONSE_BYTES", 100_000)
    with pytest.raises(SandboxError, match="more than 100000 bytes") as caught:
        run(aliyun, "print('x' * 300_000)")
    assert caught.value.started


def test_a_compressed_answer_is_not_unpacked(aliyun: Aliyun, aliyun_server: AgentRunServer) -> None:
    aliyun_server.fail("execute", "compressed")
    with pytest.raises(SandboxError, match="compressed answer") as caught:
        run(aliyun, "print(1)")
    assert caught.value.code == "SB003"


def test_files_go_in(aliyun: Aliyun) -> None:
    files = [InputFile("data/in.bin", bytes(range(256)))]
    code = "print(len(open('data/in.bin', 'rb').read()))"
    assert run(aliyun, code, files=files).stdout == "256\n"


def test_our_own_deadline_ends_the_run(aliyun: Aliyun, aliyun_server: AgentRunServer) -> None:
    began = time.monotonic()
    result = run(aliyun, "while True: pass", timeout=1)
    # Its code goes on for ever.
    assert time.monotonic() - began < 30
    assert (result.timed_out, result.exit_code) == (True, None)
    assert eventually(lambda: aliyun_server.sandboxes == {})


def test_the_services_limit_of_30_seconds_is_ours_to_enforce(
    aliyun_server: AgentRunServer,
) -> None:
    with pytest.raises(InvalidConfiguration, match="timeout: Must be at most 30"):
        open_aliyun(aliyun_server, timeout=31)
    provider = open_aliyun(aliyun_server)
    assert provider.max_timeout == 30
    with pytest.raises(InvalidConfiguration, match="30 s at most"):
        run(provider, "print(1)", timeout=31)
    assert not aliyun_server.executed


def test_a_sandbox_ends_by_itself_soon_after_its_last_run(
    aliyun: Aliyun, aliyun_server: AgentRunServer
) -> None:
    run(aliyun, "print(1)")
    assert aliyun_server.idle_seconds == [90]


def test_what_is_not_offered_says_so(aliyun: Aliyun) -> None:
    assert not {ARTIFACTS, STREAMING} & aliyun.capabilities
    with pytest.raises(InvalidConfiguration, match="environment: "):
        aliyun.open(SandboxSpec(environment={"A": "b"}), "wonderland")
    with pytest.raises(InvalidConfiguration, match="limits: "):
        aliyun.open(SandboxSpec(limits=SandboxLimits()), "wonderland")


@pytest.mark.parametrize(
    ("language", "code", "kind", "message"),
    [
        ("python", "raise RuntimeError('a:\\nValueError: b')", "RuntimeError", "a:\nValueError: b"),
        ("python", "def main():\n    raise KeyError('k\\nl')", "KeyError", "'k\\nl'"),
        ("python", "import sys\nsys.exit('gone wrong')", "SystemExit", "gone wrong"),
    ],
)
def test_what_ended_code_is_told_as_the_service_or_the_code_says(
    aliyun: Aliyun, language: str, code: str, kind: str, message: str
) -> None:
    result = run(aliyun, code, language)
    assert result.exception is not None, result.stderr
    assert (result.exception["type"], result.exception["message"]) == (kind, message)
    assert run(aliyun, "1", language).exception is None
