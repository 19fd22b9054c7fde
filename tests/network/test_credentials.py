"""Rows of network credentials: sealed to what they are bound to, versioned, and revoked."""

from __future__ import annotations

import json
from typing import Any

import pytest
from django.core.exceptions import ValidationError
from django.db import IntegrityError, transaction

from executions.capabilities.network.credentials import (
    credentials_in_force,
    put_credential,
    revoke,
)
from executions.capabilities.network.lists import network_for
from executions.capabilities.network.models import NetworkCredential
from executions.capabilities.retention.service import begin, go_on
from executions.ledger.append import record_baseline
from executions.ledger.models import LedgerEntry
from executions.ledger.verification import verify
from providers.credentials import MOST_CREDENTIALS
from providers.network import Layer, NetworkPolicy, Target
from providers.services.settings_cache import forget_all
from tests.attacks.test_writers_records import undone
from tests.conftest import Caller
from tests.support.credentials import OTHER, in_force, put_token, token_of, write
from tests.support.credentials import _no_holder as _no_holder
from tests.support.credentials import _no_thread as _no_thread
from tests.support.networks import VALUE, credential, listed

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("lists_forgotten")]


@pytest.mark.parametrize(
    ("columns", "field"),
    [
        ({"name": "Upper"}, "name"),
        ({"name": "two words"}, "name"),
        ({"rules": ""}, "rules"),
        ({"rules": "api.example.com"}, "rules"),
        ({"rules": "http://api.example.com"}, "rules"),
        ({"rules": "https://*.github.io"}, "rules"),
        ({"rules": "https://a.test\nhttp://b.test"}, "rules"),
        ({"rules": "\n".join(f"https://a{n}.test" for n in range(51))}, "rules"),
        ({"variable": "lower"}, "variable"),
        ({"placement": "cookie"}, "placement"),
        ({"placement": "sandbox", "rules": ""}, "placement"),
        ({"field": "X-Key"}, "field"),
        ({"placement": "header"}, "field"),
        ({"placement": "header", "field": "Host"}, "field"),
        ({"tenant_slug": "nowhere"}, "tenant_slug"),
        ({"value": "short"}, "value"),
        ({"value": "with a\nline end"}, "value"),
    ],
)
def test_what_is_no_credential_is_refused_at_its_field(columns: dict[str, str], field: str) -> None:
    given = {"name": "prices", "value": VALUE, "rules": "https://api.example.com", **columns}
    with pytest.raises(ValidationError) as refused:
        put_credential(**given)
    assert field in refused.value.message_dict
    assert not NetworkCredential.objects.exists()


def test_a_new_one_needs_a_value() -> None:
    with pytest.raises(ValidationError) as refused:
        NetworkCredential.objects.create(name="prices", rules="https://api.example.com")
    assert list(refused.value.message_dict) == ["value"]


def test_rules_with_methods_and_paths_are_kept_in_their_one_form() -> None:
    row = credential("prices", " GET,HEAD  https://API.example.com./v1 # prices", "")
    assert row.rules == "GET,HEAD https://api.example.com/v1 # prices"
    assert row.hosts == "api.example.com"


def test_a_scope_has_a_name_once_and_so_many_in_force(alice: Caller) -> None:
    first = credential()
    again = NetworkCredential(name="prices", rules="https://api.example.com")
    again.set_value(OTHER)
    with pytest.raises(IntegrityError), transaction.atomic():
        again.save()
    for number in range(1, MOST_CREDENTIALS):
        credential(f"c{number}")
    with pytest.raises(ValidationError, match="50 active credentials"):
        credential("more")
    # Of another scope, and one that is there already.
    credential("more", tenant=alice.tenant.slug)
    assert credential(value=OTHER).version == 2
    revoke(first)
    credential("more")
    with pytest.raises(ValidationError, match="50 active credentials"):
        credential()


