"""TLS to another server name than the host that the tunnel was opened for."""

from __future__ import annotations

import socket
import ssl
from pathlib import Path

import pytest

from providers.runtime.network import hello
from tests.attacks.network.proxied import (
    ADDRESS,
    GOOD,
    Door,
    Proxied,
    Upstream,
    allowing,
    client_hello,
    read_all,
)
from tests.support.certificates import Authority

HELLO = client_hello(GOOD)
EXTENSION_AT = HELLO.index(GOOD.encode()) - 9


@pytest.fixture
def upstream(proxied: Proxied, tmp_path: Path) -> Upstream:
    issued = Authority().issue(tmp_path, GOOD)
    return proxied.upstream(context=issued.server_context())


@pytest.fixture
def door(proxied: Proxied, upstream: Upstream) -> Door:
    return proxied.door(allowing(upstream.rule, f"{ADDRESS}:{upstream.port}", "evil.example"))


def say(door: Door, host: str, port: int, *pieces: bytes) -> bytes:
    with door.tunnel(host, port) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            for piece in pieces:
                sock.sendall(piece)
            sock.shutdown(socket.SHUT_WR)
        except OSError:
            return b""
        return read_all(sock)


def record(content: bytes) -> bytes:
    return b"\x16\x03\x01" + len(content).to_bytes(2, "big") + content


def with_extensions(*extensions: bytes) -> bytes:
    """A ClientHello with these extensions only."""
    content = b"".join(extensions)
    body = bytes((3, 3)) + bytes(32) + b"\0" + b"\0\x02\x13\x01" + b"\x01\0"
    body += len(content).to_bytes(2, "big") + content
    return record(b"\x01" + len(body).to_bytes(3, "big") + body)


def names(*hosts: bytes, kind: int = 0) -> bytes:
    listed = b"".join(bytes([kind]) + len(h).to_bytes(2, "big") + h for h in hosts)
    content = len(listed).to_bytes(2, "big") + listed
    return b"\0\0" + len(content).to_bytes(2, "big") + content


def test_the_name_of_the_tunnel_passes(door: Door, upstream: Upstream) -> None:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with (
        door.tunnel(GOOD, upstream.port) as sock,
        context.wrap_socket(sock, server_hostname=GOOD) as secure,
    ):
        secure.sendall(b"GET / HTTP/1.1\r\n\r\n")
        answer = b""
        while not answer.endswith(b"GOOD"):
            answer += secure.recv(100)
    attempt = door.only()
    assert (attempt.outcome, attempt.host, attempt.rule) == ("allowed", GOOD, upstream.rule)
    assert attempt.sent > len(HELLO)
    assert attempt.received > len(answer)


def test_an_address_takes_no_name(door: Door, upstream: Upstream) -> None:
    assert say(door, ADDRESS, upstream.port, client_hello()).startswith(b"\x16")
    assert say(door, ADDRESS, upstream.port, HELLO) == b""
    assert [each.outcome for each in door.wait_for(2)] == ["allowed", "refused"]


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        (client_hello("evil.example"), "mismatch"),
        (client_hello(f"{GOOD}.evil.example"), "mismatch"),
        (client_hello(), "mismatch"),
        (with_extensions(names(GOOD.encode(), b"evil.example")), "malformed"),
        (with_extensions(names(GOOD.encode()), names(b"evil.example")), "malformed"),
        (with_extensions(names(b"evil.example"), names(GOOD.encode())), "malformed"),
        (with_extensions(names(GOOD.encode(), kind=1)), "malformed"),
        (with_extensions(names(GOOD.encode() + b"\0.evil.example")), "mismatch"),
        (with_extensions(names("gööd.example".encode())), "malformed"),
        (with_extensions(names(b"")), "mismatch"),
        (with_extensions(b"\0\0\0\0"), "malformed"),
        (with_extensions(), "mismatch"),
        (record(b"\x02\0\0\0"), "malformed"),
        (record(b"\x01\xff\xff\xff" + bytes(16000)) * 3, "malformed"),
        (b"\x16\x03\x01\0\0" * 10, "malformed"),
        (b"\x16\x03\x01\xff\xff" + bytes(100), "malformed"),
        (b"\x16\x02\x01\0\x04" + bytes(4), "malformed"),
        (b"\x16GET / HTTP/1.1\r\n\r\n", "malformed"),
        (b"".join(record(HELLO[5 + at : 6 + at]) for at in range(200)), "malformed"),
    ],
)
def test_another_name_reaches_nothing(
    door: Door, upstream: Upstream, sent: bytes, why: str
) -> None:
    assert say(door, GOOD, upstream.port, sent) == b""
    attempt = door.only()
    assert (attempt.outcome, attempt.why) == ("refused", why)
    assert attempt.sent >= len(sent[: hello.MOST_BYTES])
    assert upstream.heads == []


def test_a_name_in_pieces_is_read_whole(door: Door, upstream: Upstream) -> None:
    content = HELLO[5:]
    records = [record(content[at : at + 40]) for at in range(0, len(content), 40)]
    segments = [HELLO[at : at + 1] for at in range(len(HELLO))]
    assert say(door, GOOD, upstream.port, *segments).startswith(b"\x16")
    assert say(door, GOOD, upstream.port, *records).startswith((b"\x16", b"\x15"))
    evil = client_hello("evil.example")
    assert say(door, GOOD, upstream.port, *(evil[at : at + 1] for at in range(len(evil)))) == b""
    parts = [record(evil[5 + at : 45 + at]) for at in range(0, len(evil) - 5, 40)]
    assert say(door, GOOD, upstream.port, *parts) == b""
    outcomes = [each.outcome for each in door.wait_for(4)]
    assert outcomes == ["allowed", "allowed", "refused", "refused"]


def test_a_name_that_is_never_complete_is_on_record(door: Door, upstream: Upstream) -> None:
    assert say(door, GOOD, upstream.port, HELLO[:-1]) == b""
    assert door.only().outcome == "failed"


def test_what_follows_a_hello_in_its_message_is_refused() -> None:
    body = HELLO[9:] + b"more"
    padded = record(b"\x01" + len(body).to_bytes(3, "big") + body)
    with pytest.raises(hello.Malformed):
        hello.server_name(padded)
    assert hello.server_name(HELLO) == GOOD
