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
        from executions.models import Budget, Tenant
        from executions.services.actor import current_actor
        from executions.services.roles import ensure_roles
        from providers.guarded import Guarded, guard
        from providers.services import touched

        receivers.connect()
        guard(Guarded(Tenant))
        guard(Guarded(Budget))
        # The last of the apps that name what is guarded.
        touched.connect(current_actor)
        # The last of the apps with permissions, so that all of them are there by then.
        post_migrate.connect(ensure_roles, sender=self, dispatch_uid="roles")
