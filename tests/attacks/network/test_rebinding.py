"""A name server that answers with another address at the second time, or with a mixture."""

from __future__ import annotations

import asyncio

import pytest

from tests.attacks.network.proxied import (
    ADDRESS,
    GOOD,
    Proxied,
    allowing,
    error_of,
    get,
    status_of,
)


@pytest.mark.parametrize("inner", ["127.0.0.1", "::1", "10.0.0.1", "169.254.169.254"])
def test_the_connection_goes_to_the_address_that_was_checked(proxied: Proxied, inner: str) -> None:
    upstream = proxied.upstream()
    proxied.names[GOOD] = [[ADDRESS], [inner]]
    door = proxied.door(allowing(upstream.rule))
    assert status_of(door.talk(get(GOOD, upstream.port))) == 200
    assert proxied.looked_up == [GOOD]
    assert error_of(door.talk(get(GOOD, upstream.port)))["reason"] == "address"
    assert proxied.looked_up == [GOOD, GOOD]
    assert upstream.connections == 1


@pytest.mark.parametrize("order", [[ADDRESS, "127.0.0.1"], ["127.0.0.1", ADDRESS]])
def test_one_inner_address_of_many_refuses_all(proxied: Proxied, order: list[str]) -> None:
    upstream = proxied.upstream()
    proxied.names[GOOD] = [order]
    door = proxied.door(allowing(upstream.rule))
    assert error_of(door.talk(get(GOOD, upstream.port)))["reason"] == "address"
    assert upstream.connections == 0


def test_each_request_of_a_connection_is_checked_anew(proxied: Proxied) -> None:
    upstream = proxied.upstream()
    proxied.names[GOOD] = [[ADDRESS], ["127.0.0.1"]]
    door = proxied.door(allowing(upstream.rule))
    asked = get(GOOD, upstream.port).replace(b"Connection: close\r\n", b"")
    answer = door.talk(asked + asked)
    assert answer.count(b"HTTP/1.1 200") == answer.count(b"HTTP/1.1 403") == 1


def test_no_name_reaches_the_connecting_function(
    proxied: Proxied, monkeypatch: pytest.MonkeyPatch
) -> None:
    upstream = proxied.upstream()
    connected = []
    original = asyncio.open_connection

    async def noted(host: str, port: int, **_: object) -> object:
        connected.append(host)
        return await original(host, port)

    monkeypatch.setattr(asyncio, "open_connection", noted)
    door = proxied.door(allowing(upstream.rule))
    assert status_of(door.talk(get(GOOD, upstream.port))) == 200
    assert connected == [ADDRESS]
