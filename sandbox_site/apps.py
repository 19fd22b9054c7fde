import django_stubs_ext
from django.apps import AppConfig

from sandbox_site.optional_packages import leave_out

# Lets annotations such as ModelAdmin[Tenant] stand where Python evaluates them. This app is the
# first, so that it holds for the modules of all. Settings are read by processes without apps too.
django_stubs_ext.monkeypatch()
leave_out()


class SandboxSiteConfig(AppConfig):
    name = "sandbox_site"
    verbose_name = "Cofferdam"

    def ready(self) -> None:
        from sandbox_site import checks  # noqa: F401  registers the checks
        from sandbox_site.accounts import guard_accounts

        guard_accounts()
