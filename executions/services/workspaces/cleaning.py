"""Workspaces that go: those of sessions that have ended go with them, where that is set."""

from __future__ import annotations

import logging
from uuid import UUID

from django.conf import settings
from django.db import transaction

from executions.models import Session, Workspace
from executions.services.holds import held_of
from executions.services.ledger.entering import enter_row, look_at
from executions.services.workspaces import blobs, quota

logger = logging.getLogger(__name__)

_AT_ONCE = 200


def clean(session_id: UUID) -> bool:
    """Remove what is saved of a session that has ended. Whether this call did.

    The rows go at once; bytes that storage does not let go of now go later.
    """
    if not settings.DELETE_S3_ON_CLEANUP:
        return False
    with transaction.atomic():
        # A session before a workspace, as everywhere.
        before = look_at(Session, session_id)
        rows = Workspace.objects.select_for_update(of=("self",))
        mine = rows.filter(session=session_id, session__closed_at__isnull=False)
        if (workspace := mine.select_related("tenant").first()) is None:
            return False
        if held_of(workspace.tenant.slug).everything:
            return False
        files, named = drop(workspace)
        enter_row(Session.objects.get(pk=session_id), "cleaned", before, {"files": files})
    logger.info("the %s saved files of session %s were removed", files, session_id)
    blobs.remove_unnamed(workspace.tenant_id, named)
    return True


def drop(workspace: Workspace) -> tuple[int, set[int]]:
    """Remove a workspace whose row the caller's transaction holds. How many rows it had, and the
    blobs that they named, which `blobs.remove_unnamed` is to be asked to remove behind it.

    Before anything is entered in the ledger, which all wait for.
    """
    named = set(workspace.rows.exclude(blob=None).values_list("blob", flat=True))
    # Nothing refers to them that the collecting of what refers to them could find.
    files = workspace.rows.all()._raw_delete(workspace.rows.db)
    quota.reserve(workspace.tenant_id, files=-files, names=-workspace.names)
    workspace.delete()
    return files, named


def clean_ended() -> int:
    """Clean what nobody has cleaned when it ended. How many."""
    if not settings.DELETE_S3_ON_CLEANUP:
        return 0
    left = Workspace.objects.filter(session__closed_at__isnull=False)
    slugs = left.order_by().values_list("tenant__slug", flat=True).distinct()
    held = [slug for slug in slugs if held_of(slug).everything]
    left = left.exclude(tenant__slug__in=held).order_by("pk")
    found = left.values_list("session", flat=True)[:_AT_ONCE]
    return sum(clean(session_id) for session_id in found if session_id is not None)
