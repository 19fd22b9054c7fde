"""LiteLLM's functions for sandboxes, its provider for E2B unmodified."""

from __future__ import annotations

import os
from typing import Any

import litellm
import pytest
from cofferdam import Cofferdam
from cofferdam_door import door


@pytest.fixture
def there() -> dict[str, Any]:
    return {"provider": "e2b", "api_base": os.environ["E2B_API_URL"], "client": door()}


async def test_code_runs_in_a_sandbox_that_is_gone_behind_it(there: dict[str, Any]) -> None:
    done = await litellm.acode_interpreter_tool(
        code="import sys\nprint('said')\nprint('why', file=sys.stderr)\n6 * 7", **there
    )
    assert (done.stdout, done.stderr, done.error) == ("said\n", "why\n", None)
    assert [each["text"] for each in done.results] == ["42"]
    with Cofferdam() as client:
        assert next(client.sessions()).info.state == "closed"
        assert client.execution(next(client.executions()).id).receipt


async def test_a_sandbox_keeps_variables_and_tells_errors(there: dict[str, Any]) -> None:
    made = await litellm.acreate_sandbox(timeout=120, **there)
    of_it = {"provider": "e2b", "container": made, "client": there["client"]}
    try:
        await litellm.arun_code(code="numbers = list(range(10))", **of_it)
        assert (await litellm.arun_code(code="print(sum(numbers))", **of_it)).stdout == "45\n"
        failed = await litellm.arun_code(code="numbers[99]", **of_it)
        assert failed.error is not None
        assert (failed.error["name"], failed.error["value"]) == (
            "IndexError",
            "list index out of range",
        )
    finally:
        assert await litellm.adelete_sandbox(**of_it)
    assert not await litellm.adelete_sandbox(**of_it)
