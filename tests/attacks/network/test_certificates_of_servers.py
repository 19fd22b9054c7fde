"""Servers that claim to be a host which a credential is for."""

from __future__ import annotations

import asyncio
import ssl
import threading
from collections.abc import Callable

import pytest

from providers.runtime.network.authority import Authority
from providers.runtime.network.resolving import CONNECT_SECONDS
from tests.attacks.network.issued import ServerAuthority
from tests.attacks.network.proxied import (
    ADDRESS,
    ANSWER,
    BOUND_SECONDS,
    EVIL,
    GOOD,
    VALUE,
    Door,
    Proxied,
    Upstream,
    credential,
    error_of,
    holding,
    inner,
    read_all,
    status_of,
)


def claim(proxied: Proxied, context: ssl.SSLContext | None, host: str = GOOD) -> Upstream:
    upstream = Upstream(ANSWER, host)
    upstream.port = proxied.server(upstream.handle, context)
    return upstream


def door_of(proxied: Proxied, upstream: Upstream) -> Door:
    return proxied.door(holding(credential(upstream.bound()), lines=[upstream.rule]))


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda a: a.context(EVIL), id="of another name"),
        pytest.param(lambda a: a.context(f"x.{GOOD}"), id="of a name below"),
        pytest.param(lambda a: a.context("*.example"), id="of all names"),
        pytest.param(lambda a: a.context("*"), id="of a star"),
        pytest.param(lambda a: a.context(ADDRESS), id="of the address"),
        pytest.param(lambda a: a.context(common_name=GOOD), id="without alternatives"),
        pytest.param(lambda a: a.context(EVIL, common_name=GOOD), id="of two names"),
        pytest.param(lambda a: a.context(GOOD, days=-1), id="expired"),
        pytest.param(lambda a: a.context(GOOD, own_signature=True), id="signed by itself"),
        pytest.param(lambda a: ServerAuthority().context(GOOD), id="of a stranger"),
    ],
)
def test_a_wrong_certificate_gets_nothing(
    proxied: Proxied, make: Callable[[ServerAuthority], ssl.SSLContext]
) -> None:
    upstream = claim(proxied, make(proxied.authority))
    door = door_of(proxied, upstream)
    answer = door.ask(upstream, "/v1")
    assert status_of(answer) == 502
    told = error_of(answer)
    assert (told["code"], told["reason"]) == ("network_failed", "certificate")
    attempt = door.only()
    assert (attempt.outcome, attempt.why, attempt.path) == ("failed", "certificate", "/v1")
    assert attempt.credential == ""
    assert upstream.heads == []


def test_the_authority_of_the_sandbox_is_not_believed_of_a_server(proxied: Proxied) -> None:
    authority = Authority.create()
    upstream = claim(proxied, authority.context_for(GOOD))
    network = holding(credential(upstream.bound()), lines=[upstream.rule])
    door = proxied.door(network, authority=authority)
    told = error_of(door.ask(upstream))
    assert told["reason"] == "certificate"
    assert upstream.heads == []


def test_a_right_certificate_is_a_positive_control(proxied: Proxied) -> None:
    upstream = claim(proxied, proxied.authority.context(EVIL, GOOD))
    assert status_of(door_of(proxied, upstream).ask(upstream)) == 200
    wild = claim(proxied, proxied.authority.context("*.good.example"), "a.good.example")
    proxied.names["a.good.example"] = [[ADDRESS]]
    assert status_of(door_of(proxied, wild).ask(wild)) == 200


def test_an_address_has_a_certificate_of_its_own(proxied: Proxied) -> None:
    upstream = claim(proxied, proxied.authority.context(ADDRESS), ADDRESS)
    door = door_of(proxied, upstream)
    assert status_of(door.ask(upstream)) == 200
    assert upstream.sent("authorization") == [f"Bearer {VALUE}"]
    wrong = claim(proxied, proxied.authority.context(GOOD), ADDRESS)
    assert status_of(door_of(proxied, wrong).ask(wrong)) == 502
    assert wrong.heads == []


