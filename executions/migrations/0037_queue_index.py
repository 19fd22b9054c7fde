from django.db import migrations, models

from executions.online import AddIndexOnline, RemoveIndexOnline


class Migration(migrations.Migration):

    # What is done online cannot be within a transaction.
    atomic = False

    dependencies = [
        ('executions', '0036_priority'),
    ]

    operations = [
        AddIndexOnline(
            model_name='execution',
            index=models.Index(condition=models.Q(('finished_at', None)), fields=['tenant_slug', 'status', 'priority', 'id', 'finished_at', 'timeout'], name='execution_queue'),
        ),
        # The one before serves nothing that this one does not.
        RemoveIndexOnline(
            model_name='execution',
            name='execution_open_of_tenant',
        ),
        # With all that is asked of what runs in the background, so that SQLite takes no other one.
        AddIndexOnline(
            model_name='execution',
            index=models.Index(condition=models.Q(('background', True), ('finished_at', None)), fields=['tenant_slug', 'background', 'finished_at'], name='execution_in_background'),
        ),
        RemoveIndexOnline(
            model_name='execution',
            name='execution_background',
        ),
    ]
