"""HTTP over bare sockets: for requests that are never finished, and answers that are never read."""

from __future__ import annotations

import json
import socket
from dataclasses import dataclass
from typing import Any

from tests.support.processes import Service


@dataclass
class Answer:
    """`status` is 0 where the connection ended without an answer."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def connect(service: Service, sent: bytes = b"") -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", service.port), timeout=120)
    connection.sendall(sent)
    return connection


def request(method: str, path: str, body: Any = None, *, key: str = "", **headers: str) -> bytes:
    """A whole request. Headers' names are written with underscores."""
    content = b"" if body is None else json.dumps(body).encode()
    return head(method, path, len(content), key=key, **headers) + content


def head(method: str, path: str, length: int, *, key: str = "", **headers: str) -> bytes:
    """A request's head that announces so many bytes of JSON."""
    lines = [f"{method} {path} HTTP/1.1", "Host: 127.0.0.1"]
    if length:
        lines += ["Content-Type: application/json", f"Content-Length: {length}"]
    if key:
        lines.append(f"X-API-Key: {key}")
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return ("\r\n".join([*lines, "", ""])).encode()


def read(connection: socket.socket) -> Answer:
    """The answer, waited for."""
    received = b""
    while b"\r\n\r\n" not in received:
        if not (piece := _receive(connection)):
            return Answer(0, {}, received)
        received += piece
    top, _, body = received.partition(b"\r\n\r\n")
    first, *lines = top.decode("latin-1").split("\r\n")
    pairs = (line.split(": ", 1) for line in lines)
    headers = {name.lower(): value for name, value in pairs}
    length = int(headers.get("content-length", "0"))
    while len(body) < length and (piece := _receive(connection)):
        body += piece
    return Answer(int(first.split()[1]), headers, body)


def ask(service: Service, method: str, path: str, body: Any = None, **options: str) -> Answer:
    """One request on a connection of its own, and its answer."""
    with connect(service, request(method, path, body, **options)) as connection:
        return read(connection)


def _receive(connection: socket.socket) -> bytes:
    try:
        return connection.recv(65536)
    except ConnectionError:
        return b""
