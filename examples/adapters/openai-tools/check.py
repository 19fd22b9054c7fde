"""The loop as a program, against a model's service whose answers are written down beforehand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from cofferdam import Cofferdam

AGENT = Path(__file__).with_name("agent.py")


def calling(*codes: str) -> dict[str, Any]:
    calls = [
        {
            "id": f"call-{number}",
            "type": "function",
            "function": {"name": "run_python", "arguments": json.dumps({"code": code})},
        }
        for number, code in enumerate(codes)
    ]
    return {"role": "assistant", "content": None, "tool_calls": calls}


@contextmanager
def model_that_says(*script: dict[str, Any]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A service that speaks OpenAI's chat completions. Its address, and what it was asked."""
    left, asked = list(script), []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            message = left.pop(0)
            reason = "tool_calls" if "tool_calls" in message else "stop"
            choice = {"index": 0, "message": message, "finish_reason": reason}
            self._send({"choices": [choice], "usage": None})

        def _send(self, said: dict[str, Any]) -> None:
            head = {"id": "c", "object": "chat.completion", "created": 0, "model": "scripted"}
            body = json.dumps(head | said).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/v1", asked
        finally:
            server.shutdown()
            thread.join()


def told(request: dict[str, Any]) -> Sequence[str]:
    return [each["content"] for each in request["messages"] if each["role"] == "tool"]


def test_the_agent_answers_by_code_that_keeps_its_variables() -> None:
    script = (
        calling("numbers = list(range(10))\nprint(len(numbers), 'numbers')"),
        calling("sum(numbers)", "1 / 0"),
        calling("open('/etc/shadow')"),
        {"role": "assistant", "content": "They add up to 45."},
    )
    with model_that_says(*script) as (url, asked):
        variables = {"OPENAI_BASE_URL": url, "OPENAI_API_KEY": "none", "OPENAI_MODEL": "scripted"}
        done = subprocess.run(
            [sys.executable, AGENT, "Add the numbers up."],
            env=os.environ | variables,
            capture_output=True,
            text=True,
            timeout=120,
        )
    assert (done.returncode, done.stdout) == (0, "They add up to 45.\n"), done.stderr
    assert [each["tools"][0]["function"]["name"] for each in asked] == ["run_python"] * 4
    first, second, third, fourth = told(asked[-1])
    assert (first, second) == ("10 numbers\n", "45")
    assert third.rstrip().endswith("ZeroDivisionError: division by zero")
    assert "Error" in fourth
    with Cofferdam() as client:
        assert next(client.sessions()).info.state == "closed"
        assert next(client.executions()).status == "failed"


def test_a_model_that_calls_wrongly_is_told_so() -> None:
    wrong = calling("")
    wrong["tool_calls"][0]["function"]["arguments"] = "{code: 1}"
    script = (wrong, {"role": "assistant", "content": "I give up."})
    with model_that_says(*script) as (url, asked):
        variables = {"OPENAI_BASE_URL": url, "OPENAI_API_KEY": "none", "OPENAI_MODEL": "scripted"}
        subprocess.run(
            [sys.executable, AGENT, "Hm?"], env=os.environ | variables, check=True, timeout=120
        )
    assert told(asked[-1])[0].startswith("These are no arguments")
