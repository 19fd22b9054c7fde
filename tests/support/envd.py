"""E2B's interface to a machine's commands and files, for tests/support/e2b_server.py to serve."""

from __future__ import annotations

import base64
import contextlib
import email
import fcntl
import itertools
import json
import os
import queue
import shutil
import signal
import struct
import subprocess
import termios
import threading
import time
from email import policy
from pathlib import Path
from typing import Any

from tests.support.notebook import HOME, Notebook, signal_inside
from tests.support.wire_server import RAN, Answer, Request, Sent, WireServer

STREAM_END = 2
_SIGNALS = {"SIGNAL_SIGTERM": signal.SIGTERM, "SIGNAL_SIGKILL": signal.SIGKILL}
# What Go, in which envd is written, calls an end by a signal.
_ENDS = {signal.SIGTERM: "terminated", signal.SIGKILL: "killed", signal.SIGINT: "interrupt"}


class Command:
    """A process, its events for whoever listens, and its terminal where it has one."""

    def __init__(self, notebook: Notebook, asked: dict[str, Any], seconds: float | None) -> None:
        self.config = asked["process"]
        self._listeners: list[queue.Queue[dict[str, Any]]] = []
        self._lock = threading.Lock()
        self.end: dict[str, Any] | None = None
        self.terminal: int | None = None
        self.first: queue.Queue[dict[str, Any]] | None = None
        options: dict[str, Any] = {}
        if asked.get("stdin"):
            options["stdin"] = subprocess.PIPE
        if "pty" in asked:
            self.terminal, inner = os.openpty()
            self.resize(asked["pty"]["size"])
            options = {"stdin": inner, "stdout": inner, "stderr": inner}
        command = [self.config["cmd"], *self.config.get("args", [])]
        self.process = notebook.popen(
            command, self.config.get("cwd") or HOME, self.config.get("envs"), **options
        )
        if self.terminal is not None:
            os.close(inner)
            sources = [("pty", self.terminal)]
        else:
            assert self.process.stdout
            assert self.process.stderr
            sources = [
                ("stdout", self.process.stdout.fileno()),
                ("stderr", self.process.stderr.fileno()),
            ]
        readers = [threading.Thread(target=self._read, args=one, daemon=True) for one in sources]
        self._timer = (
            threading.Timer(seconds, signal_inside, (self.process, signal.SIGKILL))
            if seconds
            else None
        )
        self._waiter = threading.Thread(target=self._wait, args=(readers,), daemon=True)

    def begin(self) -> None:
        """Read, once the first one listens."""
        self._waiter.start()

    def listen(self) -> queue.Queue[dict[str, Any]]:
        events: queue.Queue[dict[str, Any]] = queue.Queue()
        with self._lock:
            self._listeners.append(events)
            if self.end is not None:
                events.put({"end": self.end})
        return events

    def resize(self, size: dict[str, int]) -> None:
        assert self.terminal is not None
        fcntl.ioctl(
            self.terminal, termios.TIOCSWINSZ, struct.pack("HHHH", size["rows"], size["cols"], 0, 0)
        )

    def write(self, data: bytes) -> None:
        if self.terminal is not None:
            os.write(self.terminal, data)
            return
        if self.process.stdin is None:
            raise Answer(400, {"code": "failed_precondition", "message": "stdin is not open"})
        self.process.stdin.write(data)
        self.process.stdin.flush()

    def _tell(self, event: dict[str, Any]) -> None:
        with self._lock:
            for listener in self._listeners:
                listener.put(event)

    def _read(self, stream: str, fd: int) -> None:
        while True:
            try:
                data = os.read(fd, 32_768)
            except OSError:
                # A terminal whose last user has gone.
                return
            if not data:
                return
            self._tell({"data": {stream: base64.b64encode(data).decode()}})

    def _wait(self, readers: list[threading.Thread]) -> None:
        if self._timer is not None:
            self._timer.start()
        for reader in readers:
            reader.start()
        code = self.process.wait()
        for reader in readers:
            reader.join()
        if self._timer is not None:
            self._timer.cancel()
        if code - 128 in _ENDS:
            # Bubblewrap tells of a signal as a shell does.
            status = f"signal: {_ENDS[signal.Signals(code - 128)]}"
            end = {"exitCode": -1, "exited": False, "status": status, "error": status}
        else:
            end = {"exitCode": code, "exited": True, "status": f"exit status {code}"}
            if code:
                end["error"] = end["status"]
        with self._lock:
            self.end = self.changed_end(end)
            for listener in self._listeners:
                listener.put({"end": self.end})

    @staticmethod
    def changed_end(end: dict[str, Any]) -> dict[str, Any]:
        """For tests of a machine that lies about it."""
        return end


