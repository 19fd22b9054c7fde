import django.core.validators
from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('executions', '0058_tenant_removal'),
    ]

    operations = [
        migrations.AddField(
            model_name='tenant',
            name='max_artifact_mib',
            field=models.PositiveIntegerField(blank=True, help_text='MiB of each. What is beyond it is left out, and named in the answer. Empty is as the installation has it.', null=True, validators=[django.core.validators.MaxValueValidator(64)], verbose_name='size of an artifact'),
        ),
        migrations.AddField(
            model_name='tenant',
            name='max_artifacts',
            field=models.PositiveIntegerField(blank=True, help_text='Files that it leaves in artifacts/. What is beyond it is left out, and named in the answer. Empty is as the installation has it.', null=True, validators=[django.core.validators.MaxValueValidator(200)], verbose_name='artifacts of a run'),
        ),
        migrations.AddField(
            model_name='tenant',
            name='max_artifacts_mib',
            field=models.PositiveIntegerField(blank=True, help_text='MiB of all of a run. What is beyond it is left out, and named in the answer. Empty is as the installation has it.', null=True, validators=[django.core.validators.MaxValueValidator(64)], verbose_name='size of artifacts'),
        ),
        migrations.AddField(
            model_name='tenant',
            name='max_output_kb',
            field=models.PositiveIntegerField(blank=True, help_text='kB of stdout, and of stderr. What is beyond it is left out, and named in the answer. Empty is as the installation has it.', null=True, validators=[django.core.validators.MaxValueValidator(10000)], verbose_name='output of a run'),
        ),
        migrations.AddField(
            model_name='tenant',
            name='max_outputs',
            field=models.PositiveIntegerField(blank=True, help_text='Values that are shown. What is beyond it is left out, and named in the answer. Empty is as the installation has it.', null=True, validators=[django.core.validators.MaxValueValidator(200)], verbose_name='rich outputs of a run'),
        ),
        migrations.AddField(
            model_name='tenant',
            name='max_outputs_mib',
            field=models.PositiveIntegerField(blank=True, help_text='MiB of all of a run. What is beyond it is left out, and named in the answer. Empty is as the installation has it.', null=True, validators=[django.core.validators.MaxValueValidator(32)], verbose_name='size of rich outputs'),
        ),
    ]
