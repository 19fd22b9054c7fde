"""Programs that send a byte now and then, or nothing, or do not read."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from contextlib import suppress
from functools import partial

import pytest

from providers.runtime.network.connections import HEAD_SECONDS
from providers.runtime.network.exchange import IDLE_SECONDS
from tests.attacks.network.proxied import (
    BOUND_SECONDS,
    GOOD,
    Proxied,
    allowing,
    client_hello,
    connect_head,
    get,
    read_all,
    read_while_time_passes,
    status_of,
)
from tests.support.waiting import wait_until


def open_sockets() -> int:
    found = 0
    for each in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            found += os.readlink(f"/proc/self/fd/{each}").startswith("socket:")
    return found


@pytest.mark.parametrize("kind", ["plain", "connect", "socks", "hello", "inner"])
def test_a_head_that_drips_is_ended_as_a_whole(proxied: Proxied, kind: str) -> None:
    upstream = proxied.upstream()
    door = proxied.door(allowing(upstream.rule))
    if kind in ("hello", "inner"):
        sock = door.tunnel(GOOD, upstream.port)
        inner = f"GET / HTTP/1.1\r\nHost: {upstream.rule}\r\n\r\n".encode()
        said = client_hello(GOOD) if kind == "hello" else inner
    else:
        sock = door.connect()
        said = {
            "plain": get(GOOD, upstream.port),
            "connect": connect_head(GOOD, upstream.port),
            "socks": b"\x05" + bytes([200]) + bytes(200),
        }[kind]
    with sock:
        for at in range(7):
            with suppress(ConnectionError):
                sock.sendall(said[at : at + 1])
            proxied.pass_time(HEAD_SECONDS / 5)
        # Whatever came of it in between, a head has its time as a whole.
        read_all(sock)
    assert len(door.wait_until_idle()) == (kind in ("hello", "inner"))
    assert status_of(door.talk(get(GOOD, upstream.port))) == 200


class Silent:
    """A server that hears what it is sent, and says no more than its greeting."""

    def __init__(self, proxied: Proxied, greeting: bytes = b"") -> None:
        self.has_heard = threading.Event()
        self.writer: asyncio.StreamWriter | None = None
        self._greeting = greeting
        self.port = proxied.server(self._hold)
        self.door = proxied.door(allowing(f"{GOOD}:{self.port}"))

    async def _hold(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writer = writer
        writer.write(self._greeting)
        while await reader.read(1 << 16):
            self.has_heard.set()

    def tunnel(self) -> socket.socket:
        """One whose first message has arrived."""
        sock = self.door.tunnel(GOOD, self.port)
        sock.sendall(client_hello(GOOD))
        assert self.has_heard.wait(BOUND_SECONDS)
        return sock


def test_an_idle_tunnel_is_ended(proxied: Proxied) -> None:
    server = Silent(proxied)
    with server.tunnel() as sock:
        proxied.pass_time(IDLE_SECONDS + 1)
        assert read_all(sock) == b""
    assert server.door.only().outcome == "allowed"


def test_a_tunnel_in_which_only_the_server_speaks_is_not_idle(proxied: Proxied) -> None:
    server = Silent(proxied)
    with server.tunnel() as sock:
        for _ in range(8):
            assert server.writer is not None
            proxied.call(partial(server.writer.write, b"x"))
            assert sock.recv(1) == b"x"
            proxied.pass_time(IDLE_SECONDS * 0.4)
        proxied.call(server.writer.close)
        assert read_all(sock) == b""
    assert server.door.only().received > 8


def test_a_program_that_does_not_read_leaves_no_socket(proxied: Proxied) -> None:
    """Its last bytes wait in the proxy, which counts it until they are gone or given up."""

    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(bytes(64 << 20))
        await writer.drain()

    port = proxied.server(flood)
    door = proxied.door(allowing(f"{GOOD}:{port}", connections=2))
    held: list[socket.socket] = []
    before = open_sockets()
    for _ in range(2):
        sock = door.tunnel(GOOD, port)
        sock.sendall(client_hello(GOOD))
        sock.shutdown(socket.SHUT_WR)
        held.append(sock)

    def is_gone() -> bool:
        proxied.pass_time(IDLE_SECONDS + 1)
        return open_sockets() == before + len(held)

    wait_until(is_gone, BOUND_SECONDS)
    assert len(door.wait_until_idle()) == 2
    for sock in held:
        sock.close()


def test_a_slow_server_is_given_up(proxied: Proxied) -> None:
    server = Silent(proxied, b"HTTP/1.1 200 OK\r\nX: ")
    with server.door.connect() as sock:
        sock.sendall(get(GOOD, server.port))
        assert server.has_heard.wait(BOUND_SECONDS)
        answer = read_while_time_passes(proxied, sock, IDLE_SECONDS + 1)
    assert status_of(answer) == 502
    assert server.door.only().outcome == "failed"
