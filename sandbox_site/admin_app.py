"""The admin, whose pages are registered once the URLs are loaded.

Most processes have no use for them, and loading them takes as long as all the rest.
"""

from __future__ import annotations

from typing import Any

from django.contrib.admin.apps import SimpleAdminConfig
from django.contrib.admin.checks import check_admin_app, check_dependencies
from django.core import checks


class AdminConfig(SimpleAdminConfig):
    def ready(self) -> None:
        checks.register(_check_pages, checks.Tags.admin)


def _check_pages(app_configs: Any, **options: Any) -> list[checks.CheckMessage]:
    import sandbox_site.urls  # noqa: F401  registers them

    return [
        *check_dependencies(app_configs=app_configs, **options),
        *check_admin_app(app_configs=app_configs, **options),
    ]
