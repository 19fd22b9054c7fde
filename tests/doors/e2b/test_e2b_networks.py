"""E2B's words for a network, and the lists that are meant by them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from rest_framework.test import APIClient

from executions.ledger.verification import verify
from executions.sessions.models import Session
from executions.tenants.keys import create_api_key
from providers.manager import manager
from providers.services import save_config
from tests.conftest import Caller
from tests.support import kept_here
from tests.support.networks import listed
from tests.support.policies import in_force

pytestmark = pytest.mark.usefixtures("kept_here", "lists_forgotten", "own_storage")

ALL = "0.0.0.0/0"


@pytest.fixture(autouse=True)
def _closed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The provider says what its mark is of its network; and that there is none."""
    request.getfixturevalue("kept_here")
    network = property(lambda provider: provider.mark)
    monkeypatch.setattr(kept_here.KeptHere, "network", network, raising=False)
    promise("none")


def promise(mark: str) -> None:
    save_config("kept_here", {"mark": mark})
    manager.close()


def create(caller: Caller, **body: Any) -> Any:
    # In ASCII, so that a lone surrogate arrives.
    content = json.dumps(body)
    return caller.client.post("/v2/sandboxes", content, content_type="application/json")


def created(caller: Caller, **body: Any) -> Session:
    answer = create(caller, **body)
    assert answer.status_code == 201, answer.content
    return Session.objects.get(pk=answer.json()["sandboxID"])


def replace(caller: Caller, session: Session, **body: Any) -> Any:
    return caller.client.put(f"/sandboxes/{session.pk.hex}/network", body)


def allowed(session: Session) -> tuple[str, list[str]]:
    session.refresh_from_db()
    policy = session.network_policy
    if policy is None:
        return "none", []
    return policy.mode, [str(rule) for rule in policy.rules]


def test_hosts_are_an_allowlist_where_all_else_is_denied(alice: Caller) -> None:
    listed()
    hosts = ["PyPI.org", "*.example.com", "8.8.8.8", "1.1.1.1/32", "2606:4700::1111"]
    wanted = ["pypi.org", "*.example.com", "8.8.8.8", "1.1.1.1", "[2606:4700::1111]"]
    for denied in ([ALL], ["10.0.0.0/8", ALL]):
        session = created(alice, network={"allowOut": hosts, "denyOut": denied})
        assert allowed(session) == ("allowlist", wanted)
    session = created(alice, allow_internet_access=False, network={"allowOut": ["pypi.org"]})
    assert allowed(session) == ("allowlist", ["pypi.org"])
    assert kept_here.sandboxes()[-1].network is not None


def test_names_without_a_denial_are_refused(alice: Caller) -> None:
    listed()
    answer = create(alice, network={"allowOut": ["pypi.org"]})
    assert answer.status_code == 400
    assert "denyOut" in answer.json()["message"]
    # Addresses are allowed as everything else is.
    assert allowed(created(alice, network={"allowOut": ["8.8.8.8"]}))[0] == "open"


@pytest.mark.parametrize(
    "network", [{"denyOut": []}, {"allowOut": [ALL], "denyOut": [ALL]}, {"allowOut": [ALL]}]
)
def test_what_denies_nothing_is_all_that_the_lists_around_it_give(
    network: dict[str, Any], alice: Caller, charlie: Caller
) -> None:
    assert allowed(created(alice, network=network)) == ("none", [])
    listed("pypi.org")
    assert allowed(created(alice, network=network)) == ("open", [])
    listed(tenant=charlie.tenant.slug, mode="none")
    assert allowed(created(charlie, network=network)) == ("none", [])


def test_a_sandbox_that_names_no_network_has_what_a_session_has(alice: Caller) -> None:
    for body in ({}, {"allow_internet_access": True}, {"network": {"allowPublicTraffic": False}}):
        assert allowed(created(alice, **body)) == ("none", [])
    listed("pypi.org")
    assert allowed(created(alice, allow_internet_access=True)) == ("none", [])


def test_a_default_of_the_lists_holds_for_sandboxes_too(alice: Caller) -> None:
    listed("pypi.org", by_default=True)
    assert allowed(created(alice, allow_internet_access=True)) == ("open", [])
    for body in ({"allow_internet_access": False}, {"network": {"denyOut": [ALL]}}):
        assert allowed(created(alice, **body)) == ("none", [])