def test_each_other_value_or_binding_is_another_version_and_nothing_else_is() -> None:
    row = credential()
    assert (row.version, in_force()) == (1, {"prices@1": VALUE})
    row.save()
    assert NetworkCredential.objects.get().version == 1
    for column, wanted in (
        ("rules", "https://api.example.com/v2"),
        ("variable", "PRICES"),
        ("placement", "basic"),
        ("field", "user"),
    ):
        before = NetworkCredential.objects.get()
        setattr(before, column, wanted)
        before.save()
    assert in_force() == {"prices@5": VALUE}
    changed = NetworkCredential.objects.get()
    assert changed.changed_at > row.changed_at
    changed.set_value(OTHER)
    changed.save()
    assert in_force() == {"prices@6": OTHER}
    [found] = credentials_in_force("")
    assert (found.id, found.placement, found.field) == (str(row.pk), "basic", "user")
    assert (found.rules, found.variable) == (("https://api.example.com/v2",), "PRICES")


def test_a_credential_keeps_its_tenant_and_name(alice: Caller) -> None:
    row = credential()
    for column, wanted in (("name", "other"), ("tenant_slug", alice.tenant.slug)):
        changed = NetworkCredential.objects.get()
        setattr(changed, column, wanted)
        with pytest.raises(ValidationError, match="keeps its tenant and name"):
            changed.save()
    row.refresh_from_db()
    assert (row.name, row.tenant_slug) == ("prices", "")


# In force.


def test_a_tenant_has_its_own_and_those_of_the_installation_that_it_does_not_shadow(
    alice: Caller, bob: Caller, charlie: Caller
) -> None:
    credential("b")
    credential("a")
    credential("b", tenant=alice.tenant.slug, value=OTHER)
    credential("c", tenant=charlie.tenant.slug, value="charlies-own-value")
    assert list(in_force(alice).items()) == [("b@1", OTHER), ("a@1", VALUE)]
    assert in_force(bob) == in_force(alice)
    assert list(in_force(charlie)) == ["c@1", "a@1", "b@1"]
    assert "charlies-own-value" not in in_force(alice).values()
    revoke(NetworkCredential.objects.get(tenant_slug=alice.tenant.slug))
    assert in_force(alice) == {"a@1": VALUE, "b@1": VALUE}


def test_a_network_has_those_whose_hosts_the_lists_may_allow(alice: Caller) -> None:
    listed("*.example.com", "http://plain.test", "other.test:8443")
    credential("wide", "https://*.api.example.com")
    credential("narrow", "https://nowhere.test", "https://api.example.com")
    credential("elsewhere", "https://nowhere.test")
    credential("port", "https://other.test")
    credential("plain", "https://plain.test")
    inner = Layer("run", NetworkPolicy.parse("allowlist", ["x.api.example.com", "api.example.com"]))
    network = network_for(alice.tenant.slug, inner)
    assert network is not None
    assert [each.name for each in network.credentials] == ["narrow", "wide"]
    target = Target("x.api.example.com", 443, "https", "GET", "/")
    assert [each.name for each in network.credentials_for(target)] == ["wide"]
    outer = network_for(alice.tenant.slug, Layer("run", NetworkPolicy.parse("open")))
    assert outer is not None
    assert len(outer.credentials) == 2


@pytest.mark.usefixtures("no_lookup_grows_old")
def test_the_lists_and_credentials_of_a_moment_cost_no_further_statement(
    alice: Caller, django_assert_num_queries: Any
) -> None:
    listed("api.example.com")
    credential()
    network_for(alice.tenant.slug)
    with django_assert_num_queries(0):
        network = network_for(alice.tenant.slug)
    assert network is not None
    assert network.credentials


# Revocation.


def test_revoking_erases_the_value_for_good(alice: Caller) -> None:
    row = credential()
    stale = NetworkCredential.objects.get()
    assert revoke(row)
    assert not revoke(row)
    assert row.value is None
    assert in_force() == {}
    with pytest.raises(ValidationError, match="set for something else"):
        stale.save()
    # Nothing but a new value has it in force again, with the next version.
    row.variable = "PRICES"
    row.save()
    assert in_force() == {}
    row.set_value(OTHER)
    row.save()
    assert in_force() == {"prices@2": OTHER}
    assert verify().is_intact


