"""Network credentials: sealed to what they are bound to, write-only, versioned, and revoked."""

from __future__ import annotations

import io
import json
import logging
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import User
from django.core.exceptions import ValidationError
from django.core.management import CommandError, call_command
from django.db import IntegrityError, connection, transaction
from django.test import Client
from django.urls import reverse

from executions.capabilities.network import credential_changes, credentials
from executions.capabilities.network.credential_changes import Holder, look, register, send
from executions.capabilities.network.credentials import (
    CREDENTIALS,
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
from executions.runs.models import Execution
from providers import guarded
from providers.credentials import MOST_CREDENTIALS, Credential
from providers.errors import InvalidConfiguration, ProviderUnavailable
from providers.models import ConfigVersion, PendingChange
from providers.network import Layer, NetworkPolicy, Target
from providers.services import ConfigurationConflict, approve, history
from providers.services.guarded_rows import restore
from providers.services.settings_cache import forget_all
from tests.attacks.test_writers_records import undone
from tests.conftest import Caller
from tests.support.approvals import signed_in
from tests.support.lying_provider import Liar
from tests.support.networks import ALLOWED, VALUE, attempts, credential, listed
from tests.support.running import run

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("lists_forgotten")]

OTHER = "tok-9876543210-another"
ADD = "admin:executions_networkcredential_add"
CHANGE = "admin:executions_networkcredential_change"
LIST = "admin:executions_networkcredential_changelist"


