"""TLS that ends at the proxy: what a program may say inside of it, and instead of it."""

from __future__ import annotations

import asyncio
import shutil
import socket
import ssl
import subprocess
import threading
import tracemalloc
from contextlib import ExitStack

import pytest

from providers.runtime.network.connections import HEAD_SECONDS
from providers.runtime.network.exchange import IDLE_SECONDS
from tests.attacks.network.proxied import (
    ANSWER,
    BOUND_SECONDS,
    EVIL,
    GOOD,
    VALUE,
    Door,
    Proxied,
    Upstream,
    allowing,
    body_of,
    client_hello,
    connect_head,
    credential,
    error_of,
    get,
    holding,
    inner,
    read_all,
    read_exactly,
    read_head,
    read_while_time_passes,
    status_of,
)


@pytest.fixture
def upstream(proxied: Proxied) -> Upstream:
    return proxied.secure()


@pytest.fixture
def door(proxied: Proxied, upstream: Upstream) -> Door:
    held = credential(upstream.bound("/v1"))
    return proxied.door(holding(held, lines=[f"https://{upstream.rule}"]))


def without_checks(*protocols: str) -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if protocols:
        context.set_alpn_protocols(list(protocols))
    return context


def test_each_request_is_judged_and_on_record(proxied: Proxied, upstream: Upstream) -> None:
    rule = f"GET https://{upstream.rule}/v1"
    door = proxied.door(allowing(rule))
    assert body_of(door.ask(upstream, "/v1/a?b=c")) == b"GOOD"
    assert error_of(door.ask(upstream, "/v2"))["reason"] == "not_allowed"
    assert error_of(door.ask(upstream, "/v1", method="POST"))["reason"] == "not_allowed"
    first, second, third = door.wait_until_idle()
    assert (first.outcome, first.method, first.path) == ("allowed", "GET", "/v1/a?b=c")
    assert first.rule == rule
    assert (second.outcome, second.path, second.layer) == ("refused", "/v2", "tenant")
    assert (third.outcome, third.method) == ("refused", "POST")
    assert [head.split(b"\r\n")[0] for head in upstream.heads] == [b"GET /v1/a?b=c HTTP/1.1"]


def test_only_what_must_be_read_is_opened(proxied: Proxied, upstream: Upstream) -> None:
    """Of a host that no rule and no credential is for, the server's own certificate arrives."""
    elsewhere = credential("https://other.example")
    door = proxied.door(holding(elsewhere, lines=[upstream.rule]))
    with door.tls(GOOD, upstream.port, proxied.authority.trusted) as sock:
        sock.sendall(inner(upstream))
        assert body_of(read_all(sock)) == b"GOOD"
    with pytest.raises(ssl.SSLCertVerificationError):
        door.tls(GOOD, upstream.port)


def test_an_opened_host_speaks_http_1_alone(door: Door, upstream: Upstream) -> None:
    with door.tls(GOOD, upstream.port, without_checks("h2", "http/1.1")) as sock:
        assert sock.selected_alpn_protocol() == "http/1.1"
    with door.tls(GOOD, upstream.port, without_checks()) as sock:
        sock.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9))
        answer = read_all(sock)
    assert not answer.startswith(b"HTTP/1.1 200")
    try:
        with door.tls(GOOD, upstream.port, without_checks("h2")) as sock:
            assert sock.selected_alpn_protocol() is None
            sock.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9))
            assert not read_all(sock).startswith(b"HTTP/1.1 200")
    except OSError:
        pass
    assert upstream.connections == 0


@pytest.mark.parametrize("name", [EVIL, f"x.{GOOD}", f"{GOOD}.evil.example"])
def test_another_server_name_is_not_opened(door: Door, upstream: Upstream, name: str) -> None:
    with pytest.raises(OSError):
        door.tls(GOOD, upstream.port, without_checks(), server_name=name)
    attempt = door.only()
    assert (attempt.outcome, attempt.why) == ("refused", "mismatch")
    assert upstream.connections == 0


def test_no_server_name_is_not_opened(door: Door, upstream: Upstream) -> None:
    with door.tunnel(GOOD, upstream.port) as sock:
        sock.sendall(client_hello())
        assert read_all(sock) == b""
    assert door.only().why == "mismatch"


