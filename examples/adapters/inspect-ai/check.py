"""The framework's own suite for sandboxes, and an evaluation whose model calls tools in one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import cofferdam_sandbox  # noqa: F401 - registers the sandbox
import inspect_ai
import pytest
from cofferdam import Cofferdam
from cofferdam_sandbox import CofferdamSandboxEnvironment
from inspect_ai import Task
from inspect_ai.dataset import Sample
from inspect_ai.model import ModelOutput, ModelUsage, get_model
from inspect_ai.scorer import includes
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import bash, python
from inspect_ai.util import SandboxEnvironment
from inspect_ai.util._sandbox.self_check import *  # noqa: F403

# There is no root in a sandbox, and so nobody who could add a user.
NOT_THERE = ("test_exec_as_user",)


@pytest.fixture
async def sandbox_env(request: pytest.FixtureRequest) -> AsyncIterator[SandboxEnvironment]:
    if request.node.originalname in NOT_THERE:
        request.applymarker(pytest.mark.xfail(strict=True))
    made = await CofferdamSandboxEnvironment.sample_init("self_check", None, {})
    yield made["default"]
    await CofferdamSandboxEnvironment.sample_cleanup("self_check", None, made, False)


def test_a_model_solves_a_sample_with_tools_in_a_session_of_its_own(tmp_path: Path) -> None:
    def calling(tool: str, **arguments: Any) -> ModelOutput:
        return ModelOutput.for_tool_call("mockllm", tool, arguments)

    script = [
        calling("bash", command="wc -l < in/numbers.txt; touch left-behind"),
        calling("python", code="print(sum(map(int, open('in/numbers.txt'))))"),
        calling("bash", command="exit 3"),
        ModelOutput.from_content("mockllm", "They add up to 45."),
    ]
    numbers = "".join(f"{number}\n" for number in range(10))
    task = Task(
        dataset=[Sample("Add them up.", target="45", files={"in/numbers.txt": numbers})],
        solver=[use_tools(bash(), python()), generate()],
        scorer=includes(),
        sandbox="cofferdam",
        name="numbers",
    )
    for each in script:
        # Else it counts with a vocabulary that it fetches first.
        each.usage = ModelUsage()
    model = get_model("mockllm/model", custom_outputs=script)
    (log,) = inspect_ai.eval(task, model, log_dir=str(tmp_path), display="none")
    assert log.status == "success", log.error
    assert log.results is not None
    assert log.results.scores[0].metrics["accuracy"].value == 1
    (sample,) = log.samples or []
    told = [each.text for each in sample.messages if each.role == "tool"]
    assert told == ["10\n", "45\n", ""]
    with Cofferdam() as client:
        opened = [each.info for each in client.sessions() if each.info.metadata]
    assert {each.state for each in opened if each.metadata["task"] == "numbers"} == {"closed"}
