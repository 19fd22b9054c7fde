"""Code that calls tools in a container under runc; under gVisor it is among the kept promises."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from providers.runtime.pool.kept import Kept
from providers.values import ExecutionResult, Job
from tests.support.docker_engine import Containers

ASKS = {
    "python": "from tools import double\nprint([double(n=n) for n in (1, 2)])",
    "nodejs": "const { double } = require('tools')\n"
    "console.log([await double({ n: 1 }), await double({ n: 2 })])",
}


@pytest.mark.parametrize("language", ASKS)
def test_a_call_goes_out_of_a_container_and_its_answer_comes_in(
    under_runc: Containers, language: str
) -> None:
    called: list[dict[str, Any]] = []

    async def ask() -> ExecutionResult:
        kept = await Kept.open(sandbox, {}, {})
        loop = asyncio.get_running_loop()

        def emit(frame: Any) -> None:
            _, parts = frame
            if "arguments" in parts:
                called.append(json.loads(parts["arguments"]))
                answer = json.dumps({"result": called[-1]["n"] * 2}).encode()
                loop.call_soon(kept.answer, "asks", int(parts["call"]), answer)

        return await kept.run(Job(ASKS[language], tools=["double"], run="asks"), emit)

    sandbox = under_runc.start(language)
    try:
        result = under_runc.loop.call(ask())
    finally:
        under_runc.loop.call(sandbox.destroy())

    assert result.stdout.replace(" ", "") == "[2,4]\n", result.stderr
    assert called == [{"n": 1}, {"n": 2}]
