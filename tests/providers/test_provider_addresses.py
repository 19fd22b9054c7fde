"""Which addresses a provider may be given, and where a client of ours really connects to."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from providers.addresses import (
    AddressRefused,
    Allowed,
    check_fields,
    check_resolved,
    given_addresses,
    is_public,
    normalized,
    rules,
)
from providers.e2b.provider import E2BProvider
from providers.errors import InvalidConfiguration, SandboxError
from providers.remote.receiver import Receiver
from providers.schema import ConfigField
from providers.self_managed.provider import SelfManagedProvider
from tests.support.listener import Listener
from tests.support.resolving import resolve_as

FIELDS = {
    "endpoint": ConfigField("string", "Endpoint", address=True),
    "note": ConfigField("string", "Note"),
    "label": ConfigField("string", "Label", address=False),
    "token": ConfigField("string", "Token", secret=True),
}


@pytest.fixture(autouse=True)
def _nothing_is_allowed(settings: Any) -> None:
    settings.PROVIDER_ALLOWED_NETWORKS = []
    settings.PROVIDER_PLAIN_HTTP = []
    settings.POOL_HOST, settings.POOL_PORT = "127.0.0.1", 9385


@pytest.mark.parametrize(
    "text",
    [
        "https://api.e2b.app",
        "https://8.8.8.8:8443/base",
        "https://[2606:4700::1111]",
        "http://127.0.0.1:9385",
        "http://localhost:9385/",
        "https://[::1]:9385",
    ],
)
def test_public_addresses_and_the_own_pool_are_allowed(text: str) -> None:
    check_fields(FIELDS, {"endpoint": text})


@pytest.mark.parametrize(
    "text",
    [
        "http://api.e2b.app",
        "http://127.0.0.1:5432",
        "https://127.0.0.2",
        "https://[::1]:5432",
        "https://localhost",
        "https://0.0.0.0",
        "https://[::]",
        "https://10.1.2.3",
        "https://172.16.0.1",
        "https://192.168.0.1",
        "https://100.64.0.1",
        "https://169.254.169.254/latest/meta-data",
        "https://[fd00:ec2::254]",
        "https://[fe80::1]",
        "https://224.0.0.1",
        "https://[ff02::1]",
        "https://255.255.255.255",
        "https://[::ffff:10.0.0.1]",
        "https://[::ffff:7f00:1]",
        "https://[64:ff9b::a00:1]",
        "https://[2002:a00:1::]",
        "https://[::127.0.0.1]",
        "https://127.1",
        "https://0x7f000001",
        "https://2130706433",
        "https://0177.0.0.1",
        "https://user:password@api.e2b.app",
        "https://api.e2b.app?to=elsewhere",
        "https://api.e2b.app#x",
        "https://api.e2b.app\\@evil.example",
        "https://ⓛⓞⓒalhost",
        "https://",
        "https://api.e2b.app:0",
        "https://api.e2b.app:99999",
        "ftp://api.e2b.app",
        "file:///etc/passwd",
        "unix:///var/run/docker.sock",
        "gopher://api.e2b.app",
        "10.0.0.1:80",
        "localhost",
    ],
)
def test_all_else_is_refused_by_the_name_of_its_field(text: str) -> None:
    with pytest.raises(InvalidConfiguration) as caught:
        check_fields(FIELDS, {"endpoint": text})
    assert set(caught.value.errors) == {"endpoint"}


def test_a_text_in_doubt_is_an_address_when_it_looks_like_one() -> None:
    """A provider of another package that declares nothing is held to the rules as well."""
    check_fields(FIELDS, {"note": "10.0.0.1", "label": "https://10.0.0.1"})
    with pytest.raises(InvalidConfiguration) as caught:
        check_fields(FIELDS, {"note": "https://10.0.0.1"})
    assert set(caught.value.errors) == {"note"}


def test_settings_allow_networks_names_and_single_ports(settings: Any) -> None:
    settings.PROVIDER_ALLOWED_NETWORKS = ["10.0.0.0/8", "[fd00::1]:8443", "192.168.0.1:9385"]
    settings.PROVIDER_PLAIN_HTTP = ["10.1.0.0/16", "pool"]
    for text, good in (
        ("https://10.9.9.9", True),
        ("https://[::ffff:10.9.9.9]", True),
        ("http://10.1.0.1:80", True),
        ("http://10.2.0.1:80", False),
        ("http://pool:9385", True),
        ("https://[fd00::1]:8443", True),
        ("https://[fd00::1]", False),
        ("https://192.168.0.1:9385", True),
        ("https://192.168.0.1", False),
    ):
        if good:
            check_fields(FIELDS, {"endpoint": text})
        else:
            with pytest.raises(InvalidConfiguration):
                check_fields(FIELDS, {"endpoint": text})


def test_an_address_of_the_environment_needs_no_further_word(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = {"api_key": "key", "api_url": "http://10.0.0.1:3000"}
    with pytest.raises(InvalidConfiguration):
        E2BProvider.check_config(config)
    monkeypatch.setenv("E2B_API_URL", "http://10.0.0.1:3000/")
    E2BProvider.check_config(config)
    with pytest.raises(InvalidConfiguration):
        E2BProvider.check_config(config | {"api_url": "http://10.0.0.1:3001"})


@pytest.mark.parametrize("text", ["", "10.0.0.0/33", "10.0.0.1/8", "http://pool", "a b", "127.1"])
def test_an_entry_that_is_no_network_and_no_name_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match="is not a network"):
        Allowed.parse(text)


@given(st.ip_addresses(v=4))
def test_no_address_of_a_special_kind_counts_as_public(address: Any) -> None:
    kinds = ("private", "loopback", "link_local", "multicast", "unspecified", "reserved")
    special = [kind for kind in kinds if getattr(address, f"is_{kind}")]
    assert not (special and is_public(address)), special


@pytest.mark.parametrize(
    "text",
    [
        "168.63.129.16",
        "192.0.0.192",
        "192.88.99.1",
        "fec0::1",
        "3fff::1",
        "5f00::1",
        "2001::1",
        "2001:0:808:808::1",
        "64:ff9b:1::808:808",
        "::808:808",
        "64:ff9b::a9fe:a9fe",
        "2002:a83f:8110::",
    ],
)
def test_what_only_looks_public_does_not_count(text: str) -> None:
    """A cloud's metadata, addresses of a site, documentation, Teredo, private translation."""
    assert not is_public(ipaddress.ip_address(text))


