"""A WebSocket client over a bare socket, and what speaks Codex's protocol through it."""

from __future__ import annotations

import json
import os
import re
import socket
import struct
import subprocess
import sys
import time
from base64 import b64decode, b64encode
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

from tests.support.processes import ROOT, clean_environment
from tests.support.site import Site

TEXT, CLOSE, PING, PONG = 1, 8, 9, 10
CWD = "file:///workspace"
SECONDS = 60.0
_MAKE = """
from executions.models import Tenant
from executions.tenants.keys import create_api_key
from executions.capabilities.policies.models import Policy
tenant = Tenant.objects.get_or_create(slug={tenant!r}, defaults={{"name": {tenant!r}}})[0]
if {policy!r}:
    Policy.objects.get_or_create(tenant_slug={tenant!r}, defaults={policy!r})
print(create_api_key(tenant, {name!r}, **{options!r})[1])
"""


class Denied(Exception):
    """The handshake was refused. `status` is HTTP's."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


class Closed(Exception):
    """The peer has closed. `code` is None where it did without a word."""

    def __init__(self, code: int | None) -> None:
        super().__init__(code)
        self.code = code


class Listener(Protocol):
    """A service that listens on this machine."""

    @property
    def port(self) -> int: ...


class Socket:
    """One WebSocket. Raises Denied."""

    def __init__(self, service: Listener, path: str, **headers: str) -> None:
        self.raw = socket.create_connection(("127.0.0.1", service.port), timeout=60)
        lines = [
            f"GET {path} HTTP/1.1",
            "Host: 127.0.0.1",
            "Upgrade: websocket",
            "Connection: Upgrade",
            "Sec-WebSocket-Version: 13",
            f"Sec-WebSocket-Key: {b64encode(os.urandom(16)).decode()}",
            *(f"{name.replace('_', '-')}: {value}" for name, value in headers.items()),
        ]
        self.raw.sendall("\r\n".join([*lines, "", ""]).encode())
        head = b""
        while b"\r\n\r\n" not in head:
            piece = self.raw.recv(65536)
            if not piece:
                raise Denied(0)
            head += piece
        head, self._buffer = head.split(b"\r\n\r\n", 1)
        status = int(head.split(b" ", 2)[1])
        if status != 101:
            self.raw.close()
            raise Denied(status)

    def send_frame(self, opcode: int, payload: bytes, *, is_last: bool = True) -> None:
        mask = os.urandom(4)
        size = len(payload)
        head = bytes([opcode | (0x80 if is_last else 0)])
        if size < 126:
            head += bytes([0x80 | size])
        elif size < 65536:
            head += bytes([0x80 | 126]) + struct.pack("!H", size)
        else:
            head += bytes([0x80 | 127]) + struct.pack("!Q", size)
        key = int.from_bytes((mask * (size // 4 + 1))[:size], "little")
        masked = (int.from_bytes(payload, "little") ^ key).to_bytes(size, "little")
        self.raw.sendall(head + mask + masked)

    def read_frame(self) -> tuple[int, bytes]:
        """Raises Closed."""
        first, second = self._read(2)
        size = second & 0x7F
        if size == 126:
            (size,) = struct.unpack("!H", self._read(2))
        elif size == 127:
            (size,) = struct.unpack("!Q", self._read(8))
        payload = self._read(size)
        if first & 0x0F == CLOSE:
            raise Closed(struct.unpack("!H", payload[:2])[0] if payload else None)
        return first & 0x0F, payload

    def _read(self, size: int) -> bytes:
        while len(self._buffer) < size:
            try:
                piece = self.raw.recv(1 << 20)
            except ConnectionResetError:
                piece = b""
            if not piece:
                raise Closed(None)
            self._buffer += piece
        found, self._buffer = self._buffer[:size], self._buffer[size:]
        return found

    def wait_until_closed(self) -> int | None:
        try:
            while True:
                self.read_frame()
        except Closed as closed:
            return closed.code

    def close(self) -> None:
        self.raw.close()


class Refused(Exception):
    """An error of the protocol."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(code, message)
        self.code = code
        self.message = message


