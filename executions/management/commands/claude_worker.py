from __future__ import annotations

import signal
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.utils import timezone

from executions.doors.claude.calls import Place
from executions.doors.claude.serving import Pace
from executions.doors.claude.worker import Worker
from executions.runs import active_runs
from executions.tenants.models import ApiKey
from providers import draining
from providers.checks import BEFORE_WORK
from providers.errors import InvalidConfiguration

_OPTIONS = {
    "template": "a template of the tenant, as NAME or NAME@3",
    "network": "none, open, packages, or hosts with commas between",
    "idle_seconds": "how long an unused session stays awake; the default is 600",
}
MOST_AT_ONCE = 64


class Command(BaseCommand):
    requires_system_checks = BEFORE_WORK
    help = (
        "Serve a self-hosted environment of Claude: its agents' tools run in sessions here, one "
        "for each agent's session. Add the environment and its key with network_credential "
        "--placement claude. Several workers can serve one environment."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("environment", help="the environment, as TENANT/NAME")
        parser.add_argument(
            "--key",
            required=True,
            help="the name of an API key of the tenant, with the scopes execute, sessions, files",
        )
        parser.add_argument(
            "--parallel", type=int, default=4, help="how many agents' sessions it serves at once"
        )
        for name, text in _OPTIONS.items():
            parser.add_argument(f"--{name.replace('_', '-')}", default="", help=text)

    def handle(self, *args: Any, **options: Any) -> None:
        tenant, slash, name = str(options["environment"]).partition("/")
        if not (tenant and slash and name):
            raise CommandError("environment: Must be TENANT/NAME.")
        if not 0 < options["parallel"] <= MOST_AT_ONCE:
            raise CommandError(f"--parallel: Must be 1 to {MOST_AT_ONCE}.")
        place = Place(_key_id(tenant, options["key"]), **{each: options[each] for each in _OPTIONS})
        try:
            place.request()
        except InvalidConfiguration as error:
            raise CommandError(error.message) from None
        pace = Pace(grace=settings.SHUTDOWN_GRACE_SECONDS)
        worker = Worker(tenant, name, place, most=options["parallel"], pace=pace)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: worker.stop())
        signal.signal(signal.SIGQUIT, lambda *_: worker.stop(at_once=True))
        try:
            worker.run()
        finally:
            draining.refuse_new()
            active_runs.shutdown()


def _key_id(tenant: str, name: str) -> int:
    keys = ApiKey.objects.filter(tenant__slug=tenant, name=name).order_by("-pk")
    now = timezone.now()
    for key in keys:
        if key.is_valid(now):
            return key.pk
    raise CommandError(
        f"The tenant {tenant!r} has no valid API key {name!r}. Create it with create_api_key."
    )
