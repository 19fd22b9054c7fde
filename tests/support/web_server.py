"""A web server of somebody else's, which answers as it is told to: whole, badly or without end."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Callable
from types import TracebackType

# What a path answers: bytes as they go over the wire, or whatever is to be done with the socket.
Answer = bytes | Callable[[socket.socket], None]


def answer(body: bytes = b"content", *headers: str, status: str = "200 OK") -> bytes:
    """A whole answer with its length."""
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers, "", ""]
    return "\r\n".join(lines).encode("latin-1") + body


def redirect(to: str, status: str = "302 Found") -> bytes:
    return answer(b"", f"Location: {to}", status=status)


class WebServer:
    """Serves on loopback until left; over TLS with `tls`.

    `pages` are answers by path; a path that is none is 404, and what is no request
    gets `otherwise`. `requests` are the heads that came, `connections` counts who came at all, and
    `server_names` is what TLS clients asked for. `closing` is set when it is left, so that whoever answers slowly can end.
    """

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self.pages: dict[str, Answer] = {}
        self.otherwise: Answer = answer(status="400 Bad Request")
        self.requests: list[bytes] = []
        self.server_names: list[str | None] = []
        self.connections = 0
        self.closing = threading.Event()
        self._lock = threading.Lock()
        self._tls = tls
        if tls is not None:
            tls.sni_callback = lambda _socket, name, _context: self.server_names.append(name)
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.port: int = self._socket.getsockname()[1]
        self.scheme = "https" if tls else "http"
        threading.Thread(target=self._serve, daemon=True).start()

    def url(self, path: str, host: str = "127.0.0.1") -> str:
        return f"{self.scheme}://{host}:{self.port}{path}"

    def __enter__(self) -> WebServer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.closing.set()
        self._socket.close()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._take, args=[connection], daemon=True).start()

    def _take(self, connection: socket.socket) -> None:
        with self._lock:
            self.connections += 1
        try:
            with connection:
                connection.settimeout(30)
                if self._tls is None:
                    self._answer(connection)
                else:
                    with self._tls.wrap_socket(connection, server_side=True) as secure:
                        self._answer(secure)
        except OSError:
            # The client has left, as clients of such servers do.
            return

    def _answer(self, connection: socket.socket) -> None:
        head = b""
        while b"\r\n\r\n" not in head:
            if not (piece := connection.recv(65536)):
                return
            head += piece
            if not head.startswith(b"GET "):
                self.give(connection, self.otherwise)
                return
        self.requests.append(head)
        path = head.split(b" ")[1].decode().partition("?")[0]
        self.give(connection, self.pages.get(path, answer(b"", status="404 Not Found")))

    @staticmethod
    def give(connection: socket.socket, page: Answer) -> None:
        if isinstance(page, bytes):
            connection.sendall(page)
        else:
            page(connection)
