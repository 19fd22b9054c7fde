"""The network of a session: given at its start, changed while it lives, kept through sleep."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from executions.capabilities.network import credential_changes
from executions.capabilities.network.credentials import revoke
from executions.capabilities.network.models import NetworkAttempt
from executions.ledger.models import LedgerEntry
from executions.ledger.verification import verify
from executions.sessions import maintenance
from executions.sessions.capacity import suspend
from executions.sessions.models import Session
from providers.errors import ProviderUnavailable
from providers.network import Network, Target
from tests.conftest import Caller
from tests.support import kept_here
from tests.support.networks import ALLOWED, REFUSED, attempts, credential, listed
from tests.support.policies import in_force
from tests.support.sessions import URL, cell, opened, row

pytestmark = pytest.mark.usefixtures("kept_here", "lists_forgotten", "own_storage")

PYPI: dict[str, Any] = {"allow": ["pypi.org"]}


def sandbox() -> kept_here.Kept:
    [found] = kept_here.sandboxes()
    return found


def reaches(host: str) -> bool:
    network: Network | None = sandbox().network
    return network is not None and network.judge(Target(host, 443, "https")).is_allowed


def address(session: dict[str, Any]) -> str:
    return f"{URL}/{session['id']}/network"


def test_a_session_has_the_network_it_was_opened_with(alice: Caller) -> None:
    listed("pypi.org", "npmjs.org")
    session = opened(alice, network=PYPI)
    assert reaches("pypi.org")
    assert not reaches("npmjs.org")
    said = alice.client.get(address(session)).json()
    assert (said["mode"], said["allow"]) == ("allowlist", ["pypi.org"])
    assert [layer["name"] for layer in said["layers"]] == ["installation", "session"]
    assert said["budget"]["connections"] == 64


def test_a_session_that_names_none_has_none_unless_there_is_a_default(alice: Caller) -> None:
    first = listed("pypi.org")
    session = opened(alice)
    assert sandbox().network is None
    assert alice.client.get(address(session)).json() == {
        "mode": "none", "allow": [], "layers": [], "budget": None,
    }  # fmt: skip
    alice.client.delete(f"{URL}/{session['id']}")
    first.by_default = True
    first.save()
    opened(alice)
    assert reaches("pypi.org")


def test_a_session_is_not_opened_with_what_is_not_allowed(alice: Caller) -> None:
    for allow in (["pypi.org"], ["*.com"]):
        answer = alice.client.post(URL, {"network": {"allow": allow}})
        assert (answer.status_code, answer.json()["error"]["field"]) == (400, "network")
    listed("pypi.org")
    in_force(alice.tenant.slug, network="none")
    answer = alice.client.post(URL, {"network": PYPI})
    assert answer.json()["error"]["code"] == "SB007"
    assert not kept_here.sandboxes()


def test_code_in_a_session_names_no_network(alice: Caller) -> None:
    listed("pypi.org")
    session = opened(alice)
    for path, body in (
        ("/api/v1/executions", {"session": session["id"]}),
        (f"{URL}/{session['id']}/executions", {}),
    ):
        answer = alice.client.post(path, {"code": "1", "network": PYPI, **body})
        assert (answer.status_code, answer.json()["error"]["field"]) == (400, "network")
    assert (
        "PUT /api/v1/sessions"
        in alice.client.post(
            "/api/v1/executions", {"code": "1", "network": PYPI, "session": session["id"]}
        ).json()["error"]["message"]
    )


def test_its_network_is_changed_while_it_lives(alice: Caller) -> None:
    listed("pypi.org", "npmjs.org")
    session = opened(alice, network=PYPI)
    answer = alice.client.put(address(session), {"allow": ["npmjs.org"]})
    assert (answer.status_code, answer.json()["allow"]) == (200, ["npmjs.org"])
    assert reaches("npmjs.org")
    assert not reaches("pypi.org")
    refused = alice.client.put(address(session), {"allow": ["evil.test"]})
    assert (refused.status_code, refused.json()["error"]["field"]) == (400, "network")
    for body in ({"allow": ["*.com"]}, {"mode": "open", "allow": ["pypi.org"]}, {"log_only": True}):
        assert alice.client.put(address(session), body).status_code == 400
    assert reaches("npmjs.org")
    assert alice.client.put(address(session), {"mode": "none"}).json()["layers"] == []
    assert sandbox().network is None
    changes = LedgerEntry.objects.filter(kind="session", statement__contains='"changed"')
    assert changes.count() == 2
    assert verify().is_intact


def test_of_three_tenants_only_its_own_sees_and_changes_it(
    alice: Caller, bob: Caller, charlie: Caller
) -> None:
    listed("pypi.org", "npmjs.org")
    session = opened(alice, network=PYPI)
    assert bob.tenant == alice.tenant
    assert bob.client.get(address(session)).json()["allow"] == ["pypi.org"]
    assert bob.client.put(address(session), {"allow": ["npmjs.org"]}).status_code == 200
    for method in (charlie.client.get, lambda path: charlie.client.put(path, {"mode": "open"})):
        assert method(address(session)).status_code == 404
    assert reaches("npmjs.org")
    assert not reaches("pypi.org")


def test_a_key_without_the_scope_changes_nothing(alice: Caller) -> None:
    listed("pypi.org")
    session = opened(alice)
    alice.api_key.scopes = "read"
    alice.api_key.save()
    assert alice.client.put(address(session), PYPI).status_code == 403
    assert sandbox().network is None


def test_one_that_sleeps_is_not_woken_and_has_it_when_it_wakes(alice: Caller) -> None:
    listed("pypi.org", "npmjs.org")
    session = opened(alice, network=PYPI)
    cell(alice, session, "open('file', 'w').close()")
    assert suspend(row(session).pk, "a test")
    assert not kept_here.sandboxes()
    assert alice.client.put(address(session), {"allow": ["npmjs.org"]}).status_code == 200
    assert not kept_here.sandboxes()
    assert cell(alice, session, "1").status_code == 200
    assert reaches("npmjs.org")
    assert not reaches("pypi.org")


def test_one_that_is_being_woken_is_not_changed(alice: Caller) -> None:
    listed("pypi.org")
    session = opened(alice)
    cell(alice, session, "open('file', 'w').close()")
    assert suspend(row(session).pk, "a test")
    moment = row(session).created_at + timedelta(seconds=1)
    Session.objects.filter(pk=session["id"]).update(waking_since=moment)
    answer = alice.client.put(address(session), PYPI)
    assert answer.status_code == 409
    assert row(session).network is None


def test_a_list_that_becomes_narrower_holds_for_living_sessions_too(alice: Caller) -> None:
    around = listed("pypi.org", "npmjs.org")
    opened(alice, network={"mode": "open"})
    assert reaches("npmjs.org")
    around.rules = "pypi.org"
    around.save()
    maintenance.renew_living()
    assert reaches("pypi.org")
    assert not reaches("npmjs.org")
    in_force(alice.tenant.slug, network="none")
    maintenance.renew_living()
    assert sandbox().network is None


def test_a_sandbox_that_does_not_answer_has_it_a_minute_later(
    alice: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed("pypi.org")
    session = opened(alice)
    with monkeypatch.context() as patch:

        def fails(self: Any, network: Any) -> None:
            raise ProviderUnavailable("away")

        patch.setattr(kept_here.Kept, "change_network", fails)
        assert alice.client.put(address(session), PYPI).status_code == 503
    assert sandbox().network is None
    maintenance.renew_living()
    assert reaches("pypi.org")


def test_a_network_is_not_called_closed_while_the_sandbox_has_it(
    alice: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed("pypi.org")
    session = opened(alice, network=PYPI)
    sandbox().attempts = attempts(ALLOWED)
    with monkeypatch.context() as patch:

        def fails(self: Any, network: Any) -> None:
            raise ProviderUnavailable("away")

        patch.setattr(kept_here.Kept, "change_network", fails)
        assert alice.client.put(address(session), {"mode": "none"}).status_code == 503
    assert row(session).network is not None
    assert alice.client.get(address(session)).json()["mode"] == "allowlist"

    assert alice.client.put(address(session), {"mode": "none"}).status_code == 200
    assert sandbox().network is None
    assert row(session).network is None
    assert NetworkAttempt.objects.get().host == "pypi.org"


def test_the_provider_must_hold_it(alice: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    listed("pypi.org")
    monkeypatch.setattr(kept_here.KeptHere, "holds_network", False)
    session = opened(alice)
    answer = alice.client.put(address(session), PYPI)
    assert "does not hold network lists" in answer.json()["error"]["message"]
    assert row(session).network is None
    answer = alice.client.post(URL, {"network": PYPI})
    assert answer.status_code >= 400
    assert "does not hold network lists" in answer.json()["error"]["message"]


def test_attempts_between_runs_are_stored_without_one(alice: Caller, charlie: Caller) -> None:
    listed("pypi.org")
    session = opened(alice, network=PYPI)
    sandbox().attempts = attempts(ALLOWED)
    maintenance.renew_living()
    stored = NetworkAttempt.objects.get()
    assert (stored.host, stored.execution, str(stored.session_id)) == (
        "pypi.org", None, session["id"],
    )  # fmt: skip
    maintenance.renew_living()
    assert NetworkAttempt.objects.count() == 1

    sandbox().attempts = attempts(REFUSED)
    told = cell(alice, session, "1").json()["network"]
    assert told["refused"] == 1
    assert [each["name"] for each in told["lists"]] == ["installation", "session"]
    assert str(NetworkAttempt.objects.get(host="evil.test").session_id) == session["id"]

    sandbox().attempts = attempts(ALLOWED, REFUSED)
    assert alice.client.delete(f"{URL}/{session['id']}").status_code == 204
    assert NetworkAttempt.objects.filter(execution=None).count() == 3
    assert not NetworkAttempt.objects.exclude(tenant_slug=alice.tenant.slug).exists()


def test_a_cell_has_its_provider_told_of_changed_credentials(
    alice: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_here.KeptHere, "network", "none")
    listed("pypi.org")
    there = credential("there", "https://pypi.org")
    gone = credential("gone", "https://pypi.org")
    session = opened(alice, network=PYPI)
    revoke(gone)
    registered: list[dict[str, int]] = []
    told: list[dict[str, str | None]] = []

    def note(holder: credential_changes.Holder) -> None:
        registered.append(dict(holder.versions))
        credential_changes._holders.add(holder)
        monkeypatch.setattr(
            kept_here.KeptHere,
            "change_credentials",
            lambda self, changes: told.append(
                {key: None if each is None else each.label for key, each in changes.items()}
            ),
        )
        credential_changes.look()

    monkeypatch.setattr(credential_changes, "register", note)
    said = cell(alice, session, "1").json()
    assert said["network"]["credentials"] == ["there@1"]
    # What its sandbox has is not known: it may be older than the revocation.
    assert registered == [{str(there.pk): 0, str(gone.pk): 0}]
    assert told == [{str(there.pk): "there@1", str(gone.pk): None}]
    assert credential_changes._holders == set()
    # The provider promises no network for a sandbox without a list.
    cell(alice, opened(alice), "1")
    assert len(registered) == 1
