"""POST and GET /api/v1/executions: what runs, what comes back, in which shape."""

from __future__ import annotations

import base64
import hashlib
import time
from time import perf_counter
from typing import Any
from uuid import uuid4

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from executions.doors.native.authentication import RECEIVED
from executions.ledger.entry import text_hash
from executions.runs.models import Execution
from executions.runs.record import receipt_of
from tests.conftest import Caller, require
from tests.runs.execution_shape import PARTS, SHAPE, sum_of_parts
from tests.support.running import run
from tests.support.sandboxes import long_enough


def test_an_execution_has_exactly_the_documented_shape(local_active: None, alice: Caller) -> None:
    answer = run(alice, "print('hello')")

    assert answer.status_code == 200
    body = answer.json()
    assert list(body) == list(SHAPE)
    for name, kind in SHAPE.items():
        assert isinstance(body[name], kind), name
    assert body["status"] == "succeeded"
    assert (body["stdout"], body["stderr"], body["exit_code"]) == ("hello\n", "", 0)
    assert (body["provider"], body["runtime"], body["language"]) == (
        "local",
        "bubblewrap",
        "python",
    )
    assert (body["result"], body["has_result"], body["error"]) == (None, False, None)
    assert (body["outputs"], body["artifacts"]) == ([], [])
    assert body["receipt"]["subject"] == body["id"]
    timings = body["timings"]
    assert set(timings) == {*PARTS, "total_ms"}
    assert all(isinstance(value, float) for value in timings.values())
    assert sum_of_parts(body) == pytest.approx(timings["total_ms"], abs=0.01)


def test_what_passes_before_the_record_is_received_and_no_queue(
    scripted: object, alice: Caller
) -> None:
    """As a body that comes slowly, or a thread that is not free."""
    before = {RECEIVED: perf_counter() - 60}
    body = alice.client.post("/api/v1/executions", {"code": "pass"}, **before)
    timings = body.json()["timings"]
    assert 60_000 <= timings["received_ms"] <= timings["total_ms"]
    assert sum_of_parts(body.json()) == pytest.approx(timings["total_ms"], abs=0.01)
    assert timings["queue_ms"] < 60_000


def test_main_is_called_with_the_arguments_and_its_value_comes_back(
    local_active: None, alice: Caller
) -> None:
    code = (
        "def main(name, count):\n    print('called')\n    return {'message': f'{name}! ' * count}"
    )

    body = run(alice, code, arguments={"name": "World", "count": 2}).json()

    assert body["result"] == {"message": "World! World! "}
    assert body["has_result"] is True
    assert body["stdout"] == "called\n"


def test_json_types_survive_both_ways(local_active: None, alice: Caller) -> None:
    value = {
        "true": True,
        "null": None,
        "float": 1.5,
        "large": 2**70,
        "text": "grüße \U0001f600 \u0000 \u2028",
        "nested": [[], {}, [{"deep": [1, -1]}]],
    }

    body = run(alice, "def main(value):\n    return value", arguments={"value": value}).json()

    assert body["result"] == value
    assert body["result"]["true"] is True


def test_a_null_result_is_told_from_no_result(local_active: None, alice: Caller) -> None:
    body = run(alice, "def main():\n    pass").json()

    assert (body["result"], body["has_result"]) == (None, True)


def test_code_that_raises_is_failed_with_its_own_line_numbers(
    local_active: None, alice: Caller
) -> None:
    answer = run(alice, "x = 1\n\nraise ValueError('no such luck')")

    assert answer.status_code == 200
    body = answer.json()
    assert (body["status"], body["exit_code"], body["error"]) == ("failed", 1, None)
    assert "line 3" in body["stderr"]
    assert "ValueError: no such luck" in body["stderr"]
    assert body["exception"] == {
        "type": "ValueError",
        "message": "no such luck",
        "traceback": body["stderr"],
    }
    record = Execution.objects.get(pk=body["id"])
    assert (receipt_of(record) or {})["exception_hash"] == text_hash(record.exception)


@pytest.mark.parametrize(
    ("code", "language", "kind", "message"),
    [
        ("throw {status: 404, why: 'no such row'}", "javascript", "Object", "no such row"),
        (
            "throw new Error('outer', {cause: new Error('the reason')})",
            "javascript",
            "Error",
            "outer",
        ),
        ("async function main () { throw new TypeError('x') }", "javascript", "TypeError", "x"),
        ("async def main():\n    raise KeyError('k')", "python", "KeyError", "k"),
        ("exit 3", "bash", "Error", "exit status 3"),
    ],
)
def test_what_ends_a_program_is_told_in_each_language(
    local_active: None, alice: Caller, code: str, language: str, kind: str, message: str
) -> None:
    if language == "javascript":
        require("node")
    body = run(alice, code, language=language).json()

    assert body["status"] == "failed"
    assert body["exception"]["type"] == kind
    assert message in body["exception"]["message"]
    assert "node_runner" not in body["stderr"]
    if "cause" in code:
        assert "the reason" in body["stderr"]


