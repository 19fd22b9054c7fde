"""The channel over which the pool commands the proxy.

No sandbox has an end of it: it is a pair of sockets without a name, whose ends are descriptor 0 of
the proxy and one of the pool that no child inherits. What a sandbox says arrives over connections
and lanes, which are never parsed as commands. Of what does arrive there a bad message ends nothing.
"""

from __future__ import annotations

import asyncio
import json
import socket
from functools import partial

import pytest

from providers.addresses import Allowed
from providers.network import Attempt
from providers.runtime.guest import wire
from providers.runtime.network.gates import Gate, Hold
from providers.runtime.network.proxy import Proxy, _OpenGate
from providers.runtime.network.resolving import Dialer
from tests.attacks.network.proxied import (
    ADDRESS,
    Proxied,
    allowing,
    credential,
    error_of,
    get,
    holding,
    opened,
    read_all,
)
from tests.support.networks import ALLOWED

BAD: tuple[tuple[dict[str, object], list[tuple[str, bytes]]], ...] = (
    ({}, []),
    ({"gate": "x", "op": "open"}, []),
    ({"gate": None, "op": "close"}, []),
    ({"gate": 1}, []),
    ({"gate": 1, "op": "unknown"}, []),
    ({"gate": 9, "op": "change"}, [("network", b"{}")]),
    ({"gate": 9, "op": "change"}, []),
    ({"gate": 9, "op": "close"}, []),
    ({"gate": 9, "op": "sync"}, []),
)
NETWORKS = (b"", b"5", b"{", b"\xff", b"[]", b'{"layers": 5}', b'{"layers": [{"mode": 5}]}',
            b'{"layers": [], "budget": {"bytes": "x"}}', b'{"layers":[{"allow":[5]}]}')  # fmt: skip


async def exchange() -> bytes:
    ours, theirs = socket.socketpair()
    ours.settimeout(30)
    proxy = Proxy(theirs, Dialer([Allowed.parse(ADDRESS)]))
    serving = asyncio.create_task(proxy.run())
    loop = asyncio.get_running_loop()

    def talk() -> bytes:
        for header, parts in BAD:
            ours.sendall(wire.pack(header, parts))
        for network in NETWORKS:
            with socket.create_server(("127.0.0.1", 0)) as unused:
                message = wire.pack({"gate": 1, "op": "open", "owner": "a"}, [("network", network)])
                socket.send_fds(ours, [message[:1]], [unused.fileno()])
                ours.sendall(message[1:])
        with socket.create_server(("127.0.0.1", 0)) as listener:
            network = json.dumps(allowing("good.example").to_json()).encode()
            message = wire.pack({"gate": 1, "op": "open", "owner": "a"}, [("network", network)])
            socket.send_fds(ours, [message[:1]], [listener.fileno()])
            ours.sendall(message[1:])
            with socket.create_connection(listener.getsockname(), 60) as program:
                program.sendall(get("evil.example", 80))
                answer = b""
                while data := program.recv(1 << 16):
                    answer += data
        ours.close()
        return answer

    answer = await loop.run_in_executor(None, talk)
    await asyncio.wait_for(serving, 60)
    theirs.close()
    return answer


def test_bad_messages_end_nothing() -> None:
    answer = asyncio.run(exchange())
    assert error_of(answer)["host"] == "evil.example"


@pytest.mark.parametrize("network", NETWORKS)
def test_a_change_that_cannot_be_read_closes_its_gate(network: bytes) -> None:
    """What held before may allow more."""

    async def change_and_ask() -> bytes:
        ours, theirs = socket.socketpair()
        ours.settimeout(30)
        serving = asyncio.create_task(Proxy(theirs, Dialer(lookup=lambda *_: [])).run())
        text = json.dumps(allowing("good.example").to_json()).encode()

        def talk() -> bytes:
            with ours, socket.create_server(("127.0.0.1", 0)) as listener:
                message = wire.pack({"gate": 1, "op": "open", "owner": "a"}, [("network", text)])
                socket.send_fds(ours, [message[:1]], [listener.fileno()])
                ours.sendall(message[1:])
                ours.sendall(wire.pack({"gate": 1, "op": "change"}, [("network", network)]))
                ours.sendall(wire.pack({"gate": 1, "op": "sync"}, []))
                assert b"synced" in ours.recv(1 << 16)
                with socket.create_connection(listener.getsockname(), 60) as program:
                    try:
                        program.sendall(get("good.example", 80))
                        return read_all(program)
                    except ConnectionError:
                        return b""

        answer = await asyncio.get_running_loop().run_in_executor(None, talk)
        await asyncio.wait_for(serving, 60)
        theirs.close()
        return answer

    assert asyncio.run(change_and_ask()) == b""


