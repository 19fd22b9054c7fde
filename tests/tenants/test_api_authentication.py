"""Who gets in: keys in either header, and every way a key can be no good."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from executions.runs.models import Execution
from executions.tenants.keys import Unauthenticated, authenticate, create_api_key, revoke
from executions.tenants.models import ApiKey
from providers.errors import InvalidConfiguration
from tests.conftest import Caller

ENDPOINTS = [
    ("post", "/api/v1/executions"),
    ("get", "/api/v1/executions"),
    ("get", "/api/v1/executions/01a1fd3e-5869-7be3-b4ad-c3848c823008"),
    ("get", "/api/v1/executions/01a1fd3e-5869-7be3-b4ad-c3848c823008/artifacts/x"),
    ("get", "/api/v1/languages"),
]


def ask(key_text: str | None, method: str = "get", path: str = "/api/v1/executions") -> Any:
    headers = {} if key_text is None else {"X-API-Key": key_text}
    body = {"code": "print(1)"} if method == "post" else None
    return getattr(Client(), method)(path, body, content_type="application/json", headers=headers)


def assert_refused(answer: Any) -> None:
    assert answer.status_code == 401
    assert answer["WWW-Authenticate"].startswith("Bearer")
    body = answer.json()
    assert set(body) == {"error", "id"}
    assert (body["error"]["code"], body["error"]["field"], body["id"]) == (
        "unauthenticated",
        None,
        None,
    )
    assert Execution.objects.count() == 0


@pytest.mark.parametrize(("method", "path"), ENDPOINTS)
@pytest.mark.parametrize("key_text", [None, "", "cfd_wrong", "é", "cfd_" + "x" * 10_000])
def test_no_endpoint_answers_without_a_valid_key(
    db: None, method: str, path: str, key_text: str | None
) -> None:
    assert_refused(ask(key_text, method, path))


def test_a_key_is_taken_from_either_header(alice: Caller) -> None:
    for headers in (
        {"X-API-Key": alice.key_text},
        {"Authorization": f"Bearer {alice.key_text}"},
        {"Authorization": f"bearer  {alice.key_text}"},
    ):
        assert Client().get("/api/v1/executions", headers=headers).status_code == 200


def test_another_scheme_is_no_key(alice: Caller) -> None:
    answer = Client().get(
        "/api/v1/executions", headers={"Authorization": f"Basic {alice.key_text}"}
    )

    assert_refused(answer)


def test_a_revoked_key_is_refused_from_then_on(alice: Caller) -> None:
    assert ask(alice.key_text).status_code == 200

    assert revoke(alice.api_key) is True

    assert_refused(ask(alice.key_text))
    assert revoke(alice.api_key) is False


def test_an_expired_key_is_refused(alice: Caller) -> None:
    alice.api_key.expires_at = timezone.now() - timedelta(seconds=1)
    alice.api_key.save()

    assert_refused(ask(alice.key_text))


def test_a_key_that_expires_later_is_good(alice: Caller) -> None:
    _, key_text = create_api_key(alice.tenant, "soon", timezone.now() + timedelta(minutes=1))

    assert ask(key_text).status_code == 200


def test_the_keys_of_an_inactive_tenant_are_refused(alice: Caller, bob: Caller) -> None:
    alice.tenant.is_active = False
    alice.tenant.save()

    assert_refused(ask(alice.key_text))
    assert_refused(ask(bob.key_text))


def test_a_key_is_long_random_and_stored_only_as_a_hash(alice: Caller) -> None:
    _, first = create_api_key(alice.tenant, "one")
    _, second = create_api_key(alice.tenant, "one")

    assert first != second
    assert first.startswith("cfd_")
    assert len(first) == 4 + 43
    with connection.cursor() as cursor:
        cursor.execute("SELECT * FROM executions_apikey")
        stored = repr(cursor.fetchall())
    assert first[:10] in stored
    assert first not in stored
    assert first[10:] not in stored


def test_a_key_never_shows_itself(alice: Caller) -> None:
    assert alice.key_text not in repr(alice.api_key) + str(alice.api_key)


def test_authentication_is_one_query(alice: Caller) -> None:
    authenticate(alice.key_text)

    with CaptureQueriesContext(connection) as queries:
        found = authenticate(alice.key_text)
        assert found.tenant.slug == "wonderland"

    assert len(queries) == 1


def test_use_is_noted_at_most_once_a_minute(alice: Caller) -> None:
    authenticate(alice.key_text)
    first = ApiKey.objects.get(pk=alice.api_key.pk).last_used_at
    authenticate(alice.key_text)
    assert first is not None
    assert ApiKey.objects.get(pk=alice.api_key.pk).last_used_at == first

    an_hour_ago = timezone.now() - timedelta(hours=1)
    ApiKey.objects.update(last_used_at=an_hour_ago)
    authenticate(alice.key_text)

    noted = ApiKey.objects.get(pk=alice.api_key.pk).last_used_at
    assert noted is not None
    assert noted > an_hour_ago


def test_a_refused_key_notes_no_use(alice: Caller) -> None:
    revoke(alice.api_key)

    with pytest.raises(Unauthenticated):
        authenticate(alice.key_text)

    assert ApiKey.objects.get(pk=alice.api_key.pk).last_used_at is None


@pytest.mark.parametrize("name", ["", "x" * 101])
def test_a_key_needs_a_name(name: str, alice: Caller) -> None:
    with pytest.raises(InvalidConfiguration) as raised:
        create_api_key(alice.tenant, name)
    assert raised.value.field == "name"


def test_a_key_cannot_be_born_expired(alice: Caller) -> None:
    with pytest.raises(InvalidConfiguration) as raised:
        create_api_key(alice.tenant, "late", timezone.now())
    assert raised.value.field == "expires_at"