def test_the_database_holds_a_value_exactly_of_what_is_in_force() -> None:
    row = credential()
    for columns in ({"value": None}, {"revoked_at": row.created_at}):
        with pytest.raises(IntegrityError), transaction.atomic():
            write(row, **columns)


def test_a_removed_tenant_leaves_no_credential_to_who_has_its_name_next(charlie: Caller) -> None:
    credential(tenant=charlie.tenant.slug)
    credential("general")
    begin(charlie.tenant)
    with pytest.raises(ValidationError, match="slug of a tenant"):
        credential("late", tenant=charlie.tenant.slug)
    go_on()
    assert not type(charlie.tenant).objects.filter(pk=charlie.tenant.pk).exists()
    assert [each.name for each in NetworkCredential.objects.all()] == ["general"]
    assert verify().is_intact


# Who can write to the database.


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("rules", "https://evil.test"),
        ("placement", "basic"),
        ("field", "user"),
        ("variable", "OTHER"),
        ("name", "other"),
        ("version", 7),
        ("tenant_slug", "wonderland"),
    ],
)
def test_a_row_that_somebody_wrote_is_not_in_force(
    column: str, value: Any, caplog: pytest.LogCaptureFixture
) -> None:
    row = credential()
    with undone():
        write(row, **{column: value})
        assert in_force() == {}
        forget_all()
        assert credentials_in_force("wonderland") == ()
        assert "is not used" in caplog.text
        assert VALUE not in caplog.text
        assert not verify().is_intact
        # Nor does an honest change seal it anew.
        with pytest.raises(ValidationError):
            NetworkCredential.objects.get().save()
    assert in_force() == {"prices@1": VALUE}


def test_values_exchanged_between_rows_are_not_in_force(alice: Caller, charlie: Caller) -> None:
    mine = credential(tenant=alice.tenant.slug)
    theirs = credential(tenant=charlie.tenant.slug, value=OTHER)
    first, second = token_of(mine), token_of(theirs)
    put_token(mine, second)
    put_token(theirs, first)
    assert in_force(alice) == in_force(charlie) == {}
    put_token(mine, first)
    assert in_force(alice) == {"prices@1": VALUE}
    # An earlier one of its own neither.
    mine.set_value(OTHER)
    mine.save()
    put_token(mine, first)
    assert in_force(alice) == {}


def test_one_that_no_key_opens_takes_no_other_away() -> None:
    lost, _ = credential("lost"), credential("there")
    put_token(lost, b"A256GCM1" + b"x" * 60)
    assert in_force() == {"there@1": VALUE}
    assert credential("lost", value=OTHER).version == 2
    assert in_force() == {"lost@2": OTHER, "there@1": VALUE}
    put_token(lost, b"A256GCM1" + b"x" * 60)
    assert revoke(NetworkCredential.objects.defer("value").get(pk=lost.pk))
    assert in_force() == {"there@1": VALUE}


def test_the_ledger_binds_the_value_and_shows_nothing_of_it() -> None:
    record_baseline()
    row = credential()
    revoke(row)
    entries = LedgerEntry.objects.filter(kind="network_credential", subject="prices")
    actions = [json.loads(each.statement)["action"] for each in entries.order_by("sequence")]
    assert actions == ["created", "revoked"]
    assert verify().is_intact
    # The hash of a value says nothing of it: the same value has another one each time.
    hashes = []
    for name in ("one", "two"):
        put_credential(name, "password", rules="https://api.example.com")
        entry = LedgerEntry.objects.get(kind="network_credential", subject=name)
        hashes.append(json.loads(entry.statement)["row_hash"])
        assert "password" not in entry.statement
    assert hashes[0] != hashes[1]
    assert VALUE not in "".join(LedgerEntry.objects.values_list("statement", flat=True))
