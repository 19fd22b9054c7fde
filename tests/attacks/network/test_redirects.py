"""A server that sends the program on to a host that no list has."""

from __future__ import annotations

from tests.attacks.network.proxied import GOOD, Proxied, allowing, get, status_of


def test_a_redirect_is_handed_on_and_not_followed(proxied: Proxied) -> None:
    target = "http://evil.example/"
    moved = f"HTTP/1.1 302 Found\r\nLocation: {target}\r\nContent-Length: 0\r\n\r\n"
    upstream = proxied.upstream(moved.encode())
    door = proxied.door(allowing(upstream.rule))
    answer = door.talk(get(GOOD, upstream.port))
    assert status_of(answer) == 302
    assert target.encode() in answer
    assert proxied.looked_up == [GOOD]
    assert status_of(door.talk(get("evil.example", 80))) == 403
    assert proxied.looked_up == [GOOD]
