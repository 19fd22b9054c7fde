"""Who is told: a mail server, a receiver of POSTs and a syslog collector, each on a real socket."""

from __future__ import annotations

import email
import re
import socket
import ssl
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

# A message of RFC 5425: its length in bytes, a space, and so many bytes.
_FRAME = re.compile(rb"(\d+) ")


class _Server(ABC):
    """Takes connections on loopback until it is closed, each in a thread."""

    def __init__(self, port: int = 0, tls: ssl.SSLContext | None = None) -> None:
        self._tls = tls
        self._socket = socket.create_server(("127.0.0.1", port))
        self.port: int = self._socket.getsockname()[1]
        self.connections = 0
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Nobody is taken any more, and whoever is connected is cut off."""
        # Closed alone, it would take whoever comes next: a thread waits in it.
        with_reset(self._socket)
        self._socket.close()
        for connection in self._open:
            with_reset(connection)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            self.connections += 1
            self._open.append(connection)
            threading.Thread(target=self._take, args=(connection,), daemon=True).start()

    def _take(self, connection: socket.socket) -> None:
        try:
            if self._tls is not None:
                connection = self._tls.wrap_socket(connection, server_side=True)
                self._open.append(connection)
            with connection:
                self.talk(connection)
        except OSError:
            return

    @abstractmethod
    def talk(self, connection: socket.socket) -> None:
        """What the server does with one who has connected."""


def with_reset(connection: socket.socket) -> None:
    try:
        socket.socket.shutdown(connection, socket.SHUT_RDWR)
    except OSError:
        return


class SmtpServer(_Server):
    """Takes mail as RFC 5321 has it. `mails` are what came, read."""

    def __init__(self) -> None:
        self.mails: list[Message] = []
        super().__init__()

    def talk(self, connection: socket.socket) -> None:
        lines = connection.makefile("rb")
        connection.sendall(b"220 here\r\n")
        for line in lines:
            verb = line[:4].upper()
            if verb == b"DATA":
                connection.sendall(b"354 go on\r\n")
                text = b""
                while (part := lines.readline()) != b".\r\n":
                    text += part
                self.mails.append(email.message_from_bytes(text))
            connection.sendall(b"221 bye\r\n" if verb == b"QUIT" else b"250 ok\r\n")
            if verb == b"QUIT":
                return


class SyslogCollector(_Server):
    """Takes RFC 5424 over TLS (RFC 5425). `messages` are what came, whole.

    With `most` it cuts the connection in the middle of the message after so many.
    """

    def __init__(self, tls: ssl.SSLContext, port: int = 0, most: int | None = None) -> None:
        self.messages: list[bytes] = []
        self._most = most
        super().__init__(port, tls)

    def talk(self, connection: socket.socket) -> None:
        buffer = b""
        while part := connection.recv(65536):
            buffer += part
            while (frame := _FRAME.match(buffer)) and len(buffer) >= frame.end() + int(frame[1]):
                if self._most is not None and len(self.messages) >= self._most:
                    with_reset(connection)
                    return
                end = frame.end() + int(frame[1])
                self.messages.append(buffer[frame.end() : end])
                buffer = buffer[end:]
        # As TLS has it, and as collectors do.
        assert isinstance(connection, ssl.SSLSocket)
        connection.unwrap()


class Silent(_Server):
    """Takes connections and never says anything."""

    def talk(self, connection: socket.socket) -> None:
        while connection.recv(65536):
            pass


class Receiver:
    """Takes POSTs. `requests` are path, headers and body; `answer` says the status of each."""

    def __init__(
        self,
        answer: Callable[[int], tuple[int, dict[str, str]]] = lambda number: (204, {}),
        tls: ssl.SSLContext | None = None,
        body: bytes = b"",
    ) -> None:
        self.requests: list[tuple[str, dict[str, str], bytes]] = []
        outer, said = self, body

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                headers = {name.lower(): value for name, value in self.headers.items()}
                outer.requests.append((self.path, headers, body))
                status, more = answer(len(outer.requests)) if not said else (200, {})
                self.send_response(status)
                for name, value in more.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(said)))
                self.end_headers()
                self.wfile.write(said)

            def log_message(self, *args: Any) -> None:
                """Not on the tests' stderr."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        if tls is not None:
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True)
        self.port: int = self._server.server_address[1]
        self.url = f"{'https' if tls else 'http'}://127.0.0.1:{self.port}"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
