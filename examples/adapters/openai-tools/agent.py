"""An agent in one loop: OpenAI's client, one tool, and a session that keeps variables and files.

python agent.py "How many prime numbers are there below a million?"
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from typing import Any

from cofferdam import Cofferdam, Execution, OpenSession
from cofferdam.errors import ServiceError
from openai import OpenAI

MOST_TURNS = 20
MOST_CHARACTERS = 10_000


def tool_with(packages: Iterable[str]) -> Any:
    """What the model is told of the tool, whose code can import these packages."""
    return {
        "type": "function",
        "function": {
            "name": "run_python",
            "description": "Run Python code, and see what it prints and the value of its last "
            "line. Variables and files are kept from call to call. Beside the standard library it "
            f"can import: {', '.join(packages) or 'nothing'}.",
            "parameters": {
                "type": "object",
                "properties": {"code": {"type": "string"}},
                "required": ["code"],
                "additionalProperties": False,
            },
            "strict": True,
        },
    }


def answer(model: OpenAI, name: str, session: OpenSession, question: str, tool: Any) -> str:
    messages: list[Any] = [{"role": "user", "content": question}]
    for _ in range(MOST_TURNS):
        said = model.chat.completions.create(model=name, messages=messages, tools=[tool])
        message = said.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            return message.content or ""
        for call in message.tool_calls:
            told = called(session, call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": told})
    raise RuntimeError(f"There was no answer after {MOST_TURNS} turns.")


def called(session: OpenSession, arguments: str) -> str:
    """What the model is told: it can put right what it did wrong, and what the policy refused."""
    try:
        code = json.loads(arguments)["code"]
        return told_of(session.run(code, timeout=60))
    except (ValueError, KeyError, TypeError) as error:
        return f"These are no arguments of run_python: {error!r}"
    except ServiceError as error:
        return f"It was not run: {error.message}"


def told_of(done: Execution) -> str:
    values = [each["text/plain"] for each in done.outputs if "text/plain" in each]
    error = [done.error.message] if done.error else []
    parts = (done.stdout, *values, done.stderr, *error, *done.advice)
    text = "\n".join(part for part in parts if part)
    if len(text) > MOST_CHARACTERS:
        text = f"{text[: MOST_CHARACTERS // 2]}\n...\n{text[-MOST_CHARACTERS // 2 :]}"
    return text or "(nothing was printed)"


def main() -> None:
    with Cofferdam() as client, client.open_session() as session:
        tool = tool_with(client.packages())
        print(answer(OpenAI(), os.environ["OPENAI_MODEL"], session, sys.argv[1], tool))


if __name__ == "__main__":
    main()
