"""Values in answers that are packed, and packed answers that are weapons."""

from __future__ import annotations

import asyncio
import gzip
import tracemalloc
import zlib

import pytest

from tests.attacks.network.proxied import (
    GOOD,
    VALUE,
    Door,
    Proxied,
    Upstream,
    body_of,
    credential,
    error_of,
    holding,
    inner,
    read_all,
    status_of,
)

RAW = VALUE.encode()
STARS = b"*" * len(RAW)
TEXT = b"one " * 1000 + RAW + b" two" * 1000
MASKED = TEXT.replace(RAW, STARS)
BUDGET = 4 << 20


def packed(text: bytes, level: int = 9) -> bytes:
    return gzip.compress(text, level, mtime=0)


def raw_deflate(data: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return packer.compress(data) + packer.flush()


def packed_answer(coding: str, body: bytes, *headers: str) -> bytes:
    lines = ["HTTP/1.1 200 OK", f"Content-Encoding: {coding}", f"Content-Length: {len(body)}"]
    return "\r\n".join([*lines, *headers, "", ""]).encode() + body


@pytest.fixture
def upstream(proxied: Proxied) -> Upstream:
    return proxied.secure()


@pytest.fixture
def door(proxied: Proxied, upstream: Upstream) -> Door:
    held = credential(upstream.bound("/v1"))
    return proxied.door(holding(held, lines=[upstream.rule]))


@pytest.mark.parametrize(
    ("coding", "body"),
    [
        ("gzip", packed(TEXT)),
        ("GZIP", packed(TEXT)),
        ("x-gzip", packed(TEXT)),
        ("identity, gzip", packed(TEXT)),
        ("gzip", packed(TEXT, 0)),
        ("deflate", zlib.compress(TEXT)),
        ("identity", TEXT),
        ("", TEXT),
    ],
    ids=["gzip", "GZIP", "x-gzip", "after identity", "stored", "deflate", "identity", "empty"],
)
def test_a_packed_value_is_masked(door: Door, upstream: Upstream, coding: str, body: bytes) -> None:
    upstream.answer = packed_answer(coding, body)
    answer = door.ask(upstream, "/v1")
    assert body_of(answer) == MASKED
    assert b"gzip" not in answer.lower()
    assert b"deflate" not in answer
    assert door.only().outcome == "allowed"


def test_a_packed_value_in_pieces_is_masked(proxied: Proxied) -> None:
    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\n\r\n")
        packer = zlib.compressobj(wbits=zlib.MAX_WBITS | 16)
        for at in range(len(RAW)):
            writer.write(packer.compress(RAW[at : at + 1]) + packer.flush(zlib.Z_SYNC_FLUSH))
            await writer.drain()
        writer.write(packer.flush())

    upstream = Upstream(b"")
    upstream.port = proxied.server(drip, proxied.authority.context(GOOD))
    door = proxied.door(holding(credential(upstream.bound()), lines=[upstream.rule]))
    assert body_of(door.ask(upstream)) == STARS


@pytest.mark.parametrize("coding", [
    "br", "zstd", "compress", "x-compress", "exi", "gzip, gzip", "gzip, br", "br, gzip",
    "deflate, gzip", "gzip;q=1", "x", "*", "aws-chunked", "gzip, identity, gzip",
])  # fmt: skip
def test_what_cannot_be_unpacked_does_not_arrive(
    door: Door, upstream: Upstream, coding: str
) -> None:
    upstream.answer = packed_answer(coding, TEXT)
    answer = door.ask(upstream, "/v1")
    assert status_of(answer) == 502
    assert error_of(answer)["code"] == "network_failed"
    assert RAW not in answer
    attempt = door.only()
    assert (attempt.outcome, attempt.credential) == ("failed", "key@1")


def test_two_headers_are_one_list(door: Door, upstream: Upstream) -> None:
    upstream.answer = packed_answer("gzip", packed(TEXT), "content-encoding: gzip")
    assert status_of(door.ask(upstream, "/v1")) == 502
    upstream.answer = packed_answer("identity", TEXT, "Content-Encoding: br")
    assert status_of(door.ask(upstream, "/v1")) == 502


def test_the_connection_header_does_not_hide_a_coding(door: Door, upstream: Upstream) -> None:
    """Without its Content-Encoding a packed body would be passed on as it is."""
    for named in ("content-encoding", "Content-Encoding, x", "CONTENT-ENCODING"):
        upstream.answer = packed_answer("gzip", packed(TEXT), f"Connection: {named}")
        answer = door.ask(upstream, "/v1")
        if status_of(answer) == 200:
            assert body_of(answer) == MASKED


@pytest.mark.parametrize("body", [
    raw_deflate(TEXT), TEXT, b"\x1f\x8b" + TEXT, packed(TEXT)[:-20],
    packed(TEXT)[:30], packed(TEXT)[:-8] + bytes(8), packed(TEXT) + RAW,
    b"\x1f\x8b\x08\x00" + bytes(6) + RAW,
], ids=["raw", "plain", "magic", "cut off", "begun", "wrong sum", "more", "not packed"])  # fmt: skip
@pytest.mark.parametrize("coding", ["gzip", "deflate"])
def test_what_is_not_packed_as_it_says_is_never_passed_on_as_it_is(
    door: Door, upstream: Upstream, body: bytes, coding: str
) -> None:
    upstream.answer = packed_answer(coding, body)
    answer = door.ask(upstream, "/v1")
    assert RAW not in answer
    assert answer.count(b"HTTP/1.1") == 1
    door.wait_until_idle()


def test_a_cut_off_body_is_seen_to_be(door: Door, upstream: Upstream) -> None:
    upstream.answer = packed_answer("gzip", packed(TEXT)[:-20])
    answer = door.ask(upstream, "/v1")
    assert not answer.endswith(b"0\r\n\r\n")
    assert door.only().outcome == "failed"


def test_a_body_of_several_members_is_whole(door: Door, upstream: Upstream) -> None:
    """The border of two members is no border of a value."""
    body = packed(TEXT) + packed(b"more " + RAW[:10]) + packed(RAW[10:])
    upstream.answer = packed_answer("gzip", body)
    answer = door.ask(upstream, "/v1")
    if status_of(answer) == 200 and answer.endswith(b"0\r\n\r\n"):
        assert body_of(answer) == MASKED + b"more " + STARS
    else:
        assert door.only().outcome == "failed"


def test_nothing_packed_is_nothing(door: Door, upstream: Upstream) -> None:
    upstream.answer = packed_answer("gzip", b"")
    answer = door.ask(upstream, "/v1")
    assert status_of(answer) == 200
    assert body_of(answer) == b""
    for head in (b"HTTP/1.1 204 No\r\n", b"HTTP/1.1 304 Same\r\n"):
        upstream.answer = head + b"Content-Encoding: gzip\r\nX-A: " + RAW + b"\r\n\r\n"
        answer = door.ask(upstream, "/v1")
        assert status_of(answer) in (204, 304)
        assert RAW not in answer


@pytest.mark.parametrize("headers", [
    "Content-Range: bytes 0-3/100", "Content-Type: multipart/byteranges; boundary=x",
])  # fmt: skip
def test_a_part_does_not_arrive(door: Door, upstream: Upstream, headers: str) -> None:
    for path in ("/v1", "/v2"):
        upstream.answer = (
            f"HTTP/1.1 206 Part\r\n{headers}\r\nContent-Length: 4\r\n\r\n".encode() + RAW[:4]
        )
        answer = door.ask(upstream, path, "Range: bytes=0-3", "Request-Range: bytes=0-3")
        assert status_of(answer) == 502
        assert RAW[:4] not in answer


def read_with_memory(door: Door, upstream: Upstream, most: int, limit: int | None = None) -> int:
    """How many bytes arrive, while the proxy holds no more than it may."""
    tracemalloc.start()
    try:
        with door.tls(GOOD, upstream.port) as sock:
            sock.sendall(inner(upstream, "/v1", "Connection: close"))
            found = 0
            try:
                while (limit is None or found < limit) and (data := sock.recv(1 << 16)):
                    found += len(data)
            except OSError:
                pass
            _, peak = tracemalloc.get_traced_memory()
            assert peak < most
            return found
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
def test_a_bomb_stops_at_the_budget(proxied: Proxied, coding: str) -> None:
    packer = zlib.compressobj(9, wbits=zlib.MAX_WBITS | (16 if coding == "gzip" else 0))
    zeros = bytes(1 << 20)
    body = b"".join(packer.compress(zeros) for _ in range(256)) + packer.flush()
    upstream = proxied.secure(packed_answer(coding, body))
    held = credential(upstream.bound())
    door = proxied.door(holding(held, lines=[upstream.rule], bytes=BUDGET))
    found = read_with_memory(door, upstream, 8 << 20)
    assert found <= BUDGET
    attempt = door.only()
    assert attempt.outcome == "failed"
    assert attempt.received <= BUDGET + (1 << 20)


def test_a_bomb_that_is_not_read_waits_in_bounded_memory(proxied: Proxied) -> None:
    packer = zlib.compressobj(9, wbits=zlib.MAX_WBITS | 16)
    zeros = bytes(1 << 20)
    body = b"".join(packer.compress(zeros) for _ in range(512)) + packer.flush()
    upstream = proxied.secure(packed_answer("gzip", body))
    door = proxied.door(holding(credential(upstream.bound()), lines=[upstream.rule]))
    tracemalloc.start()
    try:
        with door.tls(GOOD, upstream.port) as sock:
            sock.sendall(inner(upstream, "/v1", "Connection: close"))
            sock.recv(1)
            proxied.run(asyncio.sleep(1.0))
            _, peak = tracemalloc.get_traced_memory()
        assert peak < 12 << 20
    finally:
        tracemalloc.stop()
    assert len(door.wait_until_idle()) == 1


@pytest.mark.parametrize("kind", ["empty blocks", "after the end", "empty members"])
def test_packed_bytes_that_become_none_stop_at_the_budget(proxied: Proxied, kind: str) -> None:
    """A program could have a server send for ever, and the proxy keep what nobody gets."""
    sent = 0
    start = zlib.compressobj(wbits=zlib.MAX_WBITS | 16).flush(zlib.Z_SYNC_FLUSH)
    first, more = {
        "empty blocks": (start, b"\0\0\0\xff\xff" * 10_000),
        "after the end": (packed(b"end"), bytes(50_000)),
        "empty members": (packed(b""), packed(b"") * 2500),
    }[kind]

    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\n\r\n" + first)
        while sent < 8 * BUDGET:
            writer.write(more)
            await writer.drain()
            # Of a connection that has ended nothing is waited for.
            await asyncio.sleep(0)
            sent += len(more)

    upstream = Upstream(b"")
    upstream.port = proxied.server(flood, proxied.authority.context(GOOD))
    held = credential(upstream.bound())
    door = proxied.door(holding(held, lines=[upstream.rule], bytes=BUDGET))
    read_with_memory(door, upstream, 6 << 20)
    door.wait_until_idle()
    assert sent < 3 * BUDGET


def test_a_packed_answer_of_another_host_is_left_alone(proxied: Proxied) -> None:
    body = packed(TEXT)
    upstream = proxied.secure(packed_answer("gzip", body))
    held = credential("https://other.example")
    door = proxied.door(holding(held, lines=[f"GET https://{upstream.rule}"]))
    answer = door.ask(upstream)
    assert body_of(answer) == body
    assert b"Content-Encoding: gzip" in answer


def test_a_program_of_http_1_0_gets_it_unpacked(door: Door, upstream: Upstream) -> None:
    upstream.answer = packed_answer("gzip", packed(TEXT))
    with door.tls(GOOD, upstream.port) as sock:
        sock.sendall(f"GET /v1 HTTP/1.0\r\nHost: {upstream.rule}\r\n\r\n".encode())
        answer = read_all(sock)
    assert answer.endswith(MASKED)
    assert b"Content-Length: %d\r\n" % len(packed(TEXT)) not in answer


def test_a_packed_request_is_passed_as_it_is(door: Door, upstream: Upstream) -> None:
    body = packed(b"cfd-secret:key")
    answer = door.ask(upstream, "/v1", "Content-Encoding: gzip", f"Content-Length: {len(body)}",
                      method="POST", body=body)  # fmt: skip
    assert status_of(answer) == 200
    assert upstream.bodies == [body]
