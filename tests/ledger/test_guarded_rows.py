"""What is under the two-person rule is carried whole, whatever columns it has or will have."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth.models import Group, Permission, User
from django.db import models
from django.test import Client

from executions.capabilities.network.models import NetworkCredential
from executions.capabilities.spending.models import Budget
from executions.ledger.models import LedgerEntry
from executions.tenants.models import Tenant
from providers import guarded, registry
from providers.errors import InvalidConfiguration
from providers.guarded import Guarded
from providers.models import ConfigVersion, PendingChange, ProviderPrice, Route, RouteStep
from providers.services import (
    ConfigurationConflict,
    NotPermitted,
    approve,
    history,
    save_config,
)
from providers.services.guarded_rows import carry_out, restore
from tests.support.provider_package import Packages, install_probe

pytestmark = [pytest.mark.django_db, pytest.mark.database]

# Of keys not every change waits: tests/admin/pages/test_key_admin.py. The columns of a credential
# are sealed together: tests/network/test_credentials.py.
KINDS = [
    kind
    for kind in guarded.all_guarded()
    if not (kind.removal_only or kind.takes_two or kind.model is NetworkCredential)
]
GOOD = {"endpoint": "http://a", "token": "tok-0123456789-wxyz"}


@pytest.fixture(autouse=True)
def _provider(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    install_probe(Packages(tmp_path, monkeypatch), f"guarded_{tmp_path.name}")
    save_config("probe", GOOD)
    yield
    registry.refresh()


def made(kind: Guarded) -> Any:
    """A row of the kind, with a row of everything that belongs to it."""
    values: dict[type[models.Model], dict[str, Any]] = {
        User: {"username": "ada", "password": "x"},
        Group: {"name": "Clerks"},
        Tenant: {"slug": "wonderland", "name": "W"},
        Route: {"owner": "wonderland"},
        ProviderPrice: {"provider_id": "probe", "per_second": "0.12345678"},
        Budget: {"limit": "10.0000"},
    }
    row = kind.model._base_manager.create(**values[kind.model])
    if isinstance(row, Route):
        RouteStep.objects.create(route=row, provider_id=_probe())
    for field in kind.model._meta.many_to_many:
        related: Any = field.remote_field
        getattr(row, field.name).add(related.model._base_manager.first())
    return kind.model._base_manager.get(pk=row.pk)


def _probe() -> int:
    from providers.models import ProviderConfig

    return ProviderConfig.objects.defer("config").get(provider_id="probe").pk


def other(field: models.Field[Any, Any], value: Any) -> Any:
    """A value that the column does not have, and may have."""
    if field.name == "provider_id":
        return "local"
    if field.model is Budget and field.name == "tenant_slug":
        return Tenant.objects.create(slug="elsewhere", name="E").slug
    if field.choices:
        return next(choice for choice, _ in field.flatchoices if choice != value)
    if isinstance(field, models.BooleanField):
        return not value
    if isinstance(field, models.DateTimeField):
        return value + timedelta(days=1)
    if isinstance(field, models.DecimalField):
        return Decimal(value) + 1
    if isinstance(field, models.IntegerField | models.FloatField):
        return (value or 0) + 1
    if isinstance(field, models.EmailField):
        return "x@elsewhere.example"
    assert isinstance(field, models.CharField | models.TextField), (
        f"tell this test of a value of {field}"
    )
    return "another-one"


# It is set together with another column, and is not taken back: see test_removed_tenants.py.
MARK = "removal_began_at"

COLUMNS = [
    pytest.param(kind, field, id=f"{kind.label}.{field.name}")
    for kind in KINDS
    for field in kind.model._meta.concrete_fields
    if not field.primary_key and field.name not in (*kind.left_out, MARK)
]


@pytest.mark.parametrize(("kind", "field"), COLUMNS)
def test_a_change_of_any_column_waits_and_is_made_when_it_is_approved(
    kind: Guarded, field: models.Field[Any, Any], settings: Any
) -> None:
    settings.TWO_PERSON_RULE = True
    ann, ben = User.objects.create_superuser("ann"), User.objects.create_superuser("ben")
    row = made(kind)
    before, wanted = getattr(row, field.attname), other(field, getattr(row, field.attname))

    def write() -> None:
        setattr(row, field.attname, wanted)
        row.save()

    _, (waiting,) = carry_out(ann, write)
    stored = kind.model._base_manager.filter(pk=row.pk).values_list(field.attname, flat=True)
    assert stored.get() == before
    assert [entry["field"] for entry in waiting.diff] == [field.name]
    shown = str(waiting.diff)
    if field.name in kind.hidden:
        assert str(wanted) not in shown
        assert not before or str(before) not in shown
    approve(waiting, approver=ben)
    assert stored.get() == wanted
    if field.name in kind.hidden:
        return
    first = ConfigVersion.objects.filter(subject=waiting.subject).earliest("version")
    (undo,) = restore(ben, first)
    approve(undo, approver=ann)
    assert stored.get() == before


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.label)
def test_relations_and_what_belongs_to_a_row_are_carried(kind: Guarded, settings: Any) -> None:
    ann = User.objects.create_superuser("ann")
    row = made(kind)
    values = guarded.values_of(kind, row)
    assert values is not None
    names = {field.name for field in kind.model._meta.many_to_many}
    names |= {child.accessor for child in kind.children}
    assert all(values[name] for name in names)

    def empty() -> None:
        for name in names:
            getattr(row, name).all().delete() if name == "steps" else getattr(row, name).clear()

    if not names:
        return
    carry_out(ann, empty)
    again = guarded.values_of(kind, guarded.find(kind, row.pk))
    assert again is not None
    assert not any(again[name] for name in names)
    first = ConfigVersion.objects.filter(subject=f"{kind.label}:{row.pk}").earliest("version")
    restore(ann, first)
    assert guarded.values_of(kind, guarded.find(kind, row.pk)) == values


def test_every_row_that_belongs_to_a_guarded_one_is_carried_with_it() -> None:
    """A model with a cascading relation to a guarded one is named here, or carried."""
    apart = {
        "executions.ApiKey",
        "admin.LogEntry",
        "executions.SavedFilter",
        "executions.Schedule",
        "executions.Template",
        "executions.Workspace",
        "executions.WebhookSecret",
        "sandbox_site.RecoveryCode",
    }
    for kind in guarded.all_guarded():
        carried = {child.model for child in kind.children}
        for relation in kind.model._meta.related_objects:
            model = relation.related_model
            if relation.one_to_many and relation.on_delete is models.CASCADE:  # type: ignore[union-attr]
                known = model in carried or guarded.guarded_row(model()) is not None  # type: ignore[operator, arg-type]
                assert known or model._meta.label in apart, model  # type: ignore[union-attr]


def test_no_version_and_no_ledger_entry_holds_what_is_hidden() -> None:
    ann = User.objects.create_superuser("ann")
    ada = User.objects.create_user("ada", "ada@private.example", "S3cret!pass")

    def write() -> None:
        ada.set_password("An0ther!pass")
        ada.email, ada.is_staff = "ada@other.example", True
        ada.save()

    carry_out(ann, write)
    said = str(
        [history.config_of(version) for version in ConfigVersion.objects.exclude(subject="probe")]
    )
    said += "".join(LedgerEntry.objects.values_list("statement", flat=True))
    assert "is_staff" in said
    for secret in ("private.example", "other.example", ada.password):
        assert secret not in said


def test_what_changed_meanwhile_is_not_overwritten(settings: Any) -> None:
    settings.TWO_PERSON_RULE = True
    ann, ben = User.objects.create_superuser("ann"), User.objects.create_superuser("ben")
    budget = Budget.objects.create(limit=1)

    def ask(limit: int) -> PendingChange:
        def write() -> None:
            Budget.objects.get(pk=budget.pk)
            budget.limit = Decimal(limit)
            budget.save()

        return carry_out(ann, write)[1][0]

    first, second = ask(2), ask(3)
    approve(first, approver=ben)
    with pytest.raises(ConfigurationConflict):
        approve(second, approver=ben)
    third = ask(4)
    # Behind the service's back, as far as the history knows.
    Budget.objects.filter(pk=budget.pk).update(limit=9)
    with pytest.raises(ConfigurationConflict):
        approve(third, approver=ben)
    fourth = ask(5)
    budget.delete()
    with pytest.raises(ConfigurationConflict):
        approve(fourth, approver=ben)
    assert set(PendingChange.objects.values_list("status", flat=True)) == {"approved", "waiting"}
    with pytest.raises(NotPermitted, match="already"):
        approve(first, approver=ben)


def test_what_contradicts_what_is_stored_by_now_is_told(settings: Any) -> None:
    settings.TWO_PERSON_RULE = True
    ann, ben = User.objects.create_superuser("ann"), User.objects.create_superuser("ben")
    _, (waiting,) = carry_out(ann, lambda: Tenant.objects.create(slug="acme", name="A"))
    Tenant.objects.create(slug="acme", name="B")
    with pytest.raises(InvalidConfiguration):
        approve(waiting, approver=ben)
    waiting.refresh_from_db()
    assert waiting.status == "waiting"


def test_a_password_changed_meanwhile_is_not_set_back(settings: Any) -> None:
    settings.TWO_PERSON_RULE = True
    ann, ben = User.objects.create_superuser("ann"), User.objects.create_superuser("ben")
    ada = User.objects.create_user("ada", password="old")

    def write() -> None:
        ada.is_staff = True
        ada.save()

    _, (waiting,) = carry_out(ann, write)
    fresh = User.objects.get(pk=ada.pk)
    fresh.set_password("new")
    fresh.save()
    approve(waiting, approver=ben)
    fresh.refresh_from_db()
    assert fresh.is_staff
    assert fresh.check_password("new")


def test_a_provider_that_goes_takes_its_steps_into_the_history() -> None:
    from providers.models import ProviderConfig
    from providers.services import request_change

    route = Route.objects.create()
    RouteStep.objects.create(route=route, provider=ProviderConfig.objects.get())
    request_change("probe", PendingChange.Action.REMOVE, author="user:ann")
    versions = ConfigVersion.objects.filter(subject=f"providers.route:{route.pk}")
    assert [len(history.config_of(v)["steps"]) for v in versions.order_by("version")] == [1, 0]
    with pytest.raises(InvalidConfiguration, match="ProviderConfig"):
        restore(User.objects.create_superuser("ann"), versions.earliest("version"))


def test_versions_of_accounts_are_for_those_who_may_see_accounts() -> None:
    ann = User.objects.create_superuser("ann")
    carry_out(ann, lambda: Group.objects.create(name="Clerks"))
    version = ConfigVersion.objects.latest("pk")
    clerk = User.objects.create_user("clerk", is_staff=True)
    clerk.user_permissions.add(Permission.objects.get(codename="view_configversion"))
    client = Client()
    client.force_login(clerk)
    for path in (f"{version.pk}/change/", f"compare/{version.pk}/{version.pk}/"):
        answer = client.get(f"/admin/providers/configversion/{path}")
        assert answer.status_code in (302, 404), path
    assert "Clerks" not in client.get("/admin/providers/configversion/").content.decode()
    assert client.post(f"/admin/providers/configversion/{version.pk}/restore/").status_code == 403