@given(st.ip_addresses(v=6))
def test_an_ipv6_address_is_public_in_the_global_part_alone(address: Any) -> None:
    if is_public(address) and address.packed[:12] != b"\0\x64\xff\x9b" + b"\0" * 8:
        assert address.ipv4_mapped or address.packed[0] & 0xE0 == 0x20


@given(st.ip_addresses(v=4))
def test_an_ipv4_address_counts_the_same_however_it_is_carried(address: Any) -> None:
    carried = (
        ipaddress.IPv6Address(b"\0" * 10 + b"\xff\xff" + address.packed),
        ipaddress.IPv6Address(b"\0\x64\xff\x9b" + b"\0" * 8 + address.packed),
        ipaddress.IPv6Address(b"\x20\x02" + address.packed + b"\0" * 10),
    )
    assert {is_public(one) for one in carried} == {is_public(address)}


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("https://API.e2b.app", "https://api.e2b.app/", True),
        ("https://api.e2b.app:443", "HTTPS://api.e2b.app.", True),
        ("http://a:80/x/", "http://a/x", True),
        ("https://a", "http://a", False),
        ("https://a", "https://a:444", False),
        ("https://a/x", "https://a/X", False),
        ("https://a/x", "https://a/y", False),
        ("https://u@a", "https://a", False),
        ("https://a.b", "https://b.a", False),
        ("E2B.app", "e2b.app.", True),
        ("a note", "A note", False),
    ],
)
def test_what_leads_to_the_same_place_is_the_same_address(one: str, other: str, same: bool) -> None:
    assert (normalized(one) == normalized(other)) is same


@pytest.fixture
def resolver(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Answers a name with one list of addresses after the other, as a hostile name server does."""
    return partial(resolve_as, monkeypatch)


def test_one_address_in_an_answer_that_is_not_allowed_refuses_the_name(
    resolver: Callable[..., list[str]],
) -> None:
    resolver("mixed.example", ["8.8.8.8", "10.0.0.1"])
    with pytest.raises(AddressRefused, match=r"10\.0\.0\.1"):
        rules().resolve("mixed.example", 443)
    with pytest.raises(AddressRefused):
        check_resolved(FIELDS, {"endpoint": "https://mixed.example"})
    resolver("public.example", ["8.8.8.8"])
    check_resolved(FIELDS, {"endpoint": "https://public.example"})


def _through_urllib3(url: str) -> None:
    provider = SelfManagedProvider()
    config = {"endpoint": url, "token": "secret-0123456789", "max_retries": 0}
    provider.initialize(SelfManagedProvider.check_config(config))


def _through_httpx(url: str) -> None:
    provider = E2BProvider()
    config = {"api_key": "secret-0123456789", "api_url": url, "sandbox_url": url}
    provider.initialize(E2BProvider.check_config(config))
    provider.create_instance()


@pytest.mark.parametrize("connect", [_through_urllib3, _through_httpx])
def test_a_name_that_changes_after_it_was_checked_gains_nothing(
    connect: Callable[[str], None], resolver: Callable[..., list[str]], settings: Any
) -> None:
    """DNS rebinding: the address that was checked is the one that is connected to."""
    with Listener() as internal:
        settings.PROVIDER_PLAIN_HTTP = ["rebinding.example"]
        # The first answer is allowed, and nobody listens there.
        settings.PROVIDER_ALLOWED_NETWORKS = ["127.9.9.9"]
        asked = resolver("rebinding.example", ["127.9.9.9"], ["127.0.0.1"])
        for _ in range(3):
            with pytest.raises(SandboxError):
                connect(f"http://rebinding.example:{internal.port}")
        assert asked
        assert (internal.connections, internal.received) == (0, b"")


@pytest.mark.parametrize("connect", [_through_urllib3, _through_httpx])
def test_a_client_connects_by_each_address_until_one_answers(
    connect: Callable[[str], None], resolver: Callable[..., list[str]], settings: Any
) -> None:
    with Listener() as service:
        settings.PROVIDER_PLAIN_HTTP = ["two.example"]
        settings.PROVIDER_ALLOWED_NETWORKS = ["127.0.0.0/8"]
        resolver("two.example", ["127.0.0.2", "127.0.0.1"])
        with pytest.raises(SandboxError):
            connect(f"http://two.example:{service.port}")
        service.settle()
        assert b"secret-0123456789" in service.received
        assert f"host: two.example:{service.port}".encode() in service.received.lower()


def test_what_is_refused_is_named_in_the_log_alone(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(AddressRefused):
        Receiver(rules()).addresses("127.0.0.1", 5432)
    assert "PROVIDER_ALLOWED_NETWORKS" in caplog.text


def test_the_addresses_of_a_configuration_are_told_without_its_secrets() -> None:
    config = {"endpoint": "https://a.example", "note": "x", "token": "https://secret.example"}
    assert given_addresses(FIELDS, config) == {"endpoint": "https://a.example"}