@pytest.mark.parametrize(
    ("target", "headers"),
    [
        ("/v1", ["Host: evil.example"]),
        ("/v1", ["Host: {host}", "Host: evil.example"]),
        ("/v1", ["Host: good.example:1"]),
        ("/v1", ["Host: good.example"]),
        ("/v1", ["Host: "]),
        ("/v1", []),
        ("/v1", ["Host: evil.example@{host}"]),
        ("https://{host}/v1", ["Host: {host}"]),
        ("http://{host}/v1", ["Host: {host}"]),
        ("https://evil.example/v1", ["Host: {host}"]),
        ("{host}", ["Host: {host}"]),
        ("v1", ["Host: {host}"]),
        ("/v1#x", ["Host: {host}"]),
        ("@evil.example/v1", ["Host: {host}"]),
        ("/v1", ["Host: {host}", "Content-Length: 4", "Transfer-Encoding: chunked"]),
        ("/v1", ["Host: {host}", "Content-Length: 4", "Content-Length: 5"]),
        ("/v1", ["Host: {host}", "Transfer-Encoding: chunked, identity"]),
        ("/v1", ["Host: {host}", "Transfer-Encoding : chunked"]),
        ("/v1", ["Host: {host}", "Authorization : Bearer cfd-secret:key"]),
        ("/v1", ["Host: {host}", "X: a\rAuthorization: Bearer cfd-secret:key"]),
        ("/v1", ["Host: {host}", "X: a\0b"]),
        ("/v1", ["Host: {host}", "no colon"]),
        ("/v1\0", ["Host: {host}"]),
        ("/v1 x", ["Host: {host}"]),
        ("/v1\u00e9", ["Host: {host}"]),
    ],
)
def test_requests_of_two_readings_are_refused(
    door: Door, upstream: Upstream, target: str, headers: list[str]
) -> None:
    lines = [f"POST {target} HTTP/1.1", *headers, "Connection: close", "", ""]
    text = "\r\n".join(lines).replace("{host}", upstream.rule)
    with door.tls(GOOD, upstream.port) as sock:
        sock.sendall(text.encode("latin-1") + b"0\r\n\r\nGET /second HTTP/1.1\r\n\r\n")
        answer = read_all(sock)
    assert status_of(answer) in (400, 501), answer
    assert door.only().outcome == "refused"
    assert upstream.connections == 0


@pytest.mark.parametrize("host", ["GOOD.example:{}", "good.example.:{}", "Good.Example.:0{}"])
def test_the_host_is_written_in_its_one_form(door: Door, upstream: Upstream, host: str) -> None:
    """Of another form a server could take it for another of its sites, and give that the value."""
    said = f"GET /v1 HTTP/1.1\r\nHost: {host.format(upstream.port)}\r\nConnection: close\r\n\r\n"
    with door.tls(GOOD, upstream.port) as sock:
        sock.sendall(said.encode())
        answer = read_all(sock)
    if status_of(answer) == 200:
        assert upstream.sent("host") == [upstream.rule]
    else:
        assert upstream.connections == 0


def test_bare_line_feeds_are_written_anew(proxied: Proxied, door: Door, upstream: Upstream) -> None:
    with door.tls(GOOD, upstream.port) as sock:
        sock.sendall(f"GET /v1 HTTP/1.1\nHost: {upstream.rule}\nX: y\n\n".encode())
        read_while_time_passes(proxied, sock, HEAD_SECONDS + 1)
    for head in upstream.heads:
        assert not any(b"\n" in line for line in head.split(b"\r\n"))
    assert len(door.wait_until_idle()) == 1


def test_a_request_in_http_1_0_is_written_anew(door: Door, upstream: Upstream) -> None:
    with door.tls(GOOD, upstream.port) as sock:
        sock.sendall(f"GET /v1 HTTP/1.0\r\nHost: {upstream.rule}\r\n\r\n".encode())
        assert body_of(read_all(sock)) == b"GOOD"
    assert upstream.heads[0].startswith(b"GET /v1 HTTP/1.1\r\n")
    with door.tls(GOOD, upstream.port) as sock:
        sock.sendall(b"GET /v1\r\n\r\n")
        assert status_of(read_all(sock)) == 400
    assert len(upstream.heads) == 1


