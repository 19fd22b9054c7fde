"""E2B's protocol on loopback, for the unmodified SDK: code runs for real in local sandboxes.

`python -m tests.support.e2b_server PORT` serves it for a try: the key is `e2b_try`, and E2B_API_URL and
E2B_SANDBOX_URL both are http://127.0.0.1:PORT.
"""

from __future__ import annotations

import json
import sys
import threading
import time
import uuid
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl, unquote

from tests.support.envd import Commands, Files
from tests.support.notebook import HOME, Cell, Context, Notebook
from tests.support.wire_server import Answer, Request, Sent, WireServer, send_json

KERNELS = ("python", "javascript", "typescript")


@dataclass
class Sandbox:
    notebook: Notebook
    token: str
    template: str
    metadata: dict[str, str]
    lifetime: float
    started: float

    def __post_init__(self) -> None:
        self.files = Files(self.notebook)
        self.commands = Commands(self.notebook)


class E2BServer(WireServer):
    """Faults beyond the common ones: `truncated`, `slow` (a stream that dribbles), `dead` (the
    sandbox is found to be gone), `lost` (the code runs, and then the connection is cut).
    """

    def __init__(self, *, api_key: str = "e2b_secret_key", port: int = 0) -> None:
        self.api_key = api_key
        self.sandboxes: dict[str, Sandbox] = {}
        self.created = 0
        self.internet: list[bool | None] = []
        super().__init__(port)

    def close(self) -> None:
        super().close()
        for sandbox in list(self.sandboxes.values()):
            sandbox.notebook.kill()

    def operation(self, request: Request) -> str:
        method, path = request.method, request.path
        parts = path.strip("/").split("/")
        if "E2b-Sandbox-Id" in request.headers:
            if path.startswith(("/filesystem.", "/process.")):
                return parts[-1]
            return {
                ("POST", "execute"): "execute",
                ("GET", "files"): "read",
                ("POST", "files"): "write",
                ("GET", "health"): "health",
            }.get((method, parts[0]), f"{method} contexts")
        if parts[0] in ("v2", "sandboxes"):
            parts = parts[parts[0] == "v2" :]
            rest = parts[2:]
            names = {
                ("POST", 1): "create",
                ("GET", 1): "list",
                ("DELETE", 2): "kill",
                ("GET", 2): "info",
            }
            name = rest[0] if rest else names.get((method, len(parts)))
            if name:
                return str(name)
        raise Answer(404, {"code": 404, "message": f"no such route {method} {path}"})

    def answer(self, operation: str, request: Request, fault: str | None) -> None:
        if "E2b-Sandbox-Id" in request.headers:
            self._answer_in_sandbox(operation, request, fault)
            return
        if request.headers.get("X-API-KEY") != self.api_key:
            raise Answer(401, {"code": 401, "message": "Invalid API key"})
        if operation == "create":
            self._create(request, fault)
        if operation == "list":
            self._list(request)
        sandbox_id = request.path.split("/sandboxes/")[1].split("/")[0]
        sandbox = self.sandboxes.get(sandbox_id)
        if sandbox is None:
            raise Answer(404, {"code": 404, "message": f"sandbox {sandbox_id} not found"})
        if operation == "kill":
            del self.sandboxes[sandbox_id]
            sandbox.notebook.kill()
            raise Answer(204)
        if operation == "timeout":
            sandbox.lifetime = time.time() - sandbox.started + request.json["timeout"]
            raise Answer(204)
        if operation == "connect":
            raise Answer(200, self._described(sandbox_id, sandbox))
        raise Answer(404, {"code": 404, "message": f"{operation} is not served here"})

    def _create(self, request: Request, fault: str | None) -> None:
        asked = request.json
        if asked["templateID"].startswith("missing"):
            raise Answer(404, {"code": 404, "message": "template not found"})
        sandbox = Sandbox(
            Notebook(asked.get("envVars")),
            uuid.uuid4().hex,
            asked["templateID"],
            asked.get("metadata", {}),
            asked.get("timeout", 300),
            time.time(),
        )
        sandbox_id = f"i{uuid.uuid4().hex[:18]}"
        self.sandboxes[sandbox_id] = sandbox
        self.created += 1
        self.internet.append(asked.get("allow_internet_access"))
        send_json(
            request, 201, self._described(sandbox_id, sandbox), truncated=fault == "truncated"
        )
        raise Sent

    def _list(self, request: Request) -> None:
        wanted = dict(parse_qsl(unquote(request.query.get("metadata", ""))))
        listed = [
            {
                "templateID": sandbox.template,
                "sandboxID": sandbox_id,
                "clientID": "0",
                "startedAt": _time(sandbox.started),
                "endAt": _time(sandbox.started + sandbox.lifetime),
                "cpuCount": 1,
                "memoryMB": 256,
                "diskSizeMB": 100,
                "state": "running",
                "envdVersion": "0.6.4",
                "metadata": sandbox.metadata,
            }
            for sandbox_id, sandbox in list(self.sandboxes.items())
            if wanted.items() <= sandbox.metadata.items()
        ]
        raise Answer(200, listed)

    def _described(self, sandbox_id: str, sandbox: Sandbox) -> dict[str, Any]:
        return {
            "templateID": sandbox.template,
            "sandboxID": sandbox_id,
            "clientID": "0",
            "envdVersion": "0.6.4",
            "envdAccessToken": sandbox.token,
            "trafficAccessToken": None,
            "domain": None,
        }

    def _answer_in_sandbox(self, operation: str, request: Request, fault: str | None) -> None:
        sandbox_id = request.headers["E2b-Sandbox-Id"]
        sandbox = self.sandboxes.get(sandbox_id)
        if fault == "dead" and sandbox is not None:
            del self.sandboxes[sandbox_id]
            sandbox.notebook.kill()
            sandbox = None
        if sandbox is None:
            raise Answer(502, {"code": 502, "message": "The sandbox was not found"})
        if not operation.endswith("contexts") and (
            request.headers.get("X-Access-Token") != sandbox.token
        ):
            raise Answer(401, {"code": 401, "message": "Invalid access token"})
        notebook = sandbox.notebook
        if operation == "execute":
            self._execute(notebook, request, fault)
        elif operation.endswith("contexts"):
            _contexts(notebook, request)
        elif operation == "health":
            raise Answer(204)
        elif request.path.startswith("/process."):
            sandbox.commands.answer(operation, request, fault, self)
        else:
            sandbox.files.answer(operation, request)
        raise Answer(501, {"code": "unimplemented", "message": operation})

    def _execute(self, notebook: Notebook, request: Request, fault: str | None) -> None:
        asked = request.json
        context = None
        if asked["context_id"]:
            context = notebook.contexts.get(asked["context_id"])
            if context is None:
                raise Answer(404, f"Context {asked['context_id']} not found".encode())
        language = context.language if context else asked["language"] or "python"
        if language not in KERNELS:
            raise Answer(500, f"no kernel for {language}".encode())
        self.count(asked["code"])
        live = fault is None
        now = time.time_ns()

        def send(kind: str, text: str) -> None:
            for start in range(0, len(text), 8000) if live else ():
                piece = text[start : start + 8000]
                event = {"type": kind, "text": piece, "timestamp": now}
                request.send_chunk(json.dumps(event).encode() + b"\n")

        if live:
            request.start_stream("application/x-ndjson")
        try:
            cell = notebook.run(
                asked["code"],
                language,
                context,
                emit=send,
                environment=asked.get("env_vars"),
                is_gone=request.is_gone,
            )
        except (OSError, RuntimeError):
            request.cut()
            raise Sent from None
        if notebook.dead or fault == "lost":
            request.cut()
            raise Sent
        self.refuse_what_ran(fault)
        if not live:
            request.start_stream("application/x-ndjson")
        lines = [json.dumps(event).encode() + b"\n" for event in _events(cell, live)]
        for line in lines:
            if fault == "truncated" and line is lines[-2]:
                request.send_chunk(line[: len(line) // 2])
                request.cut()
                raise Sent
            if fault == "slow":
                self.pause(0.5)
            request.send_chunk(line)
        request.end_stream()
        raise Sent


def _events(cell: Cell, live: bool) -> list[dict[str, Any]]:
    """What a cell tells; `live` when its output has been told as it came."""
    now = time.time_ns()
    events: list[dict[str, Any]] = [{"type": "number_of_executions", "execution_count": 1}]
    for kind, text in () if live else (("stdout", cell.stdout), ("stderr", cell.stderr)):
        for start in range(0, len(text), 8000):
            piece = text[start : start + 8000]
            events.append({"type": kind, "text": piece, "timestamp": now})
    if cell.text is not None:
        events.append({"type": "result", "text": cell.text, "is_main_result": True})
    if cell.error is not None:
        events.append({"type": "error", **cell.error})
    return [*events, {"type": "keepalive"}, {"type": "end_of_execution"}]


def _contexts(notebook: Notebook, request: Request) -> None:
    parts = request.path.strip("/").split("/")
    if request.method == "GET":
        raise Answer(200, [_told(name, one) for name, one in notebook.contexts.items()])
    if request.method == "POST" and len(parts) == 1:
        asked = request.json
        name = uuid.uuid4().hex
        context = Context(notebook, asked.get("language") or "python", asked.get("cwd") or HOME)
        notebook.contexts[name] = context
        raise Answer(200, _told(name, context))
    known = notebook.contexts.get(parts[1])
    if known is None:
        raise Answer(404, f"Context {parts[1]} not found".encode())
    known.restart()
    if request.method == "DELETE":
        del notebook.contexts[parts[1]]
    raise Answer(204)


def _told(name: str, context: Context) -> dict[str, str]:
    return {"id": name, "language": context.language, "cwd": context.cwd}


def _time(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def main() -> None:
    """Serve until interrupted."""
    server = E2BServer(api_key="e2b_try", port=int(sys.argv[1]))
    print(f"E2B_API_URL={server.url} E2B_SANDBOX_URL={server.url}", flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main()