def test_a_server_of_plain_http_gets_nothing(proxied: Proxied) -> None:
    heard: list[bytes] = []

    async def hear(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.append(await reader.read(1 << 16))
        writer.write(ANSWER)

    upstream = Upstream(ANSWER)
    upstream.port = proxied.server(hear)
    answer = door_of(proxied, upstream).ask(upstream)
    assert status_of(answer) == 502
    assert all(VALUE.encode() not in each and b"GET" not in each for each in heard)


@pytest.mark.parametrize("said", [
    b"", b"\x15\x03\x03\x00\x02\x02\x28", b"\x16\x03\x03\xff\xff" + bytes(70_000), b"\0" * 1000,
])  # fmt: skip
def test_a_broken_handshake_is_a_failure(proxied: Proxied, said: bytes) -> None:
    async def say(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1 << 16)
        writer.write(said)

    upstream = Upstream(ANSWER)
    upstream.port = proxied.server(say)
    door = door_of(proxied, upstream)
    told = error_of(door.ask(upstream))
    assert told["code"] == "network_failed"
    assert VALUE not in str(told)
    assert door.only().outcome == "failed"


def test_a_server_that_does_not_shake_hands_is_given_up(proxied: Proxied) -> None:
    heard = threading.Event()

    async def hold(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(1 << 16):
            heard.set()

    upstream = Upstream(ANSWER)
    upstream.port = proxied.server(hold)
    door = door_of(proxied, upstream)
    with door.tls(GOOD, upstream.port) as sock:
        sock.sendall(inner(upstream, "/", "Connection: close"))
        assert heard.wait(BOUND_SECONDS)
        proxied.pass_time(CONNECT_SECONDS + 1)
        proxied.pass_time(60)
        assert status_of(read_all(sock)) == 502
    assert door.only().outcome == "failed"


def test_a_certificate_is_checked_at_each_request(proxied: Proxied) -> None:
    """Another server may be there by then."""
    right, wrong = proxied.authority.context(GOOD), proxied.authority.context(EVIL)
    contexts = [right, wrong]
    right.sni_callback = lambda sock, name, context: setattr(sock, "context", contexts.pop(0))
    upstream = claim(proxied, right)
    door = door_of(proxied, upstream)
    with door.tls(GOOD, upstream.port) as sock:
        sock.sendall(inner(upstream) + inner(upstream))
        answer = read_all(sock)
    assert answer.count(b"HTTP/1.1 200") == 1
    assert answer.count(b"HTTP/1.1 502") == 1
    assert len(upstream.heads) == 1


def test_the_name_is_sent_that_was_asked_for(proxied: Proxied) -> None:
    names: list[str | None] = []
    context = proxied.authority.context(GOOD)
    context.sni_callback = lambda sock, name, context: names.append(name)
    upstream = claim(proxied, context)
    assert status_of(door_of(proxied, upstream).ask(upstream)) == 200
    assert names == [GOOD]


def test_an_old_version_of_tls_gets_nothing(proxied: Proxied) -> None:
    context = proxied.authority.context(GOOD)
    context.set_ciphers("ALL:@SECLEVEL=0")
    context.minimum_version = ssl.TLSVersion.TLSv1
    context.maximum_version = ssl.TLSVersion.TLSv1_1
    upstream = claim(proxied, context)
    assert status_of(door_of(proxied, upstream).ask(upstream)) == 502
    assert upstream.heads == []


def test_a_server_that_asks_for_http_2_gets_http_1(proxied: Proxied) -> None:
    context = proxied.authority.context(GOOD)
    context.set_alpn_protocols(["h2", "http/1.1"])
    upstream = claim(proxied, context)
    assert status_of(door_of(proxied, upstream).ask(upstream)) == 200
    assert upstream.heads[0].startswith(b"GET / HTTP/1.1\r\n")
