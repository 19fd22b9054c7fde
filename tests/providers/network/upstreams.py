"""Servers that sandboxes reach: an HTTP and an HTTPS server on an address of this machine."""

from __future__ import annotations

import http.server
import ssl
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from email.message import Message
from pathlib import Path
from typing import Any

from tests.support.certificates import Authority

# Clients in a sandbox take 127.0.0.1 for the sandbox itself.
ADDRESS = "127.0.0.2"
LARGE = 8 * 1024 * 1024


class Upstream:
    """A web server of a folder's files. It answers `/echo` with the request, `/large` with LARGE
    bytes, and `/elsewhere` with a redirect. It listens on a free port of ADDRESS if none is given."""

    def __init__(
        self,
        folder: Path,
        context: ssl.SSLContext | None = None,
        address: tuple[str, int] = (ADDRESS, 0),
    ) -> None:
        self.folder = folder
        self.requests: list[str] = []
        self.headers: list[Message] = []
        self._server = http.server.ThreadingHTTPServer(address, self._handler(folder))
        self._server.daemon_threads = True
        if context is not None:
            self._server.socket = context.wrap_socket(
                self._server.socket, server_side=True, do_handshake_on_connect=False
            )
        scheme = "http" if context is None else "https"
        self.port: int = self._server.server_address[1]
        self.url = f"{scheme}://{address[0]}:{self.port}"
        self.rule = f"{address[0]}:{self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever)

    def _handler(self, folder: Path) -> type[http.server.SimpleHTTPRequestHandler]:
        upstream = self

        class Handler(http.server.SimpleHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def __init__(self, *args: Any) -> None:
                super().__init__(*args, directory=str(folder))

            def do_GET(self) -> None:
                upstream.requests.append(self.path)
                upstream.headers.append(self.headers)
                if self.path == "/echo":
                    self._answer(f"{self.command} {self.path}\n{self.headers}".encode())
                elif self.path == "/large":
                    self._answer(bytes(LARGE))
                elif self.path == "/elsewhere":
                    self.send_response(302)
                    self.send_header("Location", "http://example.com/")
                    self.send_header("Content-Length", "0")
                    self.end_headers()
                else:
                    super().do_GET()

            def do_POST(self) -> None:
                upstream.requests.append(self.path)
                self._answer(self.rfile.read(int(self.headers["Content-Length"])))

            def _answer(self, body: bytes) -> None:
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """Nothing: pytest shows what a test prints."""

        return Handler

    def __enter__(self) -> Upstream:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@contextmanager
def upstreams(folder: Path) -> Iterator[tuple[Upstream, Upstream, str]]:
    """Servers of the same folder over HTTP and HTTPS, and the authority that the latter has."""
    authority = Authority()
    issued = authority.issue(folder, addresses=[ADDRESS])
    files = folder / "files"
    files.mkdir()
    with ExitStack() as stack:
        plain = stack.enter_context(Upstream(files))
        secure = stack.enter_context(Upstream(files, issued.server_context()))
        yield plain, secure, authority.pem
