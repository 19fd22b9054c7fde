"""Addresses in the forms that only some programs read, and names that look like others."""

from __future__ import annotations

import pytest

from tests.attacks.network.proxied import (
    Proxied,
    connect_head,
    error_of,
    get,
    opened,
    status_of,
)

UNREADABLE = (
    "0x7f.1", "127.1", "2130706433", "0x7f000001", "0177.0.0.1", "017700000001", "127.0.0.1.2",
    "127.0.0.0x1", "good.example.0x7f", "1", "0", "%31%32%37.0.0.1", "good%2eexample", "user@good",
    "good..example", ".good.example", "good.example..", "-good.example", "good_.ex_ample",
    "b\u00fccher.example", "\u24d6ood.example", "good\u3002example", "good.example\u200b", "*",
    "*.example", "a" * 64 + ".example", "a." * 130 + "example", "$(id).example", "good,example",
)  # fmt: skip
OWN = ("127.0.0.1", "[::1]", "[::ffff:127.0.0.1]", "[::ffff:7f00:1]", "[0:0:0:0:0:0:0:1]",
       "0.0.0.0", "[::]", "127.0.0.1.", "[::127.0.0.1]", "localhost", "LOCALHOST.")  # fmt: skip


@pytest.mark.parametrize("host", UNREADABLE)
def test_an_unusual_form_is_malformed_whatever_is_open(proxied: Proxied, host: str) -> None:
    door = proxied.door(opened())
    for asked in (connect_head(host, 443), get(host, 80)):
        assert status_of(door.talk(asked)) == 400
    name = host.encode()[:255]
    door.talk(b"\x05\x01\x00\x05\x01\x00\x03" + bytes([len(name)]) + name + b"\x01\xbb")
    attempts = door.wait_for(3)
    assert {each.outcome for each in attempts} == {"refused"}
    assert proxied.looked_up == []


@pytest.mark.parametrize("host", OWN)
def test_this_machine_is_refused_in_every_form(proxied: Proxied, host: str) -> None:
    proxied.names["localhost"] = [["127.0.0.1"]]
    own = proxied.server(proxied.upstream().handle, address="127.0.0.1")
    door = proxied.door(opened())
    for asked in (connect_head(host, own), get(host, own)):
        answer = door.talk(asked)
        assert status_of(answer) == 403
        assert error_of(answer)["reason"] == "address"
    assert {each.outcome for each in door.wait_for(2)} == {"refused"}


def test_a_dot_at_the_end_and_capitals_are_the_same_host(proxied: Proxied) -> None:
    upstream = proxied.upstream()
    door = proxied.door(opened())
    assert status_of(door.talk(get("GOOD.Example.", upstream.port))) == 200
    assert door.only().host == "good.example"
