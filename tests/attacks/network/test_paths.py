"""Paths that a server may take for others than the prefix that is allowed."""

from __future__ import annotations

import pytest

from tests.attacks.network.proxied import (
    GOOD,
    Proxied,
    allowing,
    body_of,
    get,
    read_all,
    status_of,
)

AWAY = (
    "/", "/v10", "/v1x", "/v", "/V1", "/v1/../admin", "/v1/..", "/v1/%2e%2e/admin",
    "/v1/%2E./admin", "/v1/%252e%252e/admin", "/v1/%252fadmin", "//v1/x", "/v1//../admin",
    "/v1//x", "/admin/../v1/x", "/v1/./x", "/v1\\..\\admin", "/v1/%5c../admin", "\\v1/x",
    "/v1/..;/admin", "/v1/..;a=b/admin", "/v1/%2e%2e;/admin", "/v1;/../admin", "/v1;a", "/v1%2fx",
    "/v1%2f..%2fadmin", "/v1%00/x", "/v1/%00", "/v1/%0d%0aHost:x", "/v1/%c0%ae%c0%ae/admin",
    "/v1%3f/../admin", "/v1%23/../admin", "/%76%31/../admin", "?/v1/x", "/x?/v1",
)  # fmt: skip
BELOW = ("/v1", "/v1/", "/v1/x", "/v1?x=/../admin", "/v1/a%20b", "/v1/group%2Fname", "/%761/x")


@pytest.mark.parametrize("way", ["absolute", "tunnel"])
def test_only_what_every_server_takes_for_the_prefix_passes(proxied: Proxied, way: str) -> None:
    upstream = proxied.upstream()
    door = proxied.door(allowing(f"{upstream.rule}/v1", connections_per_minute=10_000))

    def ask(path: str) -> int:
        if way == "absolute":
            return status_of(door.talk(get(GOOD, upstream.port, path)))
        with door.tunnel(GOOD, upstream.port) as sock:
            sock.sendall(f"GET {path} HTTP/1.1\r\nHost: {upstream.rule}\r\n\r\n".encode())
            sock.shutdown(1)
            return status_of(read_all(sock))

    assert [path for path in AWAY if ask(path) not in (400, 403)] == []
    assert upstream.heads == []
    assert [path for path in BELOW if ask(path) != 200] == []
    assert [head.split()[1].decode() for head in upstream.heads] == list(BELOW)


def test_a_path_holds_within_tls_too(proxied: Proxied) -> None:
    upstream = proxied.secure()
    door = proxied.door(allowing(f"{upstream.rule}/v1"))
    assert body_of(door.ask(upstream, "/v1/a")) == b"GOOD"
    assert status_of(door.ask(upstream, "/v2/a")) == 403
    assert [attempt.why for attempt in door.wait_until_idle()] == ["", "not_allowed"]
    assert upstream.connections == 1
