"""TLS of a program that ends here, over a connection from which bytes have been read already."""

from __future__ import annotations

import asyncio
import ssl
from contextlib import suppress

_PIECE = 256 * 1024
# What may come for each byte that is in it, and beyond that: new keys cost work and an answer, and
# are in no budget.
_MOST_TIMES, _MOST_BEYOND = 64, 1024 * 1024


class TlsStream:
    """Both ends of the connection, as `asyncio.StreamReader` and `StreamWriter` have them."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        context: ssl.SSLContext,
        first: bytes,
    ) -> None:
        """`first` are the bytes that have been read."""
        self._reader, self._writer = reader, writer
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._in.write(first)
        self._tls = context.wrap_bio(self._in, self._out, server_side=True)
        self._has_ended = False
        self._taken = self._given = 0

    @property
    def transport(self) -> asyncio.WriteTransport:
        return self._writer.transport

    async def handshake(self) -> None:
        """Raises ssl.SSLError, OSError."""
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                self._flush()
                await self._fill()
            except ssl.SSLError:
                # An alert says why.
                self._flush()
                raise
            else:
                self._flush()
                return

    async def read(self, size: int) -> bytes:
        """At most so many bytes, b"" at the end. Raises ssl.SSLError, OSError."""
        while not self._has_ended:
            try:
                data = self._tls.read(size)
                self._given += len(data)
                return data
            except ssl.SSLWantReadError:
                self._flush()
                await self._fill()
            except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
                return b""
        return await self._reader.read(size)

    def write(self, data: bytes) -> None:
        """Raises ssl.SSLError."""
        if data:
            self._tls.write(data)
            self._flush()

    async def drain(self) -> None:
        await self._writer.drain()

    def write_eof(self) -> None:
        """Say that nothing follows. What is read from here on is not decrypted any more."""
        if self._has_ended:
            return
        self._has_ended = True
        # It wants the other side's word, which is not waited for.
        with suppress(ssl.SSLError):
            self._tls.unwrap()
        self._flush()
        with suppress(OSError):
            self._writer.write_eof()

    def _flush(self) -> None:
        if data := self._out.read():
            self._writer.write(data)

    async def _fill(self) -> None:
        data = await self._reader.read(_PIECE)
        self._taken += len(data)
        if self._taken > _MOST_TIMES * self._given + _MOST_BEYOND:
            raise ssl.SSLError("records without content")
        if data:
            self._in.write(data)
        else:
            self._in.write_eof()
