"""A real HTTP server on loopback that fails on command, for test servers of services to build on."""

from __future__ import annotations

import gzip
import json
import re
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

HANG_SECONDS = 60.0

# What code says to be counted by: the same token run twice is the same code run twice.
_TOKEN = re.compile(r"run-token[-:= ]+(\w+)")

# In front of a status: the code runs first.
RAN = "ran "

STATUSES = {"401": 401, "403": 403, "404": 404, "429": 429, "500": 500, "503": 503}


class Answer(Exception):
    """Ends a request with a status and a body: JSON, or bytes. 0 stands for answered already."""

    def __init__(self, status: int, body: Any = None, **headers: str) -> None:
        super().__init__(status)
        self.status = status
        self.body = body
        self.headers = headers


class Sent(Answer):
    """The answer is already on its way."""

    def __init__(self) -> None:
        super().__init__(0)


class Request:
    """One request: its parts, and ways to answer it."""

    def __init__(self, handler: BaseHTTPRequestHandler) -> None:
        split = urlsplit(handler.path)
        self.handler = handler
        self.method = handler.command
        self.target = handler.path
        self.path = split.path
        self.query = {name: values[-1] for name, values in parse_qs(split.query).items()}
        self.headers = handler.headers
        self.body = _read_body(handler)

    @property
    def json(self) -> Any:
        return json.loads(self.body or b"{}")

    def start_stream(self, content_type: str) -> None:
        self.handler.send_response(200)
        self.handler.send_header("Content-Type", content_type)
        self.handler.send_header("Transfer-Encoding", "chunked")
        self.handler.end_headers()

    def send_chunk(self, data: bytes) -> None:
        self.handler.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.handler.wfile.flush()

    def end_stream(self) -> None:
        self.handler.wfile.write(b"0\r\n\r\n")

    def is_gone(self) -> bool:
        """Whether who asked has closed the connection."""
        try:
            flags = socket.MSG_PEEK | socket.MSG_DONTWAIT
            # Not a TLS socket's own, which does not peek.
            return socket.socket.recv(self.handler.connection, 1, flags) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    def cut(self) -> None:
        """Break the connection off, as a network does."""
        self.handler.close_connection = True
        self.handler.connection.setsockopt(
            socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0"
        )
        self.handler.connection.close()


class WireServer:
    """Serves until closed. A subclass names operations and answers them.

    `fail("execute", "500")` makes the next execution answer 500; `fault` decides for requests
    that nothing was ordered for. Faults: a status of `STATUSES`, `hang`, `cut`, `truncated`,
    `bad_json`, `ran` and a status once the code has run, and what a subclass adds.
    """

    def __init__(self, port: int = 0) -> None:
        self.executed: Counter[str] = Counter()
        self.requests: list[str] = []
        self.fault: Callable[[str], str | None] = lambda operation: None
        self._ordered: dict[str, list[str]] = {}
        self._lock = threading.Lock()
        self._closing = threading.Event()
        wire = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True
            wbufsize = -1

            def handle_one_request(self) -> None:
                try:
                    super().handle_one_request()
                except (OSError, ValueError):
                    self.close_connection = True

            def do(self) -> None:
                wire._serve(Request(self))

            do_GET = do_POST = do_DELETE = do_PUT = do

            def log_message(self, *args: Any) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 128

            def handle_error(self, request: Any, client_address: Any) -> None:
                pass

        self._server = Server(("127.0.0.1", port), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def serve_tls(self, context: ssl.SSLContext) -> None:
        """From now on over TLS, as localhost."""
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self.url = self.url.replace("http://127.0.0.1", "https://localhost")

    def fail(self, operation: str, *faults: str) -> None:
        """Order faults for the next requests of an operation, one each."""
        with self._lock:
            self._ordered.setdefault(operation, []).extend(faults)

    def close(self) -> None:
        self._closing.set()
        self._server.shutdown()
        self._server.server_close()

    def count(self, code: str) -> None:
        """Note that code is about to be run."""
        found = _TOKEN.search(code)
        with self._lock:
            self.executed[found[1] if found else code] += 1

    def refuse_what_ran(self, fault: str | None) -> None:
        """Answer with the status of a fault such as `ran 429`, as if nothing had run."""
        if fault and fault.startswith(RAN):
            status = STATUSES[fault.removeprefix(RAN)]
            raise Answer(status, self.error_body(status))

    def pause(self, seconds: float) -> None:
        self._closing.wait(seconds)

    def operation(self, request: Request) -> str:
        """The name of what is asked for. Raises Answer for what the service does not know."""
        raise NotImplementedError

    def answer(self, operation: str, request: Request, fault: str | None) -> None:
        """Answer a request that nothing has failed so far. Raises Answer to end it."""
        raise NotImplementedError

    def error_body(self, status: int) -> Any:
        return {"code": status, "message": f"ordered to fail with {status}"}

    def _next_fault(self, operation: str) -> str | None:
        with self._lock:
            ordered = self._ordered.get(operation)
            if ordered:
                return ordered.pop(0)
        return self.fault(operation)

    def _serve(self, request: Request) -> None:
        try:
            operation = self.operation(request)
            with self._lock:
                self.requests.append(operation)
            fault = self._next_fault(operation)
            if fault == "hang":
                self.pause(HANG_SECONDS)
                request.cut()
                return
            if fault == "cut":
                request.cut()
                return
            if fault in STATUSES:
                status = STATUSES[fault]
                headers = {"Retry_After": "7"} if status == 429 else {}
                raise Answer(status, self.error_body(status), **headers)
            if fault == "compressed":
                raise Answer(200, gzip.compress(b"{}\n" * 1000), Content_Encoding="gzip")
            if fault == "bad_json":
                raise Answer(201 if operation == "create" else 200, b"<html>this is no JSON\n")
            self.answer(operation, request, fault)
        except Answer as answer:
            if not answer.status:
                return
            _send(request, answer, truncated=False)


def send_json(request: Request, status: int, body: Any, *, truncated: bool = False) -> None:
    _send(request, Answer(status, body), truncated=truncated)


def _send(request: Request, answer: Answer, *, truncated: bool) -> None:
    handler = request.handler
    body = answer.body if isinstance(answer.body, bytes) else json.dumps(answer.body).encode()
    if answer.status == 204 or answer.body is None:
        body = b""
    handler.send_response(answer.status)
    for name, value in answer.headers.items():
        handler.send_header(name.replace("_", "-"), value)
    if "Content_Type" not in answer.headers:
        handler.send_header("Content-Type", "application/json")
    if answer.status != 204:
        handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body[: len(body) // 2] if truncated else body)
    handler.wfile.flush()
    if truncated:
        request.cut()


def _read_body(handler: BaseHTTPRequestHandler) -> bytes:
    if "chunked" in handler.headers.get("Transfer-Encoding", ""):
        body = b""
        while size := int(handler.rfile.readline().strip() or b"0", 16):
            body += handler.rfile.read(size)
            handler.rfile.readline()
        handler.rfile.readline()
        return body
    return handler.rfile.read(int(handler.headers.get("Content-Length") or 0))


@contextmanager
def refusing() -> Iterator[str]:
    """The address of a port that nobody listens on."""
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{reserved.getsockname()[1]}"


def eventually(condition: Callable[[], bool], seconds: float = 60.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True
