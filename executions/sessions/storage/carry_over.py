"""Files that go over to another session, and the removal of those that nobody has any more."""

from __future__ import annotations

import logging
from uuid import UUID

from django.conf import settings
from django.db import transaction
from django.db.models import F, QuerySet

from executions.ledger.append import enter_row, look_at
from executions.ledger.erasures import hold_scope
from executions.runs.requests import Conflict
from executions.sessions.models import Session, Workspace
from executions.sessions.storage import blobs, drafts
from executions.sessions.storage.archives import Restored, to_restore
from executions.tenants.models import Tenant

logger = logging.getLogger(__name__)


def newest_with_files(sessions: QuerySet[Session]) -> Session | None:
    """Return the newest of these sessions that has saved files, ended or not; None where files go
    with their sessions."""
    if settings.DELETE_S3_ON_CLEANUP:
        return None
    found = sessions.filter(workspace__isnull=False).select_related("workspace")
    return found.order_by("-id").first()


def ended_session_with_files(tenant: Tenant, session_id: UUID) -> Session | None:
    """Return the tenant's session of this id, where it has ended and its files were kept; none of a
    conversation, whose next session has them."""
    return newest_with_files(
        Session.objects.filter(
            tenant=tenant, pk=session_id, conversation="", closed_at__isnull=False
        )
    )


def inherit(session: Session, former: Session | None = None) -> list[Restored]:
    """Have what is saved of a session that has ended be that of a new one: of `former`, or of the
    last one of its conversation. What its sandbox is given.

    It is moved, and so it is counted once, and of several sessions one has it. Raises Conflict
    where another has that of `former` by now.
    """
    if session.tenant_id is None:
        return []
    is_named = former is not None
    if former is None and session.conversation:
        former = newest_with_files(
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
        before = look_at(Session, session.pk)
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
            former=former.pk if is_named else None,
        )
        if not won and is_named:
            raise Conflict("Another session already began with these files.", field="from")
        if not won:
            return []
        mine = Session.objects.get(pk=session.pk)
        enter_row(mine, "inherited", before, {"from": str(former.pk)})
    logger.info("session %s has the saved files of session %s", session.pk, former.pk)
    return to_restore(Workspace.objects.get(session=session.pk))


def give_back(session: Session) -> None:
    """Within a transaction that ends it: have what a session was to begin with, and never had a
    sandbox for, be that of the named one again.
    """
    mine = Workspace.objects.filter(session=session.pk, former__isnull=False).first()
    if mine is None or mine.former is None:
        return
    former = Session.objects.filter(pk=mine.former, workspace__isnull=True).first()
    if former is None:
        return
    before = look_at(Session, former.pk)
    rows = Workspace.objects.filter(pk=mine.pk, session=session.pk)
    if rows.update(session=former.pk, former=None, version=F("version") + 1):
        enter_row(former, "inherited", before, {"from": str(session.pk)})


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
        if hold_scope(workspace.tenant.slug).everything:
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
    held = [slug for slug in slugs if hold_scope(slug).everything]
    left = left.exclude(tenant__slug__in=held).order_by("pk")
    found = left.values_list("session", flat=True)[:_AT_ONCE]
    return sum(clean(session_id) for session_id in found if session_id is not None)