class Commands:
    def __init__(self, notebook: Notebook) -> None:
        self._notebook = notebook
        self._known: dict[int, Command] = {}

    def answer(
        self, operation: str, request: Request, fault: str | None, server: WireServer
    ) -> None:
        if operation == "Start":
            self._start(request, fault, server)
        if operation == "Connect":
            asked = json.loads(request.body[5:])
            command = self._find(asked)
            self._stream(request, command, asked["process"]["pid"])
        asked = request.json
        if operation == "List":
            running = [
                {"pid": pid, "config": command.config}
                for pid, command in self._known.items()
                if command.end is None
            ]
            raise Answer(200, {"processes": running})
        command = self._find(asked)
        if operation == "SendSignal":
            signal_inside(command.process, _SIGNALS[asked["signal"]])
        elif operation == "SendInput":
            command.write(base64.b64decode(next(iter(asked["input"].values()))))
        elif operation == "CloseStdin":
            assert command.process.stdin is not None
            command.process.stdin.close()
        elif operation == "Update":
            command.resize(asked["pty"]["size"])
        else:
            raise Answer(501, {"code": "unimplemented", "message": operation})
        raise Answer(200, {})

    def _find(self, asked: dict[str, Any]) -> Command:
        command = self._known.get(asked["process"]["pid"])
        if command is None or command.end is not None:
            raise Answer(404, {"code": "not_found", "message": "process not found"})
        return command

    def _start(self, request: Request, fault: str | None, server: WireServer) -> None:
        asked = json.loads(request.body[5:])
        words = asked["process"]["args"]
        script = self._notebook.path("main.go" if "go build" in words[-1] else "main.sh")
        runs_script = script.name in words[-1] and script.is_file()
        server.count(script.read_text() if runs_script else words[-1])
        timeout = request.headers.get("connect-timeout-ms")
        if fault and fault.startswith(RAN):
            self._notebook.communicate([asked["process"]["cmd"], *words])
            server.refuse_what_ran(fault)
        command = Command(self._notebook, asked, int(timeout) / 1000 if timeout else None)
        self._known[command.process.pid] = command
        command.first = command.listen()
        command.begin()
        self._stream(request, command, command.process.pid)

    def _stream(self, request: Request, command: Command, pid: int) -> None:
        request.start_stream("application/connect+json")

        def send(message: dict[str, Any], flags: int = 0) -> None:
            body = json.dumps(message).encode()
            request.send_chunk(bytes([flags]) + len(body).to_bytes(4, "big") + body)

        events, command.first = command.first or command.listen(), None
        send({"event": {"start": {"pid": pid}}})
        while True:
            event = events.get()
            if self._notebook.dead:
                request.cut()
                raise Sent
            send({"event": event})
            if "end" in event:
                break
        send({}, STREAM_END)
        request.end_stream()
        raise Sent


