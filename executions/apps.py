from django.apps import AppConfig
from django.db.models.signals import post_migrate


class ExecutionsConfig(AppConfig):
    name = "executions"
    default_auto_field = "django.db.models.BigAutoField"
    verbose_name = "Executions"

    def ready(self) -> None:
        from executions import (
            checks,  # noqa: F401  registers the checks
            receivers,
        )
        from executions.admin.unproven import mark_pages
        from executions.services.roles import ensure_roles

        receivers.connect()
        mark_pages()
        # The last of the apps with permissions, so that all of them are there by then.
        post_migrate.connect(ensure_roles, sender=self, dispatch_uid="roles")
