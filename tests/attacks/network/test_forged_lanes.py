"""A sandbox that writes what it likes into the stream of its connections."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from functools import partial
from typing import cast

import pytest

from providers.runtime.guest import lanes
from providers.runtime.network import lane_stream
from providers.runtime.network.connections import serve
from providers.runtime.network.lane_stream import MOST_LANES, LaneStream
from tests.attacks.network.proxied import (
    BOUND_SECONDS,
    GOOD,
    Door,
    Proxied,
    Upstream,
    allowing,
    get,
    read_all,
    status_of,
)
from tests.support.waiting import wait_until


class Guest:
    """The sandbox's end of a stream."""

    def __init__(self, proxied: Proxied, door: Door) -> None:
        self.sock, theirs = socket.socketpair()
        self.sock.settimeout(BOUND_SECONDS)
        self.accepted = 0
        tasks = set()

        async def serve_one(end: socket.socket) -> None:
            reader, writer = await asyncio.open_connection(sock=end)
            await serve(reader, writer, door.gate, proxied.dialer)

        def accept(end: socket.socket) -> None:
            self.accepted += 1
            task = asyncio.ensure_future(serve_one(end))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

        async def begin() -> tuple[asyncio.Transport, LaneStream]:
            loop = asyncio.get_running_loop()
            made, stream = await loop.create_connection(lambda: LaneStream(accept), sock=theirs)
            return cast("asyncio.Transport", made), stream

        self.transport, self._stream = proxied.run(begin())
        self._proxied = proxied

    def has_ended(self, count: int) -> bool:
        """Whether so many connections were begun, or are not read, and none is left."""

        def look() -> bool:
            if not self.transport.is_reading():
                return True
            return self.accepted == count and not self._stream._lanes

        return self._proxied.call(look)

    def fetch(self, lane: int, said: bytes) -> bytes:
        """What is answered to a connection."""
        self.sock.sendall(lanes.pack(lane, lanes.START) + lanes.pack(lane, lanes.DATA, said))
        parser, found = lanes.Parser(), b""
        while data := self.sock.recv(1 << 16):
            for number, kind, content in parser.feed(data):
                if (number, kind) == (lane, lanes.END):
                    return found
                if (number, kind) == (lane, lanes.DATA):
                    found += content
        return found


@pytest.fixture
def upstream(proxied: Proxied) -> Upstream:
    return proxied.upstream()


@pytest.fixture
def door(proxied: Proxied, upstream: Upstream) -> Door:
    return proxied.door(allowing(upstream.rule))


@pytest.fixture
def guest(proxied: Proxied, door: Door) -> Iterator[Guest]:
    found = Guest(proxied, door)
    yield found
    found.sock.close()


FORGED = {
    "garbage": b"\xff" * 100,
    "an unknown kind": lanes.HEAD.pack(1, 99, 0),
    "a message without end": lanes.HEAD.pack(1, lanes.DATA, 1 << 31),
    "a lane twice": lanes.pack(1, lanes.START) * 2,
    "a message of a host": lanes.pack(1, lanes.START) + lanes.pack(1, lanes.ENDED),
    "credit too large": lanes.pack(1, lanes.START) + lanes.pack_credit(1, 1),
    "credit of nothing": lanes.pack(1, lanes.START) + lanes.pack(1, lanes.CREDIT, bytes(4)),
    "credit in pieces": lanes.pack(1, lanes.START) + lanes.pack(1, lanes.CREDIT, b"\1"),
    "too many lanes": b"".join(lanes.pack(each, lanes.START) for each in range(MOST_LANES + 1)),
    "data after the end": lanes.pack(1, lanes.START)
    + lanes.pack(1, lanes.DATA, b"C")
    + lanes.pack(1, lanes.END)
    + lanes.pack(1, lanes.DATA, b"x"),
}


