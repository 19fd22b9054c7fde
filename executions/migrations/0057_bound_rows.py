from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('executions', '0052_what_was_inherited'),
    ]

    operations = [
        migrations.AddField(
            model_name='ledgerentry',
            name='bound_row',
            field=models.CharField(editable=False, help_text='The row that the statement is of, as `model key`. Empty for an entry of no row; null for one of an execution, and for one that nobody has filled in yet.', max_length=100, null=True),
        ),
    ]
