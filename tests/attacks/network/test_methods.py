"""Methods other than those of the rule."""

from __future__ import annotations

import pytest

from tests.attacks.network.proxied import GOOD, Proxied, allowing, get, status_of


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "get", "Get", "TRACE", "PROPFIND"])
def test_another_method_is_refused(proxied: Proxied, method: str) -> None:
    upstream = proxied.upstream()
    door = proxied.door(allowing(f"GET,HEAD {upstream.rule}"))
    override = "X-HTTP-Method-Override: DELETE"
    assert status_of(door.talk(get(GOOD, upstream.port, method=method))) in (400, 403)
    assert upstream.heads == []
    assert status_of(door.talk(get(GOOD, upstream.port, "/", override))) == 403
    assert upstream.heads == []
    assert status_of(door.talk(get(GOOD, upstream.port))) == 200
    outcomes = [each.outcome for each in door.wait_for(3)]
    assert outcomes == ["refused", "refused", "allowed"]
