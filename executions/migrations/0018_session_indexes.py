from django.db import migrations, models

from executions.online import AddIndexOnline


class Migration(migrations.Migration):

    # What is done online cannot be within a transaction.
    atomic = False

    dependencies = [
        ('executions', '0017_sessions'),
    ]

    operations = [
        AddIndexOnline(
            model_name='execution',
            index=models.Index(condition=models.Q(('session__isnull', False)), fields=['session', '-id'], name='execution_session'),
        ),
        AddIndexOnline(
            model_name='execution',
            index=models.Index(condition=models.Q(('finished_at', None), ('session__isnull', False)), fields=['session', 'context', 'turn'], name='execution_open_of_session'),
        ),
        AddIndexOnline(
            model_name='execution',
            index=models.Index(condition=models.Q(('background', True), ('finished_at', None)), fields=['tenant_slug'], name='execution_background'),
        ),
    ]
