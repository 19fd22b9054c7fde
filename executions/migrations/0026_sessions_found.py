from django.db import migrations, models

from executions.online import AddIndexOnline


class Migration(migrations.Migration):

    # What is done online cannot be within a transaction.
    atomic = False

    dependencies = [
        ('executions', '0025_owners_of_openings'),
    ]

    operations = [
        AddIndexOnline(
            model_name='session',
            index=models.Index(condition=models.Q(('conversation', ''), _negated=True), fields=['tenant', 'conversation', '-id'], name='session_of_conversation'),
        ),
        AddIndexOnline(
            model_name='session',
            index=models.Index(condition=models.Q(('process__isnull', False)), fields=['process'], name='session_process'),
        ),
    ]
