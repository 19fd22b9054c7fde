"""RAGFlow's executor_manager as a server on loopback: the answers that were measured of it."""

from __future__ import annotations

import base64
from typing import Any

from tests.support.wire_server import Answer, Request, WireServer

SUCCESS: dict[str, Any] = {
    "status": "success",
    "stdout": "log\n",
    "stderr": "",
    "exit_code": 0,
    "detail": None,
    "time_used_ms": 221.6,
    "memory_used_kb": None,
    "resource_limit_type": None,
    "unauthorized_access_type": None,
    "runtime_error_type": None,
    "artifacts": [],
    "result": {"present": True, "value": {"sum": 2}, "type": "json"},
}
UNRUN = SUCCESS | {"status": "program_runner_error", "stdout": "", "result": None}
ANSWERS: dict[str, dict[str, Any]] = {
    "success": SUCCESS,
    "artifact": SUCCESS
    | {
        "artifacts": [
            {
                "name": "x.csv",
                "mime_type": "text/csv",
                "size": 2,
                "content_b64": base64.b64encode(b"\xff\x00").decode(),
            }
        ]
    },
    "exception": SUCCESS
    | {
        "status": "program_error",
        "stdout": "",
        "stderr": "Traceback (most recent call last):\nValueError: x\n",
        "exit_code": 1,
        "time_used_ms": None,
        "runtime_error_type": "nonzero_exit",
        "result": None,
    },
    "timeout": SUCCESS
    | {
        "status": "resource_limit_exceeded",
        "stderr": "Execution timeout",
        "exit_code": -124,
        "resource_limit_type": "time",
        "result": None,
    },
    "memory": SUCCESS
    | {
        "status": "resource_limit_exceeded",
        "stderr": "Memory limit exceeded (killed by OOM)",
        "exit_code": -137,
        "resource_limit_type": "memory",
        "result": None,
    },
    "unsafe": UNRUN
    | {"stderr": "Line 1: Import: os", "exit_code": -999, "detail": "Code is unsafe"},
    "busy": UNRUN
    | {
        "stderr": "Container pool is busy",
        "exit_code": -10,
        "detail": "no_available_container",
    },
    "internal": UNRUN
    | {"stderr": "Command timed out", "exit_code": -3, "detail": "internal_error"},
    "no artifact": SUCCESS | {"artifacts": [{"name": "x", "content_b64": "!"}]},
    "artifacts that are none": SUCCESS | {"artifacts": 5},
    "no shape": {"status": 1, "exit_code": "0", "result": [], "stdout": None},
}


class ExecutorServer(WireServer):
    """`asked` is the bodies of the runs. A fault may be the name of one of `ANSWERS`."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[dict[str, Any]] = []

    @property
    def host(self) -> str:
        return self.url.removeprefix("http://")

    def operation(self, request: Request) -> str:
        if (request.method, request.path) == ("POST", "/run"):
            return "run"
        if (request.method, request.path) == ("GET", "/healthz"):
            return "health"
        raise Answer(404, {"detail": "Not Found"})

    def answer(self, operation: str, request: Request, fault: str | None) -> None:
        if operation == "health":
            raise Answer(200, {"status": "ok"})
        self.asked.append(request.json)
        if fault == "422":
            raise Answer(422, {"detail": [{"type": "enum", "loc": ["body", "language"]}]})
        raise Answer(200, ANSWERS[fault or "success"])
