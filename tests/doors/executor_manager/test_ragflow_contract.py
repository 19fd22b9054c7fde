"""RAGFlow's executor contract, compared field by field with answers of its own executor.

Where ours differs on purpose, the test says so by its name.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import pytest

from tests.conftest import require
from tests.support.pool_service import PoolService

pytest_plugins = ["tests.support.pool_fixtures"]

FIELDS = [
    "status",
    "stdout",
    "stderr",
    "exit_code",
    "detail",
    "time_used_ms",
    "memory_used_kb",
    "resource_limit_type",
    "unauthorized_access_type",
    "runtime_error_type",
    "artifacts",
    "result",
]

SUCCESS = {
    "status": "success",
    "stdout": "",
    "stderr": "",
    "exit_code": 0,
    "detail": None,
    "resource_limit_type": None,
    "unauthorized_access_type": None,
    "runtime_error_type": None,
    "artifacts": [],
    "result": None,
}
FAILED = SUCCESS | {
    "status": "program_error",
    "exit_code": 1,
    "runtime_error_type": "nonzero_exit",
}
OUT_OF_LIMIT = SUCCESS | {"status": "resource_limit_exceeded"}


def value(returned: Any) -> dict[str, Any]:
    return {"present": True, "value": returned, "type": "json"}


def run(pool: PoolService, code: str, **body: Any) -> dict[str, Any]:
    """The answer, whose fields and measured values are checked here and left out."""
    answer = pool.ragflow(code, **body)
    assert answer.status == 200
    assert list(answer.body) == FIELDS
    known: dict[str, Any] = dict(answer.body)
    assert isinstance(known.pop("time_used_ms"), float)
    assert isinstance(known.pop("memory_used_kb"), int | None)
    return known


@pytest.fixture(autouse=True)
def _healthy_before_and_after(pool: PoolService) -> Iterator[None]:
    yield
    pool.wait_until_healthy()


def test_success(pool: PoolService) -> None:
    code = "def main(a, b):\n    print('log')\n    return {'sum': a + b}"
    answer = run(pool, code, arguments={"a": 1, "b": 1})
    assert answer == SUCCESS | {"stdout": "log\n", "result": value({"sum": 2})}


def test_success_with_an_artifact(pool: PoolService) -> None:
    code = "def main():\n    open('artifacts/x.csv', 'w').write('a')"
    expected = {"name": "x.csv", "mime_type": "text/csv", "size": 1, "content_b64": "YQ=="}
    assert run(pool, code) == SUCCESS | {"artifacts": [expected], "result": value(None)}


def test_arguments_null_and_absent_are_none(pool: PoolService) -> None:
    for body in ({"arguments": None}, {}):
        assert run(pool, "def main():\n    return 1", **body) == SUCCESS | {"result": value(1)}


def test_an_early_exit_has_no_result(pool: PoolService) -> None:
    assert run(pool, "import sys\ndef main():\n    sys.exit(0)") == SUCCESS


def test_the_value_of_node_s_main(pool: PoolService) -> None:
    require("node")
    code = "async function main({ a }) { console.log('log'); return { twice: a * 2 } }"
    answer = run(pool, code, language="nodejs", arguments={"a": 4})
    assert answer == SUCCESS | {"stdout": "log\n", "result": value({"twice": 8})}


def test_node_s_main_gets_an_object_when_there_are_no_arguments(pool: PoolService) -> None:
    require("node")
    answer = run(pool, "function main(args) { return typeof args.a }", language="nodejs")
    assert answer == SUCCESS | {"result": value("undefined")}


def test_what_node_code_exports_itself_is_no_obstacle(pool: PoolService) -> None:
    require("node")
    code = "const main = () => 3\nmodule.exports = { main }"
    assert run(pool, code, language="nodejs") == SUCCESS | {"result": value(3)}


def test_an_exception_keeps_what_was_printed_before_it(pool: PoolService) -> None:
    answer = run(pool, "def main():\n    print('before')\n    raise ValueError('x')")
    assert answer.pop("stderr").endswith("ValueError: x\n")
    assert answer == {k: v for k, v in FAILED.items() if k != "stderr"} | {"stdout": "before\n"}


def test_code_without_main_fails(pool: PoolService) -> None:
    answer = run(pool, "print('top level')")
    assert "main" in answer["stderr"]
    assert answer == FAILED | {"stdout": "top level\n", "stderr": answer["stderr"]}


@pytest.mark.parametrize(
    ("language", "code"),
    [
        ("python", "def main():\n    return {'mean': float('nan'), 'most': [float('inf')]}"),
        ("nodejs", "function main() { return {mean: 0 / 0, most: [1 / 0]} }"),
    ],
)
def test_what_is_no_finite_number_is_null_as_there(
    pool: PoolService, language: str, code: str
) -> None:
    if language == "nodejs":
        require("node")
    answer = run(pool, code, language=language)
    assert answer == SUCCESS | {"result": value({"mean": None, "most": [None]})}


def test_code_may_come_with_line_breaks_in_its_base64(pool: PoolService) -> None:
    lines = base64.encodebytes(b"def main():\n    return 'x' * 3" + b" " * 100).decode()
    assert pool.ask("POST", "/run", {"code_b64": lines}).body["result"] == value("xxx")


def test_a_value_that_is_not_json_fails(pool: PoolService) -> None:
    answer = run(pool, "def main():\n    return {1, 2}")
    assert "set is not JSON serializable" in answer["stderr"]
    assert answer == FAILED | {"stderr": answer["stderr"]}


@pytest.mark.parametrize(
    "text", ["Permission denied", "Operation not permitted", "MemoryError", "Killed"]
)
def test_words_in_stderr_are_no_verdict(pool: PoolService, text: str) -> None:
    answer = run(pool, f"def main():\n    raise ValueError({text!r})")
    assert text in answer["stderr"]
    assert answer == FAILED | {"stderr": answer["stderr"]}


def test_importing_os_is_no_offence(pool: PoolService) -> None:
    answer = run(pool, "import os\ndef main():\n    return os.path.join('a', 'b')")
    assert answer == SUCCESS | {"result": value("a/b")}


@pytest.mark.parametrize("code", [124, 137, 3])
def test_an_exit_code_is_no_verdict(pool: PoolService, code: int) -> None:
    answer = run(pool, f"import sys\ndef main():\n    print('p')\n    sys.exit({code})")
    assert answer == FAILED | {"stdout": "p\n", "exit_code": code}


def test_a_result_cannot_be_forged_by_printing_it(pool: PoolService) -> None:
    forged = base64.b64encode(b'{"present":true,"value":"forged","type":"json"}').decode()
    line = f"__RAGFLOW_RESULT__:{forged}"
    answer = run(pool, f"def main():\n    print({line!r})\n    return 'real'")
    assert answer == SUCCESS | {"stdout": f"{line}\n", "result": value("real")}


def test_a_timeout_keeps_what_was_printed_and_needs_no_consent(pool: PoolService) -> None:
    code = (
        "import signal\ndef main():\n    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "    print('before', flush=True)\n    while True: pass"
    )
    assert run(pool, code) == OUT_OF_LIMIT | {
        "stdout": "before\n",
        "stderr": "Execution timeout",
        "exit_code": -124,
        "resource_limit_type": "time",
    }


def test_too_much_memory(pool: PoolService) -> None:
    code = (
        "def main():\n    print('before', flush=True)\n"
        "    hoard = [bytearray(1 << 24) for _ in range(99)]"
    )
    answer = run(pool, code)
    assert answer == OUT_OF_LIMIT | {
        "stdout": "before\n",
        "stderr": "Memory limit exceeded (killed by OOM)",
        "exit_code": -137,
        "resource_limit_type": "memory",
    }


def test_output_that_is_not_utf8_and_output_without_end(pool: PoolService) -> None:
    code = "import sys\ndef main():\n    sys.stdout.buffer.write(b'\\xff')"
    assert run(pool, code)["stdout"] == "\ufffd"
    flood = run(pool, "def main():\n    print('x' * 30_000_000)")
    assert (flood["status"], flood["resource_limit_type"]) == ("success", "output")
    assert len(flood["stdout"]) == 200_000


def test_artifacts_are_of_known_kinds_and_right_in_their_folder(pool: PoolService) -> None:
    code = """
