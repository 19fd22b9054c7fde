"""Migrations hold while the version before them is still serving, and lock out nobody for long.

A rolling upgrade migrates first and restarts afterwards: see docs/upgrading.md. What is demanded
here is demanded of every migration after the first of each app.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from django.db import connection, migrations, models
from django.db.migrations.loader import MigrationLoader
from django.db.migrations.migration import Migration
from django.db.migrations.operations.base import Operation
from django.db.migrations.state import ProjectState
from django.utils import timezone

from executions.kernel.database import AddIndexOnline

pytestmark = pytest.mark.database

EARLIER = dict.fromkeys(("executions", "providers", "sandbox_site"), "0001_initial")
# What grows with every execution: a scan of it takes long.
LARGE = {"execution", "artifact", "ledgerentry", "codetext"}
# Fields and models that the version before a migration does not use any more: "app.name: why".
UNUSED_BEFORE: dict[str, str] = {}

_REMOVING = (
    migrations.RemoveField,
    migrations.RenameField,
    migrations.DeleteModel,
    migrations.RenameModel,
    migrations.AlterModelTable,
)


def problems(migration: Migration, state: ProjectState) -> Iterator[str]:
    """Why the version before it, or its users, would suffer from it."""
    state = state.clone()
    made = set()
    for operation in migration.operations:
        for reason in _problems_of(operation, migration, state, made):
            yield f"{migration}: {operation.describe()}: {reason}"
        operation.state_forwards(migration.app_label, state)
        if isinstance(operation, migrations.CreateModel):
            made.add(operation.name_lower)


def _problems_of(
    operation: Operation, migration: Migration, state: ProjectState, made: set[str]
) -> Iterator[str]:
    model = str(getattr(operation, "model_name", getattr(operation, "name", ""))).lower()
    if model in made:
        return
    if isinstance(operation, _REMOVING):
        if f"{migration.app_label}.{migration.name}" not in UNUSED_BEFORE:
            yield "the version before it still uses that; remove it one release later"
    elif isinstance(operation, migrations.AddField):
        field = operation.field
        if not (field.null or field.has_db_default() or field.many_to_many):
            yield "rows of the version before it have no value: null or db_default"
        if model in LARGE and (field.unique or field.db_index):
            yield "its index locks a large table; add it by AddIndexOnline"
    elif isinstance(operation, migrations.AlterField):
        before = state.models[migration.app_label, model].fields[operation.name].clone()
        after = operation.field.clone()
        for field in (before, after):
            field.set_attributes_from_name(operation.name)
        if connection.schema_editor()._field_should_be_altered(before, after):
            yield "a column changes below the version before it; add another one"
    elif isinstance(operation, migrations.AddIndex):
        if model in LARGE and not isinstance(operation, AddIndexOnline):
            yield "it locks out writers of a large table; AddIndexOnline does not"
    elif isinstance(operation, migrations.AddConstraint) and model in LARGE:
        yield "it reads a large table while nobody may write to it"


def test_no_migration_breaks_the_version_before_it_or_locks_it_out() -> None:
    loader = MigrationLoader(None)
    found = [
        problem
        for (app, name), migration in sorted(loader.disk_migrations.items())
        if app in EARLIER and name > EARLIER[app]
        for problem in problems(migration, loader.project_state((app, name), at_end=False))
    ]
    assert found == []


def step(*operations: Operation) -> Migration:
    migration = Migration("9999_next", "executions")
    migration.operations = list(operations)
    return migration


@pytest.mark.parametrize(
    ("operation", "reason"),
    [
        (migrations.RemoveField("tenant", "name"), "still uses"),
        (migrations.RenameField("tenant", "name", "title"), "still uses"),
        (migrations.DeleteModel("SavedFilter"), "still uses"),
        (migrations.RenameModel("Tenant", "Customer"), "still uses"),
        (migrations.AddField("tenant", "more", models.TextField(default="")), "db_default"),
        (migrations.AddField("tenant", "more", models.TextField()), "db_default"),
        (
            migrations.AddField("execution", "more", models.IntegerField(null=True, db_index=True)),
            "its index",
        ),
        (migrations.AlterField("execution", "exit_code", models.TextField()), "a column changes"),
        (
            migrations.AddIndex("execution", models.Index(fields=["exit_code"], name="more")),
            "AddIndexOnline",
        ),
        (
            migrations.AddConstraint(
                "execution",
                models.CheckConstraint(condition=models.Q(exit_code__lt=999), name="more"),
            ),
            "nobody may write",
        ),
    ],
)
def test_what_breaks_it_is_told(operation: Operation, reason: str) -> None:
    state = MigrationLoader(None).project_state()
    (found,) = problems(step(operation), state)
    assert reason in found


@pytest.mark.parametrize(
    "operation",
    [
        migrations.AddField("execution", "more", models.IntegerField(null=True)),
        migrations.AddField("tenant", "more", models.TextField(default="", db_default="")),
        AddIndexOnline("execution", models.Index(fields=["exit_code"], name="more")),
        migrations.AddIndex("tenant", models.Index(fields=["name"], name="more")),
        migrations.AlterField("tenant", "name", models.CharField(max_length=200, help_text="?")),
    ],
)
def test_what_does_not_is_passed(operation: Operation) -> None:
    assert list(problems(step(operation), MigrationLoader(None).project_state())) == []


@pytest.mark.django_db
def test_the_models_of_the_version_before_write_to_the_tables_of_this_one() -> None:
    """By Django's historical models, which know the columns there were, and no others."""
    loader = MigrationLoader(None)
    earlier = loader.project_state(list(EARLIER.items())).apps
    now = timezone.now()

    def made(app: str, model: str, **values: Any) -> Any:
        row = earlier.get_model(app, model).objects.create(**values)
        row.save()
        return earlier.get_model(app, model).objects.get(pk=row.pk)

    tenant = made("executions", "Tenant", slug="before", name="Before")
    made("executions", "ApiKey", tenant=tenant, name="k", prefix="cfd_123456", key_hash="h" * 64)
    execution = made(
        "executions",
        "Execution",
        tenant=tenant,
        tenant_slug="before",
        language="python",
        mode="async",
        status="queued",
        timeout=1,
        created_at=now,
        deadline=now,
        code_hash="sha256:" + "0" * 64,
    )
    made("executions", "Statistic", kind="tenant", name="before", hour=now, count=1)
    made("executions", "Budget", tenant_slug="before", limit=1)
    made("providers", "ProviderConfig", provider_id="before", config={})
    made("providers", "CircuitBreaker", provider_id="before")
    made("providers", "Route", owner="before")
    assert execution.status == "queued"


@pytest.mark.django_db(transaction=True)
def test_an_index_is_made_and_unmade_while_the_table_is_in_use() -> None:
    operation = AddIndexOnline("execution", models.Index(fields=["exit_code"], name="online"))
    state = MigrationLoader(connection).project_state()
    after = state.clone()
    operation.state_forwards("executions", after)

    def exists() -> bool:
        with connection.cursor() as cursor:
            table = "executions_execution"
            return "online" in connection.introspection.get_constraints(cursor, table)

    for _ in range(2):  # as after one that was broken off
        with connection.schema_editor(atomic=connection.vendor == "sqlite") as editor:
            if connection.vendor == "sqlite" and exists():
                break
            operation.database_forwards("executions", editor, state, after)
        assert exists()
    with connection.schema_editor() as editor:
        operation.database_backwards("executions", editor, after, state)
    assert not exists()
