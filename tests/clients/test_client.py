"""`execute_code`: code run from within this process, recorded like any other."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from executions.client import execute_code
from executions.runs.models import Execution
from executions.tenants.models import Tenant
from providers.errors import (
    ConnectionFailed,
    InvalidConfiguration,
    NotInitialized,
    ProviderUnavailable,
)
from providers.values import ExecutionResult


def test_its_signature_is_the_published_one() -> None:
    parameters = inspect.signature(execute_code).parameters

    assert {name: each.default for name, each in parameters.items()} == {
        "code": inspect.Parameter.empty,
        "language": "python",
        "timeout": 30,
        "arguments": None,
    }


def test_code_runs_and_its_result_comes_back(local_active: None) -> None:
    code = (
        "def main(name, count):\n    print('hi')\n    return {'message': f'Hello {name}!' * count}"
    )

    result = execute_code(code, arguments={"name": "World", "count": 3})

    assert isinstance(result, ExecutionResult)
    assert result.result == {"message": "Hello World!Hello World!Hello World!"}
    assert (result.stdout, result.stderr, result.exit_code) == ("hi\n", "", 0)
    assert result.metadata["runtime"] == "bubblewrap"
    assert 0 < result.execution_time < 5


def test_it_is_recorded_for_the_internal_tenant(local_active: None) -> None:
    execute_code("print(1)")
    execute_code("print(2)")

    assert Tenant.objects.get().slug == "internal"
    records = Execution.objects.all()
    assert {(each.tenant_slug, each.api_key, each.status) for each in records} == {
        ("internal", None, "succeeded")
    }


def test_code_that_fails_is_a_result(local_active: None) -> None:
    result = execute_code("raise ValueError('no')")

    assert result.exit_code == 1
    assert "ValueError: no" in result.stderr


def test_code_that_runs_too_long_is_a_result(local_active: None) -> None:
    result = execute_code("while True: pass", timeout=0.5)

    assert (result.timed_out, result.exit_code) == (True, None)


def test_output_is_the_same_as_recorded(scripted: object) -> None:
    result = execute_code("answer = ExecutionResult('a\\0', '\\ud800', 0, 0.0)")

    record = Execution.objects.get()
    assert (result.stdout, result.stderr) == (record.stdout, record.stderr) == ("a\ufffd", "\ufffd")


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        ({"code": ""}, "code"),
        ({"code": "x", "language": "cobol"}, "language"),
        ({"code": "x", "timeout": float("nan")}, "timeout"),
        ({"code": "x", "timeout": 0}, "timeout"),
        ({"code": "x", "arguments": {1: 2}}, "arguments"),
        ({"code": "x", "arguments": {"a": object()}}, "arguments"),
        ({"code": "x", "arguments": {"a": float("nan")}}, "arguments"),
    ],
)
def test_bad_input_is_refused_by_name_and_not_recorded(
    request_: dict[str, Any], field: str, scripted: object
) -> None:
    with pytest.raises(InvalidConfiguration) as raised:
        execute_code(**request_)

    assert raised.value.field == field
    assert Execution.objects.count() == 0


def test_an_error_of_ours_is_raised_and_recorded(scripted: object) -> None:
    with pytest.raises(ConnectionFailed, match="no line"):
        execute_code("raise errors.ConnectionFailed('no line')")

    assert Execution.objects.get().error_code == "SB003"


def test_a_bug_is_raised_as_sb009(scripted: object) -> None:
    with pytest.raises(ProviderUnavailable):
        execute_code("raise KeyError('x')")


def test_without_a_provider_it_is_sb001(no_provider: None) -> None:
    with pytest.raises(NotInitialized):
        execute_code("print(1)")

    assert Execution.objects.get().error_code == "SB001"
