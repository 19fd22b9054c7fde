from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('executions', '0035_webhooks'),
    ]

    operations = [
        migrations.AddField(
            model_name='execution',
            name='priority',
            field=models.SmallIntegerField(choices=[(0, 'high'), (1, 'normal'), (2, 'low')], db_default=1, default=1, help_text="Of what is queued, among its tenant's own."),
        ),
    ]
