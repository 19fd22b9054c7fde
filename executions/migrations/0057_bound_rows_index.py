import json

from django.db import migrations, models

from executions.online import AddIndexOnline

_AT_ONCE = 500


def fill(apps, schema_editor):
    """Each few in a transaction of its own. What the former version adds meanwhile is filled in
    by `last_entries.fill`."""
    entries = apps.get_model('executions', 'LedgerEntry')._default_manager.using(
        schema_editor.connection.alias
    )
    unfilled = entries.filter(execution_id=None, bound_row=None).order_by('sequence')
    after = 0
    while chunk := list(unfilled.filter(sequence__gt=after)[:_AT_ONCE]):
        for entry in chunk:
            entry.bound_row = _row(entry.statement)
        entries.bulk_update(chunk, ['bound_row'])
        after = chunk[-1].sequence


def _row(statement):
    try:
        stated = json.loads(statement)
        return f'{stated["model"]} {stated["row"]}'[:100] if 'row_hash' in stated else ''
    except (ValueError, TypeError, KeyError):
        # It is not what was signed, which `verify_ledger` tells.
        return ''


class Migration(migrations.Migration):

    # What is done online cannot be within a transaction.
    atomic = False

    dependencies = [
        ('executions', '0057_bound_rows'),
    ]

    operations = [
        AddIndexOnline(
            model_name='ledgerentry',
            index=models.Index(condition=models.Q(('bound_row__isnull', False)), fields=['bound_row', 'sequence'], name='ledger_bound_row'),
        ),
        AddIndexOnline(
            model_name='ledgerentry',
            index=models.Index(condition=models.Q(('bound_row', None), ('execution_id', None)), fields=['bound_row', 'execution_id', 'sequence'], name='ledger_unfilled'),
        ),
        migrations.RunPython(fill, migrations.RunPython.noop, elidable=True),
    ]
