from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('executions', '0039_later_indexes'),
    ]

    operations = [
        migrations.AddField(
            model_name='execution',
            name='observed',
            field=models.CharField(help_text='The kinds of what was seen of it, as `meta` has them, to be found by.', max_length=64, null=True),
        ),
    ]
