"""Credentials asked for by requests that they are not bound to."""

from __future__ import annotations

import asyncio
import base64
import logging
import ssl
import traceback
from dataclasses import replace
from urllib.parse import quote

import pytest

from providers.credentials import Credential, Placement
from providers.network import Network, with_credentials
from tests.attacks.network.proxied import (
    ANSWER,
    EVIL,
    GOOD,
    VALUE,
    Door,
    Proxied,
    Upstream,
    allowing,
    body_of,
    connect_head,
    credential,
    error_of,
    get,
    holding,
    inner,
    read_all,
    read_head,
    status_of,
)

PLACEHOLDER = "cfd-secret:key"


def basic(user: str, password: str) -> str:
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


@pytest.fixture
def upstream(proxied: Proxied) -> Upstream:
    return proxied.secure()


@pytest.fixture
def door(proxied: Proxied, upstream: Upstream) -> Door:
    """Its credential is for GET and POST below /v1."""
    held = credential(upstream.bound("/v1", "GET,POST"))
    return proxied.door(holding(held, lines=[upstream.rule]))


def test_it_is_put_in_for_its_placeholder_and_for_nothing(door: Door, upstream: Upstream) -> None:
    for headers in ((), (f"Authorization: Bearer {PLACEHOLDER}",)):
        assert body_of(door.ask(upstream, "/v1/a?b=c", *headers)) == b"GOOD"
        assert upstream.sent("authorization") == [f"Bearer {VALUE}"]
    for attempt in door.wait_until_idle():
        assert (attempt.outcome, attempt.credential) == ("allowed", "key@1")
        assert (attempt.method, attempt.path) == ("GET", "/v1/a?b=c")


def test_another_value_of_the_program_stays(door: Door, upstream: Upstream) -> None:
    assert status_of(door.ask(upstream, "/v1/a", "Authorization: Bearer own")) == 200
    assert upstream.sent("authorization") == ["Bearer own"]
    assert door.only().credential == ""


@pytest.mark.parametrize(
    ("placement", "field", "sent", "found"),
    [
        ("bearer", "", "authorization: bearer " + PLACEHOLDER, f"Bearer {VALUE}"),
        ("bearer", "", "AUTHORIZATION: Bearer " + PLACEHOLDER, f"Bearer {VALUE}"),
        ("header", "X-Api-Key", "x-api-key: " + PLACEHOLDER, VALUE),
        ("header", "x-api-key", "X-API-KEY:" + PLACEHOLDER, VALUE),
        ("header", "X-Api-Key", "", VALUE),
        ("basic", "robot", "", basic("robot", VALUE)),
        ("basic", "robot", "Authorization: " + basic("robot", PLACEHOLDER), basic("robot", VALUE)),
        ("basic", "", "Authorization: " + basic("me", PLACEHOLDER), basic("me", VALUE)),
    ],
)
def test_it_has_one_place(
    proxied: Proxied, upstream: Upstream, placement: Placement, field: str, sent: str, found: str
) -> None:
    held = credential(upstream.bound(), placement=placement, field=field)
    door = proxied.door(holding(held, lines=[upstream.rule]))
    assert status_of(door.ask(upstream, "/", *([sent] if sent else []))) == 200
    name = field if placement == "header" else "authorization"
    assert upstream.sent(name) == [found]
    assert upstream.heads[0].count(found.encode()) == 1


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("/v1", "/v1?key={}"),
        ("/v1?a=b", "/v1?a=b&key={}"),
        ("/v1?key=cfd-secret:key&a=b", "/v1?a=b&key={}"),
        ("/v1?a=b&key=cfd-secret%3Akey", "/v1?a=b&key={}"),
        ("/v1?key=own", "/v1?key=own"),
    ],
)
def test_a_parameter_has_it_in_its_escapes(
    proxied: Proxied, upstream: Upstream, path: str, found: str
) -> None:
    held = credential(upstream.bound("/v1"), placement="query", field="key")
    door = proxied.door(holding(held, lines=[upstream.rule]))
    assert status_of(door.ask(upstream, path)) == 200
    sent = upstream.heads[0].split(b" ")[1].decode()
    assert sent in (found.format(quote(VALUE, safe="")), found.format(quote(VALUE)))
    assert door.only().path == path


