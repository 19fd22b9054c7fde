from django.db import migrations, models

from executions.online import AddIndexOnline, RemoveIndexOnline


class Migration(migrations.Migration):

    # What is done online cannot be within a transaction.
    atomic = False

    dependencies = [
        ('executions', '0048_mailed_alerts'),
    ]

    operations = [
        AddIndexOnline(
            model_name='execution',
            index=models.Index(condition=models.Q(('finished_at', None)), fields=['tenant_slug', 'status', 'run_at', 'priority', 'id', 'finished_at', 'timeout'], name='execution_open_by_time'),
        ),
        # The one before is ordered by priority first: the former version sorts without it.
        RemoveIndexOnline(
            model_name='execution',
            name='execution_open',
        ),
    ]
