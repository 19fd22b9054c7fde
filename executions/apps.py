from django.apps import AppConfig


class ExecutionsConfig(AppConfig):
    name = "executions"
    default_auto_field = "django.db.models.BigAutoField"
    verbose_name = "Executions"

    def ready(self) -> None:
        from executions import (
            checks,  # noqa: F401  registers the checks
            receivers,
        )

        receivers.connect()
