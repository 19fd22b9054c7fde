from django.db import migrations, models

from executions.online import AddIndexOnline


class Migration(migrations.Migration):

    # What is done online cannot be within a transaction.
    atomic = False

    dependencies = [
        ('executions', '0046_lists'),
    ]

    operations = [
        AddIndexOnline(
            model_name='execution',
            index=models.Index(fields=['api_key_prefix', '-id'], name='execution_key'),
        ),
        AddIndexOnline(
            model_name='execution',
            index=models.Index(condition=models.Q(('exit_code__isnull', False)), fields=['exit_code', '-id'], name='execution_exit_code'),
        ),
        AddIndexOnline(
            model_name='execution',
            index=models.Index(condition=models.Q(('replay_of__isnull', False)), fields=['-id'], name='execution_replays'),
        ),
    ]
