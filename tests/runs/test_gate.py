"""What comes through the gate fits the record, whatever a provider put into its result."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from executions.runs.results import METADATA_BYTES, REFUSED, validate_result, validate_sandbox
from providers.errors import CreationFailed, ProviderUnavailable
from providers.sandbox import Sandbox
from providers.values import ArtifactFile, Emit, ExecutionResult, Job, RunLimits

LIMITS = RunLimits(
    output_bytes=40, result_bytes=30, artifact_count=2, artifact_bytes=6, artifacts_total_bytes=9
)

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(), max_size=60)
    | st.binary(max_size=60)
    | st.just(object())
)
anything = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(scalars, inner, max_size=4) | st.tuples(inner)
    ),
    max_leaves=15,
)
files = st.builds(
    ArtifactFile,
    name=st.text(st.characters(), max_size=12) | anything,
    mime_type=st.just("text/plain") | anything,
    content=st.binary(max_size=10) | anything,
)
results = st.builds(
    ExecutionResult,
    stdout=anything,
    stderr=anything,
    exit_code=anything,
    execution_time=anything,
    metadata=anything,
    stdout_truncated=anything,
    stderr_truncated=anything,
    timed_out=anything,
    out_of_memory=anything,
    has_result=anything | st.just(True),
    result=anything,
    outputs=st.lists(st.dictionaries(st.text(max_size=5), anything, max_size=3)) | anything,
    artifacts=st.lists(files, max_size=5) | anything,
    exception=anything
    | st.fixed_dictionaries(dict.fromkeys(("type", "message", "traceback"), st.text() | anything)),
)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(results)
def test_whatever_comes_in_what_goes_out_can_be_recorded(claimed: ExecutionResult) -> None:
    checked = validate_result(claimed, LIMITS)
    result = checked.result
    for text in (result.stdout, result.stderr):
        assert "\0" not in text
        text.encode()
    assert len(result.stdout.encode()) - 2 * result.stdout.count("\ufffd") <= LIMITS.output_bytes
    assert result.exit_code is None or type(result.exit_code) is int
    assert result.exit_code is None or -(2**31) <= result.exit_code < 2**31
    flags = ("stdout_truncated", "stderr_truncated", "timed_out", "out_of_memory", "has_result")
    assert all(type(getattr(result, name)) is bool for name in flags)
    assert math.isfinite(result.execution_time)
    assert result.execution_time >= 0
    json.loads(json.dumps(result.metadata, allow_nan=False).encode())
    assert (checked.result_json != "") == result.has_result
    assert len(checked.result_json.encode()) <= LIMITS.result_bytes
    if result.has_result:
        json.loads(checked.result_json)
    assert len(json.loads(checked.outputs_json or "[]")) == len(result.outputs)
    assert len(result.artifacts) <= LIMITS.artifact_count
    assert sum(len(file.content) for file in result.artifacts) <= LIMITS.artifacts_total_bytes
    checked.exception_json.encode()
    assert "\0" not in checked.exception_json
    for file in result.artifacts:
        assert {"", ".", ".."}.isdisjoint(file.name.split("/"))


def honest(**fields: Any) -> ExecutionResult:
    return ExecutionResult(**{"stdout": "", "stderr": "", "exit_code": 0, "execution_time": 0.5} | fields)  # type: ignore[arg-type]  # fmt: skip


def test_an_honest_answer_passes_unchanged() -> None:
    file = ArtifactFile("a/b.txt", "text/plain", b"x")
    told = {"runtime": "gvisor", "limits": {"memory_bytes": 1 << 28}, "artifacts_skipped": [["a", "b"]]}  # fmt: skip
    given = honest(
        stdout="héllo 🎈\n", result={"a": [1, 2.5, None]}, has_result=True, metadata=told,
        outputs=[{"text/plain": "4"}], artifacts=[file],
    )  # fmt: skip
    checked = validate_result(given, RunLimits())
    assert checked.result == honest(
        stdout="héllo 🎈\n", result={"a": [1, 2.5, None]}, has_result=True, metadata=told,
        outputs=[{"text/plain": "4"}], artifacts=[file],
    )  # fmt: skip
    assert (checked.result_json, checked.outputs_json) == ('{"a":[1,2.5,null]}', '[{"text/plain":"4"}]')  # fmt: skip


def test_what_ended_a_program_is_kept_where_it_has_failed() -> None:
    told = {"type": "E", "message": "a\0b", "traceback": "t" * 30_000, "more": "x"}
    failed = validate_result(honest(exit_code=1, exception=told), RunLimits())
    assert failed.result.exception == {
        "type": "E",
        "message": "a\ufffdb",
        "traceback": "t" * 20_000,
    }
    assert failed.exception_json.startswith('{"type":"E","message":"a\ufffdb",')
    assert validate_result(honest(exception=told), RunLimits()).exception_json == ""
    assert (
        validate_result(
            honest(exit_code=1, timed_out=True, exception=told), RunLimits()
        ).exception_json
        == ""
    )
    refused = validate_result(honest(exit_code=1, exception="E"), RunLimits())
    assert (refused.exception_json, refused.result.exception) == ("", None)


def test_output_right_at_its_limit_is_whole() -> None:
    for text in ("x" * 40, "é" * 20, "\ufffd" * 40):
        result = validate_result(honest(stdout=text), LIMITS).result
        assert (result.stdout, result.stdout_truncated) == (text, False)
        result = validate_result(honest(stdout=text + "y"), LIMITS).result
        assert result.stdout_truncated
        assert text.startswith(result.stdout)


def test_bytes_in_place_of_text_are_read_and_named() -> None:
    result = validate_result(honest(stdout=b"caf\xc3\xa9 \xff"), LIMITS).result
    assert (result.stdout, result.metadata[REFUSED]) == ("café \ufffd", ["stdout: bytes"])


@pytest.mark.parametrize(
    "told",
    [
        {"deep": json.loads("[" * 900 + "]" * 900)},
        {"much": "x" * 10_000_000},
        {"many": list(range(100_000))},
        {str(number): "x" * 100 for number in range(10_000)},
        {"huge": 10**5000, "nan": math.nan, "inf": math.inf},
        {b"bytes": object(), ("a", 1): {1, 2}},
    ],
)
def test_metadata_is_bounded_in_depth_number_and_size(told: Any) -> None:
    metadata = validate_result(honest(metadata=told), LIMITS).result.metadata
    assert metadata[REFUSED] == ["metadata: too deep, too much, or not JSON"]
    assert len(json.dumps(metadata)) < 2 * METADATA_BYTES


def test_a_result_over_its_limit_is_a_failure_of_the_program() -> None:
    checked = validate_result(honest(has_result=True, result="x" * 100), LIMITS)
    assert (checked.result.exit_code, checked.result.has_result, checked.result_json) == (1, False, "")  # fmt: skip
    assert "more than 30 bytes" in checked.result.stderr


def test_rich_outputs_are_bounded_and_counted() -> None:
    bundles: Any = [{"text/plain": "x"}] * 30 + [7, {}, {"text/plain": math.nan}, {5: "x"}]
    checked = validate_result(honest(outputs=bundles), RunLimits())
    assert len(checked.result.outputs) == RunLimits().rich_output_count
    told = checked.result.metadata["outputs_skipped"]
    assert [name for name, _ in told] == [f"output {n}" for n in range(21, len(bundles) + 1)]
    large: Any = [{"text/plain": "x" * 12_000_000}]
    assert validate_result(honest(outputs=large), RunLimits()).result.outputs == []


@pytest.mark.parametrize("answer", [None, 7, "x", [], {}, ExecutionResult])
def test_what_is_no_result_is_refused(answer: Any) -> None:
    with pytest.raises(ProviderUnavailable) as caught:
        validate_result(answer, LIMITS)
    assert caught.value.started


class Odd(Sandbox):
    """Has whatever attributes it is given."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)

    def run(self, job: Job, emit: Emit | None = None) -> ExecutionResult:
        raise AssertionError("nothing runs in it")

    def close(self) -> bool:
        return True


@pytest.mark.parametrize(
    "sandbox", [None, "1", Odd(), Odd(ref=1, metadata={}), Odd(ref="1", metadata=[]), Odd(ref="1")]
)
def test_what_is_no_sandbox_is_refused(sandbox: Any) -> None:
    with pytest.raises(CreationFailed) as caught:
        validate_sandbox(sandbox)
    assert not caught.value.started
