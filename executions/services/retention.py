"""Erasing what need not be kept any longer, and keeping the proof of what it was.

Bodies go, hashes stay. An erasure is entered in the ledger before the bodies are gone for good,
so that the verifier tells it from a deletion behind our back.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta

from django.conf import settings
from django.db import transaction
from django.db.models import Exists, OuterRef, Q, QuerySet
from django.utils import timezone

from executions.ids import first_uuid7
from executions.models import Artifact, Execution, Tenant
from executions.services.code_search import forget_code
from executions.services.ledger import append
from executions.services.ledger.canonical import moment
from executions.services.ledger.records import ERASURE

logger = logging.getLogger(__name__)

# Each may hold several hundred kilobytes.
BATCH = 100
KINDS = ("code", "output", "artifacts")
_TEXTS = {"code": ("code", "arguments"), "output": ("stdout", "stderr", "result", "outputs")}


@dataclass
class Erasure:
    """What of one tenant and one kind of data was erased, or would be."""

    tenant: str
    data: str
    created_before: datetime
    executions: int = 0
    bytes: int = 0


def apply_retention(
    *, dry_run: bool = False, report: Callable[[Erasure], None] = lambda erasure: None
) -> list[Erasure]:
    """Erase everything whose time is over. Running it again does only what is left."""
    now = timezone.now()
    return [
        erasure
        for tenant_slug, data, days in _rules()
        if (
            erasure := _erase(
                Erasure(tenant_slug, data, now - timedelta(days=days)),
                dry_run,
                report,
            )
        ).executions
    ]


def _rules() -> Iterator[tuple[str, str, int]]:
    """Tenant, kind of data and days. What a tenant leaves open is as the installation has it.

    Tenants that are gone are known by their records.
    """
    living = {tenant.slug: tenant for tenant in Tenant.objects.all()}
    recorded = set(Execution.objects.order_by().values_list("tenant_slug", flat=True).distinct())
    for slug in sorted(recorded):
        for data in KINDS:
            days = getattr(living.get(slug), f"keep_{data}_days", None)
            if days is None:
                days = settings.SANDBOX_KEEP_DAYS[data]
            if days:
                yield slug, data, days


def _erase(erasure: Erasure, dry_run: bool, report: Callable[[Erasure], None]) -> Erasure:
    due = _due(erasure)
    if not dry_run and not _enter(erasure, due.count()):
        return erasure
    after = None
    while batch := list((due.filter(pk__gt=after) if after else due).order_by("pk")[:BATCH]):
        after = batch[-1].pk
        erasure.executions += len(batch)
        erasure.bytes += sum(_size(execution, erasure.data) for execution in batch)
        if not dry_run:
            _erase_batch(erasure.data, batch)
        report(erasure)
    return erasure


def _enter(erasure: Erasure, executions: int) -> bool:
    """One entry for all batches, before the first: an erasure that is broken off is continued the
    next time, and in between nothing is gone that no entry speaks of."""
    if executions:
        content = {
            "data": erasure.data,
            "created_before": moment(erasure.created_before),
            "executions": executions,
        }
        append(ERASURE, erasure.tenant, content)
    return executions > 0


def _due(erasure: Erasure) -> QuerySet[Execution]:
    """Ended executions with something left to erase, found by what their ids say of their time."""
    texts = _TEXTS.get(erasure.data)
    if texts is None:
        kept = Artifact.objects.filter(execution=OuterRef("pk")).exclude(file="")
        holds = Q(artifact_count__gt=0) & Q(Exists(kept))
    else:
        holds = ~Q(**dict.fromkeys(texts, ""))
    return Execution.objects.filter(
        holds,
        tenant_slug=erasure.tenant,
        pk__lt=first_uuid7(erasure.created_before),
        created_at__lt=erasure.created_before,
        finished_at__isnull=False,
    ).only("pk", "code_hash", *(texts or ()))


def _erase_batch(data: str, batch: list[Execution]) -> None:
    """One batch in one transaction. Files go last: a row may miss its file, never the reverse."""
    ids = [execution.pk for execution in batch]
    files = []
    with transaction.atomic():
        if texts := _TEXTS.get(data):
            Execution.objects.filter(pk__in=ids).update(**dict.fromkeys(texts, ""))
            if data == "code":
                forget_code({execution.code_hash for execution in batch})
        else:
            artifacts = Artifact.objects.filter(execution__in=ids).exclude(file="")
            files = [(artifact.file.storage, str(artifact.file.name)) for artifact in artifacts]
            artifacts.update(file="")
    for storage, name in files:
        try:
            storage.delete(name)
        except OSError:
            logger.exception("artifact file %s could not be removed", name)


def _size(execution: Execution, data: str) -> int:
    if data == "artifacts":
        return sum(artifact.size_bytes for artifact in execution.artifacts.all() if artifact.file)
    return sum(len(getattr(execution, name).encode()) for name in _TEXTS[data])