@pytest.mark.parametrize("headers", [
    ("Authorization: Bearer {}", "Authorization: Bearer {}"),
    ("Authorization: Bearer own", "Authorization: Bearer {}"),
    ("Authorization: Bearer {}", "authorization: Bearer own"),
    ("Connection: Authorization", "Authorization: Bearer {}"),
    ("Authorization: Bearer x{}x",),
    ("Authorization: Bearer {}, Bearer {}",),
    ("Authorization: Digest {}",),
    ("Authorization: " + basic("user", PLACEHOLDER),),
    ("Authorization: " + basic(PLACEHOLDER, "x"),),
    ("Proxy-Authorization: Bearer {}",),
    ("Proxy-Authorization: Bearer {}", "Authorization: Bearer {}"),
    ("Connection: close, authorization",),
    ("Connection: x, AUTHORIZATION, host",),
    ("Keep-Alive: authorization", "Proxy-Connection: authorization"),
])  # fmt: skip
def test_it_is_sent_once_or_not_at_all(
    door: Door, upstream: Upstream, headers: tuple[str, ...]
) -> None:
    answer = door.ask(upstream, "/v1/a", *(each.replace("{}", PLACEHOLDER) for each in headers))
    assert VALUE.encode() not in answer
    if status_of(answer) == 200:
        assert upstream.sent("authorization") == [f"Bearer {VALUE}"]
        assert b"cfd-secret" not in upstream.heads[0]
        assert upstream.sent("connection") == ["close"]
    else:
        assert upstream.connections == 0


ASKED = "Authorization: Bearer cfd-secret:key"


@pytest.mark.parametrize(
    ("method", "path", "header"),
    [
        ("GET", "/", ASKED),
        ("GET", "/v2", ASKED),
        ("GET", "/v10", ASKED),
        ("GET", "/V1", ASKED),
        ("PUT", "/v1", ASKED),
        ("HEAD", "/v1", ASKED),
        ("OPTIONS", "/v1", ASKED),
        ("get", "/v1", ASKED),
        ("TRACE", "/v1", ASKED),
        ("PROPFIND", "/v1", ASKED),
        ("OPTIONS", "*", ASKED),
        ("GET", "/v1/cfd-secret:key", "X: y"),
        ("GET", "/v1?x=cfd-secret:key", "X: y"),
        ("GET", "/v1?cfd-secret:key", "X: y"),
        ("GET", "/v1?x=%63fd-secret%3akey", "X: y"),
        ("GET", "/v1?x=%63%66%64%2d%73%65%63%72%65%74%3a%6b%65%79", "X: y"),
        ("GET", "/v1", "X-Other: cfd-secret:key"),
        ("GET", "/v1", "X-Other: a cfd-secret:key b"),
        ("GET", "/v1", "X-Other: cfd-secret%3Akey"),
        ("GET", "/v1", "Cookie: a=cfd-secret:key"),
        ("GET", "/v1", "Authorization: Bearer cfd-secret:other"),
        ("GET", "/v1", "Authorization: Bearer cfd-secret:keys"),
        ("GET", "/v1", "X-Other: " + basic("user", PLACEHOLDER)),
    ],
)
def test_elsewhere_its_placeholder_is_refused(
    door: Door, upstream: Upstream, method: str, path: str, header: str
) -> None:
    answer = door.ask(upstream, path, header, method=method)
    assert status_of(answer) in (400, 403), answer
    if status_of(answer) == 403 and method != "HEAD":
        told = error_of(answer)
        assert told["reason"] in ("credential", "not_allowed")
        assert told["code"] == "network_refused"
    assert VALUE.encode() not in answer
    assert upstream.connections == 0
    attempt = door.only()
    assert (attempt.outcome, attempt.credential) == ("refused", "")


def test_its_refusal_says_so(door: Door, upstream: Upstream) -> None:
    told = error_of(door.ask(upstream, "/v2", ASKED))
    assert told["reason"] == "credential"
    assert VALUE not in str(told)
    assert door.only().why == "credential"


@pytest.mark.parametrize(
    "method", ["TRACE", "HEAD", "PUT", "PATCH", "DELETE", "OPTIONS", "get", "Get"]
)
def test_another_method_carries_none(door: Door, upstream: Upstream, method: str) -> None:
    door.ask(upstream, "/v1/a", method=method)
    assert all(VALUE.encode() not in head for head in upstream.heads)
    assert {each.credential for each in door.wait_until_idle()} == {""}