class Files:
    def __init__(self, notebook: Notebook) -> None:
        self._notebook = notebook
        self._watchers: dict[str, tuple[Path, dict[str, float]]] = {}
        self._numbers = itertools.count(1)

    def answer(self, operation: str, request: Request) -> None:
        if operation == "write":
            self._write(request)
        if operation == "read":
            path = self._notebook.path(request.query["path"])
            if not path.is_file():
                raise Answer(404, {"code": 404, "message": f"file {path.name} not found"})
            raise Answer(200, path.read_bytes(), Content_Type="application/octet-stream")
        asked = request.json
        if operation == "Move":
            source, target = map(self._notebook.path, (asked["source"], asked["destination"]))
            self._must_be(source)
            target.parent.mkdir(parents=True, exist_ok=True)
            source.rename(target)
            raise Answer(200, {"entry": self.entry(target)})
        if operation in ("GetWatcherEvents", "RemoveWatcher"):
            self._watch(operation, asked["watcherId"])
        path = self._notebook.path(asked["path"])
        if operation == "MakeDir":
            if path.is_dir():
                raise Answer(409, {"code": "already_exists", "message": "it is there"})
            path.mkdir(parents=True)
            raise Answer(200, {"entry": self.entry(path)})
        self._must_be(path)
        if operation == "Stat":
            raise Answer(200, {"entry": self.entry(path)})
        if operation == "ListDir":
            depth = asked.get("depth", 1)
            found = [
                self.entry(one)
                for one in path.rglob("*")
                if len(one.relative_to(path).parts) <= depth
            ]
            raise Answer(200, {"entries": found})
        if operation == "Remove":
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
            raise Answer(200, {})
        if operation == "CreateWatcher":
            name = str(next(self._numbers))
            self._watchers[name] = (path, _times(path))
            raise Answer(200, {"watcherId": name})

    def entry(self, path: Path) -> dict[str, Any]:
        told = path.lstat()
        kind = "DIRECTORY" if path.is_dir() and not path.is_symlink() else "FILE"
        link = {"symlinkTarget": os.readlink(path), "isSymlink": True} if path.is_symlink() else {}
        return {
            "name": path.name,
            "type": f"FILE_TYPE_{kind}",
            "path": f"{HOME}/{path.relative_to(self._notebook.home)}",
            "size": str(told.st_size),
            "mode": told.st_mode & 0o7777,
            "permissions": "-rw-r--r--",
            "owner": "user",
            "group": "user",
            "modifiedTime": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(told.st_mtime)),
            **link,
        }

    def _must_be(self, path: Path) -> None:
        if not (path.exists() or path.is_symlink()):
            raise Answer(404, {"code": "not_found", "message": path.name})

    def _write(self, request: Request) -> None:
        written = {}
        if request.headers["Content-Type"] == "application/octet-stream":
            written[request.query["path"]] = request.body
        else:
            header = f"Content-Type: {request.headers['Content-Type']}\r\n\r\n".encode()
            message = email.message_from_bytes(header + request.body, policy=policy.HTTP)
            for part in message.iter_parts():
                name = request.query.get("path") or part.get_filename() or ""
                written[name] = part.get_payload(decode=True) or b""
        for name, content in written.items():
            path = self._notebook.path(name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        raise Answer(
            200,
            [{"path": name, "name": name.split("/")[-1], "type": "file"} for name in written],
        )

    def _watch(self, operation: str, name: str) -> None:
        if operation == "RemoveWatcher":
            del self._watchers[name]
            raise Answer(200, {})
        path, before = self._watchers[name]
        after = _times(path)
        self._watchers[name] = (path, after)
        kinds = {
            "EVENT_TYPE_CREATE": after.keys() - before.keys(),
            "EVENT_TYPE_REMOVE": before.keys() - after.keys(),
            "EVENT_TYPE_WRITE": {
                one for one in after.keys() & before.keys() if after[one] != before[one]
            },
        }
        events = [{"name": one, "type": kind} for kind, names in kinds.items() for one in names]
        raise Answer(200, {"events": events})


def _times(folder: Path) -> dict[str, float]:
    found = {}
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            found[str(path.relative_to(folder))] = path.lstat().st_mtime
    return found
