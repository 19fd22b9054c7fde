"""Services that programs reach as http://NAME.sandbox/, with a credential and without TLS."""

from __future__ import annotations

import pytest

from tests.attacks.network.issued import ServerAuthority
from tests.attacks.network.proxied import (
    EVIL,
    GOOD,
    VALUE,
    Door,
    Proxied,
    Upstream,
    body_of,
    client_hello,
    connect_head,
    credential,
    error_of,
    get,
    holding,
    opened,
    read_all,
    read_head,
    status_of,
)

ASKED = "Authorization: Bearer cfd-secret:key"


@pytest.fixture
def upstream(proxied: Proxied) -> Upstream:
    return proxied.secure()


def door_of(proxied: Proxied, upstream: Upstream, path: str = "/v1") -> Door:
    held = credential(upstream.bound(path, "GET,POST"), upstream=f"https://{upstream.rule}{path}")
    return proxied.door(holding(held, lines=[f"https://{upstream.rule}"]))


@pytest.fixture
def door(proxied: Proxied, upstream: Upstream) -> Door:
    return door_of(proxied, upstream)


def test_it_has_its_credential_whatever_the_program_says(door: Door, upstream: Upstream) -> None:
    for headers in ((), (ASKED,), ("Authorization: Bearer own",), ("authorization: x", ASKED)):
        assert body_of(door.talk(get("key.sandbox", 80, "/a?b=c", *headers))) == b"GOOD"
        assert upstream.heads[-1].startswith(b"GET /v1/a?b=c HTTP/1.1\r\n")
        assert upstream.sent("authorization") == [f"Bearer {VALUE}"]
        assert upstream.sent("host") == [upstream.rule]
    assert {each.credential for each in door.wait_until_idle()} == {"key@1"}
    assert {(each.host, each.outcome) for each in door.attempts} == {(GOOD, "allowed")}


@pytest.mark.parametrize(
    "path",
    [
        "/../admin", "/..%2fadmin", "/%2e%2e/admin", "/..;/admin", "//x", "/./x", "/..\\x",
        "/%2e%2e%2fadmin", "/..", "/a/../../x", "/%252e%252e/x", "/..%c0%af",
    ],
)  # fmt: skip
def test_a_path_does_not_lead_out_of_it(door: Door, upstream: Upstream, path: str) -> None:
    answer = door.talk(get("key.sandbox", 80, path))
    assert status_of(answer) in (400, 403), answer
    assert upstream.connections == 0
    assert door.only().credential == ""


@pytest.mark.parametrize("method", ["PUT", "DELETE", "TRACE", "PROPFIND"])
def test_its_rules_are_those_of_its_credential(door: Door, upstream: Upstream, method: str) -> None:
    answer = door.talk(get("key.sandbox", 80, "/a", method=method))
    assert status_of(answer) == 403
    assert upstream.connections == 0


@pytest.mark.parametrize("host", [
    "other.sandbox", "x.key.sandbox", "key.sandbox.evil.example", "keys.sandbox", "sandbox",
    "key", "key.sandbox.sandbox",
])  # fmt: skip
def test_another_name_is_none(proxied: Proxied, door: Door, upstream: Upstream, host: str) -> None:
    proxied.names[host] = [["127.0.0.2"]]
    assert status_of(door.talk(get(host, 80))) == 403
    assert upstream.connections == 0
    assert proxied.looked_up == []


def test_it_has_one_port_and_one_protocol(door: Door, upstream: Upstream) -> None:
    for port in (443, 8080, upstream.port):
        assert status_of(door.talk(get("key.sandbox", port))) == 403
        with door.connect() as sock:
            sock.sendall(connect_head("key.sandbox", port) + client_hello("key.sandbox"))
            assert status_of(read_head(sock)) == 403
    with door.connect() as sock:
        sock.sendall(connect_head("key.sandbox", 80) + get("key.sandbox", 80))
        assert VALUE.encode() not in read_all(sock)
    assert upstream.connections == 0


