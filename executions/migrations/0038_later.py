import django.core.validators
import django.db.models.deletion
import django.utils.timezone
from django.db import migrations, models

import executions.ids
import providers.fields


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
            model_name='execution',
            name='schedule_id',
            field=models.UUIDField(help_text='Which has begun it; that may be gone since.', null=True, verbose_name='schedule'),
        ),
        migrations.AddField(
            model_name='tenant',
            name='max_schedules',
            field=models.PositiveIntegerField(blank=True, help_text='Those that are paused, too. Beyond it requests are refused with SB008. Empty is as the installation has it.', null=True, validators=[django.core.validators.MaxValueValidator(10000)], verbose_name='most schedules'),
        ),
        migrations.CreateModel(
            name='Schedule',
            fields=[
                ('id', models.UUIDField(default=executions.ids.uuid7, editable=False, primary_key=True, serialize=False)),
                ('api_key_prefix', models.CharField(max_length=16)),
                ('name', models.CharField(max_length=100)),
                ('cron', models.CharField(help_text='Minute, hour, day, month, day of the week.', max_length=100)),
                ('timezone', models.CharField(max_length=64)),
                ('request', providers.fields.EncryptedJSONField(editable=False)),
                ('language', models.CharField(max_length=32)),
                ('code_hash', models.CharField(max_length=71)),
                ('paused_because', models.CharField(blank=True, db_default='', default='', max_length=200)),
                ('next_at', models.DateTimeField(null=True)),
                ('last_at', models.DateTimeField(help_text='When it has begun an execution last.', null=True)),
                ('last_problem', models.CharField(blank=True, db_default='', default='', help_text='Why one was left out.', max_length=300)),
                ('created_at', models.DateTimeField(default=django.utils.timezone.now, editable=False)),
                ('api_key', models.ForeignKey(null=True, on_delete=django.db.models.deletion.SET_NULL, related_name='+', to='executions.apikey')),
                ('tenant', models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, related_name='schedules', to='executions.tenant')),
            ],
            options={
                'ordering': ('-id',),
                'permissions': (('pause_schedule', 'Can pause schedules'),),
                'indexes': [models.Index(condition=models.Q(('next_at__isnull', False)), fields=['next_at'], name='schedule_due')],
                'constraints': [models.CheckConstraint(condition=models.Q(models.Q(('next_at__isnull', False), ('paused_because', '')), models.Q(models.Q(('paused_because', ''), _negated=True), ('next_at', None)), _connector='OR'), name='schedule_is_due_or_paused')],
            },
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
