from django.db import migrations, models

from executions.online import AddIndexOnline


class Migration(migrations.Migration):

    # What is done online cannot be within a transaction.
    atomic = False

    dependencies = [
        ('executions', '0041_observed_index'),
    ]

    operations = [
        AddIndexOnline(
            model_name='execution',
            index=models.Index(condition=models.Q(('run_at__isnull', False)), fields=['run_at'], name='execution_run_at'),
        ),
    ]