def test_no_tunnel_leads_through_an_opened_one(door: Door, upstream: Upstream) -> None:
    with door.tls(GOOD, upstream.port) as sock:
        sock.sendall(connect_head(GOOD, upstream.port) + client_hello(GOOD))
        assert status_of(read_all(sock)) in (400, 403, 405, 501)
    assert door.only().outcome == "refused"
    assert upstream.connections == 0


@pytest.mark.parametrize("said", [
    b"\x05\x01\x00", b"\x04\x01", client_hello(GOOD), b"\0" * 50, b"SSH-2.0-x\r\n",
])  # fmt: skip
def test_another_protocol_inside_reaches_nothing(
    proxied: Proxied, door: Door, upstream: Upstream, said: bytes
) -> None:
    with door.tls(GOOD, upstream.port) as sock:
        sock.sendall(said)
        answer = read_while_time_passes(proxied, sock, HEAD_SECONDS + 1)
    assert not answer.startswith(b"\x05")
    assert upstream.connections == 0
    door.wait_until_idle()


def test_requests_in_single_bytes_are_read(door: Door, upstream: Upstream) -> None:
    with door.tls(GOOD, upstream.port) as sock:
        for byte in inner(upstream, "/v1", "Connection: close"):
            sock.sendall(bytes([byte]))
        assert body_of(read_all(sock)) == b"GOOD"
    assert upstream.sent("authorization") == [f"Bearer {VALUE}"]


def test_many_requests_use_one_connection(door: Door, upstream: Upstream) -> None:
    with door.tls(GOOD, upstream.port) as sock:
        for number in range(20):
            sock.sendall(inner(upstream, f"/v1/{number}"))
            assert status_of(read_head(sock)) == 200
            assert read_exactly(sock, 4) == b"GOOD"
    assert len(door.wait_until_idle()) == 20


def test_socks_has_its_tls_opened_too(door: Door, upstream: Upstream) -> None:
    sock = door.connect()
    name = GOOD.encode()
    port = upstream.port.to_bytes(2, "big")
    sock.sendall(b"\x05\x01\x00" + b"\x05\x01\x00\x03" + bytes([len(name)]) + name + port)
    found = b""
    while len(found) < 12:
        found += sock.recv(12 - len(found))
    with door.tls(GOOD, upstream.port, sock=sock) as secure:
        secure.sendall(inner(upstream, "/v1", "Connection: close"))
        assert body_of(read_all(secure)) == b"GOOD"
    assert upstream.sent("authorization") == [f"Bearer {VALUE}"]


@pytest.mark.parametrize("tail", [
    b"garbage" * 100, b"\x16\x03\x01\xff\xff" + bytes(70_000), b"\x17\x03\x03\x00\x10" + bytes(16),
    b"\x15\x03\x03\x00\x02\x02\x28", b"\x14\x03\x03\x00\x01\x01" * 100, client_hello(GOOD) * 3,
])  # fmt: skip
def test_garbage_after_a_hello_is_the_end_of_it(
    door: Door, upstream: Upstream, tail: bytes
) -> None:
    with door.tunnel(GOOD, upstream.port) as sock:
        try:
            sock.sendall(client_hello(GOOD) + tail)
            sock.shutdown(socket.SHUT_WR)
        except OSError:
            pass
        read_all(sock)
    attempt = door.only()
    assert attempt.outcome in ("failed", "refused")
    assert upstream.connections == 0
    assert status_of(door.ask(upstream, "/v1")) == 200


@pytest.mark.parametrize("after", [0, 1, 1000])
def test_half_a_handshake_has_the_time_of_a_head(
    proxied: Proxied, door: Door, upstream: Upstream, after: int
) -> None:
    with door.tunnel(GOOD, upstream.port) as sock:
        sock.sendall(client_hello(GOOD))
        if after:
            assert sock.recv(after)
        read_while_time_passes(proxied, sock, HEAD_SECONDS + 1)
    assert door.only().outcome == "failed"


