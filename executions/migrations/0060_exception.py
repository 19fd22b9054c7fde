from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('executions', '0059_limits_of_runs'),
    ]

    operations = [
        migrations.AddField(
            model_name='execution',
            name='exception',
            field=models.TextField(blank=True, db_default='', default='', help_text='JSON of what ended the program, by its own account: type, message, traceback.'),
        ),
    ]
