from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from providers.checks import BEFORE_WORK
from providers.errors import InvalidConfiguration
from providers.services.exchange import import_settings


class Command(BaseCommand):
    requires_system_checks = BEFORE_WORK
    help = (
        "Configure providers from the sandbox.* records of a system_settings.json, all or none. "
        "Prints what was done as JSON."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("file", help='the file, or "-" for standard input')
        parser.add_argument("--reason", default="", help="the reason, stored with each version")

    def handle(self, *args: Any, **options: Any) -> None:
        source = options["file"]
        try:
            text = sys.stdin.read() if source == "-" else Path(source).read_text(encoding="utf-8")
            document = json.loads(text)
        except OSError as error:
            raise CommandError(f"{source}: {error.strerror}") from None
        except ValueError:
            raise CommandError(f"{source} is not JSON.") from None
        reason = options["reason"] or f"Imported from {Path(source).name}."
        try:
            imported = import_settings(document, author="command:import_settings", reason=reason)
        except InvalidConfiguration as error:
            raise CommandError(error.message) from None
        self.stdout.write(json.dumps(asdict(imported)))
