"""Ports of mail and of shells, and what is neither TLS nor HTTP in a tunnel."""

from __future__ import annotations

import asyncio
import socket

import pytest

from tests.attacks.network.proxied import (
    GOOD,
    Proxied,
    allowing,
    connect_head,
    error_of,
    get,
    opened,
    read_all,
    status_of,
)


@pytest.mark.parametrize("port", [22, 25, 465, 587, 3306, 6379, 8080, 1])
def test_a_rule_without_ports_has_those_of_the_web(proxied: Proxied, port: int) -> None:
    door = proxied.door(allowing(GOOD, "*.wide.example"))
    for host in (GOOD, "x.wide.example"):
        for asked in (connect_head(host, port), get(host, port)):
            assert error_of(door.talk(asked))["reason"] == "not_allowed"
    assert proxied.looked_up == []


@pytest.mark.parametrize(
    "said",
    [
        b"SSH-2.0-OpenSSH_9.9\r\n",
        b"*1\r\n$4\r\nPING\r\n",
        b"EHLO x\r\nMAIL FROM:<a@b>\r\n",
        b"\x00\x00\x00\x17\xff\x53\x4d\x42",
        b"\x17\x03\x03\x00\x05hello",
        b"\x80\x2e\x01\x00\x02",
        b"GET",
        b"get / HTTP/1.1\r\nHost: x\r\n\r\n",
        b" GET / HTTP/1.1\r\n\r\n",
        b"\r\nGET / HTTP/1.1\r\n\r\n",
        b"GET /\r\n\r\n",
        bytes(4096),
    ],
)
def test_another_protocol_in_a_tunnel_reaches_nothing(proxied: Proxied, said: bytes) -> None:
    heard = []

    async def note(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 mail.example ESMTP\r\n")
        heard.append(await reader.read(100))

    port = proxied.server(note)
    door = proxied.door(allowing(f"{GOOD}:{port}"))
    with door.tunnel(GOOD, port) as sock:
        sock.sendall(said)
        sock.shutdown(socket.SHUT_WR)
        answer = read_all(sock)
    assert b"ESMTP" not in answer
    assert door.only().outcome in ("refused", "failed")
    assert [each for each in heard if each] == []


def test_a_server_that_speaks_first_is_not_heard(proxied: Proxied) -> None:
    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 mail.example ESMTP\r\n")
        await reader.read(1)

    port = proxied.server(greet)
    door = proxied.door(allowing(f"{GOOD}:{port}"))
    with door.tunnel(GOOD, port) as sock:
        sock.shutdown(socket.SHUT_WR)
        assert read_all(sock) == b""
    attempt = door.only()
    assert (attempt.host, attempt.port, attempt.outcome) == (GOOD, port, "failed")
    assert attempt.why == "ended"


@pytest.mark.parametrize("command", [2, 3, 0, 255])
def test_socks_does_nothing_but_connect(proxied: Proxied, command: int) -> None:
    door = proxied.door(opened())
    asked = b"\x05\x01\x00\x05" + bytes([command]) + b"\x00\x03\x0cgood.example\x01\xbb"
    assert door.talk(asked)[2:4] == b"\x05\x07"
    assert door.only().outcome == "refused"
    assert proxied.looked_up == []


def test_the_port_of_a_rule_passes_as_a_positive_control(proxied: Proxied) -> None:
    upstream = proxied.upstream()
    door = proxied.door(allowing(upstream.rule))
    assert status_of(door.talk(get(GOOD, upstream.port))) == 200