def test_code_that_succeeds_has_no_exception(local_active: None, alice: Caller) -> None:
    caught = "try:\n    1 / 0\nexcept ZeroDivisionError:\n    pass\nimport sys; sys.exit(0)"
    assert run(alice, caught).json()["exception"] is None


def test_the_exit_code_is_the_codes_own(local_active: None, alice: Caller) -> None:
    body = run(alice, "import sys\nsys.exit(7)").json()

    assert (body["status"], body["exit_code"]) == ("failed", 7)


def test_main_that_is_not_there_is_a_program_error(local_active: None, alice: Caller) -> None:
    answer = run(alice, "x = 1", entrypoint="main")

    assert answer.status_code == 200
    body = answer.json()
    assert body["status"] == "failed"
    assert "main" in body["stderr"]


def test_code_that_runs_too_long_is_timed_out(local_active: None, alice: Caller) -> None:
    code = "print('before', flush=True)\nwhile True: pass"
    took: dict[float, float] = {}

    def run_for(seconds: float) -> Any:
        began = time.monotonic()
        answer = run(alice, code, timeout=seconds)
        took[seconds] = time.monotonic() - began
        return answer

    answer = long_enough(run_for, lambda answer: bool(answer.json()["stdout"]), 0.5)

    assert answer.status_code == 200
    body = answer.json()
    assert all(longest < seconds + 20 for seconds, longest in took.items())
    assert (body["status"], body["exit_code"]) == ("timed_out", None)
    assert body["error"]["code"] == "SB005"
    assert f"{max(took):g} s" in body["error"]["message"]
    assert body["stdout"] == "before\n"


def test_code_that_needs_too_much_memory_is_out_of_memory(
    local_active: None, alice: Caller
) -> None:
    answer = run(alice, "x = bytearray(900_000_000)\nprint(len(x))", timeout=60)

    assert answer.status_code == 200
    body = answer.json()
    assert body["status"] == "out_of_memory"
    assert body["error"]["code"] == "SB006"


def test_output_beyond_the_limit_is_dropped_and_flagged(
    local_active: None, alice: Caller, settings: object
) -> None:
    settings.SANDBOX_MAX_OUTPUT_KB = 10

    body = run(alice, "print('x' * 50_000)").json()

    assert body["stdout"] == "x" * 10_000
    assert (body["stdout_truncated"], body["stderr_truncated"]) == (True, False)


def test_output_that_is_no_text_is_replaced_in_answer_and_record_alike(
    local_active: None, alice: Caller
) -> None:
    code = "import os\nos.write(1, b'a\\x00b\\xffc')\nos.write(2, b'\\xed\\xa0\\x80')"

    body = run(alice, code).json()

    assert body["stdout"] == "a\ufffdb\ufffdc"
    assert set(body["stderr"]) == {"\ufffd"}
    record = Execution.objects.get()
    assert (record.stdout, record.stderr) == (body["stdout"], body["stderr"])


def test_input_files_are_there_when_the_code_runs(local_active: None, alice: Caller) -> None:
    content = bytes(range(256))
    files = [
        {"path": "data/in.bin", "content_base64": base64.b64encode(content).decode()},
        {"path": "empty", "content_base64": ""},
    ]
    code = (
        "import os\n"
        "print(open('data/in.bin', 'rb').read() == bytes(range(256)), os.stat('empty').st_size)"
    )

    assert run(alice, code, files=files).json()["stdout"] == "True 0\n"