class Client:
    """A client of the protocol: one call after the other, and the notifications between."""

    def __init__(self, service: Listener, path: str, **headers: str) -> None:
        self.socket = Socket(service, path, **headers)
        self.told: list[dict[str, Any]] = []
        self._answers: dict[Any, dict[str, Any]] = {}
        self._last = 0

    def send(self, message: Any) -> None:
        text = message if isinstance(message, str) else json.dumps(message)
        self.socket.send_frame(TEXT, text.encode())

    def begin(self, called: str, /, **params: Any) -> int:
        self._last += 1
        self.send({"id": self._last, "method": called, "params": params})
        return self._last

    def answer_to(self, request_id: Any) -> Any:
        """Raises Refused."""
        until = time.monotonic() + SECONDS
        while request_id not in self._answers:
            self._take(until)
        answer = self._answers.pop(request_id)
        if "error" in answer:
            raise Refused(answer["error"]["code"], answer["error"]["message"])
        return answer["result"]

    def call(self, called: str, /, **params: Any) -> Any:
        return self.answer_to(self.begin(called, **params))

    def initialize(self, **params: Any) -> str:
        answer = self.call("initialize", clientName="tests", **params)
        self.send({"method": "initialized", "params": {}})
        assert answer["environmentInfo"]["cwd"] == CWD
        session_id: str = answer["sessionId"]
        return session_id

    def start(self, process_id: str, *argv: str, **params: Any) -> Any:
        wanted = {"cwd": CWD, "env": {}, "tty": False, "arg0": None, **params}
        return self.call("process/start", processId=process_id, argv=list(argv), **wanted)

    def wait_for(self, method: str, process_id: str) -> dict[str, Any]:
        """The first notification of this kind about a process."""
        until = time.monotonic() + SECONDS
        while True:
            for each in self.told:
                if each["method"] == method and each["params"].get("processId") == process_id:
                    found: dict[str, Any] = each["params"]
                    return found
            self._take(until)

    def output(self, process_id: str, stream: str = "stdout") -> str:
        """What a process has put out, once it has ended."""
        self.wait_for("process/closed", process_id)
        found = [
            b64decode(each["params"]["chunk"])
            for each in self.told
            if each["method"] == "process/output"
            and each["params"].get("processId") == process_id
            and each["params"]["stream"] == stream
        ]
        return b"".join(found).decode()

    def run(self, process_id: str, script: str, **params: Any) -> tuple[int, str]:
        self.start(process_id, "/bin/bash", "-lc", script, **params)
        text = self.output(process_id)
        return self.wait_for("process/exited", process_id)["exitCode"], text

    def _take(self, until: float) -> None:
        assert time.monotonic() < until, "nothing of what is waited for has come"
        opcode, payload = self.socket.read_frame()
        if opcode == PING:
            self.socket.send_frame(PONG, payload)
        if opcode != TEXT:
            return
        message = json.loads(payload)
        if "method" in message:
            self.told.append(message)
        else:
            self._answers[message["id"]] = message

    def close(self) -> None:
        self.socket.close()


def refused(client: Client, method: str, **params: object) -> Refused:
    """The error that a call is answered with."""
    try:
        answer = client.call(method, **params)
    except Refused as error:
        return error
    raise AssertionError(f"{method} was answered: {answer}")


@contextmanager
def opened(site: Site, path: str, **params: Any) -> Iterator[Client]:
    """A connection that has its session."""
    client = Client(site.service, path)
    try:
        client.initialize(**params)
        yield client
    finally:
        client.close()


def capability_path(site: Site, tenant: str = "wonderland", key: str = "attack") -> str:
    """The path that stands for a key, as `manage.py codex_config` prints it."""
    done = manage(site, "codex_config", "--in-url", "--tenant", tenant, "--key", key)
    found = re.search('url = "ws://127.0.0.1:[0-9]+(/codex/[^"]+)"', done)
    assert found is not None, done
    return found[1]


def make_key(site: Site, tenant: str, name: str, policy: object = None, **options: str) -> str:
    """A key's text."""
    code = _MAKE.format(tenant=tenant, name=name, policy=policy, options=options)
    return manage(site, "shell", "-c", code).split()[-1]


def manage(site: Site, *command: str, **extra: str) -> str:
    environment: Mapping[str, str] = clean_environment(site.data_dir, **extra)
    done = subprocess.run(
        [sys.executable, "manage.py", *command],
        env=environment,
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    return done.stdout
