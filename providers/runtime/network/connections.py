"""One connection of a program: an HTTP proxy with CONNECT, and SOCKS5.

What a program says decides nothing but which host is asked for. A tunnel carries TLS, whose server
name must be the host that it was opened for, or plain HTTP. Where a rule or a credential needs it,
TLS ends here, at a certificate of the sandbox's own authority. Each request that can be read is
judged by itself, and written anew: no byte of its head reaches a server as the program wrote it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import socket
import ssl
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import h11

from providers.addresses import literal
from providers.credentials import Credential, read_upstream
from providers.network import Attempt, Outcome, Target, Verdict, normalized_host
from providers.runtime.network import hello
from providers.runtime.network.exchange import (
    HEAD_BYTES,
    IDLE_SECONDS,
    PIECE,
    Ended,
    Exchange,
    Unmaskable,
    in_time,
    passed_on,
)
from providers.runtime.network.gates import Gate, Hold, shown
from providers.runtime.network.placing import Misplaced, Placed, put_in
from providers.runtime.network.relay import detach, relay
from providers.runtime.network.resolving import Dialer, Unreachable
from providers.runtime.network.tls_stream import TlsStream

logger = logging.getLogger(__name__)

Accept = Callable[[], Awaitable[None]]

HEAD_SECONDS = 30.0
LINGER_SECONDS, LINGER_BYTES = 2.0, 1024 * 1024

_AUTHORITY = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\s:/?#@\\\[\]]+):(\d{1,5})")
_ABSOLUTE = re.compile(
    r"http://(\[[0-9A-Fa-f:.]+\]|[^\s:/?#@\\\[\]]+)(?::(\d{1,5}))?((?:/|\?)[^\s#]*)?", re.IGNORECASE
)
# Some servers take the method or the path from these.
_OVERRIDES = frozenset(
    b"x-http-method-override x-http-method x-method-override x-original-url x-rewrite-url".split()
)
_METHOD = re.compile(rb"[A-Z]{3,10} ")
# What is no word of a rule: the host could not be reached, or not be trusted.
_FAILURES = frozenset(("name", "unreachable", "timeout", "certificate", "trust", "packed"))
_HELP = (
    "This is the proxy of a sandbox. Programs find it by HTTP_PROXY and HTTPS_PROXY; it serves "
    "http:// addresses, CONNECT and SOCKS5."
)


class Refusal(Exception):
    """What is asked for is not done. `why` is one word for the record; the text is for people."""

    def __init__(self, why: str, text: str, status: int = 403, verdict: Verdict | None = None):
        super().__init__(text)
        self.why, self.text, self.status = why, text, status
        self.verdict = verdict or Verdict(False)
        self.outcome: Outcome = "failed" if why in _FAILURES else "refused"


@dataclass
class _Work:
    """What is known of the attempt that is under way."""

    at: float = field(default_factory=time.time)
    began: float = field(default_factory=time.monotonic)
    host: str = ""
    port: int = 0
    method: str = ""
    path: str = ""
    sent: int = 0
    received: int = 0
    credential: str = ""
    # Nothing is on record of it until its end.
    is_open: bool = False
    verdict: Verdict = field(default_factory=lambda: Verdict(False))

    def attempt(self, outcome: Outcome, verdict: Verdict, why: str = "") -> Attempt:
        return Attempt(
            round(self.at, 3),
            shown(self.host),
            self.port,
            outcome,
            why,
            shown(self.method),
            shown(self.path),
            verdict.layer,
            verdict.rule,
            verdict.noted,
            self.sent,
            self.received,
            round(time.monotonic() - self.began, 3),
            self.credential,
        )


async def serve(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, gate: Gate, dialer: Dialer
) -> None:
    """Serve one connection of the gate's sandbox until it ends. Never raises."""
    task = asyncio.current_task()
    assert task is not None  # noqa: S101  for the type
    if gate.is_closed:
        writer.transport.abort()
        return
    if gate.is_crowded:
        gate.record(_Work().attempt("refused", Verdict(False), "budget"))
        writer.transport.abort()
        return
    hold = gate.add(partial(_cancel, task))
    try:
        await Connection(reader, writer, gate, dialer, hold).serve()
    except (Ended, OSError, asyncio.CancelledError):
        # The program has gone, or what it did is not allowed any more.
        writer.transport.abort()
    except Exception:
        logger.exception("a connection failed inside the proxy")
        writer.transport.abort()
    finally:
        await _close(writer)
        gate.remove(hold)


