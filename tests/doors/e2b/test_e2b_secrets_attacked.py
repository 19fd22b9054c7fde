"""E2B's secrets against callers of the same tenant, floods, and changes at the same time."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import pytest
from django.core.exceptions import ValidationError
from django.utils import timezone

from executions.capabilities.network import models, secrets
from executions.capabilities.network.credentials import credentials_in_force, ids_of, revoke
from executions.capabilities.network.models import NetworkCredential
from executions.ledger.models import LedgerEntry
from executions.ledger.verification import verify
from executions.sessions.models import Session
from executions.sessions.session_sandbox import network_in_force
from providers.services.settings_cache import forget_all
from tests.attacks.test_writers_records import undone
from tests.conftest import Caller
from tests.support.networks import VALUE, credential, listed

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("lists_forgotten")]

OTHER = "sk-another-9876543210"


def create(caller: Caller, **body: Any) -> Any:
    return caller.client.post("/secrets", json.dumps(body), content_type="application/json")


def change(caller: Caller, name: str, value: str) -> Any:
    body = json.dumps({"value": value})
    return caller.client.post(f"/secrets/{name}", body, content_type="application/json")


def test_a_secret_takes_no_credential_of_the_installation_from_its_tenant(alice: Caller) -> None:
    credential("models", upstream="https://api.example.com")
    assert create(alice, name="models", value=OTHER).status_code == 201
    forget_all()
    found = credentials_in_force(alice.tenant.slug)
    assert [each.value.reveal() for each in found if each.rules] == [VALUE]


def test_a_secret_cannot_have_the_name_that_is_the_id_of_another(alice: Caller) -> None:
    create(alice, name="key", value=VALUE)
    row = NetworkCredential.objects.get()
    answer = create(alice, name=f"secret_{row.pk}", value=OTHER)
    assert answer.status_code == 400
    assert answer.json()["message"].startswith("name: ")
    assert change(alice, f"secret_{row.pk}", "sk-the-next-value").json()["name"] == "key"


@pytest.mark.parametrize("placement", ["bearer", "sandbox"])
def test_what_is_added_while_a_secret_is_created_stays(
    alice: Caller, monkeypatch: pytest.MonkeyPatch, placement: str
) -> None:
    slug = alice.tenant.slug
    real = secrets._put

    def late(*given: Any) -> NetworkCredential:
        monkeypatch.setattr(secrets, "_put", real)
        if placement == "sandbox":
            secrets.create_secret(alice.tenant, "key", VALUE, "key:other")
        else:
            credential("key", tenant=slug)
        return real(*given)

    monkeypatch.setattr(secrets, "_put", late)
    assert create(alice, name="key", value=OTHER).status_code == 409
    row = NetworkCredential.objects.get()
    assert (row.placement, row.version, row.open_value()) == (placement, 1, VALUE)


def test_a_secret_that_is_removed_while_it_is_changed_stays_removed(
    alice: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    create(alice, name="key", value=VALUE)
    real = secrets._put

    def late(*given: Any) -> NetworkCredential:
        revoke(NetworkCredential.objects.get())
        return real(*given)

    monkeypatch.setattr(secrets, "_put", late)
    assert change(alice, "key", OTHER).status_code == 409
    assert NetworkCredential.objects.get().revoked_at is not None


def test_the_ledger_says_who_created_changed_and_removed_a_secret(alice: Caller) -> None:
    create(alice, name="key", value=VALUE)
    change(alice, "key", OTHER)
    alice.client.delete("/secrets/key")
    entries = LedgerEntry.objects.filter(kind="network_credential").order_by("sequence")
    said = [json.loads(each.statement) for each in entries]
    assert [each["action"] for each in said] == ["created", "changed", "revoked"]
    assert {each["actor"] for each in said} == {f"key:{alice.api_key.prefix}"}
    assert verify().is_intact


def test_names_that_come_and_go_leave_a_bounded_number_of_rows(
    alice: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(secrets, "MOST_NAMES", 3)
    for name in ("a", "b", "c"):
        create(alice, name=name, value=VALUE)
        alice.client.delete(f"/secrets/{name}")
    refused = create(alice, name="d", value=VALUE)
    assert refused.status_code == 400
    assert "name: " in refused.json()["message"]
    # A name that is there already can be used again.
    assert create(alice, name="a", value=VALUE).status_code == 201
    forget_all()
    assert len(ids_of(alice.tenant.slug)) == 3
    # No sandbox has those any more that were removed long ago.
    past = timezone.now() - secrets.KEPT - timedelta(minutes=1)
    row = NetworkCredential.objects.get(name="b")
    NetworkCredential.objects.filter(pk=row.pk).update(revoked_at=past)
    assert create(alice, name="d", value=VALUE).status_code == 201
    names = NetworkCredential.objects.values_list("name", flat=True)
    assert sorted(names) == ["a", "c", "d"]


def test_callers_that_use_up_their_secrets_leave_room_for_administrators(
    alice: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "MOST_CREDENTIALS", 2)
    statuses = [create(alice, name=name, value=VALUE).status_code for name in ("a", "b", "c")]
    assert statuses == [201, 201, 400]
    for name in ("d", "e"):
        credential(name, tenant=alice.tenant.slug)
    with pytest.raises(ValidationError, match="2 active credentials"):
        credential("f", tenant=alice.tenant.slug)


@pytest.mark.parametrize("host", ["*.co.uk", "*.github.io"])
def test_a_secret_goes_to_no_hosts_that_anyone_can_have(alice: Caller, host: str) -> None:
    listed()
    create(alice, name="key", value=VALUE)
    headers = {"X-Key": "${e2b.secrets.key}"}
    network = {
        "allowOut": ["0.0.0.0/0"],
        "rules": {host: [{"transform": {"headers": headers}}]},
    }
    answer = alice.client.post(
        "/v2/sandboxes", json.dumps({"network": network}), content_type="application/json"
    )
    assert answer.status_code == 400
    assert "anyone can have" in answer.json()["message"]
    assert not Session.objects.exists()


@pytest.mark.usefixtures("kept_here")
@pytest.mark.parametrize(
    ("host", "status"),
    [("api.example.com", 201), ("x.below.test", 201), ("*.below.test", 201), ("b.test", 400)],
)
def test_the_host_of_a_header_has_to_be_one_that_the_sandbox_asks_for(
    alice: Caller, host: str, status: int
) -> None:
    listed()
    create(alice, name="key", value=VALUE)
    headers = {"X-Key": "${e2b.secrets.key}"}
    network = {
        "allowOut": ["api.example.com", "*.below.test"],
        "denyOut": ["0.0.0.0/0"],
        "rules": {host: [{"transform": {"headers": headers}}]},
    }
    body = json.dumps({"network": network})
    answer = alice.client.post("/v2/sandboxes", body, content_type="application/json")
    assert answer.status_code == status, answer.content
    assert status == 201 or host in answer.json()["message"]


# Who can write to the database.


def opened(caller: Caller, host: str = "api.example.com") -> Session:
    headers = {"X-Key": "${e2b.secrets.key}"}
    network = {
        "allowOut": ["0.0.0.0/0"],
        "rules": {host: [{"transform": {"headers": headers}}]},
    }
    body = json.dumps({"network": network})
    answer = caller.client.post("/v2/sandboxes", body, content_type="application/json")
    assert answer.status_code == 201, answer.content
    return Session.objects.get(pk=answer.json()["sandboxID"])


def set_in(session: Session) -> list[tuple[str, ...]]:
    """Where the network in force of a session has values set."""
    forget_all()
    network = network_in_force(Session.objects.get(pk=session.pk))
    return [] if network is None else [each.rules for each in network.credentials]


@pytest.mark.usefixtures("kept_here")
def test_headers_that_are_written_into_a_session_are_not_set(
    alice: Caller, charlie: Caller, caplog: pytest.LogCaptureFixture
) -> None:
    listed()
    for caller in (alice, charlie):
        create(caller, name="key", value=VALUE)
    mine, other, theirs = opened(alice), opened(alice, "b.example.com"), opened(charlie)
    assert set_in(mine) == [("https://api.example.com",)]
    stored: dict[str, Any] = dict(mine.network or {})
    evil = {**stored["headers"][0], "host": "evil.test"}
    without = {name: value for name, value in stored.items() if name != "seal"}
    for written in (
        {**stored, "headers": [evil]},
        {**stored, "headers": [*stored["headers"], evil]},
        {**stored, "seal": "no base64"},
        without,
        other.network,
        theirs.network,
    ):
        with undone():
            Session.objects.filter(pk=mine.pk).update(network=written)
            assert set_in(mine) == []
    assert "are not set" in caplog.text
    with undone():
        Session.objects.filter(pk=theirs.pk).update(tenant_slug=alice.tenant.slug)
        assert set_in(theirs) == []
    assert set_in(mine) == [("https://api.example.com",)]


@pytest.mark.usefixtures("kept_here")
def test_a_copy_and_a_changed_network_have_headers_of_their_own(alice: Caller) -> None:
    listed()
    create(alice, name="key", value=VALUE)
    session = opened(alice)
    headers = {"X-Other": "${e2b.secrets.key}"}
    changed = alice.client.put(
        f"/sandboxes/{session.pk.hex}/network",
        {
            "rules": {"b.example.com": [{"transform": {"headers": headers}}]},
            "allowOut": ["0.0.0.0/0"],
        },
        content_type="application/json",
    )
    assert changed.status_code == 204, changed.content
    assert set_in(session) == [("https://b.example.com",)]
    assert verify().is_intact
