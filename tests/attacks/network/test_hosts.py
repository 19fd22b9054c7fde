"""A request that names one host to the proxy and another one to the server."""

from __future__ import annotations

import socket

import pytest

from tests.attacks.network.proxied import (
    GOOD,
    Door,
    Proxied,
    Upstream,
    allowing,
    error_of,
    read_all,
    status_of,
)


@pytest.fixture
def upstream(proxied: Proxied) -> Upstream:
    return proxied.upstream()


@pytest.fixture
def door(proxied: Proxied, upstream: Upstream) -> Door:
    return proxied.door(allowing(upstream.rule, "evil.example"))


def in_tunnel(door: Door, upstream: Upstream, text: str) -> bytes:
    with door.tunnel(GOOD, upstream.port) as sock:
        sock.sendall(text.replace("{}", upstream.rule).encode())
        sock.shutdown(socket.SHUT_WR)
        return read_all(sock)


HOSTS = [
    "Host: evil.example\r\n",
    "Host: good.example\r\n",
    "Host: good.example:1\r\n",
    "Host: {}, evil.example\r\n",
    "Host: x@{}\r\n",
    "Host: {}/\r\n",
    "Host: \r\n",
    "",
    "Host: {}\r\nHost: evil.example\r\n",
    "Host: {}\r\nHost: {}\r\n",
    "Host: [{}]\r\n",
]


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("way", ["absolute", "tunnel"])
@pytest.mark.parametrize("version", ["1.1", "1.0"])
def test_another_host_is_refused(
    door: Door, upstream: Upstream, host: str, way: str, version: str
) -> None:
    if way == "absolute":
        text = f"GET http://{{}}/ HTTP/{version}\r\n{host}\r\n"
        answer = door.talk(text.replace("{}", upstream.rule).encode())
    else:
        answer = in_tunnel(door, upstream, f"GET / HTTP/{version}\r\n{host}\r\n")
    assert status_of(answer) == 400, answer
    assert error_of(answer)["reason"] in ("mismatch", "malformed")
    assert door.only().outcome == "refused"
    assert upstream.heads == []


@pytest.mark.parametrize("target", [
    "http://evil.example/", "http://{}/", "evil.example:80", "//evil.example/", "https://{}/",
    "/#/../admin", "ftp://{}/",
])  # fmt: skip
def test_a_request_in_a_tunnel_begins_with_its_path(
    door: Door, upstream: Upstream, target: str
) -> None:
    answer = in_tunnel(door, upstream, f"GET {target} HTTP/1.1\r\nHost: {{}}\r\n\r\n")
    if target == "//evil.example/":
        # A path, to the tunnel's own host.
        assert upstream.heads[0].startswith(b"GET //evil.example/ HTTP/1.1\r\n")
        return
    assert status_of(answer) == 400
    assert upstream.heads == []


def test_a_tunnel_in_a_tunnel_is_refused(door: Door, upstream: Upstream) -> None:
    answer = in_tunnel(door, upstream, "CONNECT evil.example:443 HTTP/1.1\r\nHost: {}\r\n\r\n")
    assert status_of(answer) == 400
    assert upstream.heads == []


def test_the_same_host_passes_as_a_positive_control(door: Door, upstream: Upstream) -> None:
    answer = in_tunnel(
        door, upstream, "GET / HTTP/1.1\r\nHost: GOOD.example.:" + str(upstream.port) + "\r\n\r\n"
    )
    assert status_of(answer) == 200
    assert door.wait_for(1)[0].outcome == "allowed"
