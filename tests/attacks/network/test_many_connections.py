"""Hundreds of connections of one sandbox, and more than its tenant may have."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from providers.runtime.network import gates
from tests.attacks.network.proxied import (
    GOOD,
    Proxied,
    allowing,
    connect_head,
    error_of,
    get,
    read_head,
    status_of,
)

MANY = 300


def test_hundreds_are_held_to_the_budget_and_disturb_no_other_gate(proxied: Proxied) -> None:
    upstream = proxied.upstream()
    crowd = proxied.door(allowing(upstream.rule, connections=8), "mallory")
    other = proxied.door(allowing(upstream.rule), "bob")
    with ExitStack() as stack:
        held = []
        for _ in range(MANY):
            sock = stack.enter_context(crowd.connect())
            sock.sendall(connect_head(GOOD, upstream.port))
            held.append(sock)
        answers = []
        for sock in held:
            try:
                answers.append(status_of(read_head(sock)))
            except ConnectionError:
                answers.append(0)
        assert answers.count(200) == 8
        assert set(answers) <= {200, 403, 0}
        assert status_of(other.talk(get(GOOD, upstream.port))) == 200
    crowd.wait_until_idle()
    assert status_of(crowd.talk(get(GOOD, upstream.port))) == 200
    attempts = crowd.wait_until_idle()
    assert [each.outcome for each in attempts].count("allowed") == 1
    assert {each.why for each in attempts} == {"", "budget", "ended"}
    assert set(proxied.owners.values()) == {0}


def test_a_connection_too_many_is_told_why(proxied: Proxied) -> None:
    upstream = proxied.upstream()
    door = proxied.door(allowing(upstream.rule, connections=1))
    with door.tunnel(GOOD, upstream.port):
        told = error_of(door.talk(get(GOOD, upstream.port)))
    assert told["reason"] == "budget"
    assert "1 connections at once" in told["message"]
    assert door.wait_for(1)[0].why == "budget"


def test_every_connection_that_is_not_answered_is_on_record(proxied: Proxied) -> None:
    upstream = proxied.upstream()
    door = proxied.door(allowing(upstream.rule, connections=1))
    with ExitStack() as stack:
        for _ in range(1 + gates.MOST_REFUSALS):
            stack.enter_context(door.connect()).sendall(b"C")
        while not proxied.call(lambda: door.gate.is_crowded):
            pass
        assert door.talk(get(GOOD, upstream.port)) == b""
        assert door.wait_for(1)[0].why == "budget"


def test_a_tenant_is_held_to_its_own_number(
    proxied: Proxied, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gates, "MOST_OF_OWNER", 3)
    upstream = proxied.upstream()
    first, second = (proxied.door(allowing(upstream.rule), "mallory") for _ in range(2))
    other = proxied.door(allowing(upstream.rule), "bob")
    with ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(first.tunnel(GOOD, upstream.port))
        assert error_of(second.talk(get(GOOD, upstream.port)))["reason"] == "budget"
        assert status_of(other.talk(get(GOOD, upstream.port))) == 200
    first.wait_until_idle()
    assert status_of(second.talk(get(GOOD, upstream.port))) == 200


@pytest.mark.parametrize("said", [b"\0\r\n\r\n", get("evil.example", 80)])
def test_a_flood_of_refusals_is_not_a_flood_of_records(proxied: Proxied, said: bytes) -> None:
    door = proxied.door(allowing("other.example", connections_per_minute=5))
    for _ in range(30):
        door.talk(said)
    assert 5 <= len(door.wait_until_idle()) <= 10
