"""Upstreams that programs reach by a name of the sandbox, without TLS of their own."""

from __future__ import annotations

from dataclasses import replace

import pytest

from providers.credentials import Credential, Placement
from tests.attacks.network.proxied import (
    GOOD,
    VALUE,
    Door,
    Proxied,
    Upstream,
    body_of,
    connect_head,
    credential,
    error_of,
    get,
    holding,
    status_of,
)

NAMED = "key.sandbox"


@pytest.fixture
def upstream(proxied: Proxied) -> Upstream:
    return proxied.secure()


def named(upstream: Upstream, placement: Placement = "bearer", field: str = "") -> Credential:
    """The credential `key`, whose upstream is /v1 of the server."""
    held = credential(upstream.bound("/v1", "GET,POST"))
    address = f"https://{upstream.rule}/v1/"
    return replace(held, placement=placement, field=field, upstream=address)


@pytest.fixture
def door(proxied: Proxied, upstream: Upstream) -> Door:
    return proxied.door(holding(named(upstream), lines=[upstream.rule]))


def test_a_plain_request_reaches_it_by_tls_with_its_credential(
    door: Door, upstream: Upstream
) -> None:
    assert body_of(door.talk(get(NAMED, 80, "/chat?a=b"))) == b"GOOD"
    assert upstream.heads[-1].startswith(b"GET /v1/chat?a=b HTTP/1.1\r\n")
    assert upstream.sent("authorization") == [f"Bearer {VALUE}"]
    assert upstream.sent("host") == [upstream.rule]
    attempt = door.only()
    assert (attempt.host, attempt.port, attempt.path) == (GOOD, upstream.port, "/v1/chat?a=b")
    assert (attempt.outcome, attempt.credential) == ("allowed", "key@1")


def test_what_the_program_says_in_its_place_is_replaced(door: Door, upstream: Upstream) -> None:
    for said in ("Bearer none", "Bearer cfd-secret:key", "Basic bm9uZTpub25l"):
        door.talk(get(NAMED, 80, "/a", f"Authorization: {said}"))
        assert upstream.sent("authorization") == [f"Bearer {VALUE}"]


@pytest.mark.parametrize("path", ["/../admin", "/%2e%2e/admin", "//a", "/a/..;/..;/b"])
def test_no_path_leads_out_of_what_it_is_bound_to(
    door: Door, upstream: Upstream, path: str
) -> None:
    answer = door.talk(get(NAMED, 80, path))
    assert status_of(answer) == 403
    assert error_of(answer)["reason"] == "credential"
    assert upstream.heads == []


def test_another_method_gets_no_credential(door: Door, upstream: Upstream) -> None:
    assert status_of(door.talk(get(NAMED, 80, "/a", method="DELETE"))) == 403
    assert upstream.heads == []


def test_a_host_that_no_list_allows_is_not_reached_by_a_name(
    proxied: Proxied, upstream: Upstream
) -> None:
    door = proxied.door(holding(named(upstream), lines=["other.example"]))
    answer = door.talk(get(NAMED, 80, "/a"))
    assert error_of(answer)["reason"] == "not_allowed"
    assert upstream.heads == []
    assert proxied.looked_up == []


def test_a_name_that_is_of_no_upstream_is_not_looked_up(
    proxied: Proxied, door: Door, upstream: Upstream
) -> None:
    door.change(holding(replace(named(upstream), upstream=""), lines=[upstream.rule]))
    for name in (NAMED, "other.sandbox", "a.key.sandbox", "sandbox"):
        assert error_of(door.talk(get(name, 80, "/a")))["reason"] == "not_allowed"
    assert proxied.looked_up == []


def test_it_is_reached_on_its_own_port_and_without_a_tunnel_only(
    proxied: Proxied, door: Door
) -> None:
    assert error_of(door.talk(get(NAMED, 8080, "/a")))["reason"] == "not_allowed"
    assert status_of(door.talk(connect_head(NAMED, 80))) == 403
    assert status_of(door.talk(connect_head(NAMED, 443))) == 403
    assert proxied.looked_up == []


def test_a_revoked_one_is_gone_with_the_next_request(door: Door, upstream: Upstream) -> None:
    assert status_of(door.talk(get(NAMED, 80, "/a"))) == 200
    door.change_credentials({named(upstream).id: None})
    assert error_of(door.talk(get(NAMED, 80, "/a")))["reason"] == "not_allowed"
    assert len(upstream.heads) == 1


def test_its_value_is_masked_in_the_answer(proxied: Proxied) -> None:
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(VALUE) + VALUE.encode()
    upstream = proxied.secure(answer)
    door = proxied.door(holding(named(upstream), lines=[upstream.rule]))
    assert body_of(door.talk(get(NAMED, 80, "/a"))) == b"*" * len(VALUE)


def test_the_placeholder_of_another_credential_is_refused(
    proxied: Proxied, upstream: Upstream
) -> None:
    other = replace(credential(upstream.bound()), id="2", name="other")
    door = proxied.door(holding(named(upstream, "header", "X-Key"), other, lines=[upstream.rule]))
    answer = door.talk(get(NAMED, 80, "/a", "Authorization: Bearer cfd-secret:other"))
    assert error_of(answer)["reason"] == "credential"
    assert upstream.heads == []


def test_a_header_that_the_program_names_for_removal_is_sent_all_the_same(
    proxied: Proxied, upstream: Upstream
) -> None:
    door = proxied.door(holding(named(upstream, "header", "X-Key"), lines=[upstream.rule]))
    door.talk(get(NAMED, 80, "/a", "Connection: X-Key, Host", "X-Key: own"))
    assert upstream.sent("x-key") == [VALUE]
    assert upstream.sent("host") == [upstream.rule]
