"""A conversation that goes on in another session: what was kept of it is the new one's."""

from __future__ import annotations

import logging

from django.conf import settings
from django.db import transaction
from django.db.models import F, QuerySet

from executions.models import Session, Workspace
from executions.services.ledger.entering import enter_row
from executions.services.workspaces.restoring import Restored, to_restore

logger = logging.getLogger(__name__)


def kept_of(sessions: QuerySet[Session]) -> Session | None:
    """The newest of these sessions that has saved files, ended or not; None where files go with
    their sessions.
    """
    if settings.DELETE_S3_ON_CLEANUP:
        return None
    found = sessions.filter(workspace__isnull=False).select_related("workspace")
    return found.order_by("-id").first()


def inherit(session: Session) -> list[Restored]:
    """Have what is saved of the last session of its conversation be that of a new one. What its
    sandbox is given.

    It is moved, and so it is counted once, and of several sessions one has it.
    """
    if not session.conversation or session.tenant_id is None:
        return []
    former = kept_of(
        Session.objects.filter(
            tenant=session.tenant_id,
            conversation=session.conversation,
            closed_at__isnull=False,
        )
    )
    if former is None:
        return []
    with transaction.atomic():
        # A session before a workspace, as everywhere.
        rows = Session.objects.select_for_update().defer("env", "ref")
        if rows.filter(pk=session.pk, closed_at=None).first() is None:
            return []
        # The marks and turns were the former's. Who still saves that one finds the version changed.
        won = Workspace.objects.filter(session=former.pk).update(
            session=session.pk,
            version=F("version") + 1,
            mark="",
            missed=[],
            seen_turns=0,
            open_turns=[],
            lost_turns=None,
            problem="",
        )
        if not won:
            return []
        enter_row(Session.objects.get(pk=session.pk), "inherited", {"from": str(former.pk)})
    logger.info("session %s has the saved files of session %s", session.pk, former.pk)
    return to_restore(Workspace.objects.get(session=session.pk))
