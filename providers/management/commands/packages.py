"""Install common packages for programs on this machine."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError, CommandParser

from providers.errors import ProviderUnavailable
from providers.local import node_packages, packages


class Command(BaseCommand):
    help = (
        "Install numpy, pandas and other common packages for Python programs of the local "
        "provider, in a virtual environment of their own, and axios and TypeScript for Node.js "
        "where this machine has it. SANDBOX_LOCAL_PYTHON can name another environment."
    )
    # It uses neither the database nor a key.
    requires_system_checks = []

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "--node-from",
            type=Path,
            metavar="FOLDER",
            help="take the npm packages from files in this folder, not from the registry",
        )

    def handle(self, *args: Any, node_from: Path | None = None, **options: Any) -> None:
        folder = settings.PACKAGES_DIR
        try:
            packages.create(folder)
            self._install_python(folder)
        except ProviderUnavailable as error:
            raise CommandError(f"Packages: {error.message}") from None
        except packages.InstallationFailed as error:
            raise CommandError(
                f"Packages: Python programs have only the standard library, because the "
                f"installation failed: {error}. `manage.py packages` tries again."
            ) from None
        if shutil.which("node"):
            self._install_node(folder, node_from)

    def _install_python(self, folder: Path) -> None:
        if packages.is_installed(folder):
            return
        self._say("Packages: installing numpy, pandas and others for Python programs ...")
        packages.install(folder)
        names = ", ".join(packages.look(folder).versions)
        self._say(f"Packages: Python programs can import {names}")

    def _install_node(self, folder: Path, source: Path | None) -> None:
        if node_packages.is_installed(folder):
            return
        try:
            node_packages.install(folder, settings.NPM_REGISTRY_URL, source=source)
        except packages.InstallationFailed as error:
            self._say(
                f"Packages: JavaScript programs have only the modules of Node.js, because the "
                f"installation failed: {error}. `manage.py packages` tries again."
            )
            return
        names = ", ".join(node_packages.versions(folder))
        self._say(f"Packages: JavaScript programs can require {names}")

    def _say(self, text: str) -> None:
        self.stdout.write(text)
        self.stdout.flush()
