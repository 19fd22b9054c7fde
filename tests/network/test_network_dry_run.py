"""What a list would have refused, before it is in force."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.test import Client
from django.urls import reverse
from django.utils import timezone

from executions.capabilities.network.attempts import store
from executions.capabilities.network.dry_run import dry_run
from executions.capabilities.network.models import NetworkAttempt, NetworkList
from executions.kernel.text import first_uuid7, uuid7
from executions.runs.network import checked_attempts
from providers.network import Attempt
from tests.conftest import Caller
from tests.support.approvals import signed_in
from tests.support.networks import attempts, listed

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("lists_forgotten")]


def tried(caller: Caller, *made: Attempt) -> None:
    checked: dict[str, Any] = checked_attempts(attempts(*made).to_json()) or {}
    store(checked["attempts"], caller.tenant.pk, caller.tenant.slug, session_id=uuid7())


@pytest.fixture(autouse=True)
def _history(alice: Caller, charlie: Caller) -> None:
    tried(
        alice,
        Attempt(1.0, "pypi.org", 443, "allowed"),
        Attempt(2.0, "api.example.com", 80, "allowed", method="POST", path="/v1/x"),
        Attempt(3.0, "api.example.com", 8443, "failed"),
        Attempt(4.0, "evil.test", 443, "refused"),
    )
    tried(charlie, Attempt(5.0, "npmjs.org", 443, "allowed"))


def test_it_is_held_against_its_tenants_attempts(alice: Caller) -> None:
    draft = listed(
        *("pypi.org", "GET http://api.example.com/v1"), tenant=alice.tenant.slug, draft=True
    )
    run = dry_run(draft)
    assert (run.attempts, run.refused, run.cut) == (3, 2, "")
    assert run.hosts == {"api.example.com:80": 1, "api.example.com:8443": 1}
    draft.rules = "pypi.org\nPOST http://api.example.com/v1\napi.example.com:8443"
    assert dry_run(draft).refused == 0


def test_requests_that_were_read_in_tls_are_held_against_rules_for_it(alice: Caller) -> None:
    tried(
        alice,
        Attempt(6.0, "tls.test", 443, "allowed", method="GET", path="/v1/x"),
        Attempt(7.0, "tls.test", 8443, "allowed", method="GET", path="/v1", credential="a@1"),
        Attempt(8.0, "tls.test", 443, "allowed", method="POST", path="/v1"),
    )
    draft = listed("GET https://tls.test:443,8443/v1", tenant=alice.tenant.slug, draft=True)
    assert dry_run(draft).hosts["tls.test:443"] == 1
    assert dry_run(draft).hosts["tls.test:8443"] == 0


def test_the_installations_is_held_against_everyones() -> None:
    run = dry_run(listed("pypi.org", draft=True))
    assert (run.attempts, run.refused) == (4, 3)
    assert run.hosts["npmjs.org:443"] == 1
    assert sum(run.tenants.values()) == 3
    assert dry_run(listed(mode="open", draft=True)).refused == 0


def test_it_says_where_it_stopped() -> None:
    draft = listed("pypi.org", draft=True)
    assert dry_run(draft, most_rows=2).cut == "the limit of 2 attempts was reached"
    assert "seconds" in dry_run(draft, seconds=-1).cut
    old = first_uuid7(timezone.now() - timedelta(days=31))
    NetworkAttempt.objects.filter(host="pypi.org").update(id=old)
    assert dry_run(draft).attempts == 3
    assert dry_run(draft, 32).attempts == 4


def test_the_page_shows_it_to_who_may_see_attempts(admin_client: Client) -> None:
    draft = listed("pypi.org", draft=True)
    page = reverse("admin:executions_networklist_dry_run", args=[draft.pk])
    shown = admin_client.post(page, {"days": "30"}).content.decode()
    assert "api.example.com:8443" in shown
    assert "Activate" in shown
    assert signed_in("lists", "view_networklist").get(page).status_code == 403
    assert signed_in("both", "view_networklist", "view_networkattempt").get(page).status_code == 200
    assert NetworkList.objects.get().draft
