"""The proxy of sandboxes in this process: gates on loopback, and servers that it may reach."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar, cast

import h11

from providers.addresses import Allowed
from providers.credentials import Credential, Placement
from providers.network import Attempt, Budget, Layer, Network, NetworkPolicy
from providers.remote.secret import Secret
from providers.runtime.network.authority import Authority
from providers.runtime.network.connections import serve
from providers.runtime.network.gates import Gate
from providers.runtime.network.resolving import Dialer
from tests.attacks.network.issued import ServerAuthority

# The only address that the proxy may reach here beside public ones.
ADDRESS = "127.0.0.2"
BOUND_SECONDS = 30.0
GOOD = "good.example"
EVIL = "evil.example"
# Each of its characters is written in another way by one of the encodings.
VALUE = "sk_live/51+Ab\\c\"d<e>&f'g%h=i~J?k>>"
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nGOOD"

T = TypeVar("T")
Answer = bytes | Callable[[bytes], bytes]
Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def allowing(*lines: str, log_only: bool = False, **budget: int) -> Network:
    """The list of one tenant."""
    policy = NetworkPolicy.parse("allowlist", lines, log_only=log_only)
    return Network((Layer("tenant", policy),), Budget(**budget))


def opened(**budget: int) -> Network:
    return Network((Layer("tenant", NetworkPolicy.parse("open")),), Budget(**budget))


def credential(
    *rules: str,
    name: str = "key",
    placement: Placement = "bearer",
    field: str = "",
    value: str = VALUE,
    version: int = 1,
    upstream: str = "",
) -> Credential:
    """One whose id is its name."""
    return Credential(name, name, version, placement, field, rules, "", Secret(value), upstream)


def holding(*credentials: Credential, lines: Sequence[str], **budget: int) -> Network:
    """The list of one tenant, and its credentials."""
    return replace(allowing(*lines, **budget), credentials=credentials)


class Upstream:
    """A server that notes what it is sent, and answers each connection once.

    Its answer is a text, or made of the head of the request.
    """

    def __init__(self, answer: Answer, host: str = GOOD) -> None:
        self.answer = answer
        self.host = host
        self.port = 0
        self.connections = 0
        self.heads: list[bytes] = []
        self.bodies: list[bytes] = []

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        head = await reader.readuntil(b"\r\n\r\n")
        self.heads.append(head)
        if found := re.search(rb"(?i)\r\ncontent-length: (\d+)\r\n", head):
            self.bodies.append(await reader.readexactly(int(found[1])))
        elif b"\r\ntransfer-encoding: chunked\r\n" in head.lower():
            self.bodies.append(await reader.readuntil(b"0\r\n\r\n"))
        writer.write(self.answer if isinstance(self.answer, bytes) else self.answer(head))
        await writer.drain()

    @property
    def rule(self) -> str:
        return f"{self.host}:{self.port}"

    def bound(self, path: str = "", methods: str = "") -> str:
        """A rule of a credential for it."""
        return f"{methods} https://{self.rule}{path}".strip()

    def sent(self, name: str, at: int = -1) -> list[str]:
        """All values of a header of a request."""
        lines = self.heads[at].decode("latin-1").split("\r\n")[1:-2]
        pairs = [line.partition(":") for line in lines]
        return [text.strip() for each, _, text in pairs if each.lower() == name.lower()]


class Door:
    """A gate with its listener, and what was recorded of it."""

    def __init__(
        self, proxied: Proxied, network: Network, owner: str, authority: Authority
    ) -> None:
        self.attempts: list[Attempt] = []
        self._changed = threading.Condition()
        self._proxied = proxied
        self.authority = authority
        self.gate = Gate(network, self._record, owner, proxied.owners, authority=self.authority)
        self.address: tuple[str, int] = ("", 0)

    def connect(self) -> socket.socket:
        return socket.create_connection(self.address, BOUND_SECONDS)

    def talk(self, *pieces: bytes) -> bytes:
        """All that the proxy answers to some pieces of a connection."""
        with self.connect() as sock:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # What is refused may be closed before all of it is sent.
            with suppress(OSError):
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

    def tls(
        self,
        host: str,
        port: int,
        context: ssl.SSLContext | None = None,
        server_name: str | None = None,
        sock: socket.socket | None = None,
    ) -> ssl.SSLSocket:
        """TLS in a tunnel, of a program that believes the sandbox's own authority alone."""
        sock = sock or self.tunnel(host, port)
        try:
            return (context or self.trust()).wrap_socket(
                sock, server_hostname=server_name or host, suppress_ragged_eofs=True
            )
        except BaseException:
            sock.close()
            raise

    def trust(self) -> ssl.SSLContext:
        """What a program in the sandbox believes."""
        return ssl.create_default_context(cadata=self.authority.certificate.decode())

    def ask(
        self,
        upstream: Upstream,
        path: str = "/",
        *headers: str,
        method: str = "GET",
        body: bytes = b"",
    ) -> bytes:
        """All that a server answers to one request in opened TLS."""
        with self.tls(upstream.host, upstream.port) as sock:
            sock.sendall(inner(upstream, path, *headers, "Connection: close", method=method) + body)
            return read_all(sock)

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

    def change_credentials(self, changes: Mapping[str, Credential | None]) -> None:
        self._proxied.call(partial(self.gate.change_credentials, changes))

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
        self.authority = ServerAuthority()
        self.dialer = Dialer(
            [Allowed.parse(ADDRESS)], self._look_up, trusted=self.authority.trusted
        )
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

    def door(
        self, network: Network, owner: str = "alice", authority: Authority | None = None
    ) -> Door:
        door = Door(self, network, owner, authority or Authority.create())
        handler = partial(serve, gate=door.gate, dialer=self.dialer)
        door.address = ("127.0.0.1", self._listen("127.0.0.1", handler))
        return door

    def upstream(self, answer: Answer = ANSWER, context: ssl.SSLContext | None = None) -> Upstream:
        found = Upstream(answer)
        found.port = self.server(found.handle, context)
        return found

    def secure(self, answer: Answer = ANSWER, host: str = GOOD) -> Upstream:
        """A server of TLS whose certificate is right."""
        self.names.setdefault(host, [[ADDRESS]])
        found = Upstream(answer, host)
        found.port = self.server(found.handle, self.authority.context(host))
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
    except (ConnectionError, ssl.SSLError):
        return found
    return found


