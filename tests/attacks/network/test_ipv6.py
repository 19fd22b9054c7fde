"""IPv6 addresses in the place of a host."""

from __future__ import annotations

import pytest

from tests.attacks.network.proxied import (
    Proxied,
    allowing,
    connect_head,
    error_of,
    get,
    status_of,
)

ADDRESS = "2606:4700::1111"


@pytest.mark.parametrize("host", ["[2606:4700::1112]", "[2606:4700:0::1112]", "[::ffff:1.1.1.1]"])
def test_an_address_that_no_list_has_is_refused(proxied: Proxied, host: str) -> None:
    door = proxied.door(allowing(f"[{ADDRESS}]", "1.1.1.1"))
    for asked in (connect_head(host, 443), get(host, 80)):
        assert error_of(door.talk(asked))["reason"] == "not_allowed"


@pytest.mark.parametrize("host", [ADDRESS, "[::1", "::1]", "[::1%25lo]", "[v1.x]", "[]", "[:]"])
def test_what_is_no_address_in_brackets_is_malformed(proxied: Proxied, host: str) -> None:
    door = proxied.door(allowing(f"[{ADDRESS}]"))
    for asked in (connect_head(host, 443), get(host, 80)):
        assert status_of(door.talk(asked)) == 400
    assert {each.outcome for each in door.wait_for(2)} == {"refused"}


@pytest.mark.parametrize("host", [f"[{ADDRESS}]", "[2606:4700:0:0:0:0:0:1111]"])
def test_every_form_of_an_address_is_the_one_of_the_list(proxied: Proxied, host: str) -> None:
    network = allowing(f"[{ADDRESS}]")
    door = proxied.door(allowing(f"[{ADDRESS}]/v1"))
    assert network.may_allow(ADDRESS, 443).is_allowed
    # The tunnel is opened, as a request in it could be allowed.
    assert door.talk(connect_head(host, 443)).startswith(b"HTTP/1.1 200")
    assert door.only().host == ADDRESS
