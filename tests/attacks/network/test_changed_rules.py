"""Connections that were begun under rules which do not allow them any more."""

from __future__ import annotations

import asyncio
import threading

import pytest

from tests.attacks.network.proxied import (
    GOOD,
    Proxied,
    allowing,
    client_hello,
    get,
    read_all,
    read_head,
)


@pytest.mark.parametrize("when", ["before its hello", "after its hello", "during an answer"])
@pytest.mark.parametrize("still", [False, True])
def test_a_narrower_list_ends_them(proxied: Proxied, when: str, still: bool) -> None:
    may_end = threading.Event()

    async def hold(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        await asyncio.get_running_loop().run_in_executor(None, may_end.wait, 30)
        writer.write(b"MORE")

    port = proxied.server(hold)
    rule = f"{GOOD}:{port}"
    door = proxied.door(allowing(rule))
    sock = door.connect() if when == "during an answer" else door.tunnel(GOOD, port)
    with sock:
        if when == "during an answer":
            sock.sendall(get(GOOD, port))
        if when == "after its hello":
            sock.sendall(client_hello(GOOD))
        if when != "before its hello":
            read_head(sock)
        door.change(allowing(rule, "other.example") if still else allowing("other.example"))
        try:
            if when == "before its hello":
                sock.sendall(client_hello(GOOD))
            may_end.set()
            answer = read_all(sock)
        except ConnectionError:
            answer = b""
        finally:
            may_end.set()
    assert (b"MORE" in answer) == still
    assert len(door.wait_until_idle()) == 1
