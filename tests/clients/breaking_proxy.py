"""A way to a service on which answers are lost: what is sent arrives, what comes back may not."""

from __future__ import annotations

import http.client
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.support.processes import Service

# Of headers that are of one connection.
_OWN = {"connection", "transfer-encoding", "content-length"}


class Proxy:
    """`lose` answers are swallowed, of addresses that end with `lost_of`. `break_after` is the lines
    that a stream has before it breaks, once. `refusals` are told instead of asking the service.
    `requests` are the lines that came."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.lose = 0
        self.lost_of = ""
        self.break_after: int | None = None
        self.refusals: list[tuple[int, dict[str, str], bytes]] = []
        self.requests: list[str] = []
        self.url = ""


class _Handler(BaseHTTPRequestHandler):
    proxy: Proxy

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._forward()

    def do_POST(self) -> None:
        self._forward()

    def do_DELETE(self) -> None:
        self._forward()

    def _forward(self) -> None:
        proxy = self.proxy
        proxy.requests.append(f"{self.command} {self.path}")
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if proxy.refusals:
            self._tell(*proxy.refusals.pop(0))
            return
        upstream = http.client.HTTPConnection("127.0.0.1", proxy.service.port, timeout=60)
        headers = {name: value for name, value in self.headers.items() if name.lower() not in _OWN}
        upstream.request(self.command, self.path, body or None, headers)
        answer = upstream.getresponse()
        if "ndjson" in answer.headers.get("Content-Type", ""):
            self._stream(answer)
        elif proxy.lose and self.path.endswith(proxy.lost_of):
            proxy.lose -= 1
            answer.read()
            self._hang_up()
        else:
            self._tell(answer.status, dict(answer.headers.items()), answer.read())
        upstream.close()

    def _stream(self, answer: http.client.HTTPResponse) -> None:
        self._head(answer.status, dict(answer.headers.items()))
        left, self.proxy.break_after = self.proxy.break_after, None
        with suppress(ConnectionError):
            while line := answer.readline():
                if left == 0:
                    self._hang_up()
                    return
                left = None if left is None else left - 1
                self.wfile.write(line)

    def _tell(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self._head(status, {**headers, "Content-Length": str(len(body))}, lengths=True)
        self.wfile.write(body)

    def _head(self, status: int, headers: dict[str, str], *, lengths: bool = False) -> None:
        self.send_response_only(status)
        for name, value in headers.items():
            if name.lower() not in _OWN or (lengths and name == "Content-Length"):
                self.send_header(name, value)
        self.end_headers()
        self.close_connection = True

    def _hang_up(self) -> None:
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)
        self.close_connection = True


@contextmanager
def breaking_proxy(service: Service) -> Iterator[Proxy]:
    proxy = Proxy(service)
    handler = type("Handler", (_Handler,), {"proxy": proxy})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        proxy.url = f"http://127.0.0.1:{server.server_port}"
        yield proxy
        server.shutdown()