def read_while_time_passes(proxied: Proxied, sock: socket.socket, seconds: float) -> bytes:
    """All that comes until the end, while so much time passes again and again."""
    found = b""
    sock.settimeout(0.05)
    deadline = time.monotonic() + BOUND_SECONDS
    while time.monotonic() < deadline:
        proxied.pass_time(seconds)
        try:
            if not (data := sock.recv(1 << 16)):
                return found
        except TimeoutError:
            continue
        except (ConnectionError, ssl.SSLError):
            return found
        found += data
    raise AssertionError("it does not end")


def read_head(sock: socket.socket) -> bytes:
    found = b""
    while b"\r\n\r\n" not in found and (data := sock.recv(1)):
        found += data
    return found


def read_exactly(sock: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size and (data := sock.recv(size - len(found))):
        found += data
    return found


def connect_head(host: str, port: int, *headers: str) -> bytes:
    lines = [f"CONNECT {host}:{port} HTTP/1.1", f"Host: {host}:{port}", *headers, "", ""]
    return "\r\n".join(lines).encode()


def get(host: str, port: int, path: str = "/", *headers: str, method: str = "GET") -> bytes:
    """A request in absolute form, after which the connection ends."""
    lines = [f"{method} http://{host}:{port}{path} HTTP/1.1", f"Host: {host}:{port}", *headers]
    return "\r\n".join([*lines, "Connection: close", "", ""]).encode()


def inner(upstream: Upstream, path: str = "/", *headers: str, method: str = "GET") -> bytes:
    """The head of a request in a tunnel."""
    lines = [f"{method} {path} HTTP/1.1", f"Host: {upstream.rule}", *headers, "", ""]
    return "\r\n".join(lines).encode("latin-1")


def body_of(answer: bytes) -> bytes:
    """The body of a response, without the frame of its chunks."""
    client = h11.Connection(h11.CLIENT, max_incomplete_event_size=1 << 20)
    client.send(h11.Request(method="GET", target="/", headers=[("Host", "x")]))
    client.send(h11.EndOfMessage())
    client.receive_data(answer)
    found = b""
    while (event := client.next_event()) not in (h11.NEED_DATA, h11.PAUSED):
        if isinstance(event, h11.Data):
            found += event.data
        elif isinstance(event, h11.EndOfMessage):
            return found
    client.receive_data(b"")
    while isinstance(event := client.next_event(), h11.Data):
        found += event.data
    return found


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
