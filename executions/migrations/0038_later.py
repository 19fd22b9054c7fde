from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('executions', '0037_queue_index'),
    ]

    operations = [
        migrations.AddField(
            model_name='execution',
            name='run_at',
            field=models.DateTimeField(help_text='What is queued is not taken before; null where it was not asked for.', null=True),
        ),
        migrations.AddField(
            model_name='webhookdelivery',
            name='event',
            field=models.CharField(choices=[('execution.finished', 'The end'), ('execution.waiting_for_approval', 'An approval is waited for')], db_default='execution.finished', default='execution.finished', max_length=32),
        ),
        migrations.AddConstraint(
            model_name='webhookdelivery',
            constraint=models.CheckConstraint(condition=models.Q(('event', 'execution.finished'), models.Q(('event', 'execution.waiting_for_approval'), ('state', 'due')), _connector='OR'), name='webhook_event_is_known'),
        ),
    ]
