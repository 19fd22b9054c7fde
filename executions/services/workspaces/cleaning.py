"""Workspaces that go: those of sessions that have ended go with them, where that is set."""

from __future__ import annotations

import logging
from uuid import UUID

from django.conf import settings
from django.db import transaction

from executions.ledger.bound_rows import enter_row, look_at
from executions.models.session import Session
from executions.models.workspace import Workspace
from executions.services.holds import held_of
from executions.services.workspaces import blobs, drafts

logger = logging.getLogger(__name__)

_AT_ONCE = 200


def clean(session_id: UUID) -> bool:
    """Remove what is saved of a session that has ended. Whether this call did.

    From the first transaction on nobody has it. Its rows go in those after it; bytes that storage
    does not let go of now go later.
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
        # Before anything is entered in the ledger, which all wait for.
        drafts.detach(workspace)
        files = workspace.files
        enter_row(Session.objects.get(pk=session_id), "cleaned", before, {"files": files})
    logger.info("the %s saved files of session %s were removed", files, session_id)
    blobs.remove_unnamed(workspace.tenant_id, drafts.discard(workspace.pk))
    return True


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
