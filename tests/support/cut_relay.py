"""A relay between a client and a service, whose connections a test can cut."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Relay:
    """`port` is where it listens; `count` is how many connections there were, and `heard` all that
    their clients were sent."""

    def __init__(self, target: int) -> None:
        self.count = 0
        self.heard = b""
        self._target = target
        self._open: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._start(self._accept)

    def cut(self) -> None:
        """Break off all connections."""
        for each in self._open:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self.cut()
        for thread in self._threads:
            thread.join(60)
        for each in (self._listener, *self._open):
            each.close()

    def _start(self, work: object, *given: object) -> None:
        thread = threading.Thread(target=work, args=given)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                service = socket.create_connection(("127.0.0.1", self._target), timeout=60)
                service.settimeout(None)
                self._open += [client, service]
                self.count += 1
                self._start(self._copy, client, service, False)
                self._start(self._copy, service, client, True)

    def _copy(self, source: socket.socket, target: socket.socket, is_heard: bool) -> None:
        with contextlib.suppress(OSError):
            while piece := source.recv(65536):
                target.sendall(piece)
                if is_heard:
                    self.heard += piece
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_RDWR)


@contextmanager
def relayed(target: int) -> Iterator[Relay]:
    relay = Relay(target)
    try:
        yield relay
    finally:
        relay.close()
