"""A model that says what a test has written for it, at the address of OpenAI's Responses API."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

# A tool's arguments are an object; those of a tool of free form are a text.
Call = str | tuple[str, Mapping[str, Any] | str]


class Model:
    """Makes each call in turn, and then says that it is done. A call is the text of a command, or
    the name of a tool with its arguments, in which `{session}` is the number that the last output
    names. `outputs` is what it was told of them."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self.outputs: list[str] = []
        self._calls = list(calls)
        model = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                content = model.answer(asked)
                self.send_response(200)
                self.send_header("Content-Type", "text/event-stream")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def do_GET(self) -> None:
                self.send_error(404)

            def log_message(self, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/v1"

    def answer(self, asked: dict[str, Any]) -> bytes:
        told = [each for each in asked["input"] if each.get("type", "").endswith("call_output")]
        self.outputs = [str(each["output"]) for each in told]
        number = len(told)
        if number < len(self._calls):
            item = self._item(number)
        else:
            said = [{"type": "output_text", "text": "All is done."}]
            item = {"type": "message", "id": "m1", "role": "assistant", "content": said}
        usage = {"input_tokens": 1, "output_tokens": 1, "total_tokens": 2}
        events: list[dict[str, Any]] = [
            {"type": "response.created", "response": {"id": "r1"}},
            {"type": "response.output_item.done", "item": item},
            {"type": "response.completed", "response": {"id": "r1", "usage": usage}},
        ]
        lines = [f"event: {each['type']}\ndata: {json.dumps(each)}\n\n" for each in events]
        return "".join(lines).encode()

    def _item(self, number: int) -> dict[str, Any]:
        call = self._calls[number]
        name, arguments = ("exec_command", {"cmd": call}) if isinstance(call, str) else call
        known = {"id": f"fc_{number}", "call_id": f"call_{number}", "name": name}
        if isinstance(arguments, str):
            return {"type": "custom_tool_call", **known, "input": arguments}
        named = re.search(r"session ID (\d+)", self.outputs[-1]) if self.outputs else None
        filled = {
            name: int(named[1]) if value == "{session}" and named else value
            for name, value in arguments.items()
        }
        return {"type": "function_call", **known, "arguments": json.dumps(filled)}


@contextmanager
def scripted(*calls: Call) -> Iterator[Model]:
    """A model that is asked over a real socket."""
    model = Model(calls)
    serving = threading.Thread(target=model.server.serve_forever, args=(0.02,))
    serving.start()
    try:
        yield model
    finally:
        model.server.shutdown()
        serving.join(60)
        model.server.server_close()