@pytest.mark.parametrize("size", [100, 2 * 1024 * 1024])
def test_an_input_file_may_come_as_base64_with_line_breaks(
    local_active: None, alice: Caller, size: int
) -> None:
    content = bytes(range(256)) * (size // 256 + 1)
    lines = base64.encodebytes(content).decode().replace("\n", "\r\n")
    code = "import hashlib\nprint(hashlib.sha256(open('in', 'rb').read()).hexdigest())"
    answer = run(alice, code, files=[{"path": "in", "content_base64": lines}]).json()
    assert answer["stdout"].strip() == hashlib.sha256(content).hexdigest()


def test_bash_runs(local_active: None, alice: Caller) -> None:
    body = run(alice, "echo $((6 * 7)); exit 3", language="bash").json()

    assert (body["stdout"], body["exit_code"], body["language"]) == ("42\n", 3, "bash")


def test_javascript_runs(local_active: None, alice: Caller) -> None:
    require("node")
    code = "async function main({a, b}) { return a + b }"

    body = run(alice, code, language="javascript", arguments={"a": 20, "b": 22}).json()

    assert (body["status"], body["result"]) == ("succeeded", 42), body["stderr"]


def test_the_languages_are_those_of_the_provider(local_active: None, alice: Caller) -> None:
    answer = alice.client.get("/api/v1/languages")

    assert answer.status_code == 200
    assert {"python", "bash"} <= set(answer.json()["languages"])


def test_the_request_id_is_the_callers_or_a_new_one(scripted: object, alice: Caller) -> None:
    given = alice.client.post(
        "/api/v1/executions", {"code": "pass"}, headers={"X-Request-ID": "trace-7"}
    )
    made = run(alice, "pass")
    hostile = alice.client.get("/api/v1/executions", headers={"X-Request-ID": "x" * 500})

    assert given["X-Request-ID"] == "trace-7"
    assert Execution.objects.get(pk=given.json()["id"]).request_id == "trace-7"
    assert Execution.objects.get(pk=made.json()["id"]).request_id == made["X-Request-ID"]
    assert len(hostile["X-Request-ID"]) == 32


@pytest.mark.usefixtures("no_lookup_grows_old")
def test_an_execution_costs_eight_statements(scripted: object, alice: Caller) -> None:
    run(alice, "pass")

    with CaptureQueriesContext(connection) as queries:
        assert run(alice, "pass").status_code == 200

    # PostgreSQL takes two locks, the tenant's and the ledger's, which SQLite's writer has anyway.
    statements = [sql.split()[0] for query in queries if "_advisory_" not in (sql := query["sql"])]
    # The key, its tenant's place in the minute, the tenant's bounds and the row; its end, the
    # ledger's last entry and the new one; the statistics.
    ended = ["UPDATE", "SELECT", "INSERT", "INSERT"]
    opened = ["SELECT", "UPDATE", "SAVEPOINT", "SELECT", "INSERT", "RELEASE"]
    assert statements == [*opened, "SAVEPOINT", *ended, "RELEASE"]


def test_the_sandbox_is_destroyed_after_every_outcome(scripted: object, alice: Caller) -> None:
    run(alice, "pass")
    run(alice, "raise errors.ConnectionFailed('gone')")
    run(alice, "raise RuntimeError('a bug')")

    events = scripted()
    assert [event for event in events if event.startswith("destroy")] == [
        "destroy wonderland-1"
    ] * 3


def test_a_sandbox_that_cannot_be_destroyed_does_not_cost_the_result(
    scripted: object, alice: Caller
) -> None:
    code = "events.append('indestructible')\nanswer = ExecutionResult('kept', '', 0, 0.0)"

    body = run(alice, code).json()

    assert (body["status"], body["stdout"]) == ("succeeded", "kept")


@pytest.mark.parametrize(
    ("raised", "http_status", "code"),
    [
        ("errors.NotInitialized('not ready')", 503, "SB001"),
        ("errors.ConnectionFailed('no line')", 502, "SB003"),
        ("errors.CreationFailed('no room')", 503, "SB004"),
        ("errors.RateLimited('too many', retry_after=3.2)", 429, "SB008"),
        ("errors.ProviderUnavailable('gone', started=True)", 503, "SB009"),
    ],
)
def test_an_error_of_ours_comes_with_its_status_and_the_records_id(
    raised: str, http_status: int, code: str, scripted: object, alice: Caller
) -> None:
    answer = run(alice, f"raise {raised}")

    assert answer.status_code == http_status
    body = answer.json()
    assert set(body) == {"error", "id", "receipt"}
    assert set(body["error"]) == {"code", "message", "field"}
    assert body["error"]["code"] == code
    record = Execution.objects.get(pk=body["id"])
    assert (record.status, record.error_code) == ("error", code)
    assert answer.get("Retry-After") == ("4" if code == "SB008" else None)


@pytest.mark.parametrize(
    ("entry", "status", "code"),
    [
        ("TIMEOUT", "timed_out", "SB005"),
        ("OUT_OF_MEMORY", "out_of_memory", "SB006"),
        ("BLOCKED", "blocked", "SB007"),
    ],
)
def test_a_verdict_that_a_provider_raises_is_an_answer_and_no_http_error(
    entry: str, status: str, code: str, scripted: object, alice: Caller
) -> None:
    answer = run(
        alice,
        f"e = errors.SandboxError('so it ended', started=True)\ne.entry = errors.{entry}\nraise e",
    )

    assert answer.status_code == 200
    body = answer.json()
    assert (body["status"], body["error"]) == (status, {"code": code, "message": "so it ended"})


def test_a_bug_of_ours_is_sb009_without_its_text(
    scripted: object, alice: Caller, caplog: pytest.LogCaptureFixture
) -> None:
    answer = run(alice, "raise RuntimeError('password=hunter2')")

    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "SB009"
    assert b"hunter2" not in answer.content
    assert Execution.objects.get().status == "error"
    assert "Traceback" in caplog.text


def test_without_a_provider_the_attempt_is_recorded_and_answered_sb001(
    no_provider: None, alice: Caller
) -> None:
    answer = run(alice, "print(1)")

    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "SB001"
    assert Execution.objects.get().error_code == "SB001"


def test_an_unknown_execution_is_not_found(alice: Caller) -> None:
    for path in (
        f"/api/v1/executions/{uuid4()}",
        "/api/v1/executions/x",
        "/api/v1/nothing",
        "/api/v1",
    ):
        answer = alice.client.get(path)
        assert answer.status_code == 404, path
        assert answer.json()["error"]["code"] == "not_found"


def test_another_method_is_not_allowed(alice: Caller) -> None:
    answer = alice.client.delete("/api/v1/executions")

    assert answer.status_code == 405
    assert answer.json()["error"]["code"] == "method_not_allowed"
    assert "POST" in answer["Allow"]