def test_trace_carries_none_whatever_the_rule(proxied: Proxied, upstream: Upstream) -> None:
    door = proxied.door(holding(credential(upstream.bound()), lines=[upstream.rule]))
    for method in ("TRACE", "TRACK", "trace", "DEBUG", "CONNECT"):
        assert VALUE.encode() not in door.ask(upstream, "/", method=method)
    assert all(VALUE.encode() not in head for head in upstream.heads)


@pytest.mark.parametrize(
    "path",
    [
        "/v1/../admin", "/v1/..%2fadmin", "/v1/%2e%2e/admin", "/v1/.%2e/admin", "/v1/..;/admin",
        "/v1/..;x=y/admin", "/v1//admin", "//v1/a", "/v1/./a", "/v1/%2e/a", "/v1\\..\\admin",
        "/v1/..\\admin", "/v1/%5c..%5cadmin", "/v1%2fa", "/v1/%252e%252e/admin", "/v1/..%252fadmin",
        "/%76%31/../x", "/./v1/a", "/x/../v1/a", "/v1/%00/../admin", "/v1/%0d%0aX", "/v1/..%c0%af",
        "/v1;/../admin", "/v1/a/..", "/v1/a/../../admin", "/v1%20", "/v1%3f", "/v1%23", "/v1.",
        "/v1/%u002e%u002e/admin", "/v1/%e0%80%ae%e0%80%ae/admin", "/v1;a=b/x", "/v1%3b/x",
    ],
)  # fmt: skip
def test_escapes_of_a_path_do_not_reach_it(door: Door, upstream: Upstream, path: str) -> None:
    door.ask(upstream, path)
    door.ask(upstream, path, ASKED)
    assert all(VALUE.encode() not in head for head in upstream.heads)
    assert all(b"cfd-secret" not in head for head in upstream.heads)
    assert {each.credential for each in door.wait_until_idle()} == {""}


@pytest.mark.parametrize(
    "header",
    [
        "X-HTTP-Method-Override: DELETE",
        "x-http-method: DELETE",
        "X-Method-Override: PUT",
        "X-Original-URL: /admin",
        "X-Rewrite-Url: /admin",
    ],
)
def test_a_header_does_not_put_another_method_or_path_in_place(
    proxied: Proxied, door: Door, upstream: Upstream, header: str
) -> None:
    """Servers that read it do what no rule allows, with the credential."""
    only_rules = proxied.door(allowing(f"GET https://{upstream.rule}/v1"))
    for each in (door, only_rules):
        answer = each.ask(upstream, "/v1", header)
        assert error_of(answer)["reason"] == "mismatch"
    assert upstream.connections == 0
    free = proxied.secure()
    without = proxied.door(allowing(f"https://{free.rule}/"))
    with without.tls(GOOD, free.port, proxied.authority.trusted) as sock:
        sock.sendall(inner(free, "/", header, "Connection: close"))
        assert body_of(read_all(sock)) == b"GOOD"


def test_plain_http_does_not_carry_it(proxied: Proxied) -> None:
    upstream = proxied.upstream()
    held = credential(upstream.bound())
    door = proxied.door(holding(held, lines=[upstream.rule]))
    assert error_of(door.talk(get(GOOD, upstream.port, "/", ASKED)))["reason"] == "credential"
    for path in ("/?a=cfd-secret:key", "/cfd-secret%3akey"):
        assert error_of(door.talk(get(GOOD, upstream.port, path)))["reason"] == "credential"
    asked = inner(upstream, "/", ASKED, "Connection: close")
    assert b"credential" in door.talk(connect_head(GOOD, upstream.port) + asked)
    assert upstream.connections == 0
    assert status_of(door.talk(get(GOOD, upstream.port))) == 200
    door.talk(connect_head(GOOD, upstream.port) + inner(upstream, "/", "Connection: close"))
    assert len(upstream.heads) == 2
    assert all(VALUE.encode() not in head for head in upstream.heads)
    assert {each.why for each in door.wait_until_idle()} == {"credential", ""}
    assert {each.credential for each in door.attempts} == {""}


def test_plain_http_to_a_host_without_credentials_refuses_a_placeholder(proxied: Proxied) -> None:
    upstream = proxied.upstream()
    door = proxied.door(holding(credential("https://other.example"), lines=[upstream.rule]))
    answer = door.talk(get(GOOD, upstream.port, "/", "Authorization: " + basic("u", PLACEHOLDER)))
    assert error_of(answer)["reason"] == "credential"
    assert upstream.connections == 0


