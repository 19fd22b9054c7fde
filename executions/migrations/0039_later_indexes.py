from django.db import migrations, models

from executions.online import AddIndexOnline, RemoveIndexOnline


class Migration(migrations.Migration):

    # What is done online cannot be within a transaction.
    atomic = False

    dependencies = [
        ('executions', '0038_later'),
    ]

    operations = [
        AddIndexOnline(
            model_name='execution',
            index=models.Index(condition=models.Q(('finished_at', None)), fields=['tenant_slug', 'status', 'priority', 'id', 'run_at', 'finished_at', 'timeout'], name='execution_open'),
        ),
        AddIndexOnline(
            model_name='execution',
            index=models.Index(condition=models.Q(('schedule_id__isnull', False)), fields=['schedule_id', 'tenant', '-id'], name='execution_schedule'),
        ),
        # The one before serves nothing that this one does not.
        RemoveIndexOnline(
            model_name='execution',
            name='execution_queue',
        ),
    ]
