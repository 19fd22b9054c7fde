"""Whoever can write to the database changes a record, a row or a file: it shows, column by column."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from decimal import Decimal
from itertools import zip_longest
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
from django.apps import apps
from django.contrib import admin
from django.contrib.auth import get_user_model
from django.contrib.auth.models import Group, Permission
from django.contrib.contenttypes.models import ContentType
from django.db import IntegrityError, connection, models, transaction

from executions.capabilities.playground.service import replay_sync
from executions.ledger.append import record_baseline
from executions.ledger.bindings import BINDINGS, NOT_PROVEN, columns_of, model_of
from executions.ledger.models import LedgerEntry
from executions.ledger.verification import verify
from executions.runs.models import Artifact, Execution
from executions.tenants.models import Tenant
from providers.fields import EncryptedTextField
from providers.guarded import guarded_row, values_of, write
from providers.models import Route
from tests.conftest import Caller
from tests.support.processes import ROOT

pytestmark = pytest.mark.one_database


def sql(statement: str, *values: Any) -> None:
    with connection.cursor() as cursor:
        cursor.execute(statement, values)


def without_checks() -> None:
    """Nobody who can write to the database's files, or owns its tables, is held by constraints.

    SQLite's are passed over in `undone`.
    """
    if connection.vendor != "postgresql":
        return
    sql("SET CONSTRAINTS ALL IMMEDIATE")
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT conrelid::regclass, conname FROM pg_constraint"
            " WHERE contype = 'c' AND connamespace = 'public'::regnamespace"
        )
        for table, constraint in cursor.fetchall():
            cursor.execute(f'ALTER TABLE {table} DROP CONSTRAINT "{constraint}"')
    sql("SET CONSTRAINTS ALL DEFERRED")


@contextmanager
def undone() -> Iterator[None]:
    """What is done within it is rolled back."""
    with transaction.atomic():
        if connection.vendor == "sqlite":
            sql("PRAGMA ignore_check_constraints = ON")
        yield
        transaction.set_rollback(True)
    if connection.vendor == "sqlite":
        sql("PRAGMA ignore_check_constraints = OFF")


def other(column: Any, value: Any) -> Any:
    """Something else that this column could hold, as the database takes it."""
    if isinstance(column, EncryptedTextField):
        return column.get_db_prep_save({"config": {"pool_size": 9}, "salt": "0"}, connection)
    if isinstance(column, models.JSONField):
        return '{"forged": 1}'
    if column.choices:
        return next(key for key, _ in column.choices if key != value)
    if isinstance(column, models.ForeignKey):
        target = column.related_model._base_manager.exclude(pk=value).values_list("pk", flat=True)
        found = target.first()
        if found is None and not column.null:
            return int(value) + 777
        return found.hex if isinstance(found, UUID) and connection.vendor == "sqlite" else found
    if isinstance(column, models.UUIDField):
        return uuid4().hex if connection.vendor == "sqlite" else uuid4()
    if isinstance(column, models.BooleanField):
        return not value
    if isinstance(column, models.DateTimeField):
        moved = (value or Execution.objects.all()[0].created_at) + timedelta(days=1)
        return connection.ops.adapt_datetimefield_value(moved)
    if isinstance(column, models.DecimalField):
        return str((value or Decimal(0)) + 1)
    if isinstance(column, (models.IntegerField, models.AutoField, models.FloatField)):
        return (value or 0) + 777
    text = str(value or "")
    if column.max_length and len(text) >= column.max_length:
        return text[:-1] + ("y" if text.endswith("x") else "x")
    return text + "x"


def change(model: type[models.Model], column: Any, row: models.Model) -> bool:
    """Whether it could be changed; not where another row has that value, and only one may."""
    value = None if isinstance(column, EncryptedTextField) else getattr(row, column.attname)
    pk = row.pk.hex if isinstance(row.pk, UUID) and connection.vendor == "sqlite" else row.pk
    update = f'UPDATE {model._meta.db_table} SET "{column.column}" = %s'
    try:
        with transaction.atomic():
            sql(f'{update} WHERE "{model._meta.pk.column}" = %s', other(column, value), pk)
    except IntegrityError:
        return False
    return True


def columns_bound(model: type[models.Model]) -> list[Any]:
    """Generated from the model: a new column is bound, or it has its reason in NOT_PROVEN."""
    unproven = NOT_PROVEN.get(model._meta.label_lower, {})
    return [each for each in model._meta.concrete_fields if each.attname not in unproven]


@pytest.mark.django_db
def test_every_bound_column_of_every_row_that_is_entered_shows(everything: None) -> None:
    """One column of every model at a time: what is found names the row."""
    without_checks()
    bound = [model for label in BINDINGS if (model := model_of(label)) is not None]
    assert len(bound) == len(BINDINGS)
    rows = {model: list(model._base_manager.order_by("pk")) for model in bound}
    assert [model for model in bound if not rows[model]] == []
    missed, tried = [], 0
    for columns in zip_longest(*map(columns_bound, bound)):
        with undone():
            changed = [
                (f"{model._meta.label_lower} {row.pk} ", column)
                for model, column in zip(bound, columns, strict=True)
                if column is not None
                for row in next(
                    ([row] for row in reversed(rows[model]) if change(model, column, row)), []
                )
            ]
            details = [finding.detail for finding in verify().findings]
        tried += len(changed)
        missed += [
            f"{row}{column.attname}"
            for row, column in changed
            if not any(detail.startswith(row) for detail in details)
        ]
    assert missed == []
    assert tried == sum(map(len, map(columns_bound, bound)))


@pytest.mark.django_db
def test_every_bound_column_of_an_execution_shows(everything: None) -> None:
    """One column of each of some alike, at a time: what is found names the execution."""
    without_checks()
    # A replay has a value in every column.
    original = Execution.objects.get(replay_of__isnull=False).replay_of
    assert original is not None
    alike = [replay_sync(original).execution for _ in range(8)]
    columns, missed = columns_bound(Execution), []
    for start in range(0, len(columns), len(alike)):
        with undone():
            changed = list(zip(alike, columns[start : start + len(alike)], strict=False))
            missed += [
                f"{column.attname} was not changed"
                for row, column in changed
                if not change(Execution, column, row)
            ]
            details = [finding.detail for finding in verify().findings]
        missed += [
            column.attname
            for row, column in changed
            if not any(str(row.pk) in detail for detail in details)
        ]
    assert missed == []


@pytest.mark.django_db
@pytest.mark.parametrize("model", [Artifact, LedgerEntry])
def test_every_bound_column_of_a_record_shows(everything: None, model: type[models.Model]) -> None:
    without_checks()
    rows = list(model._base_manager.order_by("pk"))
    if model is LedgerEntry:
        # That of the replay, which has a value in every column.
        replayed = Execution.objects.get(replay_of__isnull=False).pk
        rows = [row for row in rows if row.execution_id == replayed]
    missed = []
    for column in columns_bound(model):
        with undone():
            if not change(model, column, rows[-1]) and not change(model, column, rows[0]):
                missed.append(f"{column.attname} was not changed")
            elif verify().is_intact:
                missed.append(column.attname)
    assert missed == []


def twin_of(row: Any) -> Any:
    """Another row like this one, which no other one contradicts."""
    twin = copy.copy(row)
    for column in row._meta.concrete_fields:
        if column.unique or isinstance(column, models.CharField):
            value = other(column, getattr(row, column.attname)) if not column.choices else None
            if value is not None:
                setattr(twin, column.attname, value)
    if hasattr(twin, "version"):
        twin.version += 100
    if hasattr(twin, "number"):
        twin.number += 100
    if row._meta.label_lower == "providers.providerconfig":
        twin.is_active = False
    twin.pk = None
    return twin


@pytest.mark.django_db
def test_every_row_that_is_removed_or_added_shows(everything: None) -> None:
    without_checks()
    for label in BINDINGS:
        model = model_of(label)
        assert model is not None
        row = model._base_manager.order_by("pk").first()
        assert row is not None
        with undone():
            model._base_manager.filter(pk=row.pk)._raw_delete("default")
            assert any("was removed" in finding.detail for finding in verify().findings), label
        with undone():
            if label == "providers.routestep":
                continue
            model._base_manager.bulk_create([twin_of(row)])
            assert any("outside the service" in finding.detail for finding in verify().findings), (
                label
            )


@pytest.mark.django_db
def test_who_is_in_a_role_and_what_it_may_shows(everything: None) -> None:
    user, group = get_user_model().objects.get(username="dora"), Group.objects.get(name="Inspector")
    member, may = type(user).groups.through, Group.permissions.through
    permission = Permission.objects.order_by("pk")[5]
    held = Permission.objects.order_by("pk")[1]
    administrators = Group.objects.exclude(pk=group.pk).order_by("name")[0]
    attacks: list[Callable[[], Any]] = [
        lambda: member._default_manager.bulk_create(
            [member(user_id=user.pk, group_id=administrators.pk)]
        ),
        lambda: member._default_manager.filter(user_id=user.pk)._raw_delete("default"),
        lambda: may._default_manager.bulk_create(
            [may(group_id=group.pk, permission_id=permission.pk)]
        ),
        # The permission that somebody holds becomes another one.
        lambda: Permission.objects.filter(pk=held.pk).update(codename="forged"),
        lambda: ContentType.objects.filter(pk=held.content_type_id).update(model="forged"),
        lambda: Group.objects.filter(pk=group.pk).update(name="Administrator2"),
    ]
    for attack in attacks:
        with undone():
            attack()
            assert not verify().is_intact


@pytest.mark.django_db
def test_a_role_that_is_deleted_honestly_leaves_the_ledger_intact(everything: None) -> None:
    Group.objects.get(name="Inspector").delete()
    assert [str(finding) for finding in verify().findings] == []
    Permission.objects.order_by("pk")[0].delete()
    get_user_model().objects.all().delete()
    Route.objects.all().delete()
    Tenant.objects.filter(slug="elsewhere").delete()
    assert [str(finding) for finding in verify().findings] == []


@pytest.mark.django_db
def test_a_tenant_that_is_removed_and_brought_back_leaves_the_ledger_intact(
    everything: None,
) -> None:
    tenant = Tenant.objects.get(slug="elsewhere")
    kind, _ = guarded_row(tenant) or (None, None)
    assert kind is not None
    pk, values = str(tenant.pk), values_of(kind, tenant)
    tenant.delete()
    write(kind, pk, values or {})
    assert Tenant.objects.get(slug="elsewhere").pk == int(pk)
    assert [str(finding) for finding in verify().findings] == []


def test_every_model_on_a_page_is_bound_or_named_as_not_proven() -> None:
    decided = {*BINDINGS, *NOT_PROVEN, "executions.artifact", "executions.ledgerentry"}
    ours = {
        model._meta.concrete_model._meta.label_lower
        for app in ("executions", "providers")
        for model in apps.get_app_config(app).get_models()
    }
    shown = {model._meta.concrete_model._meta.label_lower for model in admin.site._registry}
    assert ours | shown <= decided
    for label, columns in NOT_PROVEN.items():
        model = model_of(label)
        assert model is not None, label
        names = {column.attname for column in model._meta.concrete_fields}
        assert set(columns) <= names | {"*"}
        assert not set(columns) & set(columns_of(model) if label in BINDINGS else ())


def test_the_docs_name_what_is_not_proven_and_why() -> None:
    text = " ".join((ROOT / "docs" / "ledger.md").read_text().split())
    for label, columns in NOT_PROVEN.items():
        for column, reason in columns.items():
            named = f"`{label}`" if column == "*" else f"`{label}.{column}`"
            assert named in text, named
            assert reason in text, reason


@pytest.mark.django_db
def test_an_execution_moved_to_another_tenant_or_key_shows(
    everything: None, alice: Caller, charlie: Caller
) -> None:
    ours = Execution.objects.filter(tenant=alice.tenant)
    for values in (
        {"tenant": charlie.tenant},
        {"tenant": None},
        {"api_key": charlie.api_key},
        {"api_key": None},
        {"tenant": charlie.tenant, "tenant_slug": "elsewhere"},
    ):
        with undone():
            ours.update(**values)
            assert not verify().is_intact, values


@pytest.mark.django_db
def test_replaced_bytes_of_an_artifact_show(everything: None) -> None:
    artifact = Artifact.objects.all()[0]
    path = Path(artifact.file.path)
    honest = path.read_bytes()
    try:
        path.write_bytes(b"forgery")
        (finding,) = verify().findings
        assert "were replaced" in finding.detail
        assert verify(artifact_bytes=False).is_intact
        path.unlink()
        assert "cannot be read" in verify().findings[0].detail
    finally:
        path.write_bytes(honest)
    with undone():
        Artifact.objects.filter(pk=artifact.pk).update(file="../../secrets.env")
        assert "outside the data directory" in verify().findings[0].detail


@pytest.mark.django_db
@pytest.mark.parametrize("years", [0, 20])
def test_a_made_up_run_shows_whenever_it_claims_to_have_been(everything: None, years: int) -> None:
    made_up = _made_up()
    for name in ("created_at", "started_at", "finished_at"):
        setattr(made_up, name, getattr(made_up, name) - timedelta(days=365 * years))
    Execution.objects.bulk_create([made_up])
    (finding,) = verify().findings
    assert (finding.kind, str(made_up.pk) in finding.detail) == ("missing", True)
    # Starting anew does not launder it.
    record_baseline()
    assert not verify().is_intact


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("column", "value"), [("finished_at", None), ("status", Execution.Status.RUNNING)]
)
@pytest.mark.parametrize("has_taken_stock", [True, False])
def test_a_made_up_run_shows_that_ended_in_one_of_its_columns_alone(
    everything: None, column: str, value: Any, has_taken_stock: bool
) -> None:
    without_checks()
    with undone():
        if not has_taken_stock:
            LedgerEntry.objects.filter(kind="baseline").delete()
        made_up = _made_up()
        setattr(made_up, column, value)
        Execution.objects.bulk_create([made_up])
        assert any(str(made_up.pk) in finding.detail for finding in verify().findings)


@pytest.mark.django_db
def test_a_made_up_run_that_borrows_an_entry_of_another_kind_shows(everything: None) -> None:
    without_checks()
    with undone():
        made_up = _made_up()
        Execution.objects.bulk_create([made_up])
        lent = LedgerEntry.objects.filter(kind="tenant")[0]
        LedgerEntry.objects.filter(pk=lent.pk).update(execution_id=made_up.pk)
        found = {(finding.kind, finding.sequence): finding.detail for finding in verify().findings}
        assert "execution_id" in found["altered", lent.sequence]
        assert any(kind == "missing" and str(made_up.pk) in found[kind, at] for kind, at in found)


@pytest.mark.django_db
def test_a_row_added_behind_our_back_is_not_laundered_by_the_next_release(
    everything: None, alice: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which binds one more column of its model, so that the rows of it are entered anew."""
    ours = {"model": "executions.apikey", "row": str(alice.api_key.pk)}
    twin = copy.copy(alice.api_key)
    twin.pk, twin.prefix, twin.key_hash = None, "forged", "0" * 64
    type(twin)._base_manager.bulk_create([twin])
    monkeypatch.setitem(NOT_PROVEN, "executions.apikey", {})
    assert record_baseline() > 0
    entered = LedgerEntry.objects.filter(kind="api_key").order_by("-sequence")
    last = next(each.stated for each in entered if ours.items() <= each.stated.items())
    assert "last_used_at" in last["columns"]
    (finding,) = verify().findings
    assert (finding.kind, "outside the service" in finding.detail) == ("missing", True)


def _made_up() -> Execution:
    made_up = Execution.objects.filter(status="succeeded")[0]
    made_up.pk, made_up.idempotency_key = uuid4(), None
    return made_up