def test_a_look_has_what_a_program_has_just_been_answered() -> None:
    async def look() -> list[object]:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        loop = asyncio.get_running_loop()
        proxy = Proxy(theirs, Dialer())
        serving = asyncio.create_task(proxy.run())
        gate = Gate(opened(), partial(proxy._tell_attempt, 1))
        proxy._gates[1] = _OpenGate(gate)
        hold = gate.add(lambda: None)
        # The program has its answer, and the exchange is not quite at its end.
        hold.note_answer()
        ours.send(wire.pack({"gate": 1, "op": "sync"}, []))
        for _ in range(10):
            await asyncio.sleep(0)
        with pytest.raises(BlockingIOError):
            ours.recv(1)
        gate.record(ALLOWED)
        hold.is_answered = False
        events: list[object] = []
        parser = wire.Parser(1 << 20)
        while len(events) < 2:
            data = await asyncio.wait_for(loop.sock_recv(ours, 1 << 16), 60)
            events += [header["event"] for header, _ in parser.feed(data)]
        ours.close()
        await asyncio.wait_for(serving, 60)
        theirs.close()
        return events

    assert asyncio.run(look()) == ["attempt", "synced"]


@pytest.mark.parametrize("length", [b"Content-Length: 2", b"Transfer-Encoding: chunked"])
def test_an_answer_is_noted_before_its_program_has_the_end_of_it(
    proxied: Proxied, length: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []
    body = b"ok" if length.startswith(b"Content") else b"2\r\nok\r\n0\r\n\r\n"
    upstream = proxied.upstream(b"HTTP/1.1 200 OK\r\n" + length + b"\r\n\r\n" + body)
    door = proxied.door(allowing(upstream.rule))
    record = door.gate.record

    def look(attempt: Attempt) -> None:
        seen.append(any(hold.is_answered for hold in door.gate._holds))
        record(attempt)

    monkeypatch.setattr(door.gate, "record", look)
    door.talk(get(upstream.host, upstream.port))
    assert door.only().outcome == "allowed"
    assert seen == [True]
    assert not any(hold.is_answered for hold in door.gate._holds)


def test_what_was_answered_is_no_failure_where_its_gate_closes_just_then(
    proxied: Proxied, monkeypatch: pytest.MonkeyPatch
) -> None:
    note = Hold.note_answer

    def close_then(hold: Hold) -> None:
        note(hold)
        hold.end()

    monkeypatch.setattr(Hold, "note_answer", close_then)
    upstream = proxied.upstream(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
    door = proxied.door(allowing(upstream.rule))
    assert door.talk(get(upstream.host, upstream.port)).endswith(b"ok")
    assert door.only().outcome == "allowed"


def test_a_frame_that_cannot_be_read_ends_the_process() -> None:
    async def garble() -> None:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            serving = asyncio.create_task(Proxy(theirs, Dialer()).run())
            ours.sendall(b"\xff" * 64)
            await asyncio.wait_for(serving, 60)

    asyncio.run(garble())


def test_commands_in_a_connection_are_not_carried_out(proxied: Proxied) -> None:
    door = proxied.door(allowing("other.example"))
    network = json.dumps(opened().to_json()).encode()
    door.talk(wire.pack({"op": "change", "gate": 1}, [("network", network)]))
    assert door.gate.network == allowing("other.example")
    assert door.only().outcome == "refused"


async def change(changes: bytes) -> dict[str, str]:
    """What upstreams with names are refused or fail for, when their credentials were changed."""
    ours, theirs = socket.socketpair()
    ours.settimeout(30)
    proxy = Proxy(theirs, Dialer(lookup=lambda host, port: []))
    serving = asyncio.create_task(proxy.run())
    held = [credential("https://good.example", name=name, upstream="https://good.example")
            for name in ("first", "second", "third")]  # fmt: skip
    text = json.dumps(holding(*held, lines=["good.example"]).to_json()).encode()

    def talk() -> dict[str, str]:
        listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
        for number, each in enumerate(listeners):
            header: dict[str, object] = {"gate": number, "op": "open", "owner": "a"}
            message = wire.pack(header, [("network", text)])
            socket.send_fds(ours, [message[:1]], [each.fileno()])
            ours.sendall(message[1:])
        ours.sendall(wire.pack({"op": "credentials"}, [("changes", changes)]))
        found = {}
        for name in ("first", "second", "third"):
            whys = set()
            for each in listeners:
                with socket.create_connection(each.getsockname(), 60) as program:
                    program.sendall(get(f"{name}.sandbox", 80))
                    whys.add(str(error_of(read_all(program))["reason"]))
            (found[name],) = whys
        for each in listeners:
            each.close()
        ours.close()
        return found

    found = await asyncio.get_running_loop().run_in_executor(None, talk)
    await asyncio.wait_for(serving, 60)
    theirs.close()
    return found


@pytest.mark.parametrize(
    "wrong", [5, {}, {"value": "short"}, {"rules": ["http://good.example"]}, {"rules": ["//"]}]
)
def test_a_version_that_cannot_be_read_takes_its_credential_away(wrong: object) -> None:
    """And those of the same message are changed all the same."""
    if isinstance(wrong, dict) and wrong:
        first = credential("https://good.example", name="first", upstream="https://good.example")
        wrong = {**first.to_json(), **wrong}
    changes = json.dumps({"first": wrong, "second": None}).encode()
    found = asyncio.run(change(changes))
    assert found == {"first": "not_allowed", "second": "not_allowed", "third": "name"}