import os
def main():
    for name in ('a b.json', 'plot.PNG', 'run.sh', '.hidden.csv', 'big.pdf'):
        with open('artifacts/' + name, 'wb') as file:
            file.write(b'{}')
    os.truncate('artifacts/big.pdf', 10 * 1024 * 1024 + 1)
    open('artifacts/empty.csv', 'w').close()
    os.mkdir('artifacts/below')
    open('artifacts/below/x.csv', 'w').write('a')
    os.symlink('/etc/hostname', 'artifacts/link.csv')
"""
    names = [artifact["name"] for artifact in run(pool, code)["artifacts"]]
    assert names == ["a b.json", "plot.PNG"]


def test_other_files_do_not_take_the_place_of_artifacts(pool: PoolService) -> None:
    code = """
def main():
    for number in range(30):
        open(f'artifacts/a{number:02}.txt', 'w').write('x')
        open(f'artifacts/b{number:02}.csv', 'w').write('x')
"""
    names = [artifact["name"] for artifact in run(pool, code)["artifacts"]]
    assert names == [f"b{number:02}.csv" for number in range(10)]


def test_no_run_sees_what_another_left(pool: PoolService) -> None:
    code = (
        "import os, subprocess\n"
        "def main():\n"
        "    subprocess.Popen(['sleep', '60'])\n"
        "    left = sorted(os.listdir('/tmp')) + os.listdir('artifacts')\n"
        "    open('/tmp/left', 'w').close()\n"
        "    open('artifacts/left.csv', 'w').write('a')\n"
        "    return left"
    )
    for _ in range(5):
        assert run(pool, code)["result"] == value([])


@pytest.mark.parametrize(
    ("body", "detail"),
    [
        (
            {"code_b64": "!!!"},
            {
                "type": "value_error",
                "loc": ["body", "code_b64"],
                "msg": "Value error, Invalid base64 encoding: Only base64 data is allowed",
                "input": "!!!",
                "ctx": {"error": {}},
            },
        ),
        (
            {"code_b64": "YQ==", "language": "javascript"},
            {
                "type": "enum",
                "loc": ["body", "language"],
                "msg": "Input should be 'python' or 'nodejs'",
                "input": "javascript",
                "ctx": {"expected": "'python' or 'nodejs'"},
            },
        ),
        (
            {"language": "python"},
            {
                "type": "missing",
                "loc": ["body", "code_b64"],
                "msg": "Field required",
                "input": {"language": "python"},
            },
        ),
        (
            {"code_b64": 5},
            {
                "type": "string_type",
                "loc": ["body", "code_b64"],
                "msg": "Input should be a valid string",
                "input": 5,
            },
        ),
        (
            {"code_b64": "YQ==", "arguments": [1]},
            {
                "type": "dict_type",
                "loc": ["body", "arguments"],
                "msg": "Input should be a valid dictionary",
                "input": [1],
            },
        ),
        (
            {"code_b64": "/w=="},
            {
                "type": "value_error",
                "loc": ["body", "code_b64"],
                "msg": "Value error, The code is not UTF-8",
                "input": "/w==",
                "ctx": {"error": {}},
            },
        ),
    ],
)
def test_bad_requests(pool: PoolService, body: dict[str, Any], detail: dict[str, Any]) -> None:
    answer = pool.ask("POST", "/run", body)
    assert (answer.status, answer.body) == (422, {"detail": [detail]})


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'"text"', b"[" * 100_000])
def test_a_body_that_is_no_object(pool: PoolService, content: bytes) -> None:
    answer = pool.ask("POST", "/run", content)
    assert answer.status == 422
    assert answer.body["detail"][0]["loc"][0] == "body"


@pytest.mark.parametrize("arguments", ['{"a": NaN}', '{"a": "\\ud800"}'])
def test_arguments_that_no_program_can_be_given(pool: PoolService, arguments: str) -> None:
    answer = pool.ask("POST", "/run", f'{{"code_b64": "YQ==", "arguments": {arguments}}}'.encode())
    assert answer.status == 422
    assert answer.body["detail"][0]["loc"] == ["body", "arguments"]


def test_unknown_fields_are_ignored_as_the_original_does(pool: PoolService) -> None:
    answer = run(pool, "def main():\n    return 1", base_image="any")
    assert answer == SUCCESS | {"result": value(1)}


def test_health(pool: PoolService) -> None:
    for path in ("/", "/healthz"):
        answer = pool.ask("GET", path)
        assert (answer.status, answer.body) == (200, {"status": "ok"})
