"""Install common packages for programs in Python on this machine."""

from __future__ import annotations

from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError

from providers.errors import ProviderUnavailable
from providers.local import packages


class Command(BaseCommand):
    help = (
        "Install numpy, pandas and other common packages for Python programs of the local "
        "provider, in a virtual environment of their own. SANDBOX_LOCAL_PYTHON can name another."
    )
    # It uses neither the database nor a key.
    requires_system_checks = []

    def handle(self, *args: Any, **options: Any) -> None:
        folder = settings.PACKAGES_DIR
        try:
            packages.create(folder)
            if packages.is_installed(folder):
                return
            self._say("Packages: installing numpy, pandas and others for Python programs ...")
            packages.install(folder)
        except ProviderUnavailable as error:
            raise CommandError(f"Packages: {error.message}") from None
        except packages.InstallationFailed as error:
            raise CommandError(
                f"Packages: Python programs have only the standard library, because the "
                f"installation failed: {error}. `manage.py packages` tries again."
            ) from None
        names = ", ".join(packages.look(folder).versions)
        self._say(f"Packages: Python programs can import {names}")

    def _say(self, text: str) -> None:
        self.stdout.write(text)
        self.stdout.flush()
