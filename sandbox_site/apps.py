from django.apps import AppConfig


class SandboxSiteConfig(AppConfig):
    name = "sandbox_site"
    verbose_name = "Cofferdam"

    def ready(self) -> None:
        from sandbox_site import checks  # noqa: F401  registers the checks
        from sandbox_site.accounts import guard_accounts

        guard_accounts()
