from django.db import migrations


class Migration(migrations.Migration):

    dependencies = [
        ('executions', '0043_reports'),
    ]

    operations = [
        migrations.AlterModelOptions(
            name='execution',
            options={'ordering': ('-id',), 'permissions': (('export_execution', 'Can export executions'), ('replay_execution', 'Can replay executions'), ('cancel_execution', 'Can cancel executions'), ('use_playground', 'Can run code in the playground'))},
        ),
    ]
