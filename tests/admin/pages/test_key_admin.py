"""The pages of keys: made and shown once, held to less at once, and to more with a second person."""

from __future__ import annotations

import re
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth import get_user_model
from django.contrib.auth.models import Permission, User
from django.test import Client
from django.utils import timezone

from executions.tenants.keys import authenticate, create_api_key, revoke
from executions.tenants.models import ApiKey
from executions.tenants.service import OPERATOR
from providers.errors import InvalidConfiguration
from providers.models import ConfigVersion, PendingChange
from providers.services import approve
from providers.services.guarded_rows import NotAllowed, restore
from tests.admin.pages.key_pages import KEYS, SENT, shown_key
from tests.conftest import Caller

pytestmark = [pytest.mark.django_db, pytest.mark.one_database]


def staff(name: str, role: str = "") -> tuple[User, Client]:
    """A superuser, or somebody with a role."""
    if role:
        user = User.objects.create_user(name, is_staff=True)
        user.groups.add(*user.groups.model.objects.filter(name=role))
    else:
        user = User.objects.create_superuser(name)
    client = Client()
    client.force_login(user)
    return user, client


def change(client: Client, api_key: ApiKey, **values: Any) -> Any:
    return client.post(f"{KEYS}{api_key.pk}/change/", {**SENT, **values}, follow=True)


def test_a_key_is_shown_once_when_it_is_made(alice: Caller, admin_client: Client) -> None:
    answer = admin_client.post(
        f"{KEYS}add/", {**SENT, "tenant": alice.tenant.pk, "name": "from the admin"}
    )

    assert answer.status_code == 200
    assert "no-store" in answer["Cache-Control"]
    key_text = re.search(r'id="new-key">([^<]+)<', answer.content.decode())
    assert key_text is not None
    assert authenticate(key_text[1]).name == "from the admin"
    assert not any(key_text[1] in morsel.value for morsel in admin_client.cookies.values())
    created = ApiKey.objects.get(name="from the admin")
    for path in (KEYS, f"{KEYS}{created.pk}/change/", f"{KEYS}{created.pk}/history/"):
        page = admin_client.get(path).content.decode()
        assert key_text[1] not in page
        assert created.key_hash not in page
    assert key_text[1] not in "".join(str(vars(entry)) for entry in LogEntry.objects.all())


def test_a_key_cannot_be_made_expired_or_nameless(alice: Caller, admin_client: Client) -> None:
    for values in (
        {"name": ""},
        {"name": "x", "scopes": []},
        {"name": "x", "addresses": "everywhere"},
        {"name": "x", "expires_at_0": "2020-01-01", "expires_at_1": "00:00:00"},
    ):
        answer = admin_client.post(f"{KEYS}add/", {**SENT, "tenant": alice.tenant.pk, **values})
        assert answer.status_code == 200
        assert "errornote" in answer.content.decode()
    assert ApiKey.objects.count() == 1


def test_keys_are_revoked_by_an_action(alice: Caller, bob: Caller, admin_client: Client) -> None:
    answer = admin_client.post(
        KEYS, {"action": "revoke_keys", "_selected_action": [alice.api_key.pk]}, follow=True
    )

    assert "1 key was revoked." in answer.content.decode()
    assert alice.client.get("/api/v1/executions").status_code == 401
    assert bob.client.get("/api/v1/executions").status_code == 200
    assert LogEntry.objects.get().change_message == "Revoked."


def test_who_may_only_look_at_keys_cannot_revoke_them(alice: Caller) -> None:
    user = get_user_model().objects.create_user("viewer", is_staff=True)
    user.user_permissions.add(Permission.objects.get(codename="view_apikey"))
    client = Client()
    client.force_login(user)

    client.post(KEYS, {"action": "revoke_keys", "_selected_action": [alice.api_key.pk]})

    assert ApiKey.objects.get().revoked_at is None


def test_a_key_is_made_and_held_to_what_the_page_says(alice: Caller) -> None:
    _, client = staff("ann")
    bounds = {
        "languages": "python",
        "providers": "local e2b",
        "templates": "data",
        "addresses": "127.0.0.0/8",
        "minimum_isolation": "gvisor",
    }
    made = client.post(f"{KEYS}add/", {**SENT, **bounds, "tenant": alice.tenant.pk})
    key = authenticate(shown_key(made), "127.0.0.1")
    assert key.scopes == "execute read"
    found = {name: getattr(key, name) for name in bounds}
    assert found == {**bounds, "providers": "e2b local"}
    page = client.get(f"{KEYS}{key.pk}/change/").content.decode()
    assert "127.0.0.0/8" in page
    assert f"{KEYS}{key.pk}/rotate/" in page
    change(client, key, name="renamed", scopes=["read"], **bounds)
    key.refresh_from_db()
    assert (key.name, key.scopes) == ("renamed", "read")


def test_a_revoked_key_is_not_changed_or_rotated_any_more(alice: Caller) -> None:
    _, client = staff("ann")
    revoke(alice.api_key)
    assert change(client, alice.api_key, name="other").status_code == 403
    assert client.get(f"{KEYS}{alice.api_key.pk}/rotate/").status_code == 403
    assert client.get(f"{KEYS}0/rotate/").status_code == 404
    assert ApiKey.objects.get().name == "alice"


def test_a_key_is_rotated_on_its_page(alice: Caller) -> None:
    _, client = staff("ann")
    url = f"{KEYS}{alice.api_key.pk}/rotate/"
    assert "valid until" in client.get(url).content.decode()
    assert client.post(url, {"valid_until": "soon"}).status_code == 200
    assert ApiKey.objects.count() == 1
    answer = client.post(url, {"valid_until": "2099-01-01T10:00"})
    assert "no-store" in answer["Cache-Control"]
    new = authenticate(shown_key(answer))
    assert (new.rotated_from, new.scopes) == (alice.api_key.prefix, alice.api_key.scopes)
    alice.api_key.refresh_from_db()
    assert alice.api_key.expires_at is not None
    assert alice.api_key.expires_at.year == 2099
    assert authenticate(alice.key_text).pk == alice.api_key.pk


