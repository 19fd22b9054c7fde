"""Aliyun's interface to a machine's files and shell, for tests/support/agentrun_server.py to serve.

Answers have the shapes that the service documents, a folder's entries under a path of its own among
them: https://help.aliyun.com/zh/functioncompute/fc/sandbox-sandbox-code-interepreter
"""

from __future__ import annotations

import email
import os
import shutil
import signal
import stat
import subprocess
from collections.abc import Callable
from datetime import UTC, datetime
from email import policy
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.support.notebook import Notebook
from tests.support.wire_server import Answer, Request

if TYPE_CHECKING:
    from tests.support.agentrun_server import AgentRunServer

# Below which folder of the real machine the code's root is.
REAL_ROOT = "/tmp/code-interpreter-sandbox"
MOST_SECONDS = 30
_LETTERS = {stat.S_IFDIR: "d", stat.S_IFLNK: "L", stat.S_IFREG: "-", stat.S_IFIFO: "p"}


def _upload(notebook: Notebook, request: Request, server: AgentRunServer) -> None:
    header = f"Content-Type: {request.headers['Content-Type']}\r\n\r\n".encode()
    message = email.message_from_bytes(header + request.body, policy=policy.HTTP)
    parts = {
        part.get_param("name", header="content-disposition"): part.get_payload(decode=True)
        for part in message.iter_parts()
    }
    path = notebook.path(parts["path"].decode())
    if path.name.startswith("."):
        raise _error(400, "HiddenFile")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(parts["file"])
    raise Answer(200, {"path": parts["path"].decode(), "size": len(parts["file"])})


def _download(notebook: Notebook, request: Request, server: AgentRunServer) -> None:
    path = notebook.path(request.query["path"])
    if not path.is_file():
        raise _error(404, "FileNotFound")
    raise Answer(200, path.read_bytes(), Content_Type="application/octet-stream")


def _list(notebook: Notebook, request: Request, server: AgentRunServer) -> None:
    asked = request.query["path"]
    folder = notebook.path(asked)
    if not folder.is_dir():
        raise _error(404, "FileNotFound")
    entries: list[dict[str, Any]] = []

    def take(path: Path, told: str, depth: int) -> None:
        for each in sorted(path.iterdir()):
            entries.append(_entry(each, f"{told}/{each.name}"))
            if depth > 1 and each.is_dir() and not each.is_symlink():
                take(each, f"{told}/{each.name}", depth - 1)

    take(folder, f"{REAL_ROOT}{asked}", int(request.query.get("depth", "1")))
    raise Answer(200, {"path": asked, "entries": entries})


def _stat(notebook: Notebook, request: Request, server: AgentRunServer) -> None:
    raise Answer(200, {"entry": _found(notebook, request.query["path"])})


def _mkdir(notebook: Notebook, request: Request, server: AgentRunServer) -> None:
    notebook.path(request.json["path"]).mkdir(parents=True, exist_ok=True)
    raise Answer(200, {"entry": _found(notebook, request.json["path"])})


def _move(notebook: Notebook, request: Request, server: AgentRunServer) -> None:
    source, target = request.json["source"], request.json["destination"]
    if not server.replaces and os.path.lexists(notebook.path(target)):
        raise _error(409, "FileExists")
    _found(notebook, source)
    try:
        notebook.path(source).rename(notebook.path(target))
    except FileNotFoundError:
        raise _error(404, "FileNotFound") from None
    raise Answer(200, {"entry": _found(notebook, target)})


def _remove(notebook: Notebook, request: Request, server: AgentRunServer) -> None:
    path = notebook.path(request.json["path"])
    if not os.path.lexists(path):
        raise Answer(200, {})
    entry = _found(notebook, request.json["path"])
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
    raise Answer(200, {"entry": entry})


def _command(notebook: Notebook, request: Request, server: AgentRunServer) -> None:
    asked = request.json
    process = notebook.popen(["/bin/sh", "-c", asked["command"]], asked["cwd"])
    try:
        out, err = process.communicate(timeout=min(asked.get("timeout") or 30, MOST_SECONDS))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise _error(504, "GatewayTimeout") from None
    result = {
        "exitCode": process.returncode,
        "stdout": out.decode("utf-8", "replace"),
        "stderr": err.decode("utf-8", "replace"),
        "cwd": asked["cwd"],
        "executionTimeMs": 1,
    }
    raise Answer(200, {"executionId": "tty_exec_001", "status": "completed", "result": result})


def _found(notebook: Notebook, path: str) -> dict[str, Any]:
    found = notebook.path(path)
    if not os.path.lexists(found):
        raise _error(404, "FileNotFound")
    return _entry(found, path)


def _entry(path: Path, told: str) -> dict[str, Any]:
    seen = path.lstat()
    letter = _LETTERS.get(stat.S_IFMT(seen.st_mode), "D")
    modified = datetime.fromtimestamp(seen.st_mtime, UTC)
    return {
        "name": path.name,
        "type": "directory" if letter == "d" else "file",
        "path": told,
        "size": seen.st_size,
        "mode": stat.S_IMODE(seen.st_mode),
        "permissions": letter + stat.filemode(seen.st_mode)[1:],
        "owner": "user",
        "group": "user",
        "modifiedTime": modified.isoformat().replace("+00:00", "Z"),
    }


def _error(status: int, code: str) -> Answer:
    return Answer(status, {"error": {"code": code, "message": f"{code}: it was refused"}})


OPERATIONS: dict[str, Callable[[Notebook, Request, AgentRunServer], None]] = {
    "upload": _upload,
    "download": _download,
    "filesystem": _list,
    "stat": _stat,
    "mkdir": _mkdir,
    "move": _move,
    "remove": _remove,
    "cmd": _command,
}
