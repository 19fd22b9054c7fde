"""An administrator alone, who would like to be two."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest
from django.contrib import admin
from django.contrib.auth.models import Group, Permission, User
from django.core.management import call_command
from django.db import connection, transaction
from django.urls import reverse
from django_otp.plugins.otp_totp.models import TOTPDevice

from executions.capabilities.retention import service
from executions.capabilities.spending.models import Budget
from executions.ledger.models import LedgerEntry
from executions.tenants.models import Tenant
from executions.tenants.service import ADMINISTRATOR, AUDITOR
from providers.admin_pages import GuardedAdmin
from providers.guarded import all_guarded
from providers.models import (
    AccountHold,
    CircuitBreaker,
    ConfigVersion,
    PendingChange,
    ProviderConfig,
    ProviderPrice,
    Route,
)
from providers.services import save_config
from providers.services.approval import request_change
from providers.services.approvers import can_approve
from tests.attacks.administrators import (
    GOOD,
    STRONG,
    administrator,
    approve,
    page,
    route_form,
    signed_in,
    superuser,
    user_form,
)

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def _rule(approvals: None, settings: Any) -> None:
    settings.TWO_PERSON_RULE = True


def test_she_renames_herself_and_approves() -> None:
    ann = superuser("ann")
    superuser("ben")
    save_config("probe", GOOD)
    row = ProviderConfig.objects.defer("config").get()
    signed_in(ann).post(
        page(row, "changelist"), {"action": "activate_selected", "_selected_action": [row.pk]}
    )
    change = PendingChange.objects.get()
    # Renaming is held back; she does it all the same, by whatever means.
    signed_in(ann).post(page(ann), user_form(ann, username="anna"))
    assert User.objects.filter(username="ann").exists()
    User.objects.filter(pk=ann.pk).update(username="anna")
    ann.refresh_from_db()

    assert approve(ann, change).status == "waiting"
    assert not ProviderConfig.objects.get().is_active


def _put_in_the_place_of(shown: PendingChange, other: PendingChange) -> None:
    """As whoever writes to the database does: the ciphertext, as it stands there."""
    table = PendingChange._meta.db_table
    with connection.cursor() as cursor:
        cursor.execute(
            f"UPDATE {table} SET config = (SELECT config FROM {table} WHERE id = %s) WHERE id = %s",
            [other.pk, shown.pk],
        )


@pytest.mark.parametrize("action", ["save", "save_and_activate"])
def test_she_has_another_configuration_made_than_the_one_that_is_approved(action: str) -> None:
    ann, ben = superuser("ann"), superuser("ben")
    save_config("probe", GOOD)
    for address in ("http://b", "http://evil"):
        asked = GOOD | {"endpoint": address}
        what = PendingChange.Action(action)
        request_change("probe", what, asked, author="user:ann", author_id=ann.pk)
    shown, other = PendingChange.objects.order_by("pk")
    _put_in_the_place_of(shown, other)
    assert approve(ben, shown).status == "waiting"
    assert ProviderConfig.objects.get().config["endpoint"] == "http://a"
    assert approve(ben, other).status == "approved"
    assert ProviderConfig.objects.get().config["endpoint"] == "http://evil"


@pytest.mark.parametrize("is_new", [True, False])
def test_she_has_another_row_made_than_the_one_that_is_approved(is_new: bool) -> None:
    ann, ben = superuser("ann"), superuser("ben")
    where = reverse("admin:executions_budget_add")
    if not is_new:
        where = page(Budget.objects.create(limit=1))
    for limit in (2, 99):
        form = {"period": "day", "limit": limit, "warn_percent": 80}
        signed_in(ann).post(where, form)
    shown, other = PendingChange.objects.order_by("pk")
    _put_in_the_place_of(shown, other)
    assert approve(ben, shown).status == "waiting"
    assert not Budget.objects.filter(limit=99).exists()
    assert approve(ben, other).status == "approved"
    assert Budget.objects.filter(limit=99).exists()


def test_she_makes_a_second_account_and_approves_with_it() -> None:
    ann, ben = superuser("ann"), superuser("ben")
    client = signed_in(ann)
    form = {"username": "ann2", "password1": STRONG, "password2": STRONG, "usable_password": "true"}
    client.post(reverse("admin:auth_user_add"), form)
    assert not User.objects.filter(username="ann2").exists()
    made = PendingChange.objects.get()
    assert approve(ann, made).status == "waiting"
    assert approve(ben, made).status == "approved"
    second = User.objects.get(username="ann2")
    assert second.check_password(STRONG)
    client.post(page(second), user_form(second, is_staff="on", is_superuser="on"))
    assert approve(ben).status == "approved"
    second.refresh_from_db()
    assert second.is_superuser

    client.post(
        reverse("admin:executions_budget_add"), {"period": "day", "limit": 5, "warn_percent": 80}
    )
    assert approve(second).status == "waiting"
    assert not Budget.objects.exists()
    assert approve(ben).status == "approved"


def test_an_account_made_before_the_rule_was_on_is_her_own_until_the_server_says_otherwise(
    settings: Any,
) -> None:
    settings.TWO_PERSON_RULE = False
    ann = superuser("ann")
    form = {"username": "ann2", "password1": STRONG, "password2": STRONG, "usable_password": "true"}
    signed_in(ann).post(reverse("admin:auth_user_add"), form)
    second = User.objects.get(username="ann2")
    signed_in(ann).post(page(second), user_form(second, is_staff="on", is_superuser="on"))
    second.refresh_from_db()
    third_form = form | {"username": "ann3"}
    signed_in(second).post(reverse("admin:auth_user_add"), third_form)
    third = User.objects.get(username="ann3")
    signed_in(second).post(page(third), user_form(third, is_staff="on", is_superuser="on"))
    third.refresh_from_db()

    settings.TWO_PERSON_RULE = True
    for asks, decides in ((ann, second), (second, ann), (ann, third), (third, second)):
        client = signed_in(asks)
        client.post(
            reverse("admin:providers_providerprice_add"), {"provider_id": "e2b", "per_second": 1}
        )
        assert approve(decides).status == "waiting", (asks, decides)
    why = signed_in(second).get(page(PendingChange.objects.latest("pk")))
    assert "count as one person" in why.content.decode()
    call_command("confirm_account", "ann2")
    call_command("confirm_account", "ann3")
    assert LedgerEntry.objects.filter(statement__contains="confirmed as a person").count() == 2
    assert (
        approve(third, PendingChange.objects.filter(author="user:ann").first()).status == "approved"
    )
    assert ProviderPrice.objects.exists()


def test_rights_that_are_newer_than_a_change_do_not_approve_it() -> None:
    ann, ben, cat = superuser("ann"), superuser("ben"), administrator("cat")
    cat.groups.clear()
    signed_in(ann).post(
        reverse("admin:providers_providerprice_add"), {"provider_id": "e2b", "per_second": 1}
    )
    first = PendingChange.objects.get()
    admins = Group.objects.get(name=ADMINISTRATOR)
    signed_in(ben).post(page(cat), user_form(cat, groups=[str(admins.pk)]))
    assert approve(ann).status == "approved"
    cat = User.objects.get(pk=cat.pk)
    assert cat.has_perm("providers.change_pendingchange")
    assert approve(cat, first).status == "waiting"
    signed_in(ann).post(
        reverse("admin:providers_providerprice_add"), {"provider_id": "e2b", "per_second": 1}
    )
    assert approve(cat).status == "approved"
    assert approve(User.objects.create_superuser("dan"), first).status == "waiting"


def test_a_change_whose_author_is_gone_is_nobodys_to_approve() -> None:
    ann, ben = superuser("ann"), superuser("ben")
    for _ in range(2):
        signed_in(ann).post(
            reverse("admin:providers_providerprice_add"), {"provider_id": "e2b", "per_second": 1}
        )
    User.objects.filter(pk=ann.pk).update(is_active=False)
    assert approve(ben).status == "waiting"
    ann.delete()
    assert approve(ben).status == "waiting"


@pytest.mark.parametrize("what", ["route", "budget", "price", "tenant"])
def test_she_changes_alone_where_code_runs_or_who_pays(what: str) -> None:
    ann, ben = superuser("ann"), superuser("ben")
    provider = save_config("probe", GOOD)
    rows: dict[str, Any] = {
        "route": Route.objects.create(),
        "budget": Budget.objects.create(limit=1),
        "price": ProviderPrice.objects.create(provider_id="probe", per_second=1),
        "tenant": Tenant.objects.create(slug="wonderland", name="W"),
    }
    forms: dict[str, dict[str, Any]] = {
        "route": route_form(provider, language="python"),
        "budget": {"period": "month", "limit": "99", "warn_percent": 80},
        "price": {"provider_id": "probe", "per_second": "0"},
        "tenant": {"name": "Mine", "is_active": "on", "keep_code_days": "1"},
    }
    row, client = rows[what], signed_in(ann)
    filled = _as_form(row) | forms[what]
    before = type(row).objects.values().get()
    answer = client.post(page(row), filled | {"_reason": "Cheaper."}, follow=True)
    assert "submitted for approval" in answer.content.decode()
    assert type(row).objects.values().get() == before
    change = PendingChange.objects.get()
    assert (change.reason, change.author_id, change.author) == ("Cheaper.", ann.pk, "user:ann")
    assert change.diff
    assert approve(ann, change).status == "waiting"
    assert approve(ben, change).status == "approved"
    assert type(row).objects.values().get() != before or Route.objects.get().steps.exists()

    versions = ConfigVersion.objects.filter(subject=change.subject).order_by("version")
    assert [(v.author, v.approved_by) for v in versions] == [
        ("system", ""),
        ("user:ann", "user:ben"),
    ]
    entered = LedgerEntry.objects.filter(kind="configuration", statement__contains=change.subject)
    assert entered.count() == 2

    # Restored under the rule as well, and then exactly as it was.
    client.post(reverse("admin:providers_restore", args=[versions[0].pk]))
    assert type(row).objects.values().get() != before or Route.objects.get().steps.exists()
    assert approve(ben).status == "approved"
    assert type(row).objects.values().get() == before

    # Its removal too, and the way back from that.
    client.post(page(row, "delete"), {"post": "yes"})
    client.post(
        page(row, "changelist"),
        {"action": "delete_selected", "_selected_action": [row.pk], "post": "yes"},
    )
    assert type(row).objects.exists()
    assert approve(ben).status == "approved"
    # A tenant goes with the last of its rows.
    assert service.go_on() == (what == "tenant")
    assert not type(row).objects.exists()
    signed_in(ben).post(reverse("admin:providers_restore", args=[versions[0].pk]))
    assert approve(ann).status == "approved"
    # What ran before it went is not its own any more, so it begins anew.
    anew = {"created_at": None}
    assert type(row).objects.values().get() | anew == before | anew


def _as_form(row: Any) -> dict[str, Any]:
    """What its page would send: so that a column that comes later is in it."""
    fields = {
        field.name: field.value_from_object(row)
        for field in row._meta.concrete_fields
        if field.editable
    }
    return {k: "on" if v is True else v for k, v in fields.items() if v not in (None, False)}


def test_she_puts_a_provider_back_into_service_alone() -> None:
    ann, ben = superuser("ann"), superuser("ben")
    row = CircuitBreaker.objects.create(provider_id="probe")
    client = signed_in(ann)
    client.post(page(row, "delete"), {"post": "yes"})
    client.post(
        page(row, "changelist"),
        {"action": "delete_selected", "_selected_action": [row.pk], "post": "yes"},
    )
    assert CircuitBreaker.objects.exists()
    assert approve(ben).status == "approved"
    assert not CircuitBreaker.objects.exists()


def test_she_gives_rights_or_takes_an_account_over_alone() -> None:
    ann, ben = superuser("ann"), superuser("ben")
    carl = User.objects.create_user("carl", password=STRONG, is_staff=True)
    device = TOTPDevice.objects.create(user=ben, name="x", confirmed=True)
    role, client = Group.objects.get(name=AUDITOR), signed_in(ann)
    before, ours = User.objects.order_by("pk").values(), list(User.objects.order_by("pk").values())
    permission = Permission.objects.get(codename="change_pendingchange")
    password = {
        "password1": "n3w " + STRONG,
        "password2": "n3w " + STRONG,
        "usable_password": "true",
    }
    client.post(page(carl), user_form(carl, is_superuser="on", user_permissions=[permission.pk]))
    client.post(page(carl), user_form(carl, is_active=None))
    answer = client.post(reverse("admin:auth_user_password_change", args=[ben.pk]), password)
    # It is told that it waits, in the same session.
    assert answer.status_code == 302
    assert "submitted for approval" in client.get(answer["Location"]).text
    client.post(page(role), {"name": role.name, "permissions": [permission.pk]})
    client.post(page(ben, "delete"), {"post": "yes"})
    client.post(
        page(ben, "changelist"),
        {"action": "delete_selected", "_selected_action": [ben.pk], "post": "yes"},
    )
    client.post(
        page(ben, "changelist"), {"action": "reset_authenticator", "_selected_action": [ben.pk]}
    )
    last_login = {"last_login"}
    assert [{k: v for k, v in row.items() if k not in last_login} for row in before.all()] == [
        {k: v for k, v in row.items() if k not in last_login} for row in ours
    ]
    assert not carl.user_permissions.exists()
    assert not role.permissions.filter(pk=permission.pk).exists()
    assert TOTPDevice.objects.filter(pk=device.pk).exists()
    assert PendingChange.objects.count() == 7
    for change in PendingChange.objects.all():
        assert "pbkdf2" not in str(change.diff)
        assert "md5" not in str(change.diff)


def test_a_reset_authenticator_and_a_password_put_an_account_in_hand() -> None:
    ann, ben, carl = superuser("ann"), superuser("ben"), superuser("carl")
    TOTPDevice.objects.create(user=ben, name="x", confirmed=True)
    signed_in(ann).post(
        page(ben, "changelist"), {"action": "reset_authenticator", "_selected_action": [ben.pk]}
    )
    assert "uthenticator" in str(PendingChange.objects.get())
    assert approve(carl).status == "approved"
    assert not TOTPDevice.objects.exists()
    assert AccountHold.objects.filter(account_id=ben.pk, holder_id=ann.pk).exists()
    signed_in(ann).post(
        reverse("admin:providers_providerprice_add"), {"provider_id": "e2b", "per_second": 1}
    )
    assert approve(ben).status == "waiting"
    assert approve(carl).status == "approved"


def test_an_approver_who_is_no_superuser_makes_no_superuser() -> None:
    ann, adam = superuser("ann"), administrator("adam")
    carl = User.objects.create_user("carl", is_staff=True)
    signed_in(ann).post(page(carl), user_form(carl, is_superuser="on"))
    assert approve(adam).status == "waiting"
    carl.refresh_from_db()
    assert not carl.is_superuser


def test_the_first_second_person_comes_from_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    ann = superuser("ann")
    assert not can_approve()
    monkeypatch.setenv("DJANGO_SUPERUSER_PASSWORD", STRONG)
    options = {"username": "ben", "email": "ben@example.org", "interactive": False}
    call_command("createsuperuser", **options)
    assert can_approve()
    entry = LedgerEntry.objects.filter(kind="user").latest("sequence").stated
    assert (entry["subject"], entry["is_superuser"], entry["actor"]) == ("ben", True, "system")
    signed_in(ann).post(
        reverse("admin:providers_providerprice_add"), {"provider_id": "e2b", "per_second": 1}
    )
    assert approve(User.objects.get(username="ben")).status == "approved"
    AccountHold.objects.create(account_id=User.objects.get(username="ben").pk, holder_id=ann.pk)
    assert not can_approve()


def test_no_door_beside_is_open() -> None:
    """Every page of a guarded model has the mixin; whatever has not, is refused when it writes."""
    for model, page_of in admin.site._registry.items():
        if model in {guarded.model for guarded in all_guarded()}:
            assert isinstance(page_of, GuardedAdmin), model


def test_a_write_that_no_page_collects_is_refused() -> None:
    from executions.kernel.audit import acting_as
    from providers.services.row_changes import NeedsApproval

    tenant = Tenant.objects.create(slug="w", name="W")
    user = superuser("ann")
    with acting_as(lambda: "user:ann"):
        for write in (
            tenant.save,
            tenant.delete,
            lambda: Tenant.objects.create(slug="x", name="X"),
            lambda: user.groups.add(Group.objects.get(name=AUDITOR)),
            lambda: Group.objects.get(name=AUDITOR).user_set.add(user),
            lambda: user.save(update_fields=["is_staff"]),
            lambda: Budget.objects.create(limit=Decimal(1)),
        ):
            with pytest.raises(NeedsApproval), transaction.atomic():
                write()
    assert not user.groups.exists()
    assert Tenant.objects.count() == 1
