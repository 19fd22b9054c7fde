from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('executions', '0051_alerts_of_each_budget'),
    ]

    operations = [
        migrations.AddField(
            model_name='workspace',
            name='former',
            field=models.UUIDField(editable=False, help_text='The ended session that has it again, if its next one is never opened.', null=True),
        ),
    ]
