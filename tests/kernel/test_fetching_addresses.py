"""Where files are fetched from by URL: the address that is connected to decides."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from executions.kernel.http import (
    BAD_PORTS,
    Destinations,
    FetchError,
    Reason,
    destinations,
    read_url,
    redirected,
)
from providers.addresses import AddressRefused, is_public
from tests.support.fetching import allow, fetch, fetch_one
from tests.support.resolving import resolve_as
from tests.support.web_server import WebServer, answer, redirect

INTERNET = Destinations((), ())
WITH_PRIVATE = Destinations((), (), private=True)


@pytest.fixture(autouse=True)
def _nothing_is_allowed_here(settings: Any) -> None:
    settings.URL_ALLOWED_NETWORKS = []
    settings.ALLOW_PRIVATE_URLS = False


@pytest.fixture
def website() -> Iterator[WebServer]:
    with WebServer() as server:
        server.pages["/secret"] = answer(b"secret")
        yield server


def reason(url: str, to: Destinations = INTERNET) -> Reason | None:
    try:
        read_url(url, to)
    except FetchError as error:
        return error.reason
    return None


@pytest.mark.parametrize(
    "url",
    [
        "https://example.com",
        "http://example.com:8080/a.csv?b=c@d#e",
        "HTTPS://EXAMPLE.com./a b",
        "https://8.8.8.8/",
        "https://[2606:4700::1111]/",
        "https://[::ffff:8.8.8.8]/",
        "https://bücher.example/ü?ü=ü",
        "https://xn--bcher-kva.example/",
        "https://例子。中国/",
        "  https://example.com\n",
    ],
)
def test_urls_of_the_internet_are_read(url: str) -> None:
    assert reason(url) is None


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "127.255.255.254",
        "0.0.0.0",
        "10.0.0.1",
        "172.16.0.1",
        "192.168.1.1",
        "100.64.0.1",
        "100.100.100.200",
        "169.254.169.254",
        "168.63.129.16",
        "192.0.0.192",
        "192.0.2.1",
        "198.18.0.1",
        "198.51.100.1",
        "203.0.113.1",
        "224.0.0.1",
        "240.0.0.1",
        "255.255.255.255",
        "[::]",
        "[::1]",
        "[::127.0.0.1]",
        "[::ffff:127.0.0.1]",
        "[::ffff:a9fe:a9fe]",
        "[0:0:0:0:0:ffff:7f00:1]",
        "[64:ff9b::7f00:1]",
        "[64:ff9b::169.254.169.254]",
        "[64:ff9b:1::a00:1]",
        "[2002:7f00:1::]",
        "[2002:a9fe:a9fe::1]",
        "[2001:0:7f00:1::]",
        "[2001:db8::1]",
        "[3fff::1]",
        "[fc00::1]",
        "[fd00:ec2::254]",
        "[fe80::1]",
        "[fec0::1]",
        "[ff02::1]",
        "[100::1]",
    ],
)
@pytest.mark.parametrize("scheme", ["http", "https"])
def test_no_address_is_fetched_from_that_is_not_of_the_internet(scheme: str, host: str) -> None:
    assert reason(f"{scheme}://{host}/") is Reason.HOST
    assert fetch_one(f"{scheme}://{host}/") is Reason.HOST


@pytest.mark.parametrize(
    "host",
    [
        "2130706433",
        "0x7f000001",
        "0x7f.0.0.1",
        "017700000001",
        "0177.0.0.1",
        "127.1",
        "127.0.1",
        "0",
        "0x",
        "127.0.0.1.",
        "127.0.0.0x1",
        "1.2.3.4.5",
        "08.8.8.8",
        "3232235777",
        "%31%32%37.0.0.1",
        "①②⑦.0.0.1",
        "１２７.0.0.1",
        "ⓛⓞⓒalhost",
        "[::1%25lo]",
        "[fe80::1%25eth0]",
        "[2606:4700::1111%25eth0]",
        "[127.0.0.1]",
        "[v1.x]",
        "[::1",
        "::1",
        "a b.example",
        "a_%00.example",
        "-a.example",
        "a..example",
        "a" * 64 + ".example",
        ".".join(["a" * 60] * 5),
        "",
        "%",
    ],
)
def test_a_host_that_is_spelled_in_another_way_is_refused(host: str) -> None:
    assert reason(f"http://{host}/") is Reason.URL


@pytest.mark.parametrize(
    "url",
    [
        "",
        "example.com/a",
        "//example.com/a",
        "/etc/passwd",
        "file:///etc/passwd",
        "file://example.com/a",
        "ftp://example.com/a",
        "gopher://example.com:70/_x",
        "data:text/plain,x",
        "dict://example.com/x",
        "ldap://example.com",
        "unix:///var/run/docker.sock",
        "javascript:alert(1)",
        "http:example.com",
        "http:///example.com",
        "https://",
        "http://user@example.com",
        "http://user:password@example.com",
        "http://@example.com",
        "http://:@example.com/",
        "http://example.com@10.0.0.1/",
        "http://10.0.0.1#@example.com@/",
        "http://10.0.0.1\\@example.com/",
        "http://example.com\\.evil.example/",
        "http://example.com\r\nHost: evil/",
        "http://exam\tple.com/",
        "http://example.com/\0",
        "http://example.com/\u202e",
        "http://example.com:0/",
        "http://example.com:65536/",
        "http://example.com:-1/",
        "http://example.com:x/",
        "http://example.com/" + "a" * 8192,
        "http://\ud800.example/",
    ],
)
def test_what_is_no_plain_url_is_refused(url: str) -> None:
    assert reason(url) in (Reason.URL, Reason.HOST)
    assert fetch_one(url) in (Reason.URL, Reason.HOST)


def test_ports_of_other_protocols_are_refused() -> None:
    for port in BAD_PORTS:
        assert reason(f"https://example.com:{port}/") is Reason.URL
    for port in (80, 443, 8000, 8443, 9000, 65535):
        assert reason(f"https://example.com:{port}/") is None


@given(st.ip_addresses())
def test_an_address_in_a_url_is_read_exactly_when_it_is_public(address: Any) -> None:
    host = f"[{address}]" if address.version == 6 else str(address)
    assert (reason(f"https://{host}/") is None) is is_public(address)


@given(st.ip_addresses())
def test_private_networks_add_nothing_but_themselves(address: Any) -> None:
    url = f"https://{f'[{address}]' if address.version == 6 else address}/"
    if reason(url) is not None and reason(url, WITH_PRIVATE) is None:
        assert address.is_private
        assert not address.is_loopback
        assert not address.is_link_local
        assert not address.is_unspecified


def test_private_networks_are_allowed_but_neither_this_machine_nor_metadata() -> None:
    for host in ("10.1.2.3", "172.31.0.1", "192.168.1.1", "[fd12::1]", "[::ffff:10.1.2.3]"):
        assert reason(f"http://{host}/", WITH_PRIVATE) is None
    for host in (
        *("127.0.0.1", "127.0.0.53", "[::1]", "0.0.0.0", "[::]", "[::ffff:127.0.0.1]"),
        *("169.254.169.254", "169.254.170.2", "[fe80::1]", "[fd00:ec2::254]", "[fd20:ce::254]"),
        *("100.100.100.200", "100.64.0.1", "168.63.129.16", "224.0.0.1", "192.0.2.1"),
    ):
        assert reason(f"http://{host}/", WITH_PRIVATE) is Reason.HOST


def test_metadata_is_refused_whatever_is_allowed(
    settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.ALLOW_PRIVATE_URLS = True
    settings.URL_ALLOWED_NETWORKS = ["0.0.0.0/0", "::/0", "files.internal"]
    resolve_as(monkeypatch, "files.internal", ["169.254.169.254"])
    to = destinations()
    for host in ("169.254.169.254", "[fd00:ec2::254]", "[::ffff:169.254.169.254]"):
        assert reason(f"http://{host}/", to) is Reason.HOST
    with pytest.raises(AddressRefused):
        to.resolve("files.internal", 80)
    assert reason("http://127.0.0.1:9000/", to) is None


def own_addresses() -> list[str]:
    """Those that this machine sends from into a network."""
    found = []
    for family, somewhere in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((somewhere, 443))
            found.append(str(probe.getsockname()[0]))
    return found


def test_this_machine_is_refused_by_its_addresses_in_the_network_too() -> None:
    """Its own firewall lets it ask itself, so a public address of its own is no way in either."""
    if not (found := own_addresses()):
        pytest.skip("this machine has no address in a network")
    for own in found:
        host = f"[{own}]" if ":" in own else own
        assert reason(f"http://{host}/", WITH_PRIVATE) is Reason.HOST
        assert not WITH_PRIVATE.is_allowed("name.example", ipaddress.ip_address(own), 80)


def test_only_the_named_port_of_this_machine_is_allowed(settings: Any, website: WebServer) -> None:
    with WebServer() as other:
        other.pages["/"] = answer(b"database")
        allow(settings, website)
        assert fetch_one(website.url("/secret")) == b"secret"
        assert fetch_one(other.url("/")) is Reason.HOST
        assert other.connections == 0


def test_a_name_is_refused_by_any_of_its_addresses(
    monkeypatch: pytest.MonkeyPatch, website: WebServer
) -> None:
    resolve_as(monkeypatch, "mixed.example", ["8.8.8.8", "127.0.0.1"])
    assert fetch_one(website.url("/secret", "mixed.example")) is Reason.HOST
    for host in ("localhost", "LOCALHOST", "localhost."):
        assert fetch_one(website.url("/secret", host)) is Reason.HOST
    assert website.connections == 0


def test_a_name_that_changes_after_it_was_checked_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, settings: Any, website: WebServer
) -> None:
    """DNS rebinding: a name is asked for once, and what was checked is connected to."""
    settings.URL_ALLOWED_NETWORKS = [f"127.9.9.9:{website.port}"]
    asked = resolve_as(monkeypatch, "rebinding.example", ["127.9.9.9"], ["127.0.0.1"])
    assert fetch_one(website.url("/secret", "rebinding.example")) is Reason.CONNECTION
    assert len(asked) == 1
    assert fetch_one(website.url("/secret", "rebinding.example")) is Reason.HOST
    assert website.connections == 0


def test_a_name_of_the_internal_network_is_not_told_from_one_that_is_not_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    resolve_as(monkeypatch, "wiki.internal", ["10.1.2.3"])
    resolve_as(monkeypatch, "nobody.internal", [])
    there, not_there = fetch(["http://wiki.internal/", "http://nobody.internal/"])
    assert (there.reason, there.text) == (Reason.HOST, not_there.text)  # type: ignore[union-attr]
    assert "10.1" not in there.text  # type: ignore[union-attr]


@pytest.mark.parametrize("status", ["301 x", "302 x", "303 x", "307 x", "308 x"])
@pytest.mark.parametrize(
    "location",
    [
        "http://127.0.0.1:{port}/secret",
        "//127.0.0.1:{port}/secret",
        "http://localhost:{port}/secret",
        "http://[::ffff:127.0.0.1]:{port}/secret",
        "http://2130706433:{port}/secret",
        "http://rebound.example:{port}/secret",
        "http://169.254.169.254/latest/meta-data/",
        "http://user:password@files.example:{own}/secret",
        "file:///etc/passwd",
        "gopher://127.0.0.1:{port}/_x",
        "ftp://files.example/",
        "http://[::1",
        "",
    ],
)
def test_every_redirect_is_checked_as_the_url_was(
    monkeypatch: pytest.MonkeyPatch,
    settings: Any,
    website: WebServer,
    location: str,
    status: str,
) -> None:
    with WebServer() as outside:
        allow(settings, outside)
        resolve_as(monkeypatch, "rebound.example", ["127.0.0.1"])
        outside.pages["/"] = redirect(location.format(port=website.port, own=outside.port), status)
        assert fetch_one(outside.url("/")) in (Reason.HOST, Reason.URL, Reason.REDIRECTS)
        assert website.connections == 0


def test_redirects_are_followed_a_few_times(settings: Any, website: WebServer) -> None:
    allow(settings, website)
    for hop in range(5):
        website.pages[f"/hops/{hop}"] = redirect(f"{hop + 1}#part")
    website.pages["/hops/5"] = answer(b"there")
    assert fetch_one(website.url("/hops/0")) == b"there"
    website.pages["/hops/5"] = redirect("6")
    assert fetch_one(website.url("/hops/0")) is Reason.REDIRECTS
    website.pages["/loop"] = redirect("/loop")
    assert fetch_one(website.url("/loop")) is Reason.REDIRECTS


def test_no_redirect_leads_from_https_to_http() -> None:
    url = read_url("https://files.example/a", INTERNET)
    assert redirected(url, "//other.example/b", INTERNET).scheme == "https"
    with pytest.raises(FetchError) as caught:
        redirected(url, "http://files.example/a", INTERNET)
    assert caught.value.reason is Reason.REDIRECTS


def test_no_proxy_of_the_environment_is_used(
    monkeypatch: pytest.MonkeyPatch, settings: Any, website: WebServer
) -> None:
    with WebServer() as proxy:
        for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "all_proxy"):
            monkeypatch.setenv(name, proxy.url(""))
        allow(settings, website, proxy)
        assert fetch_one(website.url("/secret")) == b"secret"
        assert proxy.connections == 0
