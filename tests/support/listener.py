"""A listening socket that keeps whatever reaches it, as somebody's who wants a key would."""

from __future__ import annotations

import socket
import ssl
import threading
from types import TracebackType


class Listener:
    """Takes connections on loopback until left; over TLS with `tls`, whose handshakes it counts.

    `received` is all that anybody has sent, decrypted. It answers with `answer`, once something
    came, and closes. What it counts is complete once `settle` has returned.
    """

    def __init__(self, tls: ssl.SSLContext | None = None, answer: bytes = b"") -> None:
        self.received = b""
        self.connections = 0
        self.handshakes = 0
        self._ended = 0
        self._changed = threading.Condition()
        self._tls = tls
        if tls is not None:
            # A caller who leaves right after the handshake would break it while tickets are sent.
            tls.num_tickets = 0
        self._answer = answer
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._socket.getsockname()[1]
        self.url = f"{'https' if tls else 'http'}://127.0.0.1:{self.port}"
        threading.Thread(target=self._serve, daemon=True).start()

    def __enter__(self) -> Listener:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._socket.close()

    def settle(self) -> None:
        """Wait until a caller has come, and every one who came has been listened to."""
        with self._changed:
            assert self._changed.wait_for(lambda: 0 < self.connections == self._ended, timeout=60)

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            self.connections += 1
            try:
                self._take(connection)
            except OSError:
                continue
            finally:
                with self._changed:
                    self._ended += 1
                    self._changed.notify_all()

    def _take(self, connection: socket.socket) -> None:
        with connection:
            connection.settimeout(5)
            if self._tls is None:
                self._read(connection)
                return
            with self._tls.wrap_socket(connection, server_side=True) as secure:
                self.handshakes += 1
                self._read(secure)

    def _read(self, connection: socket.socket) -> None:
        while not self.received.rstrip().endswith(b"}") and (part := connection.recv(65536)):
            self.received += part
            if b"\r\n\r\n" in self.received:
                connection.sendall(self._answer)
                return