def test_a_request_that_drips_has_the_time_of_a_head(
    proxied: Proxied, door: Door, upstream: Upstream
) -> None:
    with door.tls(GOOD, upstream.port) as sock:
        for byte in inner(upstream)[:7]:
            try:
                sock.sendall(bytes([byte]))
            except OSError:
                break
            proxied.pass_time(HEAD_SECONDS / 5)
        read_all(sock)
    door.wait_until_idle()
    assert upstream.connections == 0


def test_an_idle_opened_connection_is_ended(
    proxied: Proxied, door: Door, upstream: Upstream
) -> None:
    with door.tls(GOOD, upstream.port) as sock:
        sock.sendall(inner(upstream, "/v1"))
        assert status_of(read_head(sock)) == 200
        assert read_exactly(sock, 4) == b"GOOD"
        assert read_while_time_passes(proxied, sock, IDLE_SECONDS + 1) == b""
    assert len(door.wait_until_idle()) == 1


def test_a_program_without_the_authority_ends_its_attempt(door: Door, upstream: Upstream) -> None:
    for _ in range(2):
        with pytest.raises(ssl.SSLCertVerificationError):
            door.tls(GOOD, upstream.port, ssl.create_default_context())
    assert {(each.outcome, each.why) for each in door.wait_for(2)} == {("failed", "trust")}
    assert upstream.connections == 0


def test_a_program_that_pins_another_certificate_learns_nothing(
    proxied: Proxied, door: Door, upstream: Upstream
) -> None:
    with pytest.raises(ssl.SSLCertVerificationError):
        door.tls(GOOD, upstream.port, proxied.authority.trusted)
    assert door.only().why == "trust"


