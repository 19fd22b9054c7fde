"""A program or a server that sends for ever."""

from __future__ import annotations

import asyncio
import tracemalloc

from providers.runtime.network.exchange import PIECE
from tests.attacks.network.proxied import (
    GOOD,
    Proxied,
    allowing,
    client_hello,
    error_of,
    get,
    read_all,
    read_head,
)

BUDGET = 4 << 20


def test_the_budget_ends_a_server_that_never_ends(proxied: Proxied) -> None:
    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        while True:
            writer.write(bytes(1 << 16))
            await writer.drain()

    port = proxied.server(flood)
    door = proxied.door(allowing(f"{GOOD}:{port}", bytes=BUDGET))
    with door.tunnel(GOOD, port) as sock:
        sock.sendall(client_hello(GOOD))
        received = len(read_all(sock))
    assert BUDGET // 2 < received <= BUDGET
    attempt = door.only()
    assert attempt.received <= BUDGET + PIECE
    told = error_of(door.talk(get(GOOD, port)))
    assert (told["reason"], str(BUDGET) in told["message"]) == ("budget", True)


def test_the_budget_ends_a_program_that_never_ends(proxied: Proxied) -> None:
    taken = 0

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal taken
        while data := await reader.read(1 << 16):
            taken += len(data)

    port = proxied.server(take)
    door = proxied.door(allowing(f"{GOOD}:{port}", bytes=BUDGET))
    asked = get(GOOD, port, "/", "Transfer-Encoding: chunked", method="POST")
    with door.connect() as sock:
        try:
            sock.sendall(asked)
            while True:
                sock.sendall(b"10000\r\n" + bytes(1 << 16) + b"\r\n")
        except ConnectionError:
            pass
    assert BUDGET // 2 < taken <= BUDGET
    assert door.only().outcome == "failed"


def test_a_program_that_does_not_read_costs_a_bounded_buffer(proxied: Proxied) -> None:
    sent = 0

    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await reader.read(1)
        while True:
            writer.write(bytes(1 << 16))
            await writer.drain()
            sent += 1 << 16

    port = proxied.server(flood)
    door = proxied.door(allowing(f"{GOOD}:{port}"))
    tracemalloc.start()
    try:
        with door.tunnel(GOOD, port) as sock:
            sock.sendall(client_hello(GOOD))
            before = -1
            while sent != before:
                before = sent
                proxied.run(asyncio.sleep(0.3))
            _, most = tracemalloc.get_traced_memory()
            assert most < 4 << 20
    finally:
        tracemalloc.stop()


def test_requests_that_do_not_end_their_answer_are_bounded_too(proxied: Proxied) -> None:
    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        while True:
            writer.write(bytes(1 << 16))
            await writer.drain()

    port = proxied.server(flood)
    door = proxied.door(allowing(f"{GOOD}:{port}", bytes=BUDGET))
    with door.connect() as sock:
        sock.sendall(get(GOOD, port))
        assert read_head(sock).startswith(b"HTTP/1.1 200")
        assert len(read_all(sock)) <= BUDGET
    assert len(door.wait_until_idle()) == 1
