"""Names of public hosts that lead into this network, this machine or its cloud."""

from __future__ import annotations

import asyncio
import ipaddress

import pytest

from providers.addresses import Allowed
from providers.runtime.network.resolving import Dialer, Unreachable, own_addresses
from tests.attacks.network.proxied import (
    GOOD,
    Proxied,
    allowing,
    connect_head,
    error_of,
    get,
    opened,
    status_of,
)

INNER = (
    "127.0.0.1", "127.8.8.8", "0.0.0.0", "10.1.2.3", "172.16.0.1", "192.168.1.1", "100.64.0.1",
    "169.254.169.254", "169.254.1.1", "168.63.129.16", "192.0.0.192", "100.100.100.200",
    "224.0.0.1", "255.255.255.255", "240.0.0.1", "198.18.0.1", "192.0.2.1", "192.88.99.1",
    "::1", "::", "::ffff:127.0.0.1", "::ffff:10.0.0.1", "::ffff:169.254.169.254", "::127.0.0.1",
    "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "64:ff9b:1::a00:1", "2002:7f00:1::", "2002:a00:1::1",
    "2002:a9fe:a9fe::", "2001:0:7f00:1::", "fe80::1", "fe80::1%eth0", "fc00::1", "fd00:ec2::254",
    "fec0::1", "ff02::1", "2001:db8::1", "3fff::1", "::ffff:0:127.0.0.1", "100::1", "5f00::1",
)  # fmt: skip


@pytest.mark.parametrize("address", INNER)
def test_a_name_that_leads_inside_is_refused(proxied: Proxied, address: str) -> None:
    proxied.names["inner.example"] = [[address]]
    door = proxied.door(opened())
    for asked in (connect_head("inner.example", 443), get("inner.example", 80)):
        answer = door.talk(asked)
        assert status_of(answer) == 403
        assert error_of(answer)["reason"] == "address"
        assert address not in answer.decode()
    assert {each.outcome for each in door.wait_for(2)} == {"refused"}


def test_an_address_on_the_list_is_still_refused(proxied: Proxied) -> None:
    door = proxied.door(allowing("10.1.2.3", "169.254.169.254", "[fd00:ec2::254]"))
    for host in ("10.1.2.3", "169.254.169.254", "[fd00:ec2::254]"):
        assert error_of(door.talk(get(host, 80)))["reason"] == "address"


def test_an_address_that_the_operator_allows_is_reached(proxied: Proxied) -> None:
    upstream = proxied.upstream()
    door = proxied.door(opened())
    assert status_of(door.talk(get(GOOD, upstream.port))) == 200


def test_public_addresses_of_this_machine_are_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    own = ipaddress.ip_address("93.184.215.14")
    monkeypatch.setattr(
        "providers.runtime.network.resolving.own_addresses", lambda: frozenset({own})
    )
    for found in (str(own), f"::ffff:{own}", "2002:5db8:d70e::1", "64:ff9b::5db8:d70e"):
        dialer = Dialer((), lambda host, port, found=found: [found])
        with pytest.raises(Unreachable) as refused:
            asyncio.run(dialer.connect("own.example", 443))
        assert (refused.value.why, refused.value.is_refused) == ("address", True)


def test_no_allowance_opens_what_a_cloud_says_of_a_machine() -> None:
    dialer = Dialer([Allowed.parse("0.0.0.0/0"), Allowed.parse("::/0")])
    for address in ("169.254.169.254", "fe80::1", "100.100.100.200"):
        with pytest.raises(Unreachable):
            asyncio.run(dialer.connect(address, 80))


def test_the_addresses_of_this_machine_are_known() -> None:
    assert ipaddress.ip_address("127.0.0.1") in own_addresses()
