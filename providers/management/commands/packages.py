"""Install common packages for programs in Python on this machine."""

from __future__ import annotations

from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError

from providers.errors import ProviderUnavailable
from providers.local import packages


class Command(BaseCommand):
    help = (
        "Install numpy, pandas and other common packages into an environment that programs in "
        "Python on this machine run with, unless SANDBOX_LOCAL_PYTHON names another one."
    )
    # It uses neither the database nor a key.
    requires_system_checks = []

    def handle(self, *args: Any, **options: Any) -> None:
        folder = settings.PACKAGES_DIR
        try:
            packages.create(folder)
            if packages.is_installed(folder):
                return
            self._say("Packages: installing numpy, pandas and others for programs in Python ...")
            packages.install(folder)
        except ProviderUnavailable as error:
            raise CommandError(f"Packages: {error.message}") from None
        except packages.InstallationFailed as error:
            raise CommandError(
                f"Packages: programs have what Python itself has, since no others could be "
                f"installed: {error}. `manage.py packages` tries again."
            ) from None
        names = ", ".join(packages.look(folder).versions)
        self._say(f"Packages: programs in Python can import {names}")

    def _say(self, text: str) -> None:
        self.stdout.write(text)
        self.stdout.flush()
