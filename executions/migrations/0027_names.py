from django.db import migrations, models
from django.db.models import Sum
from django.db.models.functions import Length


def count(apps, schema_editor):
    WorkspaceFile = apps.get_model("executions", "WorkspaceFile")
    Workspace = apps.get_model("executions", "Workspace")
    StoredTotal = apps.get_model("executions", "StoredTotal")
    rows = WorkspaceFile.objects.order_by().annotate(length=Length("path") + Length("target"))
    for workspace, names in rows.values_list("workspace").annotate(names=Sum("length")):
        Workspace.objects.filter(pk=workspace).update(names=names)
    totals = Workspace.objects.order_by().values_list("tenant").annotate(total=Sum("names"))
    for tenant, names in totals:
        StoredTotal.objects.filter(pk=tenant).update(names=names)


class Migration(migrations.Migration):

    dependencies = [
        ('executions', '0026_sessions_found'),
    ]

    operations = [
        migrations.AddField(
            model_name='storedtotal',
            name='names',
            field=models.BigIntegerField(db_default=0, default=0, help_text='Characters of their paths and of what links say.'),
        ),
        migrations.AddField(
            model_name='workspace',
            name='names',
            field=models.PositiveBigIntegerField(db_default=0, default=0, help_text='Characters of its paths and of what links say.'),
        ),
        migrations.RunPython(count, migrations.RunPython.noop),
    ]
