"""Servers whose answers are meant for the proxy."""

from __future__ import annotations

import asyncio

import pytest

from tests.attacks.network.proxied import (
    ANSWER,
    GOOD,
    Proxied,
    allowing,
    error_of,
    get,
    status_of,
)

OK = b"HTTP/1.1 200 OK\r\n"


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"\0" * 100,
        b"garbage\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX : y\r\n\r\n",
        b"HTTP/1.1 99 Low\r\n\r\n",
        OK + b"X: " + b"y" * 500_000,
        OK + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n",
        OK + b"Content-Length: -1\r\n\r\n",
        OK + b"Transfer-Encoding: gzip, chunked\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: h2c\r\nConnection: Upgrade\r\n\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\n" * 1000,
        b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n" * 17 + ANSWER,
    ],
)
def test_what_is_no_response_is_a_failure_of_that_host(proxied: Proxied, answer: bytes) -> None:
    upstream = proxied.upstream(answer)
    door = proxied.door(allowing(upstream.rule))
    found = door.talk(get(GOOD, upstream.port))
    assert status_of(found) == 502, found[:300]
    assert error_of(found)["code"] == "network_failed"
    attempt = door.only()
    assert (attempt.outcome, attempt.why) == ("failed", "unreachable")


def test_endless_informational_responses_end(proxied: Proxied) -> None:
    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        while True:
            writer.write(b"HTTP/1.1 102 Processing\r\n\r\n")
            await writer.drain()

    port = proxied.server(flood)
    door = proxied.door(allowing(f"{GOOD}:{port}"))
    assert status_of(door.talk(get(GOOD, port))) == 502


@pytest.mark.parametrize("more", [ANSWER, b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nEVIL"])
def test_a_second_response_is_not_passed_on(proxied: Proxied, more: bytes) -> None:
    upstream = proxied.upstream(ANSWER + more)
    door = proxied.door(allowing(upstream.rule))
    asked = get(GOOD, upstream.port).replace(b"Connection: close\r\n", b"")
    answer = door.talk(asked + asked)
    assert b"EVIL" not in answer
    assert answer.count(b"HTTP/1.1 200") == answer.count(b"GOOD") == 2
    assert len(upstream.heads) == 2


def test_two_lengths_of_a_response_become_one(proxied: Proxied) -> None:
    body = b"2f\r\n" + b"GOOD" + b"." * 43 + b"\r\n0\r\n\r\n"
    framing = b"Transfer-Encoding: chunked\r\nContent-Length: 4\r\n\r\n"
    upstream = proxied.upstream(OK + framing + body)
    door = proxied.door(allowing(upstream.rule))
    head, _, _ = door.talk(get(GOOD, upstream.port)).partition(b"\r\n\r\n")
    assert b"content-length" not in head.lower()
    assert b"transfer-encoding: chunked" in head.lower()
    assert door.only().outcome == "allowed"


@pytest.mark.parametrize("rest", [b"Content-Length: 100\r\n\r\nsome",
                                  b"Transfer-Encoding: chunked\r\n\r\n4\r\nsome\r\n",
                                  b"Transfer-Encoding: chunked\r\n\r\nzz\r\n"])  # fmt: skip
def test_a_body_that_is_cut_off_is_seen_to_be(proxied: Proxied, rest: bytes) -> None:
    upstream = proxied.upstream(OK + rest)
    door = proxied.door(allowing(upstream.rule))
    answer = door.talk(get(GOOD, upstream.port))
    assert not answer.endswith(b"0\r\n\r\n")
    assert answer.count(b"HTTP/1.1") == 1
    assert door.only().outcome == "failed"


def test_headers_for_the_proxy_stay_there(proxied: Proxied) -> None:
    own = (
        b"Connection: x-own, content-length\r\nX-Own: 1\r\nKeep-Alive: 1\r\n"
        b"Proxy-Authenticate: Basic\r\nUpgrade: h2c\r\nContent-Length: 4\r\nX-Kept: 1\r\n\r\nGOOD"
    )
    upstream = proxied.upstream(OK + own)
    door = proxied.door(allowing(upstream.rule))
    answer = door.talk(get(GOOD, upstream.port))
    assert answer.endswith(b"GOOD")
    for name in (b"X-Own", b"Keep-Alive:", b"Proxy-Authenticate", b"Upgrade"):
        assert name.lower() not in answer.lower()
    assert b"X-Kept" in answer


def test_the_body_of_a_failure_is_json_whatever_the_server_said(proxied: Proxied) -> None:
    upstream = proxied.upstream(b'HTTP/1.1 200 "\x01}<script>\r\nbad\r\n\r\n')
    door = proxied.door(allowing(upstream.rule))
    told = error_of(door.talk(get(GOOD, upstream.port)))
    assert (told["host"], told["port"]) == (GOOD, upstream.port)
