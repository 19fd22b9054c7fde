"""A model that says what a test has written for it, at the address of OpenAI's Responses API."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Model:
    """Asks for each command in turn, and then says that it is done. `outputs` is what it was told
    of them, and `tools` what it was offered."""

    def __init__(self, commands: Sequence[str]) -> None:
        self.outputs: list[str] = []
        self.tools: list[str] = []
        self._commands = list(commands)
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
        self.tools = [each.get("name", each["type"]) for each in asked.get("tools", [])]
        told = [each for each in asked["input"] if each.get("type") == "function_call_output"]
        self.outputs = [str(each["output"]) for each in told]
        number = len(told)
        item: dict[str, Any]
        if number < len(self._commands):
            item = {
                "type": "function_call",
                "id": f"fc_{number}",
                "call_id": f"call_{number}",
                "name": "exec_command",
                "arguments": json.dumps({"cmd": self._commands[number]}),
            }
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


@contextmanager
def scripted(*commands: str) -> Iterator[Model]:
    """A model that is asked over a real socket."""
    model = Model(commands)
    serving = threading.Thread(target=model.server.serve_forever, args=(0.02,))
    serving.start()
    try:
        yield model
    finally:
        model.server.shutdown()
        serving.join(60)
        model.server.server_close()
