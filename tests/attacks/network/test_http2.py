"""HTTP/2 with prior knowledge, whose requests the proxy cannot read."""

from __future__ import annotations

import pytest

from tests.attacks.network.proxied import GOOD, Proxied, allowing, get, read_all, status_of

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))


@pytest.mark.parametrize("way", ["at once", "tunnel", "upgrade"])
def test_http2_reaches_nothing(proxied: Proxied, way: str) -> None:
    upstream = proxied.upstream()
    door = proxied.door(allowing(upstream.rule))
    if way == "tunnel":
        with door.tunnel(GOOD, upstream.port) as sock:
            sock.sendall(PREFACE)
            answer = read_all(sock)
    elif way == "at once":
        answer = door.talk(PREFACE)
    else:
        upgrade = ("Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQAAP__")
        answer = door.talk(get(GOOD, upstream.port, "/", *upgrade))
        assert b"Upgrade" not in upstream.heads[0]
    assert status_of(answer) == (200 if way == "upgrade" else 505)
    assert len(upstream.heads) == (way == "upgrade")
    assert len(door.wait_until_idle()) == 1
