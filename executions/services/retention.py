"""Erasing what need not be kept any longer, and keeping the proof of what it was.

Bodies go, hashes stay; of a record that goes as a whole the ledger's entry stays. An erasure is
entered in the ledger before anything is gone for good, so that the verifier tells it from a
deletion behind our back. What is on legal hold stays.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import reduce
from operator import or_

from django.conf import settings
from django.core.exceptions import SuspiciousOperation
from django.db import transaction
from django.db.models import Exists, OuterRef, Q, QuerySet
from django.utils import timezone

from executions.kernel.batches import delete_in_batches, let_others_write
from executions.kernel.text import first_uuid7
from executions.ledger.append import append
from executions.ledger.entry_format import moment
from executions.ledger.executions import ERASURE
from executions.ledger.models import LedgerEntry
from executions.models.approval import Approval
from executions.models.tool_call import ToolCall
from executions.runs.late_results import erase_late_results
from executions.runs.models import Artifact, Execution, ExecutionEvent
from executions.services.code_search import forget_code
from executions.services.holds import Held, held_by_ledger, held_of
from executions.tenants.models import Tenant

logger = logging.getLogger(__name__)

# Each may hold several hundred kilobytes.
BATCH = 100
# Of one transaction, or a single execution: SQLite has one lock, and others wait for it. What is
# held is asked for each.
BATCH_BYTES = 32 * 1024
AT_ONCE = 20
KINDS = ("code", "output", "artifacts", "records")
_TEXTS = {
    "code": ("code", "arguments", "on_behalf_of"),
    "output": ("stdout", "stderr", "result", "outputs", "exception"),
}


@dataclass
class Erasure:
    """What of one tenant and one kind of data was erased, or would be, and what was not."""

    tenant: str
    data: str
    created_before: datetime
    held: Held = field(default_factory=Held)
    executions: int = 0
    bytes: int = 0


def apply_retention(
    *, dry_run: bool = False, report: Callable[[Erasure], None] = lambda erasure: None
) -> list[Erasure]:
    """Erase everything whose time is over. Running it again does only what is left."""
    now, by_ledger = timezone.now(), held_by_ledger(thorough=True)
    found = []
    for tenant_slug, data, days in _rules():
        held = held_of(tenant_slug, by_ledger.get(tenant_slug, Held()))
        erasure = Erasure(tenant_slug, data, now - timedelta(days=days), held)
        if held.everything:
            logger.info("%s is on legal hold: its %s is kept", tenant_slug, data)
            continue
        if data == "output" and not dry_run:
            erase_late_results(tenant_slug, erasure.created_before, but_of=held.executions)
        if _erase(erasure, dry_run, report).executions:
            found.append(erasure)
    return found


def records_erased_until() -> datetime | None:
    """Of what was made before then whole records may be gone; None where none ever was erased."""
    stated = (entry.stated for entry in LedgerEntry.objects.filter(kind=ERASURE).iterator())
    found = [each["created_before"] for each in stated if each["data"] == "records"]
    return datetime.fromisoformat(max(found)) if found else None


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
                floor = settings.SANDBOX_RECORDS_FLOOR_DAYS if data == "records" else 0
                yield slug, data, max(days, floor)


def _erase(erasure: Erasure, dry_run: bool, report: Callable[[Erasure], None]) -> Erasure:
    due = _due(erasure)
    if not dry_run and not _enter(erasure, due.count()):
        return erasure
    after = None
    while batch := list((due.filter(pk__gt=after) if after else due).order_by("pk")[:BATCH]):
        after = batch[-1].pk
        sizes = {execution.pk: _size(execution, erasure.data) for execution in batch}
        erased = batch if dry_run else _erase_batch(erasure, batch)
        erasure.executions += len(erased)
        erasure.bytes += sum(sizes[execution.pk] for execution in erased)
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
            "held": sorted(map(str, erasure.held.executions)),
        }
        append(ERASURE, erasure.tenant, content)
    return executions > 0


def _due(erasure: Erasure) -> QuerySet[Execution]:
    """Ended executions with something left to erase, found by what their ids say of their time."""
    texts = _TEXTS.get(erasure.data)
    holds: Q
    if erasure.data == "records":
        holds = Q()
    elif texts is None:
        kept = Artifact.objects.filter(execution=OuterRef("pk")).exclude(file="")
        holds = Q(artifact_count__gt=0) & Q(Exists(kept))
    else:
        # Null is no text, and not more than the empty one.
        holds = reduce(or_, (Q(**{f"{name}__gt": ""}) for name in texts))
        if erasure.data == "output":
            # What calls of tools were given and answered, also where nothing else came of the run.
            said = ToolCall.objects.filter(
                Q(arguments__gt="") | Q(answer__gt=""), execution=OuterRef("pk")
            )
            holds |= Q(Exists(said))
    return (
        Execution.objects.filter(
            holds,
            Q(run_at=None) | Q(run_at__lt=erasure.created_before),
            tenant_slug=erasure.tenant,
            pk__lt=first_uuid7(erasure.created_before),
            created_at__lt=erasure.created_before,
            finished_at__isnull=False,
        )
        .exclude(pk__in=erasure.held.executions)
        .only("pk", "code_hash", *(texts or ()))
    )


def _erase_batch(erasure: Erasure, batch: list[Execution]) -> list[Execution]:
    """Erase this of them, a few in each transaction. Those of which it is gone now."""
    erased = []
    for few in _few_at_once(erasure.data, batch):
        # What was put on hold since it was entered what goes.
        held = held_of(erasure.tenant)
        few = [each for each in few if not held.everything and each.pk not in held.executions]
        if erasure.data in ("artifacts", "records"):
            few = [execution for execution in few if _erase_artifacts(execution)]
        if erasure.data != "artifacts":
            _erase_rows(erasure.data, few)
            let_others_write()
        erased += few
    return erased


def _erase_rows(data: str, few: list[Execution]) -> None:
    """Empty these texts of them, or remove them; what the ledger says of them stays."""
    ids = [execution.pk for execution in few]
    rows = Execution.objects.filter(pk__in=ids)
    if data == "records":
        _remove_records(few)
        return
    with transaction.atomic():
        if data == "code":
            forget_code({execution.code_hash for execution in few}, but_of=ids)
        rows.update(**dict.fromkeys(_TEXTS[data], ""))
        if data == "output":
            ToolCall.objects.filter(execution__in=ids).update(arguments="", answer="")
        if data == "code":
            # They name what a policy found, in the code's own words.
            Approval.objects.filter(execution__in=ids).update(findings=[])


def _remove_records(few: list[Execution]) -> None:
    """One in each transaction, with what belongs to it. Its program leaves the index before, as
    that takes its time; its events too, which are no part of the record.
    """
    ids = [execution.pk for execution in few]
    delete_in_batches(ExecutionEvent.objects.filter(execution__in=ids))
    for execution in few:
        forget_code({execution.code_hash}, but_of=ids)
        let_others_write()
        Execution.objects.filter(pk=execution.pk).delete()
        let_others_write()


def _erase_artifacts(execution: Execution) -> bool:
    """The bytes go first, and their names when they are gone: what fails is tried the next time."""
    kept = execution.artifacts.exclude(file="")
    try:
        for artifact in kept:
            artifact.file.storage.delete(str(artifact.file.name))
    except (OSError, SuspiciousOperation):
        logger.exception("artifacts of execution %s could not be removed", execution.pk)
        return False
    kept.update(file="")
    return True


def _few_at_once(data: str, batch: list[Execution]) -> Iterator[list[Execution]]:
    few: list[Execution] = []
    size = 0
    for execution in batch:
        one = _size(execution, data) if data in _TEXTS else 0
        if few and (size + one > BATCH_BYTES or len(few) == AT_ONCE):
            yield few
            few, size = [], 0
        few.append(execution)
        size += one
    if few:
        yield few


def _size(execution: Execution, data: str) -> int:
    if data == "records":
        return 0
    if data == "artifacts":
        return sum(artifact.size_bytes for artifact in execution.artifacts.all() if artifact.file)
    return sum(len((getattr(execution, name) or "").encode()) for name in _TEXTS[data])
