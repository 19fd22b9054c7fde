"""A name server of an attacker that does not answer, so that no thread is left for others."""

from __future__ import annotations

import threading
from contextlib import ExitStack

from tests.attacks.network.proxied import (
    ADDRESS,
    BOUND_SECONDS,
    GOOD,
    Proxied,
    allowing,
    connect_head,
    get,
    status_of,
)


def test_names_of_others_are_resolved_all_the_same(proxied: Proxied) -> None:
    may_end = threading.Event()
    asked = threading.Semaphore(0)

    def look_up(host: str, port: int) -> list[str]:
        if host != GOOD:
            asked.release()
            may_end.wait(BOUND_SECONDS)
        return [ADDRESS]

    proxied.dialer._lookup = look_up
    upstream = proxied.upstream()
    mallory = proxied.door(allowing("*.slow.example", connections=200), "mallory")
    bob = proxied.door(allowing(upstream.rule), "bob")
    try:
        with ExitStack() as stack:
            for number in range(100):
                sock = stack.enter_context(mallory.connect())
                sock.sendall(connect_head(f"x{number}.slow.example", 443))
            for _ in range(4):
                assert asked.acquire(timeout=BOUND_SECONDS)
            assert status_of(bob.talk(get(GOOD, upstream.port))) == 200
            mallory.close()
            mallory.wait_until_idle()
    finally:
        may_end.set()
    assert status_of(bob.talk(get(GOOD, upstream.port))) == 200
    assert len(mallory.attempts) == 100