def test_an_old_version_of_tls_is_not_spoken(door: Door, upstream: Upstream) -> None:
    context = without_checks()
    context.set_ciphers("ALL:@SECLEVEL=0")
    context.minimum_version = ssl.TLSVersion.TLSv1
    context.maximum_version = ssl.TLSVersion.TLSv1_1
    with pytest.raises(OSError):
        door.tls(GOOD, upstream.port, context)
    assert door.only().outcome == "failed"


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl program here")
@pytest.mark.parametrize(("version", "command"), [("-tls1_2", b"R\n"), ("-tls1_3", b"K\n")])
def test_renegotiation_and_new_keys_lead_nowhere(
    door: Door, upstream: Upstream, version: str, command: bytes
) -> None:
    host, port = door.address
    client = subprocess.Popen(
        ["openssl", "s_client", "-proxy", f"{host}:{port}", "-connect", upstream.rule,
         "-servername", GOOD, version],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    with client:
        assert client.stdin is not None
        assert client.stdout is not None
        try:
            while b"Verify return code" not in client.stdout.readline():
                pass
            client.stdin.write(command * 3)
            client.stdin.flush()
            if version == "-tls1_2":
                client.stdout.read()
        finally:
            client.kill()
    door.wait_until_idle()
    assert upstream.connections == 0
    assert status_of(door.ask(upstream, "/v1")) == 200


def test_a_program_that_breaks_off_is_on_record(proxied: Proxied) -> None:
    heard = threading.Event()

    async def hold(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        heard.set()
        await reader.read()

    port = proxied.server(hold, proxied.authority.context(GOOD))
    rule = f"https://{GOOD}:{port}"
    door = proxied.door(holding(credential(rule), lines=[rule]))
    sock = door.tls(GOOD, port)
    sock.sendall(f"GET / HTTP/1.1\r\nHost: {GOOD}:{port}\r\n\r\n".encode())
    assert heard.wait(BOUND_SECONDS)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    sock.close()
    proxied.pass_time(IDLE_SECONDS + 1)
    attempt = door.only()
    assert (attempt.outcome, attempt.credential) == ("failed", "key@1")


@pytest.mark.parametrize("still", [False, True])
def test_a_narrower_list_ends_an_opened_answer(proxied: Proxied, still: bool) -> None:
    may_end = threading.Event()

    async def hold(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n\r\nSOME\n")
        await asyncio.get_running_loop().run_in_executor(None, may_end.wait, 30)
        writer.write(b"MORE")

    port = proxied.server(hold, proxied.authority.context(GOOD))
    rule = f"https://{GOOD}:{port}"
    held = credential(rule)
    door = proxied.door(holding(held, lines=[rule]))
    with door.tls(GOOD, port) as sock:
        sock.sendall(
            f"GET /v1 HTTP/1.1\r\nHost: {GOOD}:{port}\r\nConnection: close\r\n\r\n".encode()
        )
        try:
            read_head(sock)
            door.change(holding(held, lines=[rule if still else f"{rule}/v2"]))
            may_end.set()
            answer = read_all(sock)
        finally:
            may_end.set()
    assert (b"MORE" in answer) == still
    assert len(door.wait_until_idle()) == 1


def test_a_list_that_opens_tls_is_held_by_tunnels_that_were_closed(proxied: Proxied) -> None:
    """Without a credential the tunnel was the program's own; with one it must not stay so."""
    heard = threading.Event()

    async def hold(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        heard.set()
        await reader.readuntil(b"\r\n\r\n")
        writer.write(ANSWER)

    port = proxied.server(hold, proxied.authority.context(GOOD))
    rule = f"https://{GOOD}:{port}"
    door = proxied.door(allowing(rule))
    asked = f"GET / HTTP/1.1\r\nHost: {GOOD}:{port}\r\n\r\n".encode()
    with door.tls(GOOD, port, proxied.authority.trusted) as sock:
        sock.sendall(asked)
        assert heard.wait(BOUND_SECONDS)
        door.change(allowing(f"{rule}/v2"))
        try:
            sock.sendall(asked)
            assert read_all(sock) == b""
        except OSError:
            pass
    door.wait_until_idle()


def test_endless_informational_responses_end(proxied: Proxied) -> None:
    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        while True:
            writer.write(f"HTTP/1.1 103 Hint\r\nLink: {VALUE}\r\n\r\n".encode())
            await writer.drain()
            await asyncio.sleep(0)

    port = proxied.server(flood, proxied.authority.context(GOOD))
    upstream = Upstream(b"")
    upstream.port = port
    door = proxied.door(holding(credential(upstream.bound()), lines=[upstream.rule]))
    answer = door.ask(upstream)
    assert status_of(answer) == 502
    assert VALUE.encode() not in answer


@pytest.mark.parametrize("opened", [True, False])
def test_a_slow_reader_costs_a_bounded_buffer(proxied: Proxied, opened: bool) -> None:
    sent = 0
    piece = (b"." * 1023 + b"\n") * 64

    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        while True:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)
            sent += len(piece)

    port = proxied.server(flood, proxied.authority.context(GOOD))
    rule = f"https://{GOOD}:{port}"
    held = credential(rule if opened else "https://other.example")
    door = proxied.door(holding(held, lines=[rule]))
    context = None if opened else proxied.authority.trusted
    tracemalloc.start()
    try:
        with door.tls(GOOD, port, context) as sock:
            sock.sendall(f"GET / HTTP/1.1\r\nHost: {GOOD}:{port}\r\n\r\n".encode())
            before = -1
            while sent != before:
                before = sent
                proxied.run(asyncio.sleep(0.3))
            _, most = tracemalloc.get_traced_memory()
            assert most < 6 << 20
    finally:
        tracemalloc.stop()
    assert len(door.wait_until_idle()) == 1


def test_the_budget_ends_an_opened_answer(proxied: Proxied) -> None:
    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        while True:
            writer.write(bytes(1 << 16))
            await writer.drain()
            await asyncio.sleep(0)

    budget = 4 << 20
    upstream = Upstream(b"")
    upstream.port = proxied.server(flood, proxied.authority.context(GOOD))
    held = credential(upstream.bound())
    door = proxied.door(holding(held, lines=[upstream.rule], bytes=budget))
    assert budget // 2 < len(door.ask(upstream)) <= budget
    assert door.only().outcome == "failed"
    told = error_of(door.talk(get(GOOD, upstream.port)))
    assert told["reason"] == "budget"


def test_the_budget_ends_an_opened_request(proxied: Proxied) -> None:
    taken = 0

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal taken
        while data := await reader.read(1 << 16):
            taken += len(data)

    budget = 4 << 20
    upstream = Upstream(b"")
    upstream.port = proxied.server(take, proxied.authority.context(GOOD))
    held = credential(upstream.bound())
    door = proxied.door(holding(held, lines=[upstream.rule], bytes=budget))
    with door.tls(GOOD, upstream.port) as sock:
        try:
            sock.sendall(inner(upstream, "/", "Transfer-Encoding: chunked", method="POST"))
            while True:
                sock.sendall(b"10000\r\n" + bytes(1 << 16) + b"\r\n")
        except OSError:
            pass
    assert door.only().outcome == "failed"
    assert budget // 2 < taken <= budget


def test_a_thousand_opened_connections_are_held_to_the_budget(proxied: Proxied) -> None:
    upstream = proxied.secure()
    held = credential(upstream.bound())
    door = proxied.door(holding(held, lines=[upstream.rule], connections=8,
                                connections_per_minute=2000), "mallory")  # fmt: skip
    other = proxied.door(holding(held, lines=[upstream.rule]), "bob")
    answers = []
    with ExitStack() as stack:
        for _ in range(8):
            stack.enter_context(door.tls(GOOD, upstream.port))
        for _ in range(1000):
            with door.connect() as sock:
                try:
                    sock.sendall(connect_head(GOOD, upstream.port))
                    sock.shutdown(socket.SHUT_WR)
                    answers.append(status_of(read_head(sock)))
                except OSError:
                    answers.append(0)
        assert set(answers) <= {403, 0}
        assert status_of(other.ask(upstream)) == 200
    door.wait_until_idle()
    assert status_of(door.ask(upstream)) == 200
    door.wait_until_idle()
    other.wait_until_idle()
    assert set(proxied.owners.values()) == {0}
    assert upstream.connections == 2


def test_each_request_of_a_connection_counts_for_the_budget(proxied: Proxied) -> None:
    upstream = proxied.secure()
    held = credential(upstream.bound())
    door = proxied.door(holding(held, lines=[upstream.rule], connections_per_minute=5))
    with door.tls(GOOD, upstream.port) as sock:
        sock.sendall(inner(upstream) * 20)
        answer = read_all(sock)
    assert answer.count(b"HTTP/1.1 200") <= 5
    assert len(upstream.heads) <= 5
    assert door.wait_until_idle()[-1].why == "budget"


def test_an_address_that_may_not_be_reached_is_not(proxied: Proxied) -> None:
    """The address is checked for each request: a name may lead elsewhere by then."""
    upstream = proxied.secure()
    held = credential(upstream.bound())
    door = proxied.door(holding(held, lines=[upstream.rule]))
    with door.tls(GOOD, upstream.port) as sock:
        sock.sendall(inner(upstream))
        assert status_of(read_head(sock)) == 200
        assert read_exactly(sock, 4) == b"GOOD"
        proxied.names[GOOD] = [["127.0.0.1"]]
        sock.sendall(inner(upstream))
        told = error_of(read_all(sock))
    assert told["reason"] == "address"
    assert upstream.connections == 1
    assert VALUE not in str(told)


def test_a_half_closed_request_gets_its_answer(door: Door, upstream: Upstream) -> None:
    with door.tunnel(GOOD, upstream.port) as raw:
        into, out = ssl.MemoryBIO(), ssl.MemoryBIO()
        tls = door.trust().wrap_bio(into, out, server_hostname=GOOD)
        while True:
            try:
                tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                raw.sendall(out.read())
                into.write(raw.recv(1 << 16))
        tls.write(inner(upstream, "/v1", "Connection: close"))
        raw.sendall(out.read())
        raw.shutdown(socket.SHUT_WR)
        into.write(read_all(raw))
        into.write_eof()
        assert b"GOOD" in tls.read(1 << 16) + b"".join(iter(lambda: read_some(tls), b""))


def read_some(tls: ssl.SSLObject) -> bytes:
    try:
        return tls.read(1 << 16)
    except ssl.SSLError:
        return b""