@pytest.mark.parametrize("header", [
    "X: cfd-secret:key", "Cookie: cfd-secret:key", "Authorization: Bearer cfd-secret:other",
])  # fmt: skip
def test_a_placeholder_elsewhere_is_refused(door: Door, upstream: Upstream, header: str) -> None:
    told = error_of(door.talk(get("key.sandbox", 80, "/", header)))
    assert told["reason"] == "credential"
    assert (
        error_of(door.talk(get("key.sandbox", 80, "/?a=cfd-secret:key")))["reason"] == "credential"
    )
    assert upstream.connections == 0


def test_another_host_in_a_header_changes_nothing(door: Door, upstream: Upstream) -> None:
    asked = f"GET http://key.sandbox/ HTTP/1.1\r\nHost: {upstream.rule}\r\n\r\n".encode()
    assert status_of(door.talk(asked)) == 400
    twice = b"GET http://key.sandbox/ HTTP/1.1\r\nHost: key.sandbox\r\nHost: x\r\n\r\n"
    assert status_of(door.talk(twice)) == 400
    named = get("key.sandbox", 80, "/", "Connection: host, authorization")
    assert status_of(door.talk(named)) in (200, 400)
    for head in upstream.heads:
        assert f"Host: {upstream.rule}\r\n".encode() in head
        assert head.count(VALUE.encode()) == 1


def test_what_its_server_says_is_masked(door: Door, upstream: Upstream) -> None:
    said = f"Bearer {VALUE}".encode()
    upstream.answer = b"HTTP/1.1 200 OK\r\nX-A: %s\r\nContent-Length: %d\r\n\r\n%s" % (
        said, len(said), said,
    )  # fmt: skip
    answer = door.talk(get("key.sandbox", 80, "/", "Range: bytes=0-3", "Accept-Encoding: gzip"))
    assert VALUE.encode() not in answer
    assert body_of(answer) == b"Bearer " + b"*" * len(VALUE)
    assert upstream.sent("range") == []
    assert upstream.sent("accept-encoding") == ["identity"]


def test_a_revoked_one_is_gone(proxied: Proxied, door: Door, upstream: Upstream) -> None:
    with door.connect() as sock:
        asked = get("key.sandbox", 80).replace(b"Connection: close\r\n", b"")
        sock.sendall(asked)
        assert status_of(read_head(sock)) == 200
        door.change_credentials({"key": None})
        sock.sendall(asked)
        answer = read_all(sock)
    assert status_of(answer.removeprefix(b"GOOD")) in (403, 0)
    assert status_of(door.talk(get("key.sandbox", 80))) == 403
    assert upstream.connections == 1


def test_another_sandbox_has_no_such_name(proxied: Proxied, door: Door, upstream: Upstream) -> None:
    for network in (holding(lines=[f"https://{upstream.rule}"]), opened()):
        other = proxied.door(network)
        assert status_of(other.talk(get("key.sandbox", 80))) in (403, 502)
    assert upstream.connections == 0


def test_the_lists_hold_for_it(proxied: Proxied, upstream: Upstream) -> None:
    held = credential(upstream.bound("/v1"), upstream=f"https://{upstream.rule}/v1")
    door = proxied.door(holding(held, lines=["other.example", "key.sandbox"]))
    assert error_of(door.talk(get("key.sandbox", 80)))["reason"] == "not_allowed"
    assert upstream.connections == 0


def test_its_server_must_prove_its_name(proxied: Proxied) -> None:
    for context in (proxied.authority.context(EVIL), ServerAuthority().context(GOOD)):
        upstream = Upstream(b"")
        upstream.port = proxied.server(upstream.handle, context)
        door = door_of(proxied, upstream)
        told = error_of(door.talk(get("key.sandbox", 80)))
        assert told["code"] == "network_failed"
        assert VALUE not in str(told)
        assert all(VALUE.encode() not in head for head in upstream.heads)


def test_an_address_inside_is_guarded_for_it_too(proxied: Proxied, upstream: Upstream) -> None:
    door = door_of(proxied, upstream)
    proxied.names[GOOD] = [["127.0.0.1"]]
    assert error_of(door.talk(get("key.sandbox", 80)))["reason"] == "address"
    assert upstream.connections == 0