@pytest.fixture(autouse=True)
def _no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The look is called by hand."""
    monkeypatch.setattr(credential_changes._loop, "start_if_possible", lambda: True)


def in_force(caller: Caller | None = None) -> dict[str, str]:
    """Values in force by label, in their order."""
    forget_all()
    found = credentials_in_force(caller.tenant.slug if caller else "")
    return {each.label: each.value.reveal() for each in found}


def write(row: NetworkCredential, **columns: Any) -> None:
    """As somebody who can write to the database."""
    NetworkCredential.objects.filter(pk=row.pk).update(**columns)


def token_of(row: NetworkCredential) -> bytes:
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT value FROM executions_networkcredential WHERE id = %s",
            [row.pk],
        )
        return bytes(cursor.fetchone()[0])


def put_token(row: NetworkCredential, token: bytes) -> None:
    with connection.cursor() as cursor:
        cursor.execute(
            "UPDATE executions_networkcredential SET value = %s WHERE id = %s", [token, row.pk]
        )


# The model.


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


# The page.

FORM = {
    "tenant_slug": "",
    "name": "prices",
    "placement": "header",
    "field": "X-Key",
    "rules": "https://api.example.com/v1",
    "variable": "PRICES",
    "new_value": VALUE,
}


def pages(client: Client) -> str:
    row = NetworkCredential.objects.get()
    urls = [reverse(LIST), reverse(CHANGE, args=[row.pk]), reverse(ADD)]
    return "".join(client.get(url).content.decode() for url in urls)


def test_the_page_takes_a_value_and_never_shows_it(admin_client: Client) -> None:
    assert admin_client.post(reverse(ADD), FORM).status_code == 302
    row = NetworkCredential.objects.get()
    assert in_force() == {"prices@1": VALUE}
    shown = pages(admin_client)
    assert "api.example.com" in shown
    assert VALUE not in shown
    assert VALUE[-4:] not in shown
    change = reverse(CHANGE, args=[row.pk])
    # Left empty it stays, and tenant and name are not asked for.
    kept = {**FORM, "new_value": "", "variable": "OTHER", "name": "else", "tenant_slug": "else"}
    assert admin_client.post(change, kept).status_code == 302
    assert in_force() == {"prices@2": VALUE}
    admin_client.post(change, {**FORM, "new_value": OTHER})
    assert in_force() == {"prices@3": OTHER}
    said = "".join(LogEntry.objects.values_list("change_message", flat=True))
    versions = [history.config_of(each) for each in ConfigVersion.objects.all()]
    diffs = str([each.diff for each in ConfigVersion.objects.all()])
    assert len(versions) == 3
    for secret in (VALUE, OTHER):
        assert secret not in said + str(versions) + diffs + pages(admin_client)


@pytest.mark.parametrize(
    ("sent", "field", "message"),
    [
        ({"new_value": ""}, "new_value", "Must have a value."),
        ({"new_value": "short"}, "new_value", "Must have 8 to 8192 characters."),
        ({"new_value": "tok-planted\u00e9"}, "new_value", "Must be printable ASCII"),
        ({"rules": "http://api.example.com"}, "rules", "A credential needs https://"),
        ({"field": "Host"}, "field", "may carry a credential"),
        ({"variable": "a-b"}, "variable", "Must be the name of a variable"),
        ({"name": "A B"}, "name", "Must be small letters"),
    ],
)
def test_the_page_names_the_field_that_is_wrong(
    admin_client: Client, sent: dict[str, str], field: str, message: str
) -> None:
    answer = admin_client.post(reverse(ADD), {**FORM, **sent})
    assert answer.status_code == 200
    errors = answer.context["adminform"].form.errors
    assert list(errors) == [field]
    assert len(errors[field]) == 1
    assert message in errors[field][0]
    assert FORM["new_value"] not in answer.content.decode()
    assert not NetworkCredential.objects.exists()


def test_the_page_revokes_what_is_selected_and_deletes_nothing(admin_client: Client) -> None:
    first, second = credential("one"), credential("two")
    body = {"action": "revoke_credentials", "_selected_action": [first.pk]}
    viewer = signed_in("viewer", "view_networkcredential")
    viewer.post(reverse(LIST), body)
    assert list(in_force()) == ["one@1", "two@1"]
    admin_client.post(reverse(LIST), body)
    assert list(in_force()) == ["two@1"]
    gone = reverse("admin:executions_networkcredential_delete", args=[second.pk])
    assert admin_client.post(gone, {"post": "yes"}).status_code == 403
    again = admin_client.get(reverse(CHANGE, args=[first.pk])).content.decode()
    assert "Revoked." in again
    admin_client.post(reverse(CHANGE, args=[first.pk]), {**FORM, "new_value": OTHER})
    assert in_force() == {"one@2": OTHER, "two@1": VALUE}
    assert reverse(LIST) in admin_client.get(reverse("admin:index")).content.decode()
    assert signed_in("stranger").get(reverse(LIST)).status_code == 403


def test_a_row_that_was_changed_outside_is_told_at_the_value(admin_client: Client) -> None:
    row = credential()
    with undone():
        write(row, rules="https://evil.test")
        answer = admin_client.post(
            reverse(CHANGE, args=[row.pk]),
            {**FORM, "placement": "bearer", "field": "", "new_value": ""},
        )
        assert "changed outside the service" in answer.content.decode()
        assert in_force() == {}
        write(row, rules="no rule at all")
        assert b"no rule at all" in admin_client.get(reverse(LIST)).content


# Approval by two.


def asked(client: Client, **sent: str) -> PendingChange:
    row = NetworkCredential.objects.first()
    url = reverse(ADD) if row is None else reverse(CHANGE, args=[row.pk])
    assert client.post(url, {**FORM, **sent}).status_code == 302
    return PendingChange.objects.filter(status="waiting").latest("pk")


def test_a_change_waits_for_a_second_person_and_its_value_is_nowhere_in_the_clear(
    admin_client: Client, settings: Any
) -> None:
    settings.TWO_PERSON_RULE = True
    ben = User.objects.create_superuser("ben")
    waiting = asked(admin_client)
    assert not NetworkCredential.objects.exists()
    [of_value] = [each for each in waiting.diff if each["field"] == "value"]
    assert of_value["after"] == "hidden"
    with connection.cursor() as cursor:
        cursor.execute("SELECT * FROM providers_pendingchange")
        assert VALUE not in str(
            [
                [str(bytes(x)) if isinstance(x, bytes | memoryview) else x for x in each]
                for each in cursor.fetchall()
            ]
        )
    page = reverse("admin:providers_pendingchange_change", args=[waiting.pk])
    assert VALUE not in admin_client.get(page).content.decode()
    approve(waiting, approver=ben)
    assert in_force() == {"prices@1": VALUE}
    # A binding alone keeps the value, and the approver is shown that.
    waiting = asked(admin_client, new_value="", rules="https://api.example.com/v2")
    assert [each["field"] for each in waiting.diff] == ["rules", "value", "version"]
    approve(waiting, approver=ben)
    assert in_force() == {"prices@2": VALUE}
    waiting = asked(admin_client, rules="https://other.example.com", new_value=OTHER)
    approve(waiting, approver=ben)
    assert in_force() == {"prices@3": OTHER}
    assert verify().is_intact


def test_what_waits_does_not_undo_a_revocation(admin_client: Client, settings: Any) -> None:
    credential(value=OTHER, placement="header", field="X-Key")
    settings.TWO_PERSON_RULE = True
    ben = User.objects.create_superuser("ben")
    waiting = asked(admin_client)
    # One person alone revokes, at once.
    row = NetworkCredential.objects.get()
    admin_client.post(reverse(LIST), {"action": "revoke_credentials", "_selected_action": [row.pk]})
    assert in_force() == {}
    with pytest.raises(ConfigurationConflict):
        approve(waiting, approver=ben)
    # Nor behind that check, where it is written.
    config = PendingChange.objects.get(pk=waiting.pk).config
    with pytest.raises(InvalidConfiguration, match="set for something else"):
        guarded.write(CREDENTIALS, str(row.pk), config)
    assert in_force() == {}


def test_a_value_that_waits_for_one_credential_cannot_be_approved_for_another(
    admin_client: Client, settings: Any
) -> None:
    settings.TWO_PERSON_RULE = True
    ben = User.objects.create_superuser("ben")
    first = asked(admin_client)
    second = asked(admin_client, name="other", new_value=OTHER)
    forged = {**second.config, "value": first.config["value"]}
    PendingChange.objects.filter(pk=second.pk).update(config=forged)
    with pytest.raises(InvalidConfiguration, match="set for something else"):
        approve(second, approver=ben)
    assert in_force() == {}


def test_an_earlier_binding_that_is_restored_keeps_the_value_and_is_a_later_version(
    admin_client: Client,
) -> None:
    asked_form = {**FORM, "new_value": VALUE}
    admin_client.post(reverse(ADD), asked_form)
    row = NetworkCredential.objects.get()
    admin_client.post(
        reverse(CHANGE, args=[row.pk]),
        {**FORM, "new_value": OTHER, "rules": "https://api.example.com"},
    )
    first = ConfigVersion.objects.earliest("version")
    restore(User.objects.get(username="admin"), first)
    assert in_force() == {"prices@3": OTHER}
    assert credentials_in_force("")[0].rules == ("https://api.example.com/v1",)
    revoke(row)
    with pytest.raises(IntegrityError), transaction.atomic():
        write(row, revoked_at=None)
    restore(User.objects.get(username="admin"), first)
    assert in_force() == {}


# Who may change a credential and does not know its value.


@pytest.mark.parametrize(
    "columns",
    [
        {"rules": "https://evil.test"},
        {"rules": "https://api.example.com\nhttps://evil.test"},
        {"rules": "https://*.example.com"},
        {"rules": "https://api.example.com:8443"},
    ],
)
def test_a_value_has_to_be_entered_again_before_it_goes_to_another_server(
    admin_client: Client, columns: dict[str, str]
) -> None:
    row = credential()
    change = reverse(CHANGE, args=[row.pk])
    sent = {**FORM, "placement": "bearer", "field": "", **columns}
    answer = admin_client.post(change, {**sent, "new_value": ""})
    assert answer.status_code == 200
    [told] = answer.context["adminform"].form.errors["new_value"]
    assert told == "Enter the value again: it would go to another server."
    assert in_force() == {"prices@1": VALUE}
    assert admin_client.post(change, {**sent, "new_value": OTHER}).status_code == 302
    assert in_force() == {"prices@2": OTHER}


def test_no_earlier_binding_to_another_server_is_restored_without_the_value(
    admin_client: Client,
) -> None:
    admin_client.post(reverse(ADD), FORM)
    row = NetworkCredential.objects.get()
    there = {**FORM, "new_value": OTHER, "rules": "https://b.test"}
    admin_client.post(reverse(CHANGE, args=[row.pk]), there)
    first = ConfigVersion.objects.earliest("version")
    with pytest.raises(InvalidConfiguration, match="Enter the value again"):
        restore(User.objects.get(username="admin"), first)
    assert in_force() == {"prices@2": OTHER}
    assert credentials_in_force("")[0].rules == ("https://b.test",)


def test_a_callers_secret_is_bound_to_no_server_without_its_value(alice: Caller) -> None:
    slug = alice.tenant.slug
    put_credential("key", VALUE, tenant_slug=slug, placement="sandbox")
    row = NetworkCredential.objects.get()
    row.placement, row.rules = "bearer", "https://evil.test"
    with pytest.raises(ValidationError, match="Enter the value again"):
        row.save()
    row.rules = "https://a.test"
    row.set_value(OTHER)
    row.save()
    for rules, placement in (("https://*.a.test", "bearer"), ("", "sandbox")):
        row.rules, row.placement = rules, placement
        with pytest.raises(ValidationError, match="Enter the value again"):
            row.save()


# The command.


def command(*arguments: str) -> str:
    out = io.StringIO()
    call_command("network_credential", *arguments, stdout=out)
    return out.getvalue()


def test_the_command_adds_gives_another_value_and_revokes(alice: Caller, tmp_path: Path) -> None:
    file = tmp_path / "value"
    file.write_text(f"{VALUE}\n")
    given = ("prices", "--tenant", alice.tenant.slug, "--from-file", str(file))
    bound = ("--placement", "query", "--field", "key", "--rule", "https://api.example.com")
    said = command(*given, *bound, "--variable", "PRICES")
    assert "version 1" in said
    assert VALUE not in said
    assert in_force(alice) == {"prices@1": VALUE}
    file.write_text(OTHER)
    command(*given)
    assert in_force(alice) == {"prices@2": OTHER}
    assert ConfigVersion.objects.count() == 2
    for wrong, why in (
        ((*given, "--rule", "http://api.example.com"), "rules: "),
        (("other", "--from-file", str(file)), "rules: "),
        (("prices", "--from-file", str(tmp_path / "none")), "--from-file: "),
        (("prices", "--revoke"), "no active credential"),
    ):
        with pytest.raises(CommandError, match=why) as refused:
            command(*wrong)
        assert OTHER not in str(refused.value)
    command("prices", "--tenant", alice.tenant.slug, "--revoke")
    assert in_force(alice) == {}


def test_the_command_reads_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(f"{VALUE}\n".encode())))
    command("prices", "--rule", "https://api.example.com")
    assert in_force() == {"prices@1": VALUE}


# Runs.

ASKED: dict[str, Any] = {"network": {"allow": ["api.example.com"]}}


@pytest.fixture
def holding(liar: Liar) -> Liar:
    """A provider that holds networks, and notes changed credentials."""
    listed("api.example.com", "pypi.org")
    liar.does("holds_network", lambda: True)
    liar.answers(exit_code=0)
    return liar


def test_a_run_is_given_its_credentials_and_its_record_names_them(
    holding: Liar, alice: Caller, charlie: Caller
) -> None:
    credential(tenant=alice.tenant.slug)
    credential("elsewhere", "https://nowhere.test")
    put_in = [{**ALLOWED.to_json(), "host": "api.example.com", "credential": "prices@1"}]
    said = {**attempts(ALLOWED).to_json(), "attempts": put_in}
    holding.answers(metadata={"network": said, "network_credentials": ["forged@1"]}, exit_code=0)
    told = run(alice, "1", **ASKED).json()
    [given] = holding.module.specs[-1].network.credentials
    assert given.value.reveal() == VALUE
    assert told["network"]["credentials"] == ["prices@1"]
    assert told["network"]["attempts"][0]["credential"] == "prices@1"
    found = alice.client.get("/api/v1/network/attempts").json()["results"]
    assert [each["credential"] for each in found] == ["prices@1"]
    read = alice.client.get(f"/api/v1/executions/{told['id']}")
    assert read.json()["network"] == told["network"]
    # Another tenant has neither the credential nor the attempts.
    other = run(charlie, "1", **ASKED).json()
    assert holding.module.specs[-1].network.credentials == ()
    assert other["network"]["credentials"] == []
    assert (
        charlie.client.get("/api/v1/network/attempts").json()["results"][0]["execution"]
        == (other["id"])
    )
    stored = "".join(str(each) for each in Execution.objects.values("meta", "pending"))
    everything = stored + read.content.decode() + json.dumps(told)
    assert VALUE not in everything
    assert verify().is_intact


class Taken:
    """A provider at its outer edge: what it was sent."""

    id = "taken"

    def __init__(self) -> None:
        self.changes: list[Mapping[str, Credential | None]] = []
        self.does: Callable[[], None] = lambda: None

    def change_credentials(self, changes: Mapping[str, Credential | None]) -> None:
        self.does()
        self.changes.append(changes)

    @property
    def said(self) -> list[dict[str, str | None]]:
        return [
            {key: None if each is None else each.label for key, each in changes.items()}
            for changes in self.changes
        ]


@pytest.fixture
def taken() -> Any:
    return Taken()


@pytest.fixture(autouse=True)
def _no_holder() -> Any:
    yield
    credential_changes._forget()


def test_a_look_sends_what_has_changed_since_the_run_was_given_it(taken: Any) -> None:
    assert look() is None
    first, second = credential("one"), credential("two")
    holder = Holder(taken, {str(first.pk): 1, str(second.pk): 1})
    register(holder)
    assert look() == credential_changes.LOOK_SECONDS
    assert taken.changes == []
    credential("one", value=OTHER)
    credential("unrelated")
    look()
    assert taken.said == [{str(first.pk): "one@2"}]
    assert taken.changes[0][str(first.pk)].value.reveal() == OTHER
    revoke(second)
    look()
    look()
    assert taken.said[1:] == [{str(second.pk): None}]
    credential_changes.unregister(holder)
    assert look() is None


def test_a_look_sends_again_what_a_provider_did_not_take(
    taken: Any, caplog: pytest.LogCaptureFixture
) -> None:
    row = credential()
    well: Any = Taken()
    for provider in (taken, well):
        register(Holder(provider, {str(row.pk): 1}))

    def fail() -> None:
        raise ProviderUnavailable("away")

    taken.does = fail
    revoke(row)
    look()
    assert (taken.changes, well.said) == ([], [{str(row.pk): None}])
    assert "did not take" in caplog.text
    taken.does = lambda: None
    look()
    assert (taken.said, len(well.changes)) == ([{str(row.pk): None}], 1)


def test_a_provider_that_hangs_holds_nobody_up_and_gets_no_second_thread(
    taken: Any, caplog: pytest.LogCaptureFixture
) -> None:
    goes_on, began = threading.Event(), threading.Semaphore(0)

    def hang() -> None:
        began.release()
        assert goes_on.wait(60)

    taken.does = hang
    try:
        assert send({taken: {"1": None}}, seconds=0.0) == set()
        assert began.acquire(timeout=60)
        assert send({taken: {"1": None}}, seconds=0.0) == set()
        assert not began.acquire(blocking=False)
        assert "still hangs" in caplog.text
    finally:
        goes_on.set()


def test_a_change_reaches_the_providers_of_this_process_once_it_is_committed(
    taken: Any, monkeypatch: pytest.MonkeyPatch, django_capture_on_commit_callbacks: Any
) -> None:
    class Lent:
        provider = taken

    monkeypatch.setattr(credential_changes, "loaded", lambda: [Lent, Lent])
    with django_capture_on_commit_callbacks(execute=True):
        row = credential()
        assert taken.changes == []
    with django_capture_on_commit_callbacks(execute=True):
        revoke(row)
    assert taken.said == [{str(row.pk): "prices@1"}, {str(row.pk): None}]


def test_a_revocation_is_sent_though_another_thread_has_just_looked_up_the_former(
    taken: Any, monkeypatch: pytest.MonkeyPatch, django_capture_on_commit_callbacks: Any
) -> None:
    class Lent:
        provider = taken

    row = credential()
    assert in_force() == {"prices@1": VALUE}
    monkeypatch.setattr(credential_changes, "loaded", lambda: [Lent])
    # As if its lookup had begun before the commit, and ended after all was forgotten.
    monkeypatch.setattr(credentials._in_force, "forget", lambda **signal: None)
    with django_capture_on_commit_callbacks(execute=True):
        revoke(row)
    assert taken.said == [{str(row.pk): None}]


def test_a_run_is_registered_while_its_code_runs(
    holding: Liar, alice: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = credential()
    registered: list[dict[str, int]] = []
    real = credential_changes.register

    def note(holder: Holder) -> None:
        registered.append(dict(holder.versions))
        real(holder)

    monkeypatch.setattr(credential_changes, "register", note)
    assert run(alice, "1", **ASKED).status_code == 200
    assert run(alice, "1", network={"allow": ["pypi.org"]}).status_code == 200
    assert run(alice, "1").status_code == 200
    assert registered == [{str(row.pk): 1}]
    assert credential_changes._holders == set()


def test_nothing_that_fails_logs_a_value(caplog: pytest.LogCaptureFixture, taken: Any) -> None:
    caplog.set_level(logging.DEBUG)
    row = credential()
    register(Holder(taken, {str(row.pk): 0}))
    taken.does = lambda: (_ for _ in ()).throw(RuntimeError("broken"))
    look()
    assert "broken" in caplog.text
    assert VALUE not in caplog.text
    assert VALUE not in repr(credentials_in_force(""))
