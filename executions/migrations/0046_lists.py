from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('executions', '0045_ledger_check'),
    ]

    operations = [
        migrations.AlterModelOptions(
            name='savedfilter',
            options={'ordering': ('name',), 'permissions': (('share_savedfilter', 'Can share saved filters'),)},
        ),
        migrations.AddField(
            model_name='executioncount',
            name='priced',
            field=models.PositiveBigIntegerField(help_text='Of these, those that have a cost. Null where an older version counted some.', null=True),
        ),
        migrations.AddField(
            model_name='executioncount',
            name='went_on',
            field=models.PositiveBigIntegerField(db_default=0, default=0, help_text='Beside these, what was tried here and went on to another provider.'),
        ),
    ]
