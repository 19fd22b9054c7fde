"""An agent of smolagents writes code, which runs in a sandbox and calls its tools there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from cofferdam import Cofferdam
from cofferdam_executor import CofferdamExecutor
from smolagents import ChatMessage, CodeAgent, MessageRole, Model, tool
from smolagents.memory import ActionStep
from smolagents.monitoring import AgentLogger, LogLevel


@tool
def bonus(points: int) -> int:
    """Add what everybody gets.

    Args:
        points: What somebody has.
    """
    return points + 5


class ScriptedModel(Model):
    """Answers with one piece of code after the other."""

    def __init__(self, *script: str) -> None:
        super().__init__(model_id="scripted")
        self._script = iter(script)

    def generate(self, messages: list[ChatMessage], **_: Any) -> ChatMessage:
        code = next(self._script)
        return ChatMessage(MessageRole.ASSISTANT, f"Thought: next.\n<code>\n{code}\n</code>")


@pytest.fixture
def made() -> Iterator[list[CodeAgent]]:
    agents: list[CodeAgent] = []
    yield agents
    for agent in agents:
        agent.cleanup()


def agent_with(made: list[CodeAgent], *script: str) -> CodeAgent:
    agent = CodeAgent(
        tools=[bonus],
        model=ScriptedModel(*script),
        executor=CofferdamExecutor([], AgentLogger(LogLevel.OFF), timeout=300),
        verbosity_level=LogLevel.OFF,
    )
    made.append(agent)
    return agent


def test_an_agent_keeps_variables_calls_its_tool_and_answers(made: list[CodeAgent]) -> None:
    agent = agent_with(
        made,
        "total = sum(points)\nprint('so far', total)",
        "open('total.txt', 'w').write(str(bonus(total)))",
        "1 / 0",
        "final_answer({'points': int(open('total.txt').read()), 'names': ('ada', 'grace')})",
    )
    answer = agent.run("Add the points up.", additional_args={"points": [10, 20]})
    assert answer == {"points": 35, "names": ("ada", "grace")}
    steps = [each for each in agent.memory.steps if isinstance(each, ActionStep)]
    assert "so far 30" in str(steps[0].observations)
    assert "ZeroDivisionError" in str(steps[2].error)
    assert [each.error for each in steps if each is not steps[2]] == [None, None, None]


def test_a_long_answer_comes_whole(made: list[CodeAgent]) -> None:
    agent = agent_with(made, "final_answer('x' * 200_000)")
    assert agent.run("Say much.") == "x" * 200_000


def test_what_an_agent_did_is_in_the_records(made: list[CodeAgent]) -> None:
    agent_with(made, "final_answer(len('recorded by cofferdam'))").run("Count.")
    with Cofferdam() as client:
        latest = next(client.executions())
        assert client.execution(latest.id).receipt
        assert latest.session
