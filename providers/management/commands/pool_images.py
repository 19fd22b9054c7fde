"""Images for the pool service's launchers that need no engine."""

from __future__ import annotations

from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError, CommandParser

from providers.errors import SandboxError
from providers.runtime.service import image_command


class Command(BaseCommand):
    help = image_command.HELP
    # It uses neither the database nor a key.
    requires_system_checks = []

    def add_arguments(self, parser: CommandParser) -> None:
        image_command.add_arguments(parser, settings)

    def handle(self, *args: Any, **options: Any) -> None:
        try:
            image_command.run(settings, options, self.stdout.write)
        except SandboxError as error:
            raise CommandError(error.message) from None
