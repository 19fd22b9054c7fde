"""Peers of WebSockets who hold the service up: frames that are none, or too many, or never end.

`sandbox_site.web.frames` overrides what of gunicorn is not public: here each override is held to
what it is for.
"""

from __future__ import annotations

import asyncio
import logging
import struct
from typing import Any

import pytest

from sandbox_site.web import frames
from tests.support.codex_door import (
    CLOSE,
    CWD,
    PING,
    PONG,
    TEXT,
    Client,
    Refused,
    Socket,
    capability_path,
    opened,
)
from tests.support.raw_http import ask
from tests.support.site import Site

CONTINUATION, BINARY = 0, 2


@pytest.fixture(scope="module")
def path(streaming_site: Site) -> str:
    return capability_path(streaming_site)


@pytest.fixture
def peer(streaming_site: Site, path: str) -> Socket:
    return Socket(streaming_site.service, path)


def test_a_message_in_pieces_is_one_message(streaming_site: Site, path: str) -> None:
    client = Client(streaming_site.service, path)
    text = b'{"id": 1, "method": "initialize", "params": {"clientName": "pieces"}}'
    client.socket.send_frame(TEXT, text[:10], is_last=False)
    client.socket.send_frame(PING, b"between")
    client.socket.send_frame(CONTINUATION, text[10:20], is_last=False)
    client.socket.send_frame(CONTINUATION, text[20:])
    assert client.socket.read_frame() == (PONG, b"between")
    assert client.answer_to(1)["sessionId"]
    client.close()


def test_a_message_that_is_too_large_ends_the_connection(peer: Socket) -> None:
    peer.raw.sendall(bytes([0x81, 0x80 | 127]) + struct.pack("!Q", frames.MESSAGE_BYTES + 1))
    assert peer.wait_until_closed() == 1009


def test_pieces_that_are_too_large_together_end_it(peer: Socket) -> None:
    half = bytes(frames.MESSAGE_BYTES // 2 + 1)
    peer.send_frame(TEXT, half, is_last=False)
    peer.send_frame(CONTINUATION, half, is_last=False)
    assert peer.wait_until_closed() == 1009


def test_empty_pieces_without_end_end_it(peer: Socket) -> None:
    peer.send_frame(TEXT, b"", is_last=False)
    empty = bytes([0x00, 0x80, 0, 0, 0, 0])
    peer.raw.sendall(empty * (frames.MOST_PIECES + 1))
    assert peer.wait_until_closed() == 1008


@pytest.mark.parametrize(
    "sent",
    [
        bytes([0x81, 2]) + b"{}",
        bytes([0xC1, 0x82, 0, 0, 0, 0]) + b"{}",
        bytes([0x83, 0x80, 0, 0, 0, 0]),
        bytes([0x80, 0x80, 0, 0, 0, 0]),
        bytes([0x09, 0x80, 0, 0, 0, 0]),
        bytes([0x89, 0xFE, 1, 0, 0, 0, 0, 0]),
        bytes([0x81, 0xFE, 0, 1, 0, 0, 0, 0, 0]),
    ],
    ids=[
        "unmasked",
        "reserved bits",
        "unknown",
        "no first piece",
        "split ping",
        "long ping",
        "size",
    ],
)
def test_what_is_no_frame_ends_it(peer: Socket, sent: bytes) -> None:
    peer.raw.sendall(sent)
    assert peer.wait_until_closed() == 1002


def test_a_message_that_is_no_text_ends_it(streaming_site: Site, path: str) -> None:
    for opcode in (BINARY, TEXT):
        peer = Socket(streaming_site.service, path)
        peer.send_frame(opcode, b"\xff")
        assert peer.wait_until_closed() == 1007


def test_text_in_a_binary_frame_is_a_message(streaming_site: Site, path: str) -> None:
    """As Codex's forwarder sends it."""
    client = Client(streaming_site.service, path)
    client.socket.send_frame(BINARY, b'{"id": 1, "method": "environment/nothing"}')
    with pytest.raises(Refused) as error:
        client.answer_to(1)
    assert error.value.code == -32601
    client.close()


def test_who_closes_is_answered(peer: Socket) -> None:
    peer.send_frame(CLOSE, struct.pack("!H", 1000))
    assert peer.wait_until_closed() == 1000


def test_a_flood_of_pings_that_are_not_read_holds_nobody_up(
    streaming_site: Site, path: str
) -> None:
    with opened(streaming_site, path) as client:
        peer = Socket(streaming_site.service, path)
        ping = bytes([0x89, 0x80 | 125, 0, 0, 0, 0]) + bytes(125)
        for _ in range(200):
            peer.raw.sendall(ping * 500)
        assert client.call("fs/getMetadata", path=CWD)["isDirectory"]
        assert ask(streaming_site.service, "GET", "/healthz").status == 200
        peer.close()


class _Transport:
    """What a WebSocket asks of its transport."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.unsent = 0
        self.aborted = asyncio.Event()

    def write(self, data: bytes) -> None:
        self.sent.append(data)

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def abort(self) -> None:
        self.aborted.set()

    def close(self) -> None:
        return


def make_socket(transport: _Transport) -> frames.WebSocket:
    async def app(*given: Any) -> None:
        raise AssertionError("it is not asked")

    return frames.WebSocket(transport, {"headers": []}, app, logging.getLogger("test"))


class _Clock:
    """The time of a test, which passes while somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds
        await asyncio.sleep(0)


def test_who_says_nothing_is_asked_and_then_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = _Clock()
    for name in ("time", "asyncio"):
        monkeypatch.setattr(frames, name, clock)

    async def watch() -> _Transport:
        transport = _Transport()
        watched = make_socket(transport)
        watched.accepted = True
        watching = asyncio.create_task(watched._watch())
        await asyncio.wait_for(transport.aborted.wait(), 60)
        watching.cancel()
        return transport

    transport = asyncio.run(watch())
    assert transport.sent == [bytes([0x80 | PING, 0])]


def test_pings_are_not_answered_while_much_is_unsent() -> None:
    async def answer(unsent: int) -> list[bytes]:
        transport = _Transport()
        transport.unsent = unsent
        await make_socket(transport)._send_frame(PONG, b"")
        return transport.sent

    assert asyncio.run(answer(frames.UNSENT_BYTES)) == [bytes([0x80 | PONG, 0])]
    assert asyncio.run(answer(frames.UNSENT_BYTES + 1)) == []


def test_who_was_not_let_in_yet_sends_little() -> None:
    async def most() -> int:
        return int(make_socket(_Transport()).max_message_size)

    assert asyncio.run(most()) == frames.EARLY_BYTES
