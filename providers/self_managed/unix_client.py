"""HTTP over the socket that the service of this installation listens at."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import urllib3
from urllib3.connection import HTTPConnection
from urllib3.exceptions import NewConnectionError

from providers.runtime.service.unix_socket import connect

CONNECT_SECONDS = 3.0


class _UnixConnection(HTTPConnection):
    def __init__(self, path: Path, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._path = path

    def _new_conn(self) -> socket.socket:
        try:
            return connect(self._path, CONNECT_SECONDS)
        except OSError as error:
            raise NewConnectionError(self, str(error)) from error


class UnixPool(urllib3.HTTPConnectionPool):
    """Connections to the service at `path`, whatever host they are said to go to."""

    def __init__(self, path: Path, maxsize: int) -> None:
        super().__init__("localhost", maxsize=maxsize, block=False)
        self._path = path

    def _new_conn(self) -> HTTPConnection:
        self.num_connections += 1
        return _UnixConnection(self._path, host="localhost", timeout=self.timeout.connect_timeout)
