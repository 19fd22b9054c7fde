"""The proxy as a bridge to this service, this machine, or what another sandbox may reach."""

from __future__ import annotations

import pytest

from providers.runtime.network.resolving import own_addresses
from tests.attacks.network.proxied import (
    ADDRESS,
    GOOD,
    Proxied,
    allowing,
    connect_head,
    error_of,
    get,
    opened,
    status_of,
)


def test_no_address_of_this_machine_is_reached(proxied: Proxied) -> None:
    service = proxied.upstream()
    port = proxied.server(service.handle, address="0.0.0.0")
    door = proxied.door(opened(connections_per_minute=10_000))
    for address in sorted(map(str, own_addresses()), key=str):
        host = f"[{address}]" if ":" in address else address
        if host == ADDRESS:
            continue
        for asked in (connect_head(host, port), get(host, port)):
            assert error_of(door.talk(asked))["reason"] == "address", host
    assert service.connections == 0
    assert status_of(door.talk(get(GOOD, port))) == 200


def test_the_proxy_is_not_reached_through_itself(proxied: Proxied) -> None:
    door = proxied.door(opened())
    host, port = door.address
    assert error_of(door.talk(connect_head(host, port)))["reason"] == "address"


@pytest.mark.parametrize("owner", ["alice", "bob"])
def test_the_list_of_another_gate_is_not_ones_own(proxied: Proxied, owner: str) -> None:
    upstream = proxied.upstream()
    mine = proxied.door(allowing("other.example"), "alice")
    theirs = proxied.door(allowing(upstream.rule), owner)
    named = ("X-Gate: 2", "Proxy-Authorization: Basic Ym9iOmJvYg==", "Forwarded: for=bob")
    assert status_of(mine.talk(get(GOOD, upstream.port, "/", *named))) == 403
    assert status_of(theirs.talk(get(GOOD, upstream.port, "/", *named))) == 200
    assert b"Proxy-Authorization" not in upstream.heads[0]
    assert mine.only().host == theirs.only().host == GOOD
    assert [each.outcome for each in mine.attempts] == ["refused"]


def test_a_closed_gate_serves_nothing_any_more(proxied: Proxied) -> None:
    upstream = proxied.upstream()
    door = proxied.door(allowing(upstream.rule))
    assert status_of(door.talk(get(GOOD, upstream.port))) == 200
    door.close()
    assert door.talk(get(GOOD, upstream.port)) == b""
    assert upstream.connections == 1
