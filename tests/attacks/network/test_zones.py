"""An address with a zone, by which one of this machine would not be known again."""

from __future__ import annotations

import pytest

from providers.network import normalized_host


@pytest.mark.parametrize(
    "host", ["2606:4700::1111%1", "fe80::1%eth0", "::1%lo", "127.0.0.1%1", "example.com%1"]
)
def test_a_zone_is_no_part_of_a_host(host: str) -> None:
    with pytest.raises(ValueError, match="not a host name"):
        normalized_host(host)


def test_the_address_without_it_is_a_host() -> None:
    assert normalized_host("2606:4700::1111") == "2606:4700::1111"
