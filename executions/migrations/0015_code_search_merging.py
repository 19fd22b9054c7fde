from django.db import migrations

_TABLE = "executions_codetext_fts"


def merge_by_hand(apps, schema_editor):
    """SQLite's index merges itself while it is written, now and then for a second, under the
    database's one lock. The workers do it instead, a few pages at a time."""
    _set(schema_editor, automerge=0, crisismerge=1999)


def merge_by_itself(apps, schema_editor):
    _set(schema_editor, automerge=4, crisismerge=16)


def _set(schema_editor, **options):
    if schema_editor.connection.vendor == "sqlite":
        for name, value in options.items():
            schema_editor.execute(
                f"INSERT INTO {_TABLE} ({_TABLE}, rank) VALUES (%s, %s)", [name, value]
            )


class Migration(migrations.Migration):
    dependencies = [("executions", "0014_late_results")]

    operations = [migrations.RunPython(merge_by_hand, merge_by_itself)]