def test_another_host_does_not_get_it(proxied: Proxied, upstream: Upstream) -> None:
    other = proxied.secure(host=EVIL)
    sub = proxied.secure(host=f"x.{GOOD}")
    held = credential(upstream.bound("/v1"))
    # A path of another host's rule has its TLS opened, too.
    lines = [f"https://{each.rule}/v1" for each in (upstream, other, sub)]
    door = proxied.door(holding(held, lines=lines))
    for each in (other, sub):
        assert error_of(door.ask(each, "/v1", ASKED))["reason"] == "credential"
        assert each.connections == 0
        assert status_of(door.ask(each, "/v1")) == 200
        assert VALUE.encode() not in each.heads[0]
    assert status_of(door.ask(upstream, "/v1", ASKED)) == 200


def test_another_port_does_not_get_it(proxied: Proxied, upstream: Upstream) -> None:
    other = proxied.secure()
    held = credential(upstream.bound())
    door = proxied.door(holding(held, lines=[upstream.rule, f"https://{other.rule}/v1"]))
    assert error_of(door.ask(other, "/v1", ASKED))["reason"] == "credential"
    assert status_of(door.ask(other, "/v1")) == 200
    assert VALUE.encode() not in other.heads[0]


def test_a_suffix_is_not_the_host_itself(proxied: Proxied) -> None:
    below, itself = proxied.secure(host="a.good.example"), proxied.secure()
    ports = f"{below.port},{itself.port}"
    held = credential(f"https://*.{GOOD}:{ports}")
    lines = [below.rule, f"https://{itself.rule}/x"]
    door = proxied.door(holding(held, lines=lines))
    assert status_of(door.ask(below, "/")) == 200
    assert below.sent("authorization") == [f"Bearer {VALUE}"]
    assert status_of(door.ask(itself, "/x")) == 200
    assert VALUE.encode() not in itself.heads[0]


def test_another_sandbox_does_not_get_it(proxied: Proxied, door: Door, upstream: Upstream) -> None:
    other = proxied.door(holding(lines=[f"https://{upstream.rule}/v1"]), "alice")
    assert status_of(door.ask(upstream, "/v1")) == 200
    assert status_of(other.ask(upstream, "/v1")) == 200
    assert VALUE.encode() not in upstream.heads[1]
    assert error_of(other.ask(upstream, "/v1", ASKED))["reason"] == "credential"
    assert len(upstream.heads) == 2


def test_a_request_that_no_list_allows_does_not_get_it(proxied: Proxied) -> None:
    upstream = proxied.secure()
    held = credential(upstream.bound("/v1"))
    door = proxied.door(holding(held, lines=[f"https://{upstream.rule}/v2"]))
    assert error_of(door.ask(upstream, "/v1", ASKED))["reason"] == "not_allowed"
    closed = proxied.door(holding(held, lines=["other.example"]))
    with closed.connect() as sock:
        sock.sendall(connect_head(GOOD, upstream.port))
        assert status_of(read_head(sock)) == 403
    assert upstream.connections == 0


def test_a_second_request_of_a_connection_is_judged_by_itself(
    door: Door, upstream: Upstream
) -> None:
    with door.tls(GOOD, upstream.port) as sock:
        asked = inner(upstream, "/v1", ASKED) + inner(upstream, "/v2")
        sock.sendall(asked + inner(upstream, "/v2", ASKED))
        answer = read_all(sock)
    assert answer.count(b"HTTP/1.1 200") == 2
    assert answer.count(b"HTTP/1.1 403") == 1
    assert [VALUE.encode() in head for head in upstream.heads] == [True, False]
    assert [each.credential for each in door.wait_until_idle()] == ["key@1", "", ""]


@pytest.mark.parametrize("framing", ["length", "chunks"])
def test_a_body_is_passed_as_it_is(door: Door, upstream: Upstream, framing: str) -> None:
    said = b"token=cfd-secret:key&x=Authorization: Bearer cfd-secret:key"
    if framing == "length":
        answer = door.ask(upstream, "/v1", f"Content-Length: {len(said)}", method="POST", body=said)
    else:
        chunked = f"{len(said):x}\r\n".encode() + said + b"\r\n0\r\n\r\n"
        answer = door.ask(
            upstream, "/v1", "Transfer-Encoding: chunked", method="POST", body=chunked
        )
    assert status_of(answer) == 200
    assert said in upstream.bodies[0]
    assert VALUE.encode() not in upstream.bodies[0]


