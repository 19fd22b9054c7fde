"""The removal of a tenant: closed for its callers at once, and its rows in short transactions.

A tenant may have more rows than one transaction may write. So its removal is a mark in its row,
which takes a second person where the rule holds. What it has goes after that, and its row last.
A process that dies in between leaves the mark, and the next one goes on.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from django.db import transaction
from django.db.models import ManyToOneRel, Model, QuerySet
from django.utils import timezone

from executions.capabilities.retention.capability import keep_held_tenant
from executions.capabilities.schedules.models import Schedule
from executions.capabilities.webhooks.models import WebhookDelivery, WebhookSecret
from executions.kernel import database
from executions.ledger.erasures import hold_scope
from executions.runs.models import Execution
from executions.sessions.models import Blob, LooseFile, Session, Snapshot, Workspace
from executions.sessions.storage import blobs, drafts
from executions.tenants.models import ApiKey, Tenant
from providers.services.guarded_rows import NotAllowed, keep_versions
from providers.services.history import SYSTEM
from providers.services.row_changes import collecting

logger = logging.getLogger(__name__)

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
    for model in (Schedule, WebhookSecret, ApiKey):
        rows: QuerySet[Any] = model._default_manager.filter(tenant=tenant)
        for pk in _while(goes, rows, 1):
            with transaction.atomic():
                _delete(rows.select_for_update(of=("self",)).filter(pk=pk).first())
            database.let_others_write()


def _remove_row(tenant: Tenant) -> bool:
    """Remove the tenant itself, unless something of it was added meanwhile."""
    with transaction.atomic():
        found = Tenant.objects.select_for_update()
        row = found.filter(pk=tenant.pk, removal_began_at__isnull=False).first()
        if row is None or has_rows(row):
            return False
        _delete(row)
    logger.info("the tenant %s was removed", tenant.slug)
    return True


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
