"""Finding executions by what their code says, wherever in a line and in whatever case.

The index is kept by the workers, a minute behind: in the way of an execution it would cost more
than the ledger does. It holds every program once, however often it was run.
"""

from __future__ import annotations

from collections.abc import Collection
from datetime import timedelta
from uuid import UUID

from django.db import connection, transaction
from django.db.models import Exists, OuterRef, QuerySet
from django.utils import timezone

from executions.ids import first_uuid7
from executions.models import CodeSearchProgress, CodeText, Execution

SHORTEST = 3
# Programs a search looks through the executions of, the newest ones first.
MOST = 5_000
# Of each program.
_CHARACTERS = 100_000
_BATCH = 500
# A row may be committed a little after its id was made.
_SETTLED = timedelta(seconds=10)
_NIL = UUID(int=0)


def search_code(executions: QuerySet[Execution], text: str) -> QuerySet[Execution]:
    """Those whose kept code contains `text`, at least three characters."""
    if len(text) < SHORTEST or "\0" in text:
        return executions.none()
    newest = _programs(text).order_by("-pk").values("code_hash")[:MOST]
    return executions.filter(code_hash__in=newest).exclude(code="")


def index_new_code() -> int:
    """Take in the programs that were run since the last time. How many were new.

    It stops before the oldest execution that has not ended: whether its code is kept shows then.
    """
    with transaction.atomic():
        progress, _ = CodeSearchProgress.objects.select_for_update().get_or_create(
            pk=1, defaults={"before": _NIL}
        )
        until = first_uuid7(timezone.now() - _SETTLED)
        # Not one by one in the order of their ids, for which every row there is would be read.
        still_open = Execution.objects.filter(finished_at=None).order_by("tenant_slug", "status")
        until = min((until, *still_open.values_list("pk", flat=True)))
        added, progress.before = _index(progress.before, until)
        progress.save()
    return added


def forget_code(code_hashes: Collection[str]) -> None:
    """Remove the programs of which no execution keeps the code any more."""
    kept = Execution.objects.filter(code_hash=OuterRef("code_hash")).exclude(code="")
    CodeText.objects.filter(code_hash__in=code_hashes).exclude(Exists(kept)).delete()


def _index(after: UUID, until: UUID) -> tuple[int, UUID]:
    added = 0
    for _ in range(100):
        rows = Execution.objects.filter(pk__gte=after, pk__lt=until).order_by("pk")
        found = list(rows.values_list("pk", "code_hash")[:_BATCH])
        if not found:
            return added, max(after, until)
        missing = {code_hash: pk for pk, code_hash in found}
        for known in CodeText.objects.filter(code_hash__in=missing).values_list(
            "code_hash", flat=True
        ):
            del missing[known]
        programs = Execution.objects.filter(pk__in=missing.values()).exclude(code="")
        texts = [
            CodeText(code_hash=code_hash, code=code[:_CHARACTERS])
            for code_hash, code in programs.values_list("code_hash", "code").iterator(50)
        ]
        CodeText.objects.bulk_create(texts, ignore_conflicts=True, batch_size=50)
        added += len(texts)
        after = UUID(int=found[-1][0].int + 1)
    return added, after


def _programs(text: str) -> QuerySet[CodeText]:
    if connection.vendor == "sqlite":
        phrase = '"' + text.replace('"', '""') + '"'
        return CodeText.objects.extra(
            where=[
                "id IN (SELECT rowid FROM executions_codetext_fts"
                " WHERE executions_codetext_fts MATCH %s)"
            ],
            params=[phrase],
        )
    # Written as UPPER(code) LIKE UPPER(...), which is what the index is over.
    return CodeText.objects.filter(code__icontains=text)