def test_a_trailer_is_not_a_place(door: Door, upstream: Upstream) -> None:
    body = f"1\r\nx\r\n0\r\n{ASKED}\r\nHost: {EVIL}\r\n\r\n".encode()
    answer = door.ask(upstream, "/v2", "Transfer-Encoding: chunked", "Trailer: Authorization",
                      method="POST", body=body)  # fmt: skip
    assert VALUE.encode() not in answer
    for sent in (*upstream.heads, *upstream.bodies):
        assert VALUE.encode() not in sent
        assert b"cfd-secret" not in sent


def test_folded_lines_are_one_place(door: Door, upstream: Upstream) -> None:
    folded = f"Authorization: Bearer\r\n {PLACEHOLDER}"
    for path, header in (("/v1", folded), ("/v1", f"X: y\r\n {ASKED}"), ("/v2", folded)):
        answer = door.ask(upstream, path, header)
        assert VALUE.encode() not in answer
    for head in upstream.heads:
        assert b"cfd-secret" not in head
        assert head.startswith(b"GET /v1 ")
        assert head.count(VALUE.encode()) <= 1


def test_the_program_may_wait_for_the_word_to_go_on(door: Door, upstream: Upstream) -> None:
    with door.tls(GOOD, upstream.port) as sock:
        sock.sendall(inner(upstream, "/v1", ASKED, "Expect: 100-continue", "Content-Length: 4",
                           "Connection: close", method="POST"))  # fmt: skip
        assert status_of(read_head(sock)) == 100
        sock.sendall(b"body")
        assert body_of(read_all(sock)) == b"GOOD"
    assert upstream.bodies == [b"body"]
    assert upstream.sent("expect") == []


def test_an_upgrade_is_not_passed_on(proxied: Proxied, upstream: Upstream, door: Door) -> None:
    upstream.answer = (
        b"HTTP/1.1 101 Switching\r\nUpgrade: x\r\nConnection: Upgrade\r\n\r\n" + VALUE.encode()
    )
    answer = door.ask(upstream, "/v1", "Upgrade: x", "Connection: Upgrade")
    assert upstream.sent("upgrade") == []
    assert status_of(answer) == 502
    assert VALUE.encode() not in answer


def test_what_is_sent_asks_for_a_plain_and_whole_answer(door: Door, upstream: Upstream) -> None:
    for path in ("/v1", "/v2"):
        headers = ("Accept-Encoding: gzip, br, zstd", "accept-encoding: *", "Range: bytes=0-3",
                   "If-Range: x", "TE: trailers, gzip", "X-Kept: 1")  # fmt: skip
        assert status_of(door.ask(upstream, path, *headers)) == 200
        assert upstream.sent("accept-encoding") == ["identity"]
        for name in ("range", "if-range", "te"):
            assert upstream.sent(name) == []
        assert upstream.sent("x-kept") == ["1"]


def test_a_request_to_its_host_by_plain_http_asks_so_too(proxied: Proxied) -> None:
    upstream = proxied.upstream()
    door = proxied.door(holding(credential("https://good.example"), lines=[upstream.rule]))
    door.talk(get(GOOD, upstream.port, "/", "Accept-Encoding: gzip", "Range: bytes=0-3"))
    assert upstream.sent("accept-encoding") == ["identity"]
    assert upstream.sent("range") == []


def test_a_host_without_credentials_is_left_alone(proxied: Proxied) -> None:
    upstream = proxied.secure()
    held = credential("https://other.example")
    door = proxied.door(holding(held, lines=[f"GET https://{upstream.rule}"]))
    assert status_of(door.ask(upstream, "/", "Accept-Encoding: br", "Range: bytes=0-3")) == 200
    assert upstream.sent("accept-encoding") == ["br"]
    assert upstream.sent("range") == ["bytes=0-3"]


def test_a_redirect_is_not_followed(proxied: Proxied, door: Door, upstream: Upstream) -> None:
    evil = proxied.secure(host=EVIL)
    where = f"https://{evil.rule}/?t={quote(VALUE, safe='')}"
    upstream.answer = (
        f"HTTP/1.1 302 Found\r\nLocation: {where}\r\nContent-Length: 0\r\n\r\n".encode()
    )
    answer = door.ask(upstream, "/v1", ASKED)
    assert status_of(answer) == 302
    assert evil.connections == 0
    assert quote(VALUE, safe="").encode() not in answer
    assert f"https://{evil.rule}/?t=***".encode() in answer


