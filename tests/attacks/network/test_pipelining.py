"""Requests behind one that is allowed, on the same connection."""

from __future__ import annotations

import pytest

from tests.attacks.network.proxied import (
    GOOD,
    Proxied,
    allowing,
    connect_head,
    get,
    read_all,
    read_head,
)


def kept(host: str, port: int, path: str = "/", method: str = "GET") -> bytes:
    return get(host, port, path, method=method).replace(b"Connection: close\r\n", b"")


@pytest.mark.parametrize(
    ("method", "host", "path"),
    [("GET", "evil.example", "/v1"), ("GET", GOOD, "/v2"), ("POST", GOOD, "/v1")],
)
def test_each_request_is_judged_by_itself(
    proxied: Proxied, method: str, host: str, path: str
) -> None:
    upstream = proxied.upstream()
    door = proxied.door(allowing(f"GET {upstream.rule}/v1"))
    first, second = kept(GOOD, upstream.port, "/v1"), kept(host, upstream.port, path, method)
    answer = door.talk(first + second + first)
    assert answer.count(b"HTTP/1.1 200") == 1
    assert answer.count(b"HTTP/1.1 403") == 1
    assert len(upstream.heads) == 1
    attempts = door.wait_until_idle()
    assert [each.outcome for each in attempts] == ["allowed", "refused"]
    assert [(each.method, each.path) for each in attempts] == [("GET", "/v1"), (method, path)]


def test_allowed_requests_go_on_over_one_connection_each_with_its_bytes(proxied: Proxied) -> None:
    upstream = proxied.upstream()
    door = proxied.door(allowing(upstream.rule))
    asked = kept(GOOD, upstream.port)
    with door.connect() as sock:
        sizes = []
        for _ in range(3):
            sock.sendall(asked)
            head = read_head(sock)
            assert sock.recv(4) == b"GOOD"
            sizes.append(len(head) + 4)
    attempts = door.wait_until_idle()
    assert [each.sent for each in attempts] == [len(asked)] * 3
    assert [each.received for each in attempts] == sizes
    assert {each.outcome for each in attempts} == {"allowed"}


def test_a_tunnel_is_not_left_by_a_second_connect(proxied: Proxied) -> None:
    upstream = proxied.upstream()
    door = proxied.door(allowing(upstream.rule))
    with door.tunnel(GOOD, upstream.port) as sock:
        sock.sendall(f"GET / HTTP/1.1\r\nHost: {upstream.rule}\r\n\r\n".encode())
        sock.sendall(connect_head("evil.example", 443))
        answer = read_all(sock)
    assert answer.count(b"HTTP/1.1 200") == 1
    assert answer.count(b"HTTP/1.1 400") == 1
    assert proxied.looked_up == [GOOD, GOOD]
