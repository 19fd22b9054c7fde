from django.db import migrations, models

from executions.online import AddIndexOnline


class Migration(migrations.Migration):

    # What is done online cannot be within a transaction.
    atomic = False

    dependencies = [
        ('executions', '0040_observed'),
    ]

    operations = [
        AddIndexOnline(
            model_name='execution',
            index=models.Index(condition=models.Q(('observed__isnull', False)), fields=['-id'], name='execution_observed'),
        ),
    ]
