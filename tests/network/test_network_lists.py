"""Network lists: what is refused when one is saved, and how one comes into force."""

from __future__ import annotations

from typing import Any

import pytest
from django.core.exceptions import ValidationError
from django.db import IntegrityError, transaction
from django.test import Client
from django.urls import reverse

from executions.capabilities.network.lists import draft_of, put_in_force
from executions.capabilities.network.models import NetworkList
from executions.kernel.public_suffixes import is_shared
from executions.ledger.models import LedgerEntry
from executions.ledger.verification import verify
from providers.models import ConfigVersion, PendingChange
from tests.conftest import Caller
from tests.support.networks import listed

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("lists_forgotten")]

SHARED = (
    *("*.co.uk", "*.github.io", "*.s3.amazonaws.com", "*.amazonaws.com", "*.googleapis.com"),
    *("*.GitHub.io", "*.xn--55qx5d.cn", "*.公司.cn", "*.anything.ck", "*.compute.amazonaws.com"),
)


@pytest.mark.parametrize(
    "rule",
    ["*.com", "*", "*.*.com", "*.127.0.0.1", "user@host.test", "0x7f.1", "host.test/../x", *SHARED],
)
def test_a_rule_that_covers_hosts_of_anyone_is_not_saved(rule: str) -> None:
    with pytest.raises(ValidationError) as refused:
        listed(rule)
    assert list(refused.value.message_dict) == ["rules"]
    assert not NetworkList.objects.exists()


@pytest.mark.parametrize(
    "domain", ["example.com", "pypi.org", "me.github.io", "bucket.s3.amazonaws.com", "www.ck"]
)
def test_a_domain_of_one_owner_is_not_shared(domain: str) -> None:
    assert not is_shared(domain)
    assert listed(f"*.{domain}").rules == f"*.{domain}"


def test_rules_are_kept_in_their_one_form(alice: Caller) -> None:
    row = listed(
        "  PyPI.org. ", "", "pypi.org", "*.Bücher.example:443 #  books", tenant=alice.tenant.slug
    )
    assert row.rules == "pypi.org\n*.xn--bcher-kva.example:443 # books"


def test_only_an_allowlist_has_rules_and_a_tenant_must_be_there() -> None:
    for columns in ({"mode": "open"}, {"mode": "none"}, {"mode": "all"}, {"tenant": "nowhere"}):
        with pytest.raises(ValidationError):
            listed("pypi.org", **columns)


def test_a_scope_has_one_list_in_force(alice: Caller) -> None:
    first = listed("pypi.org", tenant=alice.tenant.slug)
    with pytest.raises(IntegrityError), transaction.atomic():
        listed("npmjs.org", tenant=alice.tenant.slug)
    draft = draft_of(first)
    draft.rules = "npmjs.org"
    draft.save()
    assert put_in_force(draft).pk == first.pk
    first.refresh_from_db()
    assert first.rules == "npmjs.org"


def test_each_list_is_in_the_ledger(alice: Caller) -> None:
    row = listed("pypi.org", tenant=alice.tenant.slug)
    entry = LedgerEntry.objects.filter(kind="network_list").get()
    assert str(row.pk) in entry.statement
    assert verify().is_intact
    NetworkList.objects.filter(pk=row.pk)._raw_delete(using="default")  # type: ignore[attr-defined]
    assert not verify().is_intact


def test_the_admin_has_drafts_presets_versions_and_approval_by_two(
    admin_client: Client, settings: Any
) -> None:
    add = reverse("admin:executions_networklist_add")
    page = admin_client.get(add, {"preset": "packages"})
    assert b"files.pythonhosted.org" in page.content
    fields = {
        "tenant_slug": "",
        "name": "first",
        "mode": "allowlist",
        "rules": "pypi.org",
        "connections": "8",
        "connections_per_minute": "60",
        "mib": "100",
    }
    refused = admin_client.post(add, {**fields, "rules": "*.github.io"})
    assert b"Covers hosts that anyone can have" in refused.content
    assert admin_client.post(add, fields).status_code == 302
    draft = NetworkList.objects.get()
    assert draft.draft
    change = reverse("admin:executions_networklist_change", args=[draft.pk])
    assert b"Activate" in admin_client.get(change).content

    settings.TWO_PERSON_RULE = True
    activate = reverse("admin:executions_networklist_put_in_force", args=[draft.pk])
    assert admin_client.get(activate).status_code == 403
    admin_client.post(activate)
    assert not NetworkList.objects.filter(draft=False).exists()
    assert PendingChange.objects.get().status == PendingChange.Status.WAITING

    settings.TWO_PERSON_RULE = False
    admin_client.post(activate)
    row = NetworkList.objects.get(draft=False)
    assert row.rules == "pypi.org"
    subject = f"executions.networklist:{row.pk}"
    assert ConfigVersion.objects.filter(subject=subject).count() == 1


def test_who_may_not_change_lists_gets_no_page(client: Client, auditor: Client) -> None:
    row = listed("pypi.org")
    for name in ("change", "put_in_force", "draft"):
        url = reverse(f"admin:executions_networklist_{name}", args=[row.pk])
        assert auditor.post(url).status_code in (302, 403)
    assert NetworkList.objects.count() == 1
