"""Migrations that change a large table while a service is writing to it."""

from __future__ import annotations

from typing import Any

from django.db import NotSupportedError
from django.db.backends.base.schema import BaseDatabaseSchemaEditor
from django.db.migrations import AddIndex, RemoveIndex
from django.db.migrations.state import ProjectState
from django.db.models import Index


class RemoveIndexOnline(RemoveIndex):
    """RemoveIndex that locks out nobody on PostgreSQL, where it needs `atomic = False`."""

    def database_forwards(
        self,
        app_label: str,
        schema_editor: BaseDatabaseSchemaEditor,
        from_state: ProjectState,
        to_state: ProjectState,
    ) -> None:
        if schema_editor.connection.vendor != "postgresql":
            super().database_forwards(app_label, schema_editor, from_state, to_state)
            return
        model = from_state.apps.get_model(app_label, self.model_name)
        if self.allow_migrate_model(schema_editor.connection.alias, model):
            index = from_state.models[app_label, self.model_name_lower].get_index_by_name(self.name)
            editor: Any = schema_editor
            editor.remove_index(model, index, concurrently=True)


class AddIndexOnline(AddIndex):
    """AddIndex that locks out nobody on PostgreSQL, where it needs `atomic = False`.

    One that was broken off there leaves an index that serves nothing; it is made anew.
    """

    def __init__(self, model_name: str, index: Index) -> None:
        super().__init__(model_name, index)

    def database_forwards(
        self,
        app_label: str,
        schema_editor: BaseDatabaseSchemaEditor,
        from_state: ProjectState,
        to_state: ProjectState,
    ) -> None:
        if schema_editor.connection.vendor != "postgresql":
            super().database_forwards(app_label, schema_editor, from_state, to_state)
            return
        if schema_editor.connection.in_atomic_block:
            raise NotSupportedError(
                f"{self.index.name}: a migration of AddIndexOnline is not atomic."
            )
        model = to_state.apps.get_model(app_label, self.model_name)
        if self.allow_migrate_model(schema_editor.connection.alias, model):
            editor: Any = schema_editor
            editor.remove_index(model, self.index, concurrently=True)
            editor.add_index(model, self.index, concurrently=True)
