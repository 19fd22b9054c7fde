"""What a key is held to beside its scopes, its rotation, and what the ledger has of refusals."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from io import StringIO
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db import IntegrityError, transaction
from django.test import Client
from django.utils import timezone

from executions.ledger.models import LedgerEntry
from executions.ledger.verification import verify
from executions.runs.models import Execution
from executions.sessions.models import Session
from executions.tenants import keys
from executions.tenants.keys import Unauthenticated, authenticate, create_api_key, revoke, rotate
from executions.tenants.models import ApiKey, KeyRefusal
from providers.errors import InvalidConfiguration
from tests.conftest import Caller
from tests.support.routing import last_execution
from tests.support.running import run, run_queued
from tests.support.sessions import URL, opened

pytestmark = [pytest.mark.django_db, pytest.mark.database]
# One, whose making costs more than a request.
CLIENT = Client()


@pytest.fixture(autouse=True)
def _nothing_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of other tests had the same numbers."""
    monkeypatch.setattr(keys, "_asked", {})


def held(caller: Caller, **bounds: str) -> Caller:
    """A key of the same tenant that is held to these."""
    return Caller(*create_api_key(caller.tenant, "held", None, **bounds))


def assert_refused(answer: Any, field: str) -> None:
    assert answer.status_code == 403, answer.content
    error = answer.json()["error"]
    assert (error["code"], error["field"]) == ("forbidden", field)


def entered() -> list[dict[str, Any]]:
    return [
        entry.stated for entry in LedgerEntry.objects.filter(kind="refusal").order_by("sequence")
    ]


def test_a_key_runs_its_languages_and_no_other(
    scripted: Callable[[], list[str]], alice: Caller
) -> None:
    key = held(alice, languages="javascript")
    assert key.api_key.languages == "nodejs"
    assert_refused(run(key, "pass", mode="async"), "language")
    assert_refused(run(key, "pass"), "language")
    assert not Execution.objects.exists()
    assert key.client.get("/api/v1/languages").json()["languages"] == []
    assert run(held(alice, languages="python ruby"), "pass").status_code == 200


def test_a_key_runs_on_its_providers_and_no_other(
    scripted: Callable[[], list[str]], alice: Caller
) -> None:
    assert_refused(run(held(alice, providers="e2b"), "pass"), "provider")
    assert not scripted()
    assert held(alice, providers="e2b").client.get("/api/v1/languages").json()["languages"] == []
    key = held(alice, providers="e2b scripted")
    assert run(key, "pass").json()["provider"] == "scripted"
    assert "python" in key.client.get("/api/v1/languages").json()["languages"]

    # What was queued is held to it as well, also where it changes in the meantime.
    assert run(key, "pass", mode="async").status_code == 202
    key.api_key.providers = "e2b"
    key.api_key.save()
    before = scripted()
    run_queued()
    assert (last_execution().status, last_execution().error_code) == ("error", "SB009")
    assert scripted() == before


def test_what_a_removed_key_has_queued_is_not_run(
    scripted: Callable[[], list[str]], alice: Caller
) -> None:
    assert run(alice, "pass", mode="async").status_code == 202
    alice.api_key.delete()
    run_queued()
    assert (last_execution().status, last_execution().error_code) == ("error", "SB009")
    assert not scripted()


@pytest.mark.django_db(transaction=True)
def test_in_a_session_who_asks_is_held_and_not_who_opened_it(
    kept_here: None, alice: Caller
) -> None:
    session = f"{URL}/{opened(alice)['id']}"
    key = held(alice, languages="ruby", providers="kept_here").client
    for path, body in (
        ("/executions", {"code": "1"}),
        ("/contexts", {"language": "python"}),
        ("/processes", {"shell": "true"}),
        ("/processes", {"command": ["true"], "background": True}),
    ):
        assert_refused(key.post(session + path, body), "language")
    assert_refused(key.post(URL, {}), "language")
    started = alice.client.post(
        f"{session}/processes", {"shell": "cat", "background": True, "stdin": True}
    ).json()
    assert_refused(key.post(f"{session}/processes/{started['pid']}/stdin"), "language")
    elsewhere = held(alice, providers="local").client
    assert_refused(elsewhere.post(f"{session}/executions", {"code": "1"}), "provider")
    assert_refused(
        elsewhere.post(f"{session}/processes", {"shell": "true", "background": True}), "provider"
    )
    strict = held(alice, minimum_isolation="microvm").client
    for path, body in (
        ("/executions", {"code": "1"}),
        ("/processes", {"shell": "true"}),
        ("/processes", {"shell": "true", "background": True}),
    ):
        unmet = strict.post(session + path, body)
        assert (unmet.status_code, unmet.json()["error"]["field"]) == (503, "minimum_isolation")
    assert strict.post(URL, {}).status_code == 503
    shaped = held(alice, templates="data").client
    for body in ({}, {"template": "other"}):
        assert_refused(shaped.post(URL, body), "template")
    assert Session.objects.filter(closed_at=None).count() == 1
    assert Execution.objects.filter(status="succeeded").count() == 0


