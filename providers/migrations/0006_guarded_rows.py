from django.db import migrations, models
from django.db.models import F, Q
from django.utils import timezone


def name_the_accounts(apps, schema_editor):
    """Who asked and who decided, by id, where an account of that name is still there."""
    changes = apps.get_model("providers", "PendingChange").objects.using(schema_editor.connection.alias)
    users = apps.get_model("auth", "User").objects.using(schema_editor.connection.alias)
    ids = {f"user:{name}": pk for pk, name in users.values_list("pk", "username")}
    for change in changes.defer("config"):
        changes.filter(pk=change.pk).update(
            author_id=ids.get(change.author), decided_by_id=ids.get(change.decided_by)
        )


class Migration(migrations.Migration):
    dependencies = [
        ("providers", "0005_minimum_isolation"),
        ("auth", "0012_alter_user_first_name_max_length"),
    ]

    operations = [
        migrations.RemoveConstraint("configversion", "providers_version_is_unique"),
        migrations.RenameField("configversion", "provider_id", "subject"),
        migrations.RenameField("pendingchange", "provider_id", "subject"),
        migrations.AlterField(
            "configversion", "subject", models.CharField("what", max_length=64)
        ),
        migrations.AlterField(
            "pendingchange", "subject", models.CharField("what", max_length=64)
        ),
        migrations.AddConstraint(
            "configversion",
            models.UniqueConstraint(
                fields=("subject", "version"), name="providers_version_is_unique"
            ),
        ),
        migrations.AddField(
            "pendingchange", "shown_as", models.CharField(blank=True, default="", max_length=200),
            preserve_default=False,
        ),
        migrations.AddField(
            "configversion",
            "shown_as",
            models.CharField(blank=True, default="", max_length=200),
            preserve_default=False,
        ),
        migrations.AddField("pendingchange", "author_id", models.BigIntegerField(null=True)),
        migrations.AddField("pendingchange", "decided_by_id", models.BigIntegerField(null=True)),
        migrations.RunPython(name_the_accounts, migrations.RunPython.noop),
        migrations.RemoveConstraint("pendingchange", "providers_approved_by_a_second_person"),
        migrations.AddConstraint(
            "pendingchange",
            models.CheckConstraint(
                condition=~Q(status="approved")
                | (~Q(decided_by_id=F("author_id")) & ~Q(decided_by="")),
                name="providers_approved_by_a_second_person",
            ),
        ),
        migrations.CreateModel(
            name="AccountHold",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("account_id", models.BigIntegerField(db_index=True)),
                ("holder_id", models.BigIntegerField()),
                ("created_at", models.DateTimeField(default=timezone.now)),
                ("released_at", models.DateTimeField(null=True)),
            ],
        ),
    ]
