"""Retention: what is erased when, stored files compared with rows, the database's size, and the
removal of a tenant.

A tenant may have more rows than one transaction may write. So its removal is a mark in its row,
which takes a second person where the rule holds. What it has goes after that, and its row last.
A process that dies in between leaves the mark, and the next one goes on.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import reduce
from itertools import islice
from operator import or_
from typing import Any
from uuid import UUID

from django.conf import settings
from django.core.exceptions import SuspiciousOperation
from django.db import connection, transaction
from django.db.models import Exists, ManyToOneRel, Model, OuterRef, Q, QuerySet
from django.utils import timezone

from executions.capabilities.network.models import NetworkAttempt, NetworkCredential
from executions.capabilities.retention.capability import keep_held_tenant
from executions.capabilities.schedules.models import Schedule
from executions.capabilities.search.service import forget_code
from executions.capabilities.templates.models import Template, TemplateVersion
from executions.capabilities.tools.models import ToolCall
from executions.capabilities.webhooks.models import WebhookDelivery, WebhookSecret
from executions.kernel import database
from executions.kernel.database import delete_in_batches, keys_of, let_others_write
from executions.kernel.storage import ARTIFACTS, WORKSPACES, Entry, file_store
from executions.kernel.text import first_uuid7
from executions.ledger.append import append
from executions.ledger.entry import moment
from executions.ledger.erasures import ERASURE, Held, hold_scope, hold_scopes_in_ledger
from executions.ledger.models import LedgerEntry
from executions.runs import payloads
from executions.runs.models import Approval, Artifact, Execution, ExecutionEvent, LateResult
from executions.sessions.models import Blob, LooseFile, Session, Snapshot, Workspace
from executions.sessions.storage import blobs, drafts
from executions.tenants.models import ApiKey, Tenant
from providers.services.guarded_rows import NotAllowed, keep_versions
from providers.services.history import SYSTEM
from providers.services.row_changes import collecting

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
    now, by_ledger = timezone.now(), hold_scopes_in_ledger(thorough=True)
    found = []
    for tenant_slug, data, days in _rules():
        held = hold_scope(tenant_slug, by_ledger.get(tenant_slug, Held()))
        erasure = Erasure(tenant_slug, data, now - timedelta(days=days), held)
        if held.everything:
            logger.info("%s is on legal hold: its %s is kept", tenant_slug, data)
            continue
        if data == "output" and not dry_run:
            erase_late_results(tenant_slug, erasure.created_before, but_of=held.executions)
        if data == "records" and not dry_run:
            # Those of a run go with its record.
            delete_in_batches(
                NetworkAttempt.objects.filter(
                    execution=None,
                    tenant_slug=tenant_slug,
                    pk__lt=first_uuid7(erasure.created_before),
                )
            )
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
        held = hold_scope(erasure.tenant)
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


_BATCH = 500
# A file is written before its row.
ORPHAN_SECONDS = 600
# Differences that are named; more are counted.
MOST_NAMED = 100


@dataclass
class Differences:
    """`number` of them, and the first ones by name."""

    number: int = 0
    names: list[str] = field(default_factory=list)

    def add(self, name: str) -> None:
        self.number += 1
        if self.number <= MOST_NAMED:
            self.names.append(name)


@dataclass
class Comparison:
    """What was compared, and what has no counterpart. Queued requests are named `queue/...`."""

    files: int = 0
    rows: int = 0
    without_row: Differences = field(default_factory=Differences)
    without_bytes: Differences = field(default_factory=Differences)
    removed: int = 0

    @property
    def is_same(self) -> bool:
        return not (self.without_row.number - self.removed or self.without_bytes.number)


def compare_storage(
    *, remove: bool = False, report: Callable[[Comparison], None] = lambda comparison: None
) -> Comparison:
    """Read all names of both, a batch at a time. `remove` deletes the files that no row names.

    Works while the service goes on. `report` is called after each batch. Raises OSError where the
    storage cannot be read.
    """
    found = Comparison()
    oldest = time.time() - ORPHAN_SECONDS
    for entries in _batches(file_store(ARTIFACTS).entries()):
        found.files += len(entries)
        for name in _without_row([each.name for each in entries if each.modified < oldest]):
            found.without_row.add(f"{ARTIFACTS}/{name}")
            if remove:
                file_store(ARTIFACTS).delete(name)
                found.removed += 1
        report(found)
    for name in payloads.orphans():
        found.without_row.add(f"queue/{name}")
        if remove:
            payloads.remove(name)
            found.removed += 1
    after = 0
    rows = Artifact.objects.exclude(file="").order_by("pk")
    while batch := list(rows.filter(pk__gt=after)[:_BATCH]):
        after = batch[-1].pk
        found.rows += len(batch)
        for artifact in batch:
            if _is_missing(artifact):
                found.without_bytes.add(f"{ARTIFACTS}/{artifact.file.name}")
        report(found)
    for execution_id in payloads.missing_payloads():
        found.without_bytes.add(f"queue/{execution_id.hex}")
    _compare_workspaces(found, oldest, remove=remove, report=report)
    return found


def _compare_workspaces(
    found: Comparison, oldest: float, *, remove: bool, report: Callable[[Comparison], None]
) -> None:
    storage = file_store(WORKSPACES)
    for entries in _batches(storage.entries()):
        found.files += len(entries)
        names = {each.name for each in entries if each.modified < oldest}
        # As a file lives: between two of these it may become a blob, and a blob that goes is loose.
        for model in (LooseFile, Blob, LooseFile):
            names -= set(model.objects.filter(file__in=names).values_list("file", flat=True))
        for name in sorted(names):
            found.without_row.add(f"{WORKSPACES}/{name}")
            if remove:
                storage.delete(name)
                found.removed += 1
        report(found)
    after = 0
    rows = Blob.objects.order_by("pk")
    while batch := list(rows.filter(pk__gt=after)[:_BATCH]):
        after = batch[-1].pk
        found.rows += len(batch)
        for blob in batch:
            # It may have been removed just now.
            missing = not storage.exists(str(blob.file))
            if missing and Blob.objects.filter(pk=blob.pk, file=str(blob.file)).exists():
                found.without_bytes.add(f"{WORKSPACES}/{blob.file}")
        report(found)


def _batches(entries: Iterator[Entry]) -> Iterator[list[Entry]]:
    while batch := list(islice(entries, _BATCH)):
        yield batch


def _without_row(names: Iterable[str]) -> list[str]:
    """A name begins with its execution's id, by which the rows are found.

    An open one may wait in the journal with what came of it, and get its rows only then.
    """
    of_executions: dict[str, UUID | None] = {}
    for name in names:
        _, _, rest = name.partition("/")
        try:
            of_executions[name] = UUID(hex=rest.partition("/")[0])
        except ValueError:
            of_executions[name] = None
    ids = {execution_id for execution_id in of_executions.values() if execution_id}
    # Asked first: whoever ends one writes its rows with that.
    unended = Execution.objects.filter(pk__in=ids, finished_at=None)
    waiting = set(unended.values_list("pk", flat=True))
    rows = Artifact.objects.filter(execution__in=ids).exclude(file="")
    known = set(rows.values_list("file", flat=True))
    return [name for name, pk in of_executions.items() if name not in known and pk not in waiting]


def _is_missing(artifact: Artifact) -> bool:
    name = str(artifact.file.name)
    # It may have been erased just now.
    return (
        not file_store(ARTIFACTS).exists(name)
        and Artifact.objects.filter(pk=artifact.pk).exclude(file="").exists()
    )


# A slice of 256 KiB takes some milliseconds. In between, others write.
SLICE_PAGES = 64
PAUSE_SECONDS = 0.02
MOST_SECONDS = 20.0
# Left for what is written next, which would only make the file larger again.
SPARE_PAGES = 2048


@dataclass(frozen=True)
class Sizes:
    """Of the database: its pages, how many of them are free, and its log in bytes."""

    page_bytes: int
    pages: int
    free_pages: int
    log_bytes: int


def sizes() -> Sizes:
    """As they are now. For SQLite only."""
    with connection.cursor() as cursor:

        def pragma(name: str) -> int:
            cursor.execute(f"PRAGMA {name}")
            return int(cursor.fetchone()[0])

        log = f"{connection.settings_dict['NAME']}-wal"
        return Sizes(
            pragma("page_size"),
            pragma("page_count"),
            pragma("freelist_count"),
            os.path.getsize(log) if os.path.exists(log) else 0,
        )


def give_space_back(most_seconds: float = MOST_SECONDS) -> int:
    """Shorten the database and its log, as far as `most_seconds` allow. Bytes that were freed."""
    if connection.vendor != "sqlite" or connection.in_atomic_block:
        return 0
    before = sizes()
    deadline = time.monotonic() + most_seconds
    free = before.free_pages
    while free > SPARE_PAGES and time.monotonic() < deadline:
        pages = min(SLICE_PAGES, free - SPARE_PAGES)
        # As a script, which is stepped to its end: each step gives back one page.
        connection.connection.executescript(f"PRAGMA incremental_vacuum({pages})")
        free -= pages
        time.sleep(PAUSE_SECONDS)
    if before.log_bytes > settings.SQLITE_JOURNAL_BYTES or before.free_pages > SPARE_PAGES:
        _shorten_log()
    after = sizes()
    pages_freed = max(0, before.pages - after.pages)
    return pages_freed * before.page_bytes + max(0, before.log_bytes - after.log_bytes)


def _shorten_log() -> None:
    """Have the log written into the database and cut off, unless somebody reads or writes."""
    with connection.cursor() as cursor:
        cursor.execute("PRAGMA busy_timeout")
        patience = int(cursor.fetchone()[0])
        # It would keep writers out while it waits for readers.
        cursor.execute("PRAGMA busy_timeout = 50")
        try:
            # Most of it is written beside writers; cutting it off keeps them out for the rest.
            cursor.execute("PRAGMA wal_checkpoint(PASSIVE)")
            cursor.fetchall()
            cursor.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            cursor.fetchall()
        finally:
            cursor.execute(f"PRAGMA busy_timeout = {patience}")


_BODIES = ("result", "outputs", "stdout", "stderr")


def erase_late_results(
    tenant_slug: str, created_before: datetime, *, but_of: Collection[UUID] = ()
) -> int:
    """Erase what programs of the tenant printed and returned. How many rows had some of it.

    Each change is entered, so that the ledger tells it from one behind our back.
    """
    due = LateResult.objects.filter(
        # What was asked for at a later time is kept from then on.
        Q(execution__run_at=None) | Q(execution__run_at__lt=created_before),
        execution__tenant_slug=tenant_slug,
        execution__created_at__lt=created_before,
    ).exclude(**dict.fromkeys(_BODIES, ""))
    due = due.exclude(execution__in=but_of)
    erased = 0
    # A page at a time: while something is being read, nothing else can be written here.
    for pk in keys_of(due):
        late = due.filter(pk=pk).first()
        if late is None:
            continue
        # What was put on hold since this began.
        held = hold_scope(tenant_slug)
        if held.everything or late.execution_id in held.executions:
            continue
        for name in _BODIES:
            setattr(late, name, "")
        late.save(update_fields=_BODIES)
        erased += 1
        let_others_write()
    return erased


# Of one call: who asked for the removal waits for the first.
REQUEST_SECONDS = 1.0
TASK_SECONDS = 30.0

Goes = Callable[[], bool]


def begin(tenant: Tenant) -> None:
    """Close a tenant for its callers, and mark it for removal. Raises OnHold."""
    if tenant.removal_began_at is not None:
        return
    keep_held_tenant(tenant)
    tenant.is_active = False
    tenant.removal_began_at = timezone.now()
    tenant.save(update_fields=["is_active", "removal_began_at"])


def check_mark(tenant: Tenant) -> None:
    """Before a tenant is saved: raise NotAllowed where it would be kept although it is being
    removed, or made anew as one that is, and OnHold for the mark of one that is on hold.
    """
    known = Tenant.objects.filter(pk=tenant.pk).values_list("removal_began_at", flat=True).first()
    if known is not None and tenant.removal_began_at is None:
        raise NotAllowed(f"{tenant.slug} is being removed. Create a new tenant after that.")
    if known is None and tenant.removal_began_at is not None:
        if tenant._state.adding:
            raise NotAllowed("It was being removed in this version. Restore an earlier one.")
        keep_held_tenant(tenant)


def go_on(seconds: float = TASK_SECONDS) -> int:
    """Remove what the marked tenants have, for about so long. How many of them are gone."""
    end = time.monotonic() + seconds
    marked = Tenant.objects.filter(removal_began_at__isnull=False).order_by("removal_began_at")
    return sum(_remove(tenant, lambda: time.monotonic() < end) for tenant in marked)


def _remove(tenant: Tenant, is_time: Goes) -> bool:
    """Remove its rows while there is time, and then the tenant. Whether it is gone."""

    def goes() -> bool:
        held = hold_scope(tenant.slug)
        if held.everything or held.executions:
            logger.warning("%s is under a legal hold: its removal is suspended", tenant.slug)
            return False
        return is_time()

    for step in (_free, _remove_files, _remove_own):
        if not goes():
            return False
        step(tenant, goes)
    return goes() and _remove_row(tenant)


def _free(tenant: Tenant, goes: Goes) -> None:
    """Records stay, and are of no tenant any more; they have its slug. What tells others of them
    goes.
    """
    for model in (Execution, Session):
        _update(model.objects.filter(tenant=tenant), goes, tenant=None, api_key=None)

    _update(NetworkAttempt.objects.filter(tenant=tenant), goes, tenant=None)

    def delete(keys: Sequence[Any]) -> None:
        WebhookDelivery.objects.filter(pk__in=keys).delete()

    deliveries = WebhookDelivery.objects.filter(tenant=tenant)
    database.in_batches(_while(goes, deliveries), delete)


def _remove_files(tenant: Tenant, goes: Goes) -> None:
    for pk in _while(goes, Workspace.objects.filter(tenant=tenant), 1):
        with transaction.atomic():
            found = Workspace.objects.select_for_update(of=("self",)).filter(pk=pk).first()
            if found is None:
                continue
            Snapshot.objects.filter(workspace=pk).update(workspace=None)
            drafts.detach(found)
        blobs.remove_unnamed(tenant.pk, drafts.discard(pk))
    _update(Snapshot.objects.filter(tenant=tenant), goes, tenant=None)
    # What is about to be named, or somebody has a link to, is collected when its time is over.
    _update(Blob.objects.filter(tenant=tenant), goes, tenant=None)
    _update(LooseFile.objects.filter(tenant=tenant), goes, tenant=None)


def _remove_own(tenant: Tenant, goes: Goes) -> None:
    """One in each transaction: each is entered in the ledger, for which others wait."""
    owned: Sequence[QuerySet[Any]] = (
        Schedule.objects.filter(tenant=tenant),
        TemplateVersion.objects.filter(template__tenant=tenant).defer("log"),
        Template.objects.filter(tenant=tenant),
        WebhookSecret.objects.filter(tenant=tenant),
        # By its slug, which may be another tenant's later.
        NetworkCredential.objects.filter(tenant_slug=tenant.slug).defer("value"),
        ApiKey.objects.filter(tenant=tenant),
    )
    for rows in owned:
        for pk in _while(goes, rows, 1):
            with transaction.atomic():
                _delete(rows.select_for_update(of=("self",)).filter(pk=pk).first())
            database.let_others_write()


def _remove_row(tenant: Tenant) -> bool:
    """Remove the tenant itself, unless something of it was added meanwhile."""
    with transaction.atomic():
        found = Tenant.objects.select_for_update()
        row = found.filter(pk=tenant.pk, removal_began_at__isnull=False).first()
        if row is None or has_rows(row) or _has_credentials(row):
            return False
        _delete(row)
    logger.info("the tenant %s was removed", tenant.slug)
    return True


def _has_credentials(tenant: Tenant) -> bool:
    return NetworkCredential.objects.filter(tenant_slug=tenant.slug).exists()


def has_rows(tenant: Tenant) -> bool:
    """Whether there are rows of it beside its own and those that it has one of."""
    return any(
        relation.related_model._base_manager.filter(**{relation.field.name: tenant}).exists()
        for relation in Tenant._meta.get_fields(include_hidden=True)
        if isinstance(relation, ManyToOneRel) and relation.one_to_many
    )


def _delete(row: Model | None) -> None:
    """Within a transaction: delete a row, and keep as a version what it was."""
    if row is None:
        return
    with collecting() as touched:
        row.delete()
    keep_versions(touched.changes(), SYSTEM, "Removed with its tenant.")


def _update(rows: QuerySet[Any], goes: Goes, **values: Any) -> None:
    def write(keys: Sequence[Any]) -> None:
        rows.filter(pk__in=keys).update(**values)

    database.in_batches(_while(goes, rows), write)


def _while(goes: Goes, rows: QuerySet[Any], every: int = 0) -> Iterator[Any]:
    """The keys of these rows as long as it goes on: asked before each `every` of them, or a
    transaction's.
    """
    for number, key in enumerate(database.keys_of(rows)):
        if number % (every or database.MOST_ROWS) == 0 and not goes():
            return
        yield key
