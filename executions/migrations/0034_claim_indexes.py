from django.db import migrations, models

from executions.online import AddIndexOnline


class Migration(migrations.Migration):

    # What is done online cannot be within a transaction.
    atomic = False

    dependencies = [
        ('executions', '0033_claims'),
    ]

    operations = [
        AddIndexOnline(
            model_name='execution',
            index=models.Index(condition=models.Q((f'{name}__isnull', False)), fields=[name, 'tenant', '-id'], name=f'execution_{name}'),
        )
        for name in ('agent', 'model', 'conversation', 'on_behalf_of', 'trace_id')
    ]
