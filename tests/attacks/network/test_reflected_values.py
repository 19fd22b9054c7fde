"""Servers that send the value of a credential back, in any form, at any border."""

from __future__ import annotations

import asyncio
import html
import json
import random
import threading
from base64 import b64encode, urlsafe_b64encode
from collections.abc import Callable
from urllib.parse import quote, quote_plus

import pytest

from providers.runtime.network.masking import Mask, MaskedBody
from tests.attacks.network.proxied import (
    BOUND_SECONDS,
    GOOD,
    VALUE,
    Door,
    Proxied,
    Upstream,
    body_of,
    connect_head,
    credential,
    get,
    holding,
    inner,
    read_head,
    status_of,
)

RAW = VALUE.encode()
FORMS = {
    "raw": RAW,
    "upper case": RAW.upper(),
    "percent": quote(VALUE, safe="").encode(),
    "percent with slashes": quote(VALUE).encode(),
    "percent in small letters": quote(VALUE, safe="").lower().encode(),
    "form": quote_plus(VALUE).encode(),
    "percent twice": quote(quote(VALUE, safe=""), safe="").encode(),
    "percent of a form, twice": quote(quote_plus(VALUE)).encode(),
    "percent in html": html.escape(quote(VALUE, safe="'")).encode(),
    "json in html": html.escape(json.dumps(VALUE)[1:-1]).encode(),
    "html in json": json.dumps(html.escape(VALUE))[1:-1].encode(),
    "json twice": json.dumps(json.dumps(VALUE)[1:-1])[1:-1].encode(),
    "percent of all": "".join(f"%{byte:02X}" for byte in RAW).encode(),
    "json": json.dumps(VALUE)[1:-1].encode(),
    "json with slashes": json.dumps(VALUE)[1:-1].replace("/", "\\/").encode(),
    "json of go": json.dumps(VALUE)[1:-1].translate(
        {ord(c): f"\\u{ord(c):04x}" for c in "<>&"}
    ).encode(),
    "json of net": VALUE.translate(
        {ord(c): f"\\u{ord(c):04X}" for c in "<>&'\"+`"} | {ord("\\"): "\\\\"}
    ).encode(),
    "html": html.escape(VALUE).encode(),
    "html without quotes": html.escape(VALUE, quote=False).encode(),
    "html of go": VALUE.translate(
        {ord("<"): "&lt;", ord(">"): "&gt;", ord("&"): "&amp;", ord('"'): "&#34;",
         ord("'"): "&#39;", ord("+"): "&#43;"}
    ).encode(),
    "html of mustache": VALUE.translate(
        {ord("<"): "&lt;", ord(">"): "&gt;", ord("&"): "&amp;", ord('"'): "&quot;",
         ord("'"): "&#39;", ord("/"): "&#x2F;", ord("="): "&#x3D;", ord("`"): "&#x60;"}
    ).encode(),
    "html of handlebars": VALUE.translate(
        {ord("<"): "&lt;", ord(">"): "&gt;", ord("&"): "&amp;", ord('"'): "&quot;",
         ord("'"): "&#x27;", ord("="): "&#x3D;", ord("`"): "&#x60;"}
    ).encode(),
    "html of php": html.escape(VALUE).replace("&#x27;", "&#039;").encode(),
    "hex": RAW.hex().encode(),
    "hex in capitals": RAW.hex().upper().encode(),
}  # fmt: skip


def answer_of(body: bytes, *headers: bytes, reason: bytes = b"OK") -> bytes:
    lines = [b"HTTP/1.1 200 " + reason, b"Content-Length: %d" % len(body), *headers, b"", b""]
    return b"\r\n".join(lines) + body


def door_of(proxied: Proxied, upstream: Upstream, path: str = "/v1") -> Door:
    return proxied.door(holding(credential(upstream.bound(path)), lines=[upstream.rule]))


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_a_value_is_masked_in_every_part_of_an_answer(proxied: Proxied, form: bytes) -> None:
    stars = b"*" * len(form)
    said = answer_of(b"<" + form + b">", b"X-A: (" + form + b")", reason=b"Its " + form)
    upstream = proxied.secure(said)
    answer = door_of(proxied, upstream).ask(upstream, "/v1")
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 Its " + stars + b"\r\n")
    assert b"X-A: (" + stars + b")" in head
    assert body == b"<" + stars + b">"


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("size", [1, 2, 7])
def test_a_value_in_pieces_is_masked(proxied: Proxied, form: bytes, size: int) -> None:
    text = b"sk_live sk_" + form + b"s"
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces)
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    upstream = proxied.secure(head + chunks + b"0\r\n\r\n")
    answer = door_of(proxied, upstream).ask(upstream, "/v1")
    assert body_of(answer) == b"sk_live sk_" + b"*" * len(form) + b"s"


