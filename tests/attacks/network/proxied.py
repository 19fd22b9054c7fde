"""The proxy of sandboxes in this process: gates on loopback, and servers that it may reach."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar, cast

from providers.addresses import Allowed
from providers.network import Attempt, Budget, Layer, Network, NetworkPolicy
from providers.runtime.network.connections import serve
from providers.runtime.network.gates import Gate
from providers.runtime.network.resolving import Dialer

# The only address that the proxy may reach here beside public ones.
ADDRESS = "127.0.0.2"
BOUND_SECONDS = 30.0
GOOD = "good.example"
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nGOOD"

T = TypeVar("T")
Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def allowing(*lines: str, log_only: bool = False, **budget: int) -> Network:
    """The list of one tenant."""
    policy = NetworkPolicy.parse("allowlist", lines, log_only=log_only)
    return Network((Layer("tenant", policy),), Budget(**budget))


def opened(**budget: int) -> Network:
    return Network((Layer("tenant", NetworkPolicy.parse("open")),), Budget(**budget))


class Upstream:
    """A server that notes what it is sent, and answers each connection once."""

    def __init__(self, answer: bytes) -> None:
        self.answer = answer
        self.port = 0
        self.connections = 0
        self.heads: list[bytes] = []

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.heads.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(self.answer)
        await writer.drain()

    @property
    def rule(self) -> str:
        return f"{GOOD}:{self.port}"


class Door:
    """A gate with its listener, and what was recorded of it."""

    def __init__(self, proxied: Proxied, network: Network, owner: str) -> None:
        self.attempts: list[Attempt] = []
        self._changed = threading.Condition()
        self._proxied = proxied
        self.gate = Gate(network, self._record, owner, proxied.owners)
        self.address: tuple[str, int] = ("", 0)

    def connect(self) -> socket.socket:
        return socket.create_connection(self.address, BOUND_SECONDS)

    def talk(self, *pieces: bytes) -> bytes:
        """All that the proxy answers to some pieces of a connection."""
        with self.connect() as sock:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for piece in pieces:
                sock.sendall(piece)
            sock.shutdown(socket.SHUT_WR)
            return read_all(sock)

    def tunnel(self, host: str, port: int) -> socket.socket:
        """A connection whose CONNECT was accepted."""
        sock = self.connect()
        sock.sendall(connect_head(host, port))
        head = read_head(sock)
        assert head.startswith(b"HTTP/1.1 200"), head
        return sock

    def wait_for(self, count: int) -> list[Attempt]:
        """The attempts, when there are so many of them."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.attempts) >= count, BOUND_SECONDS), (
                self.attempts
            )
        return self.attempts

    def wait_until_idle(self) -> list[Attempt]:
        """The attempts, when no connection is left."""
        self._proxied.run(self.gate.ended())
        return self.attempts

    def only(self) -> Attempt:
        """The one attempt there was."""
        self.wait_for(1)
        (attempt,) = self.wait_until_idle()
        return attempt

    def change(self, network: Network) -> None:
        self._proxied.call(partial(self.gate.change, network))

    def close(self) -> None:
        self._proxied.call(self.gate.close)

    def _record(self, attempt: Attempt) -> None:
        with self._changed:
            self.attempts.append(attempt)
            self._changed.notify_all()