def test_of_two_for_one_place_the_first_is_put_in(proxied: Proxied, upstream: Upstream) -> None:
    first = credential(upstream.bound())
    second = credential(upstream.bound(), name="second", value="another-value")
    door = proxied.door(holding(first, second, lines=[upstream.rule]))
    assert status_of(door.ask(upstream)) == 200
    assert upstream.sent("authorization") == [f"Bearer {VALUE}"]


def test_two_places_have_one_each(proxied: Proxied, upstream: Upstream) -> None:
    first = credential(upstream.bound())
    second = credential(upstream.bound("/v1"), name="second", value="another-value",
                        placement="header", field="X-Key")  # fmt: skip
    door = proxied.door(holding(first, second, lines=[upstream.rule]))
    assert status_of(door.ask(upstream, "/v1", ASKED, "X-Key: cfd-secret:second")) == 200
    assert upstream.sent("authorization") == [f"Bearer {VALUE}"]
    assert upstream.sent("x-key") == ["another-value"]
    swapped = door.ask(upstream, "/v1", "Authorization: Bearer cfd-secret:second")
    assert error_of(swapped)["reason"] == "credential"
    assert error_of(door.ask(upstream, "/v2", "X-Key: cfd-secret:second"))["reason"] == "credential"
    assert len(upstream.heads) == 1


def test_log_only_lists_do_not_widen_where_it_goes(proxied: Proxied) -> None:
    upstream = proxied.secure()
    network = with_values(
        allowing("other.example", log_only=True), credential(upstream.bound("/v1"))
    )
    door = proxied.door(network)
    assert error_of(door.ask(upstream, "/v2", ASKED))["reason"] == "credential"
    assert status_of(door.ask(upstream, "/v2")) == 200
    assert VALUE.encode() not in upstream.heads[0]


def with_values(network: Network, *held: Credential) -> Network:
    return replace(network, credentials=held)


def test_no_record_and_no_log_has_it(proxied: Proxied, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    proxied.call(lambda: asyncio.get_running_loop().set_debug(True))
    echo = proxied.secure(reflect)
    broken = proxied.secure(lambda head: b"HTTP/1.1 200 " + head)
    held = [
        credential(echo.bound("/v1"), broken.bound("/v1")),
        credential(echo.bound(), name="q", placement="query", field="q", value="second-&-value"),
    ]
    door = proxied.door(holding(*held, lines=[echo.rule, broken.rule]))
    answers = [door.ask(each, path, *headers)
               for each in (echo, broken) for path in ("/v1", "/v1?q=cfd-secret:q", "/v2")
               for headers in ((), (ASKED,), ("Range: x",))]  # fmt: skip
    proxied.names[GOOD] = []
    answers.append(door.ask(echo, "/v1"))
    door.wait_until_idle()
    said = "\n".join([
        *(record.getMessage() + str(record.exc_text) for record in caplog.records), caplog.text,
        repr(door.attempts), str([each.to_json() for each in door.attempts]), repr(door.gate),
        repr(door.gate.network), repr(held), str(held), *map(repr, answers),
    ])  # fmt: skip
    for value in (VALUE, "second-&-value", quote("second-&-value", safe="")):
        assert value not in said
        assert repr(value)[1:-1] not in said
    assert any(VALUE.encode() in head for head in echo.heads)


def reflect(head: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(head) + head


def test_an_exception_does_not_show_it() -> None:
    held = credential("https://good.example")
    network = with_credentials(holding(lines=["good.example"]), {"key": held})
    wrong = {**held.to_json(), "placement": "header", "field": "host"}
    with pytest.raises(ValueError) as caught:
        Credential.from_json(wrong)
    said = "".join(traceback.format_exception(caught.value)) + repr(network) + repr(vars(held))
    assert VALUE not in said


def test_the_guests_own_trust_is_needed(door: Door, upstream: Upstream) -> None:
    with pytest.raises(ssl.SSLCertVerificationError):
        door.tls(GOOD, upstream.port, ssl.create_default_context())
    attempt = door.only()
    assert (attempt.outcome, attempt.why) == ("failed", "trust")
    assert upstream.connections == 0


def test_the_positive_control_of_a_sandbox_without_credentials(proxied: Proxied) -> None:
    upstream = proxied.secure(ANSWER)
    door = proxied.door(holding(lines=[f"GET https://{upstream.rule}/v1"]))
    assert body_of(door.ask(upstream, "/v1")) == b"GOOD"
    assert upstream.sent("authorization") == []
