"""A request that can be read and its response, both written anew."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any

import h11

from providers.runtime.network.masking import Mask, MaskedBody, Unpacked

HEAD_BYTES = 32 * 1024
IDLE_SECONDS = 300.0
# How many 1xx responses a server may send before its response.
MOST_INFORMED = 16
PIECE = 256 * 1024
# What a server may send for each byte of it that reaches the program, and beyond that. Budgets
# count what reaches the program.
_MOST_TIMES, _MOST_BEYOND = 4, 1024 * 1024

# Of this connection alone, or of the proxy (RFC 9110, section 7.6.1).
_OWN_HEADERS = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer "
    b"transfer-encoding upgrade expect".split()
)


# By which a program could get a value in pieces or packed.
_HIDING_HEADERS = frozenset((b"accept-charset", b"accept-encoding", b"range", b"if-range"))

Headers = list[tuple[bytes, bytes]]


class Ended(Exception):
    """The program has gone, or is too slow."""


class Unmaskable(Exception):
    """The response is packed in a way that hides what is in it."""


class Exchange:
    """Carries one request and its response between a program and a server."""

    def __init__(
        self,
        next_event: Callable[[h11.Connection], Awaitable[h11.Event]],
        write: Callable[[bytes], Awaitable[None]],
        server: h11.Connection,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        mask: Mask | None,
        on_end: Callable[[], None],
    ) -> None:
        """`next_event` and `write` are of the program, `reader` and `writer` of the server. What
        the server says is masked by `mask`. `on_end` is called when the program is given the end of
        the response."""
        self._next_event, self._write = next_event, write
        self._server = server
        self._reader, self._writer = reader, writer
        self._mask = mask
        self._on_end = on_end
        self._body: MaskedBody | None = None
        self._unpacked: Unpacked | None = None
        self._taken = self._given = 0
        self._client = h11.Connection(h11.CLIENT, max_incomplete_event_size=2 * HEAD_BYTES)

    async def carry(self, request: h11.Request, path: str, headers: Headers) -> None:
        """Send the request with this path and these headers, and its body; return the response.

        Raises RemoteProtocolError, OSError, Ended, Unmaskable.
        """
        sent = [*headers, (b"Connection", b"close")]
        if any(name == b"transfer-encoding" for name, _ in request.headers):
            sent.append((b"Transfer-Encoding", b"chunked"))
        if self._mask is not None:
            # Neither packed nor in parts: a value could not be found.
            sent = [each for each in sent if each[0].lower() not in _HIDING_HEADERS]
            sent.append((b"Accept-Encoding", b"identity"))
        asked = h11.Request(method=request.method, target=path, headers=sent)
        await self._send(self._client.send(asked))
        body = asyncio.create_task(self._send_body())
        try:
            await self._receive()
        finally:
            body.cancel()
            await asyncio.gather(body, return_exceptions=True)

    async def _send_body(self) -> None:
        try:
            while True:
                async with in_time(IDLE_SECONDS):
                    event = await self._next_event(self._server)
                if isinstance(event, h11.Data):
                    await self._send(self._client.send(event))
                else:
                    await self._send(self._client.send(h11.EndOfMessage()))
                    return
        except h11.LocalProtocolError:
            # The server has ended its part.
            return
        except (Ended, h11.RemoteProtocolError):
            self._writer.transport.abort()

    async def _send(self, data: bytes | None) -> None:
        self._writer.write(data or b"")
        await self._writer.drain()

    async def _receive(self) -> None:
        informed = 0
        while True:
            event = self._client.next_event()
            if event is h11.NEED_DATA:
                self._client.receive_data(await self._read())
                continue
            if isinstance(event, h11.InformationalResponse):
                informed += 1
                if informed > MOST_INFORMED:
                    raise h11.RemoteProtocolError("the server sends no end of 1xx responses")
                continue
            if isinstance(event, h11.Response):
                await self._pass_on(self._answer(event))
            elif isinstance(event, h11.Data):
                await self._pass_on_body(bytes(event.data))
            elif isinstance(event, h11.EndOfMessage):
                await self._pass_on_end()
                return
            else:
                raise h11.RemoteProtocolError("the server sent no response")

    async def _read(self) -> bytes:
        async with asyncio.timeout(IDLE_SECONDS):
            data = await self._reader.read(PIECE)
        self._taken += len(data)
        if self._taken > _MOST_TIMES * self._given + _MOST_BEYOND:
            raise h11.RemoteProtocolError("the server sends much that says nothing")
        return data

    def _answer(self, response: h11.Response) -> h11.Response:
        """The head of the response for the program. Raises Unmaskable."""
        headers, reason = passed_on(response.headers), response.reason
        if (mask := self._mask) is not None:
            headers = self._unpack(response, headers)
            headers = [(mask.apply(name), mask.apply(value)) for name, value in headers]
            reason = mask.apply(reason)
            self._body = MaskedBody(mask)
        return h11.Response(status_code=response.status_code, headers=headers, reason=reason)

    def _unpack(self, response: h11.Response, headers: Headers) -> Headers:
        """Headers of the body as it is once it is unpacked. Raises Unmaskable."""
        if response.status_code == 206:
            raise Unmaskable("the server sent a part that was not asked for.")
        packings = [
            word.strip().lower()
            # All of them: one that its Connection names says how it is packed all the same.
            for name, value in response.headers
            if name == b"content-encoding"
            for word in value.split(b",")
        ]
        packings = [each for each in packings if each not in (b"", b"identity")]
        if not packings:
            return headers
        if len(packings) > 1 or packings[0] not in (b"gzip", b"x-gzip", b"deflate"):
            raise Unmaskable("the server sent a body that cannot be unpacked.")
        self._unpacked = Unpacked()
        gone = (b"content-encoding", b"content-length")
        return [each for each in headers if each[0].lower() not in gone]

    async def _pass_on_body(self, piece: bytes) -> None:
        if self._body is None:
            await self._pass_on(h11.Data(data=piece))
            return
        await self._mask_and_pass_on(
            self._body, self._unpacked.feed(piece) if self._unpacked else (piece,)
        )

    async def _pass_on_end(self) -> None:
        self._on_end()
        if self._body is not None:
            await self._mask_and_pass_on(self._body, self._unpacked.end() if self._unpacked else ())
            if rest := self._body.end():
                await self._pass_on(h11.Data(data=rest))
        await self._pass_on(h11.EndOfMessage())

    async def _mask_and_pass_on(self, body: MaskedBody, pieces: Iterable[bytes]) -> None:
        try:
            for plain in pieces:
                if masked := body.feed(plain):
                    await self._pass_on(h11.Data(data=masked))
        except zlib.error:
            raise Unmaskable("the server sent a body that cannot be unpacked.") from None

    async def _pass_on(self, event: h11.Event) -> None:
        data = self._server.send(event) or b""
        self._given += len(data)
        await self._write(data)


def passed_on(headers: Any) -> Headers:
    """Those that are meant for the other side. What frames a message is not for `Connection`."""
    names = {name for name, _ in headers}
    own = _OWN_HEADERS | ({b"content-length"} if b"transfer-encoding" in names else set())
    named = {
        word.strip().lower()
        for name, value in headers
        if name == b"connection"
        for word in value.split(b",")
    } - {b"host", b"content-length"}
    return [
        (name, value)
        for name, value in headers.raw_items()
        if name.lower() not in own and name.lower() not in named
    ]


@asynccontextmanager
async def in_time(seconds: float) -> AsyncIterator[None]:
    """Raise Ended where what is read here has not come as a whole after so many seconds."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise Ended from None