def test_an_operator_gives_nobody_the_scope_admin(alice: Caller) -> None:
    _, client = staff("olga", OPERATOR)
    boss, _ = create_api_key(alice.tenant, "boss", None, "admin", addresses="192.0.2.1")
    body = {**SENT, "scopes": ["admin"], "tenant": alice.tenant.pk}
    assert "errornote" in client.post(f"{KEYS}add/", body).content.decode()
    change(client, alice.api_key, scopes=["admin"])
    page = change(client, boss, scopes=["admin"], addresses="").content.decode()
    assert "Nothing was changed" in page
    rotation = {"valid_until": "2099-01-01T10:00"}
    assert client.post(f"{KEYS}{boss.pk}/rotate/", rotation).status_code == 403
    assert ApiKey.objects.count() == 2
    boss.refresh_from_db()
    alice.api_key.refresh_from_db()
    assert (boss.addresses, alice.api_key.has_scope("admin")) == ("192.0.2.1", False)


def test_under_the_two_person_rule_a_new_key_opens_nothing_until_it_is_approved(
    alice: Caller, settings: Any
) -> None:
    settings.TWO_PERSON_RULE = True
    (ann, client), (ben, _) = staff("ann"), staff("ben")
    made = client.post(f"{KEYS}add/", {**SENT, "tenant": alice.tenant.pk})
    assert "has no scopes yet" in made.content.decode()
    key = authenticate(shown_key(made))
    assert key.scopes == ""
    called = Client(headers={"X-API-Key": shown_key(made)})
    assert called.get("/api/v1/executions").status_code == 403
    waiting = PendingChange.objects.get()
    approve(waiting, approver=ben)
    assert called.get("/api/v1/executions").status_code == 200

    rotated = client.post(f"{KEYS}{key.pk}/rotate/", {"valid_until": "2099-01-01T10:00"})
    assert authenticate(shown_key(rotated)).scopes == ""
    approve(PendingChange.objects.filter(status="waiting").get(), approver=ben)
    assert authenticate(shown_key(rotated)).scopes == "execute read"
    assert ann.pk != ben.pk


@pytest.mark.parametrize(
    ("before", "after", "waits"),
    [
        ({}, {"scopes": ["read"]}, False),
        ({}, {"scopes": ["execute", "read", "files"]}, True),
        ({}, {"name": "another"}, False),
        ({}, {"languages": "python"}, False),
        ({"languages": "python"}, {"languages": "python r"}, True),
        ({"languages": "python r"}, {"languages": "r"}, False),
        ({"providers": "local"}, {"providers": ""}, True),
        ({"templates": "a"}, {"templates": "b"}, True),
        ({"addresses": "10.0.0.0/8"}, {"addresses": "0.0.0.0/0"}, True),
        ({"minimum_isolation": "gvisor"}, {"minimum_isolation": "namespaces"}, True),
        ({"minimum_isolation": "gvisor"}, {"minimum_isolation": "microvm"}, False),
        ({"minimum_isolation": "none"}, {"minimum_isolation": ""}, False),
        ({}, {"expires_at_0": "2099-01-01", "expires_at_1": "00:00:00"}, False),
        ({"expires_at": "2090-01-01"}, {}, True),
        (
            {"expires_at": "2090-01-01"},
            {"expires_at_0": "2099-01-01", "expires_at_1": "00:00:00"},
            True,
        ),
    ],
)
def test_what_gives_a_key_more_waits_and_what_takes_from_it_does_not(
    alice: Caller, settings: Any, before: dict[str, Any], after: dict[str, Any], waits: bool
) -> None:
    settings.TWO_PERSON_RULE = True
    (_, client), (ben, _) = staff("ann"), staff("ben")
    before = dict(before)
    if day := before.pop("expires_at", None):
        expires_at = timezone.datetime.fromisoformat(f"{day}T00:00:00+00:00")
    else:
        expires_at = None
    key, _ = create_api_key(alice.tenant, "k", expires_at, "execute read", **before)
    was = _values(key)
    page = change(client, key, **{**before, **after}).content.decode()
    assert ("submitted for approval" in page) is waits
    assert (_values(key) == was) is waits
    if waits:
        approve(PendingChange.objects.get(), approver=ben)
        assert _values(key) != was


def test_what_a_key_once_was_is_not_brought_back_by_one_person(
    alice: Caller, settings: Any
) -> None:
    (ann, client), (ben, _) = staff("ann"), staff("ben")
    key, _ = create_api_key(alice.tenant, "k", None, "admin execute read")
    change(client, key, scopes=["read"])
    assert _values(key)["scopes"] == "read"
    first = ConfigVersion.objects.filter(subject=f"executions.apikey:{key.pk}").earliest("version")
    settings.TWO_PERSON_RULE = True
    (waiting,) = restore(ann, first)
    assert _values(key)["scopes"] == "read"
    with pytest.raises(NotAllowed):
        restore(staff("olga", OPERATOR)[0], first)
    approve(waiting, approver=ben)
    assert _values(key)["scopes"] == "admin execute read"
    assert ApiKey.objects.get(pk=key.pk).has_scope("admin")
    key.delete()
    with pytest.raises(InvalidConfiguration, match="Create a new key"):
        restore(ann, first)


def _values(key: ApiKey) -> dict[str, Any]:
    found = ApiKey.objects.filter(pk=key.pk).values()[0]
    found.pop("last_used_at")
    return dict(found)
