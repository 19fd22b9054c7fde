"""Credentials that were taken away or changed while a program was connected."""

from __future__ import annotations

import asyncio
import threading
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from ssl import SSLSocket

import pytest

from tests.attacks.network.proxied import (
    BOUND_SECONDS,
    EVIL,
    GOOD,
    VALUE,
    Door,
    Proxied,
    Upstream,
    allowing,
    body_of,
    credential,
    error_of,
    holding,
    inner,
    read_all,
    read_exactly,
    read_head,
    status_of,
)

ASKED = "Authorization: Bearer cfd-secret:key"
SECOND = "another-value-of-it"


@pytest.fixture
def upstream(proxied: Proxied) -> Upstream:
    return proxied.secure()


@pytest.fixture
def door(proxied: Proxied, upstream: Upstream) -> Door:
    return proxied.door(holding(credential(upstream.bound()), lines=[upstream.rule]))


def ask_again(sock: SSLSocket, upstream: Upstream, *headers: str) -> None:
    sock.sendall(inner(upstream, "/", *headers))
    assert status_of(read_head(sock)) == 200
    assert read_exactly(sock, 4) == b"GOOD"


def test_the_next_request_of_a_connection_does_not_get_it(door: Door, upstream: Upstream) -> None:
    with door.tls(GOOD, upstream.port) as sock:
        ask_again(sock, upstream)
        assert upstream.sent("authorization") == [f"Bearer {VALUE}"]
        door.change_credentials({"key": None})
        sock.sendall(inner(upstream, "/", "Connection: close"))
        answer = read_all(sock)
    # Its TLS is not opened any more, so the connection may have ended instead.
    assert status_of(answer) in (200, 403, 0)
    assert all(VALUE.encode() not in head for head in upstream.heads[1:])
    assert [each.credential for each in door.wait_until_idle()][:1] == ["key@1"]
    assert all(each.credential == "" for each in door.attempts[1:])


def test_its_placeholder_is_refused_then(proxied: Proxied, upstream: Upstream) -> None:
    network = holding(credential(upstream.bound()), lines=[f"https://{upstream.rule}/v1"])
    door = proxied.door(network)
    with door.tls(GOOD, upstream.port) as sock:
        sock.sendall(inner(upstream, "/v1", ASKED))
        assert status_of(read_head(sock)) == 200
        assert read_exactly(sock, 4) == b"GOOD"
        door.change_credentials({"key": None})
        sock.sendall(inner(upstream, "/v1", ASKED))
        answer = read_all(sock)
    assert not answer or error_of(answer)["reason"] == "credential"
    assert error_of(door.ask(upstream, "/v1", ASKED))["reason"] == "credential"
    assert upstream.connections == 1


def test_the_next_request_has_the_new_version(door: Door, upstream: Upstream) -> None:
    new = credential(upstream.bound(), value=SECOND, version=2)
    with door.tls(GOOD, upstream.port) as sock:
        ask_again(sock, upstream)
        door.change_credentials({"key": new})
        ask_again(sock, upstream, ASKED)
        assert upstream.sent("authorization") == [f"Bearer {SECOND}"]
    assert [each.credential for each in door.wait_until_idle()] == ["key@1", "key@2"]


def test_a_new_version_has_its_own_rules(proxied: Proxied, door: Door, upstream: Upstream) -> None:
    new = credential(upstream.bound("/v2", "POST"), value=SECOND, version=2)
    door.change_credentials({"key": new})
    assert error_of(door.ask(upstream, "/v1", ASKED))["reason"] == "credential"
    assert status_of(door.ask(upstream, "/v2", method="POST")) == 200
    assert upstream.sent("authorization") == [f"Bearer {SECOND}"]


def test_an_unknown_credential_is_no_new_one(door: Door, upstream: Upstream) -> None:
    door.change_credentials({"other": credential(upstream.bound(), name="other", value=SECOND)})
    door.change_credentials({"nothing": None})
    assert status_of(door.ask(upstream)) == 200
    assert upstream.sent("authorization") == [f"Bearer {VALUE}"]


def test_another_gate_keeps_its_own(proxied: Proxied, door: Door, upstream: Upstream) -> None:
    other = proxied.door(door.gate.network)
    door.change_credentials({"key": None})
    assert status_of(other.ask(upstream)) == 200
    assert upstream.sent("authorization") == [f"Bearer {VALUE}"]


@pytest.mark.parametrize("end", ["revoked", "new version", "other rules"])
def test_a_former_value_is_masked_still(door: Door, upstream: Upstream, end: str) -> None:
    upstream.answer = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(VALUE) + VALUE.encode()
    new = credential(upstream.bound(), value=SECOND, version=2)
    if end == "revoked":
        door.change_credentials({"key": None})
        # So that its answers can be read at all.
        door.change(replace(door.gate.network, layers=allowing(upstream.bound("/v1")).layers))
    elif end == "new version":
        door.change_credentials({"key": new})
    else:
        moved = credential("https://other.example", upstream.bound("/x"), value=SECOND, version=2)
        door.change_credentials({"key": moved})
    assert body_of(door.ask(upstream, "/v1")) == b"*" * len(VALUE)


