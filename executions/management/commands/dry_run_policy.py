from __future__ import annotations

import json
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from executions.capabilities.policies.models import Policy
from executions.capabilities.policies.service import (
    DAYS,
    MOST_DAYS,
    MOST_ROWS,
    DryRun,
    dry_run,
    policy_from,
    presets,
)
from executions.tenants.models import Tenant
from providers.checks import BEFORE_WORK


class Command(BaseCommand):
    requires_system_checks = BEFORE_WORK
    help = (
        "Check past executions against a policy, a draft or a preset, and print what it would "
        "have blocked. Nothing is changed."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "policy", help=f"the number of a policy or draft, or a preset: {', '.join(presets())}"
        )
        parser.add_argument(
            "--tenant", default="", help="for a preset: the tenant whose executions are checked"
        )
        parser.add_argument("--days", type=int, default=DAYS)
        parser.add_argument(
            "--seconds", type=float, default=600.0, help="maximum duration of the dry run"
        )
        parser.add_argument(
            "--rows", type=int, default=MOST_ROWS, help="maximum number of executions to check"
        )
        parser.add_argument("--json", action="store_true", help="print the result as JSON")

    def handle(self, *args: Any, **options: Any) -> None:
        days = options["days"]
        if not 0 < days <= MOST_DAYS:
            raise CommandError(f"--days: Must be between 1 and {MOST_DAYS}.")
        run = dry_run(
            self._policy(options["policy"], options["tenant"]),
            days,
            seconds=options["seconds"],
            most_rows=options["rows"],
        )
        if options["json"]:
            self.stdout.write(json.dumps(_as_json(run)))
        else:
            self._print(run)

    def _policy(self, named: str, tenant: str) -> Policy:
        if tenant and not Tenant.objects.filter(slug=tenant).exists():
            raise CommandError(f"There is no tenant {tenant!r}.")
        if named in presets():
            return policy_from(named, tenant)
        found = Policy.objects.filter(pk=named).first() if named.isdecimal() else None
        if found is None:
            raise CommandError(f"There is no policy {named!r}.")
        return found

    def _print(self, run: DryRun) -> None:
        for hit in run.hits:
            line = f"line {hit.line}: " if hit.line else ""
            self.stdout.write(
                f"{hit.execution_id} {hit.tenant_slug} {hit.rule} {line}{ascii(hit.name)[1:-1]}"
            )
        self.stdout.write(
            f"Of {run.executions} executions of the last {run.days} days, {run.blocked} would "
            f"have been blocked, {run.asked} sent for approval, and {run.warned} reported with a "
            f"warning. The code of {run.unknown} is not stored."
        )
        if run.cut:
            until = run.until.isoformat() if run.until else "nothing"
            self.stdout.write(f"INCOMPLETE: {run.cut}. Checked back to {until}.")


def _as_json(run: DryRun) -> dict[str, Any]:
    return {
        **{
            name: getattr(run, name)
            for name in ("days", "executions", "blocked", "asked", "warned")
        },
        "unknown": run.unknown,
        "rules": dict(run.rules),
        "hits": [
            {**vars(hit), "execution_id": str(hit.execution_id), "created_at": str(hit.created_at)}
            for hit in run.hits
        ],
        "until": run.until.isoformat() if run.until else None,
        "cut": run.cut,
    }
