"""Heads that the proxy and a server could read in two ways."""

from __future__ import annotations

import pytest

from tests.attacks.network.proxied import (
    GOOD,
    Door,
    Proxied,
    Upstream,
    allowing,
    connect_head,
    error_of,
    read_all,
    read_head,
    status_of,
)

EVIL = "evil.example"


@pytest.fixture
def upstream(proxied: Proxied) -> Upstream:
    return proxied.upstream()


@pytest.fixture
def door(proxied: Proxied, upstream: Upstream) -> Door:
    return proxied.door(allowing(upstream.rule))


def head(upstream: Upstream, *headers: str, end: str = "\r\n\r\n", host: bool = True) -> bytes:
    own = [f"Host: {upstream.rule}"] if host else []
    return ("\r\n".join([f"POST http://{upstream.rule}/ HTTP/1.1", *own, *headers]) + end).encode()


@pytest.mark.parametrize(
    "headers",
    [
        ("Content-Length: 4", "Transfer-Encoding: chunked"),
        ("Transfer-Encoding: chunked", "Content-Length: 4"),
        ("Content-Length: 4", "Content-Length: 5"),
        ("Content-Length: 4, 5",),
        ("Content-Length: +4",),
        ("Content-Length: 0x4",),
        ("Content-Length: -1",),
        ("Transfer-Encoding: chunked, identity",),
        ("Transfer-Encoding: xchunked",),
        ("Transfer-Encoding: chunked", "Transfer-Encoding: chunked"),
        ("Transfer-Encoding : chunked",),
        ("Transfer-Encoding\t: chunked",),
        (" Leading: 1",),
        ("Host: evil.example",),
        (f"X: 1\r\nHost: {EVIL}",),
        ("X: a\rHost: evil.example",),
        ("X: a\0b",),
        ("No colon",),
        (": empty",),
        ("X y: z",),
    ],
)
def test_heads_of_two_readings_are_refused(
    door: Door, upstream: Upstream, headers: tuple[str, ...]
) -> None:
    answer = door.talk(head(upstream, *headers) + b"0\r\n\r\nGET http://evil.example/ HTTP/1.1\r\n")
    assert status_of(answer) in (400, 501), answer
    assert error_of(answer)["reason"] in ("malformed", "mismatch")
    attempt = door.only()
    assert attempt.outcome == "refused"
    assert upstream.connections == 0


def test_a_plain_head_passes_as_a_positive_control(door: Door, upstream: Upstream) -> None:
    assert status_of(door.talk(head(upstream, "Content-Length: 0"))) == 200
    assert upstream.heads[0].startswith(b"POST / HTTP/1.1\r\n")


@pytest.mark.parametrize(
    "text",
    [
        "GET http://{} HTTP/1.1\nHost: {}\nX: y\n\n",
        "GET http://{}/ HTTP/1.1\r\nHost: {}\r\nX: a\r\n Host: evil.example\r\n\r\n",
        "GET http://{}/ HTTP/1.1\r\nHost: {}\r\nX: a\r\n\tTransfer-Encoding: chunked\r\n\r\n",
    ],
    ids=["bare line feeds", "folded host", "folded length"],
)
def test_what_is_tolerated_is_written_anew(door: Door, upstream: Upstream, text: str) -> None:
    door.talk(text.format(upstream.rule, upstream.rule).encode())
    for found in upstream.heads:
        lines = found.split(b"\r\n")
        assert not any(b"\n" in line or line[:1] in (b" ", b"\t") for line in lines)
        hosts = [line for line in lines if line.lower().startswith(b"host:")]
        assert hosts == [f"Host: {upstream.rule}".encode()]
        assert not any(line.lower().startswith(b"transfer-encoding") for line in lines)
    assert len(door.wait_for(1)) == 1


def test_headers_that_connection_names_keep_the_frame_of_the_request(
    door: Door, upstream: Upstream
) -> None:
    """Without its Host or its length a server could take the body for a second request."""
    body = b"GET /second HTTP/1.1\r\nHost: evil.example\r\n\r\n"
    asked = head(upstream, "Connection: host, content-length, x-own", "X-Own: 1",
                 f"Content-Length: {len(body)}")  # fmt: skip
    assert status_of(door.talk(asked + body)) == 200
    (found,) = upstream.heads
    assert f"Host: {upstream.rule}".encode() in found
    assert f"Content-Length: {len(body)}".encode() in found
    assert b"X-Own" not in found


@pytest.mark.parametrize(
    "target",
    [
        "{}/", "http://{}", "{} HTTP/1.1\r\nHost: evil.example:1\r\n\r\nCONNECT {}", "user@{}",
        "{}@evil.example:443", "evil.example\\{}", "%67ood.example:443", "{}#", "{}?", "", "{},{}",
        "good.example", "good.example:", "good.example:0", "good.example:99999", "good.example:-1",
        "good.example:0x1bb", ":443", "good.example\0:443", "good.example\t:443", "[{}]",
    ],
)  # fmt: skip
def test_what_connect_names_is_a_host_and_a_port(
    door: Door, upstream: Upstream, target: str
) -> None:
    text = target.replace("{}", upstream.rule)
    answer = door.talk(f"CONNECT {text} HTTP/1.1\r\nHost: {upstream.rule}\r\n\r\n".encode())
    assert status_of(answer) == 400, answer
    assert door.only().outcome == "refused"
    assert upstream.connections == 0


@pytest.mark.parametrize(
    "header",
    ["Host: evil.example", "Host: good.example:1", "Content-Length: 4",
     "Transfer-Encoding: chunked", "X : y", "X: a\r Host: b"],
)  # fmt: skip
def test_connect_has_one_host_and_no_body(door: Door, upstream: Upstream, header: str) -> None:
    own = "" if header.startswith("Host") else f"Host: {upstream.rule}\r\n"
    answer = door.talk(f"CONNECT {upstream.rule} HTTP/1.1\r\n{own}{header}\r\n\r\n".encode())
    assert status_of(answer) == 400, answer
    assert door.only().outcome == "refused"
    assert upstream.connections == 0


def test_what_follows_connect_at_once_belongs_to_the_tunnel(door: Door, upstream: Upstream) -> None:
    inner = f"GET / HTTP/1.1\r\nHost: {upstream.rule}\r\nConnection: close\r\n\r\n".encode()
    answer = door.talk(connect_head(GOOD, upstream.port) + inner)
    assert answer.count(b"HTTP/1.1 200") == 2
    assert answer.endswith(b"GOOD")
    assert len(door.wait_until_idle()) == 1


def test_a_head_without_end_is_refused(door: Door, upstream: Upstream) -> None:
    answer = door.talk(head(upstream, "X: " + "y" * 300_000, end=""))
    assert status_of(answer) == 431
    assert error_of(answer)["reason"] == "malformed"
    assert len(door.wait_for(1)) == 1


def test_chunks_are_written_anew(door: Door, upstream: Upstream) -> None:
    asked = head(upstream, "Transfer-Encoding: chunked")
    with door.connect() as sock:
        sock.sendall(asked + b"4;x=y\r\nbody\r\n0\r\nHost: evil.example\r\n\r\n")
        assert b"GOOD" in read_head(sock) + sock.recv(4)
    for bad in (b"4\nbody\r\n0\r\n\r\n", b"-1\r\n", b"0x4\r\nbody\r\n", b"4\r\nbodyXX0\r\n\r\n"):
        with door.connect() as sock:
            sock.sendall(asked + bad)
            assert b"evil" not in read_all(sock)
    attempts = door.wait_for(5)
    assert len(attempts) == 5