def test_all_denied_is_only_where_the_provider_promises_it(alice: Caller) -> None:
    promise("all")
    session = created(alice)
    answer = create(alice, network={"denyOut": [ALL]})
    assert answer.status_code == 400
    assert "allow_internet_access" in answer.json()["message"]
    assert replace(alice, session, denyOut=[ALL]).status_code == 400
    assert Session.objects.count() == 1


@pytest.mark.parametrize(
    ("host", "status"),
    [
        *((f"pypi.org{more}", 400) for more in (":443", ":22", " # x", "#x", ",a", "@evil.test")),
        *((host, 400) for host in ("", " ", "*", "*.com", "*.co.uk", "*.*.com", "a.*.com", "**")),
        *((host, 400) for host in ("GET pypi.org", "https://pypi.org", "pypi.org/simple", "//")),
        *((host, 400) for host in ("user@pypi.org", "user:word@pypi.org", "[::1]:80", "::1%lo")),
        *((host, 400) for host in ("127.1", "0x7f.1", "010.0.0.1", "256.1.1.1", "*.8.8.8.8")),
        *((host, 400) for host in ("py\0pi.org", "a\ud800.org", "-", "a..b", "x" * 256, 7, None)),
        *((host, 400) for host in ("xn--\u00fc.org", "\u202epypi.org", "pypi\u3002org/x", "a b")),
        *((host, 501) for host in ("8.8.8.0/24", "0.0.0.0/1", "::/0", "2606:4700::/32")),
    ],
)
def test_a_host_that_is_no_host_opens_nothing(host: Any, status: int, alice: Caller) -> None:
    listed()
    network = {"allowOut": ["pypi.org", host], "denyOut": [ALL]}
    answer = create(alice, network=network)
    assert answer.status_code == status, (host, answer.content)
    assert "network.allowOut" in answer.json()["message"]
    assert not Session.objects.exists()


def test_names_of_other_alphabets_are_those_that_name_servers_know(alice: Caller) -> None:
    listed()
    network = {"allowOut": ["B\u00fccher.example", "pypi\u3002org"], "denyOut": [ALL]}
    assert allowed(created(alice, network=network))[1] == ["xn--bcher-kva.example", "pypi.org"]


@pytest.mark.parametrize(
    ("network", "status", "field"),
    [
        ({"denyOut": ["8.8.8.8"]}, 501, "network.denyOut"),
        ({"denyOut": ["0.0.0.0/1", "128.0.0.0/1"]}, 501, "network.denyOut"),
        ({"denyOut": ["::/0"]}, 501, "network.denyOut"),
        ({"denyOut": ["evil.test", ALL]}, 400, "network.denyOut"),
        ({"denyOut": ALL}, 400, "network.denyOut"),
        ({"denyOut": [ALL] * 501}, 400, "network.denyOut"),
        ({"allowOut": {"pypi.org": True}}, 400, "network.allowOut"),
        ({"rules": {"a.test": [{"transform": {"headers": {"a": "b"}}}]}}, 501, "network.rules"),
        ({"egressProxy": {"address": "a.test:1080"}}, 501, "network.egressProxy"),
        ({"dnsServers": ["1.1.1.1"]}, 501, "network.dnsServers"),
        ({"maskRequestHost": "a.test"}, 501, "network.maskRequestHost"),
        ({"httpsPorts": [3000]}, 501, "network.httpsPorts"),
        ({"allowPublicTraffic": 1}, 501, "network.allowPublicTraffic"),
        ({"new": True}, 501, "network.new"),
        (["x"], 400, "network"),
        ("", 400, "network"),
    ],
)
def test_what_lists_cannot_say_is_refused_by_its_name(
    network: Any, status: int, field: str, alice: Caller
) -> None:
    listed()
    answer = create(alice, network=network)
    assert answer.status_code == status, answer.content
    assert field in answer.json()["message"]
    odd: list[Any] = ["false", 0, []]
    for access in odd:
        assert create(alice, allow_internet_access=access).status_code == 400
    assert not Session.objects.exists()


def test_what_asks_for_no_more_than_holds_is_accepted(alice: Caller) -> None:
    created(
        alice,
        network={"allowPublicTraffic": False, "rules": {}, "egressProxy": None, "dnsServers": []},
    )


