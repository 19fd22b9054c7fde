from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from providers import registry
from providers.checks import BEFORE_WORK
from providers.contract import CHECKS, Verdict, examine
from providers.errors import SandboxError
from providers.models import ProviderConfig
from providers.services import stored_config

_SHOWN = {"ok": "ok", "failed": "FAILED", "not offered": "-"}


class Command(BaseCommand):
    requires_system_checks = BEFORE_WORK
    help = (
        "Run the checks of the provider contract against a configured provider, active or not, and "
        "print the results. Runs real code there, about 50 times, at the provider's price. Exits "
        "with 1 if a check fails."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("provider", help="id of the provider, such as local or e2b")
        parser.add_argument("--json", action="store_true", help="one JSON object per check")

    def handle(self, *args: Any, **options: Any) -> None:
        provider_id: str = options["provider"]
        row = ProviderConfig.objects.defer("config").filter(provider_id=provider_id).first()
        try:
            provider_class = registry.get(provider_id)
            provider = provider_class()
            provider.initialize(provider_class.check_config(stored_config(row) or {}))
        except SandboxError as error:
            raise CommandError(f"{error.code}: {error.message}") from None
        verdicts = []
        try:
            for verdict in examine(provider):
                verdicts.append(verdict)
                if options["json"]:
                    self.stdout.write(json.dumps(asdict(verdict)))
        finally:
            provider.close()
        if not options["json"]:
            self._print(verdicts)
        failed = [verdict for verdict in verdicts if verdict.outcome == "failed"]
        if failed:
            raise CommandError(f"{provider_id} fails {len(failed)} of {len(verdicts)} checks.")

    def _print(self, verdicts: list[Verdict]) -> None:
        """The matrix: a line for each promise, a column for each language."""
        languages = list(dict.fromkeys(verdict.language for verdict in verdicts))
        width = max(len(check.name) for check in CHECKS)
        self.stdout.write(" " * width + "".join(f"  {name:>12}" for name in languages))
        found = {(verdict.check, verdict.language): verdict for verdict in verdicts}
        for check in CHECKS:
            cells = [found.get((check.name, language)) for language in languages]
            shown = (_SHOWN[cell.outcome] if cell else "" for cell in cells)
            self.stdout.write(f"{check.name:{width}}" + "".join(f"  {one:>12}" for one in shown))
        for verdict in verdicts:
            if verdict.message:
                self.stdout.write(f"\n{verdict.check}, {verdict.language}: {verdict.message}")
