"""The pool service: warm sandboxes over HTTP."""

from __future__ import annotations

from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError, CommandParser

from providers.errors import SandboxError
from providers.runtime.service import command


class Command(BaseCommand):
    help = command.HELP
    # It uses neither the database nor a key.
    requires_system_checks = []

    def add_arguments(self, parser: CommandParser) -> None:
        command.add_arguments(parser, settings)

    def handle(self, *args: Any, **options: Any) -> None:
        try:
            command.run(settings, options, self._announce)
        except SandboxError as error:
            raise CommandError(error.message) from None

    def _announce(self, line: str) -> None:
        self.stdout.write(line)
        self.stdout.flush()
