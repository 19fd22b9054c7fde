"""Shed itself, as small as can be, so that the template runs as it stands. It isolates nothing.

SHED_URL=http://127.0.0.1:3997 python -m shed_provider.server 3997 the-token
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


class ShedServer(ThreadingHTTPServer):
    """`fault`, if it is set, is how the next run is answered: stall, trickle or cut."""

    daemon_threads = True

    def __init__(self, token: str, port: int = 0) -> None:
        self.token = token
        self.machines: dict[str, Machine] = {}
        self.fault = ""
        super().__init__(("127.0.0.1", port), Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class Machine:
    def __init__(self, name: str) -> None:
        self.name = name
        self.folder = Path(tempfile.mkdtemp(prefix="shed-"))
        self.processes: list[subprocess.Popen[str]] = []

    def run(self, code: str) -> dict[str, Any]:
        (self.folder / "program.py").write_text(code, encoding="utf-8", errors="surrogatepass")
        process = subprocess.Popen(
            [sys.executable, "program.py"],
            cwd=self.folder,
            env={"PATH": os.environ["PATH"], "PYTHONIOENCODING": "utf-8"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
        )
        self.processes.append(process)
        out, err = process.communicate()
        code_of = process.returncode
        return {
            "stdout": out,
            "stderr": err,
            "exit_code": code_of if code_of >= 0 else 128 - code_of,
        }

    def end(self) -> None:
        for process in self.processes:
            process.kill()
        shutil.rmtree(self.folder, ignore_errors=True)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: ShedServer

    def do(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Authorization") != f"Bearer {self.server.token}":
            self.answer(401, {"message": "a token is asked for"})
            return
        machines, parts = self.server.machines, self.path.strip("/").split("/", 3)
        if len(parts) == 1 and self.command == "POST":
            ref = uuid.uuid4().hex
            machines[ref] = Machine(json.loads(body)["name"])
            self.answer(201, {"id": ref})
        elif len(parts) == 1:
            self.answer(200, [{"id": ref, "name": one.name} for ref, one in machines.items()])
        elif parts[1] not in machines:
            self.answer(404, {"message": "no such machine"})
        elif self.command == "DELETE":
            machines.pop(parts[1]).end()
            self.answer(204)
        elif parts[2] == "run":
            self.answer_run(machines[parts[1]], json.loads(body)["code"])
        else:
            path = machines[parts[1]].folder / parts[3]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(body)
            self.answer(204)

    do_GET = do_POST = do_PUT = do_DELETE = do

    def answer_run(self, machine: Machine, code: str) -> None:
        fault, self.server.fault = self.server.fault, ""
        result = machine.run(code)
        if fault == "cut":
            self.close_connection = True
            return
        if fault:
            # Either nothing more comes, or a byte now and then.
            self.send_response(200)
            self.send_header("Content-Length", "1000000")
            self.end_headers()
            while machine.folder.exists():
                if fault == "trickle":
                    self.wfile.write(b" ")
                time.sleep(0.05)
            self.close_connection = True
            return
        self.answer(200, result)

    def answer(self, status: int, body: Any = None) -> None:
        text = b"" if body is None else json.dumps(body).encode()
        self.send_response(status)
        if status != 204:
            self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *args: Any) -> None:
        pass


def main() -> None:
    """Serve until interrupted."""
    with ShedServer(sys.argv[2], int(sys.argv[1])) as server:
        server.serve_forever()


if __name__ == "__main__":
    main()
