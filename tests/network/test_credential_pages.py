"""Network credentials in the admin and by the command: write-only, by two persons, never shown."""

from __future__ import annotations

import io
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

from executions.capabilities.network.credentials import (
    CREDENTIALS,
    credentials_in_force,
    put_credential,
    revoke,
)
from executions.capabilities.network.models import NetworkCredential
from executions.ledger.verification import verify
from providers import guarded
from providers.errors import InvalidConfiguration
from providers.models import ConfigVersion, PendingChange
from providers.services import ConfigurationConflict, approve, history
from providers.services.guarded_rows import restore
from tests.attacks.test_writers_records import undone
from tests.conftest import Caller
from tests.support.approvals import signed_in
from tests.support.credentials import ADD, CHANGE, FORM, LIST, OTHER, in_force, write
from tests.support.credentials import _no_holder as _no_holder
from tests.support.credentials import _no_thread as _no_thread
from tests.support.networks import VALUE, credential

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("lists_forgotten")]


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