def test_lists_and_policies_are_not_gone_around(
    alice: Caller, bob: Caller, charlie: Caller
) -> None:
    """Bob is of the tenant of Alice, Charlie of another."""
    network = {"allowOut": ["npmjs.org"], "denyOut": [ALL]}
    assert create(alice, network=network).status_code == 400
    listed("pypi.org", "npmjs.org")
    listed("pypi.org", tenant=alice.tenant.slug)
    for caller in (alice, bob):
        assert "npmjs.org" in create(caller, network=network).json()["message"]
    session = created(charlie, network=network)
    for caller in (alice, bob):
        assert replace(caller, session, denyOut=[ALL]).status_code == 404
        assert caller.client.get(f"/sandboxes/{session.pk.hex}").status_code == 404
    assert allowed(session) == ("allowlist", ["npmjs.org"])
    in_force(charlie.tenant.slug, network="none")
    assert create(charlie, network=network).status_code == 403


def test_a_network_is_replaced_shown_and_in_the_ledger(alice: Caller, bob: Caller) -> None:
    listed()
    session = created(alice)
    path = f"/sandboxes/{session.pk.hex}"
    assert "network" not in alice.client.get(path).json()
    answer = replace(alice, session, allowOut=["pypi.org", "8.8.8.8"], denyOut=[ALL])
    assert (answer.status_code, answer.content) == (204, b"")
    for caller in (alice, bob):
        told = caller.client.get(path).json()
        assert told["network"] == {"allowOut": ["pypi.org", "8.8.8.8"], "denyOut": [ALL]}
    for body, mode in (
        ({"allow_internet_access": True}, "open"),
        ({"allow_internet_access": False}, "none"),
        ({"denyOut": []}, "open"),
        # Nothing is kept of what it was, and nothing is opened that was not named.
        ({}, "none"),
    ):
        assert replace(bob, session, **body).status_code == 204, body
        assert allowed(session)[0] == mode, body
    rules = {"a.test": [{"transform": {"headers": {"a": "b"}}}]}
    assert replace(alice, session, rules=rules, allowOut=["a:1"]).status_code == 501
    assert replace(alice, session, allowInternetAccess=False).status_code == 501
    assert allowed(session)[0] == "none"
    assert verify().is_intact


def test_a_key_that_may_only_read_or_run_replaces_no_network(alice: Caller) -> None:
    listed()
    session = created(alice)
    for scopes in ("read", "execute", "read execute"):
        _, text = create_api_key(alice.tenant, scopes, None, scopes)
        client = APIClient(headers={"X-API-Key": text})
        path = f"/sandboxes/{session.pk.hex}/network"
        assert client.put(path, {"denyOut": []}, format="json").status_code == 403, scopes
    assert APIClient().put(path, {"denyOut": []}, format="json").status_code == 401
    assert allowed(session) == ("none", [])


def test_rules_of_the_native_api_are_shown_in_its_words(alice: Caller) -> None:
    listed()
    session = created(alice)
    rules = ["GET http://a.test:8080/v1 # the list", "b.test # why"]
    answer = alice.client.put(f"/api/v1/sessions/{session.pk}/network", {"allow": rules})
    assert answer.status_code == 200, answer.content
    told = alice.client.get(f"/sandboxes/{session.pk.hex}").json()["network"]
    assert told["allowOut"] == ["GET http://a.test:8080/v1", "b.test"]


def test_a_fork_has_the_network_of_its_original_and_no_more(alice: Caller) -> None:
    listed("pypi.org", "npmjs.org", by_default=True)
    network = {"allowOut": ["pypi.org"], "denyOut": [ALL]}
    for body, expected in (
        ({"network": network}, ("allowlist", ["pypi.org"])),
        ({}, ("open", [])),
        ({"allow_internet_access": False}, ("none", [])),
    ):
        session = created(alice, **body)
        (fork,) = alice.client.post(f"/sandboxes/{session.pk.hex}/fork", {}).json()
        copy = Session.objects.get(pk=fork["sandbox"]["sandboxID"])
        assert allowed(copy) == expected


def test_a_paused_sandbox_has_its_network_again(alice: Caller) -> None:
    listed()
    session = created(alice)
    assert alice.client.post(f"/sandboxes/{session.pk.hex}/pause", {}).status_code == 204
    assert replace(alice, session, allowOut=["pypi.org"], denyOut=[ALL]).status_code == 204
    assert alice.client.post(f"/sandboxes/{session.pk.hex}/connect", {}).status_code == 201
    assert allowed(session) == ("allowlist", ["pypi.org"])
    network = kept_here.sandboxes()[-1].network
    assert network is not None
    assert network.layers[-1].name == "session"
