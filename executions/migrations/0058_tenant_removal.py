from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('executions', '0057_bound_rows_index'),
    ]

    operations = [
        migrations.AddField(
            model_name='tenant',
            name='removal_began_at',
            field=models.DateTimeField(blank=True, editable=False, help_text='Its rows go a few at a time, and it goes with the last of them.', null=True, verbose_name='being removed since'),
        ),
        migrations.AddConstraint(
            model_name='tenant',
            constraint=models.CheckConstraint(condition=models.Q(('removal_began_at', None), ('is_active', False), _connector='OR'), name='tenant_that_goes_is_inactive'),
        ),
    ]