class Connection:
    """Serves one connection."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        gate: Gate,
        dialer: Dialer,
        hold: Hold,
    ) -> None:
        self._reader: asyncio.StreamReader | TlsStream = reader
        self._writer: asyncio.StreamWriter | TlsStream = writer
        self._ends = reader, writer
        self._gate, self._dialer, self._hold = gate, dialer, hold
        self._buffer = b""
        self._work = _Work()

    async def serve(self) -> None:
        """Raises Ended, OSError."""
        try:
            await self._serve()
        finally:
            if self._work.is_open:
                self._record(self._work.attempt("failed", self._work.verdict, "ended"))

    async def _serve(self) -> None:
        async with in_time(HEAD_SECONDS):
            first = await self._peek(1)
        if first == b"\x05":
            await self._serve_socks()
        elif first == b"\x04":
            # SOCKS4 has no names, and no way to say so: 91 is a refusal.
            await self.write(b"\x00\x5b" + bytes(6))
        else:
            await self._serve_http(None)

    # What is read and written.

    async def _more(self) -> bytes:
        """Raises Ended."""
        data = await self._reader.read(PIECE)
        self._work.sent += len(data)
        if not self._gate.count(len(data)) and self._work.is_open:
            raise Ended
        return data

    async def _peek(self, size: int) -> bytes:
        """At least so many bytes, which stay. Raises Ended."""
        while len(self._buffer) < size:
            data = await self._more()
            if not data:
                raise Ended
            self._buffer += data
        return self._buffer[:size]

    async def _take(self, size: int) -> bytes:
        found = await self._peek(size)
        self._buffer = self._buffer[size:]
        return found

    async def write(self, data: bytes) -> None:
        """Raises Ended, OSError."""
        self._work.received += len(data)
        # A refusal is said beyond the budget, too.
        if not self._gate.count(len(data)) and self._work.is_open:
            raise Ended
        self._writer.write(data)
        if not self._writer.transport.get_write_buffer_size():
            # A timer for each piece would cost more than the piece.
            return
        try:
            async with asyncio.timeout(IDLE_SECONDS):
                await self._writer.drain()
        except TimeoutError:
            raise Ended from None

    # Judging.

    def _begin(self) -> None:
        """A new attempt. Raises Refusal where the budget has no more."""
        # What was read of it until now is its own.
        self._work = _Work(sent=self._work.sent, received=self._work.received, is_open=True)
        if exceeded := self._gate.over_budget(self._hold):
            raise Refusal("budget", exceeded)

    def _name(self, host: str, port: str) -> tuple[str, int]:
        """The host in its one form. Raises Refusal."""
        self._work.host = host
        self._work.port = min(int(port), 65535)
        try:
            name = normalized_host(host.strip("[]"))
        except ValueError as error:
            raise Refusal("malformed", str(error), 400) from None
        self._work.host = name
        if not 0 < int(port) < 65536:
            raise Refusal("malformed", f"{port} is not a port.", 400)
        return name, int(port)

    def _judge(self, target: Target) -> Verdict:
        """Raises Refusal."""
        verdict = self._gate.judge(target)
        if not verdict.is_allowed:
            raise self._not_allowed(target, verdict)
        return verdict

    def _not_allowed(self, target: Target, verdict: Verdict) -> Refusal:
        asked = f"{target.method} {target.path} of " if target.method else ""
        whose = f"the list of the {verdict.layer}" if verdict.layer else "this sandbox"
        remedy = (
            "Name it in `network` of the request."
            if verdict.layer in ("run", "session")
            else "Ask an administrator to add it there."
        )
        return Refusal(
            "not_allowed",
            f"{asked}{target.host}:{target.port} is not allowed by {whose}. {remedy}",
            verdict=verdict,
        )

    def _end(self, refusal: Refusal) -> None:
        self._record(self._work.attempt(refusal.outcome, refusal.verdict, refusal.why))

    def _record(self, attempt: Attempt) -> None:
        self._gate.record(attempt)
        self._work = _Work(host=self._work.host, port=self._work.port)

    async def _connect(
        self, target: Target, verdict: Verdict, *, is_tls: bool = False
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Raises Refusal."""
        try:
            return await self._dialer.connect(
                target.host, target.port, self._gate.owner, is_tls=is_tls
            )
        except Unreachable as error:
            status = 403 if error.is_refused else 502
            raise Refusal(error.why, str(error), status, verdict) from None

    # HTTP.

    async def _serve_http(self, tunnel: Target | None) -> None:
        """Requests, one after the other: those of a tunnel are for its target. Raises Ended."""
        server = h11.Connection(h11.SERVER, max_incomplete_event_size=HEAD_BYTES)
        while True:
            try:
                async with in_time(HEAD_SECONDS):
                    event = await self.next_event(server)
                if not isinstance(event, h11.Request):
                    return
                self._begin()
                if event.http_version not in (b"1.0", b"1.1"):
                    raise Refusal("protocol", f"Only HTTP/1.1. {_HELP}", 505)
                if event.method == b"CONNECT" and tunnel is None:
                    await self._serve_connect(server, event)
                    return
                await self._serve_request(server, event, tunnel)
            except Refusal as refusal:
                self._end(refusal)
                await self._refuse(server, refusal)
                return
            except h11.RemoteProtocolError as error:
                broken = Refusal("malformed", f"{error}. {_HELP}", error.error_status_hint)
                self._end(broken)
                await self._refuse(server, broken)
                return
            if server.our_state is not h11.DONE or server.their_state is not h11.DONE:
                return
            server.start_next_cycle()

    async def next_event(self, server: h11.Connection) -> h11.Event:
        """The program's next event. Raises Ended, RemoteProtocolError."""
        while True:
            event = server.next_event()
            if event is h11.NEED_DATA:
                if server.they_are_waiting_for_100_continue:
                    go_on = h11.InformationalResponse(status_code=100, headers=[])
                    await self.write(server.send(go_on) or b"")
                if self._buffer:
                    data, self._buffer = self._buffer, b""
                else:
                    data = await self._more()
                server.receive_data(data)
            elif event is h11.PAUSED:
                raise Ended
            else:
                return cast("h11.Event", event)

    async def _refuse(self, server: h11.Connection, refusal: Refusal) -> None:
        """Say why, as text or as JSON, and close the connection."""
        if server.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            return
        host, port = shown(self._work.host), self._work.port
        told = {
            "code": "network_refused" if refusal.outcome == "refused" else "network_failed",
            "reason": refusal.why,
            "message": refusal.text,
            "host": host,
            "port": port,
            "list": refusal.verdict.layer,
        }
        body = json.dumps({"error": told}).encode() + b"\n"
        text = "".join(c if " " <= c <= "~" else "?" for c in refusal.text)
        reason = text.strip().encode()
        headers = [
            (b"Content-Type", b"application/json"),
            (b"Content-Length", str(len(body)).encode()),
            (b"Connection", b"close"),
            (b"X-Network-Reason", reason),
        ]
        answer = h11.Response(status_code=refusal.status, headers=headers, reason=reason[:200])
        # Of a program that broke the protocol the connection takes no answer any more.
        plain = h11.Connection(h11.SERVER)
        plain.receive_data(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        plain.next_event()
        await self.write((plain.send(answer) or b"") + (plain.send(h11.Data(data=body)) or b""))
        await self._linger()

    async def _linger(self) -> None:
        """Read what the program still sends, for a moment: a reset could overtake the answer."""
        self._writer.write_eof()
        left = LINGER_BYTES
        async with asyncio.timeout(LINGER_SECONDS):
            while left > 0 and (data := await self._reader.read(PIECE)):
                left -= len(data)

    async def _serve_request(
        self, server: h11.Connection, request: h11.Request, tunnel: Target | None
    ) -> None:
        """Raises Refusal, Ended, RemoteProtocolError."""
        target = self._target_of(request, tunnel)
        named = None
        if tunnel is None and target.port == 80:
            named = self._gate.network.upstream_credential(target.host)
        if named is not None:
            target = _at_upstream(named, target)
            self._work.host, self._work.port = target.host, target.port
        self._work.method, self._work.path = target.method, target.path
        _check_framing(request)
        verdict = self._work.verdict = self._judge(target)
        self._check_overrides(request, target)
        self._hold.target = target
        placed = self._place(request, target, verdict, named)
        is_tls = target.scheme == "https"
        upstream, to_upstream = await self._connect(target, verdict, is_tls=is_tls)
        self._work.credential = ", ".join(each.label for each in placed.used)
        mask = self._gate.mask_for(target.host)
        exchange = Exchange(
            self.next_event, self.write, server, upstream, to_upstream, mask, self._hold.note_answer
        )
        attempt = partial(self._work.attempt, "failed", verdict, "ended")
        try:
            await exchange.carry(request, placed.path, placed.headers)
            attempt = partial(self._work.attempt, "allowed", verdict)
        except asyncio.CancelledError:
            if self._hold.is_answered:
                attempt = partial(self._work.attempt, "allowed", verdict)
            raise
        except (h11.ProtocolError, OSError, Unmaskable) as error:
            why = "packed" if isinstance(error, Unmaskable) else "unreachable"
            attempt = partial(self._work.attempt, "failed", verdict, why)
            said = str(error) or "no answer in time."
            if isinstance(error, h11.ProtocolError):
                # What follows is of the server, and may have a value that it was sent.
                said = said.partition(":")[0]
            if server.our_state is h11.SEND_RESPONSE:
                where = f"{target.host}:{target.port}"
                await self._refuse(server, Refusal(why, f"{where}: {said}", 502, verdict))
            raise Ended from None
        finally:
            self._hold.target = None
            to_upstream.transport.abort()
            self._record(attempt())
            self._hold.is_answered = False

    def _check_overrides(self, request: h11.Request, target: Target) -> None:
        """Raises Refusal for a request by which a server may do another than the one judged."""
        found = [name.decode() for name, _ in request.headers if name in _OVERRIDES]
        network = self._gate.network
        if found and (
            network.credentials_for(target)
            or not network.judge(Target(target.host, target.port, target.scheme)).is_allowed
        ):
            text = f"{target.host} is judged by method and path, which {found[0]} would change."
            raise Refusal("mismatch", text)

    def _place(
        self, request: h11.Request, target: Target, verdict: Verdict, named: Credential | None
    ) -> Placed:
        """The request with its credentials, that of a named upstream alone. Raises Refusal."""
        bound = self._gate.network.credentials_for(target)
        others = [each for each in passed_on(request.headers) if each[0].lower() != b"host"]
        headers = [(b"Host", _host_of(target).encode()), *others]
        try:
            if named is None:
                placed = put_in(bound, target.path, headers)
            elif named not in bound:
                raise Misplaced(named.name, ("upstream", named.upstream))
            else:
                placed = put_in([named], target.path, headers, always=True)
        except Misplaced as error:
            raise Refusal(
                "credential",
                f"{target.method} {target.scheme}://{target.host}: {error} An administrator can "
                "bind it to more hosts, methods and paths.",
                verdict=verdict,
            ) from None
        return placed

    def _target_of(self, request: h11.Request, tunnel: Target | None) -> Target:
        """Raises Refusal."""
        target = request.target.decode("latin-1")
        if tunnel is None:
            found = _ABSOLUTE.fullmatch(target)
            if found is None:
                if target.lower().startswith("https:"):
                    raise Refusal("malformed", f"https needs CONNECT. {_HELP}", 400)
                raise Refusal("malformed", _HELP, 400)
            host, port = self._name(found[1], found[2] or "80")
            path = found[3] or "/"
            path = path if path.startswith("/") else f"/{path}"
            scheme = "http"
        else:
            host, port, scheme, path = tunnel.host, tunnel.port, tunnel.scheme, target
            self._work.host, self._work.port = host, port
            if "#" in path or (not path.startswith("/") and path != "*"):
                raise Refusal("mismatch", "A request in a tunnel begins with its path.", 400)
        hosts = [value.decode("latin-1") for name, value in request.headers if name == b"host"]
        usual = 443 if scheme == "https" else 80
        if len(hosts) != 1 or not self._is_same(hosts[0], host, port, usual):
            raise Refusal("mismatch", f"The header Host is not {host}:{port}.", 400)
        return Target(host, port, scheme, request.method.decode(), path)

    def _is_same(self, authority: str, host: str, port: int, usual: int = 80) -> bool:
        found = re.fullmatch(r"(\[[0-9A-Fa-f:.]+\]|[^\s:/?#@\\\[\]]+)(?::(\d{1,5}))?", authority)
        try:
            return (
                found is not None
                and normalized_host(found[1].strip("[]")) == host
                and int(found[2] or usual) == port
            )
        except ValueError:
            return False

    # Tunnels.

    async def _serve_connect(self, server: h11.Connection, request: h11.Request) -> None:
        """Raises Refusal, Ended."""
        found = _AUTHORITY.fullmatch(request.target.decode("latin-1"))
        if found is None:
            raise Refusal("malformed", f"CONNECT names a host and a port. {_HELP}", 400)
        host, port = self._name(found[1], found[2])
        for name, value in request.headers:
            if name in (b"content-length", b"transfer-encoding"):
                raise Refusal("malformed", "CONNECT has no body.", 400)
            if name == b"host" and value.decode("latin-1") not in ("", found[0]):
                named = value.decode("latin-1")
                if not self._is_same(named if ":" in named else f"{named}:{port}", host, port):
                    raise Refusal("mismatch", f"The header Host is not {host}:{port}.", 400)
        await self.next_event(server)

        async def accept() -> None:
            await self.write(server.send(h11.Response(status_code=200, headers=[])) or b"")
            self._buffer = server.trailing_data[0] + self._buffer

        await self._tunnel(host, port, accept)

    async def _tunnel(self, host: str, port: int, accept: Accept) -> None:
        """Judge, connect, `accept`, and look at what the program then says. Raises Refusal."""
        target = Target(host, port, "https")
        verdict = self._work.verdict = self._gate.judge(target)
        upstream = None
        if verdict.is_allowed and not self._gate.opens_tls(host, port):
            # From now on: a change of the rules ends it before it says anything, too.
            self._hold.target = target
            upstream = await self._connect(target, verdict)
        elif not self._gate.network.may_allow(host, port).is_allowed:
            raise self._not_allowed(target, verdict)
        try:
            await accept()
            async with in_time(HEAD_SECONDS):
                first = await self._peek(1)
            if first == b"\x16":
                await self._serve_tls(target, verdict, upstream)
                return
        finally:
            self._hold.target = None
            if upstream is not None:
                upstream[1].transport.abort()
        async with in_time(HEAD_SECONDS):
            while (line := self._buffer[:11]) and len(line) < 11 and b" " not in line:
                await self._peek(len(line) + 1)
        if not _METHOD.match(line):
            self._end(Refusal("protocol", "", verdict=verdict))
            raise Ended
        await self._serve_http(Target(host, port, "http"))

    async def _serve_tls(
        self,
        target: Target,
        verdict: Verdict,
        upstream: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None,
    ) -> None:
        """Raises Ended."""
        try:
            async with in_time(HEAD_SECONDS):
                while isinstance(name := hello.server_name(self._buffer), int):
                    await self._peek(name)
        except hello.Malformed:
            self._end(Refusal("malformed", "", verdict=verdict))
            raise Ended from None
        wanted = "" if literal(target.host) is not None else target.host
        if _plain(name) != wanted:
            self._end(Refusal("mismatch", "", verdict=verdict))
            raise Ended
        if upstream is None:
            await self._open_tls(target, verdict)
            return
        try:
            await self._pipe(*upstream)
        finally:
            why = "budget" if self._gate.is_spent else ""
            self._record(self._work.attempt("allowed", verdict, why))

    async def _open_tls(self, target: Target, verdict: Verdict) -> None:
        """Be the host for the program, and serve its requests. Raises Ended."""
        context = self._gate.context_for(target.host)
        if context is None or not self._gate.opens_tls(target.host, target.port):
            self._end(self._not_allowed(target, verdict))
            raise Ended
        first, self._buffer = self._buffer, b""
        stream = TlsStream(*self._ends, context, first)
        try:
            async with in_time(HEAD_SECONDS):
                await stream.handshake()
        except ssl.SSLError:
            self._end(Refusal("trust", "", verdict=verdict))
            raise Ended from None
        self._reader = self._writer = stream
        try:
            await self._serve_http(target)
        finally:
            stream.write_eof()

    async def _pipe(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass on what both say until both have ended, or nothing passes for too long."""
        loop = asyncio.get_running_loop()
        moved = loop.time()

        def count(size: int) -> None:
            nonlocal moved
            moved = loop.time()
            if not self._gate.count(size):
                raise Ended

        def count_sent(size: int) -> None:
            self._work.sent += size
            count(size)

        def count_received(size: int) -> None:
            self._work.received += size
            count(size)

        async def send(first: bytes, own: socket.socket, theirs: socket.socket) -> None:
            writer.write(self._buffer + first)
            await writer.drain()
            await relay(own, theirs, count_sent)
            theirs.shutdown(socket.SHUT_WR)

        async def receive(first: bytes, own: socket.socket, theirs: socket.socket) -> None:
            self._ends[1].write(first)
            await self._ends[1].drain()
            await relay(theirs, own, count_received)
            own.shutdown(socket.SHUT_WR)

        async def watch() -> None:
            while (left := moved + IDLE_SECONDS - loop.time()) > 0:
                await asyncio.sleep(left)

        first, own = await detach(*self._ends)
        with own:
            count_sent(len(first))
            answer, theirs = await detach(reader, writer)
            with theirs:
                count_received(len(answer))
                works = [send(first, own, theirs), receive(answer, own, theirs)]
                await _until_one_fails(works, watch())

    # SOCKS5 (RFC 1928).

    async def _serve_socks(self) -> None:
        """Raises Ended."""
        async with in_time(HEAD_SECONDS):
            asked = await self._read_socks()
        if asked is None:
            return
        command, host, port = asked
        accepted = False

        async def accept() -> None:
            nonlocal accepted
            accepted = True
            await self.write(_socks_answer(0))

        try:
            self._begin()
            self._work.host, self._work.port = host, port
            if command != 1:
                raise Refusal("protocol", "Only CONNECT.", 7)
            await self._tunnel(*self._name(host, str(port)), accept)
        except Refusal as refusal:
            self._end(refusal)
            if not accepted:
                code = {502: 4, 7: 7}.get(refusal.status, 2)
                await self.write(_socks_answer(code))

    async def _read_socks(self) -> tuple[int, str, int] | None:
        """Command, host and port; None for what is refused without a host. Raises Ended."""
        _, count = await self._take(2)
        if 0 not in await self._take(count):
            await self.write(b"\x05\xff")
            return None
        await self.write(b"\x05\x00")
        version, command, _, kind = await self._take(4)
        if version != 5:
            return None
        if kind == 1:
            host = socket.inet_ntop(socket.AF_INET, await self._take(4))
        elif kind == 4:
            host = socket.inet_ntop(socket.AF_INET6, await self._take(16))
        elif kind == 3:
            (size,) = await self._take(1)
            host = (await self._take(size)).decode("latin-1")
        else:
            await self.write(_socks_answer(8))
            return None
        return command, host, int.from_bytes(await self._take(2), "big")


def _at_upstream(credential: Credential, target: Target) -> Target:
    """What a request to a named upstream is for."""
    upstream = read_upstream(credential.upstream)
    path = upstream.path + target.path
    return Target(upstream.host, upstream.port, "https", target.method, path)


def _host_of(target: Target) -> str:
    """The header Host in its one form."""
    host = f"[{target.host}]" if ":" in target.host else target.host
    return (
        host
        if target.port == {"https": 443, "http": 80}[target.scheme]
        else f"{host}:{target.port}"
    )


def _check_framing(request: h11.Request) -> None:
    """Raises Refusal for a request whose end servers may see at different places."""
    names = [name for name, _ in request.headers]
    if b"transfer-encoding" in names and b"content-length" in names:
        raise Refusal("malformed", "A request has one length.", 400)


def _plain(name: str) -> str:
    try:
        return normalized_host(name) if name else ""
    except ValueError:
        return "\0"


def _socks_answer(code: int) -> bytes:
    return bytes((5, code, 0, 1)) + bytes(6)


async def _until_one_fails(
    works: list[Coroutine[Any, Any, None]], limit: Coroutine[Any, Any, None]
) -> None:
    """Wait until all have ended, one has failed, or the limit has ended. Raises what one raised."""
    tasks = [asyncio.create_task(each) for each in works]
    limiting = asyncio.create_task(limit)
    pending = set(tasks)
    try:
        while pending and not limiting.done():
            done, _ = await asyncio.wait({*pending, limiting}, return_when=asyncio.FIRST_COMPLETED)
            pending -= done
            for task in done - {limiting}:
                task.result()
    finally:
        for task in (*tasks, limiting):
            task.cancel()
        await asyncio.gather(*tasks, limiting, return_exceptions=True)


async def _close(writer: asyncio.StreamWriter) -> None:
    """Let the program take what is left, and break off when it does not."""
    writer.close()
    try:
        async with asyncio.timeout(IDLE_SECONDS):
            await writer.wait_closed()
    except (OSError, asyncio.CancelledError):
        writer.transport.abort()


def _cancel(task: asyncio.Task[Any]) -> None:
    task.cancel()
