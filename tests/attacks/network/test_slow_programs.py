"""Programs that send a byte now and then, or nothing, or do not read."""

from __future__ import annotations

import asyncio
import os
import socket
from contextlib import suppress

import pytest

from providers.runtime.network import connections
from tests.attacks.network.proxied import (
    BOUND_SECONDS,
    GOOD,
    Door,
    Proxied,
    allowing,
    client_hello,
    connect_head,
    get,
    read_all,
    status_of,
)
from tests.support.waiting import wait_until


@pytest.fixture(autouse=True)
def _hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.6)
    monkeypatch.setattr(connections, "IDLE_SECONDS", 0.6)
    monkeypatch.setattr(connections, "LINGER_SECONDS", 0.3)


def open_sockets() -> int:
    found = 0
    for each in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            found += os.readlink(f"/proc/self/fd/{each}").startswith("socket:")
    return found


def drip(sock: socket.socket, said: bytes) -> int:
    """Send a byte each tenth of a second until the proxy ends it; how many it took."""
    sock.settimeout(0.1)
    for at in range(len(said)):
        try:
            sock.sendall(said[at : at + 1])
            if not sock.recv(1):
                return at
        except TimeoutError:
            continue
        except ConnectionError:
            return at
    return len(said)


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
        assert drip(sock, said) < 25
    assert len(door.wait_until_idle()) == (kind in ("hello", "inner"))
    assert status_of(door.talk(get(GOOD, upstream.port))) == 200


def silent(proxied: Proxied, *, greeting: bytes = b"") -> tuple[int, Door]:
    async def hold(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(greeting)
        while await reader.read(1 << 16):
            continue

    port = proxied.server(hold)
    return port, proxied.door(allowing(f"{GOOD}:{port}"))


def test_an_idle_tunnel_is_ended(proxied: Proxied) -> None:
    port, door = silent(proxied)
    with door.tunnel(GOOD, port) as sock:
        sock.sendall(client_hello(GOOD))
        assert read_all(sock) == b""
    assert door.only().outcome == "allowed"


def test_a_tunnel_in_which_only_the_server_speaks_is_not_idle(proxied: Proxied) -> None:
    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(25):
            writer.write(b"x")
            await asyncio.sleep(0.1)

    port = proxied.server(speak)
    door = proxied.door(allowing(f"{GOOD}:{port}"))
    with door.tunnel(GOOD, port) as sock:
        sock.sendall(client_hello(GOOD))
        assert read_all(sock) == b"x" * 25


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
    assert len(door.wait_for(2)) == 2
    door.wait_until_idle()
    wait_until(lambda: open_sockets() == before + len(held), BOUND_SECONDS)
    for sock in held:
        sock.close()


def test_a_slow_server_is_given_up(proxied: Proxied) -> None:
    port, door = silent(proxied, greeting=b"HTTP/1.1 200 OK\r\nX: ")
    answer = door.talk(get(GOOD, port))
    assert status_of(answer) == 502
    assert door.only().outcome == "failed"
