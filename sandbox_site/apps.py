import sys

import django_stubs_ext
from django.apps import AppConfig

# Our dependencies load these where they are installed, and nothing here uses them: the fields of
# PostgreSQL alone, which load psycopg, and httpx's command line with all that it colours. Each
# installation would hold 8 MiB for them. They count as not installed, before anything imports them.
for _name in ("django.contrib.postgres.fields", "httpx._main"):
    sys.modules.setdefault(_name, None)  # type: ignore[arg-type]

# Lets annotations such as ModelAdmin[Tenant] stand where Python evaluates them. This app is the
# first, so that it holds for the modules of all. Settings are read by processes without apps too.
django_stubs_ext.monkeypatch()


class SandboxSiteConfig(AppConfig):
    name = "sandbox_site"
    verbose_name = "Cofferdam"

    def ready(self) -> None:
        from sandbox_site import checks  # noqa: F401  registers the checks
        from sandbox_site.accounts import guard_accounts

        guard_accounts()