class Proxied:
    """A loop of its own, on which gates and upstream servers are served."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.owners: Counter[str] = Counter()
        # What a name leads to, by the times it is asked for; the last answer stays.
        self.names: dict[str, list[list[str]]] = {GOOD: [[ADDRESS]]}
        self.looked_up: list[str] = []
        self.dialer = Dialer([Allowed.parse(ADDRESS)], self._look_up)
        self.troubles: list[dict[str, Any]] = []
        self._servers: list[asyncio.Server] = []
        self._passed = 0.0
        self._real_time = loop.time
        loop.time = lambda: self._real_time() + self._passed  # type: ignore[method-assign]

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(BOUND_SECONDS)

    def call(self, work: Callable[[], T]) -> T:
        async def run() -> T:
            return work()

        return self.run(run())

    def pass_time(self, seconds: float) -> None:
        """Have all that waits on the loop wait so much less."""

        def add() -> None:
            self._passed += seconds

        self.call(add)

    def door(self, network: Network, owner: str = "alice") -> Door:
        door = Door(self, network, owner)
        handler = partial(serve, gate=door.gate, dialer=self.dialer)
        door.address = ("127.0.0.1", self._listen("127.0.0.1", handler))
        return door

    def upstream(self, answer: bytes = ANSWER, context: ssl.SSLContext | None = None) -> Upstream:
        found = Upstream(answer)
        found.port = self.server(found.handle, context)
        return found

    def server(
        self, handler: Handler, context: ssl.SSLContext | None = None, address: str = ADDRESS
    ) -> int:
        """A server whose connections are closed when the handler has ended."""

        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                await handler(reader, writer)
            except (OSError, asyncio.IncompleteReadError):
                # The proxy has let go of it.
                writer.transport.abort()
            finally:
                writer.close()

        return self._listen(address, handle, context)

    def _listen(self, address: str, handler: Handler, context: ssl.SSLContext | None = None) -> int:
        start = asyncio.start_server(cast("Any", handler), address, 0, ssl=context, backlog=1024)
        server = self.run(start)
        self._servers.append(server)
        return int(server.sockets[0].getsockname()[1])

    def _look_up(self, host: str, port: int) -> Sequence[str]:
        self.looked_up.append(host)
        answers = self.names.get(host)
        if not answers:
            raise OSError("no such name")
        return answers.pop(0) if len(answers) > 1 else answers[0]

    async def end(self) -> None:
        for server in self._servers:
            server.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@contextmanager
def proxying() -> Iterator[Proxied]:
    """Raises AssertionError at the end where an exception has escaped."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    proxied = Proxied(loop)
    loop.set_exception_handler(lambda _, trouble: proxied.troubles.append(trouble))
    thread.start()
    try:
        yield proxied
    finally:
        proxied.run(proxied.end())
        loop.call_soon_threadsafe(loop.stop)
        thread.join(BOUND_SECONDS)
        loop.close()
    assert not proxied.troubles, proxied.troubles


def read_all(sock: socket.socket) -> bytes:
    """Until the other side has ended, or broken off."""
    found = b""
    try:
        while data := sock.recv(1 << 16):
            found += data
    except ConnectionError:
        return found
    return found


def read_head(sock: socket.socket) -> bytes:
    found = b""
    while b"\r\n\r\n" not in found and (data := sock.recv(1)):
        found += data
    return found


def connect_head(host: str, port: int, *headers: str) -> bytes:
    lines = [f"CONNECT {host}:{port} HTTP/1.1", f"Host: {host}:{port}", *headers, "", ""]
    return "\r\n".join(lines).encode()


def get(host: str, port: int, path: str = "/", *headers: str, method: str = "GET") -> bytes:
    """A request in absolute form, after which the connection ends."""
    lines = [f"{method} http://{host}:{port}{path} HTTP/1.1", f"Host: {host}:{port}", *headers]
    return "\r\n".join([*lines, "Connection: close", "", ""]).encode()


def error_of(answer: bytes) -> dict[str, Any]:
    """What a refusal says as JSON."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"application/json" in head, answer
    found: dict[str, Any] = json.loads(body)["error"]
    return found


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1]) if answer.startswith(b"HTTP/1.1 ") else 0


def client_hello(name: str | None = None) -> bytes:
    """What a client that asks for a name sends first, in one record."""
    into, out = ssl.MemoryBIO(), ssl.MemoryBIO()
    context = ssl.create_default_context()
    context.check_hostname = False
    client = context.wrap_bio(into, out, server_hostname=name)
    try:
        client.do_handshake()
    except ssl.SSLWantReadError:
        return out.read()
    raise AssertionError("a handshake without a server")