def test_a_host_that_had_it_is_masked_still_under_other_rules(
    proxied: Proxied, door: Door, upstream: Upstream
) -> None:
    """Of the same version: its value has not changed."""
    said = VALUE.encode()
    upstream.answer = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(said), said)
    moved = credential("https://other.example")
    door.change(holding(moved, lines=[upstream.bound("/v1")]))
    assert body_of(door.ask(upstream, "/v1")) == b"*" * len(VALUE)


def test_hosts_that_a_program_makes_up_are_not_kept(proxied: Proxied) -> None:
    door = proxied.door(holding(credential("https://*.good.example"), lines=["good.example"]))
    tracemalloc.start()
    try:
        for number in range(4000):
            door.gate.mask_for(f"{number}.{EVIL if number % 2 else GOOD}")
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 2 << 20


def test_a_former_value_is_masked_after_many_versions(proxied: Proxied) -> None:
    """And a value that never changed, too."""
    upstream = proxied.secure()
    fixed = credential(upstream.bound(), name="fixed", value="the-fixed-value")
    first = credential(upstream.bound(), placement="header", field="X-Key")
    door = proxied.door(holding(fixed, first, lines=[upstream.rule]))
    for version in range(2, 603):
        new = credential(upstream.bound(), placement="header", field="X-Key",
                         value=f"value-number-{version}-", version=version)  # fmt: skip
        door.change_credentials({"key": new})
        if version % 50 == 1 and version > 100:
            text = f"the-fixed-value value-number-{version}- value-number-{version - 99}-".encode()
            upstream.answer = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(text) + text
            assert b"value" not in body_of(door.ask(upstream))


def held_answer(proxied: Proxied, said: Callable[[], bytes]) -> tuple[Upstream, threading.Event]:
    """A server that begins its answer, and ends it when it may."""
    may_end = threading.Event()

    async def hold(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n\r\nBEGIN\n")
        await asyncio.get_running_loop().run_in_executor(None, may_end.wait, BOUND_SECONDS)
        writer.write(said() + b"\nEND\n")

    upstream = Upstream(b"")
    upstream.port = proxied.server(hold, proxied.authority.context(GOOD))
    return upstream, may_end


@pytest.mark.parametrize("before", ["another version", "no credential", "a closed tunnel"])
def test_an_answer_that_began_before_does_not_show_a_new_value(
    proxied: Proxied, before: str
) -> None:
    """A program that listens to what its host logs would read the new value there."""
    upstream, may_end = held_answer(proxied, SECOND.encode)
    new = credential(upstream.bound(), value=SECOND, version=2)
    rule = upstream.rule if before == "a closed tunnel" else upstream.bound("/v1")
    network = allowing(rule)
    if before == "another version":
        network = replace(network, credentials=(credential(upstream.bound()),))
    door = proxied.door(network)
    context = proxied.authority.trusted if before == "a closed tunnel" else None
    with door.tls(GOOD, upstream.port, context) as sock:
        try:
            sock.sendall(inner(upstream, "/v1", "Connection: close"))
            assert status_of(read_head(sock)) == 200
            if before == "another version":
                door.change_credentials({"key": new})
            else:
                door.change(replace(network, credentials=(new,)))
            may_end.set()
            assert SECOND.encode() not in read_all(sock)
        finally:
            may_end.set()


def test_an_answer_of_another_host_goes_on(proxied: Proxied) -> None:
    upstream, may_end = held_answer(proxied, lambda: b"MORE")
    held = credential(f"https://{EVIL}")
    door = proxied.door(holding(held, lines=[upstream.bound("/v1")]))
    with door.tls(GOOD, upstream.port) as sock:
        try:
            sock.sendall(inner(upstream, "/v1", "Connection: close"))
            assert status_of(read_head(sock)) == 200
            door.change_credentials({"key": replace(held, version=2)})
            may_end.set()
            assert b"MORE" in read_all(sock)
        finally:
            may_end.set()


def test_a_closed_gate_gives_no_value_away(door: Door, upstream: Upstream) -> None:
    with door.tls(GOOD, upstream.port) as sock:
        ask_again(sock, upstream)
        door.close()
        try:
            sock.sendall(inner(upstream))
            assert read_all(sock) == b""
        except OSError:
            pass
    assert upstream.connections == 1


@pytest.mark.parametrize("times", [20])
def test_changes_under_load_never_send_a_revoked_value(
    door: Door, upstream: Upstream, times: int
) -> None:
    with door.tls(GOOD, upstream.port) as sock:
        for version in range(2, times):
            value = f"value-of-version-{version}"
            door.change_credentials(
                {"key": credential(upstream.bound(), value=value, version=version)}
            )
            ask_again(sock, upstream)
            assert upstream.sent("authorization") == [f"Bearer {value}"]
