from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db.models import Q

from executions.capabilities.search.export import FORMATS, export
from executions.kernel.text import first_uuid7
from executions.ledger.append import append
from executions.runs.models import Execution
from providers.admin_lists import SLACK
from providers.checks import BEFORE_WORK

_FIRST, _LAST = datetime(1970, 1, 1, tzinfo=UTC), datetime(9999, 1, 1, tzinfo=UTC)


class Command(BaseCommand):
    requires_system_checks = BEFORE_WORK
    help = (
        "Export executions, oldest first, in bounded memory. The export is entered in the ledger."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("file", help="where to write; - is standard output")
        parser.add_argument("--format", choices=FORMATS, default="csv")
        parser.add_argument("--tenant", help="a tenant's slug")
        parser.add_argument("--status", choices=Execution.Status.values)
        parser.add_argument("--provider")
        parser.add_argument("--language")
        parser.add_argument("--since", type=_moment, metavar="DATE", help="ISO 8601, UTC if bare")
        parser.add_argument("--until", type=_moment, metavar="DATE")
        parser.add_argument(
            "--bodies", action="store_true", help="code, output and results as well"
        )

    def handle(self, *args: Any, **options: Any) -> None:
        lookups = {
            "tenant_slug": options["tenant"],
            "status": options["status"],
            "provider": options["provider"],
            "language": options["language"],
            "created_at__gte": options["since"],
            "created_at__lt": options["until"],
        }
        chosen = {name: value for name, value in lookups.items() if value is not None}
        executions = Execution.objects.filter(
            *id_bounds(options["since"], options["until"]), **chosen
        )
        content = {
            "format": options["format"],
            "bodies": options["bodies"],
            "filters": {name: str(value) for name, value in chosen.items()},
        }
        append("export", "executions", content)
        pieces = export(executions, options["format"], bodies=options["bodies"])
        if options["file"] == "-":
            for piece in pieces:
                sys.stdout.buffer.write(piece)
            return
        try:
            with open(options["file"], "xb", opener=_private) as stream:
                for piece in pieces:
                    stream.write(piece)
        except OSError as error:
            raise CommandError(f"{options['file']}: {error.strerror}") from error


def id_bounds(since: datetime | None, until: datetime | None) -> Iterator[Q]:
    """Yield the same times as bounds of ids, which hold the time they were made: no index is of
    the times."""
    if since is not None:
        yield Q(pk__gte=first_uuid7(max(since, _FIRST + SLACK) - SLACK))
    if until is not None:
        yield Q(pk__lt=first_uuid7(max(min(until, _LAST), _FIRST) + SLACK))


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _moment(text: str) -> datetime:
    moment = datetime.fromisoformat(text)
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)