@pytest.mark.parametrize("after", range(3))
@pytest.mark.parametrize("before", range(4))
@pytest.mark.parametrize("encode", [b64encode, urlsafe_b64encode])
def test_a_value_in_base64_is_masked(
    proxied: Proxied, encode: Callable[[bytes], bytes], before: int, after: int
) -> None:
    """With the characters that share bits with what stands around it."""
    packed = encode(b"u" * before + RAW + b"." * after)
    upstream = proxied.secure(answer_of(b'{"a": "' + packed + b'"}', b"X-A: " + packed))
    answer = door_of(proxied, upstream).ask(upstream, "/v1")
    head, _, body = answer.partition(b"\r\n\r\n")
    first, last = before * 8 // 6, -((before + len(RAW)) * -8 // 6)
    for text in (body[7:-2], head.partition(b"X-A: ")[2].partition(b"\r\n")[0]):
        assert len(text) == len(packed)
        assert text[first:last] == b"*" * (last - first)


def test_a_whole_basic_value_is_masked(proxied: Proxied) -> None:
    for user in ("robot", "robots", "a-robot"):
        packed = b64encode(f"{user}:{VALUE}".encode())
        upstream = proxied.secure(answer_of(b"Basic " + packed, b"X-A: Basic " + packed))
        held = credential(upstream.bound(), placement="basic", field=user)
        door = proxied.door(holding(held, lines=[upstream.rule]))
        answer = door.ask(upstream)
        stars = b"*" * len(packed.rstrip(b"=")[(len(user) + 1) * 8 // 6 :])
        assert answer.count(stars) == 2


def test_borders_of_pieces_are_not_seen() -> None:
    """Any text of values and parts of them, cut anywhere, as it would be masked whole."""
    chance = random.Random(7)
    values = ["aabaabaac-aab", "abcabcabcd", "token.-.token"]
    mask = Mask(values)
    for _ in range(400):
        parts = [
            chance.choice([value, value[: chance.randrange(len(value))], value[3:], "aab", "~"])
            for value in chance.choices(values, k=6)
        ]
        text = "".join(parts).encode()
        body, found, at = MaskedBody(mask), b"", 0
        while at < len(text):
            size = chance.randrange(1, 9)
            found += body.feed(text[at : at + size])
            at += size
        found += body.end()
        assert len(found) == len(text)
        for value in values:
            assert value.encode() not in found, (text, found)
        assert all(a == b or b == ord("*") for a, b in zip(text, found, strict=True))


@pytest.mark.parametrize("size", [1, 3, 8, 12])
def test_a_value_that_begins_as_another_is_masked_whole(size: int) -> None:
    longer = VALUE + "-and-the-rest-of-it"
    body, text, found = MaskedBody(Mask([VALUE, longer])), longer.encode() + b" end", b""
    for at in range(0, len(text), size):
        found += body.feed(text[at : at + size])
    found += body.end()
    assert found == b"*" * len(longer) + b" end"


def test_a_value_that_begins_as_another_is_masked_over_a_border(proxied: Proxied) -> None:
    longer = "sk_live_0123456789"
    chunks = (
        b"10\r\n" + longer[:16].encode() + b"\r\n2\r\n" + longer[16:].encode() + b"\r\n0\r\n\r\n"
    )
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    upstream = proxied.secure(head + chunks)
    held = [credential(upstream.bound(), value=longer[:16]),
            credential(upstream.bound(), name="second", value=longer)]  # fmt: skip
    door = proxied.door(holding(*held, lines=[upstream.rule]))
    assert body_of(door.ask(upstream)) == b"*" * len(longer)


@pytest.mark.parametrize("charset", ["utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"])
@pytest.mark.parametrize("size", [1, 5, 1000])
def test_a_value_in_wide_characters_is_masked(proxied: Proxied, charset: str, size: int) -> None:
    """A program may ask for them, and a server that repeats what it was sent may oblige."""
    text = f"<{VALUE}>".encode(charset)
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces)
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    upstream = proxied.secure(head + chunks + b"0\r\n\r\n")
    answer = door_of(proxied, upstream).ask(upstream, "/v1", "Accept-Charset: utf-16")
    found = body_of(answer)
    assert len(found) == len(text)
    assert found.replace(b"\0", b"").strip(b"*<>") == b""
    assert upstream.sent("accept-charset") == []


def test_requests_without_a_credential_are_masked_too(proxied: Proxied) -> None:
    upstream = proxied.secure(answer_of(RAW))
    door = door_of(proxied, upstream)
    for method, path in (("GET", "/v2"), ("PUT", "/v1"), ("TRACE", "/v1"), ("PROPFIND", "/")):
        assert body_of(door.ask(upstream, path, method=method)) == b"*" * len(RAW)
    assert {each.credential for each in door.wait_until_idle()} <= {"", "key@1"}


def test_plain_http_of_its_host_is_masked_too(proxied: Proxied) -> None:
    upstream = proxied.upstream(answer_of(RAW, b"X-A: " + RAW))
    door = proxied.door(holding(credential("https://good.example/v1"), lines=[upstream.rule]))
    direct = door.talk(get(GOOD, upstream.port))
    tunnelled = door.talk(
        connect_head(GOOD, upstream.port) + inner(upstream, "/", "Connection: close")
    )
    for answer in (direct, tunnelled):
        assert answer.endswith(b"*" * len(RAW))
        assert RAW not in answer


def test_a_host_that_never_had_it_is_left_alone(proxied: Proxied) -> None:
    upstream = proxied.secure(answer_of(RAW))
    held = credential("https://other.example")
    door = proxied.door(holding(held, lines=[f"GET https://{upstream.rule}"]))
    assert body_of(door.ask(upstream)) == RAW


def test_names_of_headers_are_masked(proxied: Proxied) -> None:
    plain = "sk-live-51Abcdefgh"
    upstream = proxied.secure(answer_of(b"", plain.encode() + b": x"))
    held = credential(upstream.bound(), value=plain)
    door = proxied.door(holding(held, lines=[upstream.rule]))
    assert plain.lower().encode() not in door.ask(upstream).lower()


@pytest.mark.parametrize("said", [
    b"HTTP/1.1 103 Hint\r\nLink: {}\r\n\r\n" + answer_of(b"GOOD"),
    b"HTTP/1.1 100 {}\r\n\r\n" + answer_of(b"GOOD"),
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4;x={}\r\nGOOD\r\n0\r\nX-A: {}\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\nConnection: {}\r\nTrailer: {}\r\n\r\nGOOD",
    b"HTTP/1.1 302 Found\r\nContent-Length: 4\r\nLocation: https://x/?a={}\r\n\r\nGOOD",
    b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\nSet-Cookie: a={}\r\nSet-Cookie: b={}\r\n\r\nGOOD",
    answer_of(b"GOOD") + answer_of(b"{}"),
])  # fmt: skip
@pytest.mark.parametrize("form", ["raw", "percent", "html"])
def test_no_other_part_of_a_message_has_it(proxied: Proxied, said: bytes, form: str) -> None:
    upstream = proxied.secure(said.replace(b"{}", FORMS[form]))
    answer = door_of(proxied, upstream).ask(upstream, "/v1")
    assert FORMS[form] not in answer
    assert body_of(answer) == b"GOOD"


@pytest.mark.parametrize("said", [
    b"HTTP/x {}\r\n\r\n", b"{}\r\n\r\n", b"{}", b"HTTP/1.1 200 OK\r\n{}\r\n\r\n",
    b"HTTP/1.1 200 OK\r\n{} : x\r\n\r\n", b"HTTP/1.1 200 OK\r\n{}: x\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n", b"HTTP/1.1 {} OK\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: {}\r\n\r\n", b"HTTP/1.1 200 OK\r\nX: \0{}\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n{}\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\nContent-Length: {}\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Encoding: {}\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nX: " + b"{}" * 5000 + b"\r\n\r\n",
])  # fmt: skip
@pytest.mark.parametrize("value", [VALUE, "sk-live-51Abcdefgh"])
def test_the_error_of_a_broken_answer_does_not_repeat_it(
    proxied: Proxied, said: bytes, value: str
) -> None:
    upstream = proxied.secure(said.replace(b"{}", value.encode()))
    held = credential(upstream.bound(), value=value)
    door = proxied.door(holding(held, lines=[upstream.rule]))
    answer = door.ask(upstream)
    for part in (value[:9], value[-9:], repr(value)[1:-1], json.dumps(value)[1:-1]):
        assert part.lower().encode() not in answer.lower()
    assert value not in repr(door.wait_until_idle())


@pytest.mark.parametrize("event", [
    b"data: {}\n\n", b": ping\r\n\r\n", b'data: {"text": "sk_li"}\n\n', b"data: sk_live/51\n\n",
])  # fmt: skip
def test_events_are_not_held_back(proxied: Proxied, event: bytes) -> None:
    seen = [threading.Event() for _ in range(3)]

    async def stream(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n")
        for each in seen:
            writer.write(event)
            await asyncio.get_running_loop().run_in_executor(None, each.wait, BOUND_SECONDS)

    upstream = Upstream(b"")
    upstream.port = proxied.server(stream, proxied.authority.context(GOOD))
    door = door_of(proxied, upstream)
    with door.tls(GOOD, upstream.port) as sock:
        try:
            sock.sendall(inner(upstream, "/v1"))
            read_head(sock)
            for each in seen:
                found = b""
                while event not in found and (data := sock.recv(1 << 16)):
                    found += data
                assert event in found
                each.set()
        finally:
            for each in seen:
                each.set()


def pieces_of(door: Door, upstream: Upstream) -> list[int]:
    """The sizes of what the program reads at once: it sees the records of TLS."""
    found = []
    with door.tls(GOOD, upstream.port) as sock:
        sock.sendall(inner(upstream, "/v2", "Connection: close"))
        read_head(sock)
        while data := sock.recv(1 << 16):
            found.append(len(data))
    return found


@pytest.mark.parametrize("framing", ["length", "chunks", "end"])
def test_a_guess_is_not_told_to_be_the_beginning_of_a_value(proxied: Proxied, framing: str) -> None:
    """A host that says what the program has it say must not tell by the pieces in which it comes
    whether that begins as a value does: the value would be guessed character by character."""
    upstream = proxied.secure()
    door = door_of(proxied, upstream)

    def sizes(guess: bytes) -> list[int]:
        text = b"a file of the program: " + guess
        upstream.answer = {
            "length": answer_of(text),
            "chunks": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
            + b"%x\r\n%s\r\n0\r\n\r\n" % (len(text), text),
            "end": b"HTTP/1.1 200 OK\r\n\r\n" + text,
        }[framing]
        return pieces_of(door, upstream)

    wrong = sizes(b"xk_live")
    for size in range(1, 8):
        assert sizes(RAW[:size] + b"x" * (7 - size)) == wrong
        assert sizes(b"x" * (7 - size) + RAW[:size]) == wrong


def test_a_guess_is_not_told_by_what_is_held_back() -> None:
    """What of a piece is passed on at once depends on its kind of characters alone."""
    mask = Mask([VALUE, "another-value-0123456789"])
    held = set()
    for guess in (
        b"zzzzzzz",
        RAW[:7],
        b"zz" + RAW[:5],
        b"another",
        b"zzzanot",
        RAW.hex()[:7].encode(),
    ):
        held.add(len(MaskedBody(mask).feed(b"text \n" + guess)))
    assert len(held) == 1


def test_the_length_of_a_body_is_kept(proxied: Proxied) -> None:
    upstream = proxied.secure(answer_of(b"a" + RAW + b"b" + RAW))
    answer = door_of(proxied, upstream).ask(upstream, "/v1")
    assert b"Content-Length: %d\r\n" % (2 * len(RAW) + 2) in answer
    assert status_of(answer) == 200
    assert body_of(answer) == b"a" + b"*" * len(RAW) + b"b" + b"*" * len(RAW)


@pytest.mark.parametrize("where", ["head", "body"])
def test_a_head_answer_is_masked(proxied: Proxied, where: str) -> None:
    upstream = proxied.secure(
        b"HTTP/1.1 200 OK\r\nContent-Length: 38\r\nX-A: " + RAW + b"\r\n\r\n"
        + (RAW if where == "body" else b"")
    )  # fmt: skip
    answer = door_of(proxied, upstream).ask(upstream, "/v2", method="HEAD")
    assert RAW not in answer
    assert answer.endswith(b"\r\n\r\n")