def test_a_key_is_good_at_its_addresses_alone(alice: Caller) -> None:
    key_text = held(alice, addresses="192.0.2.0/24 2001:db8::/32").key_text

    def status(address: str) -> int:
        client = Client(REMOTE_ADDR=address, headers={"X-API-Key": key_text})
        return client.get("/api/v1/executions").status_code

    for good in ("192.0.2.7", "2001:db8::1", "::ffff:192.0.2.7"):
        assert status(good) == 200, good
    for bad in ("192.0.3.7", "127.0.0.1", "", "x", "::1"):
        assert status(bad) == 401, bad


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("scopes", "root"),
        ("addresses", "10.0.0.1/8"),
        ("addresses", "everywhere"),
        ("minimum_isolation", "strong"),
        ("languages", "x" * 2000),
    ],
)
def test_a_bound_that_says_nothing_is_refused_by_name(
    alice: Caller, field: str, value: str
) -> None:
    bounds: dict[str, Any] = {field: value}
    with pytest.raises(InvalidConfiguration) as raised:
        create_api_key(alice.tenant, "bad", None, **bounds)
    assert raised.value.field == field


def test_the_database_knows_no_other_scope(alice: Caller) -> None:
    with pytest.raises(IntegrityError), transaction.atomic():
        ApiKey.objects.update(scopes="read execute root")


def test_a_rotated_key_is_good_beside_the_new_one_until_the_chosen_time(alice: Caller) -> None:
    former, key_text = create_api_key(
        alice.tenant, "ci", None, "execute read", addresses="127.0.0.1", languages="python"
    )
    until = timezone.now() + timedelta(hours=1)
    new, new_text = rotate(former, until)
    for name in ("name", "scopes", "addresses", "languages"):
        assert getattr(new, name) == getattr(former, name)
    assert (new.rotated_from, former.expires_at) == (former.prefix, until)
    for text in (key_text, new_text):
        assert authenticate(text, "127.0.0.1").tenant == alice.tenant
    ApiKey.objects.filter(pk=former.pk).update(expires_at=timezone.now())
    with pytest.raises(Unauthenticated):
        authenticate(key_text, "127.0.0.1")
    with pytest.raises(InvalidConfiguration):
        rotate(former, until)
    said = [entry.stated for entry in LedgerEntry.objects.filter(kind="api_key")]
    rotated = next(each for each in said if each["action"] == "rotated")
    assert rotated["subject"] == former.prefix
    assert (rotated["new"], rotated["tenant"]) == (new.prefix, "wonderland")


def test_a_rotation_makes_no_key_live_longer_than_it_did(alice: Caller) -> None:
    soon = timezone.now() + timedelta(minutes=1)
    former, _ = create_api_key(alice.tenant, "ci", soon)
    out = StringIO()
    call_command("rotate_api_key", former.prefix, "--overlap-hours", "5", stdout=out)
    former.refresh_from_db()
    assert former.expires_at == soon
    new = authenticate(out.getvalue().strip())
    assert (new.rotated_from, new.expires_at) == (former.prefix, soon)
    with pytest.raises(CommandError, match="no valid key"):
        call_command("rotate_api_key", "cfd_none")


def test_a_command_makes_a_key_that_is_held_to_what_it_is_told(alice: Caller) -> None:
    out = StringIO()
    words = "--scope read --scope execute --language python --provider local --address ::1"
    call_command("create_api_key", "wonderland", "--name", "k", *words.split(), stdout=out)
    key = authenticate(out.getvalue().strip(), "::1")
    assert key.scopes == "execute read"
    assert (key.languages, key.providers, key.addresses) == ("python", "local", "::1")


def test_each_refusal_is_an_entry_and_a_flood_of_them_is_one(alice: Caller) -> None:
    revoked, expired = held(alice), held(alice)
    revoke(revoked.api_key)
    expired.api_key.expires_at = timezone.now()
    expired.api_key.save()
    elsewhere = held(alice, addresses="192.0.2.0/24")
    reader = Caller(*create_api_key(alice.tenant, "reader", None, "read"))

    def flood() -> None:
        for number in range(5):
            for text in (f"cfd_{number}", *(each.key_text for each in (revoked, expired))):
                assert _status(text) == 401
            assert _status(elsewhere.key_text) == 401
            assert run(reader, "pass").status_code == 403

    flood()
    # Another process, which has asked for none of them yet.
    keys._asked.clear()
    flood()
    found = [(each["subject"], each["reason"]) for each in entered()]
    assert found == [
        ("unknown", "unknown"),
        (revoked.api_key.prefix, "revoked"),
        (expired.api_key.prefix, "expired"),
        (elsewhere.api_key.prefix, "address"),
        (reader.api_key.prefix, "scope"),
    ]
    last = entered()[-1]
    assert (last["tenant"], last["key"], last["address"]) == ("wonderland", "reader", "127.0.0.1")
    assert last["detail"] == "POST executions needs execute"
    assert last["actor"] == f"key:{reader.api_key.prefix}"

    # A minute later.
    KeyRefusal.objects.update(entered_at=timezone.now() - keys.EVERY)
    keys._asked.clear()
    flood()
    assert len(entered()) == 10
    assert verify().is_intact
    assert not any(each.key_text in str(entered()) for each in (revoked, elsewhere))


def test_what_cannot_be_entered_is_refused_all_the_same(
    alice: Caller, settings: Any, caplog: pytest.LogCaptureFixture
) -> None:
    settings.LEDGER_KEYS = []
    assert _status("cfd_wrong") == 401
    assert "could not be entered" in caplog.text
    assert not entered()


def _status(key_text: str) -> int:
    answer = CLIENT.get("/api/v1/executions", headers={"X-API-Key": key_text})
    return answer.status_code