@pytest.mark.parametrize("forged", FORGED)
def test_a_forged_stream_ends_and_nothing_else(
    proxied: Proxied, door: Door, upstream: Upstream, guest: Guest, forged: str
) -> None:
    guest.sock.sendall(FORGED[forged])
    read_all(guest.sock)
    door.wait_until_idle()
    assert upstream.connections == 0
    other = Guest(proxied, door)
    with other.sock:
        assert status_of(other.fetch(7, get(GOOD, upstream.port))) == 200


@pytest.mark.parametrize("kind", [lanes.DATA, lanes.CREDIT, lanes.END])
def test_a_lane_that_is_not_there_is_passed_over(
    upstream: Upstream, guest: Guest, kind: int
) -> None:
    guest.sock.sendall(lanes.pack(99, kind, b"GET / HTTP/1.1\r\n\r\n"))
    assert status_of(guest.fetch(1, get(GOOD, upstream.port))) == 200
    assert guest.accepted == 1


def test_a_sandbox_that_begins_and_ends_and_never_reads_is_not_read_from(
    proxied: Proxied, door: Door, upstream: Upstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each end of a lane has an answer, which waits in the proxy."""
    monkeypatch.setattr(lane_stream, "MOST_WAITING", 1024)
    guest = Guest(proxied, door)
    with guest.sock:
        first = 0
        while proxied.call(guest.transport.is_reading) and first < 100_000:
            batch = range(first, first + 100)
            guest.sock.sendall(b"".join(lanes.pack(each, lanes.START) for each in batch))
            guest.sock.sendall(b"".join(lanes.pack(each, lanes.END) for each in batch))
            first += 100
            wait_until(partial(guest.has_ended, first), BOUND_SECONDS)
        assert not proxied.call(guest.transport.is_reading)
        assert proxied.call(guest.transport.get_write_buffer_size) < 64 * 1024
        # It goes on with the sandbox.
        assert status_of(guest.fetch(first, get(GOOD, upstream.port))) == 200


def unread_stream(proxied: Proxied) -> tuple[socket.socket, list[socket.socket]]:
    """The sandbox's end of a stream, and the connections that nothing reads."""
    ours, theirs = socket.socketpair()
    ours.settimeout(BOUND_SECONDS)
    unread: list[socket.socket] = []

    async def begin() -> None:
        loop = asyncio.get_running_loop()
        await loop.create_connection(lambda: LaneStream(unread.append), sock=theirs)

    proxied.run(begin())
    return ours, unread


def test_bytes_beyond_the_credit_end_the_stream(proxied: Proxied) -> None:
    """Of a connection that nothing reads, so that no credit is given again."""
    ours, unread = unread_stream(proxied)
    with ours:
        ours.sendall(lanes.pack(1, lanes.START))
        ours.sendall(lanes.pack(1, lanes.DATA, bytes(lanes.WINDOW)) * 2)
        assert read_all(ours) == b""
    for end in unread:
        end.close()


@pytest.mark.parametrize("size", [1, 1 << 12, 1 << 16, 1 << 17, lanes.WINDOW])
def test_whatever_was_taken_is_credit_again_once_it_is_read(proxied: Proxied, size: int) -> None:
    """However little of it had to wait, or the lane would wait for ever."""
    ours, unread = unread_stream(proxied)
    with ours:
        ours.sendall(lanes.pack(1, lanes.START))
        ours.sendall(lanes.pack(1, lanes.DATA, bytes(lanes.WINDOW - size)))
        ours.sendall(lanes.pack(1, lanes.DATA, bytes(size)))
        wait_until(lambda: bool(unread), BOUND_SECONDS)
        unread[0].settimeout(BOUND_SECONDS)
        left = lanes.WINDOW
        while left:
            left -= len(unread[0].recv(left))
        parser, given = lanes.Parser(), 0
        while given < lanes.WINDOW:
            for number, kind, content in parser.feed(ours.recv(1 << 16)):
                assert (number, kind) == (1, lanes.CREDIT)
                given += lanes.credit(content)
    unread[0].close()
